"""A network with an output bias, as one from another program has it."""

import copy

import pytest
import torch
from torch import nn

from model.decoding import BeamSearch
from model.fast.packed_linear import pack_linears
from model.loss import label_smoothed_loss
from model.settings import NetworkSettings
from model.transformer import PaddedTransformer, Transformer

SETTINGS = NetworkSettings(
    num_layers=1, d_model=16, d_ff=32, num_heads=2, dropout=0.0, activation="swish", output_bias=True
)
VOCABULARY_SIZE, PAD = 24, 0


@pytest.fixture
def network() -> Transformer:
    torch.manual_seed(1)
    network = Transformer(VOCABULARY_SIZE, SETTINGS).eval()
    with torch.no_grad():
        network.projection.bias.normal_(std=2.0)  # type: ignore[union-attr, operator]
    return network


def test_the_bias_is_added_to_the_logits(network: Transformer) -> None:
    states = torch.randn(3, 5, 16)
    bias = network.state_dict()["projection.bias"]
    torch.testing.assert_close(network.logits(states), states @ network.embedding.weight.T + bias)
    assert "projection.bias" not in Transformer(VOCABULARY_SIZE, NetworkSettings(d_model=16, num_heads=2)).state_dict()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_and_its_gradients(network: Transformer, smoothing: float) -> None:
    source, target = torch.randint(4, VOCABULARY_SIZE, (2, 6)), torch.randint(4, VOCABULARY_SIZE, (2, 9))
    target[1, 6:] = PAD
    states = PaddedTransformer(network)(source, target[:, :-1])
    loss = label_smoothed_loss(*network.projection_operands(states), target[:, 1:], smoothing, PAD).smoothed
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
    network.zero_grad()
    logits = network.logits(PaddedTransformer(network)(source, target[:, :-1])).flatten(0, 1)
    options = {"ignore_index": PAD, "label_smoothing": smoothing, "reduction": "sum"}
    expected = nn.functional.cross_entropy(logits, target[:, 1:].flatten(), **options)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)
    assert found["projection.bias"].abs().min() > 0


def test_search_with_packed_weights_and_torchscript(network: Transformer) -> None:
    source = torch.randint(4, VOCABULARY_SIZE, (3, 7))
    search = BeamSearch(network, 1, 2, PAD).eval()
    expected = search.beam(source, None, 4, 0.6, 5, 2)
    packed = copy.deepcopy(network)
    pack_linears(packed)
    for other in (BeamSearch(packed, 1, 2, PAD).eval(), torch.jit.script(search)):
        found = other.beam(source, None, 4, 0.6, 5, 2)
        assert torch.equal(found.tokens, expected.tokens)
        torch.testing.assert_close(found.scores, expected.scores)
    without = copy.deepcopy(network)
    with torch.no_grad():
        without.projection.bias.zero_()  # type: ignore[union-attr, operator]
    assert not torch.equal(BeamSearch(without, 1, 2, PAD).eval().beam(source, None, 4, 0.6, 5, 2).tokens, found.tokens)
