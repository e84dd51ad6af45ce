"""A run's log files: appended to whole records at a time, and cut back to a step when a run goes on from there."""

import errno
import json
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from pipeline.checkpointing.run_folder import EVENTS, METRICS

_HEADER, _CRC = 12, 4
"""Bytes of a record's length with its checksum, and of the checksum of its data."""


class AppendedFile:
    """A file that is opened when first written to; what cannot be written whole is not written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._size = 0

    def append(self, data: bytes) -> None:
        """Raises OSError, and leaves the file as it was, when there is no room or no permission."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            self._size = os.fstat(self._file).st_size
        try:
            if os.write(self._file, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        """Let go of the file; it may be appended to again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class EventFile:
    """TensorBoard's events, written by the thread that logs: a writer with a thread of its own dies with a full disk.

    It reaches TensorBoard's readers record by record, and survives the process without being closed.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        """Readers drop what they had seen from `first_step` on, in earlier files."""
        # Files are read in the order of their names.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(folder / name)
        begin = SessionLog(status=SessionLog.START)
        self._pending = [
            Event(file_version="brain.Event:2", wall_time=time.time()),
            Event(session_log=begin, step=first_step, wall_time=time.time()),
        ]

    def add(self, summaries: list[Any], step: int) -> None:
        """Write Summary messages at a step; raises OSError as `AppendedFile.append` does."""
        now = time.time()
        events = [*self._pending, *(Event(summary=summary, step=step, wall_time=now) for summary in summaries)]
        self._file.append(b"".join(map(_record, events)))
        self._pending = []

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def truncate_after(run: Path, step: int, validation_too: bool) -> None:
    """Remove from a run's curves what was logged after a step, or from its validation on: that will be logged again.

    Logs are in the order of their steps, so that they are cut off in place, for which a full disk has room. Raises
    OSError when they may not be written.
    """
    for path in sorted((run / EVENTS).glob("events.out.tfevents.*")):
        _cut(path, _end_of_events(path.read_bytes(), step, validation_too))
    if (run / METRICS).exists():
        _cut(run / METRICS, _end_of_lines((run / METRICS).read_bytes(), step, validation_too))


def read_metrics(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's metrics.jsonl, under the current names of the curves."""
    with (run / METRICS).open(encoding="utf-8") as file:
        for line in file:
            yield {_current_name(name): value for name, value in json.loads(line).items()}


def _current_name(name: str) -> str:
    """Return the name of a curve as this version logs it; version 0.1.0 logged `perf/` as `work/`."""
    if name == "work/share_of_ceiling":
        return "perf/mfu"
    return name.replace("work/", "perf/", 1) if name.startswith("work/") else name


def _cut(path: Path, size: int) -> None:
    if size < path.stat().st_size:
        os.truncate(path, size)


def _is_beyond(at: int, tags: Iterable[str], step: int, validation_too: bool) -> bool:
    return at > step or (validation_too and at == step and any(tag.startswith("validation/") for tag in tags))


def _end_of_events(data: bytes, step: int, validation_too: bool) -> int:
    """Where the last event up to a step ends; what a killed writer or machine has left torn counts as beyond."""
    start = 0
    while start + _HEADER <= len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        end = start + _HEADER + length + _CRC
        if end > len(data):
            break
        try:
            event = Event.FromString(data[start + _HEADER : end - _CRC])
        except DecodeError:
            break
        tags = [value.tag for value in event.summary.value]
        if event.HasField("summary") and _is_beyond(event.step, tags, step, validation_too):
            break
        start = end
    return start


def _end_of_lines(data: bytes, step: int, validation_too: bool) -> int:
    start = 0
    while end := data.find(b"\n", start) + 1:
        try:
            line = json.loads(data[start:end])
            if _is_beyond(line["step"], line, step, validation_too):
                break
        except ValueError:
            break
        start = end
    return start


def _record(event: Event) -> bytes:
    data = event.SerializeToString()
    header = struct.pack("<Q", len(data))
    return b"".join((header, _checksum(header), data, _checksum(data)))


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))
