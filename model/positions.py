"""Positional encodings: sinusoids (section 3.5) or learned embeddings (Table 3, row E)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
