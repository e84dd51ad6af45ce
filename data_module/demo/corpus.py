"""The demo's parallel text: 20,000 English sentences and their German translations, split and written.

The same seed gives the same bytes. No sentence stands in two splits; `test_new_combinations` combines words that
never met in training.
"""

import argparse
import os
import random
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from data_module.demo.sentences import Author, Lexicon, Sentence

SPLIT_SIZES = {"train": 20_000, "validation": 1_000, "test": 1_000, "test_new_combinations": 1_000}
HELD_OUT_SHARE = 0.05
"""Share of all possible combinations that are in test_new_combinations only."""


def word_forms(sentence: Sentence) -> set[str]:
    """The words of both sides as they are spelt."""
    return set(re.findall(r"\w+", sentence.english + " " + sentence.german))


def distinct_sentences(author: Author) -> Iterator[Sentence]:
    """Sentences without end, none with an English or a German side that was there before."""
    seen: set[str] = set()
    while True:
        sentence = author.sentence()
        if sentence.english not in seen and sentence.german not in seen:
            seen |= {sentence.english, sentence.german}
            yield sentence


def demo_corpus(seed: int = 1) -> dict[str, list[Sentence]]:
    """The sentences of every split.

    A held-out combination is in every sentence of test_new_combinations and nowhere else. Every word form of
    the other splits occurs in training.
    """
    rng, lexicon = random.Random(seed), Lexicon()
    held_out = {combination for combination in lexicon.combinations() if rng.random() < HELD_OUT_SHARE}
    stream = distinct_sentences(Author(lexicon, rng))
    bar = tqdm(desc="writing sentences", total=sum(SPLIT_SIZES.values()), delay=2)

    def first(size: int, fitting: Iterator[Sentence]) -> list[Sentence]:
        taken = []
        for sentence in islice(fitting, size):
            taken.append(sentence)
            bar.update()
        return taken

    splits = {"train": first(SPLIT_SIZES["train"], (s for s in stream if not s.combinations & held_out))}
    known = set().union(*map(word_forms, splits["train"]))
    for name in ("validation", "test", "test_new_combinations"):
        new = name == "test_new_combinations"
        fitting = (s for s in stream if bool(s.combinations & held_out) == new and word_forms(s) <= known)
        splits[name] = first(SPLIT_SIZES[name], fitting)
    bar.close()
    return splits


def write_demo_corpus(folder: Path, seed: int = 1) -> None:
    """Write `<split>.en` and `<split>.de` of every split; a file that is right already stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, sentences in demo_corpus(seed).items():
        for suffix, lines in (("en", [s.english for s in sentences]), ("de", [s.german for s in sentences])):
            path, content = folder / f"{split}.{suffix}", "".join(f"{line}\n" for line in lines).encode()
            if path.is_file() and path.read_bytes() == content:
                continue
            temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            temporary.write_bytes(content)
            temporary.replace(path)


def main() -> None:
    """Command line: python -m data_module.demo.corpus FOLDER."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    write_demo_corpus(arguments.folder, arguments.seed)
    sizes = ", ".join(f"{size} pairs of {split}" for split, size in SPLIT_SIZES.items())
    print(f"{arguments.folder} holds {sizes}", file=sys.stderr)


if __name__ == "__main__":
    main()
