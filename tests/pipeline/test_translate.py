"""`translate` writes one line for each input line, whatever it holds, and warns about what was lost."""

import gzip
import json
import os
import random
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

import pipeline as pipeline_api
from data_module.system.text_files import progress_bar
from model.beyond.sampling import Sampling
from pipeline.__main__ import main
from pipeline.inference.options import SearchOptions
from pipeline.inference.text_io import CHUNK, count_lines, read_sentences, sentences
from pipeline.inference.translator import Hypothesis, Translation, Translator
from tests.conftest import pipeline, program, refusal, run_here
from tests.pipeline.test_processes import lines_without_bars

PLAIN = b"the dog sees a cat"
BAD_LINES = {
    "empty": b"",
    "white space": b" \t ",
    "no-break space": "\xa0 \u202f".encode(),
    "wide space": "\u3000".encode(),
    "no width": "\u200b\u2060\ufeff".encode(),
    "no line of its own inside": "a dog\u2028a cat\x85a house\x0b\x0c\x1ca tree".encode(),
    "carriage return": b"a dog\r a cat\r",
    "control characters": b"a \x00 dog \x01\x02\x07\x1b[31m \x7f cat",
    "invalid UTF-8": b"a \xff\xfe dog \xc3",
    "lone surrogate": b"a \xed\xa0\x80 dog",
    "marks of spaces": "the▁dog sees ▁".encode(),
    "unknown characters": "犬 a dog 🐕 ☃".encode(),
    "long": b"the dog " * 700,
    "one long word": b"housetree" * 400,
}


@pytest.fixture(scope="module")
def answer(trained_run: Path) -> CompletedProcess:
    text = b"\n".join([PLAIN, *BAD_LINES.values(), PLAIN])  # without a last line feed
    return pipeline("translate", trained_run, "--beam", 1, text=text)


def test_a_line_for_every_line(answer: CompletedProcess) -> None:
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.decode().split("\n")
    assert len(lines) == len(BAD_LINES) + 2 + 1
    assert lines[-1] == ""
    assert lines[0] == lines[len(BAD_LINES) + 1] != ""
    assert lines[1:6] == [""] * 5
    assert len(answer.stdout.decode().splitlines()) == len(lines) - 1


def test_warnings_have_line_numbers(answer: CompletedProcess) -> None:
    """One line for each kind of defect, however many lines have it."""
    numbers = {name: 2 + place for place, name in enumerate(BAD_LINES)}
    invalid, longer, unknown = ([numbers[name] for name in names] for names in (
        ("invalid UTF-8", "lone surrogate"), ("long", "one long word"),
        ("control characters", "invalid UTF-8", "lone surrogate"),
    ))  # fmt: skip
    never = "characters or words that the model has never seen, and cannot read; the first is '\\x01\\x02\\x07\\x1b[31'"
    unseen = "pieces that no training sentence has on this side; write text as the training text is written"
    chosen, *warnings = lines_without_bars(answer.stderr)
    assert "best.ckpt" in chosen
    assert warnings == [
        f"2 lines, {invalid[0]}, {invalid[1]}: not valid UTF-8; invalid bytes were replaced",
        f"line {numbers['carriage return']}: carriage returns inside, read as spaces; if they end lines, convert the "
        r"file (tr '\r' '\n')",
        f"line {numbers['no width']}: U+FEFF inside, as from joined files; remove it (sed 's/\\xEF\\xBB\\xBF//g')",
        f"2 lines, {longer[0]}, {longer[1]}: longer than the 1024 tokens that the network reads; cut",
        f"4 lines, the first are {', '.join(map(str, unknown))}: {never}",
        f"2 lines, {numbers['control characters']}, {numbers['one long word']}: {unseen}; the first is 'm'",
        f"line {numbers['marks of spaces']}: U+2581 (▁), by which sentencepiece marks spaces, was read as a space",
    ]


def test_many_unreadable_lines_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a pipe, a progress bar that has not begun is not printed above the warning."""
    file = tmp_path / "text"
    file.write_bytes(b"fine\n" + b"\xff\n" * 1200)
    with progress_bar("translating") as bar:
        assert read_sentences(file) == ["fine"] + ["\N{REPLACEMENT CHARACTER}"] * 1200
        assert bar.n == 0
    expected = f"{file}: 1,200 lines, the first are 2, 3, 4: not valid UTF-8; invalid bytes were replaced\n"
    assert capsys.readouterr().err == expected


def test_n_best_with_scores(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(PLAIN + b"\n\na red house\n")

    def translate(*options: str) -> list[list[str]]:
        words = ["translate", trained_run, "--source", tmp_path / "text", "--beam", 3, "--scores"]
        return [line.split("\t") for line in run_here(*words, *options)[0].splitlines()]

    rows = translate("--n-best", "3")
    assert [row[0] for row in rows] == ["1"] * 3 + ["2"] + ["3"] * 3
    assert rows[3] == ["2", "0.0000", ""]
    for first in (0, 4):
        scores = [float(row[1]) for row in rows[first : first + 3]]
        assert scores == sorted(scores, reverse=True)
        assert len({row[2] for row in rows[first : first + 3]}) == 3
    best = translate()
    assert best == [rows[place][1:] for place in (0, 3, 4)]
    assert float(translate("--length-penalty", "0")[0][0]) < float(best[0][0])


def test_another_form_is_noted_from_the_corpus_to_the_bundle(
    trained_run: Path, tiny_corpus: Path, bundle: Path, tmp_path: Path
) -> None:
    lines, note = [" ".join("thedogseesacat")] * 3, "3 lines, 1, 2, 3: spaces where training text had none"
    (tmp_path / "text").write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "target").write_text("the dog sees a cat\n" * 3)
    form = json.loads((tiny_corpus / "manifest.json").read_text())["text_form"]
    assert json.loads((bundle / "card.json").read_text())["text_form"] == form
    for model in (trained_run, bundle):
        for name, count in (("text", 1), ("target", 0)):
            assert run_here("translate", model, "--source", tmp_path / name)[1].count(note) == count
    for command, option in (("evaluate", "--reference"), ("score", "--target")):
        said = run_here(command, trained_run, "--source", tmp_path / "text", option, tmp_path / "target")[1]
        assert said.count(f"{note}; write") == 1
    with pytest.warns(UserWarning, match="sentences") as caught:
        pipeline_api.load(trained_run).translate(lines)
    assert [str(one.message).startswith(note.replace("lines", "sentences")) for one in caught].count(True) == 1
    contents = torch.load(trained_run / "checkpoints" / "best.ckpt", weights_only=True)
    assert contents["translation"].pop("text_form") == form
    torch.save(contents, tmp_path / "old.ckpt")
    assert note not in run_here("translate", tmp_path / "old.ckpt", "--source", tmp_path / "text")[1]


class Asker(StringIO):
    """Standard output of a program that waits for the answer to a line before it writes the next line to a pipe."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.read_end, self._write_end = os.pipe()
        self._lines = iter(lines)
        self.answers: list[str] = []
        self.flush()

    def flush(self) -> None:
        if self.getvalue() or not hasattr(self, "asked"):
            self.asked = True
            self.answers.append(self.getvalue())
            self.seek(self.truncate(0))
            if (line := next(self._lines, None)) is None:
                os.close(self._write_end)
            else:
                os.write(self._write_end, f"{line}\n".encode())


@pytest.mark.timeout(300)  # It would wait for ever.
@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("options", [("--n-best", 2, "--scores"), ("--sample",), ("--target-prefixes",)], ids=str)
def test_a_program_gets_each_answer_before_it_writes_the_next_line(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[object, ...], is_named: bool
) -> None:
    lines = ["the dog sees a cat", "", "a red house"]
    (tmp_path / "text").write_text("".join(f"{line}\n" for line in lines))
    if options == ("--target-prefixes",):
        (tmp_path / "prefixes").write_text("a\n\nthe\n")
        options = (*options, tmp_path / "prefixes")
    expected, _ = run_here("translate", trained_run, *options, "--source", tmp_path / "text")
    asker = Asker(lines)
    words = ["translate", trained_run, "--interactive", *options]
    with os.fdopen(asker.read_end) as stdin, redirect_stdout(asker):
        monkeypatch.setattr(sys, "stdin", stdin)
        words += ["--source", f"/dev/fd/{asker.read_end}"] * is_named
        assert main(list(map(str, words))) == 0
    assert len(asker.answers) == 1 + len(lines)
    assert "".join(asker.answers) == expected


@pytest.mark.parametrize("options", [("--devices", 2), ("--source", __file__, "--output", "new")], ids=str)
def test_answers_to_each_line_are_for_one_process_and_standard_output(
    trained_run: Path, options: tuple[object, ...]
) -> None:
    line = refusal("translate", trained_run, "--interactive", *options)
    assert re.match("error: --(devices|output): is for whole texts; omit it, or --interactive", line)


def test_search_options_reach_the_search(trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--beam", "3", "--length-penalty", "1.2", "--stop-rule", "first"]
    text, asked = tmp_path / "text", []
    text.write_text("the dog sees a cat\n")
    printed, _ = run_here("evaluate", trained_run, "--source", text, "--reference", text, *options)
    figures = json.loads(printed.splitlines()[-1])
    assert [figures[name] for name in ("beam_size", "length_penalty", "stop_rule")] == [3, 1.2, "first"]
    monkeypatch.setattr(Translator, "translate", lambda self, lines, options, *_, **__: asked.append(options) or [])
    run_here("translate", trained_run, "--source", text, *options, "--n-best", 2)
    assert asked == [SearchOptions(3, 1.2, "first", 2)]


def test_samples_depend_on_the_seed_and_the_number_of_the_line_alone(
    trained_run: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the lines translated together, or on where a part of the text begins; by whatever process."""
    text = [*random.Random(1).choices(["the dog sees a cat", "a red house", *[""] * 6], k=CHUNK), "a cat"] * 2
    source, output = tmp_path / "text", tmp_path / "output"
    source.write_text("".join(f"{line}\n" for line in text))
    words = ("translate", trained_run, "--source", source, "--scores", "--sample")
    words += ("--temperature", 2, "--top-k", 20, "--top-p", 0.9, "--seed", 3)
    printed, _ = run_here(*words)
    for name, value in (("ID", "1"), ("COUNT", "2")):  # It begins with the second shard.
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    run_here(*words, "--output", output, "--shard-lines", CHUNK)
    assert printed == output.read_text()
    lines = [line.split("\t")[1] for line in printed.splitlines()]
    assert len(set(lines)) > 100
    model, settings = pipeline_api.load(trained_run), Sampling(temperature=2.0, top_k=20, top_p=0.9, seed=3)
    assert model.translate(text[:9], sample=settings) == lines[:9]
    assert [one.text for one in model.translate(text[:9], 1, sample=settings)[8]] == [lines[8]]
    assert model.translate(text[:9], sample=settings._replace(seed=4)) != lines[:9]
    rest = model._translator.translate_lines(text[-40:], 7, SearchOptions(sampling=settings), len(text) - 39)
    assert [one.text for one in rest] == lines[-40:]
    # TorchScript rounds otherwise, which rarely matters.
    others = pipeline_api.load(bundle).translate(text[:200], sample=settings)
    assert sum(one != other for one, other in zip(others, lines[:200], strict=True)) <= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sample", "--temperature", 0), "--temperature 0.0: must be more than 0"),
        (("--sample", "--temperature", "nan"), "--temperature nan: must be more than 0"),
        (("--sample", "--top-p", 0), "--top-p 0.0: must be more than 0, and 1 or less"),
        (("--sample", "--top-p", 1.5), "--top-p 1.5: must be more than 0, and 1 or less"),
        (("--sample", "--top-k", 0), "--top-k 0: must be 1 or more"),
        (("--sample", "--seed", 2**63), f"--seed {2**63}: must be 0 or more, and less than 2 ** 63"),
        (("--sample", "--beam", 1), "--beam: is for a search; omit it, or --sample, which draws one translation"),
        (("--sample", "--n-best", 1), "--n-best: is for a search; omit it, or --sample"),
        (("--sample", "--stop-rule", "first"), "--stop-rule: is for a search; omit it, or --sample"),
        (("--top-k", 3), "--top-k: is for sampling; add --sample, or omit it"),
    ],
    ids=str,
)
def test_wrong_settings_of_a_sample_are_refused(trained_run: Path, options: tuple[object, ...], message: str) -> None:
    assert refusal("translate", trained_run, *options).startswith(f"error: {message}")


class Echo(Translator):
    """Returns its input."""

    def __init__(self) -> None: ...

    def translate(self, lines: list[str], *options: object, **others: object) -> list[Translation]:
        return [Translation([Hypothesis(line, 0.0, 0.0, 1)]) for line in lines]


def test_memory_that_runs_out_is_said_in_one_line(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def translate(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator:\n can't allocate memory: you tried 9 bytes")

    monkeypatch.setattr(Translator, "_search", translate)
    _, said = run_here("translate", trained_run, "--source", __file__, "--output", tmp_path / "out", code=1)
    assert re.match(r"error: out of memory \(.* 9 bytes\); give a smaller --beam", said.splitlines()[-1])


def test_no_more_than_a_chunk_is_read_ahead() -> None:
    read = 0

    def lines() -> Iterator[bytes]:
        nonlocal read
        for read in range(1, 5 * CHUNK + 8):
            yield b"%d\n" % read

    written = 0
    for line in Echo().translate_lines(sentences(lines()), CHUNK):
        written += 1
        assert line.text == str(written)
        assert read - written < CHUNK
    assert written == 5 * CHUNK + 7


@pytest.mark.parametrize("text", [b"", b"a", b"a\n", b"\n\nb", b"a \xff\r\n" * 300_000 + b"b"], ids=len)
def test_lines_are_counted_as_they_are_read(text: bytes, tmp_path: Path) -> None:
    plain, packed = tmp_path / "text", tmp_path / "text.gz"
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text))
    assert count_lines(plain) == count_lines(packed) == len(list(sentences(BytesIO(text))))


def test_a_damaged_file_and_a_pipe_have_no_number_of_lines(tmp_path: Path) -> None:
    damaged, pipe = tmp_path / "text.gz", tmp_path / "pipe"
    damaged.write_bytes(gzip.compress(random.Random(1).randbytes(1 << 12))[:-20])
    os.mkfifo(pipe)
    assert count_lines(damaged) is None
    assert count_lines(pipe) is None  # Opening it would wait for a writer, and reading would take the text away.


PRODUCTS = """
import ctypes, sys
from pathlib import Path
import torch
from model.fast.packed_linear import PackedLinear
from pipeline.inference.loading import load_translator

class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c mapped d e used f g".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo
load_translator(Path(sys.argv[1]))
layer = PackedLinear(torch.ones(512, 512), None)
for first in (8, 48, 88):
    for rows in range(first, first + 40):
        layer(torch.ones(rows, 512))
    memory = libc.mallinfo2()
    print(memory.used + memory.mapped)
"""


def test_products_of_many_sizes_take_no_memory(trained_run: Path) -> None:
    """A search has products of thousands of sizes, and PyTorch and oneDNN would keep half a megabyte for each."""
    done = program(PRODUCTS, trained_run, CXX="no-such-compiler")  # The compiled search has no such products.
    assert done.returncode == 0, done.stderr.decode()
    first, second, third = map(int, done.stdout.split())
    assert max(second, third) - first < 2e6
