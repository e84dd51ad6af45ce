"""Prefixes of source sentences: which ones a model was trained with, and which sentences lack one.

A model of several languages or domains is told which one to write by the first word of the source sentence; see
`data_module.settings.TextSource.prefix`.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from data_module.errors import InputError


def add_prefix_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--prefix`."""
    parser.add_argument("--prefix", help="a word of the model, such as '>>de<<', to put before each source sentence")


@dataclass(frozen=True)
class Prefixes:
    """The prefixes of a model."""

    trained: tuple[str, ...] = ()
    """Those of its training text, in the order of the recipe."""
    symbols: tuple[str, ...] = ()
    """All words that can be a prefix: the recipe's `corpus.user_symbols`."""
    always: bool = False
    """Whether all training text had one."""

    @classmethod
    def of_corpus(cls, corpus: dict[str, Any]) -> "Prefixes":
        """Return the prefixes of the model of a recipe.

        Args:
            corpus: the section `corpus` of the recipe in a checkpoint.
        """
        found = [text["prefix"] for text in corpus["train"]]
        trained = tuple(dict.fromkeys(prefix for prefix in found if prefix is not None))
        return cls(trained, tuple(corpus["user_symbols"]), bool(found) and None not in found)

    def check(self, prefix: str | None) -> None:
        """Raise InputError if a prefix is given that the model does not know."""
        if prefix is None or prefix in self.symbols:
            return
        known = " ".join(self.trained or self.symbols)
        way_out = f"its prefixes are {known}" if known else "it was trained without prefixes, omit the option"
        raise InputError(f"--prefix {prefix}: is no prefix of this model; {way_out}")

    def is_missing(self, sentence: str) -> bool:
        """Return whether a sentence begins with no prefix, and the model was trained on sentences with one only."""
        first = sentence.split(maxsplit=1)[:1]
        return self.always and bool(first) and first[0] not in self.trained

    @property
    def missing_message(self) -> str:
        """What to print about sentences for which `is_missing` holds."""
        return f"without one of the prefixes that the model was trained with ({' '.join(self.trained)})"


def with_prefix(prefix: str | None, sentences: Iterable[str]) -> Iterable[str]:
    """Yield the sentences with the prefix, if there is one, before those that are not empty."""
    for sentence in sentences:
        yield f"{prefix} {sentence}" if prefix is not None and sentence.strip() else sentence
