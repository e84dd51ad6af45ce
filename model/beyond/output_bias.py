"""The output bias of Marian's models, as a part of the product of states and weight that the loss computes."""

import torch
import torch.nn.functional as F
from torch import Tensor

_COLUMNS = 8


def with_bias(states: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return states [..., D + 8] and a weight [V, D + 8], whose product is that of the arguments plus the bias [V].

    The states get a column of ones, and the weight the bias. The other columns are zeros, because a GPU multiplies
    widths that are a multiple of 8 faster.
    """
    ones = F.pad(states.new_ones([*states.shape[:-1], 1]), [0, _COLUMNS - 1])
    return torch.cat([states, ones], -1), torch.cat([weight, F.pad(bias.unsqueeze(1), [0, _COLUMNS - 1])], 1)
