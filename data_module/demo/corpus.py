"""The demo's parallel text: generated English sentences with their German translations, in four splits.

The same seed gives the same bytes. No sentence is in two splits. The sentences of `test_new_combinations` contain
combinations of words that do not occur in training.
"""

import argparse
import random
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from data_module.demo.sentences import Author, Lexicon, Sentence
from data_module.files import atomic_file
from data_module.paths import user_path

SPLIT_SIZES = {"train": 20_000, "validation": 1_000, "test": 1_000, "test_new_combinations": 1_000}
HELD_OUT_FRACTION = 0.05
"""Fraction of all possible combinations that occur only in test_new_combinations."""


def word_forms(sentence: Sentence) -> set[str]:
    """Return the distinct words of both sides, as spelled."""
    return set(re.findall(r"\w+", sentence.english + " " + sentence.german))


def distinct_sentences(author: Author) -> Iterator[Sentence]:
    """Yield sentences endlessly, none with an English or German side that has been yielded before."""
    seen: set[str] = set()
    while True:
        sentence = author.sentence()
        if sentence.english not in seen and sentence.german not in seen:
            seen |= {sentence.english, sentence.german}
            yield sentence


def demo_corpus(seed: int = 1) -> dict[str, list[Sentence]]:
    """Return the sentences of every split.

    Every sentence of test_new_combinations has a held-out combination, and no other sentence has one. All word forms
    of the other splits occur in training.
    """
    rng, lexicon = random.Random(seed), Lexicon()
    held_out = {combination for combination in lexicon.combinations() if rng.random() < HELD_OUT_FRACTION}
    stream = distinct_sentences(Author(lexicon, rng))
    bar = tqdm(desc="writing sentences", total=sum(SPLIT_SIZES.values()), delay=2)

    def take(size: int, candidates: Iterator[Sentence]) -> list[Sentence]:
        taken = []
        for sentence in islice(candidates, size):
            taken.append(sentence)
            bar.update()
        return taken

    splits = {"train": take(SPLIT_SIZES["train"], (s for s in stream if not s.combinations & held_out))}
    known = set().union(*map(word_forms, splits["train"]))
    for name in ("validation", "test", "test_new_combinations"):
        new = name == "test_new_combinations"
        candidates = (s for s in stream if bool(s.combinations & held_out) == new and word_forms(s) <= known)
        splits[name] = take(SPLIT_SIZES[name], candidates)
    bar.close()
    return splits


def write_demo_corpus(folder: Path, seed: int = 1) -> None:
    """Write `<split>.en` and `<split>.de` of every split. Files with the right content are not written again."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, sentences in demo_corpus(seed).items():
        for suffix, lines in (("en", [s.english for s in sentences]), ("de", [s.german for s in sentences])):
            path, content = folder / f"{split}.{suffix}", "".join(f"{line}\n" for line in lines).encode()
            if path.is_file() and path.read_bytes() == content:
                continue
            with atomic_file(path) as file:
                file.write(content)


def main() -> None:
    """Run the command line: `python -m data_module.demo.corpus FOLDER`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=user_path, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    write_demo_corpus(arguments.folder, arguments.seed)
    sizes = ", ".join(f"{size} pairs of {split}" for split, size in SPLIT_SIZES.items())
    print(f"{arguments.folder} holds {sizes}", file=sys.stderr)


if __name__ == "__main__":
    main()
