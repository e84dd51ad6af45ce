"""Texts of random pairs, and the corpora that are prepared from them."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from data_module.corpus.manifest import Manifest, PairCounts
from data_module.corpus.preparation import prepare
from data_module.corpus.store import open_corpus
from data_module.errors import InputError
from data_module.settings import CorpusSettings, TextSource
from data_module.tokenization.tokenizer import Tokenizer
from tests.conftest import ROOT

WORDS = ["the", "a", "red", "blue", "house", "tree", "cat", "sees", "likes", "½", "Straße", "№", "über"]


def pairs_of_text(count: int, seed: int) -> list[tuple[str, str]]:
    chooser = random.Random(seed)
    sources = [" ".join(chooser.choices(WORDS, k=chooser.randint(3, 12))) for _ in range(count)]
    return [(source, " ".join(reversed(source.split()))) for source in sources]


def write_pairs(folder: Path, name: str, pairs: list[tuple[str, str]], **options: object) -> TextSource:
    for side, column in (("en", 0), ("de", 1)):
        text = "".join(pair[column] + "\n" for pair in pairs)
        (folder / f"{name}.{side}").write_bytes(text.encode(errors="surrogateescape"))
    return TextSource(str(folder / f"{name}.en"), str(folder / f"{name}.de"), **options)


@pytest.fixture
def settings(tmp_path: Path) -> CorpusSettings:
    """400 training and 20 validation pairs."""
    train = write_pairs(tmp_path, "train", pairs_of_text(400, 1))
    validation = write_pairs(tmp_path, "validation", pairs_of_text(20, 2))
    return CorpusSettings(str(tmp_path / "corpus"), [train], [validation], vocabulary_size=60)


def made(settings: CorpusSettings, **options: object) -> Manifest:
    return prepare(settings, progress=False, **options)


def fails(settings: CorpusSettings, *parts: str, **changes: object) -> str:
    """Prepare with changed settings: it must fail with one line that has these parts, and leave nothing behind."""
    with pytest.raises(InputError) as caught:
        made(replace(settings, **changes))
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    assert not [path for path in Path(settings.folder).parent.iterdir() if "corpus" in path.name]
    return message


def start_preparing(settings: CorpusSettings, before: str) -> "subprocess.Popen[str]":
    """Prepare a corpus in a new process, which executes the lines `before` first, and prints that it is done."""
    code = (
        "import time\n"
        "from data_module.corpus import builder, preparation, variants\n"
        "from data_module.settings import BpeDropout, CorpusSettings, NoiseSettings, TextSource\n"
        f"{before}\npreparation.prepare({settings!r}, progress=False)\nprint('done', flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)


def text_of(settings: CorpusSettings, split: str = "train") -> list[tuple[str, str]]:
    tokenizer = Tokenizer.load(Path(settings.folder) / "tokenizer.model")
    corpus = open_corpus(Path(settings.folder), split)
    sides = [
        tokenizer.decode([store[i].tolist() for i in range(len(store))]) for store in (corpus.source, corpus.target)
    ]
    return list(zip(*sides, strict=True))


def contents(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def dropped(account: PairCounts) -> dict[str, int]:
    return {reason: entry["pairs"] for reason, entry in account["pairs_dropped"].items() if entry["pairs"]}
