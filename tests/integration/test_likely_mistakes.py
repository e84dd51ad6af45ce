"""Mistakes that new users make, and what the first commands print."""

import json
import warnings
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.data import DataLoader

from data_module.corpus.builder import learn_tokenizer
from data_module.corpus.checks import check_text
from data_module.errors import InputError
from model.optimization import SCHEDULES
from pipeline.config.recipe import load_recipe
from pipeline.doctor.doctor import Findings, check_fit
from pipeline.doctor.start_checks import note_long_warmup
from pipeline.runtime.console import quiet_lightning
from pipeline.runtime.launch import JobStep
from tests.conftest import run_here, tiny_recipe, write_text


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the tiny texts and a recipe for them, `mine.yaml`, before anything is prepared."""
    write_text(tmp_path)
    recipe = tiny_recipe(tmp_path)
    recipe["run"]["folder"] = str(tmp_path / "run")
    recipe["trainer"]["max_steps"] = 4
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def test_what_prepare_prints(place: Path) -> None:
    """The numbers in one short line; the rest is in the folder."""
    [line] = run_here("prepare", place / "mine.yaml")[0].splitlines()
    manifest = json.loads((place / "corpus" / "manifest.json").read_text())
    assert len(line) < 300 + len(str(place))
    numbers = json.loads(line)
    assert numbers["folder"] == str(place / "corpus")
    assert numbers["vocabulary_size"] == 60
    lines = (place / "train.source").read_text().splitlines()
    assert numbers["train"]["pairs_read"] == numbers["train"]["pairs_kept"] == len(lines)
    for split in ("train", "validation"):
        assert numbers[split].items() <= manifest[split].items()


def test_ranks_do_not_wait_for_text_to_be_read(place: Path) -> None:
    """In a job of several tasks, rank 0 alone checks the recipe while the others wait."""
    recipe = load_recipe([place / "mine.yaml"])
    (place / "train.target").write_bytes(b"\xff\n")
    step = JobStep("7", rank=0, local_rank=0, num_tasks=2, num_nodes=2, tasks_per_node=1, restarts=0)
    asked = Namespace(fresh=False, init_from=None)
    found = {
        tasks: [one.message for one in check_fit(recipe, replace(step, num_tasks=tasks), asked)] for tasks in (1, 2)
    }
    assert any("1 lines, but" in message for message in found[1])
    assert f"text {place / 'train.target'}" in found[2]


def test_doctor_and_fit_name_few_pairs_and_a_long_warmup(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    warning, rises = "corpus.train: 300 pairs are few: ", "training.schedule paper: the learning rate rises until"
    found = run_here("doctor", place / "mine.yaml")[0]
    assert f"note  {warning}" in found
    assert f"note  {rises}" in found
    for is_prepared in (False, True):
        caplog.clear()
        assert run_here("fit", place / "mine.yaml")[1].count(rises) == 1
        assert any(line.startswith(warning) for line in caplog.messages) is not is_prepared


@pytest.mark.parametrize(
    ("schedule", "warmup", "last", "noted"),
    [
        ("paper", 4000, 120, True),
        ("paper", 120, 120, True),
        ("paper", 119, 120, False),
        ("inverse_sqrt", 4000, 120, True),
        ("inverse_sqrt", 60, 120, False),
        ("paper", 4000, 10**9, False),
        ("paper", 10**10, 10**9, True),
        # Those of an extension, which need not have a warm-up.
        (lambda step: 1e-3, 4000, 120, False),
        (lambda step: 1 / step, 4000, 120, False),
        (lambda step: min(step, 200), 4000, 120, True),
        (lambda step: step % 60 or 60, 4000, 10**6 // 60 * 60, False),  # It rises at the end, as it did before.
        (lambda step: 1e-3, 4000, 1, False),
    ],
)
def test_a_warmup_longer_than_the_run(
    place: Path,
    schedule: str | Callable[[int], float],
    warmup: int,
    last: int,
    noted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not isinstance(schedule, str):
        monkeypatch.setitem(SCHEDULES, "own", lambda *_, own=schedule: own)
        schedule = "own"
    recipe = load_recipe([place / "mine.yaml"])
    peak = 1e-3 if schedule == "inverse_sqrt" else None
    training = replace(recipe.training, schedule=schedule, warmup_steps=warmup, peak_learning_rate=peak)
    recipe = replace(recipe, training=training, trainer={**recipe.trainer, "max_steps": last})
    findings = Findings(recipe, reads_texts=False)
    note_long_warmup(recipe, findings)
    assert [(one.ok, one.is_warning) for one in findings.results] == [(True, True)] * noted


def test_the_largest_vocabulary_that_the_text_allows(place: Path) -> None:
    """It is named, and can be prepared."""
    settings = load_recipe([place / "mine.yaml"]).corpus
    checked = check_text(settings)
    with pytest.raises(InputError, match=r"the largest that works is \d+$") as refused:
        learn_tokenizer(replace(settings, vocabulary_size=3000), checked, False)
    largest = int(str(refused.value).rpartition(" ")[2])
    settings = replace(settings, vocabulary_size=largest + 1)
    with pytest.raises(InputError, match=f"the largest that works is {largest}$"):
        learn_tokenizer(settings, checked, False)
    checked.found["train"][0].characters.update(map(chr, range(0x4E00, 0x4E00 + 500)))
    with pytest.raises(InputError, match=r"too small for the text's 5\d\d distinct characters"):
        learn_tokenizer(settings, checked, False)
    run_here("prepare", place / "mine.yaml", "--corpus.vocabulary_size", largest)


def test_torch_says_nothing_about_many_loader_processes() -> None:
    """No process is started before the loader is iterated over."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DataLoader([1], num_workers=10_000)  # type: ignore[arg-type]
        assert "worker processes in total" in str(caught.pop().message)
        quiet_lightning()
        DataLoader([1], num_workers=10_000)  # type: ignore[arg-type]
        assert caught == []


def test_cpu_processes_chosen_as_devices(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that names the CPU wants them; on a machine without a GPU, the others probably do not.

    In a job, the tasks count, of which this one has one.
    """
    command = ["doctor", place / "mine.yaml", "--trainer.devices", 3]
    warning = "note  trainer.devices 3: torch finds no GPU, so 3 processes share the CPU; "
    assert warning not in run_here(*command)[0]
    if not torch.cuda.is_available():
        assert warning in run_here(*command, "--trainer.accelerator", "auto")[0]
    job = {"JOB_ID": "7", "STEP_ID": "0", "PROCID": "0", "LOCALID": "0", "NTASKS": "1", "STEP_TASKS_PER_NODE": "1"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert "share the CPU" not in run_here(*command, "--trainer.accelerator", "auto")[0]
