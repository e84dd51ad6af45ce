"""Training progress on a terminal and in a file."""

import os
import pty
import subprocess
import sys
import termios

from tests.conftest import ROOT

SCRIPT = """
from pipeline.monitoring.progress import Progress
progress = Progress(4, 8)
for step in range(5, 9):
    progress.advance()
    progress.show({"loss": f"{10 - step}.5", "tokens/s": "1,234"})
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
    assert "loss=2.5, tokens/s=1,234, BLEU=12.34" in said
    assert "training: step" not in said


def test_lines_in_a_file() -> None:
    """The first line at once, the last at the end, and between them at most one line per minute."""
    ours, theirs = os.pipe()
    run(theirs)
    os.close(theirs)
    begun, first, last = read(ours).splitlines()
    assert begun == "training: from step 4 to 8"
    assert first == "training: step 5 of 8: loss 5.5, tokens/s 1,234"  # One step does not tell the time left.
    assert last == "training: step 8 of 8: loss 2.5, tokens/s 1,234, BLEU 12.34, 0:00:00 left"
