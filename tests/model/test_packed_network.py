"""The network over packed micro-batches equals the network over the same sentences, padded, in float64."""

from dataclasses import replace

import pytest
import torch

import model.attention
import model.packed_attention
from model.attention import attention
from model.dropout import Dropout
from model.packed_attention import FLASH_ATTENTION, PLAIN_ATTENTION
from model.settings import NetworkSettings
from model.transformer import Transformer
from tests.model.sentence_batches import (
    PAD,
    VOCABULARY,
    Lengths,
    losses_and_gradient,
    packed,
    padded,
    sentence_by_sentence,
    states,
)

TINY = NetworkSettings(num_layers=2, d_model=16, d_ff=24, num_heads=4, dropout=0.0)
SENTENCES: Lengths = [
    (7, 9),
    (1, 3),
    (64, 20),
    (20, 64),
    (100, 128),
    (33, 30),
    (3, 1),
    (1, 1),
    (12, 256),
    (300, 400),
    (9, 9),
]
ATTENTIONS = {"plain": PLAIN_ATTENTION, "flash": FLASH_ATTENTION}
VARIANTS = {
    "paper": {},
    "pre-norm": {"pre_norm": True},
    "learned": {"learned_positions": True, "max_positions": 400},
    "other keys": {"d_k": 5, "d_v": 7},
    "deep encoder": {"num_encoder_layers": 3, "num_decoder_layers": 1},
}


@pytest.fixture(autouse=True)
def _without_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variable-length flash attention runs on a GPU and in 16 bits only."""
    monkeypatch.setattr(model.packed_attention, "_flash", sentence_by_sentence)


def make_network(variant: str = "paper", **settings: object) -> Transformer:
    """Return a random network whose biases and norms are not the initial ones."""
    torch.manual_seed(3)
    network = Transformer(VOCABULARY, replace(TINY, **VARIANTS[variant], **settings)).double()
    for parameter in network.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return network


@pytest.mark.parametrize(
    ("variant", "attention"), [*((variant, "plain") for variant in VARIANTS), ("other keys", "flash")]
)
def test_loss_and_gradients_are_those_of_a_padded_batch(variant: str, attention: str) -> None:
    """A micro-batch of dead rows, as a rank without sentences has it, has no loss and no gradient."""
    network = make_network(variant)
    batch, dead = packed([SENTENCES, []]).micro_batches
    assert (batch.target_output == PAD).any()  # dead rows
    found = losses_and_gradient(network, batch, ATTENTIONS[attention])
    torch.testing.assert_close(found, losses_and_gradient(network, padded(SENTENCES)), rtol=1e-10, atol=1e-10)
    assert not any(one.any() for one in losses_and_gradient(network, dead, ATTENTIONS[attention]))
    assert states(network, dead, ATTENTIONS[attention]).isfinite().all()


def test_positions_past_the_learned_ones_are_refused() -> None:
    network = make_network("learned")
    [batch] = packed([[(401, 3)]]).micro_batches
    with pytest.raises(ValueError, match=r"position 401 is past the 400 learned ones"):
        states(network, batch)


def test_positions_past_the_table_of_sinusoids() -> None:
    network = make_network(num_layers=1)
    lengths: Lengths = [(1030, 3), (5, 4)]
    [batch] = packed([lengths]).micro_batches
    found, expected = (losses_and_gradient(network, one) for one in (batch, padded(lengths)))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_dropout_has_the_same_places_in_both_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor stands in for it; test_network.py compares dropout of padded batches with torch's."""
    monkeypatch.setattr(Dropout, "forward", lambda dropout, x: x * (1.0 - dropout.p))
    monkeypatch.setattr(model.attention, "attention", lambda *given: attention(*given[:4]) * (1.0 - given[4]))
    network = make_network(dropout=0.3, attention_dropout=0.2, activation_dropout=0.4)
    [batch] = packed([SENTENCES]).micro_batches
    found, expected = (losses_and_gradient(network, one) for one in (batch, padded(SENTENCES)))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
