"""Options of a search: settings in place of the recipe's, sampling, and prefixes of source sentences.

The first word of a source sentence, its prefix, tells a model of several languages or domains which one to write; see
`data_module.settings.TextSource.prefix`.
"""

import argparse
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from data_module.errors import InputError
from data_module.system.files import PlainValues
from data_module.tokenization.tokenizer import is_blank
from model.settings import LARGEST_SEARCH, STOP_RULES, DecodingSettings

if TYPE_CHECKING:
    from model.beyond.sampling import Sampling


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--beam`, `--length-penalty` and `--stop-rule`, which `SearchOptions.given` reads."""
    parser.add_argument("--beam", type=int, help="beam size; 1 is greedy search (default: the recipe's)")
    parser.add_argument("--length-penalty", type=float, help="exponent alpha of the penalty (default: the recipe's)")
    parser.add_argument(
        "--stop-rule",
        help="exact: search until no open hypothesis can win; first: until as many as the beam have ended, which is "
        "faster (default: the recipe's)",
    )


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search, which replace the recipe's settings unless they are None. See `DecodingSettings`.

    Raises InputError for a value that is out of bounds for any model.
    """

    beam_size: int | None = None
    length_penalty: float | None = None
    stop_rule: str | None = None
    n_best: int = 1
    """Number of translations of each sentence."""
    sampling: "Sampling | None" = None
    """How to draw each translation at random; None for a search."""

    def __post_init__(self) -> None:
        if self.beam_size is not None and not 1 <= self.beam_size <= LARGEST_SEARCH:
            raise InputError(f"--beam {self.beam_size}: must be 1 to {LARGEST_SEARCH:,}")
        if self.length_penalty is not None and not 0.0 <= self.length_penalty < float("inf"):
            raise InputError(f"--length-penalty {self.length_penalty}: must be 0 or more")
        if self.stop_rule is not None and self.stop_rule not in STOP_RULES:
            raise InputError(f"--stop-rule {self.stop_rule}: must be {' or '.join(STOP_RULES)}")
        if self.n_best < 1:
            raise InputError(f"--n-best {self.n_best}: must be 1 or more")

    @classmethod
    def given(cls, arguments: argparse.Namespace) -> "SearchOptions":
        """Return the values of the arguments that `add_search_arguments` adds."""
        return cls(arguments.beam, arguments.length_penalty, arguments.stop_rule)

    def in_place_of(self, recipe: DecodingSettings) -> DecodingSettings:
        """Return the recipe's settings, with these options in place of its own.

        Raises InputError if more translations of a sentence are asked for than the beam has.
        """
        given = {name: getattr(self, name) for name in ("beam_size", "length_penalty", "stop_rule")}
        settings = replace(recipe, **{name: value for name, value in given.items() if value is not None})
        if self.n_best > settings.beam_size:
            raise InputError(f"--n-best {self.n_best}: is more than the beam, {settings.beam_size}; raise --beam")
        return settings


BY_RECIPE = SearchOptions()
"""The search that the recipe describes."""
_SAMPLING: dict[str, tuple[type, str, str]] = {
    "temperature": (float, "T", "divide logits by T: below 1, probable pieces are drawn more often (default: 1)"),
    "top_k": (int, "K", "draw each piece from the K most probable ones (default: all)"),
    "top_p": (float, "P", "draw each piece from the fewest that have P of the probability together (default: 1)"),
    "seed": (int, "N", "seed of the random draws (default: 0)"),
}


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--sample` and its settings, which `given_sampling` reads."""
    parser.add_argument("--sample", action="store_true", help="draw each translation at random, instead of a search")
    for name, (kind, metavar, text) in _SAMPLING.items():
        parser.add_argument(_option(name), type=kind, metavar=metavar, help=f"with --sample, {text}")


def given_sampling(arguments: argparse.Namespace) -> "Sampling | None":
    """Return the values of the arguments that `add_sampling_arguments` adds; None without `--sample`.

    Raises InputError if a value is out of bounds, needs `--sample`, or an option of a search is given too.
    """
    given = {name: getattr(arguments, name) for name in _SAMPLING if getattr(arguments, name) is not None}
    if not arguments.sample:
        for name in given:
            raise InputError(f"{_option(name)}: is for sampling; add --sample, or omit it")
        return None
    for name in ("beam", "n_best", "stop_rule"):
        if getattr(arguments, name) is not None:
            raise InputError(f"{_option(name)}: is for a search; omit it, or --sample, which draws one translation")
    from model.beyond.sampling import Sampling, check_sampling  # torch, which a wrong option does not wait for

    sampling = Sampling(**given)
    try:
        check_sampling(sampling)
    except ValueError as error:
        name, rest = str(error).split(maxsplit=1)
        raise InputError(f"{_option(name)} {rest.replace(' must', ': must', 1)}") from None
    return sampling


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_prefix_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--prefix`."""
    parser.add_argument("--prefix", help="a word of the model, such as '>>de<<', to put before each source sentence")


@dataclass(frozen=True)
class Prefixes:
    """The prefixes of a model."""

    trained: tuple[str, ...] = ()
    """Prefixes of its training text, in the order of the recipe."""
    symbols: tuple[str, ...] = ()
    """All words that can be a prefix: the recipe's `corpus.user_symbols`."""
    always: bool = False
    """Whether all training text had a prefix."""

    @classmethod
    def of_corpus(cls, corpus: PlainValues) -> "Prefixes":
        """Return the prefixes of a model, by the section `corpus` of its recipe."""
        used = [text["prefix"] for text in corpus["train"]]
        trained = tuple(dict.fromkeys(prefix for prefix in used if prefix is not None))
        return cls(trained, tuple(corpus["user_symbols"]), bool(used) and None not in used)

    def require(self, prefix: str | None) -> None:
        """Raise InputError if a prefix is given that the model does not know."""
        if prefix is None or prefix in self.symbols:
            return
        known = " ".join(self.trained or self.symbols)
        way_out = f"its prefixes are {known}" if known else "it was trained without prefixes, omit the option"
        raise InputError(f"--prefix {prefix}: is no prefix of this model; {way_out}")

    def is_missing(self, sentence: str) -> bool:
        """Return whether a sentence lacks a prefix, and the model was trained only on sentences with one."""
        return self.always and not is_blank(sentence) and sentence.split(maxsplit=1)[0] not in self.trained


def with_prefix(prefix: str | None, sentence: str) -> str:
    """Return a sentence with the prefix before it, if there is one and the sentence is not empty."""
    return sentence if prefix is None or is_blank(sentence) else f"{prefix} {sentence}"
