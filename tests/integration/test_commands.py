"""The commands on a trained run, called as a user calls them, and their error messages."""

import gzip
import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import ROOT, pipeline, refusal, run_here


def test_missing_packages_are_reported() -> None:
    """As when the virtual environment is not active."""
    for command in ("fit", "doctor", "prepare"):
        command = [sys.executable, "-S", "-m", "pipeline", command, "--config", "configs/demo.yaml"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {sys.executable} has no ")
        assert done.stderr.endswith("; use .venv/bin/python, which make .venv/installed sets up\n")
        assert done.stderr.count("\n") == 1


def test_doctor_in_a_job_of_one_task(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has one task, the recipe two devices, which count for nothing."""
    job = {"JOB_ID": "7", "STEP_ID": "0", "PROCID": "0", "LOCALID": "0", "NTASKS": "1", "STEP_TASKS_PER_NODE": "1"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert "share the CPU" not in run_here("doctor", recipe_file, "--trainer.devices", 2)[0]


def test_doctor_in_a_job_of_two_tasks_describes_the_backend_once(recipe_file: Path) -> None:
    """The first rank does, when the others no longer wait for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def doctor(rank: str) -> subprocess.CompletedProcess:
        job = {"JOB_ID": "7", "STEP_ID": "0", "PROCID": rank, "LOCALID": rank, "NTASKS": "2"}
        job |= {"STEP_TASKS_PER_NODE": "2", "STEP_NODELIST": "host"}
        environment = {f"SLURM_{name}": value for name, value in job.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return pipeline("doctor", "--config", recipe_file, environment=environment)

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(doctor, "01")
    assert (first.returncode, second.returncode) == (0, 0), first.stdout
    lines = first.stdout.decode().splitlines()
    [place] = [place for place, line in enumerate(lines) if line.startswith("ok    backend: precision 32-true, ")]
    assert "all-reduce" in "".join(lines[:place])
    assert second.stdout == b""


@pytest.mark.slow
def test_evaluate_against_another_checkpoint_with_the_papers_bleu(
    trained_run: Path, tiny_corpus: Path, tmp_path: Path
) -> None:
    source, reference = (tiny_corpus.parent / f"validation.{side}" for side in ("source", "target"))
    other = trained_run / "checkpoints" / "step=00000080.ckpt"
    command = ["evaluate", trained_run, "--source", source, "--reference", reference, "--beam", 1]
    printed, said = run_here(*command, "--paper", "--versus", other)
    lines = printed.splitlines()
    scores = json.loads(lines[-1])
    assert scores["versus"]["checkpoint"] == str(other)
    # The difference is to the other checkpoint's own BLEU, and a line of text names the checkpoint.
    other_scores = json.loads(run_here("evaluate", other, *command[2:])[0].splitlines()[-1])
    assert scores["versus"]["bleu"] == other_scores["bleu"]
    assert scores["versus"]["bleu_difference"] == pytest.approx(scores["bleu"] - other_scores["bleu"], abs=1e-3)
    assert any(str(other) in line and "paired bootstrap" in line for line in lines)
    # The paper's BLEU has its own name and signature beside sacreBLEU's.
    assert scores["bleu_paper_signature"] != scores["bleu_signature"]
    names = ["bleu", "bleu_lowercase", "chrf", "exact_match", "bleu_paper", "bleu_moses_lowercase"]
    assert [line.split()[0] for line in lines[: len(names)]] == names
    assert "bleu_paper" not in other_scores
    # The translations are in lower case, too.
    assert "look lower-cased" not in said


def test_errors_of_the_command_line(trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three, two = tmp_path / "three", tmp_path / "two"
    three.write_text("a\nb\nc\n")
    two.write_text("a\nb\n")
    nothing = (tmp_path / "nothing").open("w+")
    monkeypatch.setattr(sys, "stdin", nothing)
    assert "'translat' is not a command" in refusal("translat")
    assert "the following arguments are required: --config" in refusal("fit", "--fresh")
    assert "no such checkpoint" in refusal("translate", tmp_path / "none.ckpt")
    assert "--reference: is missing; give" in refusal("evaluate", trained_run, "--source", tmp_path)
    assert "--source: is missing; give" in refusal("evaluate", trained_run, "--reference", tmp_path)
    assert "the recipe has no corpus.test; give" in refusal("evaluate", trained_run)
    assert "it was trained without prefixes, omit" in refusal("translate", trained_run, "--prefix", ">>de<<")
    assert "argument '--beems'" in refusal("translate", trained_run, "--beems", 3)
    assert "--beam 0" in refusal("translate", trained_run, "--beam", 0)
    assert "--n-best 0" in refusal("translate", trained_run, "--n-best", 0)
    assert "is more than the beam, 2; raise --beam" in refusal("translate", trained_run, "--n-best", 3, "--beam", 2)
    assert "--length-penalty -1" in refusal("translate", trained_run, "--length-penalty", -1)
    assert "none.txt" in refusal("translate", trained_run, "--source", tmp_path / "none.txt")
    message = refusal("evaluate", trained_run, "--source", three, "--reference", two)
    assert "3 lines" in message
    assert f"{two} is shorter" in message
    texts = ["--source", three, "--reference", three]
    assert "its folder does not exist" in refusal("evaluate", trained_run, *texts, "--output", tmp_path / "no" / "file")
    assert "no such checkpoint" in refusal("evaluate", trained_run, *texts, "--versus", tmp_path / "none.ckpt")
    nothing.close()


def test_paths_that_cannot_be_written(trained_run: Path, tmp_path: Path) -> None:
    # Nothing can be created below a file, even by root.
    (tmp_path / "file").touch()
    unwritable = tmp_path / "file" / "folder"
    line = refusal("export", trained_run, unwritable)
    assert f"{unwritable}: cannot be written (Not a directory ({tmp_path / 'file'})); give another folder" in line
    assert "; give another file as --output" in refusal("average", trained_run, "--last", 2, "--output", unwritable)
    truncated = tmp_path / "truncated.gz"
    truncated.write_bytes(gzip.compress(b"a house" * 99)[:-9])
    line = refusal("evaluate", trained_run, "--source", truncated, "--reference", truncated)
    assert f"{truncated}: the gzip file is truncated or damaged; copy or download it again" in line
