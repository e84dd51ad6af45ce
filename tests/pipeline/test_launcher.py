"""When another rank ends with an error, rank 0 has time to report its own before it is killed."""

import os
import signal

import pytest
import torch
from lightning.pytorch import Trainer

from pipeline.compat.lightning import PatientLauncher
from pipeline.training.trainer import strategy
from tests.conftest import program

RANK_0 = """
import subprocess, sys, time
from pipeline.compat.lightning import RankObserver
rank_1 = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"])
RankObserver([rank_1], patience_seconds={patience}).start()
rank_1.wait()
time.sleep({remaining})
sys.exit(2)
"""


@pytest.mark.parametrize(
    ("patience", "remaining", "code", "output"),
    [
        (60, 3, 2, ""),
        (0.1, 60, -signal.SIGKILL, "error: ended before the others: rank 1 with exit code 3; its output says why\n"),
    ],
)
def test_rank_0_ends_by_itself_or_is_killed(patience: float, remaining: float, code: int, output: str) -> None:
    script = RANK_0.format(patience=patience, remaining=remaining)
    done = program(script)
    assert (done.returncode, done.stderr.decode()) == (code, output)


def test_several_devices_have_the_launcher() -> None:
    options = {"accelerator": "cpu", "devices": 2}
    trainer = Trainer(logger=False, enable_checkpointing=False, strategy=strategy(options), **options)
    assert isinstance(trainer.strategy.launcher, PatientLauncher)


def test_ranks_share_the_processors_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")  # Something else has started the ranks.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("pipeline.compat.lightning.num_processors", lambda: 6)
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    options = {"accelerator": "cpu", "devices": 2}
    trainer = Trainer(logger=False, enable_checkpointing=False, strategy=strategy(options), **options)
    launcher = trainer.strategy.launcher
    assert launcher is not None
    assert launcher.launch(lambda: os.environ["OMP_NUM_THREADS"]) == "3"
    assert launcher.launch(lambda: os.environ["OMP_NUM_THREADS"]) == "3"
    assert chosen == [3]  # What is given by then stays.
