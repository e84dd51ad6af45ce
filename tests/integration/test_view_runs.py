"""Runs whose epochs are views: killed and resumed they end with the same weights, and a full disk is one line."""

import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.conftest import pipeline
from tests.data_module.test_preparation import pairs_of_text, write_pairs
from tests.integration.runs import assert_same_state, checkpoints, kill, start, step_of

STEPS = 160
KILLS = 5


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with dropout and noise, whose epochs have 40 steps and take about as long as a view."""
    folder = tmp_path_factory.mktemp("views")
    train = write_pairs(folder, "train", pairs_of_text(8_000, 1))
    validation = write_pairs(folder, "validation", pairs_of_text(20, 2))
    corpus = {
        "folder": str(folder / "corpus"),
        "train": {"source": train.source, "target": train.target},
        "validation": {"source": validation.source, "target": validation.target},
        "vocabulary_size": 80,
        "bpe_dropout": {"source": 0.2, "target": 0.2},
        "noise": {"typos": 0.1},
    }
    values: dict[str, Any] = {
        "corpus": corpus,
        "batches": {"batch_tokens": 4000, "workers": 2},
        "network": {"num_layers": 1, "d_model": 16, "d_ff": 32, "num_heads": 2},
        "run": {"checkpoint_every_steps": 7, "log_every_steps": 10},
        "trainer": {"max_steps": STEPS, "val_check_interval": 1000, "accelerator": "cpu", "devices": 1},
    }
    path = folder / "views.yaml"
    path.write_text(yaml.safe_dump(values))
    assert pipeline("prepare", "--config", path).returncode == 0
    return path


def temporary_folder(path: Path) -> dict[str, str]:
    path.mkdir(exist_ok=True)
    return {"TMPDIR": str(path)}


def partial_files(node: dict[str, str]) -> list[Path]:
    """Return the files of the view that is being written, or was when its writer was killed."""
    return list(Path(node["TMPDIR"]).glob("epoch-plans-*/partial view/lock"))


@pytest.mark.slow
def test_killed_while_views_are_written(recipe: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command = ["fit", "--config", recipe, "--run.folder"]
    assert start(*command, whole, **temporary_folder(tmp_path / "node")).wait(300) == 0
    rng, node, log = random.Random(1), temporary_folder(tmp_path / "other node"), tmp_path / "stderr"
    for count in range(KILLS):
        with log.open("w") as stderr:
            process = start(*command, killed, stderr=stderr, **node)
        if count % 2 == 0:  # while a view is written
            begun = time.time()
            while process.poll() is None and not any(path.stat().st_mtime > begun for path in partial_files(node)):
                time.sleep(0.0005)
        else:
            while process.poll() is None and "training:" not in log.read_text():
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 1))
        assert kill(process), f"ended before it was killed: {log.read_text()}"
    assert start(*command, killed, **node).wait(300) == 0
    assert_same_state(checkpoints(whole)[-1], checkpoints(killed)[-1])


@pytest.mark.slow
def test_resumed_on_two_ranks(recipe: Path, tmp_path: Path) -> None:
    """The epochs' bytes do not depend on the number of ranks: the weights differ by rounding, other bytes by 1e-3."""
    one, two = tmp_path / "one", tmp_path / "two"
    command = ["fit", "--config", recipe, "--network.dropout", 0, "--trainer.precision", "64-true"]
    # The gradient of key biases is only rounding error, which Adam amplifies with the paper's epsilon of 1e-9.
    command += ["--training.adam_epsilon", 1e-3, "--run.folder"]
    assert start(*command, one, "--trainer.max_steps", 60, **temporary_folder(tmp_path / "node")).wait(300) == 0
    for devices, steps in ((2, 25), (1, 45), (2, 60)):
        node = temporary_folder(tmp_path / f"node{devices}")
        command_now = [*command, two, "--trainer.devices", devices, "--trainer.max_steps", steps]
        assert start(*command_now, **node).wait(300) == 0
    expected, found = (torch.load(checkpoints(run)[-1], weights_only=True)["state_dict"] for run in (one, two))
    for name, weight in expected.items():
        torch.testing.assert_close(weight, found[name], rtol=0, atol=1e-5, msg=name)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB, or None where mounting is not permitted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "none", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    yield folder
    if mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
def test_disk_full_while_a_view_is_written(recipe: Path, small_disk: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ["fit", "--config", recipe, "--run.folder", run]
    done = pipeline(*command, "--trainer.max_steps", 8, environment=temporary_folder(tmp_path / "node"))
    assert done.returncode == 0, done.stderr
    (small_disk / "filler").write_bytes(bytes(1_200_000))
    full = pipeline(*command, environment={"TMPDIR": str(small_disk)})
    lines = full.stderr.decode().splitlines()
    assert full.returncode == 2, lines
    assert lines[-1].startswith(f"error: {small_disk}: the disk is full, and the view of an epoch needs about ")
    assert "set TMPDIR to a folder on another local disk" in lines[-1]
    assert "Traceback" not in full.stderr.decode()
    # A loader process may have been ended while it wrote; the next writer removes what it left, which nobody reads.
    assert not list(small_disk.rglob("*.view"))
    assert step_of(checkpoints(run)[-1]) == 8
    assert torch.load(checkpoints(run)[-1], weights_only=True)["global_step"] == 8
    (small_disk / "filler").unlink()
    again = pipeline(*command, "--trainer.max_steps", 10, environment=temporary_folder(tmp_path / "node"))
    assert again.returncode == 0, again.stderr


def test_a_corpus_without_text_is_refused(recipe_file: Path, tmp_path: Path) -> None:
    """By fit and doctor, before anything is started."""
    options = ["--config", recipe_file, "--run.folder", tmp_path / "run"]
    for command in ("fit", "doctor"):
        done = pipeline(command, *options, "--corpus.bpe_dropout.source", 0.1)
        output = (done.stdout + done.stderr).decode()
        assert done.returncode == (2 if command == "fit" else 1), output
        assert "was prepared without its text, which corpus.bpe_dropout and corpus.noise need" in output
    assert pipeline("fit", *options, "--trainer.max_steps", 2).returncode == 0
