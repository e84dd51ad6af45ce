"""Text files as users have them: compressed, of other encodings, damaged, endless, or no files at all."""

import bz2
import gzip
import lzma
import os
import re
import sys
import threading
from collections.abc import Callable
from io import BytesIO, FileIO, StringIO
from pathlib import Path

import pytest

from data_module.corpus.pairs import fingerprint
from data_module.errors import InputError
from data_module.system import text_files
from data_module.system.text_files import LONGEST_LINE, open_file, progress_bar, text_reader
from pipeline.inference.text_io import count_lines, read_sentences, sentences

LINES = "the tea\nsome milk\n" * 30
ZSTANDARD = bytes.fromhex("28b52ffd04000900006f6e65")
UTF_16 = "is UTF-16 by its NUL bytes; convert it (iconv -f UTF-16{} -t UTF-8)"
NO_TEXT = {
    "gzip": (gzip.compress(b"a\n"), "is gzip-compressed; let its name end in .gz, or unpack it (gunzip)"),
    "bzip2": (bz2.compress(b"a\n"), "is compressed; unpack it (bunzip2)"),
    "xz": (lzma.compress(b"a\n"), "is compressed; unpack it (unxz)"),
    "Zstandard": (ZSTANDARD, "is compressed; unpack it (unzstd)"),
    "zip": (b"PK\3\4\n", "is an archive; unpack it (unzip)"),
    "UTF-16 with a mark": ("a\n".encode("utf-16"), "is UTF-16; convert it (iconv -f UTF-16 -t UTF-8)"),
    "one word": ("a\n".encode("utf-16-le"), UTF_16.format("LE")),
    "Latin": (LINES.encode("utf-16-le"), UTF_16.format("LE")),
    "from a Mac": (LINES.encode("utf-16-be"), UTF_16.format("BE")),
    # Most of these letters are two bytes that are both ASCII.
    "Russian": ("молоко река\n".encode("utf-16-le") * 20, UTF_16.format("LE")),
    "Chinese": ("茶在河上\n".encode("utf-16-le") * 20, UTF_16.format("LE")),
    "UTF-32": (LINES.encode("utf-32-le"), UTF_16.format("LE")),
}


@pytest.mark.parametrize(("data", "message"), NO_TEXT.values(), ids=NO_TEXT)
def test_what_is_no_text_is_refused_in_files_and_on_standard_input(tmp_path: Path, data: bytes, message: str) -> None:
    file, packed = tmp_path / "text", tmp_path / "text.gz"
    file.write_bytes(data)
    packed.write_bytes(gzip.compress(data))  # twice compressed, for instance
    for path in (file, packed):
        with pytest.raises(InputError, match=f"^{re.escape(f'{path}: {message}')}$"):
            open_file(path)
    with FileIO(file) as stream, pytest.raises(InputError, match=f"^{re.escape(f'standard input: {message}')}$"):
        list(sentences(text_reader(stream, "standard input", stream)))


@pytest.mark.parametrize(
    "data",
    [
        b"mi\0lk river .\nmilk river .\n",
        b"find\0print\0zero\0" * 20,  # NUL bytes at odd and at even places
        b"name\0\0\0\0\0\0\n" * 20,
        LINES.encode("utf-8-sig"),
        b"",
        b"\n",
        b"\0",
        b"BZ is a code\n",
    ],
    ids=repr,
)
def test_text_with_nul_bytes_stays_text(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "text").write_bytes(data)
    with open_file(tmp_path / "text") as file:
        assert file.read() == data


@pytest.mark.parametrize("name", ["text", "text.gz"])
def test_a_line_has_a_largest_length(tmp_path: Path, name: str) -> None:
    """Which a whole file has not."""
    path, pack = tmp_path / name, gzip.compress if name.endswith(".gz") else bytes
    longest = b"a" * LONGEST_LINE
    path.write_bytes(pack(b"one\n" + longest + b"\ntwo\n" + longest))
    assert count_lines(path) == 4
    for beginning, end in ((b"one\n", b""), (b"one\n", b"\ntwo\n")):
        path.write_bytes(pack(beginning + longest + b"a" + end))
        with open_file(path) as file:
            assert file.readline() == b"one\n"
            with pytest.raises(InputError, match=rf"/{name}:2: the line has more than 16 MB; give text with one"):
                file.readline()
        assert count_lines(path) is None


def test_pipes_and_devices_are_refused_without_waiting(tmp_path: Path) -> None:
    """A pipe that the path names as open already, as `<(command)` of a shell does, is read: here with a blank line."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null")):
        for read in (open_file, read_sentences, lambda path: fingerprint("text", path)):
            with pytest.raises(
                InputError, match=f"^{path}: a pipe or a device, not a file; write what it holds to a file"
            ):
                read(path)
    reading, writing = os.pipe()
    try:
        os.write(writing, "one\n\u200b\xa0\ntwo".encode())
        os.close(writing)
        assert read_sentences(Path(f"/dev/fd/{reading}")) == ["one", "", "two"]
    finally:
        os.close(reading)


def test_a_line_that_is_typed_is_read_at_once(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with FileIO(reading) as stream, FileIO(writing, "w") as typed:
        lines = sentences(text_reader(stream, "standard input", stream))
        for text in ("a", "b c", ""):
            typed.write(text.encode() + b"\n")
            assert next(lines) == text


def test_the_first_bytes_may_come_one_by_one(tmp_path: Path) -> None:
    class Slow(FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(1)

    (tmp_path / "text").write_bytes(ZSTANDARD)
    with Slow(tmp_path / "text") as stream, pytest.raises(InputError, match="unzstd"):
        list(text_reader(stream, "standard input", stream))


def test_compressed_files_may_be_joined(tmp_path: Path) -> None:
    path = tmp_path / "text.gz"
    parts = [gzip.compress(part) for part in (b"one\ntwo", b"", b"-halves\n", b"three\n" * 70_000)]
    path.write_bytes(b"".join(parts))
    assert read_sentences(path) == ["one", "two-halves", *["three"] * 70_000]
    path.write_bytes(b"".join(parts)[:-30])
    with pytest.raises(InputError, match=r"text\.gz: the gzip file is truncated or damaged; copy or download it again"):
        read_sentences(path)
    path.write_bytes(b"".join(parts) + b"rubbish")
    with pytest.raises(InputError, match=r"text\.gz: not a gzip file, or a damaged one; copy it again or rename it"):
        read_sentences(path)


def test_stray_marks_are_noted_and_stay(capsys: pytest.CaptureFixture[str]) -> None:
    marked = BytesIO(b"\xef\xbb\xbfa\r\nb\rc\r\n\xef\xbb\xbfd\n" + b"e\rf\n" * 4 + b"\r\n")
    assert list(sentences(marked, "file")) == ["a", "b\rc", "\ufeffd", *["e\rf"] * 4, ""]
    inside, joined = capsys.readouterr().err.splitlines()
    assert inside.startswith("file: 5 lines, the first are 2, 4, 5: carriage returns inside, read as spaces; if they")
    assert joined.startswith("file: line 3: U+FEFF inside, as from joined files; remove it (sed ")


class Written(StringIO):
    """Calls `wrote` with all that is written, after each write."""

    def __init__(self, wrote: Callable[[str], object]) -> None:
        super().__init__()
        self._wrote = wrote

    def write(self, text: str, /) -> int:
        written = super().write(text)
        self._wrote(self.getvalue())
        return written


def test_a_bar_moves_while_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its end is drawn, with what has been counted. No thread is left, and a short one is not shown."""
    moved, threads = threading.Event(), threading.enumerate()
    stream = Written(lambda text: text.count("\r") > 2 and moved.set())
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(text_files, "LOG_SECONDS", 0.01)
    monkeypatch.setattr(text_files, "SHOWN_AFTER_SECONDS", 10_000)
    with progress_bar("short", 5) as bar:
        bar.update(5)
    assert stream.getvalue() == ""
    monkeypatch.setattr(text_files, "SHOWN_AFTER_SECONDS", 0.01)
    with progress_bar("hidden", show=False):
        pass
    with progress_bar("working", 5) as bar:
        assert moved.wait(60)
        bar.update(5)
    first, *_, last = stream.getvalue().split("\r")[1:]
    assert "working:   0%" in first
    assert "working: 100%" in last
    assert "5/5" in last
    assert all(thread in threads or thread.name == "tqdm_monitor" for thread in threading.enumerate())


def test_a_full_disk_for_messages_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Event()

    def full(_: str) -> None:
        tried.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Written(full))
    monkeypatch.setattr(text_files, "SHOWN_AFTER_SECONDS", 0.01)
    with progress_bar("working", 5):
        assert tried.wait(60)
