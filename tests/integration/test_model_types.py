"""A run with each type of vocabulary, from text to scores."""

from pathlib import Path

import pytest
import yaml

from tests.conftest import WORDS, refusal, run_here, tiny_recipe

LETTERS = len(set("".join(WORDS)))


@pytest.mark.parametrize(
    ("kind", "size", "pieces"),
    [
        ("word", len(WORDS) + 5, "▁<tag> ▁the ▁dog </s>"),
        ("char", LETTERS + 6, "▁ <tag> ▁ t h e ▁ d o g </s>"),
        ("unigram", 32, None),
    ],
)
def test_a_run(tiny_corpus: Path, tmp_path: Path, kind: str, size: int, pieces: str | None) -> None:
    values = tiny_recipe(tiny_corpus.parent)
    values["corpus"] |= {"folder": str(tmp_path / "corpus"), "user_symbols": ["<tag>"]}
    values["corpus"] |= {"model_type": kind, "vocabulary_size": size}
    recipe, run, text = tmp_path / "recipe.yaml", tmp_path / "run", tmp_path / "text"
    recipe.write_text(yaml.safe_dump(values))
    run_here("fit", "--config", recipe, "--run.folder", run)
    lines = ["<tag> the dog", "zz yy the cat", "a red house"]
    text.write_text("".join(line + "\n" for line in lines))
    printed, warned = run_here("translate", run, "--source", text, "--target-prefix", "the dog")
    assert [line.startswith("the dog") for line in printed.splitlines()] == [True] * 3
    assert "\u2047" not in printed
    assert "characters or words that the model has never seen, and cannot read; the first is" in warned
    scored, _ = run_here("score", run, "--source", text, "--target", text, "--pieces")
    found = [line.split("\t")[2] for line in scored.splitlines()]
    if pieces is not None:
        assert found[0] == pieces
    assert [row.count("<unk>") for row in found] == [0, 1 if kind == "word" else 2, 0]
    assert "bleu" in run_here("evaluate", run, "--source", text, "--reference", text)[0].lower()
    unknown = refusal("translate", run, "--source", text, "--target-prefix", "the zz")
    assert "target prefix of line 1: has '" in unknown
    assert "which the model has never seen" in unknown
    line = refusal("fit", "--config", recipe, "--run.folder", run, "--corpus.model_type", "bpe")
    assert f'corpus.model_type was "{kind}", now "bpe"' in line
