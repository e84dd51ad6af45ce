"""Comparison of a bundle's formats with the checkpoint on real sentences, for `parity.json`.

Bounds apply to float32; int8 and bfloat16 are only reported. Two different answers are a tie if, under the checkpoint's
network, the first tokens that differ have the same log-probability (greedy search) or the answers have the same score
(beam search), up to `TIE`.
"""

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from data_module.tokenization.tokenizer import Tokenizer
from model.decoding import BeamSearch
from model.settings import DecodingSettings
from model.transformer import Transformer
from pipeline.export.runners import Answer, Ids, SearchRunner
from pipeline.inference.bleu_tokenizer import DEFAULT
from pipeline.inference.metrics import Bleu, corpus_score
from pipeline.inference.translator import padded

TIE = 1e-5
SCORES = 1e-4
LOGITS = 1e-4
BLEU = 0.1
ENOUGH_SENTENCES = 500
"""With fewer sentences, BLEU's bound is not applied: a single different sentence can exceed it."""
BOUNDS = {
    "tie": TIE,
    "score_difference": SCORES,
    "logit_difference": LOGITS,
    "bleu_difference": BLEU,
    "bleu_difference_from_sentences_on": ENOUGH_SENTENCES,
}
SINGLE_SENTENCES = 5
"""Number of sentences to measure latencies on."""
REPORTED_SHARE = 4
"""One sentence in this many is enough for a precision that is only reported, and that no file is in."""

Result = TypeVar("Result")
Figures = dict[str, Any]


class Text(NamedTuple):
    """Sentences to compare formats on."""

    name: str
    sources: list[str]
    references: list[str] | None
    bleu_tokenizer: str = DEFAULT


class Parity:
    """The checkpoint's answers for a text, and comparisons of other formats' answers with them."""

    def __init__(
        self, network: Transformer, tokenizer: Tokenizer, settings: DecodingSettings, text: Text, longest: int
    ) -> None:
        """Search the text with the checkpoint. Sources are cut to `longest` tokens; empty sources are left out."""
        self.network, self.tokenizer, self.settings = network, tokenizer, settings
        self.name, self.longest = "checkpoint", longest
        encoded = [[*ids.tolist()[: longest - 1], tokenizer.eos_id] for ids in tokenizer.encode(text.sources)]
        kept = [index for index, ids in enumerate(encoded) if len(ids) > 1]
        self.sources = [encoded[index] for index in kept]
        self.texts = [text.sources[index] for index in kept]
        self.references = [text.references[index] for index in kept] if text.references else None
        self.bleu_tokenizer = text.bleu_tokenizer
        self._search()

    def _search(self) -> None:
        tokenizer = self.tokenizer
        search = BeamSearch(self.network, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id).eval()
        runner = SearchRunner(search, tokenizer, self.settings, self.name)
        self.beam, self.figures = self.measure(runner.beam)
        self.greedy = runner.greedy(self.sources)
        self.bleu = self.figures.get("bleu")

    def with_network(self, network: Transformer, name: str) -> "Parity":
        """Return a copy that compares with another form of the network, `name` in the progress bar."""
        other = copy.copy(self)
        other.network, other.name = network, name
        other._search()
        return other

    def sample(self) -> "Parity":
        """Return a copy with one sentence in `REPORTED_SHARE`."""
        other = copy.copy(self)
        kept = slice(None, None, REPORTED_SHARE)
        other.sources, other.beam, other.greedy = self.sources[kept], self.beam[kept], self.greedy[kept]
        other.texts = self.texts[kept]
        other.references = self.references[kept] if self.references else None
        other.bleu = other._bleu([answers[0] for answers in other.beam]).get("bleu")
        return other

    def measure(self, beam: Callable[[list[Ids]], list[list[Answer]]]) -> tuple[list[list[Answer]], Figures]:
        """Return a format's answers with BLEU, throughput and latency after a warm-up."""
        few = self.sources[:: max(1, len(self.sources) // SINGLE_SENTENCES)][:SINGLE_SENTENCES]
        first, _ = timed(lambda: beam(few))
        beam(few)
        seconds, answers = timed(lambda: beam(self.sources))
        latencies = [timed(lambda one=one: beam([one]))[0] for one in few]  # type: ignore[misc]
        num_tokens = sum(len(best[0].tokens) for best in answers)
        figures = {
            "target_tokens_per_second": round(num_tokens / seconds, 1),
            "latency_median_seconds": round(statistics.median(latencies), 5),
            "first_batch_seconds": round(first, 4),
            **self._bleu([best[0] for best in answers]),
        }
        return answers, figures

    def _bleu(self, answers: list[Answer]) -> Figures:
        if self.references is None:
            return {}
        metric = Bleu(tokenize=self.bleu_tokenizer)
        texts = self.tokenizer.decode([answer.tokens for answer in answers])
        return {"bleu": round(corpus_score(metric, texts, self.references), 4), "bleu_signature": metric.signature()}

    def against(self, found: list[list[Answer]]) -> Figures:
        """Count equal, tied and different best answers; return the largest difference between n-best scores."""
        counts = {"equal": 0, "tied": 0, "different": 0}
        differences: list[float] = []
        for one, other in zip(self.beam, found, strict=True):
            same = one[0].tokens == other[0].tokens
            tie = abs(one[0].score - other[0].score) <= TIE
            counts["equal" if same else "tied" if tie else "different"] += 1
            differences += [abs(a.score - b.score) for a, b in zip(one, other, strict=False)]
            if len(one) != len(other):
                differences.append(float("inf"))
        return {**counts, "largest_score_difference": largest(differences)}

    def greedy_against(self, found: list[Answer]) -> Figures:
        """Count equal, tied and different greedy answers."""
        counts = {"equal": 0, "tied": 0, "different": 0}
        for source, one, other in zip(self.sources, self.greedy, found, strict=True):
            same = one.tokens == other.tokens
            counts["equal" if same else "tied" if self._is_tie(source, one, other) else "different"] += 1
        return {f"greedy_{name}": count for name, count in counts.items()}

    @torch.no_grad()
    def _is_tie(self, source: Ids, one: Answer, other: Answer) -> bool:
        place = next(
            (i for i, pair in enumerate(zip(one.tokens, other.tokens, strict=False)) if len(set(pair)) > 1), None
        )
        if place is None:
            return False
        target = torch.tensor([[self.tokenizer.bos_id, *one.tokens[:place]]])
        chances = self.network.logits(self.network(torch.tensor([source]), target)[0, -1]).log_softmax(-1)
        return bool((chances[one.tokens[place]] - chances[other.tokens[place]]).abs() <= TIE)

    def share_equal(self, found: list[list[Answer]]) -> float:
        """Return the share of sentences whose best answers are equal."""
        pairs = zip(self.beam, found, strict=True)
        return round(sum(one[0].tokens == other[0].tokens for one, other in pairs) / len(found), 4)

    @torch.no_grad()
    def log_probabilities(self) -> list[float]:
        """Return the log-probability of each of the checkpoint's greedy answers, by teacher forcing."""
        totals = []
        for source, answer in zip(self.sources, self.greedy, strict=True):
            target = torch.tensor([[self.tokenizer.bos_id, *answer.tokens]])
            chances = self.network.logits(self.network(torch.tensor([source]), target[:, :-1])).log_softmax(-1)
            totals.append(float(chances.gather(2, target[:, 1:, None]).double().sum()))
        return totals

    @torch.no_grad()
    def logits_difference(self, forced: Callable[..., torch.Tensor]) -> float:
        """Return the largest difference in logits over all steps of the checkpoint's greedy answers.

        `forced` maps source [B, S], mask [B, S] and target [B, T] to a format's logits [B, T, vocabulary].
        """
        differences: list[float] = []
        # Answers of like length together: fewer steps.
        order = sorted(range(len(self.sources)), key=lambda index: len(self.greedy[index].tokens))
        for start in range(0, len(order), 20):
            batch = order[start : start + 20]
            source, mask = padded([self.sources[index] for index in batch], self.tokenizer.pad_id)
            answers = [[self.tokenizer.bos_id, *self.greedy[index].tokens[:-1]] for index in batch]
            target, is_token = padded(answers, self.tokenizer.pad_id)
            expected = self.network.logits(self.network(source, target, mask))
            difference = (forced(source, mask, target) - expected).abs().amax(-1)
            differences.append(float(difference.masked_fill(~is_token, 0.0).max()))
        return largest(differences)

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
        for kind in ("", "greedy_"):
            if count := figures.get(f"{kind}different"):
                kind_of_answers = f"{kind.replace('_', ' ')}answers"
                messages.append(f"{count} of {len(self.sources)} {kind_of_answers} differ and are not ties")
        for name, bound in (
            ("largest_score_difference", SCORES),
            ("largest_forced_score_difference", SCORES),
            ("largest_logit_difference", LOGITS),
        ):
            if not figures.get(name, 0.0) <= bound:
                messages.append(f"{name.replace('_', ' ')} {figures[name]:.2g} is more than {bound}")
        for kind, what in (("sources", "encodes"), ("answers", "decodes")):
            if count := figures.get(f"tokenizer_{kind}_different"):
                messages.append(f"its tokenizer {what} {count} of {len(self.sources)} {kind} differently")
        difference = figures.get("bleu_difference", 0.0)
        if not abs(difference) <= BLEU and len(self.sources) >= ENOUGH_SENTENCES:
            messages.append(f"BLEU differs by {difference:+.2f}, more than {BLEU}")
        return messages


def largest(differences: Iterable[float]) -> float:
    """Return the largest difference, 0 if there is none, and NaN if one is NaN, which Python's `max` may ignore."""
    return float(torch.tensor([0.0, *differences], dtype=torch.float64).max())


def different(found: Sequence[object], expected: Sequence[object]) -> int:
    """Return how many items of two sequences of one length differ."""
    return sum(one != other for one, other in zip(found, expected, strict=True))


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """Call a function; return the seconds that it took and its result."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def size(path: Path) -> int:
    """Return the size in bytes of a file or of all files in a folder."""
    return sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size
