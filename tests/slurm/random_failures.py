"""Random failures in jobs of four nodes, on a cluster of five whose links can be cut. Needs root, and minutes for each.

    python -m tests.slurm.random_failures --count 20

Each job gets one or two failures at random moments. Its last checkpoint must equal, bit for bit, that of a run that had
the same numbers of ranks at the same steps and no failure. The last line sums up the JSON lines before it.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import pipeline, tiny_recipe, write_text
from tests.integration.runs import assert_same_state, checkpoints, scalars, step_of
from tests.slurm.cluster import Cluster, Job
from tests.slurm.jobs import SLOWLY, resumed_from, train, wait_until_saved
from tests.slurm.links import Links

FAILURES = ("kill", "hang", "cut", "lose", "lose first", "cut first")
"""A rank is killed, a rank hangs, a node's link is cut, a node is lost: another than the first, and the first one."""
NUM_NODES, MIN_NODES = 4, 2
OPTIONS = ["--network.dropout", 0.3, "--run.checkpoint_every_steps", 3, "--run.keep_last", 1000]
OPTIONS += ["--trainer.max_steps", 80, "--run.timeout_seconds", 6]


class Trial:
    def __init__(self, cluster: Cluster, links: Links, recipe: Path, folder: Path, choice: random.Random) -> None:
        self.cluster, self.links, self.recipe, self.folder, self.choice = cluster, links, recipe, folder, choice
        self.run = folder / "run"
        self.lost: list[str] = []
        self.cut: list[str] = []
        self.job = self.submit(self.run, NUM_NODES, MIN_NODES=str(MIN_NODES), SLOW_RANK=str(choice.randrange(2)))

    def submit(self, run: Path, nodes: int, *options: object, **environment: str) -> Job:
        all_options = [*OPTIONS, *options]
        environment = {**SLOWLY, "GLOO_SOCKET_IFNAME": "eth0", **environment}
        return train(self.cluster, self.recipe, run, *all_options, nodes=nodes, environment=environment)

    def fail(self, kind: str) -> dict[str, Any]:
        """Make one failure, and return what it cost."""
        at_least = step_of(checkpoints(self.run)[-1]) if checkpoints(self.run) else 0
        wait_until_saved(self.job, self.run, at_least + 3 * self.choice.randint(1, 3))
        time.sleep(self.choice.uniform(0, 1))
        before, resumed = self.job.log, len(resumed_from(self.job))
        hosts = [host for host in self.job.hosts() if host not in (*self.lost, *self.cut)]
        began = time.monotonic()
        node = hosts[0] if kind.endswith("first") else self.choice.choice(hosts[1:])
        if kind in ("kill", "hang"):
            rank = self.choice.choice(self.cluster.tasks(self.job.number))
            os.kill(rank, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        elif kind.startswith("cut"):
            self.links.cut(node)
            self.cut.append(node)
        else:
            self.cluster.kill_node(node)
            self.lost.append(node)
        self.cluster.wait_until(lambda: re.search(r"starting again on|; requeue", self.job.log[len(before) :]), 200)
        ended = time.monotonic()
        self.cluster.wait_until(lambda: len(resumed_from(self.job)) > resumed, 200)
        start = self.job.log.rindex("resuming from")
        # The second step begins when the first one has been taken.
        self.cluster.wait_until(lambda: self.job.log[start:].count("MOMENT training") >= 2, 200)
        now = time.monotonic()
        # Steps that were begun: those that this start has taken, from where it resumed.
        latest = before.rpartition("resuming from")[2]
        begun = [0, *resumed_from(self.job)][resumed] + latest.count("MOMENT training")
        return {
            "failure": kind,
            "seconds_to_end_of_step": round(ended - began, 1),
            "seconds_from_end_to_next_step": round(now - ended, 1),
            "steps_lost": begun - 1 - resumed_from(self.job)[-1],
        }

    def check(self) -> dict[str, Any]:
        """Wait for the end, and compare with a run that had as many ranks at each step."""
        assert self.job.wait() == "COMPLETED", self.job.log
        counts = [NUM_NODES] + [
            int(found) if found else NUM_NODES
            for found in re.findall(r"starting again on (\d+) of|; requeue", self.job.log)
        ]
        steps = [*resumed_from(self.job), 80]
        assert len(steps) == len(counts), (steps, counts, self.job.log)
        restarts = self.job.restarts
        self.mend()
        again = self.folder / "again"
        for step, nodes in zip(steps, counts, strict=True):
            job = self.submit(again, nodes, "--trainer.max_steps", step)
            assert job.wait() == "COMPLETED", job.log
        assert_same_state(checkpoints(self.run)[-1], checkpoints(again)[-1])
        for curve in ("train/loss", "validation/bleu"):
            assert scalars(self.run, curve) == scalars(again, curve), curve
        return {"ranks": counts, "steps": steps, "requeues": restarts, "equal": True}

    def mend(self) -> None:
        for node in self.cut:
            self.links.mend(node)
        for node in self.lost:
            self.cluster.start_node(node)
        self.cluster.make_idle()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="failures")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    choice = random.Random(arguments.seed)
    links = Links(num_nodes=NUM_NODES + 1)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    (folder / "cluster").mkdir()
    cluster = Cluster(folder / "cluster", NUM_NODES + 1, links)
    results: list[dict[str, Any]] = []
    try:
        links.start()
        cluster.start()
        write_text(folder)
        recipe = folder / "tiny.yaml"
        recipe.write_text(yaml.safe_dump(tiny_recipe(folder)))
        assert pipeline("prepare", "--config", recipe).returncode == 0
        while len(results) < arguments.count:
            kinds = [FAILURES[len(results) % len(FAILURES)], choice.choice(FAILURES[:-2])][: choice.randint(1, 2)]
            place = folder / f"trial-{len(results)}"
            place.mkdir()
            trial = Trial(cluster, links, recipe, place, choice)
            failures = [trial.fail(kind) for kind in kinds]
            outcome = trial.check()
            for one in failures:
                results.append({**one, **outcome, "job": trial.job.number})
                print(json.dumps(results[-1]), flush=True)
    finally:
        cluster.stop()
        links.stop()
        shutil.rmtree(folder, ignore_errors=True)
    waits = [one["seconds_from_end_to_next_step"] for one in results]
    summary = {"failures": len(results), "median_seconds": statistics.median(waits), "max_seconds": max(waits)}
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
