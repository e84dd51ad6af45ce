"""The messy benchmark: one text translated as it is and under each kind of noise, and what of the score is left."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.random import PCG64, Generator, SeedSequence

from data_module.corpus.noise import INSERTED_STRINGS, MARKS, NOISE_KINDS, add_noise, insert
from data_module.tokenization.tokenizer import normalize_white_space
from pipeline.inference.metrics import corpus_score, metrics_on

if TYPE_CHECKING:
    from pipeline.inference.translator import Translator

SEED = 1
"""Seed of all noise, so that models are compared on the same text."""
CLEAN, DOUBLED_SPACES, USER_SYMBOLS = "clean", "doubled_spaces", "user_symbols"
_CONTINUES = r"[\w/@&=#~+-]"
"""Characters that go on with an address or number: `112:30` and `12:30:15` do not hold `12:30`."""
_WORD = re.compile(rf"\w(?:.*\w)?[{MARKS}]*|^\W+$")
"""A word without the punctuation around it, or nothing but punctuation."""


class MessyText(NamedTuple):
    """A text under one kind of noise. All lists have one item a sentence."""

    sources: list[str]
    references: list[str]
    copied: list[list[str]]
    """Strings that a translation has to hold as often as its reference; none where noise inserts nothing."""


def messy_texts(
    sources: list[str], references: list[str], symbols: Sequence[str] = (), *, lowercase: bool = False
) -> Iterator[tuple[str, MessyText]]:
    """Yield the name of each kind of noise, and the text with this noise in every sentence.

    References change where a correct translation does: in the casing, in inserted strings and in tags.

    Args:
        sources: sentences to translate.
        references: their translations.
        symbols: the tokenizer's user symbols. The kind `user_symbols` puts a pair of tags among them around one word;
            it is left out if there is no pair.
        lowercase: whether the tokenizer lower-cases. References then keep their casing, and inserted strings are
            lower-case.
    """
    protected = frozenset(symbols)
    pairs = [
        (normalize_white_space(source), normalize_white_space(reference))
        for source, reference in zip(sources, references, strict=True)
    ]
    for kind in NOISE_KINDS:
        random = _generator(kind)
        noisy: list[tuple[str, str]] = []
        copied: list[list[str]] = []
        for pair in pairs:
            if kind in INSERTED_STRINGS:
                string = INSERTED_STRINGS[kind](random)
                copied.append([string.lower() if lowercase else string])
                noisy.append(insert(copied[-1][0], *pair, random, protected))
            else:
                source, reference = add_noise(*pair, [kind], random, protected)
                noisy.append((source, pair[1] if lowercase else reference))
        yield kind, _text(noisy, copied)
    yield DOUBLED_SPACES, _text([(source.replace(" ", "  "), reference) for source, reference in pairs])
    if tags := tag_pairs(symbols):
        random = _generator(USER_SYMBOLS)
        noisy, copied = [], []
        for pair in pairs:
            opening, closing = tags[int(random.random() * len(tags))]
            noisy.append(with_tags(pair, (opening, closing), random, protected))
            copied.append([opening, closing] if noisy[-1] != pair else [])
        yield USER_SYMBOLS, _text(noisy, copied)


def messy_scores(
    translator: "Translator", sources: list[str], references: list[str], translations: list[str], tokenizer: str
) -> dict[str, Any]:
    """Translate the text under each kind of noise and score it.

    Args:
        translator: the model.
        sources: sentences to translate.
        references: their translations.
        translations: the model's translations of `sources`.
        tokenizer: BLEU's.

    Returns:
        `scores`: for `clean` and each kind of noise, the score by each registered metric; for noise also
        `<metric>_of_clean`, the percentage of the clean score (None if that is 0); for inserted strings and tags also
        `copied`, the percentage of sentences whose translations hold them whole. `signatures`: the metrics' signatures.
    """
    metrics = metrics_on(tokenizer)
    scores: dict[str, dict[str, float | None]] = {}
    clean = {name: corpus_score(metric, translations, references) for name, metric in metrics.items()}
    scores[CLEAN] = {name: round(score, 4) for name, score in clean.items()}
    symbols, lowercase = translator.tokenizer.user_symbols, translator.tokenizer.lowercase
    for kind, text in messy_texts(sources, references, symbols, lowercase=lowercase):
        hypotheses = [translation.text for translation in translator.translate(text.sources, progress=kind)]
        scores[kind] = {}
        for name, metric in metrics.items():
            score = corpus_score(metric, hypotheses, text.references)
            scores[kind][name] = round(score, 4)
            scores[kind][f"{name}_of_clean"] = round(100 * score / clean[name], 2) if clean[name] else None
        if any(text.copied):
            scores[kind]["copied"] = round(_percent_copied(hypotheses, text, kind), 2)
    return {"scores": scores, "signatures": {name: metric.signature() for name, metric in metrics.items()}}


def is_copied(string: str, hypothesis: str, reference: str) -> bool:
    """Return whether the hypothesis holds an inserted string whole, as often as the reference does.

    Punctuation may follow the string, but not more of an address or number. Emoji must not be repeated further.
    """
    if any(character.isascii() for character in string):
        pattern = rf"(?a:(?<!{_CONTINUES})){re.escape(string)}(?a:(?![.,:!?]*{_CONTINUES}))"
    else:
        around = f"[{re.escape(string)}]"
        pattern = f"(?<!{around}){re.escape(string)}(?!{around})"
    return len(re.findall(pattern, hypothesis)) == len(re.findall(pattern, reference))


def tag_pairs(symbols: Sequence[str]) -> list[tuple[str, str]]:
    """Return the opening and closing tags among symbols: those that differ by one slash, such as `<b>` and `</b>`."""
    pairs = [(closing.replace("/", "", 1), closing) for closing in symbols if "/" in closing]
    return [pair for pair in pairs if pair[0] in symbols]


def with_tags(
    pair: tuple[str, str], tags: tuple[str, str], random: Generator, protected: frozenset[str]
) -> tuple[str, str]:
    """Return both sides with tags around a word that is drawn, and around the target's word at the same relative place.

    Words with a protected symbol are not chosen. Punctuation around the word stays outside. The pair is returned as it
    is if a side has no such word.
    """
    place = float(random.random())
    tagged = []
    for side in pair:
        words = side.split(" ")
        choices = [i for i, word in enumerate(words) if word and not any(symbol in word for symbol in protected)]
        if not choices:
            return pair
        index = choices[int(place * len(choices))]
        words[index] = _WORD.sub(lambda match: f"{tags[0]}{match[0]}{tags[1]}", words[index], count=1)
        tagged.append(" ".join(words))
    return tagged[0], tagged[1]


def _percent_copied(hypotheses: list[str], text: MessyText, kind: str) -> float:
    """Return the percentage of sentences that hold all their strings; sentences without strings do not count."""
    # A tag is one piece, and touches the words around it.
    whole = _equally_often if kind == USER_SYMBOLS else is_copied
    results = [
        all(whole(string, hypothesis, reference) for string in strings)
        for strings, hypothesis, reference in zip(text.copied, hypotheses, text.references, strict=True)
        if strings
    ]
    return 100.0 * sum(results) / len(results)


def _equally_often(string: str, hypothesis: str, reference: str) -> bool:
    return hypothesis.count(string) == reference.count(string)


def _text(pairs: list[tuple[str, str]], copied: list[list[str]] | None = None) -> MessyText:
    return MessyText([pair[0] for pair in pairs], [pair[1] for pair in pairs], copied or [[] for _ in pairs])


def _generator(kind: str) -> Generator:
    """Return a kind's own generator, so that no kind depends on other kinds."""
    return Generator(PCG64(SeedSequence([SEED, *kind.encode()])))
