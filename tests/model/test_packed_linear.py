"""A network with packed weights equals the plain one up to rounding."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from model.decoding import BeamSearch
from model.fast.packed_linear import PackedLinear, can_pack, pack_linears
from model.transformer import PaddedTransformer
from tests.model.search_truth import (
    BOS,
    EOS,
    LENGTHS,
    PAD,
    assert_finds,
    exact,
    make_network,
    make_sources,
    references,
    tolerance,
    trained_network,
)

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")


class PackedProducts(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.count += operator is torch.ops.mkldnn._linear_pointwise.default
        return operator(*arguments, **options or {})


@pytest.mark.parametrize("variant", ["pre-norm", "biased"])
def test_a_packed_network_finds_the_same(variant: str) -> None:
    source, mask = make_sources(LENGTHS)
    network = trained_network(variant)
    packed = copy.deepcopy(network)
    assert can_pack(packed)
    pack_linears(packed)
    # Seven per decoder layer, four per encoder layer, and the projection.
    assert sum(isinstance(module, PackedLinear) for module in packed.modules()) == 7 + 4 + 1
    assert not any(isinstance(module, nn.Linear) for module in packed.modules())
    # With this many sentences every product is large enough to use its packed weight.
    sources, masks = source.repeat(30, 1), mask.repeat(30, 1)
    with torch.no_grad():
        expected_logits = exact(network).logits(exact(network)(sources, sources, masks))
        with PackedProducts() as products:
            logits = packed.logits(PaddedTransformer(packed)(sources, sources, masks))
    assert products.count == 7 + 4 + 1
    torch.testing.assert_close(logits.double(), expected_logits, rtol=0, atol=tolerance(network))
    found = BeamSearch(packed, BOS, EOS, PAD).eval().beam(source, mask, 4, 0.6, 8, 4)
    assert_finds(network, found, references(network, 4, 0.6, 8))


def test_what_cannot_be_packed() -> None:
    assert not can_pack(make_network(0).bfloat16())
    assert not can_pack(make_network(0).to("meta"))
