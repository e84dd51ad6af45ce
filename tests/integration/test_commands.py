"""The commands on a trained run, called as a user calls them, and their error messages."""

import gzip
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sacrebleu

from tests.conftest import ROOT, pipeline
from tests.integration.runs import start

COMMANDS = ["prepare", "fit", "average", "translate", "evaluate", "export", "doctor", "demo", "recipe"]


def error_line(*arguments: object, text: str | None = None) -> str:
    """Run a command that must fail with exit code 2 and one line of error; return that line."""
    done = pipeline(*arguments, text=text)
    stderr = done.stderr.decode()
    assert done.returncode == 2, stderr
    assert done.stdout == b""
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "Traceback" not in stderr
    assert "usage" not in stderr
    return lines[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_does_not_import_torch(command: str) -> None:
    code = (
        f"import sys; from pipeline.__main__ import main\ntry: main([{command!r}, '--help'])\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules or 'lightning' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "usage" in done.stdout


@pytest.mark.parametrize("command", ["prepare", "translate", "evaluate"])
def test_lightning_is_imported_only_to_train(command: str, trained_run: Path, recipe_file: Path) -> None:
    texts = trained_run.parent / "text"
    texts.write_text("a red dog\n")
    arguments = {
        "prepare": ["--config", recipe_file],
        "translate": [trained_run, "--input", texts],
        "evaluate": [trained_run, "--source", texts, "--reference", texts],
    }[command]
    code = (
        f"import sys; from pipeline.__main__ import main\nassert main({[command, *map(str, arguments)]!r}) == 0\n"
        "print('lightning' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


def test_missing_packages_are_reported() -> None:
    """As when the virtual environment is not active."""
    for command in ("fit", "doctor", "prepare"):
        command = [sys.executable, "-S", "-m", "pipeline", command, "--config", "configs/demo.yaml"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {sys.executable} has no ")
        assert done.stderr.endswith("; use .venv/bin/python, which make .venv/installed sets up\n")
        assert done.stderr.count("\n") == 1


def test_doctor_in_a_job_of_one_task(recipe_file: Path) -> None:
    """The job has one task, the recipe two devices."""
    job = {"JOB_ID": "7", "STEP_ID": "0", "PROCID": "0", "LOCALID": "0", "NTASKS": "1", "STEP_TASKS_PER_NODE": "1"}
    environment = {f"SLURM_{name}": value for name, value in job.items()}
    done = pipeline("doctor", "--config", recipe_file, "--trainer.devices", 2, environment=environment)
    assert done.returncode == 0, done.stdout
    assert b"ok    trainer.devices 2 is ignored: the job sets it to 1" in done.stdout


def test_translate_writes_one_line_per_input_line(trained_run: Path) -> None:
    done = pipeline("translate", trained_run, text="the dog sees a cat\n\na house\nthe dog sees a cat")
    assert done.returncode == 0
    lines = done.stdout.decode().split("\n")
    assert len(lines) == 5
    assert lines[4] == ""
    assert lines[1] == ""
    assert lines[0] == lines[3] != ""
    assert "best.ckpt" in done.stderr.decode()


def test_a_closed_output_pipe_is_no_error(trained_run: Path, tmp_path: Path) -> None:
    text = tmp_path / "many"
    text.write_text("a dog\n" * 3000)
    command = f"'{sys.executable}' -m pipeline translate '{trained_run}' --input '{text}' | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert done.returncode == 0


def test_interactive_input_is_translated_line_by_line(trained_run: Path) -> None:
    import os
    import pty

    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "translate", str(trained_run)],
        cwd=ROOT,
        stdin=follower,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    os.write(leader, b"the dog sees a cat\n")
    first = process.stdout.readline()  # before the end of the input
    assert first.strip()
    os.write(leader, b"\x04")
    assert process.wait(60) == 0
    process.stdout.close()
    os.close(leader)
    os.close(follower)


def test_evaluate_scores_with_signatures(trained_run: Path, tiny_corpus: Path, tmp_path: Path) -> None:
    source, reference = (tiny_corpus.parent / f"validation.{side}" for side in ("source", "target"))
    output = tmp_path / "hypotheses"
    done = pipeline("evaluate", trained_run, "--source", source, "--reference", reference, "--output", output)
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout.decode().splitlines()[-1])
    hypotheses, references = output.read_text().split("\n")[:-1], reference.read_text().split("\n")[:-1]
    assert scores["bleu"] == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references]).score, abs=1e-3)
    assert scores["chrf"] == pytest.approx(sacrebleu.corpus_chrf(hypotheses, [references]).score, abs=1e-3)
    assert "tok:13a" in scores["bleu_signature"]
    assert "case:lc" in scores["bleu_lowercase_signature"]
    assert scores["chrf_interval"][0] < scores["chrf"] < scores["chrf_interval"][1]
    greedy = pipeline("evaluate", trained_run, "--source", source, "--reference", reference, "--beam", 1)
    assert json.loads(greedy.stdout.decode().splitlines()[-1])["beam_size"] == 1


@pytest.mark.slow
def test_evaluate_against_another_checkpoint_with_the_papers_bleu(
    trained_run: Path, tiny_corpus: Path, tmp_path: Path
) -> None:
    source, reference = (tiny_corpus.parent / f"validation.{side}" for side in ("source", "target"))
    other = trained_run / "checkpoints" / "step=00000080.ckpt"
    command = ["evaluate", trained_run, "--source", source, "--reference", reference, "--beam", 1]
    done = pipeline(*command, "--paper", "--versus", other)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    scores = json.loads(lines[-1])
    assert scores["versus"]["checkpoint"] == str(other)
    # The difference is to the other checkpoint's own BLEU, and a line of text names the checkpoint.
    other_evaluation = pipeline("evaluate", other, "--source", source, "--reference", reference, "--beam", 1)
    other_scores = json.loads(other_evaluation.stdout.decode().splitlines()[-1])
    assert scores["versus"]["bleu"] == other_scores["bleu"]
    assert scores["versus"]["bleu_difference"] == pytest.approx(scores["bleu"] - other_scores["bleu"], abs=1e-3)
    assert any(str(other) in line and "paired bootstrap" in line for line in lines)
    # The paper's BLEU has its own name and signature beside sacreBLEU's.
    assert scores["bleu_paper_signature"] != scores["bleu_signature"]
    scores = ["bleu", "bleu_lowercase", "chrf", "bleu_paper", "bleu_moses_lowercase"]
    assert [line.split()[0] for line in lines[: len(scores)]] == scores
    assert "bleu_paper" not in other_scores
    assert f"{reference}: its lines look lower-cased" in done.stderr.decode()


def test_doctor_reports_problems(recipe_file: Path) -> None:
    healthy = pipeline("doctor", "--config", recipe_file, "--fresh")
    assert healthy.returncode == 0, healthy.stdout
    assert b"WRONG" not in healthy.stdout
    broken = pipeline(
        "doctor", "--config", recipe_file, "--corpus.folder", "nowhere", "--corpus.train.source", "none.en"
    )
    assert broken.returncode == 1
    assert b"WRONG text none.en is missing" in broken.stdout
    other = pipeline("doctor", "--config", recipe_file, "--corpus.vocabulary_size", 50)
    assert other.returncode == 1
    assert (
        b"was made from other inputs or settings: corpus.vocabulary_size was 60, now 50; name another" in other.stdout
    )


def test_doctor_reports_what_fit_refuses(trained_run: Path, recipe_file: Path) -> None:
    wider = pipeline("doctor", "--config", recipe_file, "--run.folder", trained_run, "--network.d_ff", 64)
    assert wider.returncode == 1
    assert re.search(rb"contains a run of another recipe: .*network\.d_ff 32 -> 64.*; change it back", wider.stdout)
    fresh = pipeline("doctor", "--config", recipe_file, "--run.folder", trained_run, "--network.d_ff", 64, "--fresh")
    assert fresh.returncode == 0, fresh.stdout
    endless = pipeline("doctor", "--config", recipe_file, "--trainer.max_steps", -1)
    assert b"WRONG command line: trainer.max_steps -1 is not a number of steps" in endless.stdout


def test_errors_of_the_command_line(trained_run: Path, tmp_path: Path) -> None:
    assert "'translat' is not a command" in error_line("translat")
    assert "no such checkpoint" in error_line("translate", tmp_path / "none.ckpt")
    assert "--reference: is missing; give" in error_line("evaluate", trained_run, "--source", tmp_path)
    assert "--source: is missing; give" in error_line("evaluate", trained_run, "--reference", tmp_path)
    assert "the recipe has no corpus.test; give" in error_line("evaluate", trained_run)
    assert "it was trained without prefixes, omit" in error_line("translate", trained_run, "--prefix", ">>de<<")
    assert "argument '--beems'" in error_line("translate", trained_run, "--beems", 3)
    assert "--beam 0" in error_line("translate", trained_run, "--beam", 0)
    assert "--n-best 0" in error_line("translate", trained_run, "--n-best", 0)
    assert "is more than the beam, 2; raise --beam" in error_line("translate", trained_run, "--n-best", 3, "--beam", 2)
    assert "--length-penalty -1" in error_line("translate", trained_run, "--length-penalty", -1)
    assert "none.txt" in error_line("translate", trained_run, "--input", tmp_path / "none.txt")
    truncated = tmp_path / "cut.ckpt"
    truncated.write_bytes((trained_run / "checkpoints" / "best.ckpt").read_bytes()[:5000])
    assert "truncated" in error_line("translate", truncated)
    assert "truncated" in error_line("export", truncated, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
    three, two = tmp_path / "three", tmp_path / "two"
    three.write_text("a\nb\nc\n")
    two.write_text("a\nb\n")
    message = error_line("evaluate", trained_run, "--source", three, "--reference", two)
    assert "3 lines" in message
    assert f"{two} is shorter" in message
    texts = ["--source", three, "--reference", three]
    assert "its folder is not there" in error_line(
        "evaluate", trained_run, *texts, "--output", tmp_path / "no" / "file"
    )
    assert "no such checkpoint" in error_line("evaluate", trained_run, *texts, "--versus", tmp_path / "none.ckpt")


def test_paths_that_cannot_be_written(trained_run: Path, recipe_file: Path, tmp_path: Path) -> None:
    # Nothing can be created below a file, even by root.
    (tmp_path / "file").touch()
    unwritable = tmp_path / "file" / "folder"
    line = error_line("fit", "--config", recipe_file, "--run.folder", unwritable)
    assert f"{unwritable}: cannot be written (Not a directory); give another run.folder" in line
    line = error_line("export", trained_run, unwritable)
    assert f"{unwritable}: cannot be written (File exists); give another folder" in line
    assert "check that path, or give another" in error_line("average", trained_run, "--last", 2, "--output", unwritable)
    truncated = tmp_path / "truncated.gz"
    truncated.write_bytes(gzip.compress(b"a house" * 99)[:-9])
    line = error_line("evaluate", trained_run, "--source", truncated, "--reference", truncated)
    assert f"{truncated}: is no gzip file or a damaged one" in line


def test_a_folder_with_other_files_is_refused(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("meow")
    assert "not a run folder" in error_line("fit", "--config", recipe_file, "--run.folder", tmp_path / "photos")
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


def test_unequal_texts_stop_fit_before_anything_is_written(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("a\n")
    message = error_line(
        "fit",
        "--config",
        recipe_file,
        "--corpus.train.target",
        tmp_path / "short",
        "--corpus.folder",
        tmp_path / "corpus",
        "--run.folder",
        tmp_path / "run",
    )
    assert "1 line" in message
    assert not (tmp_path / "corpus").exists()
    assert not (tmp_path / "run").exists()


def test_a_second_fit_on_a_run_folder_is_refused(recipe_file: Path, tmp_path: Path) -> None:
    command = ["fit", "--config", recipe_file, "--run.folder", tmp_path / "run", "--trainer.max_steps", 100000]
    first = start(*command)
    while not list((tmp_path / "run").glob("checkpoints/*")) and first.poll() is None:
        time.sleep(0.05)
    assert "another fit is writing to it" in error_line(*command)
    first.kill()
    first.wait()
    done = pipeline(*command[:-1], 10)
    assert done.returncode == 0, done.stderr
