"""Signals that ask the program to stop: noted, and what each exit code means."""

import os
import signal
from collections.abc import Iterator

import pytest

from pipeline.runtime import signals
from pipeline.runtime.launch import reports_exit_code
from pipeline.runtime.signals import (
    Stopped,
    default_signals,
    first_signal,
    install,
    keyboard_interrupt_recorded,
    raise_if_stopped,
)

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing was asked before, and handlers are put back."""
    monkeypatch.setattr(signals, "_received", [])
    handlers = [signal.getsignal(one) for one in SIGNALS]
    yield
    for one, handler in zip(SIGNALS, handlers, strict=True):
        signal.signal(one, handler)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_is_noted_and_the_first_one_counts(number: signal.Signals) -> None:
    install()
    raise_if_stopped("nowhere")
    assert first_signal() is None
    assert callable(signal.getsignal(number))
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert first_signal() == number
    with pytest.raises(Stopped, match="asked to stop at the door; nothing was lost") as stopped:
        raise_if_stopped("at the door")
    assert stopped.value.exit_code == 75


def test_ctrl_c_asks_once_and_then_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with keyboard_interrupt_recorded():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
    with keyboard_interrupt_recorded():
        os.kill(os.getpid(), signal.SIGINT)
        assert first_signal() == signal.SIGINT
        with pytest.raises(Stopped) as stopped:
            raise_if_stopped("here")
        assert stopped.value.exit_code == 130
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_work_that_loses_nothing_ends_at_once() -> None:
    install()
    with default_signals():
        assert [signal.getsignal(one) for one in SIGNALS[:2]] == [signal.SIG_DFL] * 2
    assert callable(signal.getsignal(signal.SIGTERM))
    os.kill(os.getpid(), signal.SIGTERM)
    assert first_signal() == signal.SIGTERM
    with pytest.raises(Stopped), default_signals():
        pass


def test_at_the_end_signals_are_ignored() -> None:
    install()
    signals.ignore()
    for one in SIGNALS[:2]:
        os.kill(os.getpid(), one)
    assert first_signal() is None


@pytest.mark.parametrize(
    ("environment", "speaks"),
    [
        ({}, True),
        ({"LOCAL_RANK": "1"}, False),  # Lightning's own launcher
        ({"LOCAL_RANK": "1", "RANK": "1"}, True),  # torchrun
        ({"LOCAL_RANK": "1", "SLURM_STEP_ID": "0"}, True),
    ],
)
def test_whose_exit_code_counts(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], speaks: bool) -> None:
    for name in ("LOCAL_RANK", "RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert reports_exit_code(0)
    assert reports_exit_code(1) is speaks
