"""Measures this project on one GPU within nine minutes, without network access.

    python -m tests.gpu.harvest --output harvest.jsonl

Each stage is a command with a time limit. Its outcome, and the figures that its last line of output has, are a line of
JSON that is written and printed as soon as it is known. `harvest.log` has the output of all commands.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from torch.utils.collect_env import get_pretty_env_info

ROOT = Path(__file__).resolve().parents[2]
PYTEST = ["-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
PIPELINE, BENCHMARK = ["-m", "pipeline"], ["-m", "tests.benchmark"]


def on_random_text(model: str, compiled: bool = True) -> list[str]:
    """Return the options of a run of the paper's base or big model on random text."""
    options = {"config": str(ROOT / f"configs/wmt14_en_de_{model}.yaml"), "run.compile": str(compiled).lower()}
    options |= {"corpus.folder": "random", "corpus.vocabulary_size": "30000", "corpus.test": "[]"}
    options |= {f"corpus.{split}": f"{{source: {split}.en, target: {split}.de}}" for split in ("train", "validation")}
    return [word for name, value in options.items() for word in (f"--{name}", value)]


STAGES: dict[str, tuple[list[str], int]] = {
    "doctor": ([*PIPELINE, "doctor", *on_random_text("base")], 40),
    "base, compiled": ([*BENCHMARK, "train", *on_random_text("base")], 120),
    "big, compiled": ([*BENCHMARK, "train", *on_random_text("big")], 90),
    "gpu tests": ([*PYTEST, "-m", "gpu and not slow", str(ROOT / "tests/gpu")], 90),
    "base": ([*BENCHMARK, "train", *on_random_text("base", compiled=False)], 50),
    "train, evaluate and export": ([*PIPELINE, "demo"], 120),
    "decode": ([*BENCHMARK, "decode", "runs/demo", "--source", "data/demo/test.en"], 30),
}
"""Arguments of Python, and the time limit in seconds, in the order in which stages run; all in one temporary folder.

The first stages have the figures that matter the most, in case the time is shorter."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.harvest", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="a file of JSON lines; .log is written beside it")
    parser.add_argument("--revision", help="revision of the code, if this is not a checkout")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the running stage is killed too
    output = options.output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "revision": options.revision or revision()}
    output.write_text(json.dumps({**about, "environment": get_pretty_env_info().splitlines()}) + "\n")
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder), 60_000)
        write_demo(Path(folder))
        for name, (command, limit) in STAGES.items():
            found = run_stage(command, limit, Path(folder), output.with_suffix(".log"))
            line = json.dumps({"stage": name, **found})
            with output.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            print(line, flush=True)
            outcomes.append(found["outcome"])
    return 0 if set(outcomes) == {"done"} else 1


def write_text(folder: Path, num_lines: int) -> None:
    """Write pairs of random sentences of 25 words on average, and a hundredth of them for validation."""
    draws = random.Random(1)
    words = ["".join(draws.choices("abcdefghijklmnopqrstuvwxyz", k=draws.randint(3, 9))) for _ in range(40_000)]
    for split, count in (("train", num_lines), ("validation", max(10, num_lines // 100))):
        for language in ("en", "de"):
            lines = [" ".join(draws.choices(words, k=max(2, round(draws.gammavariate(2.5, 10))))) for _ in range(count)]
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_demo(folder: Path) -> None:
    """Write the recipe that the demo takes, in the precision in which a GPU has flash attention and compiled code."""
    (folder / "configs").mkdir()
    recipe = f"extends: {ROOT}/configs/demo.yaml\ntrainer: {{precision: bf16-mixed}}\n"
    (folder / "configs/demo.yaml").write_text(recipe, encoding="utf-8")


def run_stage(command: list[str], limit: float, folder: Path, log: Path) -> dict[str, object]:
    """Run Python in a folder, append its output to `log`, and kill it and its children after `limit` seconds.

    Returns:
        `outcome`, which is `done`, `timed out` or `failed`, and `seconds`; `figures`, or the last lines unless it is
        done.
    """
    start = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("a+b") as output:
        before = output.tell()
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=limit)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children too, which may outlive it
            process.wait()
        output.seek(before)
        lines = output.read().decode(errors="replace").splitlines()
    outcome = "timed out" if code is None else "failed" if code else "done"
    found = {"outcome": outcome, "exit_code": code, "seconds": round(time.monotonic() - start, 2)}
    if outcome != "done":
        return {**found, "last_lines": lines[-25:]}
    return {**found, "figures": next((json.loads(line) for line in lines[::-1] if line.startswith('{"')), None)}


def revision() -> str | None:
    """Return the revision of the checkout, or None if this is none."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, cwd=ROOT, stderr=subprocess.DEVNULL, text=True, timeout=20).strip()
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
