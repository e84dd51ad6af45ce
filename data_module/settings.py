"""The recipe's sections on training data: `corpus:` and `batches:`.

These dataclasses are the recipe's schema: other keys are refused, with the nearest name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from data_module.registry import LARGEST, check_range
from data_module.system.files import PathText

_LANGUAGES = ("source_language", "target_language")
_PLACES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("source", "target"): (),
    ("tsv",): (),
    ("dataset", "subset", "split"): _LANGUAGES,
    ("reader", "path"): _LANGUAGES,
}
"""The keys of a text source that say where its text is, and those that only this kind of place has."""


def keys_of_other_places(text: Mapping[str, object]) -> set[str]:
    """Return the keys that a text source does not have if it names a place of its kind; empty if it names none."""
    own = {key for place, more in _PLACES.items() if any(map(text.get, place)) for key in (*place, *more)}
    return {key for place, more in _PLACES.items() for key in (*place, *more)} - own if own else own


@dataclass(frozen=True)
class TextSource:
    """Parallel text: two files of one sentence per line, one tab-separated file of pairs, a data set, or another kind.

    Files may be plain or gzip-compressed (`.gz`). Paths are relative to the working folder; `~` is the home folder.
    """

    source: PathText | None = None
    """Source sentences, one per line."""
    target: PathText | None = None
    """Their translations: line i translates line i of `source`."""
    tsv: PathText | None = None
    """A file of lines with two columns: source, tab, target."""
    dataset: PathText | None = None
    """A Hugging Face data set: its name on the hub, or a folder of parquet or JSON."""
    subset: str | None = None
    """The data set's subset, if it has several."""
    split: str | None = None
    """The data set's split, required."""
    source_language: str | None = None
    """Source language in this data set; if null, `corpus.source_language`."""
    target_language: str | None = None
    """Target language in this data set; if null, `corpus.target_language`."""
    repeat: int = 1
    """How many times the text occurs in the corpus."""
    weight: float = 1.0
    """How many times an epoch has the training text: 2.5 is two copies and a random half of its pairs."""
    reader: str | None = None
    """A reader that an extension has registered; see docs/extending.md."""
    path: PathText | None = None
    """The file that this reader reads."""
    prefix: str | None = None
    """One of `corpus.user_symbols`, put before every source sentence, such as `>>de<<`."""
    name: str | None = None
    """Name in reports of validation and `evaluate`; if null, made from the prefix, else from the file."""

    def __post_init__(self) -> None:
        given = [name for place in _PLACES for name in place if getattr(self, name)]
        allowed = ["source target", "tsv", "dataset split", "dataset subset split", "reader path"]
        if " ".join(given) not in allowed:
            raise ValueError(
                "a text source is `source` and `target`, or `tsv`, or `dataset` and `split`, or `reader` and `path`;"
                f" this one has {' and '.join(given) or 'none of them'}"
            )
        if (self.source_language or self.target_language) and not (self.dataset or self.reader):
            raise ValueError("`source_language` and `target_language` of a text source are for data sets; remove them")
        if not 1 <= self.repeat <= LARGEST:
            raise ValueError(f"`repeat` of a text source is {self.repeat}; it must be 1 or more, up to {LARGEST:,}")
        if self.name is not None and not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"`name` of a text source is {self.name!r}; use letters, digits, `_`, `-` and `.`")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"`weight` of a text source is {self.weight}; it must be above 0")


@dataclass(frozen=True)
class BpeDropout:
    """BPE-dropout (Provilkov, Emelianenko and Voita 2020): the probability of leaving out a merge, for each side."""

    source: float = 0.0
    """Probability of leaving out a merge of source text (Provilkov et al.: 0.1, for Chinese and Japanese 0.6)."""
    target: float = 0.0
    """Probability of leaving out a merge of target text."""

    def __post_init__(self) -> None:
        check_range(self, "corpus.bpe_dropout", "from 0 to below 1", lambda p: 0 <= p < 1, "source", "target")


@dataclass(frozen=True)
class NoiseSettings:
    """Noise in training text, drawn anew for each variant: for each kind, the fraction of pairs that get it.

    `data_module.corpus.noise` applies it, in the order given here. Validation text has no noise.
    """

    lower_case: float = 0.0
    """Fraction of pairs that are lower-cased. A pair gets at most one of the three changes of case."""
    title_case: float = 0.0
    """Fraction of pairs with each word capitalized."""
    upper_case: float = 0.0
    """Fraction of pairs that are upper-cased."""
    typos: float = 0.0
    """Fraction of sources with typos, in about one of six words of four letters or more."""
    no_final_punctuation: float = 0.0
    """Fraction of sources without their final punctuation, which the target keeps."""
    web_address: float = 0.0
    """Fraction of pairs with a web address on both sides."""
    email_address: float = 0.0
    """Fraction of pairs with an e-mail address on both sides."""
    number: float = 0.0
    """Fraction of pairs with a number, time, date or telephone number on both sides."""
    emoji: float = 0.0
    """Fraction of pairs with one to three emoji on both sides. Without `corpus.byte_fallback` they are lost."""

    def __post_init__(self) -> None:
        kinds = (kind.name for kind in fields(self))
        check_range(self, "corpus.noise", "from 0 to 1", lambda share: 0 <= share <= 1, *kinds)
        if (cased := self.lower_case + self.title_case + self.upper_case) > 1 + 1e-9:
            raise ValueError(
                f"corpus.noise.lower_case, title_case and upper_case are {cased:g} together; a pair gets at most one of"
                " them, so their sum must be 1 or less"
            )


@dataclass(frozen=True)
class CorpusSettings:
    """What `prepare` reads, and how it cleans and tokenizes it.

    A change of any of these requires another corpus, except for `folder`.
    """

    folder: PathText
    """Folder that `prepare` writes the corpus to."""
    train: list[TextSource]
    """Text to train on."""
    validation: list[TextSource]
    """Text to validate on during training."""
    test: list[TextSource] = field(default_factory=list)
    """Text that `evaluate` scores. It is not part of the corpus; training text is compared with it."""
    source_language: str = "source"
    """Name of the source language in a data set."""
    target_language: str = "target"
    """Name of the target language in a data set. BLEU and `evaluate --paper` tokenize by it, and exports name it."""
    model_type: Literal["bpe", "unigram", "word", "char"] = "bpe"
    """What a piece is: part of a word (`bpe`, `unigram`), a token between two spaces (`word`), or a character."""
    vocabulary_size: int = 37_000
    """Number of pieces of the joint vocabulary of both languages, special pieces included."""
    tokenizer: PathText | None = None
    """A run, a bundle or a sentencepiece model whose vocabulary is used; if null, one is learned from the text."""
    tokenizer_sentences: int = 10_000_000
    """Maximum number of training sentences, a seeded sample, that the vocabulary is learned from."""
    character_coverage: float = 1.0
    """Fraction of the training text whose characters get a piece of their own, from 0.98 to 1."""
    byte_fallback: bool = False
    """Spell characters without a piece of their own by their bytes. Takes 256 pieces."""
    split_digits: bool = False
    """Make each of the digits 0 to 9 a piece of its own."""
    user_symbols: list[str] = field(default_factory=list)
    """Placeholders and tags, such as `__NAME__` or `<b>`: each is one piece, even inside a word, and keeps its case."""
    lowercase: bool = False
    """Lower-case both sides in the tokenizer, and so the output too."""
    max_tokens: int = 256
    """Drop pairs with more pieces than this on either side, also from validation text (with a warning)."""
    max_length_ratio: float | None = None
    """Drop training pairs whose lengths in pieces differ by more than this factor."""
    drop_invalid_utf8: bool = False
    """Drop pairs with invalid UTF-8. If false, it is an error."""
    drop_duplicates: bool = False
    """Drop training pairs that occurred before."""
    drop_overlap: bool = False
    """Drop training pairs that also occur in the validation or test text. If false, only count them and warn."""
    seed: int = 1
    """Seed of the sample that trains the tokenizer, and of what variants draw."""
    variants: int = 1
    """Number of encodings of the training text, each with its own noise and BPE-dropout; epochs take turns."""
    bpe_dropout: BpeDropout = field(default_factory=BpeDropout)
    """Segment words of training text at random; see `variants`."""
    noise: NoiseSettings = field(default_factory=NoiseSettings)
    """Noise in training text: fractions of pairs, by kind; see `variants`."""

    def is_varied(self) -> bool:
        """Return whether training text gets noise or a random segmentation."""
        return self.bpe_dropout != BpeDropout() or self.noise != NoiseSettings()

    def texts(self) -> list[TextSource]:
        """Return the sources of all splits."""
        return [*self.train, *self.validation, *self.test]


@dataclass(frozen=True)
class BatchSettings:
    """How pairs are batched (section 5.1: about 25,000 source and 25,000 target tokens per optimizer step)."""

    batch_tokens: int = 25_000
    """Maximum number of tokens per side in one optimizer step, over all ranks."""
    max_tokens_per_device: int | None = None
    """Maximum number of tokens per side in a micro-batch. If null, a device's part of a step is one micro-batch."""
    workers: int = 2
    """Number of loader processes per rank."""

    def __post_init__(self) -> None:
        check_range(self, "batches", "1 or more", lambda count: count >= 1, "batch_tokens", "max_tokens_per_device")
        check_range(self, "batches", "from 0 to 1,000", lambda count: 0 <= count <= 1000, "workers")
