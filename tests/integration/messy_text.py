"""Text as people type it, made from clean text: `python -m tests.integration.messy_text KIND < CLEAN > MESSY`.

Kinds: `lower` and `upper` (case), `typos` (in one of six words of four letters and more, two inner neighbours swapped),
`unpunctuated` (no full stop, question or exclamation mark at the end), `address` (a web address at the end: give it to
the references too). What comes out is a function of the input alone.
"""

import random
import sys
from collections.abc import Callable

ADDRESS = "https://example.org/a?b=1"


def with_typos(line: str) -> str:
    """In one of six words that are long enough, two letters beside each other swap places; first and last stay."""
    chance = random.Random(line)

    def typed(word: str) -> str:
        if len(word) < 4 or not word.isalpha() or chance.random() >= 1 / 6:
            return word
        place = chance.randrange(1, len(word) - 2)
        return word[:place] + word[place + 1] + word[place] + word[place + 2 :]

    return " ".join(map(typed, line.split(" ")))


KINDS: dict[str, Callable[[str], str]] = {
    "lower": str.lower,
    "upper": str.upper,
    "typos": with_typos,
    "unpunctuated": lambda line: line.rstrip(".!?"),
    "address": lambda line: f"{line} {ADDRESS}",
}


def main() -> None:
    """Standard input to standard output, line by line."""
    if len(sys.argv) != 2 or sys.argv[1] not in KINDS:
        sys.exit(f"messy_text: name one of {', '.join(KINDS)}")
    for line in sys.stdin:
        print(KINDS[sys.argv[1]](line.rstrip("\n")))


if __name__ == "__main__":
    main()
