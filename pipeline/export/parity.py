"""Compares a bundle's formats with the checkpoint on real sentences, for `parity.json`.

The truth is the checkpoint's network in float64. Searches in float32 agree with it up to a tolerance that follows from
the network and the text, not from a processor: the change of an answer's log-probability when the float64 network gets
noise of float32's rounding, and the rounding of the softmax's sums over the vocabulary, added one term after another. A
format may choose other tokens than the checkpoint only in a tie: when the true scores differ by at most twice the
tolerance. The beam searches of other programs, and int8 and bfloat16, are only reported.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from data_module.batch import length_batches
from data_module.errors import InputError
from data_module.system.files import PlainValues
from data_module.system.text_files import progress_bar
from data_module.tokenization.tokenizer import Tokenizer
from model.decoding import BeamSearch
from model.transformer import PaddedTransformer, Transformer
from pipeline.checkpointing.checkpoint import TrainedModel
from pipeline.export.formats import FORMATS, Answer, Bundle, Format, Ids, Search, own_search
from pipeline.inference.pieces import encode_sources
from pipeline.inference.scoring import score_pairs
from pipeline.inference.text_io import paired_texts
from pipeline.inference.translator import BATCH_TOKENS, LONGEST
from pipeline.metrics.bleu_tokenizer import DEFAULT, tokenizer_of
from pipeline.metrics.metrics import METRICS, corpus_score, metrics_on
from pipeline.runtime.console import report

WARM_UP = 5
"""Number of sentences that are searched twice before the time is measured: TorchScript optimizes at the second call."""
DISTURBED_ANSWERS, DISTURBANCES, SAFETY = 16, 8, 4
"""The tolerance is `SAFETY` times the largest change of `DISTURBED_ANSWERS` answers in `DISTURBANCES` trials each."""
LARGEST_TOLERANCE = 0.1
"""Limit on the tolerance: if rounding to float32 changes log-probabilities by more, formats cannot be compared."""

OUTCOMES = ("equal", "tied", "different")
"""How two answers compare. They tie if the truth gives them the same score, up to twice the tolerance."""

Pair = tuple[Ids, Ids]
"""A source and an answer."""


class Text(NamedTuple):
    """Sentences to compare formats on."""

    name: str
    sources: list[str]
    references: list[str] | None
    bleu_tokenizer: str = DEFAULT
    metric: str = "bleu"
    """The metric of `run.best_by`."""


def parity_text(model: TrainedModel, source: Path | None, reference: Path | None, num_sentences: int) -> Text:
    """Return the given text, or `num_sentences` of the corpus's validation text.

    Raises InputError if the text cannot be read, is empty, or is missing.
    """
    name, folder = source.name if source else "validation text", Path(model.recipe["corpus"]["folder"])
    files = [folder / f"validation.{side}.txt" for side in ("source", "target")]
    if source:
        files = [source, reference] if reference else [source]
    elif not all(file.is_file() for file in files):
        raise InputError(
            f"{files[0]}: is missing, and formats are compared on real sentences; give --parity-source FILE and "
            "--parity-reference FILE"
        )
    texts = paired_texts(*files)
    if not source:
        texts = [lines[:: max(1, len(lines) // num_sentences)][:num_sentences] for lines in texts]
    if not any(map(len, model.tokenizer.encode(texts[0]))):  # U+2581 and the like are no pieces
        raise InputError(f"{files[0]}: has no sentences; give a text to compare formats on")
    best_by = model.recipe["run"]["best_by"]
    metric = best_by if best_by in METRICS else "bleu"  # An extension's metric may not be registered here.
    references = texts[1] if len(texts) > 1 else None
    return Text(name, texts[0], references, tokenizer_of(model.recipe) if references else DEFAULT, metric)


class Truth:
    """The checkpoint's network in float64."""

    def __init__(self, network: Transformer, tokenizer: Tokenizer) -> None:
        self.network, self.tokenizer = PaddedTransformer(copy.deepcopy(network).double()), tokenizer
        self._known: dict[Pair, float] = {}

    def log_probabilities(self, pairs: Sequence[Pair]) -> list[float]:
        """Return log P(answer | source) of each pair. Results are cached, since most formats have the same answers."""
        unknown = [pair for pair in dict.fromkeys(pairs) if pair not in self._known]
        self._known |= zip(unknown, self._forced(unknown, lambda logits: logits.log_softmax(-1)), strict=True)
        return [self._known[pair] for pair in pairs]

    def tolerance(self, pairs: Sequence[Pair]) -> float:
        """Return the tolerance: how far a log-probability in float32 may be from the truth.

        Some of the pairs, of all lengths, are computed again with noise of float32's precision on the output of each
        layer and of the softmax. The precision of their sum is added, since a search sums in float32. In the softmax's
        sum, each of the many terms is rounded to the precision of the whole, often in one direction, and for a barely
        trained network in the same one for all tokens; it is computed as it is, without a factor. A program that keeps
        several partial sums rounds less.
        """
        precision, generator = torch.finfo(torch.float32).eps, torch.Generator().manual_seed(0)

        def noise(values: Tensor) -> Tensor:
            uniform = 2 * torch.rand(values.shape, dtype=values.dtype, generator=generator) - 1
            return precision * values.abs().amax(-1, keepdim=True) * uniform

        def disturb(module: nn.Module, inputs: object, output: Tensor) -> Any:
            return None if list(module.children()) else output + noise(output)

        some = sorted(pairs, key=lambda pair: -len(pair[1]))[:: math.ceil(len(pairs) / DISTURBED_ANSWERS)]
        true = torch.tensor(self.log_probabilities(some) * DISTURBANCES, dtype=torch.float64)
        with register_module_forward_hook(disturb):
            # The softmax subtracts numbers as large as logits, even where the result is near 0.
            forced = self._forced(some * DISTURBANCES, lambda logits: logits.log_softmax(-1) + noise(logits))
        disturbed = torch.tensor(forced, dtype=torch.float64)
        sums = torch.tensor(self._forced(some, _sum_rounding) * DISTURBANCES, dtype=torch.float64)
        return float((SAFETY * ((disturbed - true).abs() + precision * true.abs()) + sums).max())

    def _forced(self, pairs: Sequence[Pair], of_logits: Callable[[Tensor], Tensor]) -> list[float]:
        """Return, for each pair, the sum of what a function of the logits [L, V] gives the answer's tokens."""
        sources, answers = [source for source, _ in pairs], [answer for _, answer in pairs]
        return score_pairs(
            self.network, lambda states: of_logits(self.network.logits(states)), self.tokenizer, sources, answers
        )


def _sum_rounding(logits: Tensor) -> Tensor:
    """Return, for logits [L, V], by how much a sum of exponentials in float32 changes log-probabilities [L, V]."""
    terms = (logits - logits.amax(-1, keepdim=True)).exp()
    one_by_one = torch.from_numpy(np.add.accumulate(terms.float().numpy(), axis=-1)[:, -1:])  # torch sums in float64
    return (one_by_one.double() / terms.sum(-1, keepdim=True)).log().abs().expand_as(logits)


class Parity:
    """The checkpoint's answers for a text, and comparisons of formats with them and with the truth."""

    def __init__(self, model: TrainedModel, text: Text) -> None:
        """Search the text with the checkpoint. Long sources are cut as in translation; empty sources are left out.

        Raises InputError if the network is so sensitive to rounding that formats cannot be compared.
        """
        tokenizer = model.tokenizer
        self.tokenizer, self.settings = tokenizer, model.decoding
        self.metric, self.bleu_tokenizer = text.metric, text.bleu_tokenizer
        longest = min(LONGEST, model.network.positions.max_positions or LONGEST)
        encoded, _ = encode_sources(tokenizer, text.sources, longest)
        kept = [index for index, ids in enumerate(encoded) if len(ids) > 1]
        self.sources: list[Ids] = [tuple(encoded[index]) for index in kept]
        self.texts = [text.sources[index] for index in kept]
        self.references = [text.references[index] for index in kept] if text.references else None
        search = own_search(BeamSearch(model.network, *tokenizer.search_ids).eval(), model)
        self.beam, self.figures = self.measure(search)
        self.greedy = self.answers(search, greedy=True)
        self.truth = Truth(model.network, tokenizer)
        pairs = zip(self.sources, self.greedy, strict=True)
        self.tolerance = self.truth.tolerance([(source, best.tokens) for source, [best] in pairs])
        if not self.tolerance <= LARGEST_TOLERANCE:
            raise InputError(
                f"{model.path}: rounding to float32 changes log-probabilities of its answers by {self.tolerance:.2g}, "
                f"more than {LARGEST_TOLERANCE}: its training has nearly diverged; choose another checkpoint"
            )

    def answers(self, search: Search, greedy: bool) -> list[list[Answer]]:
        """Return a search's answers to each source."""
        found: dict[int, list[Answer]] = {}
        for batch in length_batches(list(map(len, self.sources)), BATCH_TOKENS):
            found |= zip(batch, search([self.sources[index] for index in batch], greedy), strict=True)
        return [found[index] for index in range(len(self.sources))]

    def measure(self, search: Search, greedy: bool = False) -> tuple[list[list[Answer]], PlainValues]:
        """Return a search's answers, and their score and throughput after a warm-up."""
        for _ in range(2):
            search(self.sources[:WARM_UP], greedy)
        started = time.perf_counter()
        answers = self.answers(search, greedy)
        seconds = time.perf_counter() - started
        figures: PlainValues = {
            "target_tokens_per_second": round(sum(len(best.tokens) for best, *_ in answers) / seconds, 1)
        }
        if self.references is not None:
            metric = metrics_on(self.bleu_tokenizer)[self.metric]
            texts = self.tokenizer.decode([best.tokens for best, *_ in answers])
            figures[self.metric] = round(corpus_score(metric, texts, self.references), 4)
            figures[f"{self.metric}_signature"] = metric.signature()
        return answers, figures

    def compare(self, kind: Format, search: Search, n_best: int = 1, bounded: bool = True) -> PlainValues:
        """Return a format's figures.

        Greedy answers, and beam answers of a search with this project's rules, are compared with the truth. Other beam
        searches are only reported, and so is everything unless `bounded`. `n_best` is the number of answers of a search
        whose settings are fixed.
        """
        found, measured = self.measure(search, greedy=kind.beam == "none")
        figures: PlainValues = {"sentences": len(found)}
        if kind.beam == "none":
            figures["search"] = "greedy"
        else:
            equal = [ours[0].tokens == theirs[0].tokens for ours, theirs in zip(self.beam, found, strict=True)]
            figures["share_equal"] = round(sum(equal) / len(equal), 4)
            if self.metric in measured:
                difference = measured[self.metric] - self.figures[self.metric]
                figures[f"{self.metric}_difference"] = round(difference, 4)
        if bounded and kind.beam == "exact":
            figures |= self.judge(found, greedy=False, n_best=None if kind.has_greedy else n_best)
        if bounded and kind.has_greedy:
            greedy = found if kind.beam == "none" else self.answers(search, greedy=True)
            figures |= {f"greedy_{name}": value for name, value in self.judge(greedy, greedy=True).items()}
        return figures | measured

    def judge(self, found: list[list[Answer]], greedy: bool, n_best: int | None = None) -> PlainValues:
        """Return how many best answers have each outcome, and the largest distance of a score to the truth.

        Of greedy answers, tokens after the first difference do not count for a tie, and each score is compared with the
        answer's true one. The scores of a beam are compared with the true ones of the checkpoint's best `n_best`
        answers, all if that is None: hypotheses that tie may be in another order.
        """
        ours, alpha = (self.greedy, 0.0) if greedy else (self.beam, self.settings.length_penalty)
        bests = []
        for [one, *_], [other, *_] in zip(ours, found, strict=True):
            places = enumerate(zip(one.tokens, other.tokens, strict=False), 1) if greedy else ()
            end = next((place for place, (token, another) in places if token != another), None)
            bests.append([one.tokens[:end], other.tokens[:end]])
        right = self._true_scores([[answer.tokens for answer in beam] for beam in (found if greedy else ours)], alpha)
        outcomes, differences = [], []
        for best, scores, true, answers in zip(bests, self._true_scores(bests, alpha), right, found, strict=True):
            is_tie = abs(scores[0] - scores[1]) <= 2 * self.tolerance
            outcomes.append("equal" if best[0] == best[1] else "tied" if is_tie else "different")
            pairs = zip_longest(sorted(true, reverse=True)[:n_best], [one.score for one in answers], fillvalue=math.inf)
            differences += [abs(one - other) for one, other in pairs]
        counts = {outcome: outcomes.count(outcome) for outcome in OUTCOMES}
        # NaN if one is NaN, which Python's `max` may ignore.
        return counts | {"largest_score_difference": float(torch.tensor(differences, dtype=torch.float64).max())}

    def exceeded(self, figures: PlainValues) -> list[str]:
        """Return a message for each bound that a format's figures exceed."""
        messages = []
        for kind, key in (("", ""), ("greedy ", "greedy_")):
            if count := figures.get(f"{key}different"):
                messages.append(f"{count} of {len(self.sources)} {kind}answers differ and are not ties")
            if not (largest := figures.get(f"{key}largest_score_difference", 0.0)) <= self.tolerance:
                messages.append(f"{kind}largest score difference {largest:.2g} is more than {self.tolerance:.2g}")
        return messages

    def _true_scores(self, beams: list[list[Ids]], alpha: float) -> list[list[float]]:
        """Return the score that the truth gives each of the answers to each source."""
        rows = list(zip(self.sources, beams, strict=True))
        found = iter(self.truth.log_probabilities([(source, tokens) for source, beam in rows for tokens in beam]))
        return [[next(found) / ((5.0 + len(tokens)) / 6.0) ** alpha for tokens in beam] for beam in beams]

    def power_penalty(self) -> float:
        """Return the length penalty for CTranslate2 and Transformers that comes nearest to the checkpoint's.

        They divide by length ** alpha, the paper by ((5 + length) / 6) ** alpha. Around a length L, both change
        at the same rate if the first alpha is L / (5 + L) times the second. L is the mean length of the answers.
        """
        length = statistics.mean(len(answers[0].tokens) for answers in self.beam)
        return round(self.settings.length_penalty * length / (5.0 + length), 3)


def compare_formats(bundle: Bundle, names: list[str], parity: Parity) -> dict[str, PlainValues]:
    """Return the size of each format and its figures in each precision. Only float32 has bounds.

    Raises InputError if formats exceed bounds.
    """
    compared: dict[str, PlainValues] = {}
    failures: list[str] = []
    answers = [best.tokens[:-1] for [best] in parity.greedy]
    for name in names:
        report(f"comparing {name}")
        kind, path = FORMATS[name], bundle.folder / name
        files = path.rglob("*") if path.is_dir() else [path]
        compared[name] = {"size_bytes": sum(file.stat().st_size for file in files)}
        with progress_bar(f"comparing {name}", unit=""):
            for precision in kind.precisions:
                search = kind.load(bundle, path, precision)
                figures = parity.compare(kind, search, bundle.n_best, bounded=precision == "float32")
                compared[name][precision] = figures
                failures += [f"{name} ({precision}): {message}" for message in parity.exceeded(figures)]
            messages = kind.check(path, parity.tokenizer, parity.texts, parity.sources, answers)
        failures += [f"{name}: {message}" for message in messages]
    if failures:
        raise InputError(
            f"{bundle.model.path}: formats differ from the checkpoint: {'; '.join(failures)}; nothing was written; "
            "leave such a format out with --format"
        )
    return compared
