"""Compares a bundle's formats with the checkpoint on real sentences, for `parity.json`.

The truth is the checkpoint's network in float64. Searches in float32 agree with it up to a tolerance that follows from
the network and the text, not from a processor: the change of an answer's log-probability when the float64 network gets
noise of float32's rounding. A format may choose other tokens than the checkpoint only in a tie: when the true scores
differ by at most twice the tolerance. The beam searches of other programs, and int8 and bfloat16, are only reported.
"""

import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from data_module.errors import InputError
from data_module.files import PlainValues
from data_module.tokenization.tokenizer import Tokenizer
from model.decoding import BeamSearch
from model.transformer import PaddedTransformer, Transformer
from pipeline.checkpointing.checkpoint import TrainedModel
from pipeline.export.formats import FORMATS, Answer, Bundle, Ids, Runner, SearchRunner
from pipeline.inference.bleu_tokenizer import DEFAULT, tokenizer_of
from pipeline.inference.metrics import METRICS, corpus_score, metrics_on
from pipeline.inference.pieces import encode_sources
from pipeline.inference.scoring import score_pairs
from pipeline.inference.text_io import paired_texts, read_sentences
from pipeline.inference.translator import LONGEST

WARM_UP = 5
"""Number of sentences that are searched twice before the time is measured: TorchScript optimizes at the second call."""
DISTURBED_ANSWERS, DISTURBANCES, SAFETY = 16, 8, 4
"""The tolerance is `SAFETY` times the largest change of `DISTURBED_ANSWERS` answers in `DISTURBANCES` trials each."""
LARGEST_TOLERANCE = 0.1
"""Limit on the tolerance: if rounding to float32 changes log-probabilities by more, formats cannot be compared."""

OUTCOMES = ("equal", "tied", "different")
"""How two answers compare. They tie if the truth gives them the same score, up to twice the tolerance."""

Figures = PlainValues
Pair = tuple[Sequence[int], tuple[int, ...]]
"""Ids of a source and of an answer, both with the end symbol."""


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
    best_by = model.recipe["run"]["best_by"]
    metric = best_by if best_by in METRICS else "bleu"  # An extension's metric may not be registered here.
    if source is not None:
        sources, references = (read_sentences(source), None) if reference is None else paired_texts(source, reference)
        if not any(map(len, model.tokenizer.encode(sources))):  # U+2581 and the like are no pieces
            raise InputError(f"{source}: has no sentences; give a text to compare formats on")
        return Text(source.name, sources, references, tokenizer_of(model.recipe) if references else DEFAULT, metric)
    folder = Path(model.recipe["corpus"]["folder"])
    source, reference = folder / "validation.source.txt", folder / "validation.target.txt"
    if not (source.is_file() and reference.is_file()):
        raise InputError(
            f"{source}: is missing, and formats are compared on real sentences; give --parity-source FILE and "
            "--parity-reference FILE"
        )
    sources, references = paired_texts(source, reference)
    kept = slice(None, None, max(1, len(sources) // num_sentences))
    sources, references = sources[kept][:num_sentences], references[kept][:num_sentences]
    return Text("validation text", sources, references, tokenizer_of(model.recipe), metric)


class Truth:
    """The checkpoint's network in float64."""

    def __init__(self, network: Transformer, tokenizer: Tokenizer) -> None:
        self.network, self.tokenizer = PaddedTransformer(copy.deepcopy(network).double()), tokenizer
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def log_probabilities(self, pairs: Sequence[Pair]) -> list[float]:
        """Return log P(answer | source) of each pair. Results are cached, since most formats have the same answers."""
        keys = [(tuple(source), answer) for source, answer in pairs]
        unknown = [key for key in dict.fromkeys(keys) if key not in self._known]
        self._known |= dict(zip(unknown, self._forced(unknown), strict=True))
        return [self._known[key] for key in keys]

    def tolerance(self, pairs: Sequence[Pair]) -> float:
        """Return the tolerance: how far a log-probability in float32 may be from the truth.

        Some of the pairs, of all lengths, are computed again with noise of float32's precision on the output of each
        layer and of the softmax. The precision of their sum is added, since a search sums in float32.
        """
        precision, generator = torch.finfo(torch.float32).eps, torch.Generator().manual_seed(0)

        def noise(values: Tensor) -> Tensor:
            uniform = 2 * torch.rand(values.shape, dtype=values.dtype, generator=generator) - 1
            return precision * values.abs().amax(-1, keepdim=True) * uniform

        def disturb(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
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
            # The softmax subtracts numbers as large as logits, even where the result is near 0.
            return logits.log_softmax(-1) + (noise(logits) if noise else 0.0)

        sources, answers = [source for source, _ in pairs], [answer for _, answer in pairs]
        return score_pairs(self.network, log_softmax, self.tokenizer, sources, answers)


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
        self.sources = [encoded[index] for index in kept]
        self.texts = [text.sources[index] for index in kept]
        self.references = [text.references[index] for index in kept] if text.references else None
        runner = SearchRunner(
            BeamSearch(model.network, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id).eval(), model
        )
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

    def measure(self, search: Callable[[list[Ids]], list[list[Answer]]]) -> tuple[list[list[Answer]], Figures]:
        """Return a search's answers, and their score and throughput after a warm-up."""
        for _ in range(2):
            search(self.sources[:WARM_UP])
        started = time.perf_counter()
        answers = search(self.sources)
        seconds = time.perf_counter() - started
        figures: Figures = {
            "target_tokens_per_second": round(sum(len(best.tokens) for best, *_ in answers) / seconds, 1)
        }
        if self.references is not None:
            metric = metrics_on(self.bleu_tokenizer)[self.metric]
            texts = self.tokenizer.decode([best.tokens for best, *_ in answers])
            figures[self.metric] = round(corpus_score(metric, texts, self.references), 4)
            figures[f"{self.metric}_signature"] = metric.signature()
        return answers, figures

    def compare(self, runner: Runner, bounded: bool = True) -> tuple[Figures, list[str]]:
        """Return a format's figures, and a message for each bound that they exceed.

        Bounds apply to greedy answers, to beam answers of a search with this project's rules, and to the scores of
        both. Other beam searches are only reported, and so is everything unless `bounded`.
        """
        beam, measured = self.measure(runner.beam)
        figures: Figures = {"sentences": len(beam)}
        if runner.has_beam:
            equal = [one[0].tokens == other[0].tokens for one, other in zip(self.beam, beam, strict=True)]
            figures["share_equal"] = round(sum(equal) / len(equal), 4)
            if (name := self.metric) in measured:
                figures[f"{name}_difference"] = round(measured[name] - self.figures[name], 4)
        else:
            figures["search"] = "greedy"
        messages: list[str] = []
        if bounded:
            judged = [("", *self.beam_against(beam, runner.n_best))] if runner.own_beam else []
            if runner.has_greedy:
                greedy = runner.greedy(self.sources) if runner.has_beam else [answer for answer, *_ in beam]
                judged.append(("greedy ", *self.greedy_against(greedy)))
            for kind, outcomes, differences in judged:
                figures |= {f"{kind}{name}".replace(" ", "_"): outcomes.count(name) for name in OUTCOMES}
                difference = largest(differences)
                figures[f"{kind}largest score difference".replace(" ", "_")] = difference
                if count := outcomes.count("different"):
                    messages.append(f"{count} of {len(outcomes)} {kind}answers differ and are not ties")
                if not difference <= self.tolerance:
                    messages.append(
                        f"{kind}largest score difference {difference:.2g} is more than {self.tolerance:.2g}"
                    )
            answers = [list(answer.tokens[:-1]) for answer in self.greedy]
            messages += runner.tokenizer_differences(self.texts, self.sources, answers)
        return {**figures, **measured}, messages

    def beam_against(self, beams: list[list[Answer]], n_best: int | None = None) -> tuple[list[str], list[float]]:
        """Return whether each best answer is equal, tied or different, and the distances of n-best scores to the truth.

        Each of `beams` has the best `n_best` answers, or the whole beam if that is None.
        """
        outcomes, differences, alpha = [], [], self.settings.length_penalty
        # All at once, which takes less time.
        self.truth.log_probabilities(
            [(source, answer.tokens) for source, beam in zip(self.sources, self.beam, strict=True) for answer in beam]
        )
        for source, ours, theirs in zip(self.sources, self.beam, beams, strict=True):
            outcomes.append(self._outcome(source, ours[0].tokens, theirs[0].tokens, alpha))
            # Sorted, because hypotheses that tie may be in another order.
            scores = sorted((self._score(source, answer.tokens, alpha) for answer in ours), reverse=True)[:n_best]
            differences += [abs(score - answer.score) for score, answer in zip(scores, theirs, strict=False)]
            if len(scores) != len(theirs):
                differences.append(math.inf)
        return outcomes, differences

    def greedy_against(self, answers: list[Answer]) -> tuple[list[str], list[float]]:
        """Return whether each greedy answer is equal, tied or different, and the distance of its score to the truth."""
        outcomes, differences = [], []
        true = self.truth.log_probabilities(
            [(source, answer.tokens) for source, answer in zip(self.sources, answers, strict=True)]
        )
        for source, ours, theirs, score in zip(self.sources, self.greedy, answers, true, strict=True):
            # Tokens after the first difference do not count for a tie.
            pairs = enumerate(zip_longest(ours.tokens, theirs.tokens), start=1)
            end = next((length for length, pair in pairs if pair[0] != pair[1]), None)
            outcomes.append(self._outcome(source, ours.tokens[:end], theirs.tokens[:end], 0.0))
            differences.append(abs(score - theirs.score))
        return outcomes, differences

    def _outcome(self, source: Ids, ours: tuple[int, ...], theirs: tuple[int, ...], alpha: float) -> str:
        """Return which of `OUTCOMES` two answers have."""
        if ours == theirs:
            return "equal"
        difference = self._score(source, ours, alpha) - self._score(source, theirs, alpha)
        return "tied" if abs(difference) <= 2 * self.tolerance else "different"

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


def compare_formats(bundle: Bundle, names: list[str], parity: Parity) -> dict[str, Figures]:
    """Return the size of each format and its figures in each precision. Only float32 has bounds.

    Raises InputError if formats exceed bounds.
    """
    report: dict[str, Figures] = {}
    failures: list[str] = []
    for name in names:
        print(f"comparing {name}", file=sys.stderr)
        path = bundle.folder / name
        files = path.rglob("*") if path.is_dir() else [path]
        report[name] = {"size_bytes": sum(file.stat().st_size for file in files)}
        for precision in FORMATS[name].precisions:
            runner = FORMATS[name].load(bundle, path, precision)
            figures, messages = parity.compare(runner, bounded=precision == "float32")
            report[name][precision] = figures
            failures += [f"{name} ({precision}): {message}" for message in messages]
    if failures:
        raise InputError(
            f"{bundle.model.path}: formats differ from the checkpoint: {'; '.join(failures)}; nothing was written; "
            "leave such a format out with --format"
        )
    return report


def largest(differences: Iterable[float]) -> float:
    """Return the largest difference, 0 if there is none, and NaN if one is NaN, which Python's `max` may ignore."""
    return float(torch.tensor([0.0, *differences], dtype=torch.float64).max())
