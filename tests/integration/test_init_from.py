"""A new run that begins from another's weights and tokenizer."""

import shutil
from pathlib import Path

import torch

from tests.conftest import pipeline


def fit(recipe: Path, *arguments: object, fails: bool = False) -> str:
    done = pipeline("fit", "--config", recipe, *arguments)
    said = done.stderr.decode()
    assert done.returncode == (2 if fails else 0), said
    return said


def contents(run: Path, step: int) -> dict:
    return torch.load(run / "checkpoints" / f"step={step:08d}.ckpt", weights_only=True)


def test_begins_from_anothers_weights_and_tokenizer(recipe_file: Path, tmp_path: Path) -> None:
    parent, child = tmp_path / "parent", tmp_path / "child"
    fit(recipe_file, "--run.folder", parent)
    # Another corpus, whose own vocabulary would be larger.
    corpus = ["--corpus.folder", tmp_path / "other", "--corpus.max_tokens", 30, "--corpus.vocabulary_size", 90]
    start = ["--run.folder", child, *corpus, "--init-from", parent / "checkpoints" / "step=00000012.ckpt"]

    # With a learning rate of nothing a step leaves the weights as they came.
    said = fit(recipe_file, *start, "--trainer.max_steps", 1, "--training.learning_rate_factor", 0)
    assert "starting from the weights and the tokenizer of" in said
    before, after = contents(parent, 12), contents(child, 1)
    assert before["global_step"] == 12
    assert after["global_step"] == 1
    assert all(torch.equal(weight, after["state_dict"][name]) for name, weight in before["state_dict"].items())
    assert torch.equal(before["translation"]["tokenizer"], after["translation"]["tokenizer"])
    assert (tmp_path / "other" / "tokenizer.model").read_bytes() == (parent / "tokenizer.model").read_bytes()

    examined = pipeline("doctor", "--config", recipe_file, "--run.folder", tmp_path / "none", *start[2:])
    assert examined.returncode == 0, examined.stdout
    assert b"begins from the weights of" in examined.stdout

    # Typed again, as a job that is back in the queue does, it goes on.
    said = fit(recipe_file, *start, "--trainer.max_steps", 2, "--training.learning_rate_factor", 0)
    assert "resuming from" in said
    assert "resuming this run; --init-from is ignored" in said
    assert "beginning" not in said

    # Made anew without the parent, the corpus has pieces of its own: the run's weights would mean others by them.
    shutil.rmtree(tmp_path / "other")
    options = ["--trainer.max_steps", 3, "--training.learning_rate_factor", 0]
    refused = fit(recipe_file, *start[:-2], *options, fails=True)
    assert f"has another vocabulary than the run in {child}; name another corpus.folder" in refused
    assert len(list((child / "checkpoints").glob("step=*"))) == 2


def test_what_does_not_fit(recipe_file: Path, tmp_path: Path) -> None:
    parent, child = tmp_path / "parent", tmp_path / "child"
    fit(recipe_file, "--run.folder", parent, "--trainer.max_steps", 4)
    start = ["--run.folder", child, "--init-from", parent]
    wider = fit(recipe_file, *start, "--network.d_ff", 80, "--network.dropout", 0.2, fails=True)
    assert wider.count("\n") == 1
    assert "has another network: network.d_ff" in wider
    assert "dropout" not in wider
    examined = pipeline("doctor", "--config", recipe_file, *start, "--network.d_ff", 80)
    assert examined.returncode == 1
    assert b"has another network: network.d_ff" in examined.stdout
    other = ["--corpus.folder", tmp_path / "other", "--corpus.vocabulary_size", 90]
    assert pipeline("prepare", "--config", recipe_file, *other).returncode == 0
    said = fit(recipe_file, *start, *other, fails=True)
    assert said.count("\n") == 1
    assert "was made with another vocabulary" in said
    shutil.rmtree(tmp_path / "other")
    assert pipeline("prepare", "--config", recipe_file, *other, "--init-from", parent).returncode == 0
    assert (tmp_path / "other" / "tokenizer.model").read_bytes() == (parent / "tokenizer.model").read_bytes()
    assert "there is no such checkpoint" in fit(recipe_file, "--init-from", tmp_path / "none", fails=True)
    assert not child.exists()
