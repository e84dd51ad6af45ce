"""Log-probabilities of given translations, by teacher forcing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model.decoding import penalty
from pipeline.inference.length_batches import length_batches, padded
from pipeline.inference.translator import Hypothesis, Translator

_BATCH_TOKENS = 2048
"""Upper bound on the padded tokens of a batch on either side."""
_ROWS = 256
"""Target tokens whose logits are in memory at the same time."""


def score_pairs(
    network: Any,
    translator: Translator,
    sources: list[list[int]],
    targets: list[list[int]],
    texts: list[str],
    finished: Callable[[int], object],
) -> list[Hypothesis]:
    """Return each target as the hypothesis that a search would return, had it found the target.

    Args:
        network: the network, a `Transformer` or one in an exported search, on the translator's device.
        translator: the search, for its tokenizer and settings.
        sources: ids, each with the end symbol.
        targets: ids, each with the end symbol, and not longer than the network's learned positions.
        texts: text of the targets.
        finished: called with a number of pairs whenever some have been scored.
    """
    tokenizer, device = translator.tokenizer, translator.device
    totals = [0.0] * len(sources)
    lengths = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    for batch in length_batches(lengths, _BATCH_TOKENS):
        source, mask = padded([sources[index] for index in batch], tokenizer.pad_id)
        target, is_token = padded([[tokenizer.bos_id, *targets[index]] for index in batch], tokenizer.pad_id)
        is_padded = not bool(mask.all())
        with torch.inference_mode():
            states = network(source.to(device), target[:, :-1].to(device), mask.to(device) if is_padded else None)
            chances = _log_probabilities(network, states.flatten(0, 1), target[:, 1:].flatten().to(device))
        chances = chances.view(len(batch), -1).masked_fill(~is_token[:, 1:].to(device), 0.0)
        for index, total in zip(batch, chances.sum(1).tolist(), strict=True):
            totals[index] = total
        finished(len(batch))
    penalties = penalty(torch.tensor([len(target) for target in targets]), translator.settings.length_penalty).tolist()
    return [
        Hypothesis(text, total / divisor, total, len(target))
        for text, total, divisor, target in zip(texts, totals, penalties, targets, strict=True)
    ]


def _log_probabilities(network: Any, states: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities float32 [L] of tokens [L] by decoder states [L, D]."""
    parts = []
    for some, wanted in zip(states.split(_ROWS), tokens.split(_ROWS), strict=True):
        logits = network.logits(some).float()
        parts.append(logits.gather(1, wanted.unsqueeze(1)).squeeze(1) - logits.logsumexp(1))
    return torch.cat(parts)
