"""Scores of given translations by teacher forcing, and word alignments, in batches of sentences of similar length."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from data_module.batch import length_batches
from data_module.errors import InputError
from data_module.tokenization.tokenizer import SPACE_MARK, Tokenizer, normalize_white_space
from model.attention_maps import attention_maps
from model.decoding import penalty
from model.transformer import Transformer
from pipeline.inference.pieces import encode_sources
from pipeline.inference.text_io import SentenceWarnings
from pipeline.inference.translator import EMPTY, Hypothesis, Translator, padded

Alignment = list[tuple[int, int]]
"""Pairs of a source and a target word, counted from 0."""

Pieces = list[tuple[str, float]]
"""A sentence's pieces, the end symbol last, each with its log-probability given the pieces before it."""

_BATCH_TOKENS = 2048
"""Upper bound on the padded tokens of a batch on either side."""
_SCORED_TOKENS = 256
"""Target tokens whose log-probabilities over the vocabulary are in memory at the same time."""


def score_pairs(*arguments: Any, **more: Any) -> list[float]:
    """Return log P(target | source) of each pair, 0 for a pair of empty sentences; see `score_pieces`."""
    return [math.fsum(pieces) for pieces in score_pieces(*arguments, **more)]


@torch.inference_mode()
def score_pieces(
    network: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    log_softmax: Callable[[Tensor], Tensor],
    tokenizer: Tokenizer,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
    finished: Callable[[int], object] = lambda count: None,
) -> list[list[float]]:
    """Return the log-probability of each target token given those before it; none for a pair of empty sentences.

    Args:
        network: maps source ids [B, S], target ids [B, T] with the begin symbol, and a mask [B, S] that is False at
            padding, None without padding, to states [B, T, D].
        log_softmax: maps states [L, D] to log-probabilities of the next tokens [L, vocabulary].
        sources: ids, each with the end symbol.
        targets: ids, each with the end symbol, and not longer than the network's learned positions.
        finished: called with a number of pairs whenever some have been scored.
    """
    results: list[list[float]] = [[] for _ in sources]
    for batch, source, mask, target in _batches(tokenizer, sources, targets, device):
        states = network(source, target[:, :-1], mask)
        parts = []
        labels = target[:, 1:].flatten().split(_SCORED_TOKENS)
        for chunk, chunk_labels in zip(states.flatten(0, 1).split(_SCORED_TOKENS), labels, strict=True):
            parts.append(log_softmax(chunk).gather(1, chunk_labels.unsqueeze(1)))
        for index, chances in zip(batch, torch.cat(parts).view(len(batch), -1).tolist(), strict=True):
            results[index] = chances[: len(targets[index])]
        finished(len(batch))
    return results


def _batches(
    tokenizer: Tokenizer, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], device: torch.device | str
) -> Iterator[tuple[list[int], Tensor, Tensor | None, Tensor]]:
    """Yield indices of pairs, source [B, S], its mask (None without padding), and target with the begin symbol."""
    lengths = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    for batch in length_batches(lengths, _BATCH_TOKENS):
        source, mask = padded([sources[index] for index in batch], tokenizer.pad_id)
        target, _ = padded([[tokenizer.bos_id, *targets[index]] for index in batch], tokenizer.pad_id)
        needed = None if bool(mask.all()) else mask.to(device)
        yield batch, source.to(device), needed, target.to(device)


def score_targets(
    translator: Translator,
    network: Any,
    source_ids: Sequence[Sequence[int]],
    target_ids: Sequence[Sequence[int]],
    texts: Sequence[str],
    length_penalty: float,
    finished: Callable[[int], object] = lambda count: None,
) -> tuple[list[Hypothesis], list[Pieces]]:
    """Return each target as a hypothesis with its text in `texts`, scored as by `translate`, and its pieces.

    A pair of empty sentences has no pieces. `network` is a `PaddedTransformer`, or the one in an exported `BeamSearch`;
    see `score_pieces` for other arguments.

    Raises InputError if a score is not finite.
    """

    def log_softmax(states: Tensor) -> Tensor:
        return network.logits(states).float().log_softmax(-1)

    tokenizer, device = translator.tokenizer, translator.device
    scores = score_pieces(network, log_softmax, tokenizer, source_ids, target_ids, device, finished)
    if not all(math.isfinite(score) for row in scores for score in row):
        raise InputError(f"{translator.name}: its scores are not finite; choose a checkpoint with finite weights")
    pieces, penalties = tokenizer.pieces(), penalty(torch.tensor([len(row) for row in scores]), length_penalty).tolist()
    hypotheses = [
        Hypothesis(text, math.fsum(row) / divisor, math.fsum(row), len(row)) if row else EMPTY
        for text, row, divisor in zip(texts, scores, penalties, strict=True)
    ]
    rows = zip(target_ids, scores, strict=True)
    return hypotheses, [[(pieces[one], score) for one, score in zip(ids, row, strict=False)] for ids, row in rows]


def align_words(
    network: Transformer,
    tokenizer: Tokenizer,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    texts: tuple[Sequence[str], Sequence[str]],
    device: torch.device | str = "cpu",
) -> list[Alignment]:
    """Align each target word with the source word that gets most of its cross-attention, or with none.

    The weights are the mean of all heads of the upper half of the decoder's layers, at the positions where the word's
    pieces are predicted. A word that attends most to the end symbol is left out. Of single layers, the last or the one
    before it is best, depending on the network, and the mean is no worse. One position later, where the pieces are the
    decoder's input (Chen et al. 2020, https://arxiv.org/abs/2004.14837), only lower layers align, after long training.

    Args:
        network: a network in evaluation mode.
        sources: ids, each with the end symbol, like `targets`.
        texts: sources and targets as they are written. Only spaces (U+0020) end their words.
    """
    results = [Alignment() for _ in sources]
    for batch, source, mask, target in _batches(tokenizer, sources, targets, device):
        maps = attention_maps(network, source, target[:, :-1], mask)["cross"]
        weights = torch.stack(maps[len(maps) // 2 :]).mean((0, 2)).cpu()
        for index, attention in zip(batch, weights, strict=True):
            rows = _words(len(targets[index]) - 1, texts[1][index], tokenizer.target)
            columns = _words(len(sources[index]) - 1, texts[0][index], tokenizer)
            end = columns[-1] + 1 if columns else 0
            by_piece = attention.new_zeros(len(rows), end + 1)
            by_piece.index_add_(1, torch.tensor([*columns, end]), attention[: len(rows), : len(columns) + 1])
            by_word = attention.new_zeros(rows[-1] + 1 if rows else 0, end + 1)
            by_word.index_add_(0, torch.tensor(rows, dtype=torch.int64), by_piece)
            best = enumerate(by_word.argmax(1).tolist())
            results[index] = [(source_word, word) for word, source_word in best if word in rows and source_word < end]
    return results


def _words(count: int, text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the number of the word of `text` that each of its first `count` pieces belongs to.

    Neighbouring unknown words may be one piece, which belongs to the first of them.
    """
    # A tokenizer also reads a tab, for instance, as a space: a word of the text may be several of its words, or none.
    spelled = tokenizer.normalize([normalize_white_space(word) for word in text.split(" ") if word])
    numbers = [number for number, word in enumerate(spelled) for part in word.split(SPACE_MARK) if part]
    words, place = [], -1
    for piece in tokenizer.spell(text)[:count]:
        place += piece.startswith(SPACE_MARK) or place < 0
        words.append(numbers[place])
        place += piece.count(SPACE_MARK, 1)
    return words


def dual_cross_entropy(forward: Hypothesis, reverse: Hypothesis) -> float:
    """Return |H1 - H2| + (H1 + H2) / 2 of a pair; infinity for a pair of empty sentences.

    H is the negative log-probability divided by the number of tokens (Junczys-Dowmunt 2018,
    https://arxiv.org/abs/1809.00197, dual conditional cross-entropy).
    """
    if not forward.num_tokens:
        return math.inf
    first, second = (-one.log_probability / one.num_tokens for one in (forward, reverse))
    return abs(first - second) + (first + second) / 2


class Scorer:
    """Scores windows of pairs with one model, and counts the lines with defects."""

    def __init__(self, translator: Translator) -> None:
        """The search of `translator` must hold a network, which a `CompiledSearch` does not."""
        self._translator, self._network = translator, translator.search.network
        self.warnings = SentenceWarnings(translator.prefixes, translator.max_source_tokens, translator.name)

    def score(
        self, numbers: list[int], sources: list[str], targets: list[str], with_alignments: bool = False
    ) -> tuple[list[Hypothesis], list[Alignment], list[Pieces]]:
        """Return the score of each pair, its alignment, which is empty unless alignments are wanted, and its pieces.

        Sentences longer than `Translator.max_source_tokens` are cut; warnings name them by `numbers`, their lines.
        """
        translator, tokenizer = self._translator, self._translator.tokenizer
        longest = translator.max_source_tokens
        source_ids, source_defects = encode_sources(tokenizer, sources, longest, translator.prefixes)
        target_ids, target_defects = encode_sources(tokenizer.target, targets, longest)
        for number, of_source, of_target in zip(numbers, source_defects, target_defects, strict=True):
            self.warnings.add(number, of_source)
            self.warnings.add(number, of_target)
        alpha = translator.settings.length_penalty
        scored, pieces = score_targets(translator, self._network, source_ids, target_ids, targets, alpha)
        if not with_alignments:
            return scored, [Alignment() for _ in scored], pieces
        texts, network = (sources, targets), self._network.network
        return scored, align_words(network, tokenizer, source_ids, target_ids, texts, translator.device), pieces
