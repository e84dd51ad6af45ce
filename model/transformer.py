"""The Transformer (section 3, figure 1).

A plain `nn.Module` that knows neither text, device, precision nor ranks, and scripts as it is.
Shapes: B batch, S source length, T target length, D d_model, H heads, V vocabulary.
A mask is True where attention is allowed.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cpu.dropout import Dropout
from model.layers import DecoderLayer, EncoderLayer
from model.positions import LearnedPositions, SinusoidalPositions
from model.settings import NetworkSettings


class Projection(nn.Module):
    """The output projection; its matrix is the embedding's."""

    def forward(self, states: Tensor, weight: Tensor) -> Tensor:
        """[..., D] and [V, D] -> [..., V]."""
        return F.linear(states, weight)


class Transformer(nn.Module):
    """Encoder, decoder and the output projection; one matrix serves both embeddings and it (section 3.4)."""

    def __init__(self, vocabulary_size: int, settings: NetworkSettings) -> None:
        super().__init__()
        d_model = settings.d_model
        self.vocabulary_size = vocabulary_size
        self.embedding_scale = math.sqrt(d_model)
        self.embedding = nn.Embedding(vocabulary_size, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.positions: LearnedPositions | SinusoidalPositions = (
            LearnedPositions(d_model, settings.max_positions)
            if settings.learned_positions
            else SinusoidalPositions(d_model)
        )
        self.dropout = Dropout(settings.dropout)
        self.encoder = nn.ModuleList([EncoderLayer(settings) for _ in range(settings.num_layers)])
        self.decoder = nn.ModuleList([DecoderLayer(settings) for _ in range(settings.num_layers)])
        # Pre-norm leaves the last sum unnormalised, so each stack ends with a norm; post-norm has none to add.
        self.encoder_norm = nn.LayerNorm(d_model) if settings.pre_norm else nn.Identity()
        self.decoder_norm = nn.LayerNorm(d_model) if settings.pre_norm else nn.Identity()
        self.projection: nn.Module = Projection()

    def embed(self, ids: Tensor, start: int) -> Tensor:
        """Ids [B, L] at positions from start on -> [B, L, D]: embeddings * sqrt(D) + positions, dropped out."""
        x = self.embedding(ids) * self.embedding_scale + self.positions(start, ids.size(1))
        return self.dropout(x)

    @torch.jit.export
    def encode(self, source: Tensor, source_mask: Tensor | None) -> Tensor:
        """The encoder's output, `memory`.

        Args:
            source: int64 ids [B, S].
            source_mask: bool [B, S], or None where all rows have S tokens (attention is then faster).

        Returns: [B, S, D].
        """
        mask = source_mask[:, None, None, :] if source_mask is not None else None
        x = self.embed(source, 0)
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_norm(x)

    @torch.jit.export
    def decode(self, target: Tensor, memory: Tensor, source_mask: Tensor | None) -> Tensor:
        """The decoder's states for all positions at once.

        Args:
            target: int64 ids [B, T], the begin symbol first (the answer shifted right).
            memory: [B, S, D].
            source_mask: as for `encode`.

        Returns: [B, T, D]; position t has seen target[:, : t + 1] only.
        """
        mask = source_mask[:, None, None, :] if source_mask is not None else None
        x = self.embed(target, 0)
        for layer in self.decoder:
            x = layer(x, memory, mask)
        return self.decoder_norm(x)

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Ids [B, S] and [B, T] -> decoder states [B, T, D]; the loss applies the output projection itself."""
        return self.decode(target, self.encode(source, source_mask), source_mask)

    @torch.jit.export
    def logits(self, states: Tensor) -> Tensor:
        """Decoder states [..., D] -> unnormalised log-probabilities of the next piece [..., V]."""
        return self.projection(states, self.embedding.weight)

    @torch.jit.export
    def init_cache(self, memory: Tensor, num_slots: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """A cache for `decode_step`: keys and values of each decoder layer's self-attention and cross-attention.

        Those of the self-attention have room for `num_slots` entries, [B, H, num_slots, K and V], none written yet;
        those of the cross-attention are worked out, [B, H, S, K and V].
        """
        cache: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for layer in self.decoder:
            # TorchScript takes a list of error codes here for a type.
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

    @torch.jit.export
    def decode_step(
        self,
        last: Tensor,
        position: int,
        start: int,
        cache: list[tuple[Tensor, Tensor, Tensor, Tensor]],
        source_mask: Tensor | None,
        path_mask: Tensor | None,
    ) -> Tensor:
        """One position of the decoder, for N hypotheses of each sentence.

        The hypotheses are the queries of both attentions, so a sentence's memory is there once. The cache is a
        lattice that is never reordered: a hypothesis's position has a slot, written once, and `path_mask` says
        which slots a hypothesis descends from.

        Args:
            last: int64 ids [B, N], the newest token of each hypothesis (the begin symbol at position 0).
            position: where it stands, from 0.
            start: how many of the cache's slots are in use; the next N are written, in place.
            cache: what `init_cache` returned.
            source_mask: as for `encode`.
            path_mask: bool [B, N, start + N], True at the slots of a hypothesis's own past and present; None where
                that is all of them.

        Returns: states [B, N, D].
        """
        x = self.dropout(self.embedding(last) * self.embedding_scale + self.positions(position, 1))
        memory_bias, path_bias = _bias(source_mask, cache[0][2].dtype), _bias(path_mask, cache[0][0].dtype)
        if memory_bias is not None:
            memory_bias = memory_bias.unsqueeze(1)
        for index, layer in enumerate(self.decoder):
            x = layer.step(x, start, cache[index], memory_bias, path_bias)  # type: ignore
        return self.decoder_norm(x)


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What a mask [B, ...] adds to attention's scores, 0 or -inf, [B, 1, ...]."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf")).unsqueeze(1)
