"""The logged metrics of training, compared with counts of the batches; progress on a terminal and in a file."""

import os
import pty
import re
import sys
import termios
import time
from collections import defaultdict
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from data_module.batch import RankBatch, SpecialIds
from data_module.batch_plan import Epochs
from data_module.corpus.store import open_corpus
from data_module.settings import BatchSettings
from data_module.stateful_loader import RankBatchDataset, StatefulLoader
from data_module.system import text_files
from data_module.tokenization.tokenizer import Tokenizer
from data_module.translation_data_module import TranslationDataModule
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from model.training_module import TranslationModule
from pipeline.checkpointing.run_folder import read_metrics
from pipeline.monitoring import training_monitor
from pipeline.monitoring.run_log import RunLog
from pipeline.monitoring.run_metadata import first_submission
from pipeline.monitoring.training_monitor import Progress, TrainingMonitor
from pipeline.runtime.console import quiet_lightning
from tests.conftest import ALONE


def real_tokens(share: RankBatch, pad: int) -> int:
    """Source and target tokens without padding."""
    return sum(int((side != pad).sum()) for b in share.micro_batches for side in (b.source, b.target_output))


def row_tokens(share: RankBatch) -> int:
    return sum(side.numel() for batch in share.micro_batches for side in (batch.source, batch.target_output))


@pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`.*")
def test_tokens_are_those_of_all_ranks_without_padding(
    tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the first of two ranks on a corpus whose rows have padding."""
    monkeypatch.setattr(training_monitor, "FIRST_LINE_SECONDS", 0.0)
    quiet_lightning()
    tokenizer = Tokenizer.load(tiny_corpus / "tokenizer.model")
    special = SpecialIds(pad=tokenizer.pad_id, bos=tokenizer.bos_id, eos=tokenizer.eos_id)
    corpus = open_corpus(tiny_corpus, "train")

    def loader() -> StatefulLoader:
        plans = Epochs([corpus], batch_tokens=400, seed=1)
        shape = TranslationDataModule(tiny_corpus, BatchSettings(batch_tokens=400), special, 1).row_shape(2)
        shares = RankBatchDataset(plans, special, rank=0, world_size=2, shape=shape)
        return StatefulLoader(shares, workers=0, pin_memory=False)

    network = NetworkSettings(num_layers=1, d_model=8, d_ff=8, num_heads=1)
    module = TranslationModule(
        tokenizer.vocabulary_size, special, network, TrainingSettings(), DecodingSettings(), seed=1
    )
    every, steps = 3, 6
    options = {**ALONE, "logger": RunLog(tmp_path, 0, writes=True), "callbacks": [TrainingMonitor(every)]}
    Trainer(accelerator="cpu", max_steps=steps, limit_val_batches=0, **options).fit(module, loader())
    logged = list(read_metrics(tmp_path))
    assert [line["step"] for line in logged] == [every, steps]
    # The time left is shown after the first step that ends when it is time for a line, and again at the end.
    assert re.findall(r"training: step (\d) of 6: .*:\d\d left\n", capsys.readouterr().err) == ["1", "6"]

    epoch = Epochs([corpus], batch_tokens=400, seed=1).get(0).plan
    shares = list(islice(loader(), steps))
    for line in logged:
        first, end = line["step"] - every, line["step"]
        pairs = np.concatenate([epoch[index] for index in range(first, end)])
        target_tokens = int(corpus.target.lengths[pairs].sum()) + len(pairs)
        counted = line["train_perf/target_tokens_per_second"] * line["train_perf/step_seconds"] * every
        assert counted == pytest.approx(target_tokens)
        real = sum(real_tokens(share, special.pad) for share in shares[first:end])
        padded = sum(row_tokens(share) for share in shares[first:end])
        assert 0 < real < padded
        assert line["train_perf/padding_share"] == pytest.approx(1 - real / padded)
        last = shares[end - 1]
        assert line["train_perf/epoch"] == pytest.approx(last.epoch + (last.index + 1) / len(epoch))


def test_steps_without_any_token_are_logged(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 0, writes=True)
    strategy = SimpleNamespace(reduce=lambda sums, reduce_op: sums)
    trainer = SimpleNamespace(global_step=1, global_rank=0, world_size=1, logger=log, strategy=strategy)
    zeros = defaultdict(lambda: torch.tensor(0.0))
    batch = RankBatch(torch.tensor([]), [], 0, num_target_tokens=0, epoch=0, index=0, num_batches=1)
    monitor = TrainingMonitor(1)
    monitor.nodes = ["node"]
    monitor.clock.start(torch.device("cpu"))
    monitor.on_train_batch_end(trainer, None, zeros, batch, 0)  # type: ignore[arg-type]
    [line] = read_metrics(tmp_path)
    assert "train_perf/padding_share" in line


def test_the_loss_is_that_of_the_tokens_of_all_ranks(tmp_path: Path) -> None:
    """Of two ranks whose losses are the same. Each of them counts the target tokens of the whole step."""
    log = RunLog(tmp_path, 0, writes=True)
    strategy = SimpleNamespace(reduce=lambda sums, reduce_op: {"sum": 2, "mean": 1}[reduce_op] * sums)
    trainer = SimpleNamespace(global_step=1, global_rank=0, world_size=2, logger=log, strategy=strategy)
    outputs = defaultdict(lambda: torch.tensor(0.0))
    outputs |= {"smoothed": torch.tensor(6.0), "negative_log_likelihood": torch.tensor(4.0)}
    outputs |= {"correct": torch.tensor(3.0), "tokens": torch.tensor(10.0)}
    batch = RankBatch(torch.tensor([]), [], 0, num_target_tokens=10, epoch=0, index=0, num_batches=1)
    monitor = TrainingMonitor(1)
    monitor.nodes = ["one", "other"]
    monitor.clock.start(torch.device("cpu"))
    monitor.on_train_batch_end(trainer, None, outputs, batch, 0)  # type: ignore[arg-type]
    [line] = read_metrics(tmp_path)
    found = [line[f"train/{name}"] for name in ("loss", "negative_log_likelihood", "accuracy")]
    assert found == pytest.approx([1.2, 0.8, 0.6])


def test_goodput_while_the_clock_is_behind_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 s after the first submission, in a clock that is an hour behind, then in the first one again."""
    starts = [{"submitted": 1e9, "began": 1e9}, {"submitted": 1e9 - 3540, "began": 1e9 - 3540}]
    assert first_submission(starts) == 1e9
    assert first_submission([starts[0], {"submitted": 1e9 - 5, "began": 1e9 + 60}]) == 1e9 - 5  # by another job
    monitor = TrainingMonitor(10)
    monitor.submitted = first_submission(starts)
    monitor.load_state_dict({"counted_seconds": 40.0, "validation_seconds": None})
    monkeypatch.setattr(time, "time", lambda: 1e9 - 3500)
    assert (monitor.seconds_since_submission(), monitor.goodput()) == (None, None)
    monkeypatch.setattr(time, "time", lambda: 1e9 + 100)
    assert (monitor.seconds_since_submission(), monitor.goodput()) == (100, 0.4)


@pytest.mark.parametrize(
    ("every", "validated", "said"),
    [
        (65, 130, ""),
        (
            40,
            120,
            "warning: step 130, the last one, was not validated: it is no multiple of trainer.val_check_interval 40",
        ),
        (1000, None, "1000, so the run has no validation and no best.ckpt; lower it"),
        (40, "not wanted", ""),
    ],
)
def test_the_end_says_that_the_last_step_was_not_validated(
    every: int, validated: int | str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = TrainingMonitor(10)
    trainer = SimpleNamespace(
        val_check_interval=every,
        enable_validation=validated != "not wanted",
        callback_metrics={},
        global_step=validated,
        num_val_batches=[1],
    )
    if isinstance(validated, int):
        monitor.on_validation_start(trainer, None)
        monitor.on_validation_end(trainer, None)
    trainer.global_step = 130
    monitor.on_train_end(trainer, None)
    line = capsys.readouterr().err
    assert line.endswith(f"{said}\n") if said else not line


def train() -> None:
    """Take four steps of a minute, with a validation of 100 seconds after every second one."""
    progress = Progress(4, 8, 2)
    for step in range(5, 9):
        progress.advance()
        if step == 5:
            progress.show({}, 60.0)
            progress.validation_seconds = 100.0
        progress.show({"loss": f"{10 - step}.5", "tokens/s": "1,234"}, 60.0)
        if step == 6:
            progress.show({"BLEU": "12.34"})
    progress.close()


def test_a_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, 120))
    with monkeypatch.context() as patch, os.fdopen(theirs, "w") as terminal:
        patch.setattr(sys, "stderr", terminal)
        train()
    said = ""
    with suppress(OSError):  # at the end, as the other side is closed
        while True:
            said += os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "8/8" in said
    assert "left=0:00:00, loss=2.5, tokens/s=1,234, BLEU=12.34" in said
    assert "<" not in said  # tqdm's own time left, which takes validations for slow steps
    assert "training: step" not in said


def test_lines_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """The first line at once, the last at the end, and between them at most one line per minute."""
    train()
    assert capsys.readouterr().err.splitlines() == [
        "training: from step 4 to 8",
        "training: step 5 of 8: 0:03:00 left",
        "training: step 8 of 8: loss 2.5, tokens/s 1,234, BLEU 12.34, 0:00:00 left",
    ]


def test_a_validation_counts_its_batches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(text_files, "SHOWN_AFTER_SECONDS", 0.0)
    for is_shown in (True, False):  # Other ranks than 0 show nothing.
        monitor = TrainingMonitor(10)
        monitor._progress = Progress(0, 8, 4) if is_shown else None
        trainer = SimpleNamespace(num_val_batches=[2], callback_metrics={}, global_step=4)
        monitor.on_validation_start(trainer, None)
        for _ in range(2):
            monitor.on_validation_batch_end(trainer, None, None, None, 0)
        monitor.on_validation_end(trainer, None)
        said = capsys.readouterr().err
        assert ("validating: 100%" in said and "2/2" in said) is is_shown


@pytest.mark.parametrize(
    ("step", "last", "every", "expected"),
    [
        (10, 40, 10, "0:05:30"),  # validations after 20, 30 and 40
        (11, 39, 10, "0:05:00"),  # 28 steps, validations after 20 and 30
        (35, 39, 10, "0:00:40"),
        (10, 40, None, "0:05:00"),
    ],
)
def test_time_left_counts_the_validations_to_come(
    step: int, last: int, every: int | None, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(step - 1, last, every)
    progress.validation_seconds = 10.0
    progress.advance()
    progress.show({"loss": "1.0"}, 10.0)
    assert f", {expected} left\n" in capsys.readouterr().err
