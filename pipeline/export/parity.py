"""Comparison of a bundle's formats with the checkpoint on real sentences, for `parity.json`.

The truth is the checkpoint's network in float64. Searches in float32 agree with it up to a tolerance that follows from
the network and the text, not from a processor: how much an answer's log-probability changes if float64 is disturbed as
much as float32 rounds. Formats may choose other tokens than the checkpoint only in a tie, where the truth decides by
less than twice the tolerance. Formats in int8 and bfloat16 are only reported.
"""

import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer
from model.decoding import BeamSearch
from model.padded_transformer import PaddedTransformer
from model.transformer import Transformer
from pipeline.checkpointing.checkpoint import TrainedModel
from pipeline.export.formats import FORMATS, Answer, Bundle, Ids, Runner, SearchRunner
from pipeline.inference.bleu_tokenizer import DEFAULT
from pipeline.inference.metrics import Bleu, corpus_score
from pipeline.inference.scoring import score_pairs
from pipeline.inference.translator import LONGEST, encode_sources

BLEU = 0.1
ENOUGH_SENTENCES = 500
"""With fewer sentences, BLEU's bound is not applied: a single different sentence can exceed it."""
SINGLE_SENTENCES = 5
"""Number of sentences to measure latencies on."""
REPORTED_SHARE = 4
"""One sentence in this many is enough for a precision that is only reported, and that no file is in."""
DISTURBED_ANSWERS, DISTURBANCES, SAFETY = 16, 8, 4
"""The tolerance is `SAFETY` times the largest change of this many answers, each disturbed this many times."""
LARGEST_TOLERANCE = 0.1
"""A network that changes the probability of an answer by more than a tenth when float32 rounds has no right answer."""

Result = TypeVar("Result")
Figures = dict[str, Any]
Pair = tuple[Sequence[int], tuple[int, ...]]
"""Ids of a source and of an answer, both with the end symbol."""


class Text(NamedTuple):
    """Sentences to compare formats on."""

    name: str
    sources: list[str]
    references: list[str] | None
    bleu_tokenizer: str = DEFAULT


class Truth:
    """The checkpoint's network in float64."""

    def __init__(self, network: Transformer, tokenizer: Tokenizer) -> None:
        self.network, self.tokenizer = PaddedTransformer(copy.deepcopy(network).double()), tokenizer
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def log_probabilities(self, pairs: Sequence[Pair]) -> list[float]:
        """Return log P(answer | source) of each pair."""
        keys = [(tuple(source), answer) for source, answer in pairs]
        unknown = [key for key in dict.fromkeys(keys) if key not in self._known]
        self._known |= dict(zip(unknown, self._forced(unknown), strict=True))
        return [self._known[key] for key in keys]

    def tolerance(self, pairs: Sequence[Pair]) -> float:
        """Return how far a log-probability in float32 may be from the truth.

        Some of the pairs, of all lengths, are computed anew with noise of float32's precision on the output of each
        layer and of the softmax. The precision of their sum is added, since a search sums in float32.
        """
        precision, generator = torch.finfo(torch.float32).eps, torch.Generator().manual_seed(0)

        def noise(values: Tensor) -> Tensor:
            uniform = 2 * torch.rand(values.shape, dtype=values.dtype, generator=generator) - 1
            return precision * values.abs().amax(-1, keepdim=True) * uniform

        def disturb(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return output + noise(output)

        longest_first = sorted(pairs, key=lambda pair: -len(pair[1]))
        some = longest_first[:: math.ceil(len(pairs) / DISTURBED_ANSWERS)]
        true = self.log_probabilities(some)
        layers = [module for module in self.network.modules() if not list(module.children())]
        handles = [layer.register_forward_hook(disturb) for layer in layers]
        try:
            disturbed = self._forced(some * DISTURBANCES, noise)
        finally:
            for handle in handles:
                handle.remove()
        changes = zip(disturbed, true * DISTURBANCES, strict=True)
        return SAFETY * largest(abs(noisy - exact) + precision * abs(exact) for noisy, exact in changes)

    def _forced(self, pairs: Sequence[Pair], noise: Callable[[Tensor], Tensor] | None = None) -> list[float]:
        def log_softmax(states: Tensor) -> Tensor:
            logits = self.network.logits(states)
            # The softmax subtracts numbers of the size of logits, also where the result is near 0.
            return logits.log_softmax(-1) + (noise(logits) if noise else 0.0)

        sources, answers = [source for source, _ in pairs], [answer for _, answer in pairs]
        return score_pairs(self.network, log_softmax, self.tokenizer, sources, answers)


class Parity:
    """The checkpoint's answers for a text, and comparisons of formats with them and with the truth."""

    def __init__(self, model: TrainedModel, text: Text) -> None:
        """Search the text with the checkpoint. Long sources are cut as in translation; empty sources are left out.

        Raises:
            InputError: the network is so sensitive to rounding that formats cannot be compared.
        """
        self.tokenizer, self.settings = model.tokenizer, model.decoding
        tokenizer = model.tokenizer
        longest = min(LONGEST, model.network.positions.max_positions or LONGEST)
        encoded, _ = encode_sources(tokenizer, text.sources, longest)
        kept = [index for index, ids in enumerate(encoded) if len(ids) > 1]
        self.sources = [encoded[index] for index in kept]
        self.texts = [text.sources[index] for index in kept]
        self.references = [text.references[index] for index in kept] if text.references else None
        self.bleu_tokenizer = text.bleu_tokenizer
        search = BeamSearch(model.network, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id).eval()
        runner = SearchRunner(search, model, "checkpoint")
        self.beam, self.figures = self.measure(runner.beam)
        self.greedy = runner.greedy(self.sources)
        self.truth = Truth(model.network, tokenizer)
        pairs = zip(self.sources, [answer.tokens for answer in self.greedy], strict=True)
        self.tolerance = self.truth.tolerance(list(pairs))
        if not self.tolerance <= LARGEST_TOLERANCE:
            raise InputError(
                f"{model.path}: rounding to float32 changes log-probabilities of its answers by {self.tolerance:.2g}, "
                f"more than {LARGEST_TOLERANCE}: its training has nearly diverged; choose another checkpoint"
            )

    @property
    def bounds(self) -> Figures:
        """What a format's figures may be."""
        return {
            "tie": 2 * self.tolerance,
            "score_difference": self.tolerance,
            "bleu_difference": BLEU,
            "bleu_difference_from_sentences_on": ENOUGH_SENTENCES,
        }

    def sample(self) -> "Parity":
        """Return a copy with one sentence in `REPORTED_SHARE`."""
        other = copy.copy(self)
        kept = slice(None, None, REPORTED_SHARE)
        other.sources, other.beam, other.greedy = self.sources[kept], self.beam[kept], self.greedy[kept]
        other.texts = self.texts[kept]
        other.references = self.references[kept] if self.references else None
        return other

    def measure(self, search: Callable[[list[Ids]], list[list[Answer]]]) -> tuple[list[list[Answer]], Figures]:
        """Return a search's answers with BLEU, throughput and latency after a warm-up."""
        few = self.sources[:: max(1, len(self.sources) // SINGLE_SENTENCES)][:SINGLE_SENTENCES]
        first, _ = timed(lambda: search(few))
        search(few)
        seconds, answers = timed(lambda: search(self.sources))
        latencies = [timed(lambda source=source: search([source]))[0] for source in few]  # type: ignore[misc]
        num_tokens = sum(len(best[0].tokens) for best in answers)
        figures = {
            "target_tokens_per_second": round(num_tokens / seconds, 1),
            "latency_median_seconds": round(statistics.median(latencies), 5),
            "first_batch_seconds": round(first, 4),
            **self._bleu(answers),
        }
        return answers, figures

    def _bleu(self, answers: list[list[Answer]]) -> Figures:
        if self.references is None:
            return {}
        metric = Bleu(tokenize=self.bleu_tokenizer)
        texts = self.tokenizer.decode([best.tokens for best, *_ in answers])
        return {"bleu": round(corpus_score(metric, texts, self.references), 4), "bleu_signature": metric.signature()}

    def compare(self, runner: Runner, bounded: bool = True) -> Figures:
        """Return a format's figures. "broken" has a message for each bound that they exceed.

        Bounds apply to greedy answers, to beam answers of a search with this project's rules, to the scores of both and
        to BLEU. Another beam search is reported, and so is everything if it is not `bounded`.
        """
        beam, measured = self.measure(runner.beam)
        figures = self._reported(beam, measured) if runner.has_beam else {"search": "greedy"}
        if bounded:
            if runner.own_beam:
                figures |= self.against(beam)
            greedy = runner.greedy(self.sources) if runner.has_beam else [answers[0] for answers in beam]
            figures |= self.greedy_against(greedy)
            answers = [list(answer.tokens[:-1]) for answer in self.greedy]
            figures |= runner.different_texts(self.texts, self.sources, answers)
            figures = {"broken": self.broken(figures), **figures}
        return {**figures, **measured}

    def _reported(self, beam: list[list[Answer]], measured: Figures) -> Figures:
        equal = [ours[0].tokens == theirs[0].tokens for ours, theirs in zip(self.beam, beam, strict=True)]
        figures: Figures = {"share_equal": round(sum(equal) / len(equal), 4)}
        if self.references is not None:
            figures["bleu_difference"] = round(measured["bleu"] - self._bleu(self.beam)["bleu"], 4)
        return figures

    def against(self, beams: list[list[Answer]]) -> Figures:
        """Count equal, tied and different best answers; return how far n-best scores are from the truth at most.

        Two answers tie if the truth gives them the same score, up to twice the tolerance.
        """
        counts, differences = {"equal": 0, "tied": 0, "different": 0}, []
        # At once, because together they take less time.
        self.truth.log_probabilities(
            [(source, answer.tokens) for source, beam in zip(self.sources, self.beam, strict=True) for answer in beam]
        )
        alpha = self.settings.length_penalty
        for source, ours, theirs in zip(self.sources, self.beam, beams, strict=True):
            best = ours[0].tokens, theirs[0].tokens
            is_tie = self._is_tie(source, *best, alpha)
            counts["equal" if best[0] == best[1] else "tied" if is_tie else "different"] += 1
            # Sorted, because hypotheses that tie may be in another order.
            scores = sorted((self._score(source, answer.tokens, alpha) for answer in ours), reverse=True)
            differences += [abs(score - answer.score) for score, answer in zip(scores, theirs, strict=False)]
            if len(ours) != len(theirs):
                differences.append(float("inf"))
        return {**counts, "largest_score_difference": largest(differences)}

    def greedy_against(self, answers: list[Answer]) -> Figures:
        """Count equal, tied and different greedy answers; return how far their scores are from the truth at most.

        Two answers tie if the truth gives the first tokens that differ the same probability.
        """
        counts, differences = {"equal": 0, "tied": 0, "different": 0}, []
        scores = self.truth.log_probabilities(
            list(zip(self.sources, [answer.tokens for answer in answers], strict=True))
        )
        for source, ours, theirs, score in zip(self.sources, self.greedy, answers, scores, strict=True):
            pairs = enumerate(zip(ours.tokens, theirs.tokens, strict=False), start=1)
            end = next((length for length, pair in pairs if pair[0] != pair[1]), None)
            is_tie = end is not None and self._is_tie(source, ours.tokens[:end], theirs.tokens[:end], 0.0)
            counts["equal" if ours.tokens == theirs.tokens else "tied" if is_tie else "different"] += 1
            differences.append(abs(score - theirs.score))
        figures = {**counts, "largest_score_difference": largest(differences)}
        return {f"greedy_{name}": figure for name, figure in figures.items()}

    def _is_tie(self, source: Ids, ours: tuple[int, ...], theirs: tuple[int, ...], alpha: float) -> bool:
        return abs(self._score(source, ours, alpha) - self._score(source, theirs, alpha)) <= 2 * self.tolerance

    def _score(self, source: Ids, answer: tuple[int, ...], alpha: float) -> float:
        [log_probability] = self.truth.log_probabilities([(source, answer)])
        return log_probability / ((5.0 + len(answer)) / 6.0) ** alpha

    def power_penalty(self) -> float:
        """Return the length penalty for CTranslate2 and Transformers that comes nearest to the checkpoint's.

        They divide by length ** alpha, the paper by ((5 + length) / 6) ** alpha. Around a length L, both change
        at the same rate if the first alpha is L / (5 + L) times the second. L is the mean length of the answers.
        """
        length = statistics.mean(len(answers[0].tokens) for answers in self.beam)
        return round(self.settings.length_penalty * length / (5.0 + length), 3)

    def broken(self, figures: Figures) -> list[str]:
        """Return messages about the bounds that a format's figures exceed."""
        messages = []
        for kind in ("", "greedy "):
            prefix = kind.replace(" ", "_")
            if count := figures.get(f"{prefix}different"):
                messages.append(f"{count} of {len(self.sources)} {kind}answers differ and are not ties")
            difference = figures.get(f"{prefix}largest_score_difference", 0.0)
            if not difference <= self.tolerance:
                messages.append(f"{kind}largest score difference {difference:.2g} is more than {self.tolerance:.2g}")
        for kind, what in (("sources", "encodes"), ("answers", "decodes")):
            if count := figures.get(f"tokenizer_{kind}_different"):
                messages.append(f"its tokenizer {what} {count} of {len(self.sources)} {kind} differently")
        difference = figures.get("bleu_difference", 0.0)
        if not abs(difference) <= BLEU and len(self.sources) >= ENOUGH_SENTENCES:
            messages.append(f"BLEU differs by {difference:+.2f}, more than {BLEU}")
        return messages


def compare_formats(bundle: Bundle, names: list[str], parity: Parity) -> dict[str, Figures]:
    """Return the size of each format and its figures in each precision. Only float32 has bounds."""
    figures: dict[str, Figures] = {}
    for name in names:
        print(f"comparing {name}", file=sys.stderr)
        path = bundle.folder / name
        figures[name] = {"size_bytes": size(path)}
        for precision, load in FORMATS[name].load(bundle, path).items():
            # No file is in bfloat16: fewer sentences are enough.
            text = parity.sample() if precision == "bfloat16" else parity
            seconds, runner = timed(load)
            compared = text.compare(runner, bounded=precision.startswith("float32"))
            figures[name][precision] = {"load_seconds": seconds, "sentences": len(text.sources), **compared}
    return figures


def broken_bounds(figures: dict[str, Figures]) -> list[str]:
    """Return messages about the bounds that do not hold, with format and precision."""
    return [
        f"{name} ({precision}): {message}"
        for name, precisions in figures.items()
        for precision, compared in precisions.items()
        if isinstance(compared, dict)
        for message in compared.get("broken", [])
    ]


def largest(differences: Iterable[float]) -> float:
    """Return the largest difference, 0 if there is none, and NaN if one is NaN, which Python's `max` may ignore."""
    return float(torch.tensor([0.0, *differences], dtype=torch.float64).max())


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """Call a function; return the seconds that it took and its result."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def size(path: Path) -> int:
    """Return the size in bytes of a file or of all files in a folder."""
    return sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size
