"""Batches of sentences of similar length, for search and scoring."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from model.settings import SHORTEST


def length_batches(lengths: Sequence[int], max_tokens: float, max_sentences: int | None = None) -> Iterator[list[int]]:
    """Yield the indices of each batch, longest sentences first because they need the most memory.

    A batch ends before it would exceed `max_tokens` padded tokens or `max_sentences`; a longer sentence is alone. It
    also ends where the length changes once it is half full, because a batch of one length needs no mask. Sentences
    shorter than `SHORTEST` count as that long, so a batch has at most `max_tokens / SHORTEST` sentences. Sentences of
    one token, the end symbol, are left out.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        if lengths[index] <= 1:
            break
        if batch:
            longest = max(lengths[batch[0]], SHORTEST)
            is_full = longest * (len(batch) + 1) > max_tokens or len(batch) == max_sentences
            is_half_full = longest * len(batch) * 2 >= max_tokens
            if is_full or (is_half_full and lengths[index] < lengths[batch[-1]]):
                yield batch
                batch = []
        batch.append(index)
    if batch:
        yield batch


def padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return padded ids [B, S] and a mask [B, S] that is False at padding."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad_id] * (longest - len(row))] for row in rows])
    return ids, torch.arange(longest) < torch.tensor([len(row) for row in rows]).unsqueeze(1)
