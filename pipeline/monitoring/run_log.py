"""The logger of a run: TensorBoard event files, metrics.jsonl and small files beside them.

Pages of TensorBoard's Text tab are Markdown, in which text is escaped so that it is shown literally.

Only rank 0 writes. A log that cannot be written does not stop training: the run warns once, goes on, and logs again as
soon as it can.
"""

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from PIL.Image import Image
from torch import Tensor

from data_module.files import atomic_file
from pipeline.checkpointing.run_folder import EVENTS, METRICS, SUMMARY
from pipeline.monitoring.log_files import (
    AppendedFile,
    event_file,
    hparams_summaries,
    image_summary,
    layout_summary,
    scalar_summary,
    summary_record,
    text_summary,
    truncate_after,
)
from pipeline.runtime.console import say

MAX_CELL_CHARACTERS = 600
_MARKUP = re.compile(r"[|*_`\[\]\\~#!{}()<>&\n\r]")


class RunLog(Logger):
    """Lightning logger that writes to a run folder.

    Args:
        run: the run folder.
        step: the step to continue after; 0 for a new run.
        writes: whether this rank writes; True on rank 0 only.
        validation_pending: whether the run continues with this step's validation.
    """

    def __init__(self, run: Path, step: int, writes: bool, validation_pending: bool = False) -> None:
        super().__init__()
        self.run = run
        self.step = step
        self.writes = writes
        self._validation_pending = validation_pending
        self._warned = False
        self._events = event_file(run / EVENTS, step + 1)
        self._lines = AppendedFile(run / METRICS)

    def truncate_after(self) -> None:
        """Remove the summary, and what an earlier process has logged after the step to continue after."""
        with self._warn_on_os_error(self.run / EVENTS):
            (self.run / SUMMARY).unlink(missing_ok=True)
            truncate_after(self.run, self.step, self._validation_pending)

    def log_metrics(self, metrics: Mapping[str, float | Tensor], step: int | None = None) -> None:
        """Write scalars to TensorBoard, and as one line to metrics.jsonl."""
        if not self.writes:
            return
        assert step is not None
        values = {name: float(value) for name, value in metrics.items()}
        self._add([scalar_summary(tag, value) for tag, value in values.items()], step)
        # JSON has no infinity and no NaN; float32 has seven significant digits.
        plain = {name: float(f"{value:.7g}") if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"step": step, "time": round(time.time(), 3), **plain}) + "\n"
        with self._warn_on_os_error(self.run / METRICS):
            self._lines.append(line.encode())

    def add_text(self, tag: str, markdown: str, step: int) -> None:
        """Write a page of the Text tab."""
        self._add([text_summary(tag, markdown)], step)

    def add_image(self, tag: str, image: Image, step: int) -> None:
        """Write an image of the Images tab."""
        self._add([image_summary(tag, image)], step)

    def add_hyperparameters(self, values: dict[str, Any], metrics: list[str], step: int) -> None:
        """Write a row of the HParams tab: the settings, and the tags of the metrics to compare runs by."""
        plain = {name: value if isinstance(value, int | float | str) else str(value) for name, value in values.items()}
        self._add(hparams_summaries(plain, metrics), step)

    def add_layout(self, layout: dict[str, dict[str, list[str]]], step: int) -> None:
        """Write the layout of the Custom Scalars tab."""
        self._add([layout_summary(layout)], step)

    def write(self, name: str, contents: bytes) -> None:
        """Write or replace a file of the run folder, atomically."""
        if self.writes:
            with self._warn_on_os_error(self.run / name), atomic_file(self.run / name) as file:
                file.write(contents)

    def append(self, name: str, values: dict[str, Any]) -> None:
        """Append a line of JSON to a file of the run folder."""
        if self.writes:
            with self._warn_on_os_error(self.run / name):
                file = AppendedFile(self.run / name)
                try:
                    file.append((json.dumps(values) + "\n").encode())
                finally:
                    file.close()

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing: `add_hyperparameters` writes those of the recipe."""

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

    def _add(self, summaries: list[Any], step: int) -> None:
        if not self.writes:
            return
        with self._warn_on_os_error(self.run / EVENTS):
            self._events.append(b"".join(summary_record(summary, step) for summary in summaries))

    @contextmanager
    def _warn_on_os_error(self, path: Path) -> Iterator[None]:
        """Ignore an OSError inside, such as that of a full disk, and print a warning the first time."""
        try:
            yield
        except OSError as error:
            if not self._warned:
                say(f"warning: {path}: {error.strerror}; training continues without this log until it can be written")
            self._warned = True


def table(header: list[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a Markdown table."""
    lines = [" | ".join(header), " | ".join("---" for _ in header)]
    lines += [" | ".join(escape_cell(str(value)) for value in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def escape_cell(text: str) -> str:
    """Escape a cell's text, and shorten it to `MAX_CELL_CHARACTERS`."""
    shortened = text if len(text) <= MAX_CELL_CHARACTERS else text[:MAX_CELL_CHARACTERS] + " …"
    return _MARKUP.sub(lambda mark: f"&#{ord(mark[0])};", shortened)


def key_value_table(values: Mapping[str, Any]) -> str:
    """Return a table with a row per key."""
    return table(["name", "value"], values.items())


def code_block(text: str) -> str:
    """Return preformatted text."""
    return "\n".join(f"    {line}" for line in text.splitlines())
