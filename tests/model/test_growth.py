"""Growth of the network's memory with sentence length."""

import contextlib

import pytest
import torch

from model.loss import label_smoothed_loss
from model.settings import NetworkSettings
from model.transformer import Transformer
from pipeline.profiling.stopwatch import PeakMemory

PAD, VOCABULARY = 0, 50


def peak_bytes(length: int, masked: bool, precision: torch.dtype) -> int:
    """Return the peak memory of a forward and backward pass over sentences of `length` tokens on both sides."""
    torch.manual_seed(0)
    network = Transformer(VOCABULARY, NetworkSettings(num_layers=1, d_model=32, d_ff=64, num_heads=2)).train()
    source, target = (torch.randint(1, VOCABULARY, (2, length)) for _ in range(2))
    if masked:
        source[1, length // 2 :] = PAD
    peak = PeakMemory(torch.device("cpu"))
    with torch.autocast("cpu", precision) if precision != torch.float32 else contextlib.nullcontext():
        states = network(source, target, source != PAD if masked else None)
        label_smoothed_loss(states, network.embedding.weight, target, 0.1, PAD).smoothed.backward()
    return peak.read()


@pytest.mark.filterwarnings("ignore:.*profil")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_memory_is_linear_in_length(masked: bool, precision: torch.dtype) -> None:
    """Four times the length needs four times the memory. Matrices of attention weights would need sixteen times."""
    short, long = peak_bytes(1024, masked, precision), peak_bytes(4096, masked, precision)
    assert short > 1024 * 32 * 4
    assert long < 4.4 * short
