"""Scores summed over batches and ranks equal sacreBLEU's; scores and tables do not depend on the number of ranks."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import sacrebleu
import torch

from data_module.batch import PaddedBatch, SpecialIds
from data_module.settings import BatchSettings
from data_module.system.files import PlainValues
from data_module.tokenization.tokenizer import Tokenizer
from data_module.translation_data_module import TranslationDataModule
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from model.training_module import TranslationModule
from pipeline.metrics.metrics import METRICS, ExactMatch
from pipeline.monitoring.run_log import RunLog
from pipeline.monitoring.validation_metrics import ValidationMetrics, quality
from pipeline.monitoring.validation_samples import ScoredTranslation, ValidationSamples
from tests.pipeline.test_metrics import Lines

HYPOTHESES = ["the cat sat on the mat", "a dog runs through deep snow", "", "he says nothing at all today"]
REFERENCES = ["the cat sat on a mat", "a dog runs through the deep snow", "yes", "he said nothing at all"]
PIECES = [[4, 5, 6, 7, 8], [4, 5, 6, 7, 4, 5, 6, 7, 4, 5], [], [9, 9, 9, 9, 9]]
NETWORK = NetworkSettings(num_layers=1, d_model=8, d_ff=8, num_heads=1)


def test_batches_add_up() -> None:
    metric = ValidationMetrics()
    metric.update([], [], [])
    assert metric.compute()["validation/bleu"] == 0.0
    metric.reset()
    metric.update(HYPOTHESES[:1], REFERENCES[:1], PIECES[:1])
    metric.update([], [], [])
    metric.update(HYPOTHESES[1:], REFERENCES[1:], PIECES[1:])
    expected = [
        sacrebleu.sentence_chrf(*pair).score for pair in zip(HYPOTHESES, [[r] for r in REFERENCES], strict=True)
    ]
    assert metric.sentence_scores == pytest.approx(expected[1:])
    scores = metric.compute()
    assert scores["validation/bleu"] == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score)
    assert scores["validation/chrf"] == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score)
    # 6 + 6 + 0 + 6 words; the references have 6 + 7 + 1 + 5.
    assert scores["validation/length_ratio"] == pytest.approx(18 / 19)
    # Of 2 + 7 + 0 + 2 runs of four pieces, 3 in the second and 1 in the fourth translation are repeated.
    assert scores["validation/repetition"] == pytest.approx(4 / 11)
    assert "tok:13a" in metric.signatures()
    assert "chrF nrefs:1" in metric.signatures()
    assert ValidationMetrics().signatures() == metric.signatures()  # also on a rank without text


def test_each_text_source_has_its_scores() -> None:
    """Batches of the first, the second and again the first source; a third source has no pair."""
    metric, other = (ValidationMetrics(sources=["de", "fr", "it"]) for _ in range(2))
    metric.update(HYPOTHESES[:1], REFERENCES[:1], PIECES[:1], 0)
    metric.update(HYPOTHESES[1:2], REFERENCES[1:2], PIECES[1:2], 1)
    other.update(HYPOTHESES[2:], REFERENCES[2:], PIECES[2:], 0)
    metric.merge_state(other)
    scores = metric.compute()
    whole = ValidationMetrics()
    whole.update(HYPOTHESES, REFERENCES, PIECES)
    apart = {name: scores.pop(name) for name in list(scores) if name.count("/") == 2}
    assert scores == whole.compute()
    assert not any(name.count("/") == 2 for name in whole.compute())
    for name, chosen in (("de", [0, 2, 3]), ("fr", [1])):
        hypotheses, references = ([lines[i] for i in chosen] for lines in (HYPOTHESES, REFERENCES))
        assert apart.pop(f"validation/bleu/{name}") == pytest.approx(
            sacrebleu.corpus_bleu(hypotheses, [references]).score
        )
        assert apart.pop(f"validation/chrf/{name}") == pytest.approx(
            sacrebleu.corpus_chrf(hypotheses, [references]).score
        )
    assert apart == {f"validation/exact_match/{name}": 0.0 for name in ("de", "fr")}


def test_a_metric_that_counts_fractions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "halves", type("Halves", (Lines,), {"statistics": lambda *_: [0.5, 1]})())
    with pytest.raises(RuntimeError, match="Float"):
        ValidationMetrics().update(["a"], ["a"], [[5]])


def test_sums_are_exact_and_lists_are_of_one_length() -> None:
    metric = ValidationMetrics()
    # float32 is exact only up to 2 ** 24.
    assert len(metric.metric_state) == 4
    assert {state.dtype for state in metric.metric_state.values()} == {torch.int64}
    with pytest.raises(ValueError, match="shorter"):
        metric.update(["yes", "no"], ["yes", "no"], [[4]])


def test_a_registered_metric_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A name that ValidationMetrics has as a method.
    monkeypatch.setitem(METRICS, "compute", Lines())
    metric, other = ValidationMetrics(), ValidationMetrics()
    metric.update(HYPOTHESES[:1], REFERENCES[:1], PIECES[:1])
    other.update(HYPOTHESES[1:], REFERENCES[1:], PIECES[1:])
    metric.merge_state(other)
    scores = metric.compute()
    assert list(scores)[2:4] == ["validation/exact_match", "validation/compute"]
    assert scores["validation/compute"] == 25.0
    assert metric.signatures().endswith("; compute words:split")


def validate(corpus: Path, num_ranks: int) -> tuple[dict[str, float], dict[int, ScoredTranslation], int]:
    """Return scores and shown translations of all ranks, and the number of fillers. Each source is its translation."""
    tokenizer = Tokenizer.load(corpus / "tokenizer.model")
    special = SpecialIds(pad=tokenizer.pad_id, bos=tokenizer.bos_id, eos=tokenizer.eos_id)
    data = TranslationDataModule(corpus, BatchSettings(batch_tokens=400), special, seed=1)
    ranks, num_fillers = [], 0
    for rank in range(num_ranks):
        strategy = SimpleNamespace(root_device=torch.device("cpu"), reduce=lambda limit, reduce_op: limit)
        trainer = SimpleNamespace(global_rank=rank, world_size=num_ranks, strategy=strategy)
        data.trainer = trainer
        samples = ValidationSamples(*data.validation_text(), tokenizer)
        module = SimpleNamespace(device="cpu")
        samples.on_validation_epoch_start(trainer, module)
        for index, batch in enumerate(data.val_dataloader()):
            answers = batch.pairs, batch.source, (batch.source != tokenizer.pad_id).sum(1)
            samples.on_validation_batch_end(trainer, module, answers, batch, index)
            num_fillers += batch.is_filler
        ranks.append(samples)
    metrics, *others = [samples._metrics for samples in ranks]
    for other in others:
        metrics.merge_state(other)
    shown = {pair: one for samples in ranks for pair, one in samples._kept.items()}
    return metrics.compute(), shown, num_fillers


def test_fillers_are_not_scored(tiny_corpus: Path) -> None:
    *alone, no_fillers = validate(tiny_corpus, 1)
    *together, num_fillers = validate(tiny_corpus, 8)
    assert (no_fillers, num_fillers > 0) == (0, True)
    assert together == alone
    assert 0 < alone[0]["validation/bleu"] < 100


class Errors(ExactMatch):
    higher_is_better = False


@pytest.mark.parametrize(
    ("metric", "scores", "best"),
    [
        (ExactMatch(), [3.0, 2.0, 4.0], [3.0, 3.0, 4.0]),
        (Errors(), [3.0, 2.0, 4.0], [3.0, 2.0, 2.0]),
        (ExactMatch(), [math.nan, 3.0, math.nan], [None, 3.0, 3.0]),
    ],
    ids=["large", "small", "finite"],
)
def test_the_best_score_so_far(
    metric: ExactMatch,
    scores: list[float],
    best: list[float | None],
    tiny_corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a metric of which large or small values are good; the run is resumed before each validation."""
    monkeypatch.setitem(METRICS, "errors", metric)
    tokenizer = Tokenizer.load(tiny_corpus / "tokenizer.model")
    trainer = SimpleNamespace(logger=None)
    logged: list[dict[str, float]] = []
    module = SimpleNamespace(log_dict=logged.append)
    state: PlainValues = {"best_score": None}
    for score in scores:
        samples = ValidationSamples(["a"], ["b"], tokenizer, best_by="errors")
        samples.load_state_dict(state)
        monkeypatch.setattr(samples._metrics, "compute", lambda: {"validation/errors": score})  # noqa: B023
        samples.on_validation_epoch_end(trainer, module)
        state = samples.state_dict()
    assert [one.get("validation/best_errors") for one in logged] == best


def test_the_likelihood_is_best_where_it_is_lowest(
    tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two sentences is translated; scores and pages are of it. test_fit.py has a run that translates none."""
    tokenizer = Tokenizer.load(tiny_corpus / "tokenizer.model")
    trainer = SimpleNamespace(logger=RunLog(tmp_path, 0, writes=True), global_step=1)
    samples = ValidationSamples(["a", "b"], ["a", "b"], tokenizer, best_by="likelihood", translated=[0])
    module = TranslationModule(8, SpecialIds(0, 2, 3), NETWORK, TrainingSettings(), DecodingSettings(), 1)
    logged: list[dict[str, float]] = []
    monkeypatch.setattr(module, "log_dict", logged.append)
    for likelihood in (3.0, 2.0, 4.0):
        monkeypatch.setattr(
            module,
            "validation_losses",
            lambda: {"validation/negative_log_likelihood": likelihood},  # noqa: B023
        )
        samples.on_validation_epoch_start(trainer, module)
        for pair in range(2):
            ids = torch.tensor([[*tokenizer.encode(["a"])[0].tolist(), tokenizer.eos_id]])
            pairs = torch.tensor([pair])
            batch = PaddedBatch(ids, None, ids, ids, pairs, is_translated=pair == 0)
            answers = (pairs, ids, torch.tensor([ids.size(1)])) if batch.is_translated else None
            samples.on_validation_batch_end(trainer, module, answers, batch, pair)
        samples.on_validation_epoch_end(trainer, module)
    assert [scores["validation/best_negative_log_likelihood"] for scores in logged] == [3.0, 2.0, 2.0]
    assert (tmp_path / "tensorboard").exists()  # the pages
    assert logged[0]["validation/sentences"] == 1
    assert quality(logged[0], "bleu") == "BLEU 0.00, chrF 100.00, exact match 100.00 of 1 sentences"
    assert quality(logged[0], "exact_match") == "exact match 100.00, BLEU 0.00, chrF 100.00 of 1 sentences"
    assert samples.samples == [0]
