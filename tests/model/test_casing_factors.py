"""Factors of embeddings against PyTorch's own parametrizations and autograd."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from model.casing_factors import CasingFactors
from model.translation_module import StepOptions, TranslationModule
from tests.model.sentence_batches import SPECIAL, VOCABULARY
from tests.model.test_translation_module import TRAINING, fit, make_module, make_shares

pytestmark = [
    pytest.mark.filterwarnings("ignore:You have overridden `transfer_batch_to_device`"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]
GROUP = torch.tensor([0, 1, 2, 1, 3, 1, 2])
CASING = torch.tensor([0, 0, 0, 1, 0, 2, 1])
GROUPS_OF_ALL = torch.arange(VOCABULARY) % (VOCABULARY * 2 // 3)
CASINGS_OF_ALL = torch.arange(VOCABULARY) % 3


class Sum(nn.Module):
    """A weight that autograd computes from the same factors."""

    def __init__(self, factors: CasingFactors) -> None:
        super().__init__()
        self.group, self.casing = (nn.Parameter(one.detach().clone()) for one in (factors.group, factors.casing))
        self.group_of, self.casing_of = factors.group_of, factors.casing_of

    def forward(self, piece: Tensor) -> Tensor:
        return piece + self.group[self.group_of] + self.casing[self.casing_of]

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Begin with zeros, as `CasingFactors` does."""
        return torch.zeros_like(weight)


def test_gradients_equal_autograd() -> None:
    torch.manual_seed(1)
    weight = nn.Parameter(torch.randn(7, 4, dtype=torch.float64))
    factors = CasingFactors(weight, GROUP, CASING)
    leaves = [one.detach().clone().requires_grad_() for one in factors.parameters()]
    factor = torch.randn(7, 4, dtype=torch.float64)
    ours = torch.optim.Adam(factors.parameters(), lr=0.1)
    reference = torch.optim.Adam(leaves, lr=0.1)
    for step in range(4):
        (weight * factor + step).sin().sum().backward()
        factors.take_gradient(weight)
        assert weight.grad is None
        piece, group, casing = leaves
        ((piece + group[GROUP] + casing[CASING]) * factor + step).sin().sum().backward()
        for one, leaf in zip(factors.parameters(), leaves, strict=True):
            torch.testing.assert_close(one.grad, leaf.grad)
        for optimizer in (ours, reference):
            optimizer.step()
            optimizer.zero_grad()
        factors.write(weight)
        torch.testing.assert_close(weight.detach(), (piece + group[GROUP] + casing[CASING]).detach())


def test_mixed_precision_does_not_round_gradients() -> None:
    """Training steps run inside an autocast context."""
    torch.manual_seed(1)
    gradients = []
    for enabled in (False, True):
        weight = nn.Parameter(torch.ones(7, 4))
        factors = CasingFactors(weight, GROUP, CASING)
        weight.grad = torch.rand(7, 4, generator=torch.Generator().manual_seed(2))
        with torch.autocast("cpu", torch.bfloat16, enabled):
            factors.take_gradient(weight)
            factors.write(weight)
        gradients.append([one.grad for one in factors.parameters()])
    for plain, mixed in zip(*gradients, strict=True):
        assert plain is not None
        assert mixed is not None
        assert torch.equal(plain, mixed)


def test_casings_begin_alike_and_keep_the_scale() -> None:
    torch.manual_seed(1)
    before = torch.randn(7, 4)
    weight = nn.Parameter(before.clone())
    factors = CasingFactors(weight, GROUP, CASING)
    # Groups 0 to 3 begin with pieces 0, 1, 2 and 4.
    assert torch.equal(weight, before[[0, 1, 2, 1, 4, 1, 2]])
    assert not factors.piece.any()
    assert not factors.casing.any()


def test_weights_of_another_run_are_kept() -> None:
    factors = CasingFactors(nn.Parameter(torch.randn(7, 4)), GROUP, CASING)
    weight = torch.randn(7, 4)
    expected = weight.clone()
    factors.casing.fill_(3.0)
    factors.split(weight)
    torch.testing.assert_close(weight, expected)
    assert not factors.piece[[0, 1, 2, 4]].any()
    assert not factors.casing.any()
    assert torch.equal(weight, factors.piece + factors.group[GROUP])  # to the last bit, as after a step


def module_with(
    casings: tuple[Tensor, Tensor] | None, change: Callable[[TranslationModule], None]
) -> TranslationModule:
    plain = make_module(replace(TRAINING, gradient_clip_norm=0.3, weight_decay=0.1), dropout=0.2)
    torch.manual_seed(3)
    module = TranslationModule(
        VOCABULARY, SPECIAL, plain.network_settings, plain.training_settings, plain.decoding, 1, StepOptions(), casings
    )
    change(module)
    return module


def test_a_network_starts_from_the_weights_of_another_run() -> None:
    module = module_with((GROUPS_OF_ALL, CASINGS_OF_ALL), lambda module: None)
    weights = {name: torch.rand_like(tensor) for name, tensor in module.network.state_dict().items()}
    module.load_weights(weights)
    for name, tensor in module.network.state_dict().items():
        torch.testing.assert_close(tensor, weights[name])
    factors = module.casing_factors
    assert factors is not None
    torch.testing.assert_close(factors.piece + factors.group[GROUPS_OF_ALL], weights["embedding.weight"])


def test_training_equals_a_parametrized_embedding() -> None:
    """Several micro-batches a step, dropout, clipping and weight decay; the reference has autograd's own sums."""
    ours = module_with((GROUPS_OF_ALL, CASINGS_OF_ALL), lambda module: None)
    factors = ours.casing_factors
    assert factors is not None
    before = ours.network.embedding.weight.detach().clone()

    def parametrized(module: TranslationModule) -> None:
        parametrize.register_parametrization(module.network.embedding, "weight", Sum(factors))
        assert torch.equal(module.network.embedding.weight, before)

    reference = module_with(None, parametrized)
    for module in (ours, reference):
        fit(module, make_shares(4))
    weight = ours.network.embedding.weight
    assert not torch.allclose(weight, before, atol=1e-2)
    torch.testing.assert_close(weight, reference.network.embedding.weight, rtol=1e-4, atol=2e-6)
    sums = factors.piece + factors.group[factors.group_of] + factors.casing[factors.casing_of]
    assert torch.equal(weight.detach(), sums.detach())


def test_a_skipped_step_changes_nothing() -> None:
    module = module_with((GROUPS_OF_ALL, CASINGS_OF_ALL), lambda module: None)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    handle = module.network.embedding.weight.register_hook(lambda gradient: gradient * float("inf"))
    fit(module, make_shares(1))
    handle.remove()
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_a_checkpoint_has_the_factors_alone() -> None:
    """What is known from the vocabulary is not in it; DDP would wait for gradients of what needs one."""
    module = module_with((GROUPS_OF_ALL, CASINGS_OF_ALL), lambda module: None)
    factors = {f"casing_factors.{name}" for name in ("piece", "group", "casing")}
    assert set(module.state_dict()) == set(make_module().state_dict()) | factors
    assert {name for name, one in module.named_parameters() if not one.requires_grad} == factors
