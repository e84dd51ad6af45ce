"""The recipe's sections that say what is trained on: `corpus:` and `batches:`.

These typed signatures are the recipe's schema: a key that is not here is refused, with the nearest name.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TextSource:
    """Parallel text: two files of one sentence a line, one tab-separated file of pairs, or a data set.

    Files may be plain or gzip-compressed (`.gz`). Paths are relative to the working folder.
    """

    source: str | None = None
    target: str | None = None
    tsv: str | None = None
    dataset: str | None = None
    """A Hugging Face data set with a `translation` column: its name on the hub, or a folder of parquet or JSON."""
    subset: str | None = None
    """Which of the data set's parts, if it has several."""
    split: str | None = None
    """Which of the data set's splits."""
    repeat: int = 1

    def __post_init__(self) -> None:
        given = [name for name in ("source", "target", "tsv", "dataset", "subset", "split") if getattr(self, name)]
        if given not in (["source", "target"], ["tsv"], ["dataset", "split"], ["dataset", "subset", "split"]):
            raise ValueError(
                "a text source is `source` and `target`, or `tsv`, or `dataset` and `split`;"
                f" this one has {' and '.join(given) or 'none of them'}"
            )
        if self.repeat < 1:
            raise ValueError(f"`repeat` of a text source is {self.repeat}; it must be 1 or more")


@dataclass(frozen=True)
class CorpusSettings:
    """What `prepare` reads and how it cleans and tokenizes; a change of any of these makes another corpus."""

    folder: str
    train: list[TextSource]
    validation: list[TextSource]
    test: list[TextSource] = field(default_factory=list)
    """Text that will be scored on: training text is compared with it. It is not part of the corpus."""
    source_language: str = "source"
    """A data set's sentences are taken by this name."""
    target_language: str = "target"
    vocabulary_size: int = 37_000
    tokenizer_sentences: int = 10_000_000
    """At most this many training sentences, a seeded sample, train the tokenizer."""
    character_coverage: float = 1.0
    """Characters that make up this share of the text get a piece of their own; with 1 none is unknown."""
    lowercase: bool = False
    max_tokens: int = 256
    """A pair with more pieces than this on either side is dropped, from validation too (with a warning)."""
    max_length_ratio: float | None = None
    """A training pair whose sides differ by more than this factor in pieces is dropped."""
    drop_invalid_utf8: bool = False
    """Drop pairs with invalid UTF-8; otherwise it is an error that names file and line."""
    drop_duplicates: bool = False
    drop_overlap: bool = False
    """Drop training pairs that also occur in the validation or test text; otherwise counted and warned of."""
    seed: int = 1

    def texts(self) -> list[TextSource]:
        """Return the sources of all splits."""
        return [*self.train, *self.validation, *self.test]


@dataclass(frozen=True)
class BatchSettings:
    """How pairs become optimizer steps (section 5.1: about 25,000 source and 25,000 target tokens)."""

    batch_tokens: int = 25_000
    """At most this many padded cells a side in one optimizer step, over all ranks."""
    group_tokens: int | None = None
    """At most this many padded cells a side in a group of like length; if null `batch_tokens / 8`."""
    max_tokens_per_device: int | None = None
    """A micro-batch never exceeds this many padded cells a side; `group_tokens` if null."""
    workers: int = 2
    """Loader processes a rank."""

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "group_tokens", "max_tokens_per_device"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"batches.{name} {value} is not 1 or more")
        if self.workers < 0:
            raise ValueError(f"batches.workers {self.workers} is not 0 or more")
