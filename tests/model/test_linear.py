"""The model's linear layer against PyTorch's, and how often oneDNN compiles kernels for it, by oneDNN's own log."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cpu.linear import Linear
from model.loss import label_smoothed_loss


def results(layer: nn.Linear, x: Tensor) -> list[Tensor]:
    """Return the output and the gradients of input, weight and bias. The output's gradient differs for each row."""
    x = x.detach().requires_grad_()
    y = layer(x)
    weights = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    return [y, *torch.autograd.grad((y * weights).sum(), [x, layer.weight, layer.bias])]


@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 5), (127,), (4, 32), (3, 43), (2, 200)])
def test_equals_torchs_in_bfloat16(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    ours = Linear(24, 40)
    theirs = nn.Linear(24, 40)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(*shape, 24)
    with torch.autocast("cpu", torch.bfloat16):
        for found, expected in zip(results(ours, x), results(theirs, x), strict=True):
            assert found.shape == expected.shape
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
        with torch.no_grad():
            assert torch.equal(ours(x), theirs(x))
    for found, expected in zip(results(ours, x), results(theirs, x), strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(*(results(one.bfloat16(), x.bfloat16()) for one in (ours, theirs)), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=2e-2)


def compiled(layer: nn.Linear, rows: range, capfd: pytest.CaptureFixture[str]) -> int:
    """Count the products that oneDNN compiles kernels for, in training steps on batches of these numbers of rows."""
    capfd.readouterr()
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
        for number in rows:
            x = torch.randn(number, layer.in_features)
            with torch.autocast("cpu", torch.bfloat16):
                states = layer(layer(x.requires_grad_()))
                sums = label_smoothed_loss(states, layer.weight, torch.ones(number, dtype=torch.long), 0.1, 0)
            sums.smoothed.backward()
    return sum("create:cache_miss" in line and "matmul" in line for line in capfd.readouterr().out.splitlines())


def test_batches_of_like_size_share_their_kernels(capfd: pytest.CaptureFixture[str]) -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return  # PyTorch multiplies without oneDNN and compiles nothing
    ours, theirs = Linear(48, 48), nn.Linear(48, 48)
    assert compiled(ours, range(384, 385), capfd) > 0
    assert compiled(ours, range(257, 384), capfd) == 0
    assert compiled(theirs, range(257, 262), capfd) >= 5


def test_the_losss_padding_counts_for_nothing() -> None:
    """In bfloat16, where the loss adds rows, sums and gradients equal those in float32 up to rounding."""
    torch.manual_seed(1)
    states, weight = torch.randn(3, 43, 16), torch.randn(50, 16)
    targets, ignored_id = torch.randint(0, 50, (3, 43)), 5
    assert (targets == ignored_id).any()
    found, expected = [], []
    for results, enabled in ((found, True), (expected, False)):
        inputs = [states.clone().requires_grad_(), weight.clone().requires_grad_()]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            sums = label_smoothed_loss(inputs[0], inputs[1], targets, 0.1, ignored_id)
        results += [sums.smoothed, sums.negative_log_likelihood, *torch.autograd.grad(sums.smoothed, inputs)]
    logits = F.linear(states, weight).flatten(0, 1)
    torch.testing.assert_close(
        expected[1], F.cross_entropy(logits, targets.flatten(), ignore_index=ignored_id, reduction="sum")
    )
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() < 0.01 * other.norm()
