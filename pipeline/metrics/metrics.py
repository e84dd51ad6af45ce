"""Translation quality: metrics over a whole text, bootstrap intervals and the paired comparison of two systems.

`METRICS` holds the metrics that `evaluate` and validation compute.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import sacrebleu
from numpy.typing import NDArray
from sacrebleu.significance import estimate_ci

from data_module.errors import InputError, require_package
from data_module.registry import Registry
from data_module.system.files import PlainValues
from data_module.tokenization.tokenizer import normal_form
from pipeline.config.settings import LIKELIHOOD
from pipeline.metrics.bleu_tokenizer import DEFAULT, language_code
from pipeline.metrics.private import score_of_statistics, sentence_statistics

RESAMPLES, SEED = 1000, 12345
"""Number of bootstrap resamples and seed of their generator: sacreBLEU's defaults, which give its intervals."""
SIGNIFICANT = 0.05
NUM_BEST = (1, 3, 5, 10)
"""Numbers of best answers among which `n_best_scores` looks for a right one."""
SACREMOSES = ("sacremoses", "paper-score")
"""The package that `paper_score` needs, and its extra."""
MOSES_LANGUAGES = (
    *("ca", "cs", "de", "el", "en", "es", "et", "fi", "fr", "ga", "hu", "is", "it"),
    *("lt", "lv", "nl", "pl", "pt", "ro", "ru", "sk", "sl", "sv"),
)
"""Languages for which Moses has rules and whose words have spaces between them: those of `paper_score`."""
_COMPOUND = re.compile(r"(\S)-(\S)")
_TOKENIZED = re.compile(r"\s[.,](\s|$)|&(apos|quot|amp);|@-@|@@ ")
_PUNCTUATED = re.compile(r"[.,](\s|$)|&(apos|quot|amp);|@-@|@@ ")


class Metric(Protocol):
    """A metric whose score for a text is a function of summed sentence statistics.

    A higher score is better, unless the class sets `higher_is_better = False`, as in torchmetrics. A class whose
    `statistics` takes several references of a sentence sets `several_references = True`; others score one reference.
    """

    def signature(self) -> str:
        """Return the options and versions that scores depend on, as `key:value` pairs joined by `|`."""
        ...

    def statistics(self, hypothesis: str, reference: str) -> Sequence[int]:
        """Return a sentence's counts, equally many for every sentence."""
        ...

    def score(self, statistics: Any) -> float:
        """Return the score of the sentences whose statistics sum to `statistics`, a list or a float32 array."""
        ...


class _OfSacreBleu:
    """A metric of sacreBLEU; its statistics are those that sacreBLEU sums."""

    several_references = True

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        # The signature needs this number, which sacreBLEU otherwise learns from the first text.
        metric.num_refs = 1

    def signature(self) -> str:
        """Return sacreBLEU's signature."""
        return str(self._metric.get_signature())

    def statistics(self, hypothesis: str, *references: str) -> list[int]:
        """Return a sentence's counts."""
        return sentence_statistics(self._metric, hypothesis, *references)

    def score(self, statistics: Any) -> float:
        """Return the score in percent."""
        return score_of_statistics(self._metric, statistics)


class Bleu(_OfSacreBleu):
    """BLEU; its first two statistics are the lengths of hypothesis and reference in words."""

    def __init__(self, **options: Any) -> None:
        super().__init__(sacrebleu.BLEU(**options))


class ChrF(_OfSacreBleu):
    """chrF, or chrF++ with a `word_order` of 2."""

    def __init__(self, word_order: int = 0) -> None:
        super().__init__(sacrebleu.CHRF(word_order=word_order))


class Ter(_OfSacreBleu):
    """Translation edit rate: edits for each word of the reference, in percent."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__(sacrebleu.TER())

    def statistics(self, hypothesis: str, *references: str) -> list[int]:
        """Return the edits to the nearest reference and the mean length, both times the number of references."""
        result = self._metric.corpus_score([hypothesis], [[one] for one in references])
        return [round(result.num_edits * len(references)), round(result.ref_length * len(references))]

    def score(self, statistics: Sequence[float] | NDArray[np.float32]) -> float:
        """Return the edit rate in percent."""
        edits, length = statistics
        return 100.0 * edits / length if length else 100.0 * (edits > 0)


class ExactMatch:
    """Percentage of lines that equal a reference apart from white space. It suits tasks with one right answer."""

    several_references = True

    def signature(self) -> str:
        """Return the options and versions that scores depend on."""
        return "nrefs:1|case:mixed|space:ignored"

    def statistics(self, hypothesis: str, *references: str) -> list[int]:
        """Return whether the line matches, and 1."""
        return [hypothesis.split() in [reference.split() for reference in references], 1]

    def score(self, statistics: Sequence[float] | NDArray[np.float32]) -> float:
        """Return the percentage of matches."""
        return 100.0 * statistics[0] / max(statistics[1], 1)


class MetricRegistry(Registry[Metric]):
    """Metrics by name. To add one from outside: `METRICS["word_error_rate"] = WordErrorRate()`."""

    RESERVED = (
        *("bleu_lowercase", "bleu_paper", "bleu_moses_lowercase", "scores"),
        *("beam_size", "length_penalty", "stop_rule", "sentences", "checkpoint", "versus", "sources", "test_set"),
        *("loss", "negative_log_likelihood", "perplexity", "accuracy", "length_ratio", "repetition", LIKELIHOOD),
    )
    """Other keys of `evaluate`'s JSON and other tags under `validation/`."""

    def __setitem__(self, name: str, metric: Metric) -> None:
        """Raise ValueError if the name is taken or is not an identifier."""
        if not name.isidentifier():
            raise ValueError(f"metric {name!r}: is not an identifier; use letters, digits and underscores")
        if name in self or name in self.RESERVED or name.startswith("best_"):
            raise ValueError(f"metric {name!r}: the name is taken; choose another")
        super().__setitem__(name, metric)


METRICS = MetricRegistry("run.best_by", bleu=Bleu(), chrf=ChrF(), exact_match=ExactMatch())
"""Metrics that `evaluate` and validation compute.

The name is the key in the JSON of `evaluate`; the TensorBoard tag is `validation/<name>`. Every process that computes
validation scores must register the same metrics. BLEU here uses the tokenizer 13a; for others, see `metrics_on`.
"""


ON_REQUEST: dict[str, Metric] = {"ter": Ter(), "chrf2++": ChrF(word_order=2)}
"""Metrics that are computed where `run.metrics` or `evaluate --metric` names them."""


def metrics_on(tokenizer: str, requested: Iterable[str] = ()) -> dict[str, Metric]:
    """Return the registered metrics, with BLEU on a tokenizer of sacreBLEU, and the requested ones of `ON_REQUEST`."""
    # A metric that is registered under such a name takes precedence.
    added = {name: ON_REQUEST[name] for name in requested if name in ON_REQUEST and name not in METRICS}
    return {**METRICS, "bleu": Bleu(tokenize=tokenizer), **added}


def title(name: str) -> str:
    """Return the printed name of a metric, or of the likelihood."""
    names = {"bleu": "BLEU", "chrf": "chrF", "exact_match": "exact match", "ter": "TER", "chrf2++": "chrF2++"}
    return {**names, LIKELIHOOD: "negative log-likelihood"}.get(name, name)


def title_and_score(name: str, score: float) -> str:
    """Return a score as it is printed: nats with four decimals, percent with two."""
    return f"{title(name)} {score:.{4 if name == LIKELIHOOD else 2}f}"


def mode_of(name: str) -> Literal["max", "min"]:
    """Return whether the largest or the smallest score of a metric, or of the likelihood, is the best.

    Raises InputError if there is no such metric.
    """
    if name == LIKELIHOOD:
        return "min"
    metric = METRICS.get(name) or ON_REQUEST.get(name)
    if metric is None:
        raise InputError(METRICS.unknown(name, LIKELIHOOD, *ON_REQUEST))
    return "max" if getattr(metric, "higher_is_better", True) else "min"


def corpus_score(metric: Metric, hypotheses: list[str], references: list[str]) -> float:
    """Return the score of a text."""
    return _total_score(metric, _statistics(metric, hypotheses, [references]))


def score_and_compare(
    hypotheses: list[str],
    references: list[str],
    tokenizer: str = DEFAULT,
    *,
    more: Sequence[list[str]] = (),
    requested: Iterable[str] = (),
    other: list[str] | None = None,
) -> tuple[PlainValues, PlainValues]:
    """Return the metrics' scores with `bleu_lowercase`, and their comparison with another system's translations.

    Each metric has its score, its 95 % bootstrap interval as `<name>_interval` and its signature as `<name>_signature`.
    The comparison, by paired bootstrap resampling (Koehn, 2004), has: the score of `other` as `<name>`;
    `<name>_difference`, positive where `hypotheses` score higher; `<name>_p_value`; and `<name>_difference_is_real`,
    whether the p-value is less than `SIGNIFICANT`. It is empty without `other`.

    `more` has further references of all sentences; metrics for one reference are then left out. See `metrics_on` for
    `tokenizer` and `requested`.
    """
    figures: PlainValues = {}
    comparison: PlainValues = {}
    lowercase = Bleu(lowercase=True, tokenize=tokenizer)
    metrics = {
        "bleu": METRICS["bleu"],
        "bleu_lowercase": lowercase,
        **metrics_on(tokenizer, requested),
    }  # in this order
    for name in of_one_reference(requested) if more else []:
        del metrics[name]
    for name, metric in metrics.items():
        this = _statistics(metric, hypotheses, [references, *more])
        figures |= _with_interval(name, metric, this, 1 + len(more))
        if other is not None:
            comparison |= _compared(name, metric, this, _statistics(metric, other, [references, *more]))
    return figures, comparison


def score(hypotheses: list[str], references: list[str], tokenizer: str = DEFAULT, **options: Any) -> PlainValues:
    """Return the scores of `score_and_compare` alone. Extensions call it, see docs/extending.md."""
    return score_and_compare(hypotheses, references, tokenizer, **options)[0]


def n_best_scores(
    answers: list[list[str]], references: Sequence[list[str]], n_best: int, other: list[list[str]] | None = None
) -> tuple[PlainValues, PlainValues]:
    """Return in what percentage of sentences one of the best answers is right, and the comparison with `other`.

    The keys are `exact_match@3` for the best 3 answers, and likewise for each number of `NUM_BEST` up to `n_best`, for
    `n_best` itself, and for each metric of an extension; see `score_and_compare` for intervals, signatures and the
    comparison. An answer is right if a metric gives it the best score that it gives any of the references for itself,
    each as the only sentence of a text.

    `answers`, and `other` of another system, have each sentence's answers, best first. `references` has one list or
    several; with several, metrics for one reference are left out.
    """
    figures: PlainValues = {}
    comparison: PlainValues = {}
    omitted = {"bleu", "chrf", *(of_one_reference() if references[1:] else ())}
    share = ExactMatch()
    for name in [name for name in METRICS if name not in omitted]:
        ranks = [_ranks_of_right(name, one, references) for one in (answers, other) if one is not None]
        for count in sorted({*(number for number in NUM_BEST if number < n_best), n_best}):
            this, *others = (np.stack([rank < count, np.ones_like(rank)], axis=1) for rank in ranks)
            key = f"{name}@{count}"  # No metric has this name: an @ is in no identifier.
            signature = _signature(METRICS[name], len(references))
            figures |= _interval(key, share, this) | {f"{key}_signature": signature}
            for theirs in others:
                comparison |= _compared(key, share, this, theirs)
    return figures, comparison


def _ranks_of_right(name: str, answers: list[list[str]], references: Sequence[list[str]]) -> NDArray[np.float64]:
    """Return how many answers to each sentence come before the first right one [sentences]; infinity without one."""
    metric, sign = METRICS[name], 1 if mode_of(name) == "max" else -1

    def mark(answer: str, rows: Sequence[str]) -> float:
        with np.errstate(all="ignore"):  # A metric may divide by the counts of an empty sentence.
            score = float(metric.score(np.array(metric.statistics(answer, *rows), dtype=np.float32)))
        return sign * score if math.isfinite(score) else -math.inf

    rows = list(zip(*references, strict=True))
    best = max(mark(one[0], one) for one in rows)

    def rank(found: list[str], right: Sequence[str]) -> float:
        marks = (mark(answer, right) for answer in found)
        return next((place for place, one in enumerate(marks) if one >= best > -math.inf), math.inf)

    return np.array([rank(found, right) for found, right in zip(answers, rows, strict=True)])


def of_one_reference(requested: Iterable[str] = ()) -> list[str]:
    """Return the names of the metrics that cannot be computed with several references; see `metrics_on`."""
    chosen = metrics_on(DEFAULT, requested)
    return [name for name, metric in chosen.items() if not getattr(metric, "several_references", False)]


def paper_score(hypotheses: list[str], references: list[str], language: str) -> PlainValues:
    """Return BLEU as papers report it: on Moses tokens, without smoothing.

    `bleu_paper` is the BLEU of "Attention Is All You Need": case-sensitive, with compounds split at hyphens.
    `bleu_moses_lowercase` is the BLEU of the literature on Multi30k: on lower-cased tokens with compounds left whole.
    Neither is comparable to sacreBLEU's default BLEU. Both texts are detokenized; their language selects Moses' rules,
    see `require_moses_language`.

    Raises InputError if sacremoses is not installed.
    """
    sacremoses = require_package(*SACREMOSES)
    language = language_code(language)
    tokenizer = sacremoses.MosesTokenizer(language)
    punctuation = sacremoses.MosesPunctNormalizer(language)

    def tokenized(lines: list[str]) -> list[str]:
        plain = (punctuation.replace_unicode_punct(line) for line in lines)
        return [tokenizer.tokenize(line, return_str=True) for line in plain]

    def split(lines: list[str]) -> list[str]:
        return [_COMPOUND.sub(r"\1 ##AT##-##AT## \2", line) for line in lines]

    hypotheses, references = tokenized(hypotheses), tokenized(references)
    bleu, lowercase = (Bleu(tokenize="none", smooth_method="none", lowercase=lower) for lower in (False, True))
    scores = _with_interval("bleu_paper", bleu, _statistics(bleu, split(hypotheses), [split(references)]))
    scores |= _with_interval("bleu_moses_lowercase", lowercase, _statistics(lowercase, hypotheses, [references]))
    moses = f"|moses:{language}|sacremoses:{sacremoses.__version__}"
    scores["bleu_paper_signature"] += f"{moses}|compounds:split"
    scores["bleu_moses_lowercase_signature"] += f"{moses}|compounds:whole"
    return scores


def require_moses_language(language: str) -> None:
    """Raise InputError if `paper_score` was not made for the language.

    The target language of a corpus that does not name it is "target", for which Moses uses English rules.
    """
    if language_code(language) not in (*MOSES_LANGUAGES, "target"):
        raise InputError(
            f"--paper: Moses' tokens are not made for corpus.target_language {language}, only for "
            f"{' '.join(MOSES_LANGUAGES)}; omit it"
        )


def _compared(name: str, metric: Metric, this: NDArray[np.number], other: NDArray[np.number]) -> PlainValues:
    """Return the score of `other`, and the difference of `this` from it; both are sentences' statistics."""
    this_score, other_score = _total_score(metric, this), _total_score(metric, other)
    difference = this_score - other_score
    # Without this case, equal texts would get p = 1 / 1001: none of their resamples differs by more than 0.
    p_value = 1.0
    if difference:
        draws = _draws(len(this))
        samples = np.abs(_resample(metric, this, draws) - _resample(metric, other, draws))
        p_value = round(_p_value(samples, abs(difference)), 4)
    return {
        name: round(other_score, 4),
        f"{name}_difference": round(difference, 4),
        f"{name}_p_value": p_value,
        f"{name}_difference_is_real": p_value < SIGNIFICANT,
    }


def are_characters(lines: list[str]) -> bool:
    """Return whether a text is characters, such as letters, with spaces between them rather than words."""
    words = [word for line in lines for word in line.split()]
    return 2 * sum(len(word) == 1 for word in words) > len(words)


def reference_warnings(references: list[str], hypotheses: list[str]) -> list[str]:
    """Return warnings about references that look tokenized, or are written otherwise than the model's translations.

    Such references are in lower case or in another Unicode normal form.
    """
    messages = []
    ours, theirs = (normal_form("\n".join(lines)) for lines in (hypotheses, references))
    if ours and theirs and ours != theirs:
        messages.append(
            f"have accents in another normal form than the translations: scores count them as errors; convert the"
            f" references (uconv -x any-{ours.lower()})"
        )
    punctuated = sum(bool(_PUNCTUATED.search(line)) for line in references)
    tokenized = sum(bool(_TOKENIZED.search(line)) for line in references)
    if 2 * tokenized > punctuated and not are_characters(references):
        messages.append("look tokenized: scores on them do not compare; give them detokenized")
    # Translations of a model of text without capitals, such as phonemes, have none either.
    match [_looks_lower_cased(lines) for lines in (references, hypotheses)]:
        case [True, False]:
            messages.append("look lower-cased: bleu counts case; give the original text, or read bleu_lowercase")
        case [False, True]:
            messages.append("have capitals, and the translations none: read bleu_lowercase, or give them lower-cased")
    return messages


def _looks_lower_cased(lines: list[str]) -> bool:
    cased = sum(line.upper() != line.lower() for line in lines)
    upper = sum(line != line.lower() for line in lines)
    return upper < 0.02 * cased


def _statistics(metric: Metric, hypotheses: list[str], references: Sequence[list[str]]) -> NDArray[np.int64]:
    """Return the sentences' statistics [sentences, statistics]; `references` has one list or several."""
    rows = zip(hypotheses, *references, strict=True)
    counts = np.array([metric.statistics(ours, *theirs) for ours, *theirs in rows])
    return counts.astype(np.int64, casting="safe" if counts.size else "unsafe")  # TypeError for fractions


def _total_score(metric: Metric, sentence_statistics: NDArray[np.number]) -> float:
    # As Python's numbers, because `round` on NumPy's numbers is not always exact.
    return float(metric.score(sentence_statistics.sum(0).tolist()))


def _with_interval(
    name: str, metric: Metric, sentence_statistics: NDArray[np.int64], num_references: int = 1
) -> PlainValues:
    """Return the score of sentences, its interval and its signature."""
    signature = _signature(metric, num_references)
    return _interval(name, metric, sentence_statistics) | {f"{name}_signature": signature}


def _signature(metric: Metric, num_references: int) -> str:
    """Return a metric's signature, with the number of references and the settings of the bootstrap."""
    signature = re.sub(r"^nrefs:\d+", f"nrefs:{num_references}", metric.signature())
    # The bootstrap's settings follow the number of references, as in sacreBLEU's.
    return re.sub(r"^(nrefs:\d+\|)?", rf"\g<1>bs:{RESAMPLES}|seed:{SEED}|", signature, count=1)


def _interval(name: str, metric: Metric, sentence_statistics: NDArray[np.number]) -> PlainValues:
    """Return the score of sentences and its interval."""
    resampled = sorted(map(float, _resample(metric, sentence_statistics, _draws(len(sentence_statistics)))))
    # Near an end of the scale, sacreBLEU's interval would leave the scale, so it is cut at the outermost resamples.
    mean, half_width = map(float, estimate_ci(np.array(resampled)))
    return {
        name: round(_total_score(metric, sentence_statistics), 4),
        f"{name}_interval": [
            round(max(mean - half_width, resampled[0]), 4),
            round(min(mean + half_width, resampled[-1]), 4),
        ],
    }


def _draws(num_sentences: int) -> NDArray[np.int64]:
    """Return the sentences in each resample [resamples, sentences], the same as sacreBLEU draws."""
    return np.random.default_rng(SEED).choice(num_sentences, size=(RESAMPLES, num_sentences), replace=True)


def _resample(metric: Metric, sentence_statistics: NDArray[np.number], draws: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the score of each resample."""
    # float32 as in sacreBLEU, for equal results to the last digit.
    rows = sentence_statistics.astype(np.float32)
    return np.array([metric.score(rows[drawn].sum(0)) for drawn in draws])


def _p_value(samples: NDArray[np.float64], difference: float) -> float:
    """Return how likely a difference at least this large is by chance, from resampled absolute differences."""
    return (int(np.sum(samples - samples.mean() > difference)) + 1) / (len(samples) + 1)
