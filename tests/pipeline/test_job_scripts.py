"""The scripts of slurm/ with stubs for the programs of SLURM: what they start, and what becomes of the job."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT

SRUN = """\
echo "$@${SLURM_GPUS:+ of $SLURM_GPUS GPUs}" >>"$NOTES/steps"
while [[ $# -gt 0 && $1 != pipeline ]]; do [[ $1 != --nodelist=$SILENT ]] || exit 1; shift; done
[[ $# -gt 0 ]] || exit 0
shift
env >"$NOTES/environment"
echo "$RANKS_TOKEN" >>"$NOTES/tokens"
echo "$@"
next=$(head -n 1 "$NOTES/$1" 2>/dev/null)
sed -i 1d "$NOTES/$1" 2>/dev/null
eval "${next:-exit 0}"
"""
"""Notes its options and its environment, prints the pipeline's arguments, and ends as the test says."""
SQUEUE = """\
case "$*" in
*--steps*) echo 7.0 7.batch 7.3 ;;
*"%T %N"*) echo "RUNNING $(head -n 1 "$NOTES/watched")"; sed -i 1d "$NOTES/watched" ;;
*%B*) echo "$STATE" ;;
*ArrayJobID*) echo "$JOBS" ;;
*%N*) echo "$HOSTS" ;;
esac
"""
SCONTROL = """\
case "$1 $2" in
"show hostnames") tr , '\\n' <<<"${3:-$HOSTS}" ;;
*) echo "$@" >>"$NOTES/scontrol" ;;
esac
"""
SCANCEL = 'echo "$@" >>"$NOTES/scancel"'
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_NNODES": "1",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_CPUS_PER_TASK": "4",
    "SLURMD_NODENAME": "n1",
    "PYTHON": "true",
    "STATE": "n1 10:00:00 RUNNING None",
    "JOBS": "7 7 0",
    "HOSTS": "n1",
    "SILENT": "none",
}
"""A job of one node with two tasks. STATE is its state in the controller, SILENT a node that does not answer."""


class Ended(NamedTuple):
    """How a job has ended."""

    code: int
    output: str
    log: str
    requeued: str
    """What was requeued."""
    failures: str | None
    """The number of starts that the next start of the job finds; None if there is none."""
    steps: list[str]
    """The arguments of each srun."""
    tokens: list[str]
    """RANKS_TOKEN of each command of the pipeline."""
    environment: dict[str, str]
    """That of the last command of the pipeline."""


def job(
    folder: Path,
    script: str,
    words: str = "",
    outcomes: Mapping[str, Sequence[str]] = {},
    environment: Mapping[str, str] = {},
    counted: str = "",
    **options: object,
) -> Ended:
    """Run a job's script with its arguments, in the folder where the job was submitted.

    `outcomes` are, for each command of the pipeline, what its starts do, in order, in the words of a shell; then they
    succeed. `environment` is what the job has besides `JOB`; `counted` is what earlier starts of the job have left as
    their number; the options are those of the process.
    """
    if counted:
        (folder / ".failures-7").write_text(f"{counted}\n")
        jobs = environment.get("JOBS", JOB["JOBS"])
        environment = {**environment, "SLURM_RESTART_COUNT": "1", "JOBS": f"{jobs[:-1]}1"}
    programs, notes = folder / "programs", folder / "notes"
    programs.mkdir()
    notes.mkdir()
    shutil.copytree(ROOT / "slurm", folder / "slurm")
    for name, code in {"srun": SRUN, "squeue": SQUEUE, "scontrol": SCONTROL, "scancel": SCANCEL}.items():
        write_program(programs / name, code)
    for name in ("steps", "environment", "tokens", "scontrol"):
        (notes / name).touch()
    for command, lines in outcomes.items():
        (notes / command).write_text("".join(f"{line}\n" for line in lines))
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    own |= {"PATH": f"{programs}:{os.environ['PATH']}", "NOTES": str(notes), **JOB, **environment}
    # Not pipes: what is left of a killed watcher may hold them for a second.
    with (folder / "output").open("w") as output, (folder / "log").open("w") as log:
        command = ["bash", f"slurm/{script}.sbatch", *words.split()]
        process = subprocess.run(command, env=own, cwd=folder, stdout=output, stderr=log, timeout=300, **options)
    failures = folder / ".failures-7"
    assert not list(folder.glob(".mistake*")) + list(folder.glob(".first-task*"))
    return Ended(
        process.returncode,
        (folder / "output").read_text(),
        (folder / "log").read_text(),
        (notes / "scontrol").read_text().strip(),
        failures.read_text().strip() if failures.exists() else None,
        (notes / "steps").read_text().splitlines(),
        (notes / "tokens").read_text().splitlines(),
        dict(line.split("=", 1) for line in (notes / "environment").read_text().splitlines() if "=" in line),
    )


def write_program(path: Path, code: str) -> None:
    path.write_text(f"#!/bin/bash\n{code}\n")
    path.chmod(0o755)


MISTAKE = "touch $MISTAKE_FILE; exit"
"""Of the rank that made it; srun ends with the exit code of another one, which it killed."""
SAVED = "rm -f $FAILURES_FILE; exit"
FULL_DISK = "ln -s /bin/false $NOTES/../programs/mktemp"
D, F = "doctor", "fit"


@pytest.mark.parametrize(
    ("counted", "outcomes", "environment", "code", "commands", "requeued", "failures"),
    [
        ("", {}, {}, 0, "doctor fit", False, None),
        ("", {D: ["exit 1"]}, {}, 2, "doctor", False, None),
        ("", {D: [f"{MISTAKE} 137"]}, {}, 2, "doctor", False, None),
        ("", {D: ["exit 69"]}, {}, 0, "doctor doctor fit", False, None),
        ("", {D: ["exit 138"]}, {}, 138, "doctor", True, "0"),
        ("", {D: ["exit 137"] * 3}, {}, 137, "doctor doctor doctor", False, None),
        ("", {F: ["exit 2"]}, {}, 2, "doctor fit", False, None),
        ("", {F: [f"{MISTAKE} 137"]}, {}, 2, "doctor fit", False, None),
        ("", {F: ["exit 75"]}, {}, 75, "doctor fit", True, "0"),
        ("2", {F: ["exit 75"]}, {}, 75, "doctor fit", True, "2"),
        ("2", {F: [f"{SAVED} 75"]}, {}, 75, "doctor fit", True, None),
        # It came from the time limit: the next start gets no further.
        ("", {F: ["exit 75"]}, {"STATE": "n1 2:59 RUNNING None"}, 75, "doctor fit", True, "1"),
        ("2", {F: ["exit 75"]}, {"STATE": "n1 2:59 RUNNING None"}, 75, "doctor fit", False, None),
        ("", {F: ["exit 1"]}, {}, 0, "doctor fit fit", False, None),
        ("", {F: ["exit 1"] * 3}, {}, 1, "doctor fit fit fit", False, None),
        ("", {F: [f"{SAVED} 1"] + ["exit 1"] * 3}, {}, 1, "doctor fit fit fit fit", False, None),
        ("", {F: [f"{SAVED} 1"] * 10}, {}, 0, "doctor fit" + " fit" * 10, False, None),
        ("", {F: ["exit 1"]}, {"STATE": "n1 2:59 RUNNING None"}, 1, "doctor fit", True, "1"),
        ("", {F: ["exit 1"]}, {"STATE": "n1 1:00:00 CANCELLED None"}, 1, "doctor fit", False, None),
        ("", {F: ["exit 1"]}, {"STATE": "n1 0:00 COMPLETING None"}, 1, "doctor fit", False, None),
        ("", {F: ["exit 1"]}, {"STATE": "n2 1:00:00 RUNNING None"}, 1, "doctor fit", False, "1"),
        # The first node of earlier starts was lost, and their scripts with it.
        ("2", {}, {}, 0, "doctor fit", False, None),
        ("2", {F: ["exit 1"]}, {}, 1, "doctor fit", False, None),
        ("3", {}, {}, 1, "", False, None),
        # A text in place of the count is no number.
        ("", {F: ["echo 'a[$(touch ran)]' >$FAILURES_FILE; exit 1"]}, {}, 0, "doctor fit fit", False, None),
        ("08", {}, {}, 1, "", False, None),
        # A link in place of the count is not followed.
        ("", {F: ["ln --force --symbolic one.yaml $FAILURES_FILE; exit 1"]}, {}, 0, "doctor fit fit", False, None),
        # Without a count, on a full disk, the job would start again without end.
        ("", {D: [f"{FULL_DISK}; exit 137", "exit 137"]}, {}, 137, "doctor doctor", False, "1"),
        ("", {D: [f"{FULL_DISK}; rm $FAILURES_FILE"], F: ["exit 1"]}, {}, 1, "doctor fit", False, None),
    ],
)
def test_what_becomes_of_a_training_job(
    counted: str,
    outcomes: Mapping[str, Sequence[str]],
    environment: Mapping[str, str],
    code: int,
    commands: str,
    requeued: bool,
    failures: str | None,
    tmp_path: Path,
) -> None:
    """`counted` is how many starts without a new checkpoint an earlier start of the job has noted."""
    (tmp_path / "one.yaml").write_text("precious")
    done = job(tmp_path, "train", "one.yaml --fresh", outcomes, {"RANKS_TOKEN": "the shell's", **environment}, counted)
    assert (tmp_path / "one.yaml").read_text() == "precious"
    assert done.output.splitlines() == [f"{one} --config one.yaml --fresh" for one in commands.split()], done.log
    assert (done.code, done.requeued, done.failures) == (code, "requeue 7" if requeued else "", failures), done.log
    assert not (tmp_path / "ran").exists()
    # Each step has a secret of its own: ranks of two steps, or of another start, must not take one another for theirs.
    assert len(set(done.tokens)) == len(done.tokens) == len(commands.split())
    assert all(re.fullmatch("[0-9a-f]{64}", token) for token in done.tokens)
    # `fit` ignores --fresh in a start that is not the job's first.
    restarts = max(0, len(commands.split()) - (2 if "fit" in commands else 1))
    assert done.environment.get("RESTARTS_IN_JOB", "0") == str(restarts)


@pytest.mark.parametrize(
    ("counted", "outcome", "environment", "code", "requeued", "failures"),
    [
        ("", "exit 0", {}, 0, "", None),
        ("", "exit 2", {}, 2, "", None),
        ("", f"{MISTAKE} 137", {}, 2, "", None),
        ("", "exit 75", {}, 75, "requeue 5_3", "0"),
        ("", "exit 143", {}, 75, "requeue 5_3", "0"),  # preempted
        ("", "exit 137", {}, 137, "requeue 5_3", "1"),
        ("2", "exit 1", {}, 1, "", None),
        ("2", f"{SAVED} 1", {}, 1, "requeue 5_3", None),
        ("", "exit 1", {"STATE": "n1 1:00:00 CANCELLED None"}, 1, "", None),
    ],
)
def test_what_becomes_of_a_task_that_translates(
    counted: str,
    outcome: str,
    environment: Mapping[str, str],
    code: int,
    requeued: str,
    failures: str | None,
    tmp_path: Path,
) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "JOBS": "5 5 1\n7 5 0", **environment}
    done = job(tmp_path, "translate", "runs/a --output y", {"translate": [outcome]}, array, counted)
    assert (done.code, done.requeued, done.failures) == (code, requeued, failures), done.log


@pytest.mark.parametrize(("needed", "goes_on"), [("1", True), ("", False), ("2", False)])
def test_a_job_goes_on_with_the_nodes_that_answer(needed: str, goes_on: bool, tmp_path: Path) -> None:
    two = {"SLURM_NNODES": "2", "HOSTS": "n1,n2", "SILENT": "n2", "MIN_NODES": needed, "SLURM_GPUS": "16"}
    watched = "until grep --quiet gres=none $NOTES/steps; do sleep 0.05; done"
    done = job(tmp_path, "train", "one.yaml", {"doctor": [watched], "fit": ["exit 1"]}, two)
    steps = [step.split(" bash -c")[0] for step in done.steps if " fit --config one.yaml" in step]
    assert steps[0] == "--ntasks=4 --overlap --kill-on-bad-exit=1"
    assert steps[1:] == ["--ntasks=2 --overlap --nodes=1 --nodelist=n1 --kill-on-bad-exit=1"] * goes_on, done.log
    assert (done.code, done.requeued) == ((0, "") if goes_on else (1, "requeue 7"))
    # What asks a node, watches the first one, or starts again has not the GPUs of all nodes.
    whole = [step for step in done.steps if step.endswith("of 16 GPUs")]
    assert [step.rpartition(" --config")[0].rpartition(" ")[2] for step in whole] == ["doctor", "fit"]
    watch = "--overlap --gres=none --nodes=1 --ntasks=1 --nodelist=n2 "
    assert sum(step.startswith(watch) for step in done.steps) == 1
    ended = tmp_path / "notes" / "scancel"
    assert ended.read_text() == "--signal=KILL 7.0\n--signal=KILL 7.3\n"


@pytest.mark.parametrize("needed", ["0", "4", "08", "two", "x[$(touch ran)]"])
def test_a_number_of_nodes_that_the_job_does_not_have_is_refused(needed: str, tmp_path: Path) -> None:
    """Before anything is run; a requeued job may have fewer nodes than it needs."""
    three = {"SLURM_NNODES": "3", "HOSTS": "n1,n2,n3", "MIN_NODES": needed}
    done = job(tmp_path, "train", "one.yaml", environment=three)
    assert (done.code, done.requeued, done.steps) == (2, "", [])
    assert f"MIN_NODES is '{needed}' and the job has 3 nodes; set it to a number from 1 to 3, leave it" in done.log
    assert not (tmp_path / "ran").exists()
    if needed == "4":
        (again := tmp_path / "again").mkdir()
        requeued = three | {"SLURM_RESTART_COUNT": "1", "JOBS": "7 7 1"}
        assert job(again, "train", "one.yaml", environment=requeued).code == 0


@pytest.mark.parametrize(
    ("nodes", "requeued"),
    [
        (["n1,n2", "n2", "n2", "n1,n2"], "requeue 7"),
        (["n2", "n1,n2", "n2", "n1,n2"], ""),  # SLURM answers oddly for a moment
        (["n1", "n3", "n3", "n3"], ""),  # This node is no longer the job's.
    ],
)
def test_a_lost_first_node_is_noticed_by_another(nodes: list[str], requeued: str, tmp_path: Path) -> None:
    (tmp_path / "watch.sbatch").write_text(
        f"""source slurm/environment.sh; sleep() {{ true; }}; export -f sleep; export SLURM_JOB_NAME=train
        printf '%s\\n' {" ".join(nodes)} none >"$NOTES/watched"
        bash -c "$REQUEUE_WHEN_LOST" n1 7 said"""
    )
    done = job(tmp_path, "../watch", environment={"SLURMD_NODENAME": "n2"})
    assert done.requeued == requeued, done.log
    said = tmp_path / "said"
    assert (said.exists() and "the first node n1 is lost; requeueing" in said.read_text()) == bool(requeued)


SESSION = {
    "SLURM_STEP_ID": "0",
    "SLURM_PTY_PORT": "4000",
    "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "8",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_CPU_BIND_LIST": "0x1",
    "SLURM_MEM_BIND": "local",
    "SLURM_EXACT": "1",
    "SLURM_THREADS_PER_CORE": "1",
    "SLURM_HINT": "nomultithread",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_EXPORT_ENV": "NONE",
    "SRUN_EXPORT_ENV": "NONE",
    "RESTARTS_IN_JOB": "2",
}
"""What `srun --ntasks=8 --cpu-bind=... --pty bash` leaves to `sbatch`, and a job of ours to what it starts."""
RESOURCES = {"SLURM_GPUS": "3", "SLURM_GPU_BIND": "single:1", "SLURM_MEM_PER_CPU": "100"}
"""Which `sbatch` may have set as well."""


@pytest.mark.parametrize(("script", "words", "num_tasks"), [("train", "one.yaml", 2), ("evaluate", "runs/a", 1)])
def test_a_job_does_not_inherit_a_session(script: str, words: str, num_tasks: int, tmp_path: Path) -> None:
    own = {"SLURM_NTASKS_PER_NODE": str(8 if num_tasks == 1 else num_tasks), "SRUN_CPUS_PER_TASK": "1"}
    own |= {"OMP_NUM_THREADS": ""}
    done = job(tmp_path, script, words, environment=SESSION | RESOURCES | own)
    assert done.code == 0, done.log
    assert not done.environment.keys() & (SESSION.keys() | RESOURCES.keys()), done.environment
    assert done.steps[-1].startswith(f"--ntasks={num_tasks} ")
    assert done.environment["SLURM_NTASKS_PER_NODE"] == str(num_tasks)
    assert done.environment["SRUN_CPUS_PER_TASK"] == done.environment["OMP_NUM_THREADS"] == JOB["SLURM_CPUS_PER_TASK"]
    [line] = [line for line in done.log.splitlines() if "not used" in line]
    named = {f"SLURM_{name}" for name in ("HINT", "DISTRIBUTION", "THREADS_PER_CORE")}
    assert set(re.findall("SLURM_\\w+", line)) == named | RESOURCES.keys()


def test_a_job_keeps_what_it_asks_for(tmp_path: Path) -> None:
    """On a line of its script; and resources where nothing shows that they are those of another job."""
    done = job(tmp_path, "train", "one.yaml", environment=RESOURCES)
    assert done.environment.items() >= RESOURCES.items()
    assert "not used" not in done.log


def test_a_line_of_the_script_asks(tmp_path: Path) -> None:
    script = ROOT / "slurm" / "train.sbatch"
    asked = script.read_text().replace("#SBATCH --requeue", "#SBATCH --requeue --hint=nomultithread\n#SBATCH --gpus 3")
    (tmp_path / "asked.sbatch").write_text(asked)
    own = SESSION | RESOURCES | {"SLURM_SUBMIT_DIR": str(tmp_path)}
    done = job(tmp_path, "../asked", "one.yaml", environment=own)
    kept = done.environment.keys() & (SESSION.keys() | RESOURCES.keys())
    assert kept == {"SLURM_HINT", "SLURM_GPUS"}, done.log


def test_a_job_is_no_task_of_the_array_that_submitted_it(tmp_path: Path) -> None:
    """Else it would requeue that one; and no later start, which ignores --fresh."""
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "4"}
    done = job(tmp_path, "train", "one.yaml", {"fit": ["exit 75"]}, array)
    assert (done.requeued, done.environment["SLURM_RESTART_COUNT"]) == ("requeue 7", "0")
    assert "SLURM_ARRAY_TASK_ID" not in done.environment


EVALUATED = "average runs/a --last 3\nevaluate runs/a/average-last-3.ckpt"
RAN = "$(touch ran)"


@pytest.mark.parametrize(
    ("script", "words", "environment", "code", "output"),
    [
        # Two texts or the recipe's; of as many checkpoints as there are, or as are asked for.
        ("evaluate", "runs/a", {}, 0, f"{EVALUATED}\n"),
        ("evaluate", "runs/a x y --paper", {}, 0, f"{EVALUATED} --source x --reference y --paper\n"),
        ("evaluate", "runs/a --test-set wmt14/full", {}, 0, f"{EVALUATED} --test-set wmt14/full\n"),
        ("evaluate", "runs/a", {"LAST": "2"}, 0, EVALUATED.replace("3", "2") + "\n"),
        ("evaluate", "runs/a", {"LAST": f"x[{RAN}]"}, 2, "is not a number of checkpoints"),
        ("evaluate", "runs/b", {}, 0, "average runs/b --last 1\nevaluate runs/b/average-last-1.ckpt\n"),
        ("evaluate", "runs/a x", {}, 2, "both texts or none"),
        ("evaluate", "runs/a x --paper", {}, 2, "both texts or none"),
        ("evaluate", "--paper", {}, 2, "a run folder is required"),
        ("evaluate", "", {}, 2, "a run folder is required"),
        # Without a file, each task of an array would print all translations.
        ("translate", "runs/a --source x --output y", {}, 0, "translate runs/a --source x --output y\n"),
        ("translate", "runs/a --output=y --source x", {}, 0, "translate runs/a --output=y --source x\n"),
        ("translate", "runs/a --source x --outputs y", {}, 2, "--output is required"),
        # Without a stage, the job would run all of them.
        ("synthesize", "distillation --stage x", {}, 0, "synthesize distillation --stage x\n"),
        ("synthesize", "distillation", {}, 2, "--stage is required"),
        # A sweep needs a recipe for each task.
        ("sweep", "a.yaml b.yaml", {"SLURM_ARRAY_TASK_ID": "1"}, 0, "doctor --config b.yaml\nfit --config b.yaml\n"),
        *(
            ("sweep", "a.yaml b.yaml", {"SLURM_ARRAY_TASK_ID": number}, 2, "--array 0-1")
            for number in ("2", "", f"x[{RAN}]")
        ),
    ],
)
def test_what_a_job_runs(
    script: str, words: str, environment: Mapping[str, str], code: int, output: str, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "runs" / "a" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for step in (4, 8, 12):
        (checkpoints / f"step={step}.ckpt").touch()
    done = job(tmp_path, script, words, environment=environment)
    assert done.code == code, done.log
    assert done.output == output if code == 0 else (done.output == "" and output in done.log)
    assert not (tmp_path / "ran").exists()


def test_no_older_average_is_evaluated(tmp_path: Path) -> None:
    done = job(tmp_path, "evaluate", "runs/a", {"average": ["exit 3"]})
    assert (done.code, done.output) == (3, "average runs/a --last 1\n")


def test_a_job_ends_though_it_ignores_sigterm(tmp_path: Path) -> None:
    """And leaves nothing that runs on."""
    ignores = {"preexec_fn": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)}
    done = job(tmp_path, "export", "runs/a exports/a", **ignores)
    assert (done.code, done.output, done.log) == (0, "export runs/a exports/a --force\n", "")


@pytest.mark.parametrize("script", sorted((ROOT / "slurm").glob("*.sbatch")), ids=lambda path: path.stem)
def test_a_job_that_comes_back_goes_on_in_its_log(script: Path) -> None:
    """And each job has a log of its own, each task of an array too."""
    lines = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --requeue", "#SBATCH --open-mode=append"} <= set(lines)
    number = "%A-%a" if script.stem in ("sweep", "translate") else "%j"
    assert f"#SBATCH --output=%x-{number}.log" in lines


@pytest.mark.parametrize("words", ["", "runs/a", "--bind_all"])
def test_who_can_open_tensorboard(words: str, tmp_path: Path) -> None:
    """Nobody but programs of the node where ssh answers on it; the log says who else can."""
    with socket.socket() as ssh:
        try:
            ssh.bind(("127.9.9.9", 22))
            ssh.listen()
        except PermissionError:
            pytest.skip("needs root, to listen on the port of ssh")
        except OSError:  # ssh listens on all addresses.
            pass
        here = {"SLURMD_NODENAME": "127.9.9.9", "SLURM_SUBMIT_HOST": "login", "USER": "me", "PYTHON": sys.executable}
        done = job(tmp_path, "tensorboard", words, environment=here)
    [step] = done.steps
    port = step.split("--port ")[1]
    folder = "runs/a" if words == "runs/a" else "runs"
    if words == "--bind_all":
        host, tunnel, who = "127.9.9.9", f"-L {port}:127.9.9.9:{port} me@login", "everybody on the cluster's network"
    else:
        host, tunnel = "127.0.0.1", f"-J me@login -L {port}:127.0.0.1:{port} me@127.9.9.9"
        who = "whoever can run a program on 127.9.9.9"
    assert step.endswith(f"tensorboard.main --logdir {folder} --host {host} --port {port}")
    assert f"ssh -N {tunnel}\n" in done.log
    assert f"TensorBoard has no password: {who} can open it\n" in done.log


def submit(folder: Path, paths: Sequence[str], *words: str, **environment: str) -> tuple[str, str, str]:
    """Run submit.sh for a recipe with these paths; return what it prints, what it says, and the jobs' arguments."""
    shutil.copytree(ROOT / "slurm", folder / "slurm")
    write_program(folder / "python", "printf '%s\\n' " + " ".join(f"'{path}'" for path in paths))
    number = "echo >>numbers; echo $((6 + $(wc -l <numbers)))"
    write_program(folder / "sbatch", f"[[ $* != *$FAILS* ]] || exit 1; printf '<%s>' \"$@\" >>{folder}/jobs; {number}")
    write_program(folder / "scancel", f"printf '<scancel %s>' \"$@\" >>{folder}/jobs")
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": f"{folder}/python", "FAILS": "none", **environment}
    command = ["bash", "slurm/submit.sh", "one.yaml", *words]
    done = subprocess.run(
        command, env=os.environ | own, cwd=folder, check=False, capture_output=True, encoding="utf-8", timeout=300
    )
    return done.stdout, done.stderr, (folder / "jobs").read_text()


@pytest.mark.parametrize(
    "paths",
    [["runs/a"], ["runs/a", "corpus/a b.txt", "corpus/c.txt"], ["--test-set", "-a", "-b"]],
    ids=["test", "validation", "paths are no options"],
)
def test_the_last_jobs_get_the_recipes_paths(paths: list[str], tmp_path: Path) -> None:
    """`recipe paths` names a text only if the recipe has no test text."""
    output, _, jobs = submit(tmp_path, paths, "--run.seed", "2")
    assert output == "prepare 7\ntrain 8\nevaluate 9\nexport 10\n"
    assert re.findall("afterok:([0-9]+)", jobs) == ["7", "8", "9"]
    assert jobs.count("<one.yaml><--run.seed><2>") == 2
    given = [f"<./{path}>" if path.startswith("-") else f"<{path}>" for path in paths]
    assert f"<slurm/evaluate.sbatch>{''.join(given)}<--parsable>" in jobs
    assert jobs.endswith(f"<slurm/export.sbatch>{given[0]}<exports/{Path(paths[0]).name}>")


def test_a_chain_without_a_job_is_cancelled(tmp_path: Path) -> None:
    """By its first job, on which all others depend."""
    _, said, jobs = submit(tmp_path, ["runs/a"], FAILS="slurm/evaluate.sbatch")
    assert jobs.endswith("<slurm/train.sbatch><one.yaml><scancel 7>")
    assert "sbatch rejected the evaluate job" in said


def test_a_chain_is_submitted_from_a_session_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / ".mistake-3").touch()
    session = {"SLURM_SUBMIT_DIR": str(tmp_path / "other"), "SLURM_JOB_ID": "3", "first": "3", "previous": "3"}
    output, _, jobs = submit(tmp_path, ["runs/a"], PYTHON="./python", **session)
    assert output.endswith("export 10\n")
    assert "afterok:3" not in jobs
    assert (tmp_path / ".mistake-3").exists()
