"""`--init-from`: a new run that starts from the weights and the tokenizer of another."""

import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from data_module.errors import InputError
from model.settings import NetworkSettings
from pipeline.config.recipe import load_recipe
from pipeline.training.start import load_initial_weights
from tests.conftest import refusal, run_here

REFUSED: dict[str, dict[str, object]] = {
    "num_layers": {"num_layers": 2},
    "num_encoder_layers": {"num_encoder_layers": 2},
    "num_decoder_layers": {"num_decoder_layers": 2},
    "d_model": {"d_model": 32, "d_k": 8, "d_v": 8},
    "d_ff": {"d_ff": 80},
    "num_heads": {"num_heads": 4, "d_k": 8, "d_v": 8},
    "d_k": {"d_k": 4},
    "d_v": {"d_v": 4},
    "learned_positions": {"learned_positions": True},
    "pre_norm": {"pre_norm": True},
    "norm": {"norm": "rms"},
    "activation": {"activation": "swish"},
    "self_attention": {"self_attention": "own"},
    "output_bias": {"output_bias": True},
}
"""Settings of `network:` -> a change of them alone that makes another network."""
ACCEPTED = {"dropout": 0.3, "attention_dropout": 0.1, "activation_dropout": 0.1, "max_positions": 90}
"""Settings that change neither the weights of the parent's network nor what they compute."""


def contents(run: Path, step: int) -> dict:
    return torch.load(run / "checkpoints" / f"step={step:08d}.ckpt", weights_only=True)


def test_starts_from_the_weights_and_the_tokenizer_of_another_run(
    recipe_file: Path, trained_run: Path, tmp_path: Path
) -> None:
    parent, child = trained_run, tmp_path / "child"
    # A different corpus, for which a larger vocabulary is configured.
    corpus = ["--corpus.folder", tmp_path / "other", "--corpus.max_tokens", 30, "--corpus.vocabulary_size", 90]
    start = ["--run.folder", child, *corpus, "--init-from", parent / "checkpoints" / "step=00000240.ckpt"]

    # With a learning rate of 0, a step does not change the weights.
    still = ["--training.learning_rate_factor", 0, "--trainer.max_steps"]
    _, said = run_here("fit", recipe_file, *start, *still, 1)
    assert "starting from the weights and the tokenizer of" in said
    before, after = contents(parent, 240), contents(child, 1)
    assert (before["global_step"], after["global_step"]) == (240, 1)
    assert all(torch.equal(weight, after["state_dict"][name]) for name, weight in before["state_dict"].items())
    assert torch.equal(before["translation"]["tokenizer"], after["translation"]["tokenizer"])
    assert (tmp_path / "other" / "tokenizer.model").read_bytes() == (parent / "tokenizer.model").read_bytes()
    report, _ = run_here("doctor", recipe_file, "--run.folder", tmp_path / "none", *start[2:])
    assert "starts from the weights of" in report

    # The same command again, as a requeued job runs it, resumes.
    _, said = run_here("fit", recipe_file, *start, *still, 2)
    assert "resuming from" in said
    assert "resuming this run; --init-from is ignored" in said
    assert "starting from" not in said

    # If the corpus has been removed, fit prepares it again with the run's vocabulary.
    shutil.rmtree(tmp_path / "other")
    again = [recipe_file, *start[:-2], *still, 3]
    assert "pairs are few" not in run_here("doctor", *again)[0]
    assert "resuming from" in run_here("fit", *again)[1]
    assert (tmp_path / "other" / "tokenizer.model").read_bytes() == (parent / "tokenizer.model").read_bytes()

    # A corpus that was prepared without --init-from has a vocabulary that does not match the run's weights.
    run_here("prepare", recipe_file, *corpus, "--force")
    wrong = f"{tmp_path / 'other'}: has another vocabulary than the run in {child}; name another corpus.folder"
    line = refusal("fit", *again)
    assert wrong in line
    assert line.endswith(", which fit then prepares with that vocabulary, or remove that run with --fresh")
    assert f"WRONG {wrong}" in run_here("doctor", *again, code=1)[0]
    assert len(list((child / "checkpoints").glob("step=*"))) == 3


def test_each_setting_that_makes_another_network_is_refused(
    recipe_file: Path, trained_run: Path, tmp_path: Path
) -> None:
    assert {*REFUSED, *ACCEPTED} == {one.name for one in fields(NetworkSettings)}
    recipe = load_recipe([recipe_file])
    initial = load_initial_weights(trained_run, replace(recipe, network=replace(recipe.network, **ACCEPTED)))
    assert initial.path.parent.parent == trained_run
    checkpoint = torch.load(initial.path, weights_only=True)
    del checkpoint["translation"]["network"]["self_attention"]  # as a version without this setting leaves it
    torch.save(checkpoint, tmp_path / "older.ckpt")
    assert load_initial_weights(tmp_path / "older.ckpt", recipe).network["d_ff"] == recipe.network.d_ff
    for key, changes in REFUSED.items():
        with pytest.raises(InputError, match=f"has another network: .*network\\.{key} "):
            load_initial_weights(trained_run, replace(recipe, network=replace(recipe.network, **changes)))


def test_a_corpus_of_another_vocabulary_is_refused(recipe_file: Path, trained_run: Path, tmp_path: Path) -> None:
    child = tmp_path / "child"
    start = ["--run.folder", child, "--init-from", trained_run]
    other = ["--corpus.folder", tmp_path / "other", "--corpus.vocabulary_size", 90]
    run_here("prepare", recipe_file, *other)
    assert f"has another vocabulary than {trained_run}" in refusal("fit", recipe_file, *start, *other)
    shutil.rmtree(tmp_path / "other")
    run_here("prepare", recipe_file, *other, "--init-from", trained_run)
    assert (tmp_path / "other" / "tokenizer.model").read_bytes() == (trained_run / "tokenizer.model").read_bytes()
    assert not child.exists()


def test_what_fresh_would_remove_is_not_begun_with(recipe_file: Path, trained_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    best = run / "checkpoints" / "best.ckpt"
    start = [recipe_file, "--run.folder", run, "--fresh", "--init-from"]
    said = f"{best}: --fresh would remove it; copy it elsewhere, or give another run.folder"
    assert said in refusal("fit", *start, best)
    assert said in run_here("doctor", *start, best, code=1)[0]
    assert best.exists()
    (run / "kept.ckpt").hardlink_to(best)
    run_here("doctor", *start, run / "kept.ckpt")
