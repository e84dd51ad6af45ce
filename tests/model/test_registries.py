"""Norms, activations, schedules and optimizers that are registered from outside."""

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from data_module.registry import Registry
from model.decoding import BeamSearch
from model.fast.packed_linear import can_pack, pack_linears
from model.layers import ACTIVATIONS, NORMS
from model.optimization import OPTIMIZERS, SCHEDULES, build_optimizer
from model.settings import NetworkSettings, TrainingSettings
from model.transformer import PaddedTransformer, Transformer
from tests.model.search_truth import BOS, EOS, LENGTHS, PAD, make_sources

SHAPE = {"num_layers": 2, "d_model": 16, "d_ff": 24, "num_heads": 2}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    registries: list[Registry[object]] = [NORMS, ACTIVATIONS, SCHEDULES, OPTIMIZERS]
    before = [dict(registry) for registry in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


def test_the_optimizer_is_the_papers() -> None:
    settings = TrainingSettings(adam_beta1=0.8, adam_beta2=0.7, adam_epsilon=0.1)
    optimizer = build_optimizer([nn.Parameter(torch.ones(1))], settings)
    assert type(optimizer) is torch.optim.Adam
    assert optimizer.defaults["fused"]
    assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.8, 0.7), 0.1)


class ShiftedSiLU(nn.Module):
    """An activation with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x + self.shift)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_a_registered_norm_and_activation_are_used_everywhere(pre_norm: bool) -> None:
    """In every layer and after each stack, in training, search and TorchScript, and with packed weights."""
    NORMS["rms_norm"] = nn.RMSNorm
    ACTIVATIONS["shifted_silu"] = ShiftedSiLU
    torch.manual_seed(1)
    settings = NetworkSettings(**SHAPE, norm="rms_norm", activation="shifted_silu", pre_norm=pre_norm)
    network = Transformer(60, settings).eval()
    kinds = [type(module) for module in network.modules()]
    assert kinds.count(nn.RMSNorm) == 2 * (2 + 3) + 2 * pre_norm
    assert kinds.count(ShiftedSiLU) == 2 * 2
    assert not {nn.LayerNorm, nn.ReLU} & set(kinds)
    source, mask = make_sources(LENGTHS)
    padded = PaddedTransformer(network)
    loss = padded(source, source, mask).square().sum()
    assert all(g.any() for g in torch.autograd.grad(loss, [p for p in network.parameters() if p.dim() == 1]))
    search = BeamSearch(network, BOS, EOS, PAD).eval()
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(search), file)
    file.seek(0)
    expected = search.beam(source, mask, 4, 0.6, 5, 4)
    assert torch.equal(torch.jit.load(file).beam(source, mask, 4, 0.6, 5, 4)[0], expected.tokens)
    if can_pack(network):
        packed = copy.deepcopy(network)
        pack_linears(packed)
        with torch.no_grad():
            torch.testing.assert_close(
                PaddedTransformer(packed)(source, source, mask), padded(source, source, mask), rtol=1e-4, atol=1e-4
            )
