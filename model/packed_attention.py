"""Attention over packed rows: sentences lie end to end in a row, and each token attends to its own sentence only.

Shapes: H heads, K d_k, V d_v; P cells of padded groups. *queries* and *keys* are the numbers of tokens of the rows
that these come from, which are two rows in cross-attention.

`RowSentences` describes the sentences for one attention. Two kinds of implementation read it. A kernel reads the
offsets: PyTorch's variable-length flash attention on a GPU (`FLASH_ATTENTION`), or the compiled one on a CPU. Plain
attention (`PLAIN_ATTENTION`) runs on any device, in any precision, for any heads, with dropout: it pads groups of
sentences of similar length, and computes each group by `attend`, as a padded batch.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from data_module.batch import PackedBatch


class RowSentences(NamedTuple):
    """Which tokens attend to which, in one attention of the network: those of N sentences, padding included."""

    query_offsets: Tensor
    """int32 [N + 1]: sentence i has the queries `query_offsets[i] : query_offsets[i + 1]`."""
    key_offsets: Tensor
    """The same for keys."""
    longest: int
    """Maximum number of tokens of a sentence."""
    is_causal: bool
    """Whether a query attends only to keys up to its own place in the sentence."""
    kernel: "AttentionFunction | None" = None
    """The function that computes attention; None for plain attention."""
    padded: "PaddedGroups | None" = None
    """The padded groups of plain attention; None for a kernel."""


AttentionFunction = Callable[[list[Tensor], RowSentences, int, int, float], Tensor]
"""Computes attention (equation 1); see `flash_attention`."""


class RowAttention(NamedTuple):
    """An implementation of attention over packed rows."""

    name: str
    function: AttentionFunction | None
    """None for plain attention, which each module computes by its method `attend`."""
    constant_rows: bool = True
    """Whether all rows should have one length, so that a GPU runs the same shapes in all steps."""


PLAIN_ATTENTION = RowAttention("plain", None, constant_rows=False)


class PaddedSide(NamedTuple):
    """Where the tokens of a row are in the cells of padded groups. The cells of all groups are numbered in sequence.

    Example: a row of 6 tokens has sentences of 3 and 2 tokens, which form one group, and one token of padding. Then
    `places` is [0, 1, 2, 3, 4, 4, 0], `cells` is [0, 1, 2, 3, 4, 6], and `is_filler` is True at cells 5 and 6.
    """

    places: Tensor
    """int64 [P + 1], the place in the row of each cell's token. A cell after a sentence's end repeats its last
    token. One more cell, which belongs to no group, stands for all padding of the row: it holds token 0, and
    attention's result for it is 0."""
    cells: Tensor
    """int64 [tokens of the row], the cell of each one."""
    is_filler: Tensor
    """bool [P + 1, 1], True at cells after a sentence's end and at the last cell."""


class PaddedGroup(NamedTuple):
    """Sentences of similar length."""

    num_sentences: int
    """B."""
    num_queries: int
    """T."""
    num_keys: int
    """S."""
    bias: Tensor
    """0 where attention is allowed and -inf elsewhere: [B, 1, 1, S] hides padding; for causal attention, [1, 1, T, S]
    hides keys after the query, padding included."""


class PaddedGroups(NamedTuple):
    """The padded groups of one attention, which plain attention reads."""

    queries: PaddedSide
    keys: PaddedSide
    groups: list[PaddedGroup]


def packed_sentences(
    batch: PackedBatch, dtype: torch.dtype, attention: RowAttention = PLAIN_ATTENTION
) -> tuple[RowSentences, RowSentences, RowSentences]:
    """Return the sentences of the encoder, of the decoder's self-attention and of its cross-attention.

    `dtype` is that of queries, keys and values. The host does not wait for a device.
    """
    source, target = batch.source_offsets, batch.target_offsets
    encoder = decoder = cross = None
    if attention.function is None:
        encoder, decoder, cross = _padded_groups(batch, _compute_dtype(source.device, dtype))
    longest, kernel = batch.longest, attention.function
    return (
        RowSentences(source, source, longest, False, kernel, encoder),
        RowSentences(target, target, longest, True, kernel, decoder),
        RowSentences(target, source, longest, False, kernel, cross),
    )


def flash_attention(inputs: list[Tensor], sentences: RowSentences, num_heads: int, d_k: int, dropout: float) -> Tensor:
    """Compute attention (equation 1) by PyTorch's variable-length attention.

    It needs a GPU of compute capability 8.0 or more, 16-bit numbers, and d_k <= d_v, multiples of 8 up to 256.

    Args:
        inputs: queries, keys and values [queries, H * (2 K + V)]; or queries [queries, H * K] and keys and values
            [keys, H * (K + V)].
        sentences: which tokens attend to which.
        num_heads: H.
        d_k: K.
        dropout: probability of dropping a weight.

    Returns:
        [queries, H * V].

    Raises ValueError if there is dropout, which PyTorch's kernel does not have.
    """
    if dropout:
        raise ValueError("flash attention has no dropout")
    query, key, value = (x.unflatten(1, (num_heads, -1)) for x in split_inputs(inputs, num_heads * d_k))
    if (missing := value.size(2) - d_k) > 0:  # The kernel takes one size only. Zeros add nothing to a product.
        query, key = F.pad(query, [0, missing]), F.pad(key, [0, missing])
    return _flash(query, key, value, sentences, d_k**-0.5)


FLASH_ATTENTION = RowAttention("flash", flash_attention)


def _flash(query: Tensor, key: Tensor, value: Tensor, sentences: RowSentences, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # An experimental part of PyTorch, which only GPUs need.

    window = (-1, 0) if sentences.is_causal else (-1, -1)
    offsets, longest = (sentences.query_offsets, sentences.key_offsets), sentences.longest
    result: Any = varlen_attn(query, key, value, *offsets, longest, longest, scale=scale, window_size=window)
    return result.flatten(1)


def split_inputs(inputs: list[Tensor], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of queries and keys [..., H * K], where `size` is H * K, and of values [..., H * V]."""
    if len(inputs) == 1:
        query, key, value = inputs[0].split([size, size, inputs[0].size(-1) - 2 * size], -1)
        return query, key, value
    key, value = inputs[1].split([size, inputs[1].size(-1) - size], -1)
    return inputs[0], key, value


def attend_in_groups(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    inputs: list[Tensor],
    sentences: RowSentences,
    num_heads: int,
    d_k: int,
) -> Tensor:
    """Compute attention over padded groups of sentences.

    Each group has B * H * T * S weights. If all sentences were one group, T and S would be the longest lengths.

    `attend` maps queries [B, H, T, K], keys [B, H, S, K], values [B, H, S, V] and a bias to [B, H, T, V]. The other
    arguments and the result are those of `flash_attention`. The result is zero at padding of the row.
    """
    padded, dtype = sentences.padded, inputs[0].dtype
    assert padded is not None
    compute_dtype = _compute_dtype(inputs[0].device, dtype)
    num_queries = [group.num_queries for group in padded.groups]
    num_keys = [group.num_keys for group in padded.groups]
    sides = (padded.queries, num_queries), (padded.keys, num_keys)
    counts = [group.num_sentences for group in padded.groups]
    cells = []
    for x, (side, lengths) in zip(inputs, sides, strict=False):  # Self-attention has one input, of one side.
        # Each cell takes the token at its place, and a token's gradient is that of its cell.
        moved = _Move.apply(x, side.places, side.cells, None).to(compute_dtype)
        *by_group, _ = moved.split([*map(operator.mul, counts, lengths), 1])
        cells.append(by_group)
    results = []
    # Autocast would round the inputs of products, which are in float32, to 16 bits again.
    with torch.autocast("cpu", enabled=False):
        for group, *of_group in zip(padded.groups, *cells, strict=True):
            padded_inputs = [x.unflatten(0, (group.num_sentences, -1)) for x in of_group]
            query, key, value = (
                x.unflatten(2, (num_heads, -1)).transpose(1, 2) for x in split_inputs(padded_inputs, num_heads * d_k)
            )
            heads = attend(query, key, value, group.bias)
            results.append(heads.transpose(1, 2).flatten(0, 1).flatten(1).to(dtype))
        result = torch.cat([*results, results[0].new_zeros(1, results[0].size(1))])
    # The inverse: each token takes its cell's result, and a cell's gradient is that of its token, if it is no filler.
    return _Move.apply(result, padded.queries.cells, padded.queries.places, padded.queries.is_filler)


class _Move(torch.autograd.Function):
    """Return x[index]. The gradient of x[i] is that of result `inverse[i]`, or 0 where `has_no_gradient`.

    If x[i] is selected several times, only result `inverse[i]` is read, so nothing is added up, unlike in the gradient
    of `index_select`. The others are fillers or padding, which have no gradient: as keys they are hidden by a bias, and
    as queries nothing reads their results.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, has_no_gradient: Tensor | None) -> Tensor:
        ctx.inverse, ctx.has_no_gradient = inverse, has_no_gradient
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].index_select(0, ctx.inverse)
        if ctx.has_no_gradient is not None:
            gradient.masked_fill_(ctx.has_no_gradient, 0.0)
        return gradient, None, None, None


def _compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which plain attention computes: on a CPU, 16-bit backward passes are slow (torch 2.13)."""
    return torch.float32 if device.type == "cpu" and dtype.itemsize == 2 else dtype


def _padded_groups(batch: PackedBatch, dtype: torch.dtype) -> tuple[PaddedGroups, PaddedGroups, PaddedGroups]:
    """Return the groups of the encoder, of the decoder's self-attention and of its cross-attention."""
    counts = [group.num_pairs for group in batch.groups]
    sources = [group.longest_source for group in batch.groups]
    targets = [group.longest_target for group in batch.groups]
    source, hides_sources = _padded_side(batch.source_offsets, batch.source.numel(), counts, sources, dtype)
    target, _ = _padded_side(batch.target_offsets, batch.target_input.numel(), counts, targets, dtype)
    hides_later = [
        torch.full((1, 1, length, length), float("-inf"), dtype=dtype, device=source.places.device).triu(1)
        for length in targets
    ]

    def groups(queries: list[int], keys: list[int], biases: list[Tensor]) -> list[PaddedGroup]:
        return [PaddedGroup(*group) for group in zip(counts, queries, keys, biases, strict=True)]

    return (
        PaddedGroups(source, source, groups(sources, sources, hides_sources)),
        PaddedGroups(target, target, groups(targets, targets, hides_later)),
        PaddedGroups(target, source, groups(targets, sources, hides_sources)),
    )


def _padded_side(
    offsets: Tensor, num_tokens: int, counts: list[int], lengths: list[int], dtype: torch.dtype
) -> tuple[PaddedSide, list[Tensor]]:
    """Pad the sentences of each group to its entry of `lengths`; return also the biases that hide the padding."""
    places, is_filler, biases, first = [], [], [], 0
    for count, length in zip(counts, lengths, strict=True):
        starts, ends = (offsets[start : start + count, None] for start in (first, first + 1))
        in_row = starts + torch.arange(length, device=offsets.device)
        is_past = in_row >= ends
        places.append(torch.minimum(in_row, ends - 1).flatten())
        is_filler.append(is_past.flatten())
        hidden = torch.zeros(is_past.shape, dtype=dtype, device=offsets.device).masked_fill_(is_past, float("-inf"))
        biases.append(hidden[:, None, None])
        first += count
    places.append(offsets.new_zeros(1))
    is_filler.append(torch.ones(1, dtype=torch.bool, device=offsets.device))
    place, filler = torch.cat(places).long(), torch.cat(is_filler)
    # Filler cells write to an additional entry after the row, which is cut off.
    numbers = torch.arange(len(place), device=offsets.device)
    cells = numbers.new_full((num_tokens + 1,), len(place) - 1)
    cells.scatter_(0, place.masked_fill(filler, num_tokens), numbers)
    return PaddedSide(place, cells[:num_tokens], filler.unsqueeze(1)), biases
