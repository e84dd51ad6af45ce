"""doctor inside jobs: well where all is well, and each fault found, placed and explained."""

import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import NO_GPUS, train

pytestmark = pytest.mark.slow


@dataclass
class Fault:
    """How it is made on the second node, or in the whole step, and the line that must come of it."""

    line: str
    on_second_node: str = ":"
    whole_step: dict[str, str] = field(default_factory=dict)
    options: str = ""
    srun: str = "srun --kill-on-bad-exit=1"


SECOND = r"\[127\.0\.0\.12 rank 1\]"
FAULTS = {
    "a name that does not resolve": Fault(
        rf"the first node's name no\.such\.node\.invalid does not resolve .*MASTER_ADDR.* {SECOND}",
        "export MASTER_ADDR=no.such.node.invalid",
    ),
    "an address where nobody is": Fault(
        r"ranks 1 did not come; .* \[127\.0\.0\.11 rank 0\]", "export MASTER_PORT=9; sleep 40 & wait"
    ),
    "an interface that is not there": Fault(
        rf"GLOO_SOCKET_IFNAME=ib7: there is no such interface; there are .*lo.* {SECOND}",
        "export GLOO_SOCKET_IFNAME=ib7",
    ),
    "a clock that is wrong": Fault(
        rf"the clock is \+(59|6\d)\.\d s from rank 0's; .* {SECOND}", 'set -- faketime -f +60s "$@"'
    ),
    "another environment": Fault(
        rf"lightning 0\.1, and \d.* on rank 0; give all nodes one environment.* {SECOND}", "export PYTHONPATH=OTHER"
    ),
    "folders that nodes do not share": Fault(
        rf"corpus corpus is not there .*; give one that all nodes share.* {SECOND}", "cd ELSEWHERE"
    ),
    "a run folder that is not the same": Fault(
        r"run folder run: .* is not the one of ranks [01]; give a run\.folder that nodes share "
        r"\[127\.0\.0\.11 rank 0(; 127\.0\.0\.12 rank 1)?\]",
        "cd ELSEWHERE",
    ),
    "a corpus with other bytes": Fault(rf"corpus corpus differs .* {SECOND}", "cd COPY"),
    "no GPUs where SLURM gave some": Fault(
        r"SLURM gave this node 8 GPUs and torch sees 0; .* " + SECOND, "export SLURM_GPUS_ON_NODE=8"
    ),
    "no srun": Fault(r"the job has 2 tasks and this process was not started by srun; start it with srun", srun=""),
    "a job named bash": Fault(
        r"the job is named 'bash', .* give it another --job-name", whole_step={"SLURM_JOB_NAME": "bash"}
    ),
    "no text": Fault(
        r"text none\.en is missing; put it there", options="--corpus.folder new --corpus.train.source none.en"
    ),
    "a disk that is too small": Fault(
        r"GiB free, its checkpoints need [\d,.]+; lower run\.keep_last",
        options="--run.keep_last 1000000000",
    ),
}


@pytest.fixture(scope="module")
def said(whole_cluster: Cluster, tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What doctor says of each fault, and of none: a job with a step for each."""
    from tests.conftest import tiny_recipe

    folder = tmp_path_factory.mktemp("doctor")
    recipe = folder / "tiny.yaml"
    import yaml

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
    places = {"ELSEWHERE": "elsewhere", "COPY": "copy", "OTHER": "other"}
    lines = ["#!/bin/bash", f"cd {folder}"]
    for number, (name, fault) in enumerate({"nothing": Fault(""), **FAULTS}.items()):
        made = fault.on_second_node
        for place, path in places.items():
            made = made.replace(place, str(folder / path))
        node = folder / f"node-{number}.sh"
        node.write_text(f'#!/bin/bash\nif [ "$SLURM_PROCID" = 1 ]; then {made}; fi\nexec "$@"\n')
        settings = " ".join(f"{key}={value}" for key, value in fault.whole_step.items())
        command = f"{sys.executable} -m pipeline doctor --config {recipe} {fault.options}"
        # Given by name, a variable of the job reaches the tasks past srun, which would set its own.
        lines.append(f"echo; echo '=== {name}'; {fault.srun} env {settings} bash {node} {command}; echo \"=> $?\"")
    script = folder / "job.sh"
    script.write_text("\n".join(lines) + "\n")
    job = whole_cluster.submit("--nodes=2", *NO_GPUS, script)
    assert job.wait(300) == "COMPLETED", job.log
    parts = re.split(r"\n=== (.*)\n", job.log)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


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


def test_training_asks_doctor_first(cluster: Cluster, recipe_file: Path, tmp_path: Path) -> None:
    job = train(cluster, recipe_file, tmp_path / "run", environment={"GLOO_SOCKET_IFNAME": "ib7"})
    assert job.wait() == "FAILED"
    assert job.fields()["ExitCode"] == "2:0"
    assert re.search(
        r"GLOO_SOCKET_IFNAME=ib7: there is no such interface.*\[127\.0\.0\.11 rank 0; 127\.0\.0\.12", job.log
    )
    assert job.restarts == 0
    assert not (tmp_path / "run").exists()
