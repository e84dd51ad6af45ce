"""Private names of other libraries that the project uses still exist.

If a test fails, the library has changed. The module named in the test explains what the name is used for.
"""

import inspect

import pytest
import sacrebleu
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging

from pipeline.compat.lightning import disable_signal_handling
from pipeline.compat.sacrebleu import chrf_score, chrf_statistics


def test_lightning() -> None:
    """Used in pipeline/compat/lightning.py."""
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", barebones=True)
    assert callable(trainer._signal_connector.register_signal_handlers)
    loop = trainer.fit_loop.epoch_loop
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(type(loop).advance)
    assert "register_signal_handlers()" in inspect.getsource(Trainer._run)
    disable_signal_handling(trainer)
    assert trainer._signal_connector.register_signal_handlers() is None
    assert loop._broadcast_sigterm_tensor() is None
    assert {"restarting", "run"} <= set(dir(loop.val_loop))
    averaging = WeightAveraging()
    assert averaging._average_model is None
    assert averaging._latest_update_step == 0
    assert "self._swap_models(pl_module)" in inspect.getsource(WeightAveraging.on_validation_epoch_start)


def test_sacrebleu() -> None:
    """See pipeline/compat/sacrebleu.py: the private functions give what the public ones give."""
    hypotheses = ["the cat sat on the mat", "", "he says nothing at all today"]
    references = ["the cat sat on a mat", "yes", "he said nothing at all"]
    for name in ("_extract_corpus_statistics", "_compute_f_score"):
        assert hasattr(sacrebleu.CHRF, name), f"sacreBLEU {sacrebleu.__version__} has no CHRF.{name}; see compat"
    metric = sacrebleu.CHRF()
    pairs = list(zip(hypotheses, references, strict=True))
    statistics = [chrf_statistics(metric, hypothesis, reference) for hypothesis, reference in pairs]
    assert {len(counts) for counts in statistics} == {3 * metric.order}
    for counts, (hypothesis, reference) in zip(statistics, pairs, strict=True):
        assert chrf_score(metric, counts) == pytest.approx(metric.sentence_score(hypothesis, [reference]).score)
    total = [sum(column) for column in zip(*statistics, strict=True)]
    assert chrf_score(metric, total) == pytest.approx(metric.corpus_score(hypotheses, [references]).score)
