"""Embeddings that casings of a word have in part in common.

A piece such as `▁HOUSE` is rare, and its embedding would be learned from its few occurrences alone. With these factors
the embedding of a piece is the sum of three: one of its own, one of all casings of the piece (`▁house`, `▁House`,
`▁HOUSE`), and one of all pieces of that casing (all in upper case). What is learned of `▁house` then helps `▁HOUSE`.
Factors of words are those of Sennrich and Haddow 2016, "Linguistic Input Features Improve Neural Machine Translation".

The network itself does not change: it has the sums. After the backward pass their gradient becomes that of the factors,
the optimizer updates the factors, and the sums are written to the network. So no export and no search knows of them.
"""

import torch
from torch import Tensor, nn


class CasingFactors(nn.Module):
    """The factors of an embedding matrix.

    Shapes: V vocabulary size, G groups of casings, C kinds of casing, D d_model.
    """

    group_of: Tensor
    casing_of: Tensor

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
        # Piece by piece in the order of their ids, the number of pieces of the same group before it.
        order = group.argsort(stable=True)
        starts = torch.searchsorted(group[order], torch.arange(num_groups))
        place = torch.empty_like(group)
        place[order] = torch.arange(len(group)) - starts[group[order]]
        self._num_places = int(place.max()) + 1
        for number in range(self._num_places):
            self.register_buffer(f"pieces_{number}", (place == number).nonzero()[:, 0], persistent=False)
        with torch.no_grad():
            weight.copy_(weight[self._pieces(0)][group])
        self.split(weight)

    @torch.no_grad()
    def split(self, weight: Tensor) -> None:
        """Choose factors whose sums are `weight` [V, D]: a group's is the embedding of its first piece."""
        self.group.copy_(weight[self._pieces(0)])
        self.casing.zero_()
        self.piece.copy_(weight - self.group[self.group_of])
        self.write(weight)

    @torch.no_grad()
    def take_gradient(self, weight: Tensor) -> None:
        """Turn the gradient of the embedding matrix into those of the factors; the matrix has none afterwards.

        Gradients are summed in a fixed order, so that training on a GPU is repeatable.
        """
        gradient = weight.grad
        if gradient is None:
            return
        of_groups = torch.zeros_like(self.group)
        for number in range(self._num_places):
            pieces = self._pieces(number)
            of_groups[self.group_of[pieces]] += gradient[pieces]  # each group at most once
        kinds = torch.arange(self.casing.size(0), device=gradient.device)
        self.casing.grad = (self.casing_of == kinds[:, None]).to(gradient.dtype) @ gradient
        self.group.grad, self.piece.grad, weight.grad = of_groups, gradient, None

    @torch.no_grad()
    def write(self, weight: Tensor) -> None:
        """Write the sums to the embedding matrix [V, D]."""
        weight.copy_(self.piece + self.group[self.group_of] + self.casing[self.casing_of])

    def _pieces(self, number: int) -> Tensor:
        """Return the pieces that have this many pieces of their group before them."""
        return self.get_buffer(f"pieces_{number}")
