"""Names and layout of a network's weights in Transformers' Marian, in both directions.

The weights are the same but for three things: their names; queries, keys and values, which are one matrix here; and the
order of the d_model dimensions. Positions there are all sines and then all cosines, here they alternate. Reordering
the dimensions of d_model in every weight makes up for that: all sums stay sums of the same terms.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

SHARED = "model.shared.weight"
"""Name of the embedding matrix."""
BIAS = "final_logits_bias"
"""Name of the output projection's bias, [1, V]."""


class Part(NamedTuple):
    """A linear layer or a norm: its name here, its names there, and where d_model is in its weight."""

    ours: str
    theirs: tuple[str, ...]
    """Several if the rows of the weight and of the bias are divided among as many layers."""
    axis: int
    """0 if the rows of weight and bias are d_model, 1 if the columns of the weight are."""


def parts(encoder_layers: int, decoder_layers: int) -> Iterator[Part]:
    """Yield all linear layers and norms of a post-norm network."""
    for side, count in (("encoder", encoder_layers), ("decoder", decoder_layers)):
        for number in range(count):
            ours, theirs = f"{side}.{number}", f"model.{side}.layers.{number}"
            yield from _attention(f"{ours}.self_attention", f"{theirs}.self_attn", ("query_key_value",))
            if side == "decoder":
                yield from _attention(f"{ours}.cross_attention", f"{theirs}.encoder_attn", ("query", "key_value"))
            yield Part(f"{ours}.feed_forward.inner", (f"{theirs}.fc1",), 1)
            yield Part(f"{ours}.feed_forward.outer", (f"{theirs}.fc2",), 0)
            yield Part(f"{ours}.feed_forward_residual.norm", (f"{theirs}.final_layer_norm",), 0)


def _attention(ours: str, theirs: str, projections: tuple[str, ...]) -> Iterator[Part]:
    for name in projections:
        yield Part(f"{ours}.{name}", tuple(f"{theirs}.{word[0]}_proj" for word in name.split("_")), 1)
    yield Part(f"{ours}.output", (f"{theirs}.out_proj",), 0)
    yield Part(f"{ours}_residual.norm", (f"{theirs}_layer_norm",), 0)


def to_marian(weights: dict[str, Tensor], depths: tuple[int, int]) -> dict[str, Tensor]:
    """Return a network's weights by their names there.

    Args:
        weights: the state dict of a `Transformer` whose d_k and d_v are equal.
        depths: number of encoder and of decoder layers.
    """
    embedding = weights["embedding.weight"]
    order = halves(embedding.size(1))
    found = {SHARED: embedding[:, order]}
    if "projection.bias" in weights:
        found[BIAS] = weights["projection.bias"].unsqueeze(0)
    for part in parts(*depths):
        for kind in ("weight", "bias"):
            whole = _reordered(weights[f"{part.ours}.{kind}"], order, part.axis)
            for name, one in zip(part.theirs, whole.chunk(len(part.theirs)), strict=True):
                found[f"{name}.{kind}"] = one.contiguous()
    return found


def from_marian(weights: dict[str, Tensor], depths: tuple[int, int]) -> dict[str, Tensor]:
    """Return the state dict of a `Transformer`, from weights by their names there.

    Embedding and bias have a row for each piece of their vocabulary.

    Raises:
        KeyError: a weight is missing.
    """
    embedding = weights[SHARED]
    order = halves(embedding.size(1)).argsort()
    found = {"embedding.weight": embedding[:, order], "projection.bias": weights[BIAS].flatten()}
    for part in parts(*depths):
        for kind in ("weight", "bias"):
            whole = torch.cat([weights[f"{name}.{kind}"] for name in part.theirs])
            found[f"{part.ours}.{kind}"] = _reordered(whole, order, part.axis)
    return found


def halves(d_model: int) -> Tensor:
    """Return, for each dimension there, the dimension here: first those of the sines, then those of the cosines."""
    return torch.cat([torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)])


def _reordered(tensor: Tensor, order: Tensor, axis: int) -> Tensor:
    """Reorder d_model, which is an axis of a weight, or all of a bias if it is axis 0."""
    return tensor.index_select(axis, order) if axis < tensor.dim() else tensor


def marian_shapes(depths: tuple[int, int], vocabulary_size: int, d_model: int, d_ff: int) -> dict[str, list[int]]:
    """Return the shape of each weight by its name there, without weights that are computed or tied to another."""
    found = {SHARED: [vocabulary_size, d_model], BIAS: [1, vocabulary_size]}
    for part in parts(*depths):
        rows = d_ff if part.ours.endswith(".inner") else d_model
        columns = d_ff if part.ours.endswith(".outer") else d_model
        for name in part.theirs:
            found[f"{name}.weight"] = [rows] if part.ours.endswith(".norm") else [rows, columns]
            found[f"{name}.bias"] = [rows]
    return found
