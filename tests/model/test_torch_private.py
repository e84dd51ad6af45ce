"""PyTorch's private interfaces are where `model/torch_private.py` looks for them, and do what it says."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model import torch_private
from model.optimization import take_step


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_fused_optimizers_skip_a_step_and_divide_gradients(kind: type[torch.optim.Optimizer]) -> None:
    steps = []
    for found_inf, scale in ((0.0, 4.0), (0.0, None), (1.0, 4.0)):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = kind([parameter], lr=0.1, fused=True)  # type: ignore[call-arg]
        assert torch_private.skips_non_finite_steps(optimizer)
        parameter.grad = torch.full((3,), 0.001 * (scale or 1.0))
        factor = torch.tensor(scale) if scale is not None else None
        torch_private.set_gradient_scaling(optimizer, factor, torch.tensor(found_inf))
        optimizer.step()
        steps.append(parameter.detach() - 1)
    torch.testing.assert_close(steps[0], steps[1])
    assert bool(steps[0].all())
    assert not steps[2].any()
    assert not torch_private.skips_non_finite_steps(kind([parameter], lr=0.1, fused=False))  # type: ignore[call-arg]


def test_momentum_of_a_skipped_first_step() -> None:
    """PyTorch's fused SGD makes room for it and leaves what was there before."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], momentum=0.9, fused=True)
    parameter.grad = torch.full((3,), torch.inf)
    take_step(optimizer, optimizer.step, torch.tensor(1.0), None)
    assert not optimizer.state[parameter]


def test_the_default_generator_is_dropouts() -> None:
    device = torch.device("cpu")
    torch_private.default_generator(device).manual_seed(3)
    found = F.dropout(torch.ones(50), 0.5)
    torch.manual_seed(3)
    assert torch.equal(found, F.dropout(torch.ones(50), 0.5))
    assert isinstance(torch.cuda.default_generators, tuple)


def test_tensors_are_copied_and_converted_in_one_call() -> None:
    targets, sources = (
        [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 2)],
        [torch.ones(3), torch.full((2, 2), 4.0)],
    )
    torch_private.copy_all(targets, sources)
    assert [one.dtype for one in targets] == [torch.bfloat16, torch.float32]
    assert [one.tolist() for one in targets] == [one.tolist() for one in sources]
