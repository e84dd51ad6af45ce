"""Training progress on a terminal and in a file."""

import os
import pty
import sys
import termios
from contextlib import suppress

import pytest

from pipeline.monitoring.training_monitor import Progress


def train() -> None:
    """Take four steps of a minute, with a validation of 100 seconds after every second one."""
    progress = Progress(4, 8, 2)
    for step in range(5, 9):
        progress.advance()
        if step == 5:
            progress.show({}, 60.0)
            progress.validation_seconds = 100.0
        progress.show({"loss": f"{10 - step}.5", "tokens/s": "1,234"}, 60.0)
        if step == 6:
            progress.show({"BLEU": "12.34"})
    progress.close()


def test_a_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, 120))
    with monkeypatch.context() as patch, os.fdopen(theirs, "w") as terminal:
        patch.setattr(sys, "stderr", terminal)
        train()
    said = ""
    with suppress(OSError):  # at the end, as the other side is closed
        while True:
            said += os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "8/8" in said
    assert "left=0:00:00, loss=2.5, tokens/s=1,234, BLEU=12.34" in said
    assert "<" not in said  # tqdm's own time left, which takes validations for slow steps
    assert "training: step" not in said


def test_lines_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """The first line at once, the last at the end, and between them at most one line per minute."""
    train()
    assert capsys.readouterr().err.splitlines() == [
        "training: from step 4 to 8",
        "training: step 5 of 8: 0:03:00 left",
        "training: step 8 of 8: loss 2.5, tokens/s 1,234, BLEU 12.34, 0:00:00 left",
    ]


@pytest.mark.parametrize(
    ("step", "last", "every", "expected"),
    [
        (10, 40, 10, "0:05:30"),  # validations after 20, 30 and 40
        (11, 39, 10, "0:05:00"),  # 28 steps, validations after 20 and 30
        (35, 39, 10, "0:00:40"),
        (10, 40, None, "0:05:00"),
    ],
)
def test_time_left_counts_the_validations_to_come(
    step: int, last: int, every: int | None, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(step - 1, last, every)
    progress.validation_seconds = 10.0
    progress.advance()
    progress.show({"loss": "1.0"}, 10.0)
    assert f", {expected} left\n" in capsys.readouterr().err
