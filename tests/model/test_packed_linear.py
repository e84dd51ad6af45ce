"""Packed weights: the same network but for rounding."""

import copy

import pytest
import torch
from torch import nn

from model.decoding import Search
from model.packed_linear import PackedLinear, can_pack, pack_linears
from tests.model.search_truth import BOS, EOS, LENGTHS, PAD, answers_of, count_ties, make_sources, trained_network

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")


@pytest.mark.parametrize("variant", ["", "pre-norm", "learned"])
def test_a_packed_network_finds_the_same(variant: str) -> None:
    source, mask = make_sources(LENGTHS)
    network = trained_network(variant)
    packed = copy.deepcopy(network)
    assert can_pack(packed)
    pack_linears(packed)
    # Seven a decoder layer, four an encoder layer, and the projection.
    assert sum(isinstance(module, PackedLinear) for module in packed.modules()) == 7 + 4 + 1
    assert not any(isinstance(module, nn.Linear) for module in packed.modules())
    torch.testing.assert_close(packed(source, source, mask), network(source, source, mask))
    found, expected = (Search(one, BOS, EOS, PAD).eval().beam(source, mask, 4, 0.6, 10, 4) for one in (packed, network))
    ties = sum(count_ties(answers_of(found, i), answers_of(expected, i)) for i in range(len(LENGTHS)))
    assert ties <= 2


def test_what_cannot_be_packed() -> None:
    assert not can_pack(copy.deepcopy(trained_network()).bfloat16())
