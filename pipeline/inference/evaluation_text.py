"""The text that `evaluate` scores: two files, or the recipe's test text with its sources apart."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from data_module.corpus.sources import source_names
from data_module.errors import InputError
from data_module.readers.pairs import open_reader, read_pairs
from data_module.settings import CorpusSettings
from pipeline.config.schema import Checker
from pipeline.inference.prefixes import Prefixes, with_prefix
from pipeline.inference.text_io import paired_texts


class TextPart(NamedTuple):
    """The text of one source."""

    name: str
    prefix: str | None
    sources: list[str]
    """Without the prefix."""
    references: list[str]


class EvaluationText(NamedTuple):
    """Sentences and their references."""

    name: str
    """The file of the references, or the recipe's key."""
    parts: list[TextPart]

    @property
    def references(self) -> list[str]:
        """The references of all parts."""
        return [line for part in self.parts for line in part.references]

    def sources(self, prefixes: Prefixes) -> list[str]:
        """Return the source sentences for a model: with their prefix, unless the model does not know it."""
        return [
            line
            for part in self.parts
            for line in with_prefix(part.prefix if part.prefix in prefixes.symbols else None, part.sources)
        ]

    def unknown_prefixes(self, prefixes: Prefixes) -> list[str]:
        """Return the prefixes of this text that a model does not know."""
        found = dict.fromkeys(part.prefix for part in self.parts if part.prefix is not None)
        return [prefix for prefix in found if prefix not in prefixes.symbols]

    def by_source(self) -> dict[str, list[int]]:
        """Return the indices of the sentences of each source, by name; empty if there are fewer than two sources."""
        indices: dict[str, list[int]] = {}
        start = 0
        for part in self.parts:
            indices.setdefault(part.name, []).extend(range(start, start + len(part.sources)))
            start += len(part.sources)
        return indices if len(indices) > 1 else {}


def text_of_files(source: Path, reference: Path, prefix: str | None) -> EvaluationText:
    """Return the text of two files.

    Raises:
        InputError: see `paired_texts`.
    """
    sources, references = paired_texts(source, reference)
    return EvaluationText(str(reference), [TextPart(str(source), prefix, sources, references)])


def text_of_recipe(corpus: dict[str, Any]) -> EvaluationText:
    """Return the text of `corpus.test`, each source once. Pairs with invalid UTF-8 are left out, or an error.

    Args:
        corpus: the section `corpus` of the recipe in a checkpoint.

    Raises:
        InputError: the recipe names no test text, or a source cannot be read or has sides of unequal length.
    """
    checker = Checker({})
    settings = checker.dataclass(corpus, CorpusSettings, "corpus.")
    if checker.mistakes:
        raise InputError(f"the recipe's corpus.test cannot be read: {'; '.join(checker.mistakes)}")
    assert isinstance(settings, CorpusSettings)
    if not settings.test:
        raise InputError("the recipe has no corpus.test; give a text to score with --source FILE and --reference FILE")
    parts = []
    for name, text in zip(source_names(settings.test), settings.test, strict=True):
        open_reader(text, settings).count_pairs()  # Raises for files with unequal numbers of lines.
        part = TextPart(name, text.prefix, [], [])
        for chunk in read_pairs(replace(text, prefix=None), settings):
            valid = sorted(set(range(len(chunk.source))) - set(chunk.invalid))
            part.sources.extend(chunk.source[i] for i in valid)
            part.references.extend(chunk.target[i] for i in valid)
        parts.append(part)
    return EvaluationText("corpus.test", parts)
