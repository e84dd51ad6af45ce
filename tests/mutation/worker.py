"""Tests one mutant after another in a copy of the project; `__main__.py` starts it there.

Reads a line of JSON a mutant, `{"module": path, "source": text, "tests": [paths], "limit_seconds": s}`, and answers
with `{"outcome": ..., "failing_test": ..., "seconds": s}`. PyTorch and the other large packages are imported once; each
mutant is tested in a fork of this process, which imports the project itself.
"""

import gc
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

import hypothesis
import lightning.pytorch
import pytest
import sacrebleu
import sacremoses
import sentencepiece
import torch.utils.tensorboard

LARGE = (hypothesis, lightning.pytorch, sacrebleu, sacremoses, sentencepiece, torch.utils.tensorboard)
REPORT = Path("mutation-report.txt")
OPTIONS = ["-x", "-q", "-rfE", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:anyio"]
OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", "not slow and not gpu"]


def main() -> None:
    """Answer until standard input ends."""
    sys.path.insert(0, str(Path.cwd()))
    gc.freeze()  # so that no collection in a fork walks through what is imported here
    for line in sys.stdin:
        print(json.dumps(judge(**json.loads(line))), flush=True)


def judge(module: str, source: str, tests: list[str], limit_seconds: float) -> dict[str, object]:
    """Run the tests on the changed module; they and their children are killed after `limit_seconds`."""
    path = Path(module)
    original = path.read_text()
    path.write_text(source)
    began = time.monotonic()
    try:
        child = os.fork()
        if child == 0:
            run_tests(tests)
        status = wait(child, limit_seconds)
    finally:
        path.write_text(original)
    failed = [line.split()[1] for line in REPORT.read_text().splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return {
        "outcome": "timed out" if status is None else "killed" if status else "survived",
        "failing_test": failed[0] if failed else None,
        "seconds": round(time.monotonic() - began, 2),
    }


def run_tests(tests: list[str]) -> None:
    """In the forked process: run pytest, and end without a normal exit, which would flush the parent's files."""
    os.setsid()
    output = os.open(REPORT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 70
    try:
        code = int(pytest.main([*OPTIONS, *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(child: int, limit_seconds: float) -> int | None:
    """The child's exit status, or None if it had to be killed; its process group is gone afterwards."""
    deadline = time.monotonic() + limit_seconds
    status = None
    while status is None and time.monotonic() < deadline:
        ended, raw = os.waitpid(child, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(raw)
        else:
            time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status


if __name__ == "__main__":
    main()
