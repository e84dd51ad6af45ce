"""Signals that ask the program to stop, and the exit codes that they lead to."""

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

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def no_signal_received(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(signals, "_received", [])
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # The tests themselves may run under nohup.
    yield
    signal.signal(signal.SIGHUP, hangup)


@pytest.mark.parametrize("signum", SIGNALS)
def test_the_first_signal_is_recorded(signum: signal.Signals) -> None:
    install()
    raise_if_stopped("nowhere")
    assert first_signal() is None
    assert callable(signal.getsignal(signum))
    os.kill(os.getpid(), signum)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert first_signal() == signum
    with pytest.raises(Stopped, match="asked to stop during start-up; nothing was lost") as stopped:
        raise_if_stopped("during start-up")
    assert stopped.value.exit_code == 75


def test_a_hangup_that_nohup_ignores_is_not_recorded() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    install()
    with default_signals():
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGHUP)
    assert first_signal() is None


def test_the_second_ctrl_c_stops_at_once() -> None:
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
        with pytest.raises(Stopped, match="interrupted twice: ended without saving") as stopped:
            os.kill(os.getpid(), signal.SIGINT)
        assert stopped.value.exit_code == 130
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == before


def test_default_signals_end_the_process_immediately() -> None:
    install()
    with default_signals():
        assert [signal.getsignal(signum) for signum in SIGNALS] == [signal.SIG_DFL] * 3
    assert callable(signal.getsignal(signal.SIGTERM))
    os.kill(os.getpid(), signal.SIGTERM)
    assert first_signal() == signal.SIGTERM
    with pytest.raises(Stopped), default_signals():
        pass


def test_default_signals_leave_another_programs_handlers() -> None:
    def theirs(*_: object) -> None:
        pass

    for signum in SIGNALS:
        signal.signal(signum, theirs)
    with default_signals():
        assert [signal.getsignal(signum) for signum in SIGNALS] == [theirs] * 3
    assert [signal.getsignal(signum) for signum in SIGNALS] == [theirs] * 3


def test_ignored_signals_are_not_recorded() -> None:
    install()
    signals.ignore()
    for signum in (*SIGNALS, signal.SIGINT):
        os.kill(os.getpid(), signum)
    assert first_signal() is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, True),
        ({"LOCAL_RANK": "1"}, False),  # Lightning's own launcher
        ({"LOCAL_RANK": "1", "RANK": "1"}, True),  # torchrun
        ({"LOCAL_RANK": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, True),
        ({"LOCAL_RANK": "1", "SLURM_JOB_ID": "7"}, False),  # Lightning's launcher, inside a job
    ],
)
def test_which_ranks_report_their_exit_code(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: bool
) -> None:
    for name in ("LOCAL_RANK", "RANK", "SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert reports_exit_code(0)
    assert reports_exit_code(1) is expected
