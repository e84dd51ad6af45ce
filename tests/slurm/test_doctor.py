"""doctor in jobs: reports no error without a fault, and each fault with its rank and what to do."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT, tiny_recipe
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import NO_GPUS, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@dataclass
class Fault:
    """How a fault is produced, on the second node or in the whole step, and the line that must report it."""

    line: str
    on_second_node: str = ":"
    whole_step: dict[str, str] = field(default_factory=dict)
    options: str = ""
    srun: str = "srun --kill-on-bad-exit=1"

    @property
    def made(self) -> str:
        """Key of how it is produced; faults with the same key are tested in one step."""
        return f"{self.on_second_node} {self.whole_step} {self.options} {self.srun}"


HANGS = """\
import os, signal, sys, threading, time
def all_gather(ranks, value):
    while True:  # SLURM continues a stopped process before it ends it
        os.kill(os.getpid(), signal.SIGSTOP)
def wait():
    while not hasattr(sys.modules.get("pipeline.training.rank_checks"), "check_ranks"):
        time.sleep(0.001)
    module = sys.modules["pipeline.training.rank_checks"]
    module.patience_seconds = lambda ranks: 4
    if os.environ["SLURM_PROCID"] == "1":
        module.RankGroup.all_gather = all_gather
threading.Thread(target=wait, daemon=True).start()
"""
"""sitecustomize.py of a step in which rank 1 hangs once all ranks are connected; waits are short."""
LATE = """\
import os, sys, time
if "doctor" in sys.argv and "RESTARTS_IN_JOB" not in os.environ:
    from pipeline.runtime import rendezvous
    rendezvous.patience_seconds = lambda ranks: 8
    if os.environ["SLURM_PROCID"] == "1":
        time.sleep(30)
"""
"""sitecustomize.py of ranks of which, at the first start, rank 1 is late and the other waits for 8 seconds only."""
BROKEN_NODE = "export GLOO_SOCKET_IFNAME=ib7 PYTHONPATH=OTHER; cd COPY"
"""Three faults of a node."""
SECOND = r"\[127\.0\.0\.12 rank 1\]"
FAULTS = {
    "a name that does not resolve": Fault(
        rf"the first node's name no\.such\.node\.invalid does not resolve .*MASTER_ADDR.* {SECOND}",
        "export MASTER_ADDR=no.such.node.invalid",
    ),
    "an address where nobody is": Fault(
        r"ranks 1 \(all of 127\.0\.0\.12\) did not connect to rank 0 at 127\.0\.0\.11:\d+ within 62 s; .* "
        r"\[127\.0\.0\.11 rank 0\]",
        "export MASTER_PORT=9; sleep 90 & wait",
    ),
    "an interface that is not there": Fault(
        rf"GLOO_SOCKET_IFNAME=ib7: no such interface; set it to one of .*lo.* {SECOND}",
        BROKEN_NODE,
    ),
    "another environment": Fault(
        rf"lightning 0\.1 here and \d.* on rank 0; use one environment for all nodes.* {SECOND}", BROKEN_NODE
    ),
    "folders that nodes do not share": Fault(
        rf"corpus corpus is missing here but exists on rank 0; use a folder that all nodes share.* {SECOND}",
        "cd ELSEWHERE",
    ),
    "a run folder that is not the same": Fault(
        r"run folder run: .* is not shared with ranks [01]; set run\.folder to a shared folder "
        r"\[127\.0\.0\.11 rank 0(; 127\.0\.0\.12 rank 1)?\]",
        "cd ELSEWHERE",
    ),
    "a corpus with other bytes": Fault(rf"corpus corpus differs .* {SECOND}", BROKEN_NODE),
    "locks that stay on a node": Fault(
        r"run folder run: .* does not show one node's locks to another, so two jobs could write at the same time; .*"
        r"\[127\.0\.0\.11 rank 0\]",
        "cd MOUNTED",
    ),
    "a run folder that nobody may write": Fault(
        r"run folder /sys/run: /sys is not writable \(.+\); set another run\.folder \[127\.0\.0\.11 rank 0; "
        r"127\.0\.0\.12 rank 1\]",
        options="--run.folder /sys/run",
    ),
    "a rank that hangs": Fault(
        r"ranks 1 do not respond: they hang or are disconnected; check their nodes "
        r"\[127\.0\.0\.11 rank 0\]",
        whole_step={"PYTHONPATH": "HANGS"},
    ),
    "the terminal of srun --pty": Fault(
        r"the step has 2 tasks, and only this one runs in the terminal of srun --pty; start ranks with srun --overlap",
        srun="in_terminal srun --kill-on-bad-exit=1 --pty",
    ),
}


@pytest.fixture(scope="module")
def said(whole_cluster: Cluster, tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The output of doctor for each fault and for none: a job with a step for each of them."""
    if shutil.which("bindfs") is None:
        pytest.skip("bindfs is not installed: apt-get install bindfs")
    folder, mounted = tmp_path_factory.mktemp("doctor"), tmp_path_factory.mktemp("mounted")
    recipe = folder / "tiny.yaml"
    values = tiny_recipe(tiny_corpus.parent)
    values["corpus"]["folder"], values["run"]["folder"] = "corpus", "run"
    recipe.write_text(yaml.safe_dump(values))
    shutil.copytree(tiny_corpus, folder / "corpus")
    (folder / "elsewhere").mkdir()
    shutil.copytree(tiny_corpus, folder / "copy" / "corpus")
    with (folder / "copy" / "corpus" / "train.source.tokens.npy").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    (folder / "other" / "lightning-0.1.dist-info").mkdir(parents=True)
    (folder / "other" / "lightning-0.1.dist-info" / "METADATA").write_text("Name: lightning\nVersion: 0.1\n")
    (folder / "hangs").mkdir()
    (folder / "hangs" / "sitecustomize.py").write_text(HANGS)
    places = {"ELSEWHERE": "elsewhere", "COPY": "copy", "OTHER": "other", "MOUNTED": str(mounted), "HANGS": "hangs"}

    def placed(text: str) -> str:
        for place, path in places.items():
            text = text.replace(place, str(folder / path))
        return text

    # `script` sends a NUL character, which the terminal shows.
    in_terminal = """in_terminal() { script -qec "$*" /dev/null | sed 's/^^@//'; return "${PIPESTATUS[0]}"; }"""
    lines = ["#!/bin/bash", f"cd {folder}", in_terminal]
    nothing = Fault("", options="--trainer.devices 3 --trainer.num_nodes 5")
    steps = {fault.made: fault for fault in FAULTS.values()}
    names = {made: f"step {number}" for number, made in enumerate([*steps, nothing.made])}
    for number, fault in enumerate([*steps.values(), nothing]):
        on_node = placed(fault.on_second_node)
        node = folder / f"node-{number}.sh"
        node.write_text(f'#!/bin/bash\nif [ "$SLURM_PROCID" = 1 ]; then {on_node}; fi\nexec "$@"\n')
        settings = " ".join(f"{key}={placed(value)}" for key, value in fault.whole_step.items())
        command = f"{sys.executable} -m pipeline doctor --config {recipe} {fault.options}"
        # Variables given to `env` reach the tasks; srun overrides those of the job.
        lines.append(
            f"echo; echo '=== step {number}'; {fault.srun} env {settings} bash {node} {command}; echo \"=> $?\""
        )
    script = folder / "job.sh"
    script.write_text("\n".join(lines) + "\n")
    # The same files, but without the locks of the other mount.
    subprocess.run(["bindfs", folder, mounted], check=True)
    try:
        job = whole_cluster.submit("--nodes=2", *NO_GPUS, script)
        assert job.wait(1500) == "COMPLETED", job.log
    finally:
        subprocess.run(["umount", mounted], check=True)
    parts = re.split(r"\n=== (.*)\n", job.log)
    by_step = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {"nothing": by_step[names[nothing.made]]} | {
        name: by_step[names[fault.made]] for name, fault in FAULTS.items()
    }


def test_nothing_is_wrong(said: dict[str, str]) -> None:
    assert "=> 0" in said["nothing"]
    assert "WRONG" not in said["nothing"]
    assert re.search(r"ok    all-reduce over gloo, 2 ranks: [\d,]+ MB/s", said["nothing"])


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(said: dict[str, str], name: str) -> None:
    wrong = [line for line in said[name].splitlines() if line.startswith("WRONG ")]
    assert any(re.search(FAULTS[name].line, line) for line in wrong), said[name]
    assert "=> 0" not in said[name]
    assert "Traceback" not in said[name]


def test_a_late_rank_is_no_mistake(cluster: Cluster, recipe_file: Path, tmp_path: Path) -> None:
    """The job starts again, on the same nodes, and trains."""
    (tmp_path / "sitecustomize.py").write_text(LATE)
    late = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    job = train(cluster, recipe_file, tmp_path / "run", "--trainer.max_steps", 2, environment=late)
    assert job.wait() == "COMPLETED", job.log
    assert re.search(r"WRONG ranks 1 \(all of 127\.0\.0\.12\) did not connect .* within 8 s; .* rank 0\]", job.log)
    assert job.log.count("starting again on 2 of 2 nodes") == 1
    assert job.log.count("ok    all-reduce over gloo, 2 ranks") == 1
    assert job.restarts == 0


def test_training_asks_doctor_first(cluster: Cluster, recipe_file: Path, tmp_path: Path) -> None:
    gpus = ["--gpus-per-node=2"]
    job = train(cluster, recipe_file, tmp_path / "run", sbatch=gpus, environment={"GLOO_SOCKET_IFNAME": "ib7"})
    assert job.wait() == "FAILED"
    assert job.fields()["ExitCode"] == "2:0"
    assert re.search(r"GLOO_SOCKET_IFNAME=ib7: no such interface.*\[127\.0\.0\.11 rank 0; 127\.0\.0\.12", job.log)
    assert re.search(
        r"torch sees 0 of the 2 GPUs of this node, which has 1 tasks; .*\[127\.0\.0\.11 rank 0; 127\.0\.0\.12", job.log
    )
    assert job.restarts == 0
    assert not (tmp_path / "run").exists()
