"""`translate --devices N`: the output of one process, and no process is left, whatever happens."""

import multiprocessing
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from data_module.errors import InputError
from data_module.system.worker_processes import num_processors
from pipeline.inference.processes import choose_devices, run_on_devices
from pipeline.inference.text_io import CHUNK
from tests.conftest import ROOT, pipeline, sentences

NAME = r"translation process 2 of 2 \(cpu\)"
WAY_OUT = "see what it wrote above, and give fewer --devices if memory ran out"


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 5})
    assert num_processors() == 3
    assert choose_devices(3) == ["cpu"] * 3
    for count in (-1, 0, 4):
        with pytest.raises(InputError, match=f"^--devices {count}: this process may use 3 processors; give 1 to 3$"):
            choose_devices(count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for count, gpus in ((2, "2 GPUs"), (1, "1 GPU")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert choose_devices(count) == [f"cuda:{index}" for index in range(count)]
        message = f"^--devices {count + 1}: this process may use {gpus}; give 1 to {count}$"
        with pytest.raises(InputError, match=message):
            choose_devices(count + 1)


def work_or_fail(failure: str, device: str, number: int) -> None:
    """Fail in the second process; the first one would never end."""
    if number == 0:
        time.sleep(600)
    match failure:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory":
            raise RuntimeError("DefaultCPUAllocator:\n can't allocate memory: you tried 9 bytes")
        case "full disk":
            raise OSError(28, "No space left on device", "output")
    raise RuntimeError("a bug")


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        ("killed", ChildProcessError, f"{NAME} ended with SIGKILL; {WAY_OUT}"),
        ("memory", MemoryError, "DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
        ("full disk", InputError, "output: No space left on device; make room, then run the same command again"),
        ("bug", ChildProcessError, f"{NAME} ended with exit code 1; {WAY_OUT}"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_process_that_fails_ends_the_others(
    failure: str, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By forks, which need not import PyTorch anew."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: fork)
    with pytest.raises(kind) as caught:
        run_on_devices(partial(work_or_fail, failure), ["cpu", "cpu"])
    assert re.fullmatch(message, str(caught.value))
    assert multiprocessing.active_children() == []


def lines_without_bars(stderr: bytes) -> list[str]:
    """The lines that a command says, without those that appear where the machine is slow: of bars and of progress."""
    said = re.sub(r"translating: [^]]*]", "", stderr.decode())  # without a line feed if a signal has ended the command
    return [line for line in said.splitlines() if line and " lines/s, time left " not in line]


@pytest.mark.two_processors
def test_output_and_warnings_are_those_of_one_process(trained_run: Path, tmp_path: Path) -> None:
    """Of a text from standard input, of which each process translates a part, and of a file with `--output`."""
    lines = [line.encode() for line in sentences(CHUNK + 9, seed=3, lengths=(1, 2, 3))]
    lines[0], lines[2], lines[3], lines[-1] = b"a \xff dog", b"the dog " * 700, b"", b"a dog"
    text = b"\n".join(lines)
    words = ("translate", trained_run, "--beam", 2, "--n-best", 2, "--scores", "--stop-rule", "first")
    one = pipeline(*words, text=text)
    (tmp_path / "private").mkdir()
    two = pipeline(*words, "--devices", 2, environment={"TMPDIR": str(tmp_path / "private")}, text=text)
    assert one.returncode == two.returncode == 0, two.stderr
    assert one.stdout == two.stdout
    said = lines_without_bars(two.stderr)
    assert re.search(r"/private/translation-\w+: takes about 0.\d MB until all translations are done", said[1])
    assert [said[0], *said[2:]] == lines_without_bars(one.stderr)
    assert len(said) == 5
    assert not list((tmp_path / "private").iterdir())
    source, output = tmp_path / "text", tmp_path / "output"
    source.write_bytes(text)
    shared = pipeline(*words, "--devices", 2, "--source", source, "--output", output, "--shard-lines", CHUNK)
    assert (shared.returncode, shared.stdout) == (0, b""), shared.stderr
    assert output.read_bytes() == one.stdout
    expected = [f"{source}: {said[2]}", *said[3:], f"{output}: has the translations of all {len(lines):,} lines"]
    assert sorted(lines_without_bars(shared.stderr)[1:]) == sorted(expected)


@pytest.mark.gpu
def test_two_processes_on_two_gpus(trained_run: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    text = "".join(f"{line}\n" for line in sentences(CHUNK + 9, seed=5))
    one, two = (pipeline("translate", trained_run, "--devices", count, text=text) for count in (1, 2))
    assert two.stdout == one.stdout


class Command:
    """`translate --devices 2` in a session of its own, by whose number all its processes are found."""

    def __init__(self, run: Path, folder: Path, *options: object) -> None:
        self.output, self.errors, self.temporary = folder / "output", folder / "errors", folder / "temporary"
        self.temporary.mkdir()
        words = [sys.executable, "-m", "pipeline", "translate", run, "--devices", 2, *options]
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                list(map(str, words)),
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        assert self.process.stdin is not None
        self.stdin = self.process.stdin

    def wait_for(self, moment: Callable[[], object]) -> None:
        while not moment():
            assert self.process.poll() is None, self.errors.read_text()
            time.sleep(0.02)

    def end(self) -> tuple[int, list[str]]:
        """Wait for all processes; return the exit code and the messages but those that name files."""
        code = self.process.wait()
        while self.running():
            time.sleep(0.02)
        self.stdin.close()
        ours = ("using", str(self.temporary))
        return code, [line for line in lines_without_bars(self.errors.read_bytes()) if not line.startswith(ours)]

    def running(self, what: str = "") -> list[str]:
        listed = subprocess.run(["ps", "-wweo", "sid=,state=,args="], capture_output=True, text=True, check=True)
        rows = (line.split(maxsplit=2) for line in listed.stdout.splitlines())
        return [row[2] for row in rows if row[0] == str(self.process.pid) and row[1] != "Z" and what in row[2]]


@pytest.fixture
def start(trained_run: Path, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    commands: list[Command] = []

    def start(*options: object) -> Command:
        commands.append(Command(trained_run, tmp_path, *options))
        return commands[-1]

    yield start
    for command in commands:
        command.process.kill()
        command.end()


@pytest.fixture(scope="module")
def long_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Far more than is translated before a test ends the command."""
    path = tmp_path_factory.mktemp("processes") / "long"
    path.write_text("".join(f"{line}\n" for line in sentences(5 * CHUNK, seed=4)) * 40)
    return path


def is_translating(command: Command) -> bool:
    return any(command.temporary.glob("translation-*/output.shards/0*.lock"))


@pytest.mark.parametrize(
    ("moment", "signum"),
    [
        *(pytest.param("starting", signum, marks=pytest.mark.slow) for signum in (signal.SIGINT, signal.SIGKILL)),
        *(("translating", signum) for signum in (signal.SIGTERM, signal.SIGKILL)),
    ],
)
@pytest.mark.two_processors
def test_no_process_outlives_the_first(
    start: Callable[..., Command], long_text: Path, moment: str, signum: signal.Signals
) -> None:
    """Ctrl-C and SIGTERM end all in one line, and leave no file."""
    command = start("--source", long_text)
    if moment == "starting":
        command.wait_for(lambda: len(command.running("spawn_main")) == 2)
    else:
        command.wait_for(lambda: is_translating(command))
    if signum == signal.SIGINT:
        os.killpg(command.process.pid, signum)  # as a terminal does
    else:
        command.process.send_signal(signum)
    killed = signum == signal.SIGKILL
    code, said = command.end()
    assert code == (-signum if killed else 130)
    assert command.output.read_bytes() == b""
    if not killed:
        assert said == ["interrupted"]
        assert not list(command.temporary.glob("translation-*"))
    elif moment == "translating":  # Killed before that, it may leave processes that say that they have got no work.
        assert said == []


PROGRAM = """
import sys
from pipeline.__main__ import main
from pipeline.inference.translator import Translator

def translate(self, lines, *arguments, **options):
    raise ValueError("registered")

Translator.translate = translate
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.mark.two_processors
def test_processes_run_the_program_that_has_registered_extensions(trained_run: Path, tmp_path: Path) -> None:
    program = tmp_path / "my_pipeline.py"
    program.write_text(PROGRAM)
    words = [sys.executable, program, "translate", trained_run, "--beam", 1, "--devices", 2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(list(map(str, words)), input=b"a dog\n", env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    *said, last = done.stderr.decode().splitlines()
    assert "ValueError: registered" in said
    assert re.fullmatch(rf"error: translation process \d of 2 \(cpu\) ended with exit code 1; {WAY_OUT}", last)


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
