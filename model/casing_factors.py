"""Embeddings that casings of a word have in part in common.

A piece such as `▁HOUSE` is rare, and its embedding would be learned from its few occurrences alone. With these factors
the embedding of a piece is the sum of three: one of its own, one of all casings of the piece (`▁house`, `▁House`,
`▁HOUSE`), and one of all pieces of that casing (all in upper case). What is learned of `▁house` then helps `▁HOUSE`.
Sennrich and Haddow 2016, "Linguistic Input Features Improve Neural Machine Translation", concatenate embeddings of a
source word's features; here they are added, on both sides and in the output projection.

The network itself does not change: it has the sums. After the backward pass their gradient becomes that of the factors,
the optimizer updates the factors, and the sums are written to the network. So no export and no search knows of them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CasingFactors(nn.Module):
    """The factors of an embedding matrix.

    Shapes: V vocabulary size, G groups of casings, C kinds of casing, D d_model.
    """

    group_of: Tensor
    casing_of: Tensor
    by_group: Tensor
    group_starts: Tensor
    has_casing: Tensor

    def __init__(self, weight: Tensor, group: Tensor, casing: Tensor) -> None:
        """Make the embeddings of a group alike: they begin as that of its first piece.

        Args:
            weight: the embedding matrix [V, D], newly initialized. It is overwritten.
            group: the number of each piece's group, int64 [V], from 0 on in the order of their first pieces.
            casing: the number of each piece's casing, int64 [V].
        """
        super().__init__()
        num_groups, num_casings, d_model = int(group.max()) + 1, int(casing.max()) + 1, weight.size(1)
        # DDP would wait for gradients of parameters that no backward pass reaches.
        self.piece = nn.Parameter(torch.zeros_like(weight), requires_grad=False)
        self.group = nn.Parameter(weight.new_zeros(num_groups, d_model), requires_grad=False)
        self.casing = nn.Parameter(weight.new_zeros(num_casings, d_model), requires_grad=False)
        self.register_buffer("group_of", group, persistent=False)
        self.register_buffer("casing_of", casing, persistent=False)
        # Pieces in the order of their groups, and where each group starts.
        order = group.argsort(stable=True)
        self.register_buffer("by_group", order, persistent=False)
        starts = torch.searchsorted(group[order], torch.arange(num_groups, device=group.device))
        self.register_buffer("group_starts", starts, persistent=False)
        has_casing = casing == torch.arange(num_casings, device=casing.device)[:, None]
        self.register_buffer("has_casing", has_casing.to(weight.dtype), persistent=False)
        with torch.no_grad():
            weight.copy_(F.embedding(group, self._first_of_groups(weight)))
        self.split(weight)

    @torch.no_grad()
    def split(self, weight: Tensor) -> None:
        """Choose factors whose sums are `weight` [V, D]: a group's is the embedding of its first piece."""
        self.group.copy_(self._first_of_groups(weight))
        self.casing.zero_()
        self.piece.copy_(weight - F.embedding(self.group_of, self.group))
        self.write(weight)

    @torch.no_grad()
    def take_gradient(self, weight: Tensor) -> None:
        """Turn the gradient of the embedding matrix into those of the factors; the matrix has none afterwards.

        Gradients are summed in a fixed order, so that training on a GPU is repeatable.
        """
        gradient = weight.grad
        if gradient is None:
            return
        self.group.grad = F.embedding_bag(self.by_group, gradient, self.group_starts, mode="sum")
        with torch.autocast(gradient.device.type, enabled=False):  # The product would be in 16 bits.
            self.casing.grad = self.has_casing @ gradient
        self.piece.grad, weight.grad = gradient, None

    @torch.no_grad()
    def write(self, weight: Tensor) -> None:
        """Write the sums to the embedding matrix [V, D]."""
        torch.add(self.piece, F.embedding(self.group_of, self.group), out=weight)
        weight += F.embedding(self.casing_of, self.casing)

    def _first_of_groups(self, weight: Tensor) -> Tensor:
        return weight[self.by_group[self.group_starts]]
