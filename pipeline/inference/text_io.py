"""Line-by-line text input for the commands, and the progress bar that they share."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice, repeat, zip_longest
from pathlib import Path
from typing import NamedTuple

from data_module.errors import InputError
from data_module.system.text_files import BYTE_ORDER_MARK, LineWarning, StrayMarks, num_lines, open_file
from data_module.tokenization.text_form import ENOUGH, Difference
from data_module.tokenization.tokenizer import SPACE_MARK, is_blank
from pipeline.inference.options import Prefixes
from pipeline.runtime.console import report

CHUNK = 2048
"""Number of lines translated together: enough to sort them by length, few enough to keep memory flat."""


class Defects(NamedTuple):
    """How a model's reading of a sentence differs from what is written."""

    is_cut: bool = False
    """It is longer than the network reads."""
    unknown: str = ""
    """Its first characters that the vocabulary lacks."""
    unseen: str = ""
    """Its first piece that no training sentence has; see `Tokenizer.never_seen`."""
    lacks_prefix: bool = False
    """See `Prefixes.is_missing`."""
    has_mark: bool = False
    """It holds sentencepiece's mark of a space."""
    has_other_form: bool = False
    """The vocabulary has more of its characters in another Unicode normal form."""
    differs: Difference | None = None
    """How it differs in form from the training text; None if it is empty or nothing is known."""


class SentenceWarnings:
    """Counts the sentences with each of the `Defects`."""

    def __init__(self, prefixes: Prefixes, longest: int | None, name: str = "") -> None:
        """`longest` is the number of tokens that the network reads of a sentence, `name` the file or model."""
        messages = (
            f"longer than the {longest} tokens that the network reads; cut",
            "characters or words that the model has never seen, and cannot read",
            "pieces that no training sentence has on this side; write text as the training text is written",
            f"without one of the prefixes that the model was trained with ({' '.join(prefixes.trained)})",
            f"U+2581 ({SPACE_MARK}), by which sentencepiece marks spaces, was read as a space",
            "accents in another normal form than the training text's; convert the text (uconv -x any-nfc, or any-nfd)",
        )
        self._warnings = [LineWarning(message, name) for message in messages]  # in the order of `Defects`
        self._name, self._num_lines = name, Counter[bool]()
        self._differences: dict[tuple[bool, str], tuple[LineWarning, Counter[str]]] = {}

    def add(self, number: int, defects: Defects) -> None:
        """Count line `number`."""
        *of_line, differs = defects
        for warning, defect in zip(self._warnings, of_line, strict=True):
            if defect:
                warning.add(number, defect if isinstance(defect, str) else "")
        if differs is None:
            return
        self._num_lines[differs.is_target] += 1
        if differs.text:
            found = LineWarning(differs.text, self._name), Counter[str]()
            warning, counts = self._differences.setdefault((differs.is_target, differs.text), found)
            warning.add(number)
            counts.update(lines=1, words=differs.weight)

    def texts(self, unit: str = "line") -> list[str]:
        """Return a text for each defect that occurred, and for another form that most lines have; see `LineWarning`."""
        warnings = list(self._warnings)
        for (is_target, _), (warning, counts) in self._differences.items():
            if counts["words"] >= ENOUGH and 2 * counts["lines"] > self._num_lines[is_target]:
                warnings.append(warning)
        return [text for warning in warnings if (text := warning.text(unit))]

    def print(self) -> None:
        """Print the warnings on standard error."""
        for text in self.texts():
            report(text)


def count_lines(path: Path) -> int | None:
    """Return the number of lines of a file that `open_file` can open, from one pass over it in constant memory.

    None if the file can be read only once, such as a pipe, or is damaged, which is reported when it is read.
    """
    if not path.is_file():
        return None
    with suppress(InputError), open_file(path) as stream:
        return num_lines(stream)
    return None


def require_target_prefixes(path: Path, text: Path | int | None, name: str) -> None:
    """Raise InputError if a file does not have a target prefix for each line of a text.

    `text` is its file or its number of lines, None if that is not known.
    """
    found, num_lines = count_lines(path), count_lines(text) if isinstance(text, Path) else text
    if found is None:
        raise InputError(f"--target-prefixes {path}: must be a text file that can be read again")
    if num_lines is not None and found != num_lines:
        raise InputError(
            f"--target-prefixes {path}: has {found:,} lines, and {name} has {num_lines:,}; give each line a prefix, or "
            "an empty line"
        )


def sentences(stream: Iterable[bytes], name: str = "", first: int = 1, *, warn: bool = True) -> Iterator[str]:
    """Yield lines as text. Only a line feed ends a line. Invalid UTF-8 is replaced, with one warning at the end.

    Stray marks (see `StrayMarks`) are kept, and reported at the end. `first` is the number of the first line.
    """
    invalid, marks = LineWarning("not valid UTF-8; invalid bytes were replaced", name), StrayMarks(name)
    for number, line in enumerate(stream, first):
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        marks.add(number, [line])
        try:
            yield line.decode()
        except UnicodeDecodeError:
            invalid.add(number)
            yield line.decode(errors="replace")
    for text in [invalid.text(), *marks.texts()] if warn else []:
        if text:
            report(text)


def target_prefixes(text: str | None, path: Path | None, first: int) -> Iterator[str]:
    """Yield the target prefix of each line from `first` on: `text`, or a line of a file; empty without both.

    Raises InputError at the first line that the file lacks.
    """
    if path is None:
        yield from repeat(text or "")
        return
    with open_file(path) as stream:
        yield from islice(sentences(stream, warn=False), first - 1, None)
    raise InputError(f"--target-prefixes {path}: has fewer lines than the text; give each line one, or an empty line")


def read_sentences(path: Path) -> list[str]:
    """Return all lines of a file. One without a visible character is empty.

    Raises InputError if the file cannot be read.
    """
    with open_file(path) as stream:
        return ["" if is_blank(line) else line for line in sentences(stream, str(path))]


def paired_texts(source: Path, *references: Path) -> list[list[str]]:
    """Return the lines of all files.

    Raises InputError if a file cannot be read, the files differ in length, or they are empty.
    """
    texts = [read_sentences(path) for path in (source, *references)]
    for path, lines in zip(references, texts[1:], strict=True):
        if len(texts[0]) != len(lines):
            shorter = source if len(texts[0]) < len(lines) else path
            raise InputError(
                f"{source} has {len(texts[0])} lines and {path} {len(lines)}; "
                f"{shorter} is shorter: give texts whose lines pair up"
            )
    if not texts[0]:
        raise InputError(f"{source}: is empty; name a file with sentences")
    return texts


class Pair(NamedTuple):
    """A source sentence and one of its translations."""

    number: int
    """The source's line, from 1."""
    source: str
    target: str


def translation_pairs(source: Path, target: Path, is_list: bool, *, warn: bool = True) -> Iterator[Pair]:
    """Yield the pairs of two texts; `is_list` tells whether `target` is an n-best list.

    Raises InputError if a file cannot be read, the texts do not pair up or are empty, or `target` is no n-best list.
    """
    number = 0
    with open_file(source) as source_stream, open_file(target) as target_stream:
        sources = sentences(source_stream, str(source), warn=warn)
        targets = sentences(target_stream, str(target), warn=warn)
        lists = _lists(targets, target) if is_list else ([text] for text in targets)
        for number, (line, translations) in enumerate(zip_longest(sources, lists), 1):
            if line is None or translations is None:
                shorter = source if line is None else target
                raise InputError(
                    f"{source} and {target}: {shorter} ends after {number - 1} lines and the other goes on; give texts"
                    " whose lines pair up"
                )
            yield from (Pair(number, line, text) for text in translations)
    if not number:
        raise InputError(f"{source}: is empty; name a file with sentences")


def _lists(lines: Iterable[str], path: Path) -> Iterator[list[str]]:
    """Yield the translations of each source line from an n-best list, without their scores."""
    translations: list[str] = []
    number = 1
    for place, line in enumerate(lines, 1):
        first, *others = line.split("\t", 2)
        if translations and first == str(number + 1):
            yield translations
            translations, number = [], number + 1
        if first != str(number) or not others:
            raise InputError(
                f"{path}: line {place} is not of an n-best list; give what translate --n-best has written: the number"
                " of the source line, a tab and a translation, with --scores a score and a tab before it"
            )
        translations.append(others[-1])
    if translations:
        yield translations
