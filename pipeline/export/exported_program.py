"""`model.pt2`: encoder and decoding step for torch.export, with dynamic shapes. The caller writes the decoding loop.

A step is a pure function of R rows, each a hypothesis. It takes the rows' keys and values and returns longer ones,
which the caller may reorder. Shapes: R rows, S source length, P previous tokens, H heads, K d_k, V d_v, N decoder
layers.
"""

import io
import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from data_module.files import atomic_file
from model.attention import attention
from model.transformer import LearnedPositions, Transformer
from pipeline.compat.pytorch import load_programs, save_programs

NAME = "model.pt2"


class Program(NamedTuple):
    """What torch.export has made of a module."""

    exported: torch.export.ExportedProgram
    dimensions: tuple[dict[int, Any], ...]
    """For each input, the names of its dynamic dimensions."""


class Positions(nn.Module):
    """The network's position encodings for positions in a tensor: computed sinusoids or the learned table."""

    table: Tensor
    frequency: Tensor

    def __init__(self, network: Transformer) -> None:
        super().__init__()
        positions, d_model = network.positions, network.embedding.embedding_dim
        self.learned = isinstance(positions, LearnedPositions)
        self.d_model = d_model
        even = torch.arange(0, d_model, 2, dtype=torch.float64)
        self.register_buffer("table", positions.table.detach() if self.learned else torch.empty(0))
        self.register_buffer("frequency", torch.exp(even * (-math.log(10000.0) / d_model)))

    def forward(self, position: Tensor) -> Tensor:
        """Map int64 positions [L] to encodings [L, D]; a position past the learned ones raises."""
        if self.learned:
            return self.table[position]
        angle = position.double().unsqueeze(1) * self.frequency
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, : self.d_model].float()


class Encode(nn.Module):
    """The encoder and the cross-attention's keys and values."""

    def __init__(self, network: Transformer) -> None:
        super().__init__()
        self.embedding, self.embedding_scale = network.embedding, network.embedding_scale
        self.positions, self.encoder, self.norm = Positions(network), network.encoder, network.encoder_norm
        # Only the cross-attention of each decoder layer, so that nothing unused is written.
        self.key_values = nn.ModuleList(layer.cross_attention for layer in network.decoder)  # type: ignore

    def forward(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Map ids [R, S] and mask [R, S] to the cross-attention's keys [N, R, H, S, K] and values [N, R, H, S, V]."""
        positions = self.positions(torch.arange(source.size(1), device=source.device))
        x = self.embedding(source) * self.embedding_scale + positions
        for layer in self.encoder:
            x = layer(x, source_mask[:, None, None, :])
        memory = self.norm(x)
        pairs = [attention.keys_values(memory) for attention in self.key_values]  # type: ignore[operator]
        return torch.stack([keys for keys, _ in pairs]), torch.stack([values for _, values in pairs])


class Step(nn.Module):
    """One decoding step of every row."""

    def __init__(self, network: Transformer) -> None:
        super().__init__()
        self.embedding, self.embedding_scale = network.embedding, network.embedding_scale
        self.positions, self.norm, self.projection = Positions(network), network.decoder_norm, network.projection
        self.decoder: Any = network.decoder

    def forward(
        self,
        last: Tensor,
        keys: Tensor,
        values: Tensor,
        cross_keys: Tensor,
        cross_values: Tensor,
        source_mask: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next token's logits [R, vocabulary], and keys and values with one more position.

        Args:
            last: int64 ids [R], the newest token of each row.
            keys: self-attention's keys [N, R, H, P, K]; P is 0 at the first step.
            values: self-attention's values [N, R, H, P, V].
            cross_keys: cross-attention's keys from `Encode`.
            cross_values: cross-attention's values from `Encode`.
            source_mask: bool [R, S], True at tokens.
        """
        position = torch.full([1], keys.size(3), dtype=torch.int64, device=last.device)
        mask = source_mask[:, None, None, :]
        x = self.embedding(last.unsqueeze(1)) * self.embedding_scale + self.positions(position)
        longer_keys, longer_values = [], []
        for index, layer in enumerate(self.decoder):
            residual = layer.self_attention_residual
            query, key, value = layer.self_attention.project(residual.before(x))
            key, value = torch.cat([keys[index], key], 2), torch.cat([values[index], value], 2)
            heads = attention(query, key, value, None, False)
            x = residual(x, layer.self_attention.output(heads.transpose(1, 2).flatten(2)))
            residual = layer.cross_attention_residual
            attended = layer.cross_attention.attend(residual.before(x), cross_keys[index], cross_values[index], mask)
            x = residual(x, attended)
            residual = layer.feed_forward_residual
            x = residual(x, layer.feed_forward(residual.before(x)))
            longer_keys.append(key)
            longer_values.append(value)
        logits = self.projection(self.norm(x), self.embedding.weight).squeeze(1)
        return logits, torch.stack(longer_keys), torch.stack(longer_values)


def write_exported_program(network: Transformer, card: str, path: Path) -> None:
    """Write the programs `encode` and `step` and the card into one file."""
    programs = {"encode": encode_program(network).exported, "step": step_program(network).exported}
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_programs(buffer, programs, {"card.json": card})
    with atomic_file(path) as file:
        file.write(buffer.getvalue())


def load_exported_program(path: Path) -> dict[str, Any]:
    """Load the programs `encode` and `step` as callable modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        programs = load_programs(path)
    return {name: program.module() for name, program in programs.items()}


def encode_program(network: Transformer) -> Program:
    """Export `Encode` with a dynamic number of rows and source length."""
    rows, length = torch.export.Dim("rows"), _length(network, "source_length")
    source = torch.full([2, 3], 4)
    return _exported(Encode(network), (source, source > 0), ({0: rows, 1: length}, {0: rows, 1: length}))


def step_program(network: Transformer) -> Program:
    """Export `Step` with a dynamic number of rows, source length and number of previous tokens."""
    rows, length, past = torch.export.Dim("rows"), _length(network, "source_length"), _length(network, "past", -1)
    encode = Encode(network)
    source = torch.full([2, 3], 4)
    with torch.no_grad():
        cross_keys, cross_values = encode(source, source > 0)
    keys, values = cross_keys[:, :, :, :2].contiguous(), cross_values[:, :, :, :2].contiguous()
    arguments = (source[:, 0], keys, values, cross_keys, cross_values, source > 0)
    dimensions = (
        {0: rows},
        *({1: rows, 3: past},) * 2,
        *({1: rows, 3: length},) * 2,
        {0: rows, 1: length},
    )
    return _exported(Step(network), arguments, dimensions)


def _length(network: Transformer, name: str, more: int = 0) -> Any:
    longest = network.positions.max_positions
    return torch.export.Dim(name, max=longest + more) if longest else torch.export.Dim(name)


def _exported(module: nn.Module, arguments: tuple[Any, ...], dimensions: tuple[dict[int, Any], ...]) -> Program:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Program(torch.export.export(module.eval(), arguments, dynamic_shapes=dimensions), dimensions)
