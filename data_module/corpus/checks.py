"""Checks of a recipe's `corpus:` section before anything expensive is done, for `prepare`, `fit` and `doctor`."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np

from data_module.corpus.pairs import PairChunk, PairFilter, least_lengths, open_reader, read_pairs, with_prefix
from data_module.corpus.store import MAX_TOKENS
from data_module.errors import InputError
from data_module.settings import BpeDropout, CorpusSettings, TextSource
from data_module.system.files import PlainValues, beside, replace_error, write_error
from data_module.system.text_files import LineWarning, StrayMarks
from data_module.tokenization.text_form import SideForm, form_notes
from data_module.tokenization.tokenizer import (
    BYTE_NAMES,
    NUM_BYTES,
    SPECIAL_NAMES,
    TOKENIZER_NAME,
    Tokenizer,
    normal_form,
    normalize_white_space,
    symbol_places,
)

FEW_PAIRS = 5_000
"""Training pairs below which a network hardly learns more than its training text, unless its pieces are few."""
ENOUGH_PIECE_TOKENS = 100
"""Tokens of training text per piece that make up for few pairs, for example where pieces are letters."""
MIN_PIECE_TOKENS = 20
"""Tokens of training text per piece of the vocabulary, below which many pieces are too rare to be learned."""
_DECOMPOSED = (
    "accents are characters of their own (NFD), where other text has one for letter and accent (NFC), so that words"
    " have two spellings; convert the file (uconv -x any-nfc)"
)
_BYTES_PER_TOKEN = 5
"""Bytes of UTF-8 text that become one token, a rough mean over languages; with characters as pieces, 1."""


@dataclass
class SourceCheck:
    """What one pass over a text source found."""

    name: str
    """The source's files or data set."""
    num_pairs: int = 0
    """Without repetitions."""
    kept: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """bool [num_pairs], False for pairs that are dropped whatever the tokenizer. The next three describe kept pairs."""
    num_bytes: int = 0
    """UTF-8 bytes of both sides."""
    symbols: set[str] = field(default_factory=set)
    """The user symbols that occur."""
    characters: set[str] = field(default_factory=set)
    """All characters that occur."""
    marks: list[str] = field(default_factory=list)
    """Notes on stray marks of any pair."""
    decomposed: list[str] = field(default_factory=list)
    """Notes on lines with decomposed accents, of any pair."""


def check_settings(settings: CorpusSettings) -> None:
    """Raise InputError for a setting that is out of range."""
    ratio = settings.max_length_ratio
    for key, ok, rule in (
        ("train", bool(settings.train), "name at least one text source"),
        ("validation", bool(settings.validation), "name at least one text source"),
        ("vocabulary_size", 1 <= settings.vocabulary_size < 2**31, f"must be from 1 to {2**31 - 1}"),
        ("tokenizer_sentences", settings.tokenizer_sentences >= 2, "must be 2 or more"),
        ("character_coverage", 0.98 <= settings.character_coverage <= 1, "must be from 0.98 to 1"),
        ("max_tokens", 1 <= settings.max_tokens <= MAX_TOKENS, f"must be from 1 to {MAX_TOKENS}"),
        ("max_length_ratio", ratio is None or ratio >= 1, "must be 1 or more, or null"),
        ("seed", settings.seed >= 0, "must be 0 or more"),
        ("variants", settings.variants >= 1, "must be 1 or more"),
    ):
        if not ok:
            raise InputError(f"corpus.{key}: {rule}; it is {getattr(settings, key)}")
    if settings.variants > 1 and not settings.is_varied():
        raise InputError(
            f"corpus.variants: {settings.variants} encodings would all be the same; set corpus.noise or"
            " corpus.bpe_dropout, or remove it"
        )
    _check_symbols(settings)
    _check_model_type(settings)
    _check_text_sources(settings)


def _check_model_type(settings: CorpusSettings) -> None:
    """Raise InputError for a setting that the type of the vocabulary does not have."""
    kind, wrong = settings.model_type, []
    if kind != "bpe" and settings.bpe_dropout != BpeDropout():
        wrong.append("bpe_dropout")
    if kind == "word":
        plain = {"byte_fallback": False, "split_digits": False, "character_coverage": 1.0}
        wrong += [key for key, value in plain.items() if getattr(settings, key) != value]
    for key in wrong:
        raise InputError(f"corpus.{key}: is not for corpus.model_type {kind}; remove it, or choose another model_type")


def _check_symbols(settings: CorpusSettings) -> None:
    """Raise InputError for a user symbol that could not be one piece."""
    symbols = settings.user_symbols
    for i, symbol in enumerate(symbols):
        problem = None
        if not symbol:
            problem = "is empty; remove it"
        elif symbol != normalize_white_space(symbol) or any(map(str.isspace, symbol)):
            problem = f"has white space, at which words end; write it without{_as_list([symbol])}"
        elif symbol in symbols[:i]:
            problem = "occurs twice in the list; remove one"
        elif symbol in SPECIAL_NAMES or (settings.byte_fallback and symbol in BYTE_NAMES):
            problem = "is the name of a special piece; choose another one"
        elif settings.model_type == "word" and settings.lowercase and symbol != symbol.lower():
            problem = "has capitals, which corpus.lowercase changes with corpus.model_type word; write it without"
        if problem:
            raise InputError(f"corpus.user_symbols: {symbol!r} {problem}")


def _as_list(symbols: list[str]) -> str:
    """Return how a list is written, if a symbol looks as if it was meant for one."""
    looks = next((symbol.strip("'[]").split(",") for symbol in symbols if "," in symbol), None)
    return "" if looks is None else f"; a list is written {[part.strip() for part in looks]}"


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


def tokenizer_file(settings: CorpusSettings) -> Path | None:
    """Return the file that `corpus.tokenizer` names, itself or by its folder; None to learn a tokenizer."""
    if settings.tokenizer is None:
        return None
    path = Path(settings.tokenizer)
    return path / TOKENIZER_NAME if path.is_dir() else path


def given_tokenizer(settings: CorpusSettings, earlier: Tokenizer | None = None) -> Tokenizer | None:
    """Return the tokenizer to use in place of one learned from the text, after checking it; None to learn one.

    `earlier` is the tokenizer of the run to start from or to resume, if there is one.

    Raises InputError if a tokenizer is not what the settings ask for; or `corpus.tokenizer` is another one than
    `earlier`, cannot be read, or normalizes text.
    """
    if earlier is not None:
        _check_tokenizer(settings, earlier, "the tokenizer of the run to start from", "start without --init-from")
    if (path := tokenizer_file(settings)) is None:
        return earlier
    if not path.is_file():
        raise InputError(f"corpus.tokenizer: {path}: no such file; name a run, a bundle or a sentencepiece model")
    try:
        given = Tokenizer.load(path)
    except InputError as error:
        raise InputError(f"corpus.tokenizer: {error}") from error
    if given.normalization not in ("identity", "user_defined" if given.lowercase else ""):
        raise InputError(
            f"corpus.tokenizer: {path} normalizes text ({given.normalization}), which exports would not do; name one"
            " that was trained with normalization_rule_name=identity"
        )
    if earlier is not None and earlier.model != given.model:
        raise InputError(
            f"corpus.tokenizer: {path} is not the tokenizer of the run to start from; leave it out, or start without"
            " --init-from"
        )
    if given.vocabulary_size != settings.vocabulary_size:
        raise InputError(
            f"corpus.vocabulary_size: {settings.vocabulary_size}, but {path} has {given.vocabulary_size} pieces; set"
            f" it to {given.vocabulary_size}"
        )
    _check_tokenizer(settings, given, str(path), "name another corpus.tokenizer")
    return earlier or given


def _check_tokenizer(settings: CorpusSettings, tokenizer: Tokenizer, name: str, otherwise: str) -> None:
    """Raise InputError if an existing tokenizer is not what the settings ask for."""
    if settings.lowercase != tokenizer.lowercase:
        does = "lower-cases" if tokenizer.lowercase else "does not lower-case"
        raise InputError(
            f"corpus.lowercase: {name} {does}; set it to {str(tokenizer.lowercase).lower()}, or {otherwise}"
        )
    wanted, found = settings.model_type, tokenizer.model_type
    # A recipe without the key takes a model of another type as it is, but for `word`, which reads text in another way.
    if found != wanted and (wanted != "bpe" or found == "word"):
        raise InputError(f"corpus.model_type: {name} is of type {found}; set it to {found}, or {otherwise}")
    missing = [symbol for symbol in settings.user_symbols if symbol not in tokenizer.user_symbols]
    for key, is_missing, problem in (
        ("user_symbols", bool(missing), f"{', '.join(missing)}: not in {name}, and a tokenizer cannot grow"),
        ("byte_fallback", settings.byte_fallback and not tokenizer.byte_fallback, f"{name} has no byte pieces"),
        ("split_digits", settings.split_digits and not tokenizer.splits_digits, f"{name} has pieces of several digits"),
        (
            "bpe_dropout",
            settings.bpe_dropout != BpeDropout() and not tokenizer.is_bpe,
            f"{name} is no byte-pair encoding of this project",
        ),
    ):
        if is_missing:
            raise InputError(f"corpus.{key}: {problem}; leave it out, or {otherwise}")


def check_folder(settings: CorpusSettings) -> None:
    """Raise InputError if the corpus folder cannot be created or replaced, or is locked by another user."""
    folder = Path(settings.folder)
    target = folder.resolve()
    lock = beside(target, "lock")
    if lock.exists() and not os.access(lock, os.W_OK, effective_ids=True):
        raise InputError(f"{lock}: belongs to another user; remove it if that user is not preparing this corpus")
    # A corpus is written beside its folder, and then renamed; the files of the previous one are removed.
    if error := replace_error(target) or (target.is_dir() and write_error(target)):
        raise InputError(f"{folder}: cannot be written: {error}; name another corpus.folder")


class TextChecker:
    """Reads the text of a corpus once without tokenizing it: its line counts, columns and encoding."""

    def __init__(self, settings: CorpusSettings) -> None:
        self.held_out: dict[str, set[tuple[str, str]]] = {"validation": set(), "test": set()}
        """All pairs of these splits, with prefixes."""
        self.found: dict[str, list[SourceCheck]] = {"train": [], "validation": [], "test": []}
        """What was found in each source, by split."""
        self.settings = settings
        self._forms = {side: SideForm() for side in ("source", "target")}
        # Lengths in pieces are not known yet, so that a ratio of them drops nothing.
        compared = self.held_out if settings.drop_overlap else {}
        train_filter = PairFilter(replace(settings, max_length_ratio=None), compared)
        self._filters = {split: PairFilter(settings) for split in self.held_out} | {"train": train_filter}

    def sources(self) -> list[tuple[str, TextSource]]:
        """Return splits and sources in the order of checking: held-out text, then training text to compare with it."""
        return [(split, text) for split in (*self.held_out, "train") for text in getattr(self.settings, split)]

    def check(self, split: str, text: TextSource) -> SourceCheck:
        """Read a source once.

        Raises InputError as `read_pairs` does, or if a pair already has the prefix of its source.
        """
        names = open_reader(text, self.settings).names
        result = SourceCheck(", ".join(dict.fromkeys(names)))
        marks = StrayMarks(names[0]), StrayMarks(names[1])
        try:
            self._check_pairs(read_pairs(replace(text, prefix=None), self.settings, marks), result, split, text)
        except InputError as error:
            # Sides may be of unequal length because carriage returns end the lines of one.
            raise InputError("; ".join([str(error), *marks[0].texts(), *marks[1].texts()])) from error
        result.marks = list(dict.fromkeys([*marks[0].texts(), *marks[1].texts()]))  # of a tsv, both sides have one name
        self.found[split].append(result)
        return result

    def _check_pairs(self, chunks: Iterator[PairChunk], result: SourceCheck, split: str, text: TextSource) -> None:
        """Fill in `result`, which `check` returns, except for stray marks."""
        settings, kept = self.settings, []
        decomposed: dict[str, LineWarning] = {}
        for chunk in chunks:
            result.num_pairs += len(chunk.source)
            prefixed = with_prefix(chunk, text.prefix)
            lengths = least_lengths(prefixed.source, settings), least_lengths(prefixed.target, settings)
            chosen = self._filters[split].keep(prefixed, *lengths, text.repeat)
            kept.append(np.isin(np.arange(len(chunk.source)), chosen))
            if split == "train":
                for form, lines in zip(self._forms.values(), (prefixed.source, prefixed.target), strict=True):
                    form.add([lines[i] for i in chosen.tolist()])
            if split in self.held_out:
                self.held_out[split].update(zip(prefixed.source, prefixed.target, strict=True))
            for name, sentences in zip(chunk.names, (chunk.source, chunk.target), strict=True):
                side = "\n".join(sentences)
                if normal_form(side) == "NFD":
                    note = decomposed.setdefault(name, LineWarning(_DECOMPOSED, name))
                    for number, sentence in enumerate(sentences, chunk.first_line):
                        if normal_form(sentence) == "NFD":
                            note.add(number)
                if text.prefix and text.prefix in symbol_places(side, settings.model_type):
                    of_lines = (symbol_places(sentence, settings.model_type) for sentence in sentences)
                    index = next(i for i, found in enumerate(of_lines) if text.prefix in found)
                    raise InputError(
                        f"{name}:{chunk.first_line + index}: the pair holds the prefix {text.prefix!r} of its"
                        " source already; remove `prefix` from the source, or choose another symbol"
                    )
                left = side if len(chosen) == len(sentences) else "\n".join([sentences[i] for i in chosen.tolist()])
                result.num_bytes += len(left.encode()) + 1
                result.characters.update(left)
                places = symbol_places(left, settings.model_type)
                result.symbols |= {symbol for symbol in settings.user_symbols if symbol in places}
        result.kept = np.concatenate(kept)
        result.decomposed = [line for note in decomposed.values() if (line := note.text())]

    def text_form(self) -> PlainValues:
        """Return the form of the training text; see `text_form.SHAPE`."""
        return {side: form.values() for side, form in self._forms.items()}

    def check_not_empty(self) -> None:
        """Raise InputError if it is certain that no training or validation pair is left."""
        for split in ("train", "validation"):
            self._filters[split].check_not_empty(split)


def check_text(settings: CorpusSettings) -> TextChecker:
    """Read all text once; raise InputError as `TextChecker.check` does."""
    checker = TextChecker(settings)
    for split, text in checker.sources():
        checker.check(split, text)
    return checker


def source_warnings(settings: CorpusSettings, checked: TextChecker) -> list[str]:
    """Return one line for each likely mistake that does not prevent preparation."""
    train, every = checked.found["train"], list(chain.from_iterable(checked.found.values()))
    warnings = [line for source in every for line in source.marks]
    warnings += form_notes(checked.text_form())
    if normal_form("\n".join(set().union(*(source.characters for source in every)))) == "NFC":
        warnings += [line for source in every for line in source.decomposed]
    languages = dict.fromkeys((settings.source_language, settings.target_language))
    own_case = [name for name in languages if re.match(r"(el|tr|az)(?![^\W_])", name.lower())]
    if settings.lowercase and own_case:
        warnings.append(
            f"corpus.lowercase: letters are lower-cased one by one, not by the rules of {' and '.join(own_case)}: Σ is"
            " always σ, I is i, and İ is i and a dot; lower-case the text beforehand by those rules, or keep this one"
        )
    # Neither markup nor placeholders are learned without text. `prepare` itself puts prefixes before the sentences.
    held = {text.prefix for text in settings.train}.union(*(source.symbols for source in train))
    if lacking := [repr(symbol) for symbol in settings.user_symbols if symbol not in held]:
        warnings.append(
            f"corpus.user_symbols: the training text has no {', '.join(lacking)}: a network does not learn a symbol"
            " that it never sees; add pairs with it, on both sides if it is to be copied, or remove it from the list"
            + _as_list(lacking)
        )
    return warnings


def size_warnings(settings: CorpusSettings, checked: TextChecker) -> list[str]:
    """Return a line if the pairs are few, and a line if the training text is too small for the vocabulary.

    Neither matters for a run that starts from the weights and the tokenizer of another one. `learn_tokenizer` refuses a
    vocabulary that the text does not allow.
    """
    train = checked.found["train"]
    pairs = sum(int(source.kept.sum()) for source in train)
    is_char = settings.model_type == "char"
    tokens = sum(source.num_bytes for source in train) // (1 if is_char else _BYTES_PER_TOKEN)
    # Bytes and user symbols take up pieces whatever the text is.
    reserved = len(settings.user_symbols) + NUM_BYTES * settings.byte_fallback
    learned = settings.vocabulary_size - reserved
    warnings = []
    if pairs < FEW_PAIRS and tokens < ENOUGH_PIECE_TOKENS * learned:
        warnings.append(
            f"corpus.train: {pairs:,} pairs are few: a network learns them by heart and translates other text badly;"
            f" add text, {FEW_PAIRS:,} pairs or more, or start from a trained run with --init-from"
        )
    # A vocabulary needs a piece for each character, and some for words.
    characters = set().union(*(source.characters for source in train))
    suggestion = max(100, tokens // (2 * MIN_PIECE_TOKENS), 2 * len(characters)) + reserved
    is_learned = settings.tokenizer is None and not is_char  # The text decides how many characters are pieces.
    if is_learned and tokens < MIN_PIECE_TOKENS * learned and suggestion < settings.vocabulary_size:
        warnings.append(
            f"corpus.vocabulary_size {settings.vocabulary_size}: each piece occurs only about"
            f" {max(1, round(tokens / learned))} times, so that many are learned badly; set about {suggestion}"
        )
    return warnings
