"""The log files of a run: records are appended whole, and removed after a step when the run resumes from it.

Everything that this project imports from TensorBoard's packages is imported here. TensorBoard documents no API for
writing events without TensorFlow, so these modules may move in any version; `test_log_files.py` fails if they do. Used
with TensorBoard 2.21 and torch 2.13. The public alternative, `torch.utils.tensorboard.SummaryWriter`, writes in a
thread that ends at the first write error, such as a full disk.
"""

import errno
import json
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from PIL.Image import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import custom_scalars, hparams, text

from pipeline.checkpointing.run_folder import EVENTS, METRICS

FILE_PREFIX = "events.out.tfevents."
_HEADER_BYTES, _FOOTER_BYTES = 12, 4
"""A record is its length (8 bytes) with a checksum (4 bytes), the data, and the checksum of the data (4 bytes)."""


class AppendedFile:
    """A file to append to. It is opened at the first write; data that does not fit whole is not written.

    Data is on disk when `append` returns, also if the process is killed later.
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
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
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


def event_file(folder: Path, first_step: int) -> AppendedFile:
    """Return a new TensorBoard event file; readers discard the steps from `first_step` on of earlier files."""
    # TensorBoard reads the files of a folder in the order of their names.
    name = f"{FILE_PREFIX}{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
    begin = Event(session_log=SessionLog(status=SessionLog.START), step=first_step, wall_time=time.time())
    header = _record(Event(file_version="brain.Event:2", wall_time=time.time())) + _record(begin)
    return AppendedFile(folder / name, header)


def truncate_after(run: Path, step: int, validation_too: bool) -> None:
    """Remove what was logged after a step, since a run that resumes from it will log that again.

    The files are ordered by step and are truncated in place, which needs no disk space.

    Args:
        run: the run folder.
        step: the last step to keep.
        validation_too: whether to remove this step's validation as well.

    Raises:
        OSError: the files cannot be written.
    """
    for path in sorted((run / EVENTS).glob(f"{FILE_PREFIX}*")):
        _truncate(path, _end_of_events(path.read_bytes(), step, validation_too))
    if (run / METRICS).exists():
        _truncate(run / METRICS, _end_of_lines((run / METRICS).read_bytes(), step, validation_too))


def read_metrics(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's metrics.jsonl.

    A line that a killed process has written in part ends them, as it does where a run resumes.
    """
    with (run / METRICS).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                return


def _truncate(path: Path, size: int) -> None:
    if size < path.stat().st_size:
        os.truncate(path, size)


def _is_after(record_step: int, tags: Iterable[str], step: int, validation_too: bool) -> bool:
    if record_step == step:
        return validation_too and any(tag.startswith("validation/") for tag in tags)
    return record_step > step


def _end_of_events(data: bytes, step: int, validation_too: bool) -> int:
    """Return the offset to truncate an event file at: the end of the last complete record up to the step."""
    end = 0
    for record_end, record_step, tags in read_records(data):
        if record_step is not None and _is_after(record_step, tags, step, validation_too):
            break
        end = record_end
    return end


def _end_of_lines(data: bytes, step: int, validation_too: bool) -> int:
    """Return the offset to truncate metrics.jsonl at: the end of the last valid line up to the step."""
    start = 0
    while end := data.find(b"\n", start) + 1:
        try:
            line = json.loads(data[start:end])
            if _is_after(line["step"], line, step, validation_too):
                break
        except ValueError:
            break
        start = end
    return start


def scalar_summary(tag: str, value: float) -> Any:
    """Return a point of a curve."""
    return Summary(value=[Summary.Value(tag=tag, simple_value=value)])


def image_summary(tag: str, image: Image) -> Any:
    """Return an image of the Images tab."""
    file = BytesIO()
    image.save(file, format="PNG")
    encoded = Summary.Image(height=image.height, width=image.width, colorspace=3, encoded_image_string=file.getvalue())
    return Summary(value=[Summary.Value(tag=tag, image=encoded)])


def hparams_summaries(values: dict[str, int | float | str], metrics: list[str]) -> list[Any]:
    """Return a row of the HParams tab, whose metrics are the last values of these curves."""
    return list(hparams(values, dict.fromkeys(metrics, 0.0)))


def text_summary(tag: str, markdown: str) -> Any:
    """Return a page of the Text tab."""
    return text(tag, markdown)


def layout_summary(layout: dict[str, dict[str, list[str]]]) -> Any:
    """Return the layout of the Custom Scalars tab: category -> chart -> patterns of tags."""
    return custom_scalars(
        {name: {chart: ["Multiline", tags] for chart, tags in charts.items()} for name, charts in layout.items()}
    )


def summary_record(summary: Any, step: int) -> bytes:
    """Return the record of a summary, with the current time."""
    return _record(Event(summary=summary, step=step, wall_time=time.time()))


def read_records(data: bytes) -> Iterator[tuple[int, int | None, list[str]]]:
    """Yield the records of a file, up to the first that is incomplete or invalid.

    Yields:
        Offset of the record's end, its step (None for a record without a summary) and its tags.
    """
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


def _record(event: Any) -> bytes:
    file = BytesIO()
    RecordWriter(file).write(event.SerializeToString())
    return file.getvalue()
