"""doctor in jobs: reports no error without a fault, and each fault with its rank and what to do.

tests/pipeline/test_distributed_checks.py and test_rendezvous.py have the faults that show without a cluster, such as
ranks that are late or hang.
"""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.conftest import tiny_recipe
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import NO_GPUS, train

pytestmark = pytest.mark.slow


@dataclass
class Fault:
    """How a fault is produced, on the second node or by options, and the line that must report it.

    Paths are relative to the folder of the job.
    """

    line: str
    on_second_node: str = ":"
    options: str = ""
    srun: str = "srun --kill-on-bad-exit=1"

    @property
    def made(self) -> str:
        """Key of how it is produced; faults with the same key are tested in one step."""
        return f"{self.on_second_node} {self.options} {self.srun}"


FAULTS = {
    "folders that nodes do not share": Fault(
        r"corpus corpus is missing here but exists on rank 0; use a folder that all nodes share.* "
        r"\[127\.0\.0\.12 rank 1\]",
        "cd elsewhere",
    ),
    "locks that stay on a node": Fault(
        r"run folder run: .* does not show one node's locks to another, so two jobs could write at the same time; .*"
        r"\[127\.0\.0\.11 rank 0\]",
        "cd mounted",
    ),
    "a run folder that nobody may write": Fault(
        r"run folder /sys/run: /sys is not writable \(.+\); set another run\.folder \[127\.0\.0\.11 rank 0; "
        r"127\.0\.0\.12 rank 1\]",
        options="--run.folder /sys/run",
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
    (folder / "mounted").symlink_to(mounted)
    # `script` sends a NUL character, which the terminal shows.
    in_terminal = """in_terminal() { script -qec "$*" /dev/null | sed 's/^^@//'; return "${PIPESTATUS[0]}"; }"""
    lines = ["#!/bin/bash", f"cd {folder}", in_terminal]
    nothing = Fault("", options="--trainer.devices 3 --trainer.num_nodes 5")
    steps = {fault.made: fault for fault in FAULTS.values()}
    names = {made: f"step {number}" for number, made in enumerate([*steps, nothing.made])}
    for number, fault in enumerate([*steps.values(), nothing]):
        node = folder / f"node-{number}.sh"
        node.write_text(f'#!/bin/bash\nif [ "$SLURM_PROCID" = 1 ]; then {fault.on_second_node}; fi\nexec "$@"\n')
        command = f"{sys.executable} -m pipeline doctor --config {recipe} {fault.options}"
        lines.append(f"echo; echo '=== step {number}'; {fault.srun} bash {node} {command}; echo \"=> $?\"")
    script = folder / "job.sh"
    script.write_text("\n".join(lines) + "\n")
    # The same files, but without the locks of the other mount.
    subprocess.run(["bindfs", folder, mounted], check=True)
    try:
        job = whole_cluster.submit("--nodes=2", *NO_GPUS, script)
        assert job.wait() == "COMPLETED", job.log
    finally:
        subprocess.run(["umount", "--lazy", mounted], check=True)
    parts = re.split(r"\n=== (.*)\n", job.log)
    by_step = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {"nothing": by_step[names[nothing.made]]} | {
        name: by_step[names[fault.made]] for name, fault in FAULTS.items()
    }


def test_nothing_is_wrong(said: dict[str, str]) -> None:
    assert "=> 0" in said["nothing"]
    assert "WRONG" not in said["nothing"]
    # The first rank describes the backend when the others no longer wait for it.
    assert re.search(r"ok    all-reduce over gloo, 2 ranks: [\d,]+ MB/s[\s\S]*\nok    backend: ", said["nothing"])
    assert said["nothing"].count("ok    backend: ") == 1


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(said: dict[str, str], name: str) -> None:
    wrong = [line for line in said[name].splitlines() if line.startswith("WRONG ")]
    assert any(re.search(FAULTS[name].line, line) for line in wrong), said[name]
    assert "=> 0" not in said[name]
    assert "Traceback" not in said[name]


def test_training_asks_doctor_first(cluster: Cluster, recipe_file: Path, tmp_path: Path) -> None:
    gpus = ["--gpus-per-node=2"]
    job = train(cluster, recipe_file, tmp_path / "run", sbatch=gpus, environment={"GLOO_SOCKET_IFNAME": "ib7"})
    assert job.wait() == "FAILED"
    assert job.fields()["ExitCode"] == "2:0"
    assert re.search(
        r"GLOO_SOCKET_IFNAME=ib7: no such interface; set it to one of .*lo.*\[127\.0\.0\.11 rank 0; 127\.0\.0\.12",
        job.log,
    )
    assert re.search(
        r"torch sees 0 of the 2 GPUs of this node, which has 1 tasks; .*\[127\.0\.0\.11 rank 0; 127\.0\.0\.12", job.log
    )
    assert job.restarts == 0
    assert not (tmp_path / "run").exists()
