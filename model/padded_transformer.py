"""The Transformer over padded batches: what validation, decoding and every export run.

`PaddedTransformer` compiles with `torch.jit.script`. It holds no arithmetic of layers: it calls the methods that the
network's parts have for padded batches. A given target is decoded as one step of all its positions.

Shapes: B sentences, S source length, T target length, D d_model, H heads, N hypotheses per sentence, V vocabulary size.
A mask is True at what may be attended to.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from model.attention import Attention, CrossAttention
from model.transformer import Transformer

Cache = list[tuple[Tensor, Tensor, Tensor, Tensor]]
"""For each decoder layer, the keys and values of self-attention, [B, H, slots, d_k or d_v], and the keys and values of
cross-attention, [B, H, S, d_k or d_v]."""


class PaddedTransformer(nn.Module):
    """A network for padded batches of ids. It shares the network's modules and weights."""

    def __init__(self, network: Transformer) -> None:
        super().__init__()
        self.network = network

    def encode(self, source: Tensor, source_mask: Tensor | None) -> Tensor:
        """Run the encoder.

        Args:
            source: int64 ids [B, S].
            source_mask: bool [B, S], True at tokens. Pass None if no source is padded, which makes attention faster.

        Returns:
            The encoder's output, called `memory` elsewhere, [B, S, D].
        """
        x = self.network.embed(source, self.network.positions(0, source.size(1)))
        bias = _bias(source_mask[:, None], x.dtype) if source_mask is not None else None
        # No error code in `type: ignore`: TorchScript would parse it as a type.
        for layer in self.network.encoder:
            x = layer(x, bias)
        return self.network.encoder_norm(x)

    def init_cache(self, memory: Tensor, num_slots: int) -> Cache:
        """Create the key-value cache for `step`.

        Args:
            memory: the encoder's output [B, S, D].
            num_slots: number of slots for self-attention, which are not initialized. With 0, `step` returns longer
                caches instead of writing to this one.
        """
        cache: Cache = []
        for layer in self.network.decoder:
            keys, values = layer.cross_attention.keys_values(memory)  # type: ignore
            batch_size, num_heads = keys.size(0), keys.size(1)
            cache.append(
                (
                    keys.new_empty([batch_size, num_heads, num_slots, keys.size(3)]),
                    values.new_empty([batch_size, num_heads, num_slots, values.size(3)]),
                    keys.contiguous(),
                    values.contiguous(),
                )
            )
        return cache

    def step(
        self,
        last: Tensor,
        position: int,
        start: int,
        cache: Cache,
        source_mask: Tensor | None,
        path_mask: Tensor | None,
    ) -> tuple[Tensor, Cache]:
        """Run the decoder for the next position of N hypotheses per sentence.

        The hypotheses are the queries of both attentions, so the cache holds each sentence's memory once. The cache
        is a lattice that is never reordered: each position of a hypothesis has a slot, which is written once, and
        `path_mask` selects the slots on a hypothesis's path.

        Args:
            last: int64 ids [B, N], the last token of each hypothesis (the begin symbol at position 0).
            position: the position of the last tokens.
            start: number of cache slots in use. The next N are written in place; if there are no more slots, the
                cache stays as it is.
            cache: what `init_cache` returned.
            source_mask: bool [B, S], True at tokens; or None.
            path_mask: bool [B, N, start + N], True at the slots on each hypothesis's path, its own slot included. The
                slots of a path are in the order of its positions. Pass None if each path has all slots.

        Returns:
            Decoder states [B, N, D], and the cache's slots in use.
        """
        x = self.network.embed(last, self.network.positions(position, 1))
        return self._decode(x, start, cache, source_mask, path_mask)

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Run encoder and decoder over a given target, all its positions at once.

        Padding on the right of the target needs no mask, since causal attention hides it.

        Args:
            source: int64 ids [B, S].
            target: int64 ids [B, T], the begin symbol followed by the answer without its last token.
            source_mask: bool [B, S], True at tokens; or None.

        Returns:
            Decoder states [B, T, D]. The state at position t depends on target[:, : t + 1] only.
        """
        cache = self.init_cache(self.encode(source, source_mask), 0)
        length = target.size(1)
        x = self.network.embed(target, self.network.positions(0, length))
        # Position t is a hypothesis whose path has the slots 0 to t.
        causal = torch.ones([1, length, length], dtype=torch.bool, device=target.device).tril()
        return self._decode(x, 0, cache, source_mask, causal)[0]

    def _decode(
        self, x: Tensor, start: int, cache: Cache, source_mask: Tensor | None, path_mask: Tensor | None
    ) -> tuple[Tensor, Cache]:
        """Run the decoder's layers over embeddings [B, N, D]; see `step`."""
        source_bias = _bias(source_mask[:, None], cache[0][2].dtype) if source_mask is not None else None
        path_bias = _bias(path_mask, cache[0][0].dtype) if path_mask is not None else None
        used: Cache = []
        for index, layer in enumerate(self.network.decoder):
            x, keys, values = layer.step(x, start, cache[index], source_bias, path_bias)  # type: ignore
            used.append((keys, values, cache[index][2], cache[index][3]))
        return self.network.decoder_norm(x), used

    def logits(self, states: Tensor) -> Tensor:
        """Map decoder states [..., D] to logits of the next token [..., V]."""
        return self.network.logits(states)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask [B, T or 1, S] to a bias on attention scores [B, 1, T or 1, S]: 0 where True, -inf where False."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(~mask, float("-inf")).unsqueeze(1)


def sharing_copy(network: Transformer) -> Transformer:
    """Return a copy that shares all tensors, whose modules can be changed while other threads use the network."""
    attributes = (value for module in network.modules() for value in vars(module).values() if isinstance(value, Tensor))
    tensors = (*network.parameters(), *network.buffers(), *attributes)
    return copy.deepcopy(network, {id(tensor): tensor for tensor in tensors})


@torch.no_grad()
def attention_maps(
    network: Transformer, source: Tensor, target: Tensor, source_mask: Tensor | None = None
) -> dict[str, list[Tensor]]:
    """Run a forward pass and return its attention weights.

    Args:
        network: the network, in evaluation mode: with dropout, weights do not sum to one.
        source: ids [B, S].
        target: ids [B, T]. Padding on its right changes nothing before it.
        source_mask: bool [B, S], True at tokens; None if no source is padded.

    Returns:
        For "encoder", "decoder" and "cross", one tensor [B, H, queries, keys] per layer. Their last dimension sums to
        one.
    """
    network = sharing_copy(network)
    maps: dict[str, list[Tensor]] = {"encoder": [], "decoder": [], "cross": []}
    for kind, stack in (("encoder", network.encoder), ("decoder", network.decoder)):
        for layer in stack:
            for module in layer.children():
                if isinstance(module, Attention):
                    weights = maps["cross" if isinstance(module, CrossAttention) else kind]
                    module.attend = _recording(module.attend, weights)  # type: ignore[method-assign]
    PaddedTransformer(network)(source, target, source_mask)
    return maps


def _recording(attend: Callable[..., Tensor], weights: list[Tensor]) -> Callable[..., Tensor]:
    def record(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        # With the unit vectors as values, attention returns its weights.
        units = torch.eye(key.size(2), dtype=key.dtype, device=key.device).expand(*key.shape[:2], -1, -1)
        weights.append(attend(query, key, units, bias))
        return attend(query, key, value, bias)

    return record
