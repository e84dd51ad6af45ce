"""The logger of a run: TensorBoard event files, metrics.jsonl and small files beside them.

Pages of TensorBoard's Text tab are Markdown, in which text is escaped so that it is shown literally.

Only rank 0 writes. A log that cannot be written does not stop training: the run warns once, continues, and logs again
as soon as it can. Records are appended whole. When a run resumes from a step, later records are removed.

Everything that this project imports from TensorBoard's packages is imported here. TensorBoard documents no API for
writing events without TensorFlow, so these modules may move in any version; `test_run_log.py` fails if they do. Used
with TensorBoard 2.21 and torch 2.13. The public alternative, `torch.utils.tensorboard.SummaryWriter`, writes in a
thread that ends at the first write error, such as a full disk.
"""

import errno
import json
import math
import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TypeAlias

from google.protobuf.message import DecodeError
from lightning.pytorch.loggers import Logger
from PIL.Image import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor
from torch.utils.tensorboard.summary import hparams, text

from data_module.system.files import atomic_file, json_object, open_in_place
from pipeline.checkpointing.run_folder import EVENT_FILES, EVENTS, METRICS, SUMMARY
from pipeline.runtime.console import say

_HEADER_BYTES, _FOOTER_BYTES = 12, 4
"""A record is its length (8 bytes) with a checksum (4 bytes), the data, and the checksum of the data (4 bytes)."""
MAX_CELL_CHARACTERS = 600
_MARKUP = re.compile(r"[|*_`\[\]\\~#!{}()<>&\n\r]")


class RunLog(Logger):
    """Lightning logger that writes to a run folder, on rank 0 only (`writes`).

    The run continues from `step`, 0 for a new run, with that step's validation if `validation_pending`.
    """

    def __init__(self, run: Path, step: int, writes: bool, validation_pending: bool = False) -> None:
        super().__init__()
        self.run = run
        self.step = step
        self.writes = writes
        self._validation_pending = validation_pending
        self._warned = False
        self._events = _event_file(run / EVENTS, step + 1)
        self._lines = AppendedFile(run / METRICS)

    def truncate_after(self) -> None:
        """Remove the summary, and records of an earlier process after the step to continue from."""
        with self._warn_on_os_error(self.run / EVENTS):
            (self.run / SUMMARY).unlink(missing_ok=True)
            _truncate_logs(self.run, self.step, self._validation_pending)

    def log_metrics(self, metrics: Mapping[str, float | Tensor], step: int | None = None) -> None:
        """Write scalars to TensorBoard, and as one line to metrics.jsonl."""
        if not self.writes:
            return
        assert step is not None
        values = {name: float(value) for name, value in metrics.items()}
        self._add([Summary(value=[Summary.Value(tag=tag, simple_value=value)]) for tag, value in values.items()], step)
        # JSON has no infinity and no NaN; float32 has seven significant digits.
        plain = {name: float(f"{value:.7g}") if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"step": step, "time": round(time.time(), 3), **plain}) + "\n"
        with self._warn_on_os_error(self.run / METRICS):
            self._lines.append(line.encode())

    def add_text(self, tag: str, markdown: str, step: int) -> None:
        """Write a page of the Text tab."""
        self._add([text(tag, markdown)], step)

    def add_image(self, tag: str, image: Image, step: int) -> None:
        """Write an image of the Images tab."""
        file = BytesIO()
        image.save(file, format="PNG")
        encoded = Summary.Image(
            height=image.height, width=image.width, colorspace=3, encoded_image_string=file.getvalue()
        )
        self._add([Summary(value=[Summary.Value(tag=tag, image=encoded)])], step)

    def add_hyperparameters(self, values: Mapping[str, object], metrics: list[str], step: int) -> None:
        """Write a row of the HParams tab: the settings, and the tags of the metrics to compare runs by.

        The tab shows the last values of these curves.
        """
        plain = {name: value if isinstance(value, int | float | str) else str(value) for name, value in values.items()}
        self._add(list(hparams(plain, dict.fromkeys(metrics, 0.0))), step)

    def write(self, name: str, contents: bytes) -> None:
        """Write or replace a file of the run folder, atomically."""
        if self.writes:
            with self._warn_on_os_error(self.run / name), atomic_file(self.run / name) as file:
                file.write(contents)

    def log_hyperparams(self, *_: object, **__: object) -> None:
        """Do nothing: `add_hyperparameters` writes the hyperparameters of the recipe."""

    @property
    def name(self) -> str:
        """Required by Lightning; empty."""
        return ""

    @property
    def version(self) -> str:
        """Required by Lightning: the folder of the event files, inside the run folder."""
        return EVENTS

    def finalize(self, status: str) -> None:
        """Close the files."""
        self._events.close()
        self._lines.close()

    def _add(self, summaries: list[Summary], step: int) -> None:
        if not self.writes:
            return
        with self._warn_on_os_error(self.run / EVENTS):
            events = [Event(summary=summary, step=step, wall_time=time.time()) for summary in summaries]
            self._events.append(b"".join(map(_record, events)))

    @contextmanager
    def _warn_on_os_error(self, path: Path) -> Iterator[None]:
        """Ignore an OSError inside, such as that of a full disk, and print a warning the first time."""
        try:
            yield
        except OSError as error:
            if not self._warned:
                say(f"warning: {path}: {error.strerror}; training continues without this log until it can be written")
            self._warned = True


def table(header: list[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table."""
    lines = [" | ".join(header), " | ".join("---" for _ in header)]
    lines += [" | ".join(escape_cell(str(value)) for value in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def escape_cell(text: str) -> str:
    """Escape a cell's text, and shorten it to `MAX_CELL_CHARACTERS`."""
    shortened = text if len(text) <= MAX_CELL_CHARACTERS else text[:MAX_CELL_CHARACTERS] + " …"
    return _MARKUP.sub(lambda mark: f"&#{ord(mark[0])};", shortened)


class AppendedFile:
    """A file to append to. It is opened at the first write; data that does not fit whole is not written.

    When `append` returns, data is in the file even if the process is killed later.
    """

    def __init__(self, path: Path, header: bytes = b"") -> None:
        """`header` is written before the first data."""
        self._path, self._header = path, header
        self._file: int | None = None
        self._size = 0

    def append(self, data: bytes) -> None:
        """Append the data; if there is no space or no permission, raise OSError and leave the file as it was."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_in_place(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            self._size = os.fstat(self._file).st_size
        data = self._header + data
        try:
            if os.write(self._file, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._header = b""
        self._size += len(data)

    def close(self) -> None:
        """Close the file; the next `append` opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _event_file(folder: Path, first_step: int) -> AppendedFile:
    """Return a new TensorBoard event file.

    It begins with a record of the restart, which makes a running TensorBoard discard data of the steps from
    `first_step` on. That record is not enough: some readers do not discard texts, or ignore the record.
    """
    # TensorBoard reads the files of a folder in the order of their names. This file comes last even if the clock is
    # behind that of an earlier start, such as another node's.
    times = [re.match(r"\d+\.\d+", path.name.removeprefix(EVENT_FILES)) for path in folder.glob(f"{EVENT_FILES}*")]
    now = max([time.time(), *(float(found[0]) + 1e-3 for found in times if found)])
    name = f"{EVENT_FILES}{now:017.6f}.{socket.gethostname()}.{os.getpid()}"
    begin = Event(session_log=SessionLog(status=SessionLog.START), step=first_step, wall_time=time.time())
    header = _record(Event(file_version="brain.Event:2", wall_time=time.time())) + _record(begin)
    return AppendedFile(folder / name, header)


def _truncate_logs(run: Path, step: int, validation_too: bool) -> None:
    """Remove what was logged after a step, since a run that resumes from the step logs it again.

    The files are ordered by step and are truncated in place, which needs no disk space. With `validation_too`, the
    validation of the step itself is removed as well.
    """
    files = [(path, _records) for path in sorted((run / EVENTS).glob(f"{EVENT_FILES}*"))]
    if os.path.lexists(run / METRICS):
        files.append((run / METRICS, _lines))
    for path, entries in files:
        with os.fdopen(open_in_place(path, os.O_RDONLY), "rb") as file:
            data = file.read()
        kept = 0
        for end, entry_step, tags in entries(data):
            is_repeated = validation_too and any(tag.startswith("validation/") for tag in tags)
            if entry_step is not None and (entry_step > step or (entry_step == step and is_repeated)):
                break
            kept = end
        if kept < len(data):  # Otherwise the file need not be writable.
            with os.fdopen(open_in_place(path, os.O_WRONLY), "ab") as file:
                file.truncate(kept)


Entry: TypeAlias = tuple[int, int | None, list[str]]
"""An entry of a log: offset of its end, its step (None for a record without a summary), and its tags."""


def _lines(data: bytes) -> Iterator[Entry]:
    """Yield the lines of metrics.jsonl, up to the first that is incomplete or invalid."""
    start = 0
    while end := data.find(b"\n", start) + 1:
        if (line := json_object(data[start:end])) is None or not isinstance(line.get("step"), int):
            return
        yield end, line["step"], list(line)
        start = end


def _records(data: bytes) -> Iterator[Entry]:
    """Yield the records of an event file, up to the first that is incomplete or invalid."""
    start = 0
    while start + _HEADER_BYTES <= len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        end = start + _HEADER_BYTES + length + _FOOTER_BYTES
        if end > len(data):
            return
        try:
            event = Event.FromString(data[start + _HEADER_BYTES : end - _FOOTER_BYTES])
        except DecodeError:
            return
        has_summary = event.HasField("summary")
        yield end, event.step if has_summary else None, [value.tag for value in event.summary.value]
        start = end


def _record(event: Event) -> bytes:
    file = BytesIO()
    RecordWriter(file).write(event.SerializeToString())
    return file.getvalue()
