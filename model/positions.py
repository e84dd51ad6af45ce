"""Positions: the paper's sinusoids (section 3.5), or a learned table (Table 3, row E)."""

import math

import torch
from torch import Tensor, nn


def sinusoidal_table(num_positions: int, d_model: int, start: int = 0, device: torch.device | None = None) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)) and PE(pos, 2i+1) = cos of the same angle (section 3.5).

    Worked out in float64 and rounded once, since float32 angles are off by 1e-4 at position 1,000.

    Returns: float32 [num_positions, d_model], of the positions from `start` on.
    """
    position = torch.arange(start, start + num_positions, dtype=torch.float64, device=device).unsqueeze(1)
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device=device)
    angle = position * torch.exp(even * (-math.log(10000.0) / d_model))
    table = torch.zeros(num_positions, d_model, dtype=torch.float64, device=device)
    table[:, 0::2] = torch.sin(angle)
    table[:, 1::2] = torch.cos(angle)[:, : d_model // 2]
    return table.to(torch.float32)


class SinusoidalPositions(nn.Module):
    """The fixed formula, so there is no longest sentence; a table has the usual ones."""

    table: Tensor

    def __init__(self, d_model: int, num_positions: int = 1024) -> None:
        super().__init__()
        self.d_model = d_model
        self.max_positions = 0  # no end
        # Not persistent: a formula needs no place in a checkpoint. It keeps its size, since a moving average of the
        # weights goes through the buffers too and would meet two tables of different sizes.
        self.register_buffer("table", sinusoidal_table(num_positions, d_model), persistent=False)

    def forward(self, start: int, length: int) -> Tensor:
        """Rows start .. start + length - 1: [length, D]."""
        if start + length > self.table.size(0):
            return sinusoidal_table(length, self.d_model, start, self.table.device).to(self.table.dtype)
        return self.table[start : start + length]


class LearnedPositions(nn.Module):
    """One learned vector a position; a longer sentence than `max_positions` is an error."""

    def __init__(self, d_model: int, max_positions: int) -> None:
        super().__init__()
        self.max_positions = max_positions
        self.table = nn.Parameter(torch.empty(max_positions, d_model))
        nn.init.normal_(self.table, std=d_model**-0.5)

    def forward(self, start: int, length: int) -> Tensor:
        """Rows start .. start + length - 1: [length, D].

        Raises ValueError past the last learned position.
        """
        if start + length > self.max_positions:
            raise ValueError(
                f"position {start + length} is past the {self.max_positions} learned ones "
                "(network.max_positions); cut the sentence or use sinusoidal positions"
            )
        return self.table[start : start + length]
