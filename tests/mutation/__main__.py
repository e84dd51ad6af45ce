"""Mutation testing: change one operator, number or statement at a time, and see whether a fast test fails.

    python -m tests.mutation                              all modules of targets.yaml
    python -m tests.mutation model/loss.py --every 3      every third mutant of one module

Mutants come from mutmut (`pip install -c constraints.txt -e '.[mutation]'`). mutmut's own runner replaces functions
with dispatchers, which TorchScript cannot compile; here each mutant is written into a copy of the project and tested.

`--output` adds one JSON object a mutant to a file. Exit code 1 if a mutant survives that `equivalent.yaml` does not
list.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import yaml

from tests.mutation.mutants import Mutant, mutants_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


class Worker:
    """A process that tests mutants in a copy of the project of its own."""

    def __init__(self, folder: Path) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        for name in listed.stdout.decode().split("\0"):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, folder / name)
        # Without bytecode: whether it is stale is judged by size and time of change, which a mutant may share.
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
        self._process = subprocess.Popen(
            [sys.executable, folder / "tests" / "mutation" / "worker.py"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def judge(self, mutant: Mutant, tests: list[str], limit_seconds: float) -> dict[str, Any]:
        """Outcome, the first test that failed, and seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        question = {"module": mutant.module, "source": mutant.source, "tests": tests, "limit_seconds": limit_seconds}
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Workers:
    """Several workers, each given the next mutant when it has done its last."""

    def __init__(self, jobs: int, folder: Path) -> None:
        self._threads = ThreadPoolExecutor(jobs)
        self._workers = [Worker(folder / str(job)) for job in range(jobs)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def judge(self, mutant: Mutant, tests: list[str], limit_seconds: float) -> dict[str, Any]:
        """As `Worker.judge`, by whichever is idle."""
        worker = self._idle.get()
        try:
            return worker.judge(mutant, tests, limit_seconds)
        finally:
            self._idle.put(worker)

    def verdicts(self, module: str, tests: list[str], every: int) -> Iterator[tuple[Mutant, dict[str, Any]]]:
        """Test a module's mutants, after seeing its tests pass on the module as it is."""
        source = (ROOT / module).read_text()
        unchanged = self.judge(Mutant(module, 0, "", "", "", source), tests, 900.0)
        if unchanged["outcome"] != "survived":
            raise SystemExit(f"{module}: {unchanged['failing_test']} fails on the unchanged module")
        limit = 20.0 + 4.0 * unchanged["seconds"]
        mutants = mutants_of(module, source)[::every]
        yield from zip(mutants, self._threads.map(lambda one: self.judge(one, tests, limit), mutants), strict=True)

    def close(self) -> None:
        """End all processes."""
        self._threads.shutdown()
        for worker in self._workers:
            worker.close()


def main() -> int:
    """Test the mutants, print the score of each module and list the survivors."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("modules", nargs="*", help="modules of targets.yaml; all of them by default")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="test every Nth mutant of a module only")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="mutants tested at a time")
    parser.add_argument(
        "--output", type=Path, default=Path(os.devnull), help="a line of JSON is added to it for each mutant"
    )
    options = parser.parse_args()
    targets: dict[str, list[str]] = yaml.safe_load((HERE / "targets.yaml").read_text())
    if unknown := [module for module in options.modules if module not in targets]:
        parser.error(f"{', '.join(unknown)}: not in tests/mutation/targets.yaml")
    listed = yaml.safe_load((HERE / "equivalent.yaml").read_text())
    # Without an `after`, every mutant of that line.
    equivalent = {(one["module"], one["before"], one.get("after")) for one in listed}
    num_survivors = 0
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder, options.output.open("a") as output:
        workers = Workers(options.jobs, Path(folder))
        for module in options.modules or list(targets):
            counts: Counter[str] = Counter()
            for mutant, verdict in workers.verdicts(module, targets[module], options.every):
                keys = {(module, mutant.before, mutant.after), (module, mutant.before, None)}
                if verdict["outcome"] == "survived" and keys & equivalent:
                    verdict["outcome"] = "equivalent"
                counts[verdict["outcome"]] += 1
                if verdict["outcome"] == "survived":
                    print(f"{module}:{mutant.line}: survived: {mutant.before}  ->  {mutant.after}", flush=True)
                line = {**mutant._asdict(), **verdict}
                del line["source"]
                print(json.dumps(line), file=output, flush=True)
            num_counted = counts.total() - counts["equivalent"]
            num_killed = counts["killed"] + counts["timed out"]
            print(f"{module}: {num_killed} of {num_counted} killed, {counts['equivalent']} equivalent", flush=True)
            num_survivors += counts["survived"]
        workers.close()
    return 1 if num_survivors else 0


if __name__ == "__main__":
    sys.exit(main())
