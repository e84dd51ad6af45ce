"""Layers that are registered from outside: the attention of docs/extending.md, a norm and an activation."""

import copy
import importlib.util
import io
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from data_module.errors import InputError
from model.attention import SelfAttention
from model.attention_maps import attention_maps
from model.decoding import BeamSearch
from model.fast.compiled_search import unsupported
from model.fast.packed_linear import can_pack, pack_linears
from model.layers import ACTIVATIONS, NORMS, SELF_ATTENTIONS
from model.settings import NetworkSettings
from model.transformer import PaddedTransformer, Transformer
from pipeline.export.onnx_model import Encode, Step
from tests.conftest import ROOT
from tests.docs import pages
from tests.model.search_truth import BOS, EOS, LENGTHS, PAD, assert_finds, make_network, make_sources, references
from tests.model.sentence_batches import losses_and_gradient, packed, padded, states

PAIRS = [(7, 9), (1, 3), (20, 34), (33, 30), (3, 1), (1, 1), (9, 9)]


@pytest.fixture(autouse=True)
def _registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's code is a file of its own, since TorchScript reads the source."""
    sections = pages.read(ROOT / "docs" / "extending.md").split("\n## ")
    [section] = [one for one in sections if one.startswith("An attention\n")]
    [block] = [block.text for block in pages.blocks(section) if block.language == "python"]
    with mock.patch.dict(SELF_ATTENTIONS):
        path = tmp_path / "my_pipeline.py"
        path.write_text(block, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("my_pipeline", path)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "my_pipeline", module)
        spec.loader.exec_module(module)
        yield


def make(vocabulary_size: int = 50, **settings: object) -> Transformer:
    """Return a network whose numbers by distance are far from their initial zeros."""
    network = make_network(3, vocabulary_size, self_attention="relative", **settings)
    generator = torch.Generator().manual_seed(1)
    for layer in (*network.encoder, *network.decoder):
        layer.self_attention.by_distance.data.normal_(std=2.0, generator=generator)
    return network


def formula(module: SelfAttention, x: Tensor, is_causal: bool) -> Tensor:
    """Compute the attention of one sentence [T, D] token by token and head by head."""
    size, values = module.num_heads * module.d_k, module.num_heads * module.d_v
    query, key, value = (x @ module.query_key_value.weight.T + module.query_key_value.bias).split(
        [size, size, values], -1
    )
    heads = []
    for head in range(module.num_heads):
        q, k = (each[:, head * module.d_k :][:, : module.d_k] for each in (query, key))
        v = value[:, head * module.d_v :][:, : module.d_v]
        results = []
        for t in range(len(x)):
            keys = range(t + 1 if is_causal else len(x))
            numbers = torch.stack([module.by_distance[head, max(-16, min(16, s - t)) + 16] for s in keys])
            scores = k[: len(keys)] @ q[t] / math.sqrt(module.d_k) + numbers
            results.append(scores.softmax(0) @ v[: len(keys)])
        heads.append(torch.stack(results))
    return torch.cat(heads, -1) @ module.output.weight.T + module.output.bias


@torch.no_grad()
def test_encoder_and_decoder_compute_the_formula() -> None:
    network = make(d_k=5, d_v=7).double()
    x = torch.randn(3, 40, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    encoder, decoder = network.encoder[0].self_attention, network.decoder[0].self_attention
    padding = torch.zeros(3, 1, 1, 40, dtype=torch.float64)
    padding[1, ..., 30:] = padding[2, ..., 1:] = -math.inf
    found = encoder(x, padding)
    for sentence, length in enumerate((40, 30, 1)):
        torch.testing.assert_close(found[sentence, :length], formula(encoder, x[sentence, :length], False))
    torch.testing.assert_close(encoder(x, None)[1], formula(encoder, x[1], False))
    # Position by position, as greedy search does.
    keys, values = x.new_empty(3, 2, 40, 5), x.new_empty(3, 2, 40, 7)
    steps = [decoder.step(x[:, t, None], keys, values, t, None)[0] for t in range(40)]
    torch.testing.assert_close(torch.cat(steps, 1)[2], formula(decoder, x[2], True))


def test_packed_rows_are_padded_batches_and_the_numbers_have_a_gradient() -> None:
    network = make(dropout=0.0).double().train()
    numbers = network.encoder[1].self_attention.by_distance
    [batch] = packed([PAIRS]).micro_batches
    found = losses_and_gradient(network, batch)
    torch.testing.assert_close(found, losses_and_gradient(network, padded(PAIRS)))
    loss = states(network, batch).square().sum()
    assert torch.autograd.grad(loss, numbers)[0].any()


def test_the_search_in_python_and_torchscript_finds_what_a_plain_one_finds() -> None:
    network, (source, mask) = make(24), make_sources(LENGTHS)
    search = BeamSearch(network, BOS, EOS, PAD).eval()
    found = search.beam(source, mask, 4, 0.6, 8, 4)
    assert_finds(network, found, references(network, 4, 0.6, 8))
    scripted = torch.jit.script(search).beam(source, mask, 4, 0.6, 8, 4)
    assert torch.equal(scripted.tokens, found.tokens)


@torch.no_grad()
def test_exported_steps_and_pictures() -> None:
    network = make().double()
    source, target = torch.randint(4, 50, (3, 6)), torch.randint(4, 50, (3, 5))
    mask = torch.ones(3, 6, dtype=torch.bool)
    exact = PaddedTransformer(network)
    expected = exact.logits(exact(source, target))
    keys, values = Encode(network)(source, mask)
    own = keys[:, :, :, :0], values[:, :, :, :0]
    for position in range(5):
        logits, *own = Step(network)(target[:, position], *own, keys, values, mask)
        torch.testing.assert_close(logits.float(), expected[:, position].float(), rtol=1e-4, atol=1e-4)
    weights = attention_maps(network, source, target)["decoder"][0]
    plain = copy.deepcopy(network)
    for layer in plain.decoder:
        layer.self_attention.by_distance.zero_()
    assert (weights - attention_maps(plain, source, target)["decoder"][0]).abs().max() > 0.1


def test_what_has_other_arithmetic_refuses_it(tmp_path: Path) -> None:
    from pipeline.export.ctranslate2_model import require_ctranslate2

    network = Transformer(
        50, NetworkSettings(num_layers=1, d_model=16, d_ff=24, num_heads=2, self_attention="relative")
    )
    assert unsupported(network.settings) == "network.self_attention relative"
    with pytest.raises(InputError, match=r"CTranslate2 lacks network\.self_attention relative"):
        require_ctranslate2(network)


class ShiftedSiLU(nn.Module):
    """An activation with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x + self.shift)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_a_registered_norm_and_activation_are_used_everywhere(pre_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every layer and after each stack, in training, search and TorchScript, and with packed weights."""
    monkeypatch.setitem(NORMS, "rms_norm", nn.RMSNorm)
    monkeypatch.setitem(ACTIVATIONS, "shifted_silu", ShiftedSiLU)
    torch.manual_seed(1)
    settings = NetworkSettings(
        num_layers=2, d_model=16, d_ff=24, num_heads=2, norm="rms_norm", activation="shifted_silu", pre_norm=pre_norm
    )
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
