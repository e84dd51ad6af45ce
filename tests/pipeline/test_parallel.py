"""`translate --devices N`: the output of one process, and no process is left, whatever happens."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import TMonitor

from data_module.errors import InputError
from data_module.worker_processes import num_processors
from pipeline.inference.options import SearchOptions
from pipeline.inference.parallel import ParallelTranslator, choose_devices
from pipeline.inference.text_io import CHUNK
from pipeline.inference.translator import Chunk, Hypothesis, Translation, load_translator
from tests.conftest import ROOT, pipeline, sentences

NAME = r"translation process [12] of 2 on the CPU"


def messages(errors: bytes) -> list[str]:
    """Return the lines of standard error, without those of the bar and the name of the checkpoint."""
    ours = ("using", "translating")
    return [line for line in errors.decode().splitlines() if line.strip() and not line.startswith(ours)]


class FakeWorker:
    """Answers in the process of the test; `before` is called before each answer."""

    def __init__(self, before: Callable[[Chunk], object] = lambda chunk: None) -> None:
        self._before = before

    def translate(self, chunk: Chunk) -> list[Translation]:
        self._before(chunk)
        return [Translation([Hypothesis(line, 0.0, 0.0, 1)]) for line in chunk.lines]


def translate_lines(workers: list[FakeWorker], lines: Iterator[str], chunk: int) -> Iterator[Translation]:
    translator = ParallelTranslator.__new__(ParallelTranslator)
    translator._workers = workers  # type: ignore[assignment]
    return translator.translate_lines(lines, chunk)


def numbered(count: int, read: list[int]) -> Iterator[str]:
    for number in range(count):
        read.append(number)
        yield str(number)


def test_order_and_a_bounded_number_of_chunks() -> None:
    """A process that takes long holds the others up, instead of their answers filling the memory."""
    others_done, is_held = threading.Semaphore(0), threading.Event()
    read: list[int] = []

    def hold_the_first(chunk: Chunk) -> None:
        if chunk.lines[0] != "0":
            others_done.release()
            return
        for _ in range(3):
            others_done.acquire()
        is_held.set()
        # Two chunks for each of two processes, and not a line more.
        assert len(read) == 4 * 5

    lines = translate_lines([FakeWorker(hold_the_first), FakeWorker(hold_the_first)], numbered(98, read), 5)
    assert [line.text for line in lines] == [str(number) for number in range(98)]
    assert is_held.is_set()


def test_a_reader_that_stops_stops_the_rest() -> None:
    read: list[int] = []
    before = set(threading.enumerate())
    lines = translate_lines([FakeWorker(), FakeWorker()], numbered(1000, read), 5)
    assert next(lines).text == "0"
    time.sleep(0.3)  # enough to read on, if nothing prevented it
    assert len(read) <= 4 * 5
    lines.close()  # type: ignore[attr-defined]
    for thread in set(threading.enumerate()) - before:
        if not isinstance(thread, TMonitor):
            thread.join()
    assert len(read) <= 4 * 5


def test_translations_do_not_wait_for_lines_that_have_yet_to_come() -> None:
    is_written = threading.Event()

    def lines() -> Iterator[str]:
        yield from ("a", "b")
        assert is_written.wait(60)
        yield "c"

    found = translate_lines([FakeWorker(), FakeWorker()], lines(), 2)
    assert [next(found).text, next(found).text] == ["a", "b"]
    is_written.set()
    assert [one.text for one in found] == ["c"]


def test_an_error_of_the_input_comes_after_the_lines_before_it() -> None:
    def lines() -> Iterator[str]:
        yield from ("a", "b", "c")
        raise InputError("damaged")

    found = translate_lines([FakeWorker(), FakeWorker()], lines(), 2)
    assert [next(found).text, next(found).text] == ["a", "b"]
    with pytest.raises(InputError, match="damaged"):
        next(found)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 5})
    assert num_processors() == 3
    assert choose_devices(3) == ["cpu"] * 3
    for count in (-1, 0, 4):
        with pytest.raises(InputError, match=f"^--devices {count}: this process may use 3 processors; give 1 to 3$"):
            choose_devices(count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_devices(2) == ["cuda:0", "cuda:1"]
    with pytest.raises(InputError, match=r"^--devices 3: this process may use 2 GPUs; give 1 to 2$"):
        choose_devices(3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match=r"^--devices 2: this process may use 1 GPU; give 1 to 1$"):
        choose_devices(2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two chunks and a bit, with lines to warn about in each."""
    lines = [line.encode() for line in sentences(2 * CHUNK + 9, seed=3)]
    lines[0] = lines[CHUNK + 1] = lines[-1] = b"a \xff dog"
    lines[2] = lines[CHUNK] = b"the dog " * 700
    lines[3] = lines[-2] = b""
    path = tmp_path_factory.mktemp("parallel") / "text"
    path.write_bytes(b"\n".join(lines))
    return path


@pytest.mark.two_processors
def test_output_and_warnings_are_those_of_one_process(trained_run: Path, text: Path) -> None:
    words = ("translate", trained_run, "--source", text, "--beam", 2, "--n-best", 2, "--scores")
    words += ("--stop-rule", "first", "--length-penalty", 1.3)
    one, two = (pipeline(*words, "--devices", count) for count in (1, 2))
    assert one.returncode == two.returncode == 0, two.stderr
    assert one.stdout == two.stdout
    assert messages(one.stderr) == messages(two.stderr)
    assert messages(two.stderr) == [
        f"3 lines, 1, {CHUNK + 2}, {2 * CHUNK + 9}: not valid UTF-8; invalid bytes were replaced",
        f"2 lines, 3, {CHUNK + 1}: longer than the 1024 tokens that the network reads; cut",
        f"3 lines, 1, {CHUNK + 2}, {2 * CHUNK + 9}: characters that the model has never seen, and cannot read; the"
        " first is '\N{REPLACEMENT CHARACTER}'",
    ]


@pytest.mark.gpu
def test_two_processes_on_a_gpu(trained_run: Path) -> None:
    lines = sentences(CHUNK + 9, seed=5)
    one = [found.text for found in load_translator(trained_run, SearchOptions(2)).translate_lines(lines, CHUNK)]
    with ParallelTranslator(trained_run, ["cuda:0", "cuda:0"], SearchOptions(2)) as translator:
        assert [found.text for found in translator.translate_lines(lines, CHUNK)] == one


@pytest.mark.two_processors
def test_a_prefix_that_the_processes_do_not_know(trained_run: Path) -> None:
    done = pipeline("translate", trained_run, "--devices", 2, "--prefix", ">>de<<", text="a dog\n")
    assert (done.returncode, done.stdout) == (2, b"")
    [error] = messages(done.stderr)
    assert error.startswith("error: --prefix >>de<<: is no prefix of this model")


class Command:
    """`translate --devices 2` in a session of its own, by whose number all its processes are found."""

    def __init__(self, run: Path, folder: Path, *options: object, program: tuple[object, ...] = ("-m", "pipeline")):
        self.output, self.errors = folder / "output", folder / "errors"
        words = [sys.executable, *program, "translate", run, "--devices", 2, *options]
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                list(map(str, words)),
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        assert self.process.stdin is not None
        self.stdin = self.process.stdin

    def workers(self) -> list[int]:
        return [pid for pid, command in self._running() if "spawn_main" in command]

    def wait_for(self, moment: Callable[[], object]) -> None:
        while not moment():
            assert self.process.poll() is None, self.errors.read_text()
            time.sleep(0.02)

    def wait_for_output(self) -> None:
        self.wait_for(lambda: self.output.stat().st_size)

    def end(self) -> tuple[int, list[str]]:
        """Wait for all processes; return the exit code and the messages."""
        code = self.process.wait()
        while self._running():
            time.sleep(0.02)
        self.stdin.close()
        return code, messages(self.errors.read_bytes())

    def _running(self) -> list[tuple[int, str]]:
        listed = subprocess.run(["ps", "-wweo", "pid=,sid=,state=,args="], capture_output=True, text=True, check=True)
        rows = (line.split(maxsplit=3) for line in listed.stdout.splitlines())
        session = str(self.process.pid)
        return [(int(row[0]), row[3]) for row in rows if row[1] == session and row[2] != "Z"]


@pytest.fixture
def start(trained_run: Path, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    commands: list[Command] = []

    def start(*options: object, **more: Any) -> Command:
        commands.append(Command(trained_run, tmp_path, *options, **more))
        return commands[-1]

    yield start
    for command in commands:
        command.process.kill()
        command.end()


@pytest.fixture(scope="module")
def long_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Far more than is translated before a test ends the command."""
    path = tmp_path_factory.mktemp("parallel") / "long"
    path.write_text("".join(f"{line}\n" for line in sentences(5 * CHUNK, seed=4)) * 40)
    return path


@pytest.mark.two_processors
def test_a_killed_process_is_named(start: Callable[..., Command], long_text: Path) -> None:
    command = start("--source", long_text)
    command.wait_for_output()
    os.kill(command.workers()[1], signal.SIGKILL)
    code, errors = command.end()
    assert code == 1
    assert len(errors) == 1
    assert re.fullmatch(f"error: {NAME} was killed by SIGKILL; if memory ran out, give fewer --devices", errors[0])


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["loading", "waiting for input", "translating"])
@pytest.mark.two_processors
def test_ctrl_c(start: Callable[..., Command], long_text: Path, moment: str) -> None:
    command = start(*(("--source", long_text) if moment == "translating" else ("--beam", 1)))
    if moment == "loading":
        command.wait_for(lambda: len(command.workers()) == 2)
    elif moment == "translating":
        command.wait_for_output()
    else:
        # Two chunks and a third that is not complete.
        command.stdin.write(b"a dog and a cat\n" * (2 * CHUNK + 1))
        command.stdin.flush()
        command.wait_for_output()
    os.killpg(command.process.pid, signal.SIGINT)  # as a terminal does
    assert command.end() == (130, ["interrupted"])


@pytest.mark.two_processors
def test_no_process_outlives_a_killed_one(start: Callable[..., Command], long_text: Path) -> None:
    command = start("--source", long_text)
    command.wait_for_output()
    command.process.kill()
    assert command.end() == (-signal.SIGKILL, [])


@pytest.mark.two_processors
def test_a_closed_output_pipe(trained_run: Path, long_text: Path) -> None:
    words = f"'{sys.executable}' -m pipeline translate '{trained_run}' --devices 2 --beam 1 --source '{long_text}'"
    # The last `cat` ends when no process has standard error open any more.
    script = f"set -o pipefail; {{ {words} | head -n 1; echo $?; }} 2>&1 | cat"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stdout
    lines = messages(done.stdout.encode())
    assert len(lines) == 2
    assert lines[1] == "0"


PROGRAM = """
import sys
from pipeline.__main__ import main
from pipeline.inference.translator import Translator

def translate(self, lines, *arguments, **options):
    raise {error}

Translator.translate = translate
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "last"),
    [
        (
            "RuntimeError('DefaultCPUAllocator:\\n can\\'t allocate memory: you tried 9 bytes')",
            r"is out of memory \(.* 9 bytes\); give fewer --devices or a smaller --beam",
        ),
        ("RuntimeError('a bug')", "ended with exit code 1; what it wrote above says why"),
    ],
    ids=["memory", "bug"],
)
@pytest.mark.two_processors
def test_a_process_that_fails(start: Callable[..., Command], tmp_path: Path, error: str, last: str) -> None:
    """Processes also run the program that has registered extensions, here one that fails."""
    program = tmp_path / "my_pipeline.py"
    program.write_text(PROGRAM.format(error=error))
    command = start("--beam", 1, program=(program,))
    command.stdin.write(b"a dog\n")
    command.stdin.close()
    code, errors = command.end()
    assert code == 1
    assert re.match(f"error: {NAME} {last}", errors[-1])
    assert (len(errors) == 1) != ("RuntimeError: a bug" in errors)


@pytest.mark.two_processors
def test_one_process_answers_at_a_prompt(trained_run: Path) -> None:
    leader, follower = pty.openpty()
    words = [sys.executable, "-m", "pipeline", "translate", str(trained_run), "--devices", "2"]
    with subprocess.Popen(
        words, cwd=ROOT, stdin=follower, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        os.write(leader, b"the dog sees a cat\n")
        assert process.stdout.readline().strip()
        children = subprocess.run(["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, check=False)
        assert children.stdout == b""
        os.write(leader, b"\x04")
    assert process.returncode == 0
    os.close(leader)
    os.close(follower)
