"""TensorBoard's event format. Everything that this project imports from TensorBoard's packages is imported here.

TensorBoard documents no API for writing events without TensorFlow, so these modules may move in any version; the test
of this module fails if they do. Used with TensorBoard 2.21 and torch 2.13. The public alternative,
`torch.utils.tensorboard.SummaryWriter`, writes in a thread that ends at the first write error, such as a full disk.
"""

import struct
import time
from collections.abc import Iterator
from io import BytesIO
from typing import Any

from google.protobuf.message import DecodeError
from PIL.Image import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import custom_scalars, hparams, text

FILE_PREFIX = "events.out.tfevents."
_HEADER_BYTES, _FOOTER_BYTES = 12, 4
"""A record is its length (8 bytes) with a checksum (4 bytes), the data, and the checksum of the data (4 bytes)."""


def scalar_summary(tag: str, value: float) -> Any:
    """Return a point of a curve."""
    return Summary(value=[Summary.Value(tag=tag, simple_value=value)])


def image_summary(tag: str, image: Image) -> Any:
    """Return an image of the Images tab."""
    file = BytesIO()
    image.save(file, format="PNG")
    encoded = Summary.Image(height=image.height, width=image.width, colorspace=3, encoded_image_string=file.getvalue())
    return Summary(value=[Summary.Value(tag=tag, image=encoded)])


def text_summary(tag: str, markdown: str) -> Any:
    """Return a page of the Text tab."""
    return text(tag, markdown)


def hparams_summaries(values: dict[str, int | float | str], metrics: list[str]) -> list[Any]:
    """Return a row of the HParams tab, whose metrics are the last values of these curves."""
    return list(hparams(values, dict.fromkeys(metrics, 0.0)))


def layout_summary(layout: dict[str, dict[str, list[Any]]]) -> Any:
    """Return the layout of the Custom Scalars tab: category -> chart -> ["Multiline", patterns of tags]."""
    return custom_scalars(layout)


def file_header(first_step: int) -> list[bytes]:
    """Return the records that begin a file; readers discard the steps from `first_step` on of earlier files."""
    start = SessionLog(status=SessionLog.START)
    return [
        _record(Event(file_version="brain.Event:2", wall_time=time.time())),
        _record(Event(session_log=start, step=first_step, wall_time=time.time())),
    ]


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
