"""The other scripts of slurm/: the chain of submit.sh, shared texts, synthesis; and shellcheck for all."""

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from pipeline.inference.shards import MANIFEST
from pipeline.inference.text_io import CHUNK
from tests.conftest import ROOT, pipeline, sentences, tiny_recipe, write_text
from tests.fork_server import ForkServer
from tests.integration.runs import TRAINING, held
from tests.integration.test_synthesize_kills import SHARD_WRITTEN, results
from tests.slurm.cluster import Cluster, Job
from tests.slurm.jobs import NO_GPUS
from tests.slurm.test_training import EXTENDED

SCRIPTS = sorted((ROOT / "slurm").glob("*.s[hb]*"))
ANY_NODE = "--cpus-per-task=1 --mem=0 --oversubscribe"


@pytest.mark.slow
def test_scripts_are_clean() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    done = subprocess.run(
        ["shellcheck", "--external-sources", *SCRIPTS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def chain(cluster: Cluster, recipe: Path, *options: object) -> dict[str, Job]:
    program = cluster.folder / "my_pipeline.py"
    program.write_text(EXTENDED)
    asked = {
        "PROGRAM": str(program),
        "JOB_OPTIONS": f"--output={cluster.folder}/logs/job-%j.log {ANY_NODE}",
        "TRAIN_OPTIONS": f"--nodes=2 {' '.join(NO_GPUS)}",
    }
    done = cluster.run("slurm/submit.sh", recipe, *options, check=False, **asked)
    assert done.returncode == 0, done.stderr
    assert "EXTENDED" in done.stderr
    return {name: Job(cluster, number) for name, number in map(str.split, done.stdout.splitlines())}


@pytest.mark.slow
def test_the_chain_from_text_to_bundle(cluster: Cluster, tmp_path: Path) -> None:
    write_text(tmp_path)
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe(tmp_path)))
    # The bundle is written to exports/ of the project, so the run needs a unique name.
    run = tmp_path / f"chained-{tmp_path.name}-{time.time_ns()}"
    bundle = ROOT / "exports" / run.name
    try:
        jobs = chain(cluster, recipe, "--run.folder", run)
        assert list(jobs) == ["prepare", "train", "evaluate", "export"]
        for job in jobs.values():
            assert job.wait() == "COMPLETED", job.log
        scores = json.loads(jobs["evaluate"].log.splitlines()[-1])
        assert scores["sentences"] == 40
        assert scores["checkpoint"].endswith("average-last-3.ckpt")
        assert (bundle / "model.ts").exists()
    finally:
        shutil.rmtree(bundle, ignore_errors=True)
        with suppress(OSError):  # It holds a user's bundles.
            bundle.parent.rmdir()


@pytest.mark.slow
def test_a_failed_link_cancels_the_rest(cluster: Cluster, tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe(tmp_path)))  # its texts are missing
    jobs = chain(cluster, recipe, "--run.folder", tmp_path / "run")
    assert jobs["prepare"].wait() == "FAILED"
    assert [jobs[name].wait() for name in ("train", "evaluate", "export")] == ["CANCELLED"] * 3
    assert str(tmp_path / "train.source") in jobs["prepare"].log


def numbers(array: Job) -> list[str]:
    """Return the job ids of an array's tasks that have started."""
    return [one["JobId"] for one in array.all_fields() if one["ArrayTaskId"].isdigit()]


@pytest.mark.slow
def test_tasks_that_share_a_text(cluster: Cluster, trained_run: Path, tmp_path: Path) -> None:
    """One is killed, one preempted and one signalled; together they write what one process writes."""
    (tmp_path / "text").write_text("".join(f"{line}\n" for line in sentences(6 * CHUNK, seed=8)))
    arguments = [trained_run, "--source", tmp_path / "text", "--beam", 4]
    output, shards = tmp_path / "output", tmp_path / "output.shards"
    script = ["--nodes=1", *ANY_NODE.split(), "slurm/translate.sbatch"]
    shared = [*arguments, "--output", output, "--shard-lines", CHUNK]
    # Each task waits after its first shard.
    go = tmp_path / "go"
    changed = {"PROGRAM": "-m tests.integration.changed_program", **held(CHUNK, SHARD_WRITTEN, go)}
    array = cluster.submit("--array=3-5", *script, *shared, **changed)
    cluster.wait_until(lambda: len(numbers(array)) == 3 == len(list(shards.glob("*[0-9]"))))
    # The last task of an array has the array's job id, which stands for all tasks.
    preempted, killed, signalled = (Job(cluster, number) for number in sorted(numbers(array)))
    cluster.run("scontrol", "requeue", f"{array.number}_5")
    os.kill(cluster.tasks(killed.number)[0], signal.SIGKILL)
    signalled.signal("USR1")
    for job in (preempted, killed, signalled):
        job.wait_until_restarted()
    go.touch()
    for job in (preempted, killed, signalled):
        assert job.wait() == "COMPLETED", job.log
        assert job.restarts == 1, job.log
        assert f"{output}: has the translations of all {6 * CHUNK:,} lines" in job.log
    assert [entry.name for entry in shards.iterdir()] == [MANIFEST]
    assert output.read_bytes() == pipeline("translate", *arguments).stdout
    other = cluster.submit("--array=0", *script, *shared, "--length-penalty", 0)
    assert other.wait() == "FAILED"
    assert (other.fields()["ExitCode"], other.restarts) == ("2:0", 0)
    assert other.log.count(f"error: {shards}: was begun with another length_penalty (see ") == 1


@pytest.mark.slow
def test_the_stages_of_synthesize(cluster: Cluster, trained_run: Path, tmp_path: Path) -> None:
    """Jobs that are killed and requeued write what one machine writes without."""
    write_text(tmp_path)
    recipe = tmp_path / "tiny.yaml"
    values = tiny_recipe(tmp_path)
    values["trainer"] |= {"max_steps": 200, "val_check_interval": 100}
    recipe.write_text(yaml.safe_dump(values))
    (tmp_path / "mono").write_text("".join(f"{line}\n" for line in sentences(1000, seed=9)))
    work, options = tmp_path / "work", ["--reverse-model", trained_run, "--folder", tmp_path / "work"]
    asked = {
        "JOB_OPTIONS": f"--output={cluster.folder}/logs/job-%j.log {ANY_NODE}",
        "TRAIN_OPTIONS": f"--nodes=1 {' '.join(NO_GPUS)}",
        "TRANSLATE_OPTIONS": "--array=0-1",
    }
    # A fit, a translation and the scoring wait until they have been disturbed.
    places = {tmp_path / "fit": f"{TRAINING} 50", tmp_path / "translated": f"{SHARD_WRITTEN} 100"}
    places[tmp_path / "scored"] = "pipeline.inference.scoring.score_targets 0"
    asked |= cluster.forks | ForkServer.shared().for_children | {"PROGRAM": "-m tests.integration.changed_program"}
    asked |= {"CHANGE": "hold", "HOLD": ";".join(f"{what} {path}" for path, what in places.items())}
    command = ["back-translation", recipe, tmp_path / "mono", *options]
    done = cluster.run("slurm/synthesize.sh", *command, check=False, **asked)
    assert done.returncode == 0, done.stderr
    jobs = {name: Job(cluster, number) for name, number in map(str.split, done.stdout.splitlines())}
    assert list(jobs)[3:5] == ["translate-round1.source", "score-round1"]
    jobs["fit-forward"].wait_for("training:")
    cluster.run("scontrol", "requeue", jobs["fit-forward"].number)
    jobs["fit-forward"].wait_until_restarted()
    (tmp_path / "fit").touch()
    array = jobs["translate-round1.source"]
    cluster.wait_until(lambda: len(numbers(array)) == 2 and cluster.tasks(array.number))
    with suppress(ProcessLookupError):  # A stage ends with the process that has started it.
        for task in cluster.tasks(array.number):
            os.kill(task, signal.SIGKILL)
    array.wait_until_restarted()
    (tmp_path / "translated").touch()
    cluster.wait_until(lambda: cluster.tasks(jobs["score-round1"].number))
    jobs["score-round1"].signal("USR1")
    jobs["score-round1"].wait_until_restarted()
    (tmp_path / "scored").touch()
    for name, job in jobs.items():
        assert job.wait() == "COMPLETED", f"{name}: {job.log}"
    assert [jobs[name].restarts for name in ("fit-forward", "translate-round1.source", "score-round1")] == [1, 1, 1]
    written = results(work)
    work.rename(tmp_path / "by_jobs")
    alone = pipeline("synthesize", command[0], "--config", recipe, "--text", *command[2:])
    assert alone.returncode == 0, alone.stderr.decode()
    assert results(work) == written
