"""`learn`: its curves, its turns, how long it trains, and the score of the baseline."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data_module.corpus.store import open_corpus
from pipeline.config.recipe import load_recipe
from pipeline.runtime import signals
from tests.benchmark import learn
from tests.benchmark.__main__ import main
from tests.benchmark.learn import TIMED, UNTIMED, Curve, Marian, minutes_until, spaced

SILENT = ("ignore:.*many workers", "ignore:.*LeafSpec")
pytestmark = [pytest.mark.filterwarnings(message) for message in SILENT]


def test_curves_in_turns(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(learn, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(learn, "spaced", lambda *_: (4, 1))
    output = tmp_path / "output"
    command = ["learn", str(recipe_file), "--minutes", "1", "--output", str(output)]
    assert main([*command, "--training.label_smoothing", "0.2"]) == 0
    printed = capsys.readouterr()
    figures = json.loads(printed.out)
    # After each of our updates the baseline has a turn.
    lines = [json.loads(line) for line in (output / "learning.jsonl").read_text().splitlines()]
    assert [line["network"] for line in lines] == ["marian", "ours"] * 4
    for name in ("ours", "marian"):
        rows = figures["curves"][name]
        assert [row["update"] for row in rows] == [1, 2, 3, 4]
        minutes = [row["minutes"] for row in rows]
        assert minutes[0] > 0
        assert minutes == sorted(minutes)
        assert rows[-1]["negative_log_likelihood"] < rows[0]["negative_log_likelihood"]
        assert figures[name].items() >= rows[-1].items()
    # The run is one of `fit`, with the same scores.
    logged = [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]
    ours = [row["validation/negative_log_likelihood"] for row in logged if "validation/bleu" in row]
    assert ours == pytest.approx([row["negative_log_likelihood"] for row in figures["curves"]["ours"]], rel=1e-4)
    assert (output / "run" / "checkpoints" / "step=00000004.ckpt").is_file()
    # Each has settings of its own.
    assert figures["ours"]["training"]["label_smoothing"] == 0.2
    assert figures["marian"]["training"].items() >= {"label_smoothing": 0.1, "peak_learning_rate": 1e-3}.items()
    with Image.open(output / "learning.png") as picture:
        assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 10


def test_a_stopped_benchmark_does_not_claim_to_resume(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Curve, "update", lambda _: signal.raise_signal(signal.SIGINT))
    output = tmp_path / "output"
    try:
        assert main(["learn", str(recipe_file), "--minutes", "1", "--output", str(output)]) == 2
    finally:
        signals.forget()
    said = capfd.readouterr().err
    assert said.endswith(f"asked to stop: a benchmark cannot resume; remove {output} to start again\n")
    assert "run the same command" not in said


def test_as_many_updates_as_fit_into_the_minutes() -> None:
    def train(updates: int, curve: Curve) -> None:
        assert updates == UNTIMED + TIMED
        seconds = [100.0] * UNTIMED + [1.0, 3.0, 2.0, 2.0, 2.0] * (TIMED // 5)
        curve.seconds_after += np.cumsum(seconds).tolist()

    assert spaced(4.0, train) == (120, 10)
    assert spaced(1e-9, train) == (1, 1)
    # Rounded up, so that a validation ends the training.
    assert spaced(25 / 30, train) == (27, 3)


def test_the_likelihood_of_marian_is_what_transformers_computes(recipe_file: Path) -> None:
    recipe = load_recipe([recipe_file])
    marian = Marian(recipe)
    baseline = marian.baseline(20)
    network = baseline.network
    for _ in range(3):
        baseline.train(baseline.next_step())
    with torch.no_grad():  # Biases and norms begin as 0 and 1.
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    scores = marian.scores(network)

    corpus, total, tokens = open_corpus(recipe.corpus_folder(), "validation"), 0.0, 0
    exact = network.double().eval()
    bos, eos = (exact.model.config.bos_token_id, exact.model.config.eos_token_id)
    for pair in range(len(corpus)):
        source, target = ([*side[pair].tolist(), eos] for side in (corpus.source, corpus.target))
        logits = exact(torch.tensor([source]), torch.tensor([[bos, *target[:-1]]]), None)
        total -= logits[0].log_softmax(-1)[range(len(target)), target].sum().item()
        tokens += len(target)
    assert float(scores["validation/negative_log_likelihood"]) == pytest.approx(total / tokens, rel=1e-5)
    assert "validation/bleu" in scores


def row(minutes: float, likelihood: float) -> dict[str, float]:
    return {"minutes": minutes, "negative_log_likelihood": likelihood}


def test_minutes_until_the_likelihood_of_the_other() -> None:
    rows = [row(2.0, 4.0), row(4.0, 3.0), row(6.0, 3.0), row(8.0, 1.0)]
    assert minutes_until(rows, row(9.0, 2.5)) == pytest.approx(6.5)
    assert minutes_until(rows, row(9.0, 3.0)) == 4.0
    assert minutes_until(rows, row(9.0, 5.0)) == 2.0
    assert minutes_until(rows, row(9.0, 0.5)) is None


def test_mistakes(recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--minutes", "0"], "--minutes 0: must be more than 0"),
        (["--minutes", "inf"], "--minutes inf"),
        ([], "--minutes"),
        (["--minutes", "1", "--network.pre_norm", "true", "--output", str(tmp_path / "new")], "network.pre_norm"),
        (["--minutes", "1", "--output", str(tmp_path)], "give another --output"),
    ):
        assert main(["learn", str(recipe_file), *words]) == 2
        assert f"{said}" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "new").exists()
