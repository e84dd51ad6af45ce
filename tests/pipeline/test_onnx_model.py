"""`onnx/` of a bundle: its decoding step and encoder beside the network's, at late positions."""

from pathlib import Path

import pytest
import torch

from data_module.errors import InputError
from model.settings import NetworkSettings
from model.transformer import PaddedTransformer, Transformer
from pipeline.export.onnx_model import load_onnx, write_onnx
from tests.conftest import ROOT
from tests.model.search_truth import trained_network

LONG = 3000
"""Past the network's table of positions."""


@pytest.fixture(scope="module")
def network() -> Transformer:
    return trained_network()


@pytest.fixture(scope="module")
def written(network: Transformer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "onnx"
    write_onnx(network, folder)
    return folder


@pytest.mark.slow
def test_sinusoids_are_exact_at_late_positions(network: Transformer, written: Path) -> None:
    """In float32, their angles would be wrong by 1e-4 at position 1,000."""
    programs = load_onnx(written)
    torch.manual_seed(1)
    source = torch.randint(4, network.vocabulary_size, (1, LONG))
    mask = torch.ones_like(source, dtype=torch.bool)
    with torch.no_grad():
        padded = PaddedTransformer(network)
        memory = padded.encode(source, mask)
        cross = [layer.cross_attention.keys_values(memory) for layer in network.decoder]  # type: ignore[operator, union-attr]
        keys, values = programs["encode"](source, mask)
        for layer, (expected_keys, expected_values) in enumerate(cross):
            assert (keys[layer] - expected_keys).abs().max() < 3e-5
            assert (values[layer] - expected_values).abs().max() < 3e-5
        # The step's position is the number of previous tokens.
        width = keys.size(2), keys.size(4)
        past = torch.zeros(len(network.decoder), 1, width[0], LONG, width[1])
        few, one = source[:, :5], mask[:, :5]
        cross_keys, cross_values = programs["encode"](few, one)
        logits = programs["step"](source[:, 0], past, past.clone(), cross_keys, cross_values, one)[0]
        cache = padded.init_cache(padded.encode(few, one), LONG + 1)
        for own_keys, own_values, _, _ in cache:
            own_keys.zero_()
            own_values.zero_()
        states, _ = padded.step(source[:, :1], LONG, LONG, cache, None, None)
        assert (logits - network.logits(states)[:, 0]).abs().max() < 3e-5


@pytest.mark.slow
def test_the_files_hold_no_path_of_this_machine(written: Path) -> None:
    for path in written.iterdir():
        contents = path.read_bytes()
        assert str(ROOT).encode() not in contents
        assert b"site-packages" not in contents


class Odd(torch.nn.Module):
    """An activation with an operator that ONNX lacks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.i1e(x)


@pytest.mark.slow
def test_an_operator_that_onnx_lacks_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from model.layers import ACTIVATIONS

    monkeypatch.setitem(ACTIVATIONS, "odd", Odd)
    settings = NetworkSettings(num_layers=1, d_model=8, d_ff=8, num_heads=2, activation="odd")
    with pytest.raises(InputError, match=r"PyTorch cannot write the encode program .*i1e.* leave out --format onnx"):
        write_onnx(Transformer(20, settings).eval(), tmp_path / "onnx")
