"""Training progress on a terminal and in a file."""

import os
import pty
import subprocess
import sys
import termios

import pytest

from pipeline.monitoring.training_monitor import Progress
from tests.conftest import ROOT

SCRIPT = """
from pipeline.monitoring.training_monitor import Progress
progress = Progress(4, 8, 2)
for step in range(5, 9):
    progress.advance()
    if step == 5:
        progress.announce(60.0)
        progress.validation_seconds = 100.0
        progress.announce(60.0)
    progress.show({"loss": f"{10 - step}.5", "tokens/s": "1,234"}, 60.0)
    if step == 6:
        progress.show({"BLEU": "12.34"})
progress.close()
"""


def run(stderr: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    subprocess.run([sys.executable, "-c", SCRIPT], stderr=stderr, env=environment, check=True)


def read(descriptor: int) -> str:
    said = b""
    while True:
        try:
            chunk = os.read(descriptor, 1 << 16)
        except OSError:  # the other end of the terminal is closed
            chunk = b""
        if not chunk:
            os.close(descriptor)
            return said.decode()
        said += chunk


def test_a_bar_in_a_terminal() -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, 120))
    run(theirs)
    os.close(theirs)
    said = read(ours)
    assert "8/8" in said
    assert "loss=2.5, tokens/s=1,234, left=0:00:00, BLEU=12.34" in said
    assert "<" not in said  # tqdm's own time left, which takes validations for slow steps
    assert "training: step" not in said


def test_lines_in_a_file() -> None:
    """The first line at once, the last at the end, and between them at most one line per minute."""
    ours, theirs = os.pipe()
    run(theirs)
    os.close(theirs)
    begun, without, with_validation, first, last = read(ours).splitlines()
    assert begun == "training: from step 4 to 8"
    # Three steps of a minute, and validations of 100 seconds after steps 6 and 8.
    assert without == "training: 3 steps of 60 s take about 0:03:00, without 2 validations"
    assert with_validation == "training: 3 steps of 60 s take about 0:06:20, with 2 validations"
    assert first == "training: step 5 of 8: loss 5.5, tokens/s 1,234, 0:06:20 left"
    assert last == "training: step 8 of 8: loss 2.5, tokens/s 1,234, BLEU 12.34, 0:00:00 left"


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


def test_nothing_is_announced_at_the_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(1, 2, 1)
    progress.advance()
    progress.announce(1.0)
    assert "take about" not in capsys.readouterr().err
