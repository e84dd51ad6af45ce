"""Mistakes that new users make: `doctor` and `fit` find the same ones, and each is one line with the way out."""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from torch.utils.data import DataLoader

from data_module.corpus.builder import check_vocabulary_size
from data_module.corpus.checks import check_text
from data_module.errors import InputError
from pipeline.config.recipe import load_recipe
from pipeline.runtime.console import quiet_lightning
from pipeline.runtime.launch import JobStep
from pipeline.training.doctor import Question, check_fit
from tests.conftest import pipeline, tiny_recipe


@pytest.fixture
def place(tiny_corpus: Path, tmp_path: Path) -> Path:
    """A folder with the tiny texts and a recipe for them, `mine.yaml`, before anything is prepared."""
    for file in tiny_corpus.parent.glob("*.*"):
        shutil.copy(file, tmp_path)
    recipe = tiny_recipe(tmp_path)
    recipe["run"]["folder"] = str(tmp_path / "run")
    recipe["trainer"]["max_steps"] = 4
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def refusal(place: Path, *options: object) -> str:
    """Return the line with which `fit` refuses, after checking that `doctor` finds the same."""
    done = pipeline("fit", "--config", place / "mine.yaml", *options)
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.decode().splitlines()
    report = pipeline("doctor", "--config", place / "mine.yaml", *options)
    assert report.returncode == 1
    line = line.removeprefix("error: ")
    wrong = [one for one in report.stdout.decode().splitlines() if one.startswith("WRONG ")]
    assert wrong[0] == f"WRONG {line}"
    assert report.stderr == b""
    return line


def test_another_vocabulary_is_refused_before_anything_is_prepared(place: Path) -> None:
    """The advice does not lead into a second refusal."""
    assert pipeline("fit", "--config", place / "mine.yaml").returncode == 0
    line = refusal(place, "--corpus.vocabulary_size", 50)
    assert line == (
        f"{place / 'run'}: contains a run of another recipe: corpus.vocabulary_size was 60, now 50; change it back"
        f" to resume that run (its recipe is {place / 'run' / 'config.yaml'}), or give another run.folder and another"
        " corpus.folder, or --fresh and another corpus.folder to remove that run"
    )
    other = ["--corpus.vocabulary_size", 50, "--corpus.folder", place / "other"]
    assert refusal(place, *other).endswith("or give another run.folder, or --fresh to remove that run")
    assert not (place / "other").exists()
    again = pipeline("fit", "--config", place / "run" / "config.yaml")
    assert again.returncode == 0
    assert "finished at step 4" in again.stderr.decode()
    done = pipeline("fit", "--config", place / "mine.yaml", *other, "--run.folder", place / "second")
    assert done.returncode == 0, done.stderr


def test_what_prepare_prints(place: Path) -> None:
    """The numbers in one short line; the rest is in the folder."""
    done = pipeline("prepare", place / "mine.yaml")
    manifest = json.loads((place / "corpus" / "manifest.json").read_text())
    [line] = done.stdout.decode().splitlines()
    assert len(line) < 300 + len(str(place))
    numbers = json.loads(line)
    assert numbers["folder"] == str(place / "corpus")
    assert numbers["vocabulary_size"] == 60
    lines = (place / "train.source").read_text().splitlines()
    assert numbers["train"]["pairs_read"] == numbers["train"]["pairs_kept"] == len(lines)
    for split in ("train", "validation"):
        assert numbers[split].items() <= manifest[split].items()


def test_a_recipe_that_is_missing_is_asked_for() -> None:
    done = pipeline("fit", "--fresh")
    assert done.returncode == 2
    assert b"error: the following arguments are required: --config" in done.stderr


def test_ranks_do_not_wait_for_text_to_be_read(place: Path) -> None:
    """In a job of several tasks, rank 0 alone checks the recipe while the others wait."""
    recipe = load_recipe([place / "mine.yaml"])
    (place / "train.target").write_bytes(b"\xff\n")
    step = JobStep("7", rank=0, local_rank=0, num_tasks=2, num_nodes=2, tasks_per_node=1, restarts=0)
    found = {
        tasks: [one.message for one in check_fit(recipe, replace(step, num_tasks=tasks), Question([], [], False, None))]
        for tasks in (1, 2)
    }
    assert any("1 lines, but" in message for message in found[1])
    assert f"text {place / 'train.target'}" in found[2]


def test_few_pairs_are_named_by_doctor_and_fit(place: Path) -> None:
    warning = b"corpus.train: 300 pairs are few: "
    assert b"note  " + warning in pipeline("doctor", place / "mine.yaml").stdout
    assert warning in pipeline("fit", place / "mine.yaml").stderr
    assert warning not in pipeline("fit", place / "mine.yaml").stderr


def test_a_vocabulary_that_the_text_does_not_allow(place: Path) -> None:
    """`doctor` and `fit` name the largest one that works, and nothing else to set."""
    line = refusal(place, "--corpus.vocabulary_size", 3000)
    assert line.startswith("command line: corpus.vocabulary_size: 3000 pieces are more than the training text allows; ")
    assert not (place / "corpus").exists()
    largest = int(line.rpartition(" ")[2])
    settings = load_recipe([place / "mine.yaml"], ["--corpus.vocabulary_size", str(largest + 1)]).corpus
    checked = check_text(settings)
    with pytest.raises(InputError, match=f"the largest that works is {largest}$"):
        check_vocabulary_size(settings, checked)
    checked.found["train"][0].characters.update(map(chr, range(0x4E00, 0x4E00 + 500)))
    with pytest.raises(InputError, match=r"too small for the text's 5\d\d distinct characters"):
        check_vocabulary_size(settings, checked)
    options = ["--corpus.vocabulary_size", largest, "--trainer.max_steps", 2]
    for command in ("doctor", "fit"):
        assert pipeline(command, place / "mine.yaml", *options).returncode == 0


def test_torch_says_nothing_about_many_loader_processes() -> None:
    """No process is started before the loader is iterated over."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DataLoader([1], num_workers=10_000)  # type: ignore[arg-type]
        assert "worker processes in total" in str(caught.pop().message)
        quiet_lightning()
        DataLoader([1], num_workers=10_000)  # type: ignore[arg-type]
        assert caught == []


def test_cpu_processes_chosen_as_devices(place: Path) -> None:
    """A recipe that names the CPU wants them; on a machine without a GPU, the others probably do not."""
    import torch

    options = ["--trainer.devices", 3, "--trainer.accelerator", "auto"]
    report = pipeline("doctor", place / "mine.yaml", *options).stdout.decode()
    warning = "note  trainer.devices 3: torch finds no GPU, so 3 processes share the CPU; "
    assert (warning in report) == (not torch.cuda.is_available())
    assert warning not in pipeline("doctor", place / "mine.yaml", "--trainer.devices", 3).stdout.decode()


def test_a_rate_that_decays_to_the_last_step(place: Path) -> None:
    """The last step stays as it is when the run is resumed."""
    linear = ["--training.schedule", "linear", "--training.peak_learning_rate", 0.01, "--training.warmup_steps", 2]
    run = ["fit", "--config", place / "mine.yaml", *linear]
    assert pipeline(*run).returncode == 0
    change = "trainer.max_steps was 4, now 8, where training.schedule linear ends; change it back to resume"
    assert change in refusal(place, *linear, "--trainer.max_steps", 8)
    again = pipeline(*run)
    assert again.returncode == 0
    assert "finished at step 4, where training.schedule linear ends, or use --fresh" in again.stderr.decode()
