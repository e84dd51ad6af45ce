"""Sampling of tokens, in place of a search for the most probable ones: temperature, top-k and top-p.

A sample is a function of the seed, the number of the sentence's line and the network. The random numbers are those of a
counter, so they are the same in every batch, process and implementation of the search. Probabilities are rounded
differently in batches of other shapes and by other implementations. That changes a token only if a random number lies
within rounding of the border between two tokens. A draw among all V tokens at once would have V borders, most of them
between tokens that are hardly ever drawn. So a token is drawn in three steps, with three random numbers: a part of the
vocabulary, a block of that part, and a token of that block.

Shapes: B sentences, V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Sampling(NamedTuple):
    """How to draw a token from the network's distribution.

    The distribution is sharpened by `temperature`, cut to the `top_k` most probable tokens, then to `top_p`.
    """

    temperature: float = 1.0
    """Divides the logits: below 1, probable tokens are drawn more often than the network says."""
    top_k: int | None = None
    """Only this many tokens can be drawn, the most probable ones (Fan et al. 2018); None for all."""
    top_p: float = 1.0
    """Only the most probable tokens can be drawn, as few as have this probability together (Holtzman et al. 2020)."""
    seed: int = 0
    """Other seeds draw other samples."""


def check_sampling(sampling: Sampling) -> None:
    """Raise ValueError if a setting is out of bounds."""
    top_k = sampling.top_k
    if not 0.0 < sampling.temperature < float("inf"):
        raise ValueError(f"temperature {sampling.temperature} must be more than 0")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k {top_k} must be 1 or more")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ValueError(f"top_p {sampling.top_p} must be more than 0, and 1 or less")
    if sampling.seed < 0 or sampling.seed > 9223372036854775807:
        raise ValueError(f"seed {sampling.seed} must be 0 or more, and less than 2 ** 63")


def split_mix(state: Tensor, index: Tensor) -> Tensor:
    """Return number `index` of each SplitMix64 generator that starts with `state` (Steele et al. 2014), as int64."""
    # The constants are the generator's, as signed numbers. A shift to the right copies the sign, which is masked.
    x = state + (index + 1) * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def draw_uniforms(seed: int, lines: Tensor, counts: Tensor) -> Tensor:
    """Return the random numbers of tokens: `counts[i]` tokens of sentence i, after those of the sentences before it.

    The seed starts a generator, whose number for a line starts the generator of that line.

    Args:
        seed: seed of all lines.
        lines: int64 [B], the number of each sentence's line.
        counts: int64 [B].

    Returns:
        float64 [sum of counts, 3], numbers in [0, 1), one for each step of drawing a token.
    """
    total = int(counts.sum())
    generators = split_mix(torch.full_like(lines, seed), lines).repeat_interleave(counts, output_size=total)
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts, output_size=total)
    places = torch.arange(total, device=lines.device) - starts
    steps = torch.arange(3, device=lines.device)
    bits = split_mix(generators.unsqueeze(1), places.unsqueeze(1) * 3 + steps)
    return ((bits >> 11) & 0x1FFFFFFFFFFFFF).double() / 9007199254740992.0


def choose(log_probabilities: Tensor, uniforms: Tensor, sampling: Sampling) -> Tensor:
    """Draw a token from each distribution.

    Args:
        log_probabilities: [B, V], not necessarily normalized; -inf at tokens that cannot be drawn.
        uniforms: float64 [B, 3], random numbers in [0, 1).
        sampling: settings for which `check_sampling` raises nothing.

    Returns:
        int64 [B].
    """
    # Relative to the largest: otherwise, a very small temperature would make all of them -inf.
    logits = (log_probabilities - log_probabilities.amax(-1, keepdim=True)).double()
    weights, top_k = (logits / sampling.temperature).softmax(-1), sampling.top_k
    if top_k is not None or sampling.top_p < 1.0:
        count = weights.size(-1) if top_k is None else min(top_k, weights.size(-1))
        largest, ids = weights.topk(count)
        sums = largest.cumsum(-1)
        largest = largest.masked_fill(sums - largest >= sampling.top_p * sums[:, -1:], 0.0)
        weights = torch.zeros_like(weights).scatter(-1, ids, largest)
    # Parts of 32 blocks of 32 tokens.
    parts = F.pad(weights, [0, -weights.size(-1) % 1024]).view(weights.size(0), -1, 32, 32)
    sentences = torch.arange(weights.size(0), device=weights.device)
    part = _draw(parts.sum([2, 3]), uniforms[:, 0])
    blocks = parts[sentences, part]
    block = _draw(blocks.sum(2), uniforms[:, 1])
    return (part * 32 + block) * 32 + _draw(blocks[sentences, block], uniforms[:, 2])


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return for each sentence the first index at which the sum of weights exceeds the random number's share of all."""
    sums = weights.cumsum(-1)
    # On a GPU, rounding can make a sum smaller than the one before it.
    is_reached = (sums > uniforms.unsqueeze(-1) * sums[:, -1:]) & (weights > 0.0)
    return is_reached.byte().argmax(-1)
