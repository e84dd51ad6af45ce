"""Pieces that training never had: who counts lines with them; and the pieces that `prepare` and `doctor` show."""

import random
import shutil
from pathlib import Path

import pytest
import torch
import yaml

import pipeline
from data_module.errors import InputError
from data_module.system.files import PlainValues
from data_module.tokenization.tokenizer import Tokenizer
from pipeline.inference.options import Prefixes
from pipeline.inference.pieces import SPACED_SYMBOLS, encode_sources
from pipeline.inference.text_io import Defects
from tests.conftest import run_here, tiny_recipe

SYMBOLS = ["<N>", "<ACC>", "<PSS1S>", "<PSS1P>"]
"""User symbols, of which the training text lacks the last one."""
LINES = ["<N><ACC> k u t a", "", "<N><PSS1P> k u t a", "<N><PSS1> k u t a", "<N><ACC> kuta", "<N><ACC> ж k", "<N> w"]
"""Fine; empty; a listed symbol and a spelled-out one; letters that stand together; unknown; a letter of targets."""
UNSEEN = "pieces that no training sentence has on this side; write text as the training text is written; the first is"
UNKNOWN = "characters or words that the model has never seen, and cannot read; the first is"


def write_pairs(path: Path, count: int) -> None:
    chooser = random.Random(count)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            tag, letters = chooser.choice(SYMBOLS[1:3]), " ".join(chooser.choices("kuta", k=chooser.randint(1, 6)))
            file.write(f"<N>{tag} {letters}\t{letters} w\n")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> PlainValues:
    folder = tmp_path_factory.mktemp("tags")
    for name, count in (("train", 300), ("validation", 20), ("test", 10)):
        write_pairs(folder / f"{name}.tsv", count)
    with (folder / "test.tsv").open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\tk w\n" for line in LINES if line)
        file.write("<N> k\tк\n")
    values = tiny_recipe(folder) | {"name": "tags"}
    values["corpus"] = {
        "folder": str(folder / "corpus"),
        **{name: {"tsv": str(folder / f"{name}.tsv")} for name in ("train", "validation", "test")},
        "user_symbols": SYMBOLS,
        "vocabulary_size": 26,
    }
    values["run"] |= {"folder": str(folder / "run")}
    values["trainer"] |= {"max_steps": 2, "val_check_interval": 2}
    return values


@pytest.fixture(scope="module")
def run(recipe: PlainValues) -> Path:
    return pipeline.train(recipe)


@pytest.fixture
def recipe_path(recipe: PlainValues, tmp_path: Path) -> Path:
    (tmp_path / "tags.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path / "tags.yaml"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return tmp_path / "text"


def test_evaluate_counts_sources_and_score_both_sides(run: Path, text: Path, tmp_path: Path) -> None:
    targets = tmp_path / "targets"
    targets.write_text("k w\n" * 5 + "w k\n" + "k <N>\n")
    _, said = run_here("evaluate", run, "--source", text, "--reference", targets)
    assert f": 4 lines, the first are 3, 4, 5: {UNSEEN} '<PSS1P>'" in said
    _, said = run_here("score", run, "--source", targets, "--target", targets)
    assert f": 7 lines, the first are 1, 2, 3: {UNSEEN} 'w'" in said
    text.write_text("<N><ACC> k\n" * 7)
    _, said = run_here("score", run, "--source", text, "--target", targets)
    assert f": line 7: {UNSEEN} '<N>'" in said


def test_doctor_counts_held_out_lines(run: Path, recipe: PlainValues, recipe_path: Path) -> None:
    """Empty lines are none of a corpus's, so that the places are those of the file."""
    lines, test = run_here("doctor", recipe_path)[0].splitlines(), recipe["corpus"]["test"]["tsv"]
    assert f"note  {test}, source: 4 lines, the first are 12, 13, 14: {UNSEEN} '<PSS1P>'" in lines
    assert f"note  {test}, source: line 15: {UNKNOWN} 'ж'" in lines
    assert f"note  {test}, target: line 17: {UNKNOWN} 'к'" in lines
    assert not [line for line in lines if "validation.tsv, " in line]


def test_prepare_and_doctor_show_pieces(recipe: PlainValues, tmp_path: Path, recipe_path: Path) -> None:
    """Before the corpus is prepared, and after."""
    train = tmp_path / "train.tsv"
    rest = "<N><PSS1S> a t\ta w\n" * 300
    train.write_text("<N><ACC> k u\tk u w\n" + "<N> <ACC> k u t a\t" + "k " * 60 + "w\n" + rest)
    options = [recipe_path, "--corpus.folder", tmp_path / "corpus", "--corpus.vocabulary_size", 27]
    options += ["--run.folder", tmp_path / "run", "--corpus.train.tsv", train]
    expected = [
        "source 1 as pieces: ▁ <N> <ACC> ▁k ▁u",
        "source 2 as pieces: ▁ <N> ▁ <ACC> ▁k ▁u ▁t ▁a",
        "target 1 as pieces: ▁k ▁u ▁w",
        f"target 2 as pieces: {'▁k ' * 50}…",
    ]
    for command in ("doctor", "prepare", "doctor"):
        printed = "".join(run_here(command, *options))
        assert [line.removeprefix("ok    ") for line in printed.splitlines() if " as pieces: " in line] == expected
        assert SPACED_SYMBOLS in printed
    train.write_text("<N><ACC> k u\tk u w\n" + "\u200b t\t\u200b w\n" + rest)
    _, printed = run_here("prepare", *options, "--force")
    assert "source 2 as pieces: ▁ '\\u200b' ▁t\n" in printed  # it has no width
    assert SPACED_SYMBOLS not in printed


def test_without_a_record_nothing_counts(run: Path, tmp_path: Path, text: Path) -> None:
    """As in checkpoints of 1.0."""
    contents = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    assert contents["translation"].pop("seen_pieces").dtype == torch.uint8
    torch.save(contents, tmp_path / "old.ckpt")
    _, said = run_here("translate", tmp_path / "old.ckpt", "--source", text)
    assert said.splitlines()[1:] == [f"line 6: {UNKNOWN} 'ж'"]


def test_a_run_from_another_has_seen_what_both_have(
    run: Path, recipe: PlainValues, tmp_path: Path, recipe_path: Path
) -> None:
    """When it is resumed too. `prepare` and `fit` say so before the run begins."""
    train = tmp_path / "train.tsv"
    train.write_text("<N><PSS1P> k a\tk a w\n" * 50)
    options = [recipe_path, "--corpus.folder", tmp_path / "corpus", "--init-from", run]
    options += ["--run.folder", tmp_path / "run", "--corpus.train.tsv", train, "--trainer.max_steps"]
    expected = ["", "", "", "<", "u", "", "w"]
    for command in ("prepare", "fit"):
        shutil.rmtree(tmp_path / "corpus", ignore_errors=True)
        assert "3 lines, 13, 14, 16: " in "".join(run_here(command, *options, 2))
    for steps in (2, 4):
        run_here("fit", *options, steps)
        assert "3 lines, 13, 14, 16: " in run_here("doctor", *options, steps)[0]
        tokenizer = pipeline.load(tmp_path / "run")._translator.tokenizer
        assert [one.unseen for one in encode_sources(tokenizer, LINES, None, Prefixes())[1]] == expected
    own = Tokenizer.load(tmp_path / "corpus" / "tokenizer.model")
    assert encode_sources(own, ["<N><ACC> k"], None, Prefixes())[1] == [Defects(unseen="<ACC>")]


def test_a_record_of_another_vocabulary_is_refused(run: Path, recipe: PlainValues, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(Path(recipe["corpus"]["folder"]) / "tokenizer.model")
    tokenizer.save(tmp_path / "tokenizer.model")
    assert Tokenizer.load(tmp_path / "tokenizer.model").seen == tokenizer.seen
    (tmp_path / "tokenizer.seen").write_bytes(b"\3" * 25)
    with pytest.raises(InputError, match=r"tokenizer\.model: has 26 pieces, but its file .* 25; copy or create both"):
        Tokenizer.load(tmp_path / "tokenizer.model")
