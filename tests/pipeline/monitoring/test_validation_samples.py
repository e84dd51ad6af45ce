"""The validation's scores and tables do not depend on the number of ranks."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data_module.batching.batch import PaddedBatch, SpecialIds
from data_module.files import PlainValues
from data_module.settings import BatchSettings
from data_module.tokenization.tokenizer import Tokenizer
from data_module.translation_data_module import TranslationDataModule
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from model.training_module import TranslationModule
from pipeline.inference.metrics import METRICS, ExactMatch
from pipeline.monitoring.run_log import RunLog
from pipeline.monitoring.validation_metrics import quality
from pipeline.monitoring.validation_samples import NUM_WORST, Translation, ValidationSamples

NETWORK = NetworkSettings(num_layers=1, d_model=8, d_ff=8, num_heads=1)


def validate(corpus: Path, num_ranks: int) -> tuple[dict[str, float], list[Translation], int]:
    """Return scores and worst translations of all ranks, and the number of fillers. Each source is its translation."""
    tokenizer = Tokenizer.load(corpus / "tokenizer.model")
    special = SpecialIds(pad=tokenizer.pad_id, bos=tokenizer.bos_id, eos=tokenizer.eos_id)
    data = TranslationDataModule(corpus, BatchSettings(batch_tokens=400), special, seed=1)
    ranks, num_fillers = [], 0
    for rank in range(num_ranks):
        trainer = SimpleNamespace(global_rank=rank, world_size=num_ranks)
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
    worst = sorted(one for samples in ranks for one in samples._worst)[:NUM_WORST]
    return metrics.compute(), worst, num_fillers


def test_fillers_are_not_scored(tiny_corpus: Path) -> None:
    *alone, no_fillers = validate(tiny_corpus, 1)
    *together, num_fillers = validate(tiny_corpus, 7)
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


@pytest.mark.parametrize(
    ("translated", "names"), [([], ["best_negative_log_likelihood"]), ([0], ["bleu", "sentences"])]
)
def test_the_likelihood_is_best_where_it_is_lowest(
    translated: list[int], names: list[str], tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether none or one of two sentences is translated; scores and pages are of these."""
    tokenizer = Tokenizer.load(tiny_corpus / "tokenizer.model")
    trainer = SimpleNamespace(logger=RunLog(tmp_path, 0, writes=True), global_step=1)
    samples = ValidationSamples(["a", "b"], ["a", "b"], tokenizer, best_by="likelihood", translated=translated)
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
            batch = PaddedBatch(ids, None, ids, ids, pairs, is_translated=pair in translated)
            samples.on_validation_batch_end(
                trainer, module, (pairs, ids, torch.tensor([ids.size(1)])) if batch.is_translated else None, batch, pair
            )
        samples.on_validation_epoch_end(trainer, module)
    assert [scores["validation/best_negative_log_likelihood"] for scores in logged] == [3.0, 2.0, 2.0]
    assert logged[0].keys() >= {f"validation/{name}" for name in names}
    assert ("validation/bleu" in logged[0]) == ("validation/sentences" in logged[0]) == bool(translated)
    assert (tmp_path / "tensorboard").exists() == bool(translated)  # the pages
    if translated:
        assert logged[0]["validation/sentences"] == 1
        assert quality(logged[0]) == "BLEU 0.00, chrF 100.00, exact match 100.00 of 1 sentences"
        assert samples.samples == [0]
