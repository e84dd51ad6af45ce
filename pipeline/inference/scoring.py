"""Log-probabilities of given translations, by teacher forcing, in batches of sentences of similar length."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from data_module.tokenization.tokenizer import Tokenizer
from pipeline.inference.translator import length_batches, padded

_BATCH_TOKENS = 2048
"""Upper bound on the padded tokens of a batch on either side."""
_SCORED_TOKENS = 256
"""Target tokens whose log-probabilities over the vocabulary are in memory at the same time."""


@torch.inference_mode()
def score_pairs(
    network: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    log_softmax: Callable[[Tensor], Tensor],
    tokenizer: Tokenizer,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
    finished: Callable[[int], object] = lambda count: None,
) -> list[float]:
    """Return log P(target | source) of each pair, 0 for a pair of empty sentences.

    Args:
        network: maps source ids [B, S], target ids [B, T] with the begin symbol, and a mask [B, S] that is False at
            padding, None without padding, to states [B, T, D].
        log_softmax: maps states [L, D] to log-probabilities of the next tokens [L, vocabulary].
        tokenizer: has the symbols that sentences begin with and are padded with.
        sources: ids, each with the end symbol.
        targets: ids, each with the end symbol, and not longer than the network's learned positions.
        device: the network's device.
        finished: called with a number of pairs whenever some have been scored.
    """
    totals = [0.0] * len(sources)
    lengths = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    for batch in length_batches(lengths, _BATCH_TOKENS):
        source, mask = padded([sources[index] for index in batch], tokenizer.pad_id)
        target, is_token = padded([[tokenizer.bos_id, *targets[index]] for index in batch], tokenizer.pad_id)
        is_padded, target = not bool(mask.all()), target.to(device)
        states = network(source.to(device), target[:, :-1], mask.to(device) if is_padded else None)
        parts = []
        labels = target[:, 1:].flatten().split(_SCORED_TOKENS)
        for chunk, chunk_labels in zip(states.flatten(0, 1).split(_SCORED_TOKENS), labels, strict=True):
            parts.append(log_softmax(chunk).gather(1, chunk_labels.unsqueeze(1)))
        chances = torch.cat(parts).view(len(batch), -1).masked_fill(~is_token[:, 1:].to(device), 0.0).double()
        for index, total in zip(batch, chances.sum(1).tolist(), strict=True):
            totals[index] = total
        finished(len(batch))
    return totals
