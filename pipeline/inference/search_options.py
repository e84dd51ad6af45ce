"""Search settings that a command or a caller gives in place of the recipe's."""

import argparse
from dataclasses import dataclass, replace

from data_module.errors import InputError
from model.settings import STOP_RULES, DecodingSettings


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
    """Settings of a search; None for the recipe's. See `DecodingSettings`."""

    beam_size: int | None = None
    length_penalty: float | None = None
    stop_rule: str | None = None

    @classmethod
    def given(cls, arguments: argparse.Namespace) -> "SearchOptions":
        """Return the values of the arguments that `add_search_arguments` adds."""
        return cls(arguments.beam, arguments.length_penalty, arguments.stop_rule)

    def in_place_of(self, recipe: DecodingSettings) -> DecodingSettings:
        """Return the recipe's settings with these in place of its own.

        Raises:
            InputError: a value is out of bounds.
        """
        if self.beam_size is not None and self.beam_size < 1:
            raise InputError(f"--beam {self.beam_size}: must be 1 or more")
        if self.length_penalty is not None and not 0.0 <= self.length_penalty < float("inf"):
            raise InputError(f"--length-penalty {self.length_penalty}: must be 0 or more")
        if self.stop_rule is not None and self.stop_rule not in STOP_RULES:
            raise InputError(f"--stop-rule {self.stop_rule}: must be {' or '.join(STOP_RULES)}")
        return replace(recipe, **{name: value for name, value in vars(self).items() if value is not None})
