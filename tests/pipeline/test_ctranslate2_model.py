"""A network converted to CTranslate2 has the same probabilities; a bundle's parity compares greedy translations."""

import random
import re
from pathlib import Path

import ctranslate2
import pytest
import torch

from data_module.tokenization.tokenizer import Tokenizer
from pipeline.export.bundle_writer import write_bundle
from pipeline.export.ctranslate2_model import write_ctranslate2
from tests.model.search_truth import EOS, VOCABULARY_SIZE, forced_log_probability, tolerance
from tests.pipeline.test_export import LEFT_OUT, SHAPES, TEXT, make_model


def make_sentences(count: int, seed: int) -> list[list[int]]:
    draws = random.Random(seed)
    return [[draws.randrange(4, VOCABULARY_SIZE) for _ in range(draws.randint(1, 12))] + [EOS] for _ in range(count)]


@pytest.mark.parametrize("shape", [name for name in SHAPES if "ctranslate2" not in LEFT_OUT.get(name, [])])
def test_probabilities_are_the_same(tokenizer: Tokenizer, tmp_path: Path, shape: str) -> None:
    network = make_model(tokenizer, **SHAPES[shape]).network
    write_ctranslate2(network, tokenizer, tmp_path / "model")
    translator = ctranslate2.Translator(str(tmp_path / "model"), compute_type="float32", intra_threads=1)
    sources, answers = make_sentences(30, 1), make_sentences(30, 2)
    pieces = tokenizer.pieces()
    # CTranslate2 adds the end symbol itself.
    spelt = ([[pieces[i] for i in row] for row in rows] for rows in (sources, [answer[:-1] for answer in answers]))
    scored = translator.score_batch(*spelt)
    for source, answer, one in zip(sources, answers, scored, strict=True):
        expected = forced_log_probability(network, torch.tensor(source), answer)
        assert sum(one.log_probs) == pytest.approx(expected, abs=tolerance(network))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_bundles_readme_translates_a_long_source_whole(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bundle(make_model(tokenizer, num_layers=1), tmp_path, ["ctranslate2"], TEXT, [])
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    [lines] = re.findall(r"## ctranslate2/.*?```python\n(.*?)```", readme, re.DOTALL)
    lines = lines.replace('longest = len(source) + card["max_extra_tokens"]', "longest = 10")
    lines = lines.replace("**beam)", "**beam, return_scores=True)").replace("print(", "print(answers[0].scores, ")
    monkeypatch.chdir(tmp_path)
    scores = set()
    for end in ("gab", "fed cab abc"):  # after the first 1,024 tokens
        source = " ".join(["abc cab"] * 200 + ["gfedcba"] * 160 + [end] * 30)
        assert 1024 < len(tokenizer.encode([source])[0]) < 2048
        exec(lines.replace(f'"{TEXT.sources[0]}"', f'"{source}"'), {})
        scores.add(capsys.readouterr().out)
    assert len(scores) == 2
