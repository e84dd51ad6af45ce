"""Recipes on the command line, with and without `--config`."""

import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from tqdm import tqdm

from data_module.errors import InputError
from pipeline import load
from pipeline.__main__ import main, parse
from pipeline.doctor.doctor import print_results
from pipeline.doctor.recipe_checks import CheckResult
from pipeline.inference import text_scoring
from pipeline.inference.loading import chosen_file
from pipeline.runtime.console import report, say, user_message
from tests.test_structure import FILES

ONE, TWO, THREE = map(Path, ("one.yaml", "two.yml", "three.yaml"))


@pytest.mark.parametrize(
    ("words", "recipes", "overrides"),
    [
        ("fit one.yaml", [ONE], ""),
        ("prepare one.yaml", [ONE], ""),
        ("doctor one.yaml", [ONE], ""),
        ("fit one.yaml two.yml three.yaml", [ONE, TWO, THREE], ""),
        ("fit one.yaml --config two.yml three.yaml", [ONE, TWO, THREE], ""),
        ("fit --config one.yaml two.yml --fresh three.yaml", [ONE, TWO, THREE], ""),
        ("fit --fresh one.yaml --run.patience 3 two.yml", [ONE, TWO], "--run.patience 3"),
        ("fit --run.patience=3 one.yaml", [ONE], "--run.patience=3"),
        ("fit --config=one.yaml two.yml", [ONE, TWO], ""),
        # The values of options are no recipes.
        ("fit one.yaml --corpus.train.path two.yml", [ONE], "--corpus.train.path two.yml"),
        ("fit one.yaml --init-from two.yml", [ONE], ""),
        ("fit one.yaml two.txt", [ONE], "two.txt"),
    ],
)
def test_config_may_be_left_out(words: str, recipes: list[Path], overrides: str) -> None:
    command, *rest = words.split()
    _, arguments = parse(command, rest)
    assert arguments.config == recipes
    assert arguments.overrides == overrides.split()


def test_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse("fit", ["--config=~/one.yaml"])[1].config == [tmp_path / "one.yaml"]
    assert parse("evaluate", ["~/run", "--output=~/out"])[1].output == tmp_path / "out"
    with pytest.raises(InputError, match=f"^{tmp_path}/run: "):
        load("~/run")
    # The type of all other options, too.
    assert not [path for path in FILES if "type=Path" in path.read_text(encoding="utf-8")]


def test_a_command_without_recipes_takes_yaml_files_as_they_are() -> None:
    assert parse("translate", ["run", "--source", "one.yaml"])[1].source == ONE


def test_a_command_that_left_names_what_serves_instead(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "train", "one.yaml"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: benchmark: ")
    assert said.endswith("use python -m tests.benchmark in a clone of the project\n")
    assert said.count("\n") == 1
    assert main(["--help"]) == 0
    assert "benchmark" not in capsys.readouterr().out


def test_control_characters_are_printed_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of names and quoted values, which others may have written."""
    report(OSError("\x1b[2J: no such file"))
    say("a \x1b[31mred\x1b[0m name\x07, of two\nlines")
    print_results([CheckResult(True, "text \x9b2J", where="node\x1b")])
    assert main(["average", "\x1b[2J", "--last", "1"]) == 2
    output, log = capsys.readouterr()
    assert output == "ok    text \\x9b2J [node\\x1b]\n"
    reported, first, last = log.splitlines()
    assert reported == "\\x1b[2J: no such file"
    assert first == "a \\x1b[31mred\\x1b[0m name\\x07, of two\\nlines"
    assert last.startswith("error: \\x1b[2J: ")


def test_names_of_files_are_printed_escaped(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever made a run folder has named them."""
    shutil.copy(trained_run / "checkpoints" / "best.ckpt", tmp_path / "average\x1b[2J.ckpt")
    chosen_file(tmp_path)
    monkeypatch.setattr(logging.root, "handlers", [])
    assert main(["recipe", "list"]) == 0
    logging.getLogger("data_module.corpus").warning("%s: is new", "a\x1b[2J\nb")
    assert capsys.readouterr().err == f"using {tmp_path}/average\\x1b[2J.ckpt\na\\x1b[2J\\nb: is new\n"


def test_a_full_disk_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(OSError, match="No space left") as full:
            print("text", flush=True)
        monkeypatch.undo()
        line = str(user_message(full.value))
        with suppress(OSError):
            stream.close()
    assert line.startswith("standard output or error, or a file in ")
    assert line.endswith(": No space left on device; make room, then run the same command again")


@contextmanager
def nobody_reads(monkeypatch: pytest.MonkeyPatch, *names: str, buffering: int = -1) -> Iterator[None]:
    """Inside, these standard streams are pipes whose readers have ended."""
    with ExitStack() as stack:
        for name in names:
            reading, writing = os.pipe()
            os.close(reading)
            monkeypatch.setattr(sys, name, stack.enter_context(os.fdopen(writing, "w", buffering, encoding="utf-8")))
        yield


def as_typed(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["pipeline", *map(str, words)])
    return main()


@pytest.mark.parametrize("streams", [("stdout", "stderr"), ("stdout",), ("stderr",)])
def test_a_command_finishes_its_work_though_nobody_reads_its_output(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: tuple[str, ...]
) -> None:
    output = tmp_path / "average.ckpt"
    with nobody_reads(monkeypatch, *streams):
        assert as_typed(monkeypatch, "average", trained_run, "--last", 2, "--output", output) == 0
        assert output.is_file()
        assert as_typed(monkeypatch, "average", trained_run, "--last", 99) == 2
        assert as_typed(monkeypatch, "doctor", tmp_path / "none.yaml") == 1
        for _ in range(2):
            logging.getLogger("data_module").info("a message")
            tqdm([1], file=sys.stderr).update()
            print("more", file=sys.stderr, flush=True)
        sys.stdout.flush()  # as Python does at the end


def test_a_command_finishes_its_work_though_its_messages_find_no_room(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        assert as_typed(monkeypatch, "average", trained_run, "--last", 2, "--output", tmp_path / "average.ckpt") == 0
        print("more", file=sys.stderr, flush=True)  # as Python flushes at the end


@pytest.mark.parametrize("buffering", [1, -1])
def test_a_filter_ends_when_nobody_reads_its_output(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffering: int
) -> None:
    text, aligned, scored = tmp_path / "text", tmp_path / "aligned", []
    text.write_text("the dog\n" * 3)
    numbers = text_scoring._numbers
    monkeypatch.setattr(text_scoring, "_numbers", lambda pair: scored.append(pair) or numbers(pair))
    score = ["score", trained_run, "--source", text, "--target", text]
    for words in (["translate", trained_run, "--source", text], score, [*score, "--alignments", aligned]):
        with nobody_reads(monkeypatch, "stdout", buffering=buffering):
            assert as_typed(monkeypatch, *words) == 0
    # Files are written whole. Without one, score ends at the first line that cannot be printed.
    assert len(scored) == (1 if buffering == 1 else 3) + 3
    assert len(aligned.read_text().splitlines()) == 3
