"""Make clean text look hand-typed: `python -m tests.integration.messy_text KIND < CLEAN > MESSY`.

Kinds: `lower` and `upper` change the case; `typos` swaps two adjacent inner letters in about one of six words with four
or more letters; `unpunctuated` removes `.`, `!` and `?` at the end; `address` appends a web address (append it to the
references too). The output depends on the input only.
"""

import random
import sys
from collections.abc import Callable

ADDRESS = "https://example.org/a?b=1"


def with_typos(line: str) -> str:
    """Swap two adjacent inner letters in about one of six words with four or more letters."""
    rng = random.Random(line)

    def with_typo(word: str) -> str:
        if len(word) < 4 or not word.isalpha() or rng.random() >= 1 / 6:
            return word
        index = rng.randrange(1, len(word) - 2)
        return word[:index] + word[index + 1] + word[index] + word[index + 2 :]

    return " ".join(map(with_typo, line.split(" ")))


KINDS: dict[str, Callable[[str], str]] = {
    "lower": str.lower,
    "upper": str.upper,
    "typos": with_typos,
    "unpunctuated": lambda line: line.rstrip(".!?"),
    "address": lambda line: f"{line} {ADDRESS}",
}


def main() -> None:
    """Convert standard input line by line."""
    if len(sys.argv) != 2 or sys.argv[1] not in KINDS:
        sys.exit(f"messy_text: name one of {', '.join(KINDS)}")
    for line in sys.stdin:
        print(KINDS[sys.argv[1]](line.rstrip("\n")))


if __name__ == "__main__":
    main()
