"""Training of tokenizers: counts of a text's words, the four types of models, and models for other programs."""

import io
import re
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice

import numpy as np

from data_module.errors import InputError
from data_module.settings import CorpusSettings
from data_module.system.files import PlainValues
from data_module.tokenization.pair import proto_of
from data_module.tokenization.tokenizer import (
    BOS_ID,
    EOS_ID,
    LONGEST_TOKEN,
    MAX_PIECE_CHARACTERS,
    NUM_BYTES,
    NUM_SPECIAL_IDS,
    PAD_ID,
    RESERVED_CHARACTER,
    SPACE_LIKE,
    SPACE_MARK,
    UNK_ID,
    Tokenizer,
    normalize_white_space,
)

MIN_CHARACTER_COUNT = 20
"""With byte fallback, a character that occurs less often than this gets no piece of its own."""
# Training takes about 0.7 kB for each distinct word of text with spaces, and 2 kB for each sentence of 12 characters
# of text without spaces. So words are counted in at most as many lines as have about this number of distinct words of
# 12 characters, the space included, or as many characters in longer or shorter words.
_MAX_COUNTED_WORDS = 2_000_000
_MEAN_CHARACTERS = 12
_ABOVE_HASHES = 2**32
_LONGEST_PART = 1000
"""Characters of a word in one line, where pieces are parts of words."""


class WordCounts:
    """The number of occurrences of each word of a text, from which a tokenizer is trained.

    Pieces never cross a space, so training on word counts gives the same pieces as training on the sentences, in a
    fraction of the memory and time.

    If a text has more distinct words than memory allows, such as text without spaces, words are counted in half of its
    lines, a quarter and so on. A hash of the line decides, so that all lines have the same chance and their order
    changes nothing. The lowest bit that is set in a hash is 1 for half of the lines, 2 for a quarter and so on.
    """

    def __init__(self) -> None:
        self._total: Counter[str] = Counter()
        self._by_bit: defaultdict[int, Counter[str]] = defaultdict(Counter)
        """The words of the lines whose hashes have this lowest bit."""
        self._least_bit = 1
        """Lines with a lower bit are not counted."""
        self._characters = 0
        """Number of characters of the words of `_least_bit`, with a space for each."""
        self._seen: set[str] = set()

    @property
    def counts(self) -> Counter[str]:
        """The number of occurrences of each word. Read it when all lines have been added."""
        for bit in sorted(self._by_bit):
            self._total.update(self._by_bit[bit])
        self._by_bit.clear()
        return self._total

    def add(self, lines: str, times: int = 1) -> None:
        r"""Count the words of normalized "\n"-separated lines `times` times."""
        split = lines.split("\n")
        hashes = np.fromiter(map(zlib.crc32, lines.encode().split(b"\n")), dtype=np.int64, count=len(split))
        hashes |= _ABOVE_HASHES  # Each hash needs a bit that is set.
        lowest_bits = hashes & -hashes
        for bit in np.unique(lowest_bits).tolist():
            if bit < self._least_bit:
                continue
            words = " ".join([split[place] for place in np.flatnonzero(lowest_bits == bit).tolist()]).split(" ")
            counts, num_before = self._by_bit[bit], len(self._by_bit[bit])
            for _ in range(times):
                counts.update(words)
            if bit == self._least_bit:
                self._characters += _num_characters(islice(reversed(counts), len(counts) - num_before))
        # The words of the least bit come from half of the counted lines.
        while 2 * self._characters > _MAX_COUNTED_WORDS * _MEAN_CHARACTERS:
            del self._by_bit[self._least_bit]
            self._least_bit *= 2
            self._characters = _num_characters(self._by_bit[self._least_bit])

    def add_characters(self, lines: str) -> None:
        """Add characters to the required vocabulary without counting their words."""
        self._seen.update(lines)

    def characters(self) -> str:
        """Return all added characters except white space, in code-point order."""
        return normalize_white_space("".join(sorted(self._seen))).replace(" ", "").replace("\n", "")

    def character_counts(self, without: Sequence[str] = ()) -> Counter[str]:
        """Return how often each character occurs in the counted words, outside the strings `without`."""
        # Of two strings of which one begins the other, the longer one has to match.
        left_out = re.compile("|".join(map(re.escape, sorted(without, key=len, reverse=True))) or r"(?!)")
        totals: Counter[str] = Counter()
        for word, count in self.counts.items():
            for character in left_out.sub("", word):
                totals[character] += count
        return totals


def _num_characters(words: Iterable[str]) -> int:
    lengths = list(map(len, words))
    return sum(lengths) + len(lengths)


def train_on_words(words: WordCounts, settings: CorpusSettings) -> bytes:
    """Train a tokenizer of type `corpus.model_type` on the words and characters of a text. The result is deterministic.

    The pieces of type `word` are the most frequent words. For the other types, a character coverage below 1 leaves out
    the least frequent characters. With byte fallback, a piece for each byte spells the characters that have no piece of
    their own. Even with a coverage of 1, these are all characters that occur fewer than `MIN_CHARACTER_COUNT` times:
    their embeddings could not be learned, and the embeddings of bytes are learned only if some text is spelled in
    bytes. User symbols are matched before anything else, the longest first.

    `corpus.vocabulary_size` includes special ids, user symbols, bytes and single characters. The result is the bytes of
    a sentencepiece model. The GIL is released.

    Raises InputError if the text is too small, or has too many characters, for this vocabulary size.
    """
    size, options = settings.vocabulary_size, _options(words, settings)
    with rule_file(lowercase_rules() if settings.lowercase else {}) as rules:
        options |= rules
        try:
            model = _train(words, options)
        except RuntimeError as error:
            try:
                largest = Tokenizer(_train(words, options | {"hard_vocab_limit": False})).vocabulary_size
            except RuntimeError:
                raise InputError(
                    f"corpus.vocabulary_size: {size} is too small for the characters that make up"
                    f" {options['character_coverage']:.2%} of the text; raise it, or lower corpus.character_coverage"
                ) from error
            raise _too_large(size, largest) from error
    # The text alone decides which characters are pieces: sentencepiece returns a model of another size.
    if (found := Tokenizer(model).vocabulary_size) > size:
        raise InputError(f"corpus.vocabulary_size: {size} is too small for the text's characters; set {found}")
    if found < size:
        raise _too_large(size, found)
    return _without_rule_path(model) if settings.lowercase else model


def _too_large(size: int, largest: int) -> InputError:
    return InputError(
        f"corpus.vocabulary_size: {size} pieces are more than the training text allows; the largest that works is"
        f" {largest}"
    )


def _word_options(words: WordCounts, settings: CorpusSettings) -> PlainValues:
    """Return the training options for pieces that are whole words.

    Raises InputError if a word is longer than sentencepiece reads, or the vocabulary has no room for words.
    """
    # sentencepiece finds a word with its space only, and so a symbol as well.
    symbols = [SPACE_MARK + symbol for symbol in settings.user_symbols]
    if too_long := [word for word in words.counts if len(word.encode()) > LONGEST_TOKEN]:
        raise InputError(
            f"corpus.train: a token of {len(too_long[0]):,} characters, which begins with {too_long[0][:40]!r}, is"
            f" longer than sentencepiece reads ({LONGEST_TOKEN:,} bytes); split it, or remove its line"
        )
    smallest = NUM_SPECIAL_IDS + len(symbols) + 1
    if settings.vocabulary_size < smallest:
        raise InputError(
            f"corpus.vocabulary_size: {settings.vocabulary_size} leaves no room for tokens of the text; set at least"
            f" {smallest}"
        )
    # With less coverage, sentencepiece would leave out words with rare characters.
    options: PlainValues = {"vocab_size": settings.vocabulary_size, "model_type": "word", "character_coverage": 1.0}
    return options | ({"user_defined_symbols": symbols} if symbols else {})


def _options(words: WordCounts, settings: CorpusSettings) -> PlainValues:
    """Return the training options that depend on the settings, except those for lower-casing.

    Raises InputError if the text has no words, or more characters than the vocabulary has room for.
    """
    user_symbols, byte_fallback = settings.user_symbols, settings.byte_fallback
    known, is_word = words.characters(), settings.model_type == "word"
    if not (any(map(_is_learned, words.counts)) if is_word else known.replace(RESERVED_CHARACTER, "")):
        raise InputError("corpus.train: the text has no words to train a tokenizer on")
    if is_word:
        return _word_options(words, settings)
    counts = words.character_counts(user_symbols) if byte_fallback else dict.fromkeys(known, MIN_CHARACTER_COUNT)
    if settings.lowercase:
        cased, counts = counts, Counter()
        for character, count in cased.items():
            counts.update(dict.fromkeys(character.lower(), count))
    characters = {character for character, count in counts.items() if count >= MIN_CHARACTER_COUNT}
    symbols = [*user_symbols]
    if RESERVED_CHARACTER in characters and not byte_fallback:
        symbols.append(RESERVED_CHARACTER)
    learnable = "".join(sorted(characters - {RESERVED_CHARACTER, *symbols}))
    size, coverage = settings.vocabulary_size, settings.character_coverage
    options: PlainValues = {"character_coverage": coverage, "model_type": settings.model_type}
    # For `char`, a smaller limit would leave out characters. sentencepiece takes a step for each piece of its limit.
    most = NUM_SPECIAL_IDS + 1 + NUM_BYTES + len(symbols) + len(counts)
    options["vocab_size"] = most if settings.model_type == "char" else size
    # In text with few spaces, a lower coverage would leave out the space. The bytes of `bpe` stay as they were.
    required = "" if settings.model_type == "bpe" else SPACE_MARK
    if coverage >= 1:
        required += learnable
    if symbols:
        options["user_defined_symbols"] = symbols
    if byte_fallback:
        options["byte_fallback"] = True
    if settings.split_digits:
        options["split_digits"] = True
    if coverage >= 1:
        # sentencepiece adds the most frequent of the other characters until this much of the text is covered, and
        # accepts no less.
        options["character_coverage"] = 0.98 if byte_fallback else 1.0
        # The vocabulary also has the special ids and the space.
        smallest = NUM_SPECIAL_IDS + 1 + NUM_BYTES * byte_fallback + len(symbols) + len(learnable)
        if size < smallest:
            others = [f"{NUM_BYTES} bytes"] * byte_fallback + [f"{len(user_symbols)} user symbols"] * bool(user_symbols)
            raise InputError(
                f"corpus.vocabulary_size: {size} is too small for the text's"
                f" {' and '.join([f'{len(characters)} distinct characters', *others])}; set at least {smallest}, or"
                " lower corpus.character_coverage"
            )
    return options | ({"required_chars": required} if required else {})


def _is_learned(word: str) -> bool:
    """Return whether sentencepiece reads a word, which it does not if the word has the character that it reserves."""
    return bool(word) and RESERVED_CHARACTER not in word


def _train(words: WordCounts, options: PlainValues) -> bytes:
    import sentencepiece  # as in `Tokenizer`

    longest = LONGEST_TOKEN if options["model_type"] == "word" else _LONGEST_PART
    # sentencepiece sorts the words, so their order does not matter.
    lines = (
        f"{word[start : start + longest]}\t{count}"
        for word, count in words.counts.items()
        if count and _is_learned(word)
        for start in range(0, len(word), longest)
    )
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        input_format="tsv",
        pad_id=PAD_ID,
        unk_id=UNK_ID,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        max_sentencepiece_length=MAX_PIECE_CHARACTERS,
        # The model contains its training options, so a number that depends on the machine would change its bytes.
        num_threads=16,
        minloglevel=2,
        **{"normalization_rule_name": "identity", **options},
    )
    return model.getvalue()


@contextmanager
def rule_file(rules: Mapping[str, str]) -> Iterator[PlainValues]:
    """Yield the training options that replace characters by the text that `rules` maps them to."""
    if not rules:
        yield {}
        return
    with tempfile.NamedTemporaryFile("w", suffix=".tsv", encoding="ascii") as file:
        try:
            for character, text in rules.items():
                file.write(f"{ord(character):X}\t{' '.join(f'{ord(other):X}' for other in text)}\n")
            file.flush()
        except OSError as error:
            raise InputError(f"{file.name}: {error.strerror}; make room, or set TMPDIR to another folder") from error
        yield {"normalization_rule_tsv": file.name}


def lowercase_rules() -> dict[str, str]:
    """Return the characters that lower-casing changes, with their lower-case text."""
    return {character: character.lower() for character in map(chr, range(0x110000)) if character.lower() != character}


def _without_rule_path(model: bytes) -> bytes:
    """Remove the name of the temporary file, which differs every time, from the model."""
    proto = proto_of(model)
    proto.normalizer_spec.ClearField("normalization_rule_tsv")
    return proto.SerializeToString(deterministic=True)


def standalone_model(tokenizer: Tokenizer) -> bytes:
    """Return the tokenizer's sentencepiece model with white-space normalization inside.

    It encodes every text as `Tokenizer.encode` does, except for NUL, for which sentencepiece has no rules.
    """
    import sentencepiece  # as in `Tokenizer`

    rules = lowercase_rules() if tokenizer.lowercase else {}
    rules |= {character: " " for character in SPACE_LIKE + "\n" if character != "\0"}
    rules_only = io.BytesIO()
    with rule_file(rules) as options:
        # sentencepiece compiles rules only when it trains a model.
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a"]),
            model_writer=rules_only,
            model_type="char",
            vocab_size=5,
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
    proto = tokenizer.proto()
    compiled = proto_of(rules_only.getvalue()).normalizer_spec
    proto.normalizer_spec.precompiled_charsmap = compiled.precompiled_charsmap
    return proto.SerializeToString(deterministic=True)
