"""A recurrent encoder-decoder with attention on `torch.nn.LSTM`, which the Transformer is compared with.

The encoder is bidirectional and the decoder attends to its output by the "general" score of Luong et al. 2015, section
3.1. Input feeding (their section 3.3) is left out: it makes each decoder step depend on the attention of the step
before, so that the LSTM could not run over whole sentences in one call. Both embeddings and the output projection share
one matrix, as in the recipe's network.

Shapes: B batch, S source length, T target length, D d_model, W width, V vocabulary size.
"""

import bisect
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_module.batching.batch import PackedBatch, PaddedBatch, RankBatch, SpecialIds
from model.cpu.compiled_loss import CompiledLoss
from model.cpu.dropout import Dropout
from model.loss import label_smoothed_loss
from model.lr_schedule import Schedule
from model.settings import TrainingSettings
from pipeline.benchmark.side_by_side import BareLoop, LoopStep

LAYERS = 2
"""Layers of encoder and decoder each: OpenNMT's default."""
LEARNING_RATE_FACTOR = 3.2
"""Factor on the recipe's learning rates. docs/performance.md has those that were tried."""
CLIP_NORM = 1.0
"""Maximum norm of the gradient. Recurrent networks have rare, very large gradients (Pascanu et al. 2013)."""
PART = 128
"""Maximum number of sentences that are padded to one rectangle."""


class BidirectionalLayer(nn.Module):
    """One LSTM from the first token to the last and one from the last to the first, side by side."""

    def __init__(self, size: int, width: int) -> None:
        """Create a layer that maps `size` features to `width`, half of them of each direction."""
        super().__init__()
        self.forwards = nn.LSTM(size, width - width // 2, batch_first=True)
        self.backwards = nn.LSTM(size, width // 2, batch_first=True)

    def forward(self, x: Tensor, reverse: Tensor) -> tuple[Tensor, Tensor]:
        """Run both directions.

        Args:
            x: the input [B, S, size]. Each row has its tokens first, then padding, which has no effect on the tokens'
                output.
            reverse: what `reversal` returned.

        Returns:
            The output [B, S, W], and the last output of both directions [B, W].
        """
        # In PyTorch's bidirectional LSTM, the backward direction would begin with the padding. It avoids that for
        # packed sequences, which take 2.5 to 5 times as long on a CPU: oneDNN has no kernel for them.
        there = self.forwards(x)[0]
        back = _gather(self.backwards(_gather(x, reverse))[0], reverse)
        # The first token's reversed position is that of the last token.
        last = _gather(there, reverse[:, :1])[:, 0]
        return torch.cat([there, back], -1), torch.cat([last, back[:, 0]], -1)


def reversal(lengths: Tensor, longest: int) -> Tensor:
    """Return positions [B, S] that reverse the tokens of each row and leave its padding in place; `lengths` is [B]."""
    positions = torch.arange(longest, device=lengths.device).expand(lengths.size(0), -1)
    reverse = lengths[:, None] - 1 - positions
    return torch.where(reverse >= 0, reverse, positions)


def _gather(x: Tensor, positions: Tensor) -> Tensor:
    """Return the rows of x [B, S, F] at `positions` [B, S]."""
    return x.gather(1, positions[:, :, None].expand(-1, -1, x.size(-1)))


class LSTMNetwork(nn.Module):
    """Encoder, decoder and attention. Dropout is applied to embeddings, between layers and to attentional states."""

    def __init__(self, vocabulary_size: int, d_model: int, width: int, dropout: float) -> None:
        """Create the network.

        Args:
            vocabulary_size: number of pieces.
            d_model: width of embeddings.
            width: number of features of each layer's output.
            dropout: the recipe's `network.dropout`.
        """
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.dropout = Dropout(dropout)
        self.encoder = nn.ModuleList(BidirectionalLayer(width if index else d_model, width) for index in range(LAYERS))
        self.decoder = nn.LSTM(d_model, width, LAYERS, batch_first=True, dropout=dropout)
        self.score = nn.Linear(width, width, bias=False)
        self.combine = nn.Linear(2 * width, d_model, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Embed ids [B, L] to [B, L, D], at the scale of the recipe's network."""
        return self.dropout(self.embedding(ids) * self.embedding.embedding_dim**0.5)

    def encode(self, source: Tensor, source_mask: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run the encoder.

        Args:
            source: ids [B, S].
            source_mask: bool [B, S], True at tokens, which come first in each row; None if no row is padded.

        Returns:
            The encoder's output [B, S, W], and the decoder's initial state: for each layer [LAYERS, B, W] the last
            output of both directions of the encoder's layer, and cells of 0. The encoder's own last cells are not
            known where a row is padded.
        """
        lengths = torch.full_like(source[:, 0], source.size(1)) if source_mask is None else source_mask.sum(1)
        lengths = lengths.long()
        reverse = reversal(lengths, source.size(1))
        x = embedded = self.embed(source)
        hidden = []
        for index, layer in enumerate(self.encoder):
            x, last = layer(self.dropout(x) if index else x, reverse)
            hidden.append(last.to(embedded.dtype))
        state = torch.stack(hidden)
        return x, (state, torch.zeros_like(state))

    def attend(self, states: Tensor, memory: Tensor, source_mask: Tensor | None) -> Tensor:
        """Return the attentional states (Luong et al. 2015, equation 5).

        Args:
            states: the decoder's output [B, T, W].
            memory: the encoder's output [B, S, W].
            source_mask: bool [B, S], True at tokens; or None.

        Returns:
            tanh(W_c [context; state]), [B, T, D].
        """
        scores = self.score(states) @ memory.transpose(1, 2)
        if source_mask is not None:
            scores = scores.masked_fill(~source_mask[:, None], float("-inf"))
        context = scores.softmax(-1) @ memory
        return self.dropout(torch.tanh(self.combine(torch.cat([context, states], -1))))

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor | None) -> Tensor:
        """Return attentional states [B, T, D] of ids [B, S] and [B, T]. The loss applies the output projection."""
        memory, state = self.encode(source, source_mask)
        return self.attend(self.decoder(self.embed(target), state)[0], memory, source_mask)

    @torch.no_grad()
    def greedy(
        self, source: Tensor, source_mask: Tensor | None, special: SpecialIds, max_extra_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Translate with the rules of `BeamSearch.greedy`; see there for the arguments.

        Returns:
            Tokens int64 [B, L], each row an answer, its end symbol, then arbitrary ids; and lengths int64 [B],
            including the end symbol.
        """
        memory, state = self.encode(source, source_mask)
        lengths = torch.full_like(source[:, 0], source.size(1)) if source_mask is None else source_mask.sum(1)
        limits = lengths.long() + max_extra_tokens
        last = torch.full_like(limits, special.bos)
        tokens, ends = [], torch.zeros_like(limits)
        for length in range(1, int(limits.max()) + 1):
            states, state = self.decoder(self.embed(last[:, None]), state)
            logits = F.linear(self.attend(states, memory, source_mask)[:, 0], self.embedding.weight).float()
            logits[:, [special.pad, special.bos]] = float("-inf")
            last = logits.argmax(-1).masked_fill(limits <= length, special.eos)
            tokens.append(last)
            ends = ends.masked_fill((ends == 0) & (last == special.eos), length)
            if bool((ends > 0).all()):
                break
        return torch.stack(tokens, 1), ends


def lstm_of_size(num_parameters: int, vocabulary_size: int, d_model: int, dropout: float) -> LSTMNetwork:
    """Return the network of the width at which its number of parameters is nearest to `num_parameters`."""

    def size(width: int) -> int:
        with torch.device("meta"):
            network = LSTMNetwork(vocabulary_size, d_model, width, dropout)
        return sum(parameter.numel() for parameter in network.parameters())

    larger = 2 + bisect.bisect_left(range(2, num_parameters), num_parameters, key=size)
    width = min(max(2, larger - 1), larger, key=lambda width: abs(size(width) - num_parameters))
    return LSTMNetwork(vocabulary_size, d_model, width, dropout)


class PaddedParts(NamedTuple):
    """The pairs of a micro-batch, longest sources first, in rectangles of at most `PART` pairs."""

    parts: list[PaddedBatch]
    target_output: Tensor
    """int32 [tokens]: the labels of all parts, without padding."""


def padded_parts(batch: RankBatch, pad: int) -> LoopStep:
    """Return the pairs of a step in padded rectangles, a `PaddedParts` for each micro-batch.

    They are read from the packed rows, so that they are the same also where an epoch has a view of the corpus.
    """
    micro_batches, first = [], 0
    for packed in batch.micro_batches:
        source, target_input, labels = _unpack(packed, pad)
        lengths, target_lengths = ((ids != pad).sum(1) for ids in (source, labels))
        order = (lengths * (labels.size(1) + 1) + target_lengths).argsort(descending=True)
        pairs = batch.pairs[first : first + len(order)].to(order.device)
        first += len(order)
        parts = []
        for rows in order.split(PART):
            longest, target_longest = int(lengths[rows].max()), int(target_lengths[rows].max())
            part_source = source[rows, :longest]
            parts.append(
                PaddedBatch(
                    source=part_source,
                    source_mask=part_source != pad,
                    target_input=target_input[rows, :target_longest],
                    target_output=labels[rows, :target_longest],
                    pairs=pairs[rows].int(),
                )
            )
        outputs = [part.target_output[part.target_output != pad] for part in parts]
        micro_batches.append(PaddedParts(parts, torch.cat(outputs)))
    return LoopStep(micro_batches, batch.num_target_tokens)


def _unpack(packed: PackedBatch, pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return source ids [B, S], the decoder's input [B, T] and labels [B, T], padded, in the order of the rows."""
    rectangles = []
    for segments, positions, side in (
        (packed.source_segments, packed.source_positions, [packed.source]),
        (packed.target_segments, packed.target_positions, [packed.target_input, packed.target_output]),
    ):
        if not packed.blocks:
            numbers = torch.arange(len(segments) - 1, device=segments.device)
            segments = torch.repeat_interleave(numbers, segments.diff())
        kept = side[-1] != pad
        rows, columns = segments[kept].long(), positions[kept].long()
        shape = int(rows.max()) + 1, int(columns.max()) + 1
        for ids in side:
            rectangles.append(torch.full(shape, pad, dtype=ids.dtype, device=ids.device))
            rectangles[-1][rows, columns] = ids[kept]
    source, target_input, labels = rectangles
    return source, target_input, labels


def token_states(network: nn.Module, batch: PaddedParts, pad: int) -> Tensor:
    """Return the attentional states [tokens, D] of all target tokens, in the order of `batch.target_output`."""
    states = [
        network(part.source, part.target_input, part.source_mask)[part.target_output != pad] for part in batch.parts
    ]
    return torch.cat(states)


def lstm_loop(
    network: LSTMNetwork,
    settings: TrainingSettings,
    schedule: Schedule,
    precision: tuple[torch.device, torch.dtype],
    pad: int,
    kernels: str | CompiledLoss = "pytorch",
) -> BareLoop:
    """Return a loop that trains the network on the pairs of the network that it is compared with.

    Loss, optimizer and the form of the schedule are the recipe's. Learning rates are `LEARNING_RATE_FACTOR` times the
    recipe's, and gradients are clipped to `CLIP_NORM`.

    Args:
        network: the network.
        settings: the recipe's training settings.
        schedule: the recipe's learning rates.
        precision: device to train on, and type of matrix products.
        pad: id of the padding symbol.
        kernels: for the loss; see `label_smoothed_loss`.
    """

    def loss(states: Tensor, targets: Tensor) -> Tensor:
        weight, smoothing = network.embedding.weight, settings.label_smoothing
        return label_smoothed_loss(states, weight, targets, smoothing, pad, kernels=kernels).smoothed

    return BareLoop(
        network,
        loss,
        replace(settings, gradient_clip_norm=CLIP_NORM),
        lambda step: LEARNING_RATE_FACTOR * schedule(step),
        precision,
        lambda batch: padded_parts(batch, pad),
        lambda network, batch: token_states(network, batch, pad),
    )
