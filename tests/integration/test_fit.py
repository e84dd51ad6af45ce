"""`fit`, called as a user calls it: resuming, scaling over ranks, early stopping and `--fresh`."""

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from data_module.corpus.store import training_pairs
from data_module.errors import InputError
from data_module.system import text_files
from data_module.tokenization.tokenizer import Tokenizer
from pipeline import load
from pipeline.checkpointing.checkpoint import Identity, read_checkpoint, write_atomic
from pipeline.checkpointing.run_folder import (
    RUN_ID,
    STARTS,
    STOPPED_EARLY,
    all_checkpoints,
    best_path,
    read_metrics,
    step_path,
    stored_run_id,
)
from pipeline.config.recipe import load_recipe
from pipeline.monitoring import attention_images, training_monitor
from pipeline.training.start import check_pairs, finished_reason, plan_start
from tests.conftest import pipeline, refusal, run_here, tiny_recipe, write_text
from tests.integration.runs import accumulator, checkpoints, is_same_corpus, scalars, step_of


def weights(run: Path, step: int = 12) -> dict[str, torch.Tensor]:
    contents = torch.load(run / "checkpoints" / f"step={step:08d}.ckpt", weights_only=True)
    return contents["state_dict"]


def fit(recipe: Path, run: Path, *arguments: object) -> Path:
    run_here("fit", recipe, "--run.folder", run, *arguments)
    return run


def fit_apart(recipe: Path, run: Path, *arguments: object) -> list[str]:
    """Train in processes of their own, for several ranks; return the lines on standard error."""
    done = pipeline("fit", recipe, "--run.folder", run, *arguments)
    assert (done.returncode, done.stdout) == (0, b""), done.stderr.decode()
    return done.stderr.decode().splitlines()


def assert_equal(left: Path, right: Path, step: int = 12, tolerance: float = 0.0) -> None:
    left_weights, right_weights = weights(left, step), weights(right, step)
    assert left_weights.keys() == right_weights.keys()
    for name in left_weights:
        torch.testing.assert_close(left_weights[name], right_weights[name], rtol=0, atol=tolerance, msg=name)


BACKEND = "backend: precision 32-true, attention plain, compilation none, "
OWN = [".*/corpus is up to date$", BACKEND, r"checkpoints: at most \d+ files of ", "memory: at most "]
OWN += ["training: (from )?step ", r"step \d+: validation BLEU ", "the run is in ", "(validating: .*)?$"]
"""What begins a line that is the pipeline's own, not one of its libraries'."""


def test_ranks_and_micro_batches_change_nothing(tiny_corpus: Path, recipe_file: Path, tmp_path: Path) -> None:
    """One rank, one rank with smaller micro-batches and two ranks yield the same weights, up to rounding.

    The two ranks start without a corpus, and rank 0 alone prints lines.
    """
    # The gradient of key biases is only rounding error, which Adam amplifies with the paper's epsilon of 1e-9.
    options = ["--training.adam_epsilon", 1e-3, "--training.learning_rate_factor", 0.5, "--training.ema_decay", 0.5]
    one = fit(recipe_file, tmp_path / "one", *options)
    # The same global batches in smaller micro-batches, on one device and on two.
    options += ["--batches.max_tokens_per_device", 100]
    many = fit(recipe_file, tmp_path / "many", *options)
    two, corpus = tmp_path / "two", tmp_path / "corpus"
    lines = fit_apart(recipe_file, two, *options, "--corpus.folder", corpus, "--trainer.devices", 2)
    assert is_same_corpus(corpus, tiny_corpus)
    own = [*OWN, "rank 0 waits for ranks 1 to connect to "]
    begin = next(number for number, line in enumerate(lines) if line.startswith(BACKEND))
    assert [line for line in lines[begin:] if not re.match("|".join(own), line)] == []
    for once in ("train: 300 pairs read", BACKEND, "memory: ", "checkpoints: ", "training: from ", "the run is in "):
        assert sum(line.startswith(once) for line in lines) == 1, once
    initial = torch.load(one / "checkpoints" / "step=00000004.ckpt", weights_only=True)["state_dict"]
    moved = max((initial[name] - weight).abs().max().item() for name, weight in weights(one).items())
    assert moved > 0.01  # the weights have changed since the first checkpoint
    assert_equal(one, many, tolerance=2e-6)
    assert_equal(one, two, tolerance=2e-6)
    # Logged metrics are those of all ranks.
    for tag in ("train/loss", "validation/loss", "validation/negative_log_likelihood", "validation/bleu"):
        for other in (many, two):
            assert scalars(other, tag) == [(step, pytest.approx(value, abs=1e-4)) for step, value in scalars(one, tag)]


def test_the_likelihood_of_averaged_weights_chooses(recipe_file: Path, tmp_path: Path, tiny_corpus: Path) -> None:
    """Without translations. The truth is the sum of the log-probabilities of all validation pairs."""
    options = ["--run.best_by", "likelihood", "--run.validation_translations", 0, "--training.ema_decay", 0.9]
    run = fit(recipe_file, tmp_path / "run", *options)
    tag = "validation/negative_log_likelihood"
    logged = {line["step"]: line for line in read_metrics(run) if tag in line}
    assert not [name for line in logged.values() for name in line if "bleu" in name]
    best = min(logged, key=lambda step: logged[step][tag])
    contents = read_checkpoint(run / "checkpoints" / "best.ckpt").contents
    assert contents["global_step"] == best
    assert contents["callbacks"]["CheckpointCallback"]["best_score"] == pytest.approx(logged[best][tag])
    sources, targets = (
        (tiny_corpus / f"validation.{side}.txt").read_text().splitlines() for side in ("source", "target")
    )
    model = load(run / "checkpoints" / "best.ckpt")
    num_tokens = sum(len(ids) + 1 for ids in Tokenizer.load(tiny_corpus / "tokenizer.model").encode(targets))
    total = sum(score.log_probability for score in model.score(sources, targets))
    assert logged[best][tag] == pytest.approx(-total / num_tokens, rel=1e-5)
    _, said = run_here("average", run, "--best", 1)
    assert f"best validation: step {best}: negative log-likelihood {logged[best][tag]:.4f}" in said


def test_output(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the pipeline's own lines, and none of its libraries'; without those that appear because time has passed."""
    monkeypatch.setattr(training_monitor, "FIRST_LINE_SECONDS", math.inf)
    monkeypatch.setattr(training_monitor, "SECONDS_BETWEEN_LINES", math.inf)
    monkeypatch.setattr(text_files, "SHOWN_AFTER_SECONDS", 10_000)
    command = ["fit", "--config", recipe_file, "--run.folder", tmp_path / "run"]
    output, said = run_here(*command)
    lines = said.splitlines()
    assert output == ""
    assert [line for line in lines if not re.match("|".join(OWN), line)] == []
    assert len(lines) == 11
    [start] = [json.loads(line) for line in (tmp_path / "run" / STARTS).read_text().splitlines()]
    assert sum(line.startswith(BACKEND) for line in lines) == 1
    chosen = ", ".join(f"{part} {choice}" for part, choice in start["backend"].items())
    assert f"backend: {chosen}".startswith(BACKEND)
    _, changed, *others = run_here(*command, "--trainer.max_steps", 14)[1].splitlines()
    assert changed == "changed since the last start: trainer.max_steps was 12, now 14"
    assert others[0].startswith("resuming from ")


def test_early_stopping_by_patience(recipe_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["fit", recipe_file, "--run.folder", run, "--run.patience", 2, "--trainer.val_check_interval", 2]
    options += ["--training.learning_rate_factor", 1e-6, "--trainer.max_steps", 40]
    assert "after 2 validations without a better BLEU" in run_here(*options)[1]
    last = step_of(checkpoints(run)[-1])
    assert last < 40
    assert f"stopped early at step {last}" in run_here(*options)[1]
    assert step_of(checkpoints(run)[-1]) == last
    run_here(*options, "--run.patience", 4)
    again = run_here(*options, "--run.patience", 4)[1]
    assert f"stopped early at step {last + 4} after 4 validations" in again
    without = run_here(*options, "--run.patience", "null", "--trainer.max_steps", last + 5)[1]
    assert "callbacks" not in without


def test_when_a_run_has_finished(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / STOPPED_EARLY).write_text(json.dumps({"step": 8, "patience": 2}))

    def reason(step: int, *overrides: str) -> str | None:
        return finished_reason(load_recipe([recipe_file], overrides), tmp_path, step)

    assert "stopped early at step 8" in (reason(8, "--run.patience", "2") or "")
    for other in (["--run.patience", "3"], []):
        assert reason(8, *other) is None
    assert reason(10, "--run.patience", "2") is None  # trained on since then, with more patience
    assert "finished at step 12; raise trainer.max_steps" in (reason(12) or "")
    linear = ["--training.schedule", "linear", "--training.peak_learning_rate", "0.01"]
    assert reason(12, *linear) == "finished at step 12, where training.schedule linear ends; give another run.folder"


def test_resuming_from_the_newest_valid_checkpoint(recipe_file: Path, tmp_path: Path) -> None:
    run = fit(recipe_file, tmp_path / "run")
    whole = Path(shutil.copytree(run, tmp_path / "whole"))
    newest = run / "checkpoints" / "step=00000012.ckpt"
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    _, said = run_here("fit", recipe_file, "--run.folder", run)
    assert "step=00000012.ckpt: is incomplete; skipped" in said
    assert f"resuming from {run / 'checkpoints' / 'step=00000008.ckpt'}" in said
    assert_equal(run, whole)


def test_a_corpus_whose_texts_are_gone(recipe_file: Path, tmp_path: Path) -> None:
    write_text(tmp_path)
    recipe_file.write_text(yaml.safe_dump(tiny_recipe(tmp_path)))
    run_here("prepare", recipe_file)
    (tmp_path / "train.source").unlink()
    fit(recipe_file, tmp_path / "run")
    assert "max_tokens" in refusal("fit", recipe_file, "--run.folder", tmp_path / "other", "--corpus.max_tokens", 9)


def test_configured_plots(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a font that lacks all letters: pieces are numbered, and a page lists them."""
    monkeypatch.setattr(attention_images, "get_font", lambda _: SimpleNamespace(get_charmap=dict))
    options = ["--monitoring.attention_sentences", "[7]", "--monitoring.embedding_pieces", 9]
    run = fit(recipe_file, tmp_path / "run", "--trainer.max_steps", 6, *options)
    pictures = {f"validation_attention/{kind}_1" for kind in ("encoder", "decoder", "cross")}
    events = accumulator(run)
    assert set(events.Tags()["images"]) == pictures
    [page] = events.Tensors("validation_attention/pieces_1/text_summary")
    note, _, rows = page.tensor_proto.string_val[0].decode().partition("\n\n")
    assert "pieces are numbered: DejaVu Sans has no glyphs for U+" in note
    assert rows.startswith("| number | source | target |\n| --- | --- | --- |\n| 1 | ▁")
    pieces = (run / "tensorboard" / "embeddings.tsv").read_text().splitlines()
    assert len(pieces) == 1 + 9
    counts = [int(line.split("\t")[1]) for line in pieces[1:]]
    assert counts == sorted(counts, reverse=True)
    assert (run / "tensorboard" / "embeddings.bytes").stat().st_size == 9 * 16 * 4


def test_after_the_corpus_is_rebuilt_fresh_is_enough(recipe_file: Path, tmp_path: Path) -> None:
    """Before, the corpus is refused."""
    corpus = ["--corpus.folder", tmp_path / "corpus", "--trainer.max_steps", 4]
    run = fit(recipe_file, tmp_path / "run", *corpus)
    again = [recipe_file, "--run.folder", run, *corpus, "--corpus.vocabulary_size", 50]
    assert f"{tmp_path / 'corpus'}" in refusal("fit", *again, "--fresh")
    run_here("prepare", *again, "--force")
    assert refusal("fit", *again).endswith("or give another run.folder, or --fresh to remove that run")
    run_here("fit", *again, "--fresh")


def test_fresh_removes_the_run_and_nothing_else(recipe_file: Path, tmp_path: Path) -> None:
    run = fit(recipe_file, tmp_path / "run")
    (run / "notes.txt").write_text("mine")
    # An invalid recipe is refused before the old run is removed.
    refusal("fit", recipe_file, "--run.folder", run, "--fresh", "--batches.batch_tokens", 5)
    assert weights(run)
    fit(recipe_file, run, "--fresh", "--network.d_ff", 48, "--trainer.max_steps", 8)
    assert weights(run, 8)["network.encoder.0.feed_forward.inner.bias"].numel() == 48
    assert (run / "notes.txt").read_text() == "mine"
    assert [step_of(path) for path in checkpoints(run)] == [4, 8]
    assert len(list((run / "tensorboard").glob("events.*"))) == 1
    assert [step for step, _ in scalars(run, "train/loss")] == [2, 4, 6, 8]


def identities(run: Path) -> set[Identity]:
    """Return what the checkpoints in a run folder say that they are of."""
    return {read_checkpoint(path).identity for path in all_checkpoints(run)}


def test_a_run_has_an_identity_from_its_beginning(recipe_file: Path, tmp_path: Path, tiny_corpus: Path) -> None:
    pairs = training_pairs(tiny_corpus)
    run = fit(recipe_file, tmp_path / "run", "--trainer.max_steps", 4)
    own = stored_run_id(run)
    assert own is not None
    moved = Path(shutil.copytree(run, tmp_path / "moved"))
    # A start that was killed before its first checkpoint keeps it, and so does a resumed one.
    shutil.rmtree(moved / "checkpoints")
    inode = (moved / RUN_ID).stat().st_ino
    fit(recipe_file, moved, "--trainer.max_steps", 6)
    fit(recipe_file, moved, "--trainer.max_steps", 8)
    run_here("average", moved, "--last", 2)
    assert len(all_checkpoints(moved)) == 5  # three steps, the best one and the average
    assert identities(moved) == {Identity(own, pairs)}
    assert (moved / RUN_ID).stat().st_ino == inode
    # A run of version 1.1 gets one when it is resumed.
    (moved / RUN_ID).unlink()
    for path in all_checkpoints(moved):
        contents = torch.load(path, weights_only=True)
        del contents["translation"]["run_id"], contents["translation"]["training_pairs"]
        write_atomic(contents, path)
    fit(recipe_file, moved, "--trainer.max_steps", 12)
    assert identities(moved) == {Identity(), Identity(stored_run_id(moved), pairs)}
    # Another run has another one.
    fit(recipe_file, tmp_path / "child", "--trainer.max_steps", 4, "--init-from", run)
    fit(recipe_file, run, "--trainer.max_steps", 4, "--fresh")
    everyones = [own, *map(stored_run_id, (run, moved, tmp_path / "child"))]
    assert len({*everyones, None}) == 5
    assert identities(run) == {Identity(everyones[1], pairs)}
    # Its checkpoints are refused before anything is written.
    shutil.copy(step_path(tmp_path / "child", 4), step_path(run, 8))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    line = refusal("fit", recipe_file, "--run.folder", run)
    assert line.startswith(f"error: {step_path(run, 8)}: is of another run than {run}; move it out of that folder")
    report, _ = run_here("doctor", recipe_file, "--run.folder", run, code=1)
    assert f"WRONG {line.removeprefix('error: ')}\n" in report
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_another_recipe_does_not_begin_beside_the_best_checkpoint(recipe_file: Path, tmp_path: Path) -> None:
    """A run whose newest checkpoints have been removed has others, which would count as those of the next run."""
    run = fit(recipe_file, tmp_path / "run", "--trainer.max_steps", 6)
    for path in checkpoints(run):
        path.unlink()
    best = best_path(run).read_bytes()
    assert "contains a run of another recipe" in refusal("fit", recipe_file, "--run.folder", run, "--run.seed", 7)
    assert best_path(run).read_bytes() == best
    fit(recipe_file, run, "--trainer.max_steps", 8)


def test_a_run_goes_on_with_its_own_pairs(trained_run: Path, tiny_corpus: Path, tmp_path: Path) -> None:
    recipe_file, texts = trained_run.parent / "tiny.yaml", tiny_corpus.parent
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))

    def options(name: str, **texts: object) -> list[object]:
        given = [f"--corpus.{split}={json.dumps(text)}" for split, text in texts.items()]
        return [*given, "--corpus.folder", tmp_path / name, "--run.folder", run, "--trainer.max_steps", 260]

    def plan(name: str, **texts: object) -> str:
        recipe = load_recipe([recipe_file], list(map(str, options(name, **texts))))
        return check_pairs(plan_start(recipe, None, False, None))

    def pair(prefix: str) -> dict[str, str]:
        return {side: str(tmp_path / f"{prefix}.{side}") for side in ("source", "target")}

    for split in ("train", "validation"):
        for side in ("source", "target"):
            shutil.copy(texts / f"{split}.{side}", tmp_path / f"{split}.{side}")
    lines = (tmp_path / "train.target").read_text().splitlines(keepends=True)
    (tmp_path / "other.target").write_text("".join(reversed(lines)))
    shutil.copy(tmp_path / "train.source", tmp_path / "other.source")
    renamed = {"train": pair("train"), "validation": pair("other"), "test": pair("validation")}
    # The corpus that was moved, staged, or made again from files of other names, with other held-out text.
    shutil.copytree(tiny_corpus, tmp_path / "moved")
    run_here("prepare", recipe_file, *options("renamed", **renamed))
    assert plan("moved") == plan("renamed", **renamed) == training_pairs(tiny_corpus)
    # Before it is made again, nobody knows its pairs.
    absent = refusal("fit", recipe_file, *options("absent", **renamed))
    assert "contains a run of another recipe: corpus.test: now" in absent
    assert not (tmp_path / "absent").exists()
    # Other pairs with the same vocabulary.
    other = {"train": pair("other")}
    run_here("prepare", recipe_file, *options("other", **other))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    line = refusal("fit", recipe_file, *options("other", **other))
    assert line == (
        f"error: {tmp_path / 'other'}: has other training pairs than those that the run in {run} is trained on; name "
        f"the corpus.folder that has those, or train on these in another run.folder with --init-from {run}"
    )
    report, _ = run_here("doctor", recipe_file, *options("other", **other), code=1)
    assert f"WRONG {line.removeprefix('error: ')}\n" in report
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    # A checkpoint of version 1.1 does not tell the pairs of two corpora apart, only the names of their texts.
    newest = checkpoints(run)[-1]
    contents = torch.load(newest, weights_only=True)
    contents["translation"] = {**contents["translation"], "training_pairs": None}
    write_atomic(contents, newest)
    unknown = Path(shutil.copytree(tmp_path / "other", tmp_path / "unknown")) / "manifest.json"
    manifest = json.loads((tiny_corpus / "manifest.json").read_text())
    unknown.write_text(json.dumps({key: value for key, value in manifest.items() if key != "training_pairs"}))
    assert plan("unknown") == training_pairs(tmp_path / "other")
    with pytest.raises(InputError, match=r"contains a run of another recipe: corpus\.test: now"):
        plan("renamed", **renamed)


def test_a_rank_without_validation_pairs(tiny_corpus: Path, recipe_file: Path, tmp_path: Path) -> None:
    for side in ("source", "target"):
        lines = (tiny_corpus.parent / f"validation.{side}").read_text().splitlines()
        (tmp_path / side).write_text(lines[0] + "\n")
    short = [f"--corpus.validation.{side}={tmp_path / side}" for side in ("source", "target")]
    short += ["--corpus.folder", tmp_path / "corpus", "--training.adam_epsilon", 1e-3]
    one = fit(recipe_file, tmp_path / "one", *short)
    two = tmp_path / "two"
    fit_apart(recipe_file, two, *short, "--trainer.devices", 2)
    for tag in ("validation/loss", "validation/bleu"):
        assert scalars(two, tag) == [(step, pytest.approx(value, abs=1e-4)) for step, value in scalars(one, tag)]
