"""`translate --output`: processes share the shards of a text, and the output is that of one process or not there."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest

from data_module.errors import InputError
from data_module.system import files
from pipeline.__main__ import parse
from pipeline.inference import shards as module
from pipeline.inference import text_translation
from pipeline.inference.shards import MANIFEST, Shards, Task
from tests.conftest import refusal

SIZE, NUM_LINES = 4, 23


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Shards]:
    """Starts another process's part of the same translation; its shards have four lines."""
    monkeypatch.setattr(module, "CHUNK", SIZE)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.01)
    (tmp_path / "model").write_text("weights")
    (tmp_path / "text").write_text("".join(f"line {number}\n" for number in range(1, NUM_LINES + 1)))

    def start(number: int = 0, num_processes: int = 1, **options: object) -> Shards:
        compared = {"n_best": None, **options}
        task = Task(tmp_path / "text", tmp_path / "output", SIZE, compared, num_processes)
        return Shards(task, tmp_path / "model", number)

    return start


Runs = Iterable[tuple[int, Iterator[str]]]


def translate(shards: Shards, runs: Runs, log: list[int]) -> Iterator[None]:
    """Translate into capitals, twice with `n_best`; each step is a line."""
    for first, lines in runs:
        for number, line in enumerate(lines, first):
            log.append(number)
            shards.write(number, f"{number}\t{line.upper()}\n" * (shards._task.options["n_best"] or 1))
            yield


def finish(shards: Shards) -> list[int]:
    """Translate what is missing; return the numbers of the lines that were translated."""
    log: list[int] = []
    for _ in translate(shards, shards.runs(), log):
        assert len(shards._locks) <= 1
    assert not shards._locks
    return log


def check(folder: Path) -> None:
    """The output is whole, and nothing is left beside it but the manifest."""
    expected = "".join(f"{number}\tLINE {number}\n" for number in range(1, NUM_LINES + 1))
    assert (folder / "output").read_text() == expected
    assert [entry.name for entry in (folder / "output.shards").iterdir()] == [MANIFEST]


def test_processes_share_the_shards(
    start: Callable[..., Shards], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks of an array, and their processes, begin in different places; each line is translated once, and all see the
    output at the end."""
    firsts, parts, log = [], [], []
    for task, number in ((0, 0), (0, 1), (1, 0)):
        for name, value in (("ID", 5 + task), ("MIN", 5), ("COUNT", 2)):
            monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
        shards = start(number, 2)
        runs = iter(shards.runs())
        run = next(runs)
        firsts.append(run[0])
        parts.append(translate(shards, chain([run], runs), log))
        next(parts[-1])  # It has its first shard before another process begins.
    assert firsts == [1, SIZE + 1, 3 * SIZE + 1]
    with ThreadPoolExecutor() as pool:
        list(pool.map(list, parts))
    assert sorted(log) == list(range(1, NUM_LINES + 1))
    check(tmp_path)


def test_a_process_that_dies(start: Callable[..., Shards], tmp_path: Path) -> None:
    """Its unfinished shard is translated again, those that it has written are not; nor is a finished text."""
    shards = start()
    log: list[int] = []
    part = translate(shards, shards.runs(), log)
    for _ in range(2 * SIZE + 2):
        next(part)
    for lock in shards._locks.values():
        lock.close()  # as the operating system does
    (tmp_path / "output.shards" / ".0000002.123.tmp").touch()
    assert finish(start()) == list(range(2 * SIZE + 1, NUM_LINES + 1))
    check(tmp_path)
    assert finish(start()) == []
    (tmp_path / "output").unlink()
    assert len(finish(start())) == NUM_LINES


def test_a_task_without_a_shard_reports_those_of_others(
    start: Callable[..., Shards], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_REPORT_SECONDS", 0.0)
    busy = start()
    part = translate(busy, busy.runs(), [])
    next(part)
    naps: list[str] = []

    def sleep(_: float) -> None:
        naps.append(capsys.readouterr().err)
        if len(naps) == 2:
            list(part)

    monkeypatch.setattr(module.time, "sleep", sleep)
    assert len(finish(start())) == NUM_LINES - SIZE
    assert f"output: {NUM_LINES - SIZE} of {NUM_LINES} lines (83%), " in naps[1]


def test_warnings_name_lines_of_the_text(
    start: Callable[..., Shards], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a task begins in the middle of it."""
    (tmp_path / "text").write_bytes(b"line\n" * (NUM_LINES - 1) + b"\xff\n")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "2")
    finish(start())
    assert f"text: line {NUM_LINES}: not valid UTF-8;" in capsys.readouterr().err


def test_killed_while_it_joins(start: Callable[..., Shards], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At either side of the rename that makes the output appear."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", failing_for(f".output.{os.getpid()}.tmp", Path.replace))
        with pytest.raises(KeyboardInterrupt):
            finish(start())
    assert not (tmp_path / "output").exists()
    with monkeypatch.context() as patch:
        patch.setattr(files, "sync_to_disk", failing_for(tmp_path.name, files.sync_to_disk))
        with pytest.raises(KeyboardInterrupt):
            assert finish(start()) == []
    assert finish(start()) == []
    check(tmp_path)


def failing_for(name: str, function: Callable[..., object]) -> Callable[..., object]:
    def fail(path: Path, *arguments: object) -> object:
        if path.name == name:
            raise KeyboardInterrupt
        return function(path, *arguments)

    return fail


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "text").write_text("other\n" * NUM_LINES), "was begun with another text (see "),
        (lambda folder: (folder / "model").write_text("other"), "was begun with another model (see "),
        (lambda folder: (folder / "output.shards" / MANIFEST).write_text("{"), "manifest.json: is damaged; remove "),
    ],
    ids=["text", "model", "manifest"],
)
def test_what_was_begun_otherwise(
    start: Callable[..., Shards], tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    part = start()
    assert start(n_best=None) is not part
    with pytest.raises(InputError, match="was begun with another n_best, beam "):
        start(n_best=2, beam=3)
    change(tmp_path)
    with pytest.raises(InputError) as error:
        start()
    assert message in str(error.value)


@pytest.mark.parametrize("n_best", [None, 2])
def test_files_that_do_not_add_up(start: Callable[..., Shards], tmp_path: Path, n_best: int | None) -> None:
    """Nothing is joined. With several translations of a line, lines are counted by their numbers."""
    shards = start(n_best=n_best)
    part = translate(shards, shards.runs(), [])
    for _ in range(NUM_LINES):
        next(part)
    *_, path, _ = sorted((tmp_path / "output.shards").glob("*[0-9]"))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[: -(n_best or 1)]))
    with pytest.raises(InputError, match=f"^{path}: has 3 lines for 4; remove it, and run the same command again"):
        finish(start(n_best=n_best))
    assert not (tmp_path / "output").exists()
    path.unlink()
    assert len(finish(start(n_best=n_best))) == SIZE
    assert finish(start(n_best=n_best)) == []
    # The manifest is still there when another program has written to the output.
    (tmp_path / "output").write_text("1\tline\n" * NUM_LINES if n_best else "line\n")
    with pytest.raises(InputError, match=f"output: has 1 lines for {NUM_LINES}; remove it, or give another --output"):
        start(n_best=n_best)


def test_a_text_that_becomes_shorter(start: Callable[..., Shards], tmp_path: Path) -> None:
    shards = start()
    (tmp_path / "text").write_text("line\n" * 6)
    with pytest.raises(InputError, match=r"text: has become shorter; restore the text, or give"):
        finish(shards)
    assert not (tmp_path / "output").exists()


def test_mistakes(trained_run: Path, tmp_path: Path) -> None:
    text, damaged, output = tmp_path / "text", tmp_path / "text.gz", tmp_path / "output"
    text.write_text("a dog\n")
    damaged.write_bytes(b"no gzip")
    command = ("translate", trained_run, "--output", output)
    assert "--output: needs --source" in refusal(*command)
    assert "--shard-lines: is for --output; add that" in refusal(*command[:2], "--source", text, "--shard-lines", 5)
    read = "is read by this command, and"
    same = (*command[:2], "--source", text, "--output", text)
    assert f"{text}: {read} would be overwritten; give another --output" in refusal(*same)
    prefixes = tmp_path / "output.shards" / "0000000"
    prefixes.parent.mkdir()
    prefixes.write_text("a\n")
    for words in (["--source", text, "--target-prefixes", prefixes], ["--source", prefixes]):
        assert f"{prefixes}: {read} {prefixes.parent} would be replaced; give another --output" in refusal(
            *command, *words
        )
    shutil.rmtree(prefixes.parent)
    assert "--shard-lines 5: must be a multiple of 2048" in refusal(*command, "--source", text, "--shard-lines", 5)
    assert "text.gz: not a gzip file, or a damaged one" in refusal(*command, "--source", damaged)
    output.touch()
    assert "output: exists already; remove it, or give another --output" in refusal(*command, "--source", text)
    assert not (tmp_path / "output.shards").exists()


def test_an_output_that_is_a_link_stays_one(start: Callable[..., Shards], tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "output").symlink_to("disk/text")
    assert len(finish(start())) == NUM_LINES
    assert finish(start()) == []
    assert (tmp_path / "output").readlink() == Path("disk/text")
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["text"]
    check(tmp_path)


def test_all_options_that_translations_depend_on_are_compared() -> None:
    """A new option belongs to one of the two."""
    _, arguments = parse("translate", ["model"])
    compared = {"prefix", "target_prefix", "beam", "length_penalty", "stop_rule", "n_best", "scores"}
    compared |= {"sample", "temperature", "top_k", "top_p", "seed"}
    assert vars(arguments).keys() - text_translation._NOT_IN_TRANSLATIONS == compared
