"""Translations against references: sacreBLEU and chrF, the paper's own count, and whether a difference is real."""

import re
from typing import Any

from data_module.errors import InputError, install

_COMPOUND = re.compile(r"(\S)-(\S)")
_TOKENISED = re.compile(r"\s[.,](\s|$)|&(apos|quot|amp);|@-@|@@ ")
_PUNCTUATED = re.compile(r"[.,](\s|$)|&(apos|quot|amp);|@-@|@@ ")
SIGNIFICANT = 0.05


def score(hypotheses: list[str], references: list[str]) -> dict[str, Any]:
    """Corpus scores with signatures and the bounds of their 95 % bootstrap intervals, and `exact_match` in per cent.

    An exact match is a line that is its reference but for white space: what counts where there is one right answer.
    """
    from sacrebleu.metrics import BLEU, CHRF

    metrics = {"bleu": BLEU(), "bleu_lowercase": BLEU(lowercase=True), "chrf": CHRF()}
    scores: dict[str, Any] = {}
    for name, metric in metrics.items():
        scores |= _with_interval(name, metric, hypotheses, references)
    matches = sum(ours.split() == theirs.split() for ours, theirs in zip(hypotheses, references, strict=True))
    return scores | {"exact_match": 100.0 * matches / len(references)}


def paper_score(hypotheses: list[str], references: list[str], language: str) -> dict[str, Any]:
    """What papers report: BLEU on Moses tokens, without smoothing. Texts are given detokenised.

    `bleu_paper` is the paper's own: case-sensitive, compounds split at hyphens. `bleu_moses_lowercase`, on lower-cased
    tokens as they are, is that of the literature on Multi30k. They compare with figures of their kind only, never with
    sacreBLEU's.

    Args:
        hypotheses: translations.
        references: what they should be.
        language: of both; Moses tokenizes by language, with English's abbreviations for those it does not know.

    Raises InputError where sacremoses is not installed.
    """
    from sacrebleu.metrics import BLEU

    sacremoses = require_sacremoses()
    tokenizer = sacremoses.MosesTokenizer(language)
    punctuation = sacremoses.MosesPunctNormalizer(language)

    def tokenized(lines: list[str]) -> list[str]:
        plain = (punctuation.replace_unicode_punct(line) for line in lines)
        return [tokenizer.tokenize(line, return_str=True) for line in plain]

    def split(lines: list[str]) -> list[str]:
        return [_COMPOUND.sub(r"\1 ##AT##-##AT## \2", line) for line in lines]

    hypotheses, references = tokenized(hypotheses), tokenized(references)
    metrics = [BLEU(tokenize="none", smooth_method="none", force=True, lowercase=lower) for lower in (False, True)]
    scores = _with_interval("bleu_paper", metrics[0], split(hypotheses), split(references))
    scores |= _with_interval("bleu_moses_lowercase", metrics[1], hypotheses, references)
    moses = f"|moses:{language}|sacremoses:{sacremoses.__version__}"
    scores["bleu_paper_signature"] += f"{moses}|compounds:split"
    scores["bleu_moses_lowercase_signature"] += f"{moses}|compounds:whole"
    return scores


def require_sacremoses() -> Any:
    """The package; raises InputError where it is not installed."""
    try:
        import sacremoses
    except ImportError:
        raise InputError(f"--paper: sacremoses is not installed; run: {install('paper-score')}") from None
    return sacremoses


def _with_interval(name: str, metric: Any, hypotheses: list[str], references: list[str]) -> dict[str, Any]:
    compute = metric._compute_score_from_stats

    def compute_float(statistics: Any) -> Any:
        # sacreBLEU draws in float32 but scores 0.0 where nothing matches, and cannot take the mean of both types.
        drawn = compute(statistics)
        drawn.score = float(drawn.score)
        return drawn

    metric._compute_score_from_stats = compute_float
    result = metric.corpus_score(hypotheses, [references], n_bootstrap=1000)
    # sacreBLEU gives the bootstrap's mean and half the width of its 95 % interval.
    return {
        name: round(result.score, 4),
        f"{name}_interval": [round(float(result._mean + sign * result._ci), 4) for sign in (-1, 1)],
        f"{name}_signature": str(metric.get_signature()),
    }


def compare(hypotheses: list[str], others: list[str], references: list[str]) -> dict[str, Any]:
    """Differences in BLEU and chrF to other translations of the same text, by paired bootstrap.

    A difference counts as real where chance alone would give one as large in fewer than 1 of 20 test sets.
    """
    from sacrebleu.metrics import BLEU, CHRF
    from sacrebleu.significance import PairedTest

    metrics = {"bleu": BLEU(), "chrf": CHRF()}
    test = PairedTest([("other", others), ("this", hypotheses)], metrics, [references], test_type="bs")
    figures: dict[str, Any] = {}
    for name, (other, this) in zip(metrics, list(test()[1].values())[1:], strict=True):
        assert not isinstance(other, str)
        assert not isinstance(this, str)
        figures[name] = round(other.score, 4)
        figures[f"{name}_difference"] = round(this.score - other.score, 4)
        # Of equal scores sacreBLEU counts resamples that differ by more than nothing: none, which would be p = 0.001.
        figures[f"{name}_p_value"] = 1.0 if this.score == other.score else round(float(this.p_value or 0.0), 4)
        figures[f"{name}_difference_is_real"] = bool(figures[f"{name}_p_value"] < SIGNIFICANT)
    return figures


def reference_warnings(references: list[str]) -> list[str]:
    """What makes references look as if they were not text as people write it."""
    found = []
    punctuated = sum(bool(_PUNCTUATED.search(line)) for line in references)
    tokenised = sum(bool(_TOKENISED.search(line)) for line in references)
    if 2 * tokenised > punctuated:
        found.append("look tokenised: scores on them do not compare; give them detokenised")
    cased = sum(line.upper() != line.lower() for line in references)
    upper = sum(line != line.lower() for line in references)
    if cased and upper < 0.02 * cased:
        found.append("look lower-cased: bleu counts case; give them as they were written, or read bleu_lowercase")
    return found
