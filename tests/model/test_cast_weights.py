"""Linear layers that use 16-bit copies of their weights, against `nn.Linear` under autocast and against float64."""

import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from model.fast.cast_weights import CastWeights, cast_linear
from model.layers import Residual
from model.loss import label_smoothed_loss
from model.padded_transformer import PaddedTransformer
from model.settings import NetworkSettings
from model.transformer import Transformer
from tests.model.sentence_batches import PAD, VOCABULARY, arguments, packed

TINY = NetworkSettings(num_layers=1, d_model=16, d_ff=24, num_heads=2, dropout=0.0)
LENGTHS = [(7, 9), (1, 3), (20, 34), (33, 30)]


def make_network(pre_norm: bool = False) -> Transformer:
    torch.manual_seed(3)
    network = Transformer(VOCABULARY, NetworkSettings(**{**vars(TINY), "pre_norm": pre_norm}))
    for parameter in network.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return network


def linear(rows: int = 40) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(1)
    return nn.Linear(24, 32), torch.randn(rows, 24), torch.randn(rows, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
def test_results_are_autocasts_and_gradients_are_float32(dtype: torch.dtype, input_dtype: torch.dtype) -> None:
    module, x, upstream = linear()
    x, upstream = x.to(input_dtype).requires_grad_(), upstream.to(dtype)
    with torch.autocast("cpu", dtype):
        expected = module(x)
    wanted = torch.autograd.grad(expected, [x, module.weight, module.bias], upstream)
    CastWeights(nn.Sequential(module), dtype).refresh()
    result = cast_linear(module, x)
    found = torch.autograd.grad(result, [x, module.weight, module.bias], upstream)
    assert result.dtype == dtype
    assert torch.equal(result, expected)
    assert [one.dtype for one in found] == [input_dtype, torch.float32, torch.float32]
    # Of the same rounded operands, in float64; closer than autocast's, which rounds them.
    low_x, low_weight = x.detach().to(dtype).double(), module.weight.detach().to(dtype).double()
    exact = upstream.double() @ low_weight, upstream.double().t() @ low_x, upstream.double().sum(0)
    for one, other, truth in zip(found, wanted, exact, strict=True):
        assert (one - truth).norm() < 0.004 * truth.norm()
        assert (one - truth).norm() <= 1.001 * (other - truth).norm()
    assert (found[2] - exact[2]).norm() < 1e-5 * exact[2].norm()  # summed in float32


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.SiLU()])
@pytest.mark.parametrize("rows", [0, 40, 128])
def test_an_activation_after_the_product(activation: nn.Module, rows: int) -> None:
    """Whether or not it is part of the product; 128 rows are masked and summed in parts."""
    module, x, upstream = linear(rows)
    x, upstream = x.bfloat16().requires_grad_(), upstream.bfloat16()
    CastWeights(nn.Sequential(module), torch.bfloat16).refresh()
    inputs = [x, module.weight, module.bias]
    expected = activation(cast_linear(module, x))
    found = cast_linear(module, x, activation)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(result, inputs, upstream) for result in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_copies_follow_the_weights_when_they_are_refreshed() -> None:
    module, x, _ = linear()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1, fused=True)
    cast = CastWeights(nn.Sequential(module), torch.bfloat16)
    cast.refresh()
    before = cast_linear(module, x)
    before.float().sum().backward()
    optimizer.step()
    assert torch.equal(cast_linear(module, x), before)
    cast.refresh()
    after = cast_linear(module, x)
    assert not torch.equal(after, before)
    low = [parameter.detach().bfloat16() for parameter in module.parameters()]
    assert torch.equal(after, F.linear(x.bfloat16(), *low))


def loss_and_gradient(network: Transformer) -> tuple[Tensor, Tensor]:
    [batch] = packed([LENGTHS]).micro_batches
    with torch.autocast("cpu", torch.bfloat16):
        states = network.rows(*arguments(batch, torch.bfloat16))
        sums = label_smoothed_loss(states, network.embedding.weight, batch.target_output, 0.1, PAD)
    gradients = torch.autograd.grad(sums.smoothed, list(network.parameters()))
    assert {one.dtype for one in gradients} == {torch.float32}
    return sums.smoothed.detach(), parameters_to_vector(gradients)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_every_product_of_a_packed_network_uses_the_copies(pre_norm: bool) -> None:
    """Loss and gradients are autocast's; copies that are zero change the result of every linear layer."""
    network = make_network(pre_norm)
    plain, expected = loss_and_gradient(network)
    cast = CastWeights(network, torch.bfloat16)
    cast.refresh()
    loss, gradient = loss_and_gradient(network)
    torch.testing.assert_close(loss, plain, rtol=1e-3, atol=0)
    assert (gradient - expected).norm() < 0.01 * expected.norm()
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear):
            copies = vars(module)["cast"]
            copies[0].zero_()
            assert not torch.equal(loss_and_gradient(network)[1], gradient), name
            cast.refresh()
    assert torch.equal(loss_and_gradient(network)[1], gradient)


def test_copies_are_in_no_checkpoint_and_padded_batches_do_not_use_them() -> None:
    """Nor does TorchScript."""
    network, other = make_network(), make_network()
    CastWeights(network, torch.bfloat16)  # not refreshed: whatever used the copies would be wrong
    assert list(network.state_dict()) == list(other.state_dict())
    assert [name for name, _ in network.named_parameters()] == [name for name, _ in other.named_parameters()]
    assert [name for name, _ in network.named_buffers()] == [name for name, _ in other.named_buffers()]
    inputs = torch.tensor([[5, 6, 7]]), torch.tensor([[1, 8]])
    padded, others = (PaddedTransformer(net).eval() for net in (network, other))
    expected = others(*inputs)
    assert torch.equal(padded(*inputs), expected)
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(padded), file)
    file.seek(0)
    scripted = torch.jit.load(file)
    torch.testing.assert_close(scripted(*inputs), expected)
    assert list(scripted.state_dict()) == list(torch.jit.script(others).state_dict())


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("with_copies", [False, True])
def test_rows_are_in_16_bits_between_layers_and_norms_compute_in_float32(pre_norm: bool, with_copies: bool) -> None:
    network = make_network(pre_norm)
    if with_copies:
        CastWeights(network, torch.bfloat16).refresh()
    dtypes: list[torch.dtype] = []
    for module in network.modules():
        if isinstance(module, Residual):
            module.register_forward_hook(lambda _, given, result: dtypes.extend([given[0].dtype, result.dtype]))
    [batch] = packed([LENGTHS]).micro_batches
    with torch.autocast("cpu", torch.bfloat16):
        states = network.rows(*arguments(batch, torch.bfloat16))
    assert len(dtypes) == 2 * 5
    assert set(dtypes) == {torch.bfloat16}
    assert states.dtype == torch.bfloat16
