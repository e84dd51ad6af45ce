"""What a run says about itself: TensorBoard's event files, metrics.jsonl, and small files beside them.

Rank 0 writes. A log that cannot be written is no reason to stop training: the run says so once and goes on, and logs
again as soon as it can.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from PIL.Image import Image
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from torch.utils.tensorboard.summary import custom_scalars, hparams, text

from pipeline.checkpointing.run_folder import EVENTS, METRICS, SUMMARY
from pipeline.monitoring.log_files import AppendedFile, EventFile, truncate_after
from pipeline.runtime.atomic_file import atomic_file
from pipeline.runtime.console import say


class RunLog(Logger):
    """Lightning's logger of a run folder."""

    def __init__(self, run: Path, step: int, writes: bool, validation_pending: bool = False) -> None:
        """A log that goes on after a step, 0 for a new run; ranks but the first have one that does not write.

        With `validation_pending` it goes on before that step's validation.
        """
        super().__init__()
        self.run = run
        self.step = step
        """What it goes on after."""
        self.writes = writes
        """Whether this is the rank that does."""
        self._validation_pending = validation_pending
        self._warned = False
        self._events = EventFile(run / EVENTS, step + 1)
        self._lines = AppendedFile(run / METRICS)

    def truncate_after(self) -> None:
        """Remove what an earlier process has logged after the step that this one goes on from, and its summary."""
        with self._tolerant(self.run / EVENTS):
            (self.run / SUMMARY).unlink(missing_ok=True)
            truncate_after(self.run, self.step, self._validation_pending)

    def log_metrics(self, metrics: Mapping[str, float | Tensor], step: int | None = None) -> None:
        """Points of curves, and a line of metrics.jsonl with the same."""
        if not self.writes:
            return
        assert step is not None
        values = {name: float(value) for name, value in metrics.items()}
        self._add([Summary(value=[Summary.Value(tag=tag, simple_value=value)]) for tag, value in values.items()], step)
        # JSON knows no infinity, and float32 no more digits.
        plain = {name: float(f"{value:.7g}") if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"step": step, "time": round(time.time(), 3), **plain}) + "\n"
        with self._tolerant(self.run / METRICS):
            self._lines.append(line.encode())

    def add_text(self, tag: str, markdown: str, step: int) -> None:
        """A page of the text tab."""
        self._add([text(tag, markdown)], step)

    def add_picture(self, tag: str, picture: Image, step: int) -> None:
        """A picture of the images tab."""
        file = BytesIO()
        picture.save(file, format="PNG")
        image = Summary.Image(
            height=picture.height, width=picture.width, colorspace=3, encoded_image_string=file.getvalue()
        )
        self._add([Summary(value=[Summary.Value(tag=tag, image=image)])], step)

    def add_hyperparameters(self, values: dict[str, Any], scores: list[str], step: int) -> None:
        """A row of the HPARAMS tab: what was chosen, and the tags of the scores to compare by."""
        plain = {name: value if isinstance(value, int | float | str) else str(value) for name, value in values.items()}
        self._add(list(hparams(plain, dict.fromkeys(scores, 0.0))), step)

    def add_layout(self, layout: dict[str, dict[str, list[Any]]], step: int) -> None:
        """The custom scalars tab: charts of several curves, by question."""
        self._add([custom_scalars(layout)], step)

    def write(self, name: str, contents: bytes) -> None:
        """A file of the run folder, replaced as a whole."""
        if self.writes:
            with self._tolerant(self.run / name), atomic_file(self.run / name) as file:
                file.write(contents)

    def append(self, name: str, values: dict[str, Any]) -> None:
        """A line of JSON at the end of a file of the run folder."""
        if self.writes:
            with self._tolerant(self.run / name):
                file = AppendedFile(self.run / name)
                try:
                    file.append((json.dumps(values) + "\n").encode())
                finally:
                    file.close()

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Lightning has none to give."""

    @property
    def name(self) -> str:
        """None beside the folder's."""
        return ""

    @property
    def version(self) -> str:
        """The folder of the events."""
        return EVENTS

    def finalize(self, status: str) -> None:
        """Let go of the files."""
        self._events.close()
        self._lines.close()

    def _add(self, summaries: list[Any], step: int) -> None:
        if not self.writes:
            return
        with self._tolerant(self.run / EVENTS):
            self._events.add(summaries, step)

    @contextmanager
    def _tolerant(self, path: Path) -> Iterator[None]:
        """Inside, a disk that is full or read-only is a warning, the first time."""
        try:
            yield
        except OSError as error:
            if not self._warned:
                say(f"warning: {path}: {error.strerror}: training goes on, and logs when it can")
            self._warned = True
