"""Training as a user runs it: real processes, real files."""

import shutil
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import pipeline
from tests.integration.runs import start


def weights(run: Path, step: int = 12) -> dict[str, torch.Tensor]:
    contents = torch.load(run / "checkpoints" / f"step={step:08d}.ckpt", weights_only=True)
    return contents["state_dict"]


def fit(recipe: Path, run: Path, *arguments: object) -> Path:
    done = pipeline("fit", "--config", recipe, "--run.folder", run, *arguments)
    assert done.returncode == 0, done.stderr.decode()
    return run


def assert_equal(left: Path, right: Path, step: int = 12, tolerance: float = 0.0) -> None:
    ours, theirs = weights(left, step), weights(right, step)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=tolerance, msg=name)


def test_ranks_and_micro_batches_change_nothing(recipe_file: Path, tmp_path: Path) -> None:
    """1 process with few micro-batches a step = 1 with four times as many = 2 that share those, to rounding."""
    # Key biases have no gradient but rounding (softmax ignores them), which Adam would blow up with the paper's 1e-9.
    options = ["--batches.group_tokens", 400, "--training.adam_epsilon", 1e-3]
    one = fit(recipe_file, tmp_path / "one", *options)
    # The same groups, cut into micro-batches of a quarter, on one device and on two.
    options += ["--batches.max_tokens_per_device", 100]
    many = fit(recipe_file, tmp_path / "many", *options)
    two = fit(recipe_file, tmp_path / "two", *options, "--trainer.devices", 2)
    initial = torch.load(one / "checkpoints" / "step=00000004.ckpt", weights_only=True)["state_dict"]
    moved = max((initial[name] - weight).abs().max().item() for name, weight in weights(one).items())
    assert moved > 0.01  # something was learned between the checkpoints compared
    assert_equal(one, many, tolerance=2e-6)
    assert_equal(one, two, tolerance=2e-6)
    # What the ranks saw together is what one saw.
    for tag in ("train/loss", "validation/loss", "validation/bleu"):
        for other in (many, two):
            assert scalars(other, tag) == [(step, pytest.approx(value, abs=1e-4)) for step, value in scalars(one, tag)]


@pytest.mark.slow
def test_compiled_or_not_it_is_one_run(recipe_file: Path, tmp_path: Path) -> None:
    """Two ranks train compiled and one goes on without: the run that never was compiled, to rounding."""
    options = ["--training.adam_epsilon", 1e-3, "--batches.max_tokens_per_device", 100]
    eager = fit(recipe_file, tmp_path / "eager", *options)
    run = tmp_path / "compiled"
    fit(recipe_file, run, *options, "--run.compile", "true", "--trainer.devices", 2, "--trainer.max_steps", 6)
    fit(recipe_file, run, *options)
    assert_equal(eager, run, tolerance=2e-6)


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_and_resumed_equals_uninterrupted(recipe_file: Path, tmp_path: Path, workers: int) -> None:
    """Bit for bit, with dropout, whatever moment the kill hits; steps since the last save are done again."""
    options = ["--network.dropout", 0.3, "--batches.workers", workers, "--trainer.max_steps", 40]
    whole = fit(recipe_file, tmp_path / "whole", *options)
    run = tmp_path / "killed"
    kills = 0
    for kept in (8, 12, 20):  # at 12 a validation is due too
        process = start("fit", "--config", recipe_file, "--run.folder", run, *options)
        while process.poll() is None and not (run / "checkpoints" / f"step={kept:08d}.ckpt").exists():
            time.sleep(0.01)
        kills += process.poll() is None
        process.kill()
        process.wait()
    assert kills
    fit(recipe_file, run, *options)
    assert_equal(whole, run, step=40)
    assert scalars(whole, "train/loss") == scalars(run, "train/loss")
    assert scalars(whole, "validation/bleu") == scalars(run, "validation/bleu")


def scalars(run: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_a_run_folder_holds_what_the_design_says(trained_run: Path) -> None:
    checkpoints = sorted(path.name for path in (trained_run / "checkpoints").iterdir())
    assert checkpoints == ["best.ckpt", *[f"step={step:08d}.ckpt" for step in (80, 160, 240)]]
    for name in ("config.yaml", "tokenizer.model", "versions.json"):
        assert (trained_run / name).stat().st_size > 0
    events = EventAccumulator(str(trained_run / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert {
        "train/loss",
        "train/perplexity",
        "train/learning_rate",
        "train/gradient_norm",
        "work/target_tokens_per_second",
        "validation/loss",
        "validation/perplexity",
        "validation/bleu",
        "work/share_of_ceiling",
        "work/goodput",
    } <= set(tags["scalars"])
    assert any(tag.startswith("validation/translations") for tag in tags["tensors"])
    losses = scalars(trained_run, "train/loss")
    assert [step for step, _ in losses] == [40, 80, 120, 160, 200, 240]
    assert losses[-1][1] < losses[0][1]


def test_a_finished_run_says_so(trained_run: Path) -> None:
    recipe = trained_run.parent / "tiny.yaml"
    done = pipeline("fit", "--config", recipe, "--run.folder", trained_run)
    assert done.returncode == 0
    assert b"finished at step 240" in done.stderr


def test_another_recipe_is_refused_and_named(trained_run: Path) -> None:
    recipe = trained_run.parent / "tiny.yaml"
    done = pipeline("fit", "--config", recipe, "--run.folder", trained_run, "--network.d_ff", 64)
    assert done.returncode == 2
    [said] = [line for line in done.stderr.decode().splitlines() if line.startswith("error: ")]
    assert "network.d_ff 32 -> 64" in said
    assert "--fresh" in said


def test_early_stopping_by_patience(recipe_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    patient = ["--config", recipe_file, "--run.folder", run, "--run.patience", 2, "--trainer.val_check_interval", 2]
    patient += ["--training.learning_rate_factor", 1e-6, "--trainer.max_steps", 40]
    done = pipeline("fit", *patient)
    assert done.returncode == 0
    assert b"after 2 validations without a better BLEU" in done.stderr
    steps = [int(path.stem.removeprefix("step=")) for path in (run / "checkpoints").glob("step=*")]
    assert max(steps) < 40
    again = pipeline("fit", *patient)
    assert f"stopped early at step {max(steps)}" in again.stderr.decode()
    assert again.returncode == 0
    assert max(int(path.stem.removeprefix("step=")) for path in (run / "checkpoints").glob("step=*")) == max(steps)
    more = pipeline("fit", *patient, "--run.patience", 4)
    assert more.returncode == 0, more.stderr.decode()
    again = pipeline("fit", *patient, "--run.patience", 4)
    assert f"stopped early at step {max(steps) + 4} after 4 validations" in again.stderr.decode()


def test_newest_whole_checkpoint_is_taken(recipe_file: Path, tmp_path: Path) -> None:
    run = fit(recipe_file, tmp_path / "run", "--run.keep_last", 2)
    newest = run / "checkpoints" / "step=00000012.ckpt"
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    # What is saved on the way there is not given up for it.
    there = fit(recipe_file, run, "--run.keep_last", 1, "--run.checkpoint_every_steps", 1, "--trainer.max_steps", 10)
    assert sorted(path.name for path in (there / "checkpoints").glob("step=*")) == ["step=00000010.ckpt", newest.name]
    done = pipeline("fit", "--config", recipe_file, "--run.folder", run)
    assert done.returncode == 0, done.stderr.decode()
    assert "step=00000012.ckpt: is incomplete; skipped" in done.stderr.decode()
    assert "resuming from" in done.stderr.decode()
    assert_equal(run, fit(recipe_file, tmp_path / "again"))


def test_a_corpus_copied_without_its_texts(tiny_corpus: Path, recipe_file: Path, tmp_path: Path) -> None:
    corpus = shutil.copytree(tiny_corpus, tmp_path / "corpus")
    gone = ["--corpus.folder", corpus]
    for split in ("train", "validation"):
        for side in ("source", "target"):
            (tmp_path / f"{split}.{side}").write_text((tiny_corpus.parent / f"{split}.{side}").read_text())
            gone += [f"--corpus.{split}.{side}", tmp_path / f"{split}.{side}"]
    assert pipeline("prepare", "--config", recipe_file, *gone, "--force").returncode == 0
    (tmp_path / "train.source").unlink()
    fit(recipe_file, tmp_path / "run", *gone)
    refused = pipeline(
        "fit", "--config", recipe_file, "--run.folder", tmp_path / "other", *gone, "--corpus.max_tokens", 9
    )
    assert refused.returncode == 2
    assert b"max_tokens" in refused.stderr


def test_a_layer_to_look_at_that_is_not_there(recipe_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = pipeline("fit", "--config", recipe_file, "--run.folder", run, "--monitoring.attention_layers", "[0, 1]")
    assert done.returncode == 2
    assert done.stderr.decode().splitlines()[-1].startswith("error: monitoring.attention_layers: there is no 1; ")


def test_learned_positions_reach_the_longest_validation_sentence(
    tiny_corpus: Path, recipe_file: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_corpus.parent, tmp_path / "texts")
    text = tmp_path / "texts" / "validation.target"
    first, *rest = text.read_text().splitlines()
    text.write_text("\n".join([" ".join([first] * 20), *rest]) + "\n")
    longer = [f"--corpus.validation.target={text}", "--corpus.folder", tmp_path / "corpus"]
    learned = ["--network.learned_positions", "true", "--network.max_positions", 60]
    fit(recipe_file, tmp_path / "short", *learned, "--trainer.max_steps", 1)
    done = pipeline("fit", "--config", recipe_file, "--run.folder", tmp_path / "run", *longer, *learned)
    assert done.returncode == 2
    assert "error: network.max_positions 60 is less than the longest sentence" in done.stderr.decode()


def test_chosen_pictures(recipe_file: Path, tmp_path: Path) -> None:
    chosen = ["--monitoring.attention_sentences", "[7]", "--monitoring.attention_heads", "[1]"]
    run = fit(recipe_file, tmp_path / "run", *chosen, "--monitoring.embedding_pieces", 9)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert {tag for tag in events.Tags()["images"] if tag.endswith("_1")} == {
        f"what_it_looks_at/{kind}_1" for kind in ("encoder", "decoder", "cross")
    }
    assert not [tag for tag in events.Tags()["images"] if tag.endswith("_2")]
    pieces = (run / "tensorboard" / "embeddings.tsv").read_text().splitlines()
    assert len(pieces) == 1 + 9
    counts = [int(line.split("\t")[1]) for line in pieces[1:]]
    assert counts == sorted(counts, reverse=True)
    assert (run / "tensorboard" / "embeddings.bytes").stat().st_size == 9 * 16 * 4


def test_hardware_that_is_not_there(recipe_file: Path, tmp_path: Path) -> None:
    done = pipeline("fit", "--config", recipe_file, "--run.folder", tmp_path / "run", "--trainer.accelerator", "tpu")
    assert done.returncode == 2
    assert done.stderr.decode().splitlines()[-1].startswith("error: trainer: ")


def test_validation_points_stand_at_their_steps(trained_run: Path) -> None:
    for tag in ("validation/loss", "validation/bleu"):
        assert [step for step, _ in scalars(trained_run, tag)] == [120, 240]


def test_fresh_removes_the_run_and_nothing_else(recipe_file: Path, tmp_path: Path) -> None:
    run = fit(recipe_file, tmp_path / "run")
    (run / "notes.txt").write_text("mine")
    (run / "checkpoints" / ".step=00000012.ckpt.99.tmp").write_text("half")
    # What is wrong with the new recipe is said before the old run is touched.
    wrong = pipeline("fit", "--config", recipe_file, "--run.folder", run, "--fresh", "--batches.group_tokens", 5)
    assert wrong.returncode == 2
    assert weights(run)
    fit(recipe_file, run, "--fresh", "--network.d_ff", 48)
    assert weights(run)["network.encoder.0.feed_forward.inner.bias"].numel() == 48
    assert (run / "notes.txt").read_text() == "mine"
    assert not list((run / "checkpoints").glob(".*"))
    assert [step for step, _ in scalars(run, "train/loss")] == [2, 4, 6, 8, 10, 12]


def test_a_mistake_leaves_the_folder_free(recipe_file: Path, tmp_path: Path) -> None:
    wrong = pipeline("fit", "--config", recipe_file, "--run.folder", tmp_path / "run", "--batches.group_tokens", 5)
    assert wrong.returncode == 2
    assert "group_tokens" in wrong.stderr.decode()
    fit(recipe_file, tmp_path / "run")


def test_fresh_in_a_folder_of_somebody_else(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.yaml").write_text("model: resnet\n")
    done = pipeline("fit", "--config", recipe_file, "--run.folder", tmp_path / "theirs", "--fresh")
    assert done.returncode == 2
    assert (tmp_path / "theirs" / "config.yaml").read_text() == "model: resnet\n"


def test_a_rank_without_validation_pairs(tiny_corpus: Path, recipe_file: Path, tmp_path: Path) -> None:
    for side in ("source", "target"):
        lines = (tiny_corpus.parent / f"validation.{side}").read_text().splitlines()
        (tmp_path / side).write_text(lines[0] + "\n")
    short = [f"--corpus.validation.{side}={tmp_path / side}" for side in ("source", "target")]
    short += ["--corpus.folder", tmp_path / "corpus", "--training.adam_epsilon", 1e-3]
    one = fit(recipe_file, tmp_path / "one", *short)
    two = fit(recipe_file, tmp_path / "two", *short, "--trainer.devices", 2)
    for tag in ("validation/loss", "validation/bleu"):
        assert scalars(two, tag) == [(step, pytest.approx(value, abs=1e-4)) for step, value in scalars(one, tag)]
