"""The Transformer (section 3, figure 1) and its positional encodings (section 3.5).

`Transformer` has the parameters and the training pass, over sentences that are packed into rows. `PaddedTransformer` is
the same network over padded batches: what validation, decoding and every export run.

Shapes: R source and M target tokens of packed rows; B sentences, S source length, T target length of padded batches;
D d_model, H heads, N hypotheses per sentence, V vocabulary size. A mask is True at what may be attended to.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.beyond.output_bias import with_bias
from model.dropout import Dropout
from model.layers import NORMS, DecoderLayer, EncoderLayer
from model.packed_attention import RowSentences
from model.settings import NetworkSettings

Cache = list[tuple[Tensor, Tensor, Tensor, Tensor]]
"""For each decoder layer, the keys and values of self-attention, [B, H, slots, d_k or d_v], and the keys and values of
cross-attention, [B, H, S, d_k or d_v]."""


def sinusoidal_table(num_positions: int, d_model: int, start: int = 0, device: torch.device | None = None) -> Tensor:
    """Compute PE(pos, 2i) = sin(pos / 10000^(2i/d_model)) and PE(pos, 2i+1) = cos of the same angle (section 3.5).

    The angles are float64. In float32 they would have an error of 1e-4 at position 1,000.

    Returns:
        float32 [num_positions, d_model], for positions `start` to `start + num_positions - 1`.
    """
    position = torch.arange(start, start + num_positions, dtype=torch.float64, device=device).unsqueeze(1)
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device=device)
    angle = position * torch.exp(even * (-math.log(10000.0) / d_model))
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :d_model].to(torch.float32)


class SinusoidalPositions(nn.Module):
    """Sinusoidal encodings for any position. A table holds the first `num_positions` of them."""

    table: Tensor

    def __init__(self, d_model: int, num_positions: int = 1024) -> None:
        super().__init__()
        self.d_model = d_model
        self.max_positions = 0  # unlimited
        # The table is not saved in checkpoints. Its size must not change: EMA pairs the buffers of two networks.
        self.register_buffer("table", sinusoidal_table(num_positions, d_model), persistent=False)

    def forward(self, start: int, length: int) -> Tensor:
        """Return the encodings [length, D] of positions start to start + length - 1."""
        if start + length > self.table.size(0):
            return sinusoidal_table(length, self.d_model, start, self.table.device).to(self.table.dtype)
        return self.table[start : start + length]


class LearnedPositions(nn.Module):
    """One learned vector per position (Table 3, row E)."""

    def __init__(self, d_model: int, max_positions: int) -> None:
        super().__init__()
        self.max_positions = max_positions
        self.table = nn.Parameter(torch.empty(max_positions, d_model))
        nn.init.normal_(self.table, std=d_model**-0.5)

    def forward(self, start: int, length: int) -> Tensor:
        """Return the encodings [length, D] of positions start to start + length - 1.

        Raises ValueError if a position is `max_positions` or more.
        """
        if start + length > self.max_positions:
            raise ValueError(
                f"position {start + length} is past the {self.max_positions} learned ones "
                "(network.max_positions); shorten the sentence or use sinusoidal positions"
            )
        return self.table[start : start + length]


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
        """Initialize the weights at random, with PyTorch's global generator.

        Raises ValueError if the settings name a norm, activation or attention that is not registered.
        """
        super().__init__()
        d_model = settings.d_model
        self.settings = settings
        self.vocabulary_size = vocabulary_size
        # The matrix is drawn with the standard deviation D^-0.5 that suits a projection. Times sqrt(D), the embeddings
        # are about as large as the positional encodings that are added to them.
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

    def embed(self, ids: Tensor, encodings: Tensor) -> Tensor:
        """Return dropout(embeddings * sqrt(D) + encodings) of int32 or int64 ids [...] (sections 3.4, 3.5 and 5.4).

        The shape of `encodings` broadcasts to that of the result, [..., D].
        """
        return self.dropout(self.embedding(ids) * self.embedding_scale + encodings)

    @torch.jit.unused
    def forward(self, source: Tensor, target: Tensor, pad_id: int = 0) -> Tensor:
        """Return the logits of the next token at each position of given targets (teacher forcing).

        Training computes the same by `rows`; decoding and exports call `PaddedTransformer`.

        Args:
            source: int64 ids [B, S], padded on the right. Each sentence has one token or more.
            target: int64 ids [B, T], padded on the right: the begin symbol followed by the answer without its last
                token.
            pad_id: id of the padding symbol; 0 in the tokenizers that `prepare` trains.

        Returns:
            Logits [B, T, V]. Those at position t depend on target[:, : t + 1] only.
        """
        return self.logits(PaddedTransformer(self)(source, target, source != pad_id))

    def rows(
        self,
        source: tuple[Tensor, Tensor],
        target: tuple[Tensor, Tensor],
        sentences: tuple[RowSentences, RowSentences, RowSentences],
    ) -> Tensor:
        """Run encoder and decoder over a packed micro-batch: a row of source and a row of target sentences.

        Args:
            source: ids and positions [R] of the source row.
            target: ids and positions [M] of the target row; each sentence begins with the begin symbol.
            sentences: which tokens attend to which in the encoder, in the decoder's self-attention and in its
                cross-attention.

        Returns:
            Decoder states [M, D]: those of each sentence are those of `PaddedTransformer`, to rounding; those of
            padding are finite and have no meaning.
        """
        encoder_sentences, decoder_sentences, cross_sentences = sentences
        memory = self._embed_rows(*source, encoder_sentences.longest)
        for layer in self.encoder:
            memory = layer.rows(memory, encoder_sentences)  # type: ignore[operator]
        memory = self.encoder_norm(memory).to(memory.dtype)
        x = self._embed_rows(*target, decoder_sentences.longest)
        for layer in self.decoder:
            x = layer.rows(x, memory, decoder_sentences, cross_sentences)  # type: ignore[operator]
        return self.decoder_norm(x).to(x.dtype)

    def _embed_rows(self, ids: Tensor, positions: Tensor, longest: int) -> Tensor:
        # Encodings are selected by the position in the sentence, not by the place in the row.
        x = self.embed(ids, self.positions(0, longest)[positions])
        # Under autocast, products return 16 bits, but a sum of 16 and 32 bits has 32. x is therefore cast once, here,
        # and each layer keeps the dtype of its input: this halves what residual connections and norms read and write.
        device = x.device.type
        return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x

    def logits(self, states: Tensor) -> Tensor:
        """Map decoder states [..., D] to logits of the next token [..., V]."""
        return self.projection(states, self.embedding.weight)

    def projection_operands(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return states [..., D] and a weight [V, D] with `states @ weight.T` equal to the logits, for the loss."""
        weight, bias = self.embedding.weight, self.projection.bias
        return (states, weight) if bias is None else with_bias(states, weight, bias)  # type: ignore


class PaddedTransformer(nn.Module):
    """A network for padded batches of ids. It shares the network's modules and weights.

    It compiles with `torch.jit.script`. All arithmetic is in the layers, whose methods for padded batches it calls. A
    given target is decoded in one step, for all its positions.
    """

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
        for layer in self.network.encoder:
            x = layer(x, bias)
        return self.network.encoder_norm(x)

    def init_cache(self, memory: Tensor, num_slots: int) -> Cache:
        """Create the key-value cache for `step`.

        Args:
            memory: the encoder's output [B, S, D].
            num_slots: number of slots for self-attention, which are not initialized. With 0, `step` returns a longer
                cache instead of writing to this one.
        """
        cache: Cache = []
        # No error code in `type: ignore`: TorchScript would parse it as a type.
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

        The hypotheses of a sentence are the queries of both attentions, so that the cache holds the sentence's memory
        once. The cache is never reordered: each position of a hypothesis has a slot, which is written once, and
        `path_mask` selects the slots on each hypothesis's path.

        Args:
            last: int64 ids [B, N], the last token of each hypothesis (the begin symbol at position 0).
            position: the position of the last tokens.
            start: number of cache slots in use. The next N slots are written in place; if all are in use, the cache
                does not change, and the result has a longer one.
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
