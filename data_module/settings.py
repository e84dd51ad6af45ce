"""The recipe's sections on training data: `corpus:` and `batches:`.

These dataclasses are the recipe's schema: other keys are refused, with the nearest name.
"""

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TextSource:
    """Parallel text: two files of one sentence per line, one tab-separated file of pairs, a data set, or another kind.

    Files may be plain or gzip-compressed (`.gz`). Paths are relative to the working folder.
    """

    source: str | None = None
    """Source sentences, one per line."""
    target: str | None = None
    """Their translations: line i translates line i of `source`."""
    tsv: str | None = None
    """A file of lines with two columns: source, tab, target."""
    dataset: str | None = None
    """A Hugging Face data set with a `translation` column: its name on the hub, or a folder of parquet or JSON."""
    subset: str | None = None
    """The data set's subset, if it has several."""
    split: str | None = None
    """The data set's split."""
    source_language: str | None = None
    """Name of the source language in this data set; if null, `corpus.source_language`."""
    target_language: str | None = None
    """Name of the target language in this data set; if null, `corpus.target_language`."""
    repeat: int = 1
    """How many times the text occurs in the corpus."""
    reader: str | None = None
    """Name of a reader that an extension has registered; see docs/extending.md."""
    path: str | None = None
    """The file that this reader reads."""
    prefix: str | None = None
    """One of `corpus.user_symbols`, put before every source sentence, such as `>>de<<` for the target language."""
    name: str | None = None
    """Name in reports of validation and `evaluate`; if null, made from the prefix, else from the file."""

    def __post_init__(self) -> None:
        names = ("source", "target", "tsv", "dataset", "subset", "split", "reader", "path")
        given = [name for name in names if getattr(self, name)]
        allowed = ["source target", "tsv", "dataset split", "dataset subset split", "reader path"]
        if " ".join(given) not in allowed:
            raise ValueError(
                "a text source is `source` and `target`, or `tsv`, or `dataset` and `split`, or `reader` and `path`;"
                f" this one has {' and '.join(given) or 'none of them'}"
            )
        if (self.source_language or self.target_language) and not (self.dataset or self.reader):
            raise ValueError("`source_language` and `target_language` of a text source are for data sets; remove them")
        if self.repeat < 1:
            raise ValueError(f"`repeat` of a text source is {self.repeat}; it must be 1 or more")
        if self.name is not None and not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"`name` of a text source is {self.name!r}; use letters, digits, `_`, `-` and `.`")


@dataclass(frozen=True)
class CorpusSettings:
    """What `prepare` reads, and how it cleans and tokenizes it. Changing any of these requires another corpus."""

    folder: str
    """Folder that `prepare` writes the corpus to."""
    train: list[TextSource]
    """Text to train on."""
    validation: list[TextSource]
    """Text to validate on during training."""
    test: list[TextSource] = field(default_factory=list)
    """Text for the final evaluation. Training text is compared with it; it is not part of the corpus."""
    source_language: str = "source"
    """The name of the source language in a data set; likewise `target_language`."""
    target_language: str = "target"
    """Name of the target language in a data set. BLEU and `evaluate --paper` tokenize by it, and exports name it."""
    vocabulary_size: int = 37_000
    """Number of pieces of the joint vocabulary of both languages, special pieces included."""
    tokenizer_sentences: int = 10_000_000
    """The tokenizer is trained on at most this many training sentences, a seeded sample."""
    character_coverage: float = 1.0
    """Fraction of the text whose characters get a piece of their own; with 1 no character is unknown."""
    lowercase: bool = False
    """Lower-case both sides in the tokenizer, so that output and scores are lower-case too."""
    user_symbols: list[str] = field(default_factory=list)
    """Placeholders and tags, such as `>>de<<`, that are always one piece."""
    max_tokens: int = 256
    """Pairs with more pieces than this on either side are dropped, also from validation (with a warning)."""
    max_length_ratio: float | None = None
    """Training pairs whose lengths in pieces differ by more than this factor are dropped."""
    drop_invalid_utf8: bool = False
    """Drop pairs with invalid UTF-8. If false, invalid UTF-8 is an error that names the file and line."""
    drop_duplicates: bool = False
    """Drop training pairs that occurred before."""
    drop_overlap: bool = False
    """Drop training pairs that also occur in the validation or test text. If false, only count them and warn."""
    seed: int = 1
    """Seed of the sample that trains the tokenizer."""

    def texts(self) -> list[TextSource]:
        """Return the sources of all splits."""
        return [*self.train, *self.validation, *self.test]


@dataclass(frozen=True)
class BatchSettings:
    """How pairs are batched (section 5.1: about 25,000 source and 25,000 target tokens per optimizer step)."""

    batch_tokens: int = 25_000
    """Maximum number of tokens per side in one optimizer step, over all ranks."""
    group_tokens: int | None = None
    """Has no effect since version 0.3; accepted in recipes of older versions."""
    max_tokens_per_device: int | None = None
    """Maximum number of tokens per side in a micro-batch. If null, a device's part of a step is one micro-batch."""
    workers: int = 2
    """Number of loader processes per rank."""

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "group_tokens", "max_tokens_per_device"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"batches.{name} {value} is not 1 or more")
        if self.workers < 0:
            raise ValueError(f"batches.workers {self.workers} is not 0 or more")
