"""The Transformer (section 3, figure 1) and its positional encodings (section 3.5).

`Transformer` is a plain `nn.Module` over token ids. It compiles with `torch.jit.script`.
Shapes: B batch, S source length, T target length, L either of them, D d_model, H heads, N hypotheses per sentence,
V vocabulary size.
A mask is True where attention is allowed.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.fast.dropout import Dropout
from model.layers import NORMS, DecoderLayer, EncoderLayer
from model.packed_attention import Segments
from model.settings import NetworkSettings

_BIAS_COLUMNS = 8
"""Number of columns that `Transformer.as_product` adds for an output bias."""


def sinusoidal_table(num_positions: int, d_model: int, start: int = 0, device: torch.device | None = None) -> Tensor:
    """Compute PE(pos, 2i) = sin(pos / 10000^(2i/d_model)) and PE(pos, 2i+1) = cos of the same angle (section 3.5).

    The angles are float64. In float32 they would have an error of 1e-4 at position 1,000.

    Returns:
        float32 [num_positions, d_model], for positions `start` to `start + num_positions - 1`.
    """
    position = torch.arange(start, start + num_positions, dtype=torch.float64, device=device).unsqueeze(1)
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device=device)
    angle = position * torch.exp(even * (-math.log(10000.0) / d_model))
    table = torch.zeros(num_positions, d_model, dtype=torch.float64, device=device)
    table[:, 0::2] = torch.sin(angle)
    table[:, 1::2] = torch.cos(angle)[:, : d_model // 2]
    return table.to(torch.float32)


class SinusoidalPositions(nn.Module):
    """Sinusoidal encodings for any position. A table holds the first `num_positions` of them."""

    table: Tensor

    def __init__(self, d_model: int, num_positions: int = 1024) -> None:
        super().__init__()
        self.d_model = d_model
        self.max_positions = 0  # unlimited
        # The table is not saved in checkpoints. It must not grow: EMA pairs the buffers of two networks.
        self.register_buffer("table", sinusoidal_table(num_positions, d_model), persistent=False)

    def forward(self, start: int, length: int) -> Tensor:
        """Return the encodings [length, D] of positions start to start + length - 1."""
        if start + length > self.table.size(0):
            return sinusoidal_table(length, self.d_model, start, self.table.device).to(self.table.dtype)
        return self.table[start : start + length]

    def at(self, positions: Tensor, bound: int) -> Tensor:
        """Return the encodings [B, D] of int64 positions [B], none of them above `bound`."""
        # A check of the positions themselves would make the host wait for a GPU.
        if bound >= self.table.size(0):
            longest = int(positions.max()) + 1
            if longest > self.table.size(0):
                table = sinusoidal_table(longest, self.d_model, 0, self.table.device).to(self.table.dtype)
                return F.embedding(positions, table)
        return F.embedding(positions, self.table)


class LearnedPositions(nn.Module):
    """One learned vector per position."""

    def __init__(self, d_model: int, max_positions: int) -> None:
        super().__init__()
        self.max_positions = max_positions
        self.table = nn.Parameter(torch.empty(max_positions, d_model))
        nn.init.normal_(self.table, std=d_model**-0.5)

    def forward(self, start: int, length: int) -> Tensor:
        """Return the encodings [length, D] of positions start to start + length - 1.

        Raises:
            ValueError: a position is `max_positions` or more.
        """
        if start + length > self.max_positions:
            raise ValueError(
                f"position {start + length} is past the {self.max_positions} learned ones "
                "(network.max_positions); shorten the sentence or use sinusoidal positions"
            )
        return self.table[start : start + length]

    def at(self, positions: Tensor, bound: int) -> Tensor:
        """Return the encodings [B, D] of int64 positions [B], none of them above `bound`.

        Raises:
            ValueError: a position is `max_positions` or more.
        """
        # A check of the positions themselves would make the host wait for a GPU.
        if bound >= self.max_positions and int(positions.max()) >= self.max_positions:
            raise ValueError(
                f"position {int(positions.max()) + 1} is past the {self.max_positions} learned ones "
                "(network.max_positions); shorten the sentence or use sinusoidal positions"
            )
        return F.embedding(positions, self.table)


class Projection(nn.Module):
    """The output projection. Its weight is the embedding matrix, which `forward` receives."""

    bias: Tensor | None

    def __init__(self, bias_size: int) -> None:
        """Initialize the bias with zeros. A size of 0 means none."""
        super().__init__()
        self.register_parameter("bias", nn.Parameter(torch.zeros(bias_size)) if bias_size else None)

    def forward(self, states: Tensor, weight: Tensor) -> Tensor:
        """Map states [..., D] to logits [..., V] by the weight [V, D]."""
        return F.linear(states, weight, self.bias)


class Transformer(nn.Module):
    """Encoder, decoder and output projection. Both embeddings and the projection share one matrix (section 3.4)."""

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
        self.encoder = nn.ModuleList([EncoderLayer(settings) for _ in range(settings.encoder_layers)])
        self.decoder = nn.ModuleList([DecoderLayer(settings) for _ in range(settings.decoder_layers)])
        # Pre-norm leaves the output of the last layer unnormalized, so each stack ends with a norm.
        norm = NORMS[settings.norm] if settings.pre_norm else nn.Identity
        self.encoder_norm, self.decoder_norm = norm(d_model), norm(d_model)
        self.projection: nn.Module = Projection(vocabulary_size if settings.output_bias else 0)

    def embed(self, ids: Tensor, start: int) -> Tensor:
        """Return dropout(embeddings * sqrt(D) + positions) [B, L, D] of ids [B, L] at positions from `start` on."""
        x = self.embedding(ids) * self.embedding_scale + self.positions(start, ids.size(1))
        return self.dropout(x)

    @torch.jit.export
    def encode(self, source: Tensor, source_mask: Tensor | None) -> Tensor:
        """Run the encoder.

        Args:
            source: int64 ids [B, S].
            source_mask: bool [B, S], True at tokens. Pass None if no row is padded, which makes attention faster.

        Returns:
            The encoder's output, called `memory` elsewhere, [B, S, D].
        """
        mask = source_mask[:, None, None, :] if source_mask is not None else None
        x = self.embed(source, 0)
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_norm(x)

    @torch.jit.export
    def decode(self, target: Tensor, memory: Tensor, source_mask: Tensor | None) -> Tensor:
        """Run the decoder over all target positions at once.

        Args:
            target: int64 ids [B, T], the begin symbol followed by the answer without its last token.
            memory: the encoder's output [B, S, D].
            source_mask: bool [B, S], True at tokens; or None.

        Returns:
            Decoder states [B, T, D]. The state at position t depends on target[:, : t + 1] only.
        """
        mask = source_mask[:, None, None, :] if source_mask is not None else None
        x = self.embed(target, 0)
        for layer in self.decoder:
            x = layer(x, memory, mask)
        return self.decoder_norm(x)

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Return decoder states [B, T, D] of ids [B, S] and [B, T]. The loss applies the output projection."""
        return self.decode(target, self.encode(source, source_mask), source_mask)

    @torch.jit.unused
    def packed(
        self,
        source: tuple[Tensor, Tensor],
        target: tuple[Tensor, Tensor],
        segments: tuple[Segments, Segments, Segments],
    ) -> Tensor:
        """Run encoder and decoder over a packed micro-batch; the result of each sentence is that of `forward`.

        Args:
            source: ids and positions [R] of the source row.
            target: ids and positions [M] of the target row; each sentence begins with the begin symbol.
            segments: which rows attend to which in the encoder, in the decoder's self-attention and in its
                cross-attention.

        Returns:
            Decoder states [M, D]. Those of dead rows are finite and have no meaning.
        """
        encoder, decoder, cross = segments
        memory = self._embed_rows(*source, encoder.longest)
        for layer in self.encoder:
            memory = layer.packed(memory, encoder)  # type: ignore
        memory = self.encoder_norm(memory).to(memory.dtype)
        x = self._embed_rows(*target, decoder.longest)
        for layer in self.decoder:
            x = layer.packed(x, memory, decoder, cross)  # type: ignore
        return self.decoder_norm(x).to(x.dtype)

    @torch.jit.unused
    def _embed_rows(self, ids: Tensor, positions: Tensor, longest: int) -> Tensor:
        table = self.positions(0, longest)
        x = self.embedding(ids) * self.embedding_scale + table[positions]
        # The layers keep the type of their input, also between them.
        device = x.device.type
        return self.dropout(x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x)

    @torch.jit.export
    def logits(self, states: Tensor) -> Tensor:
        """Map decoder states [..., D] to logits of the next piece [..., V]."""
        return self.projection(states, self.embedding.weight)

    @torch.jit.unused
    def as_product(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return states [..., D'] and a weight [V, D'] whose product is `logits(states)`, for the loss.

        With an output bias, D' is D + 8: the states get a column of ones, and the weight the bias. The other columns
        are zeros, because a GPU multiplies widths that are a multiple of 8 faster.
        """
        weight, bias = self.embedding.weight, self.projection.bias
        if bias is None:
            return states, weight
        ones = F.pad(states.new_ones([*states.shape[:-1], 1]), [0, _BIAS_COLUMNS - 1])
        columns = F.pad(bias.unsqueeze(1), [0, _BIAS_COLUMNS - 1])  # type: ignore
        return torch.cat([states, ones], -1), torch.cat([weight, columns], 1)

    @torch.jit.export
    def init_cache(self, memory: Tensor, num_slots: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Create the key-value cache for `decode_step`.

        Args:
            memory: the encoder's output [B, S, D].
            num_slots: number of slots for self-attention.

        Returns:
            For each decoder layer, the keys and values of self-attention, [B, H, num_slots, d_k or d_v] and
            not initialized, and the keys and values of cross-attention, [B, H, S, d_k or d_v].
        """
        cache: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for layer in self.decoder:
            # No error code in `type: ignore`: TorchScript would parse it as a type.
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
        positions: Tensor,
        start: int,
        cache: list[tuple[Tensor, Tensor, Tensor, Tensor]],
        source_mask: Tensor | None,
        path_mask: Tensor | None,
    ) -> Tensor:
        """Run the decoder for the next position of N hypotheses per sentence. Sentences may be at different positions.

        The hypotheses are the queries of both attentions, so the cache holds each sentence's memory once. The cache
        is a lattice that is never reordered: each position of a hypothesis has a slot, which is written once, and
        `path_mask` selects the slots on a hypothesis's path.

        Args:
            last: int64 ids [B, N], the last token of each hypothesis (the begin symbol at position 0).
            positions: int64 [B], the position of each sentence's last tokens, from 0 to `start`.
            start: number of cache slots in use. The next N are written in place.
            cache: the cache that `init_cache` returned.
            source_mask: bool [B, S], True at tokens; or None.
            path_mask: bool [B, N, start + N], True at the slots on each hypothesis's path, its own slot included.
                Pass None if a hypothesis's path has all slots.

        Returns:
            Decoder states [B, N, D].
        """
        x = self.dropout(self.embedding(last) * self.embedding_scale + self.positions.at(positions, start).unsqueeze(1))
        memory_bias, path_bias = _bias(source_mask, cache[0][2].dtype), _bias(path_mask, cache[0][0].dtype)
        if memory_bias is not None:
            memory_bias = memory_bias.unsqueeze(1)
        for index, layer in enumerate(self.decoder):
            x = layer.step(x, start, cache[index], memory_bias, path_bias)  # type: ignore
        return self.decoder_norm(x)


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Convert a mask [B, ...] to a bias on attention scores [B, 1, ...]: 0 where True, -inf where False."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf")).unsqueeze(1)
