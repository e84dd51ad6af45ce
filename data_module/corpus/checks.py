"""Checks of a recipe's `corpus:` section before anything expensive is done, for `prepare`, `fit` and `doctor`."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from data_module.corpus.pairs import invalid_utf8, open_reader
from data_module.corpus.store import MAX_TOKENS
from data_module.errors import InputError
from data_module.files import FileLock, existing_parent, write_error
from data_module.settings import BpeDropout, CorpusSettings, TextSource
from data_module.tokenization.tokenizer import (
    BYTE_NAMES,
    NUM_BYTES,
    SPACE_MARK,
    SPECIAL_NAMES,
    Tokenizer,
    normalize_white_space,
)
from data_module.tokenization.training import minimum_size

FEW_PAIRS = 5_000
"""Training pairs below which a network hardly learns more than its training text, unless its pieces are few."""
ENOUGH_PIECE_TOKENS = 100
"""Tokens of training text for each piece that make up for few pairs, as where the pieces are letters."""
MIN_PIECE_TOKENS = 20
"""Tokens of training text for each piece of the vocabulary, below which many pieces are too rare to be learned."""
_BYTES_PER_TOKEN = 5
"""Bytes of UTF-8 text that become one token, a rough mean over languages."""
_SAMPLE_LINES = 1_000
_MIN_SAMPLE_LINES = 20
_MAX_NAMED_SYMBOLS = 3
_SWAP_MARGIN = 0.1
"""Texts count as swapped if the cosine similarity of crossed sides exceeds that of straight ones by this much."""


_READ_AS_SPACE = {
    b"\t": ("a tab in", "remove it, or name a file of two columns as {tsv: FILE}"),
    SPACE_MARK.encode(): (
        "U+2581 (\u2581) in",
        "sentencepiece marks spaces by it; give the text before it was cut into pieces, or another character",
    ),
}
"""Characters that are read as spaces though they may have been meant otherwise: their names, and what to do."""


@dataclass
class SymbolCount:
    """How often a user symbol occurs in a text source."""

    first: str
    """The first place, as in `train.en:7`."""
    sides: list[int] = field(default_factory=lambda: [0, 0])
    """Occurrences in source and in target sentences."""


@dataclass
class SourceCheck:
    """What one pass over a text source found, to compare sources by and to warn of."""

    name: str
    """The source's files or data set."""
    num_pairs: int
    """Without repetitions."""
    num_bytes: int
    """Of both sides."""
    samples: tuple[str, str]
    """The first lines of both sides."""
    warnings: list[str]
    symbols: dict[str, SymbolCount] = field(default_factory=dict)
    """The user symbols that occur in the text."""


def check_settings(settings: CorpusSettings) -> None:
    """Raise InputError for a setting that is out of range."""
    ratio = settings.max_length_ratio
    for key, ok, rule in (
        ("train", bool(settings.train), "name at least one text source"),
        ("validation", bool(settings.validation), "name at least one text source"),
        ("vocabulary_size", settings.vocabulary_size > 0, "must be positive"),
        ("tokenizer_sentences", settings.tokenizer_sentences >= 2, "must be 2 or more"),
        ("character_coverage", 0.98 <= settings.character_coverage <= 1, "must be from 0.98 to 1"),
        ("max_tokens", 1 <= settings.max_tokens <= MAX_TOKENS, f"must be from 1 to {MAX_TOKENS}"),
        ("max_length_ratio", ratio is None or ratio >= 1, "must be 1 or more, or null"),
        ("variants", settings.variants >= 1, "must be 1 or more"),
    ):
        if not ok:
            raise InputError(f"corpus.{key}: {rule}; it is {getattr(settings, key)}")
    if settings.variants > 1 and not settings.is_varied():
        raise InputError(
            f"corpus.variants: {settings.variants} encodings would all be the same; set corpus.noise or"
            " corpus.bpe_dropout, or remove it"
        )
    _check_symbols(settings.user_symbols, settings.byte_fallback)
    _check_text_sources(settings)
    smallest = minimum_size(len(settings.user_symbols), settings.byte_fallback) + 1
    if settings.vocabulary_size < smallest and (settings.byte_fallback or settings.user_symbols):
        symbols = len(settings.user_symbols)
        parts = [f"{NUM_BYTES} bytes"] * settings.byte_fallback + [f"{symbols} user symbols"] * bool(symbols)
        raise InputError(
            f"corpus.vocabulary_size: {settings.vocabulary_size} has no room for {' and '.join(parts)} beside"
            f" characters; set at least {smallest}, and better some thousands"
        )


def _check_symbols(symbols: list[str], byte_fallback: bool) -> None:
    """Raise InputError for a user symbol that could not be one piece."""
    for i, symbol in enumerate(symbols):
        problem = None
        if not symbol:
            problem = "is empty; remove it"
        elif symbol != normalize_white_space(symbol) or any(map(str.isspace, symbol)):
            problem = "has white space, at which words end; write it without"
        elif symbol in symbols[:i]:
            problem = "occurs twice in the list; remove one"
        elif symbol in SPECIAL_NAMES or (byte_fallback and symbol in BYTE_NAMES):
            problem = "is the name of a special piece; choose another one"
        if problem:
            raise InputError(f"corpus.user_symbols: {symbol!r} {problem}")


def _check_text_sources(settings: CorpusSettings) -> None:
    """Raise InputError for a prefix that is no user symbol, or a weight outside training."""
    for split in ("train", "validation", "test"):
        for text in getattr(settings, split):
            if split != "train" and text.weight != 1:
                raise InputError(f"corpus.{split}: a text source has a weight, which only training has; remove it")
            if text.prefix is not None and text.prefix not in settings.user_symbols:
                raise InputError(
                    f"corpus.{split}: the prefix {text.prefix!r} of a text source is none of corpus.user_symbols;"
                    f" add it there (they are: {' '.join(settings.user_symbols) or 'none'})"
                )


def check_tokenizer(settings: CorpusSettings, tokenizer: Tokenizer) -> None:
    """Raise InputError if a tokenizer that another run was trained with is not what the settings ask for."""
    if settings.lowercase != tokenizer.lowercase:
        does = "lower-cases" if tokenizer.lowercase else "does not lower-case"
        raise InputError(
            f"corpus.lowercase: the tokenizer of the run to start from {does}; set it to"
            f" {str(tokenizer.lowercase).lower()}, or start without --init-from"
        )
    missing = [symbol for symbol in settings.user_symbols if symbol not in tokenizer.user_symbols]
    if missing:
        raise InputError(
            f"corpus.user_symbols: {_few(missing)}: not in the tokenizer of the run to start from, and a tokenizer"
            " cannot grow; leave it out, or start without --init-from"
        )
    if settings.bpe_dropout != BpeDropout() and not tokenizer.is_bpe:
        raise InputError(
            "corpus.bpe_dropout: the tokenizer of the run to start from is no byte-pair encoding of this project;"
            " leave it out, or start without --init-from"
        )
    if settings.byte_fallback and not tokenizer.byte_fallback:
        raise InputError(
            "corpus.byte_fallback: the tokenizer of the run to start from has no bytes, and a tokenizer cannot grow;"
            " set it to false, or start without --init-from"
        )


def check_folder(settings: CorpusSettings) -> None:
    """Raise InputError if the corpus folder is neither there nor can be created."""
    folder = Path(settings.folder)
    # A corpus is written beside its folder, and then renamed.
    parent = existing_parent(folder.resolve().parent)
    if error := write_error(parent):
        raise InputError(f"{folder}: cannot be written: {error} ({parent}); name another corpus.folder")
    lock = lock_file(folder.resolve())
    try:
        if lock.exists():
            with FileLock(lock, of_all_users=True) as opened:
                opened.take()
    except OSError as refused:
        raise InputError(
            f"{folder}: cannot be locked: {refused.strerror} ({lock}); remove that file if no prepare is running, or"
            " name another corpus.folder"
        ) from None


def lock_file(folder: Path) -> Path:
    """Return the name of the file that locks a folder, beside it."""
    return folder.with_name(f".{folder.name}.lock")


def check_source(text: TextSource, settings: CorpusSettings) -> SourceCheck:
    """Read a source once without tokenizing it: its line counts, columns and encoding.

    Raises:
        InputError: see `Reader.count_pairs` and `read_pairs`; or the text holds the source's prefix already.
    """
    reader = open_reader(text, settings)
    result = SourceCheck(", ".join(dict.fromkeys(reader.names)), reader.count_pairs(), 0, ("", ""), [])
    # Of each side's lines with each of these characters: the number of lines, and the first one.
    counts: list[Counter[bytes]] = [Counter() for _ in reader.names]
    firsts: list[dict[bytes, int]] = [{} for _ in reader.names]
    first_line = 1
    for sides in reader.chunks():
        samples = []
        for side, (name, lines) in enumerate(zip(reader.names, sides, strict=True)):
            data = b"".join(lines)
            result.num_bytes += len(data)
            for symbol in settings.user_symbols:
                _count_symbol(result, symbol, side, data, name, first_line)
            if text.prefix in result.symbols:
                raise InputError(
                    f"{result.symbols[text.prefix].first}: the text holds the prefix {text.prefix!r} of its source"
                    " already; remove `prefix` from the source, or choose another symbol"
                )
            samples.append(b"".join(lines[:_SAMPLE_LINES]).decode(errors="replace"))
            for character in _READ_AS_SPACE:
                if character in data:
                    numbers = [first_line + i for i, line in enumerate(lines) if character in line]
                    counts[side][character] += len(numbers)
                    firsts[side].setdefault(character, numbers[0])
            if not settings.drop_invalid_utf8 and (line := _undecodable(data)) is not None:
                raise invalid_utf8(name, first_line + line)
        if first_line == 1:
            result.samples = (samples[0], samples[1])
        first_line += len(sides[0])
    for name, count, first in zip(reader.names, counts, firsts, strict=True):
        for character, (what, way_out) in _READ_AS_SPACE.items():
            if character in first:
                result.warnings.append(
                    f"{name}: {what} {count[character]:,} of {result.num_pairs:,} lines, line {first[character]} first;"
                    f" it is read as a space: {way_out}"
                )
    return result


def _count_symbol(result: SourceCheck, symbol: str, side: int, data: bytes, name: str, first_line: int) -> None:
    """Add the occurrences of a user symbol in a chunk of one side, whose first line is `first_line`."""
    if count := data.count(symbol.encode()):
        line = first_line + data.count(b"\n", 0, data.index(symbol.encode()))
        result.symbols.setdefault(symbol, SymbolCount(f"{name}:{line}")).sides[side] += count


def _undecodable(data: bytes) -> int | None:
    """Return the index of the first line with invalid UTF-8, None if there is none."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return data.count(b"\n", 0, error.start)
    return None


def source_warnings(settings: CorpusSettings, checked: list[SourceCheck]) -> list[str]:
    """Return one line for each likely mistake that does not prevent preparation.

    Args:
        settings: the recipe's `corpus:` section.
        checked: what `check_source` returned for each of `settings.texts()`.
    """
    warnings = [warning for source in checked for warning in source.warnings]
    train = checked[: len(settings.train)]
    held_out = checked[len(settings.train) :]
    for source in train:
        for other in held_out:
            if _are_swapped(source.samples, other.samples):
                warnings.append(
                    f"{source.name}: its source resembles the target of {other.name}, and its target the source;"
                    " exchange the sides of one of them"
                )
                break
    if settings.is_varied() and settings.variants == 1:
        warnings.append(
            "corpus.variants 1: all epochs train on the same noise and segmentation; raise it, to 8 for instance, for"
            " others in each epoch"
        )
    if settings.noise.emoji and not settings.byte_fallback:
        warnings.append(
            "corpus.noise.emoji: without corpus.byte_fallback, the tokenizer knows only the emoji of the training text,"
            " and a network cannot learn to copy others; set corpus.byte_fallback to true"
        )
    return warnings + _symbol_warnings(settings, train)


def _symbol_warnings(settings: CorpusSettings, train: list[SourceCheck]) -> list[str]:
    """Return a line about the user symbols that the training text holds, and one about those that it lacks.

    Neither is refused. Markup and placeholders have to be in the text to be learned. A symbol that the user thought to
    be new, however, changes what this text means. Prefixes are not lacking: `prepare` puts them before the sentences.
    """
    held, lacking = [], []
    prefixes = {text.prefix for text in settings.train}
    for symbol in settings.user_symbols:
        counts = [source.symbols[symbol] for source in train if symbol in source.symbols]
        source, target = (sum(count.sides[side] for count in counts) for side in (0, 1))
        if counts:
            held.append(f"{symbol!r} ({counts[0].first}; {source:,} times in the source, {target:,} in the target)")
        elif symbol not in prefixes:
            lacking.append(repr(symbol))
    warnings = []
    if held:
        warnings.append(
            f"corpus.user_symbols: the training text holds {_few(held)}; each occurrence becomes this symbol: right for"
            " markup and placeholders, else choose another symbol"
        )
    if lacking:
        warnings.append(
            f"corpus.user_symbols: the training text has no {_few(lacking)}: a network does not learn to copy a symbol"
            " that it never sees; add pairs with it on both sides"
        )
    return warnings


def _few(names: list[str]) -> str:
    """Return the first names, and the number of the others."""
    more = [f"{len(names) - _MAX_NAMED_SYMBOLS} more"] if len(names) > _MAX_NAMED_SYMBOLS else []
    return ", ".join(names[:_MAX_NAMED_SYMBOLS] + more)


def size_warnings(settings: CorpusSettings, checked: list[SourceCheck]) -> list[str]:
    """Return a line each for few pairs and for a vocabulary that the training text cannot feed.

    Both are of no concern where a run starts from the weights and the tokenizer of another one. For a vocabulary that
    the text does not allow, see `builder.check_vocabulary_size`.

    Args:
        settings: the recipe's `corpus:` section.
        checked: what `check_source` returned for each of `settings.texts()`.
    """
    train = checked[: len(settings.train)]
    warnings = []
    pairs = sum(source.num_pairs for source in train)
    repeated = zip(train, settings.train, strict=True)
    tokens = sum(source.num_bytes * text.repeat for source, text in repeated) // _BYTES_PER_TOKEN
    # Bytes and user symbols take their places whatever the text is.
    reserved = len(settings.user_symbols) + NUM_BYTES * settings.byte_fallback
    learned = settings.vocabulary_size - reserved
    different = sum(source.num_bytes for source in train) // _BYTES_PER_TOKEN
    if pairs < FEW_PAIRS and different < ENOUGH_PIECE_TOKENS * learned:
        warnings.append(
            f"corpus.train: {pairs:,} pairs are few: a network learns them by heart and translates other text badly;"
            f" add text, {FEW_PAIRS:,} pairs or more, or start from a trained run with --init-from"
        )
    # A vocabulary needs a piece for each character, and some for words.
    characters = len(set("".join(side for source in train for side in source.samples)))
    suggestion = max(_rounded(tokens // (2 * MIN_PIECE_TOKENS)), 2 * characters) + reserved
    if tokens < MIN_PIECE_TOKENS * learned and suggestion < settings.vocabulary_size:
        warnings.append(
            f"corpus.vocabulary_size {settings.vocabulary_size}: each piece occurs only about"
            f" {max(1, round(tokens / learned))} times, so that many are learned badly;"
            f" set about {suggestion}"
        )
    return warnings


def _rounded(number: int) -> int:
    """Round down to two digits."""
    unit = 10 ** max(0, len(str(number)) - 2)
    return max(100, number // unit * unit)


def _are_swapped(ours: tuple[str, str], theirs: tuple[str, str]) -> bool:
    """Return whether each side of one text resembles the other side of the other text, and not its own."""
    if min(side.count("\n") for side in (*ours, *theirs)) < _MIN_SAMPLE_LINES:
        return False
    source, target = (_trigrams(side) for side in ours)
    other_source, other_target = (_trigrams(side) for side in theirs)
    straight = _cosine(source, other_source), _cosine(target, other_target)
    crossed = _cosine(source, other_target), _cosine(target, other_source)
    return crossed[0] > straight[0] + _SWAP_MARGIN and crossed[1] > straight[1] + _SWAP_MARGIN


def _trigrams(text: str) -> Counter[str]:
    """Count the text's sequences of three characters, which tell languages apart in any script."""
    return Counter(map("".join, zip(text, text[1:], text[2:], strict=False)))


def _cosine(ours: Counter[str], theirs: Counter[str]) -> float:
    product = sum(count * theirs[gram] for gram, count in ours.items() if gram in theirs)
    norms = [sum(count * count for count in grams.values()) ** 0.5 for grams in (ours, theirs)]
    return product / (norms[0] * norms[1]) if all(norms) else 0.0
