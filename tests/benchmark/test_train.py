"""`train`: its figures, its baselines, and the FLOPs that it counts."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model.loss import label_smoothed_loss
from model.settings import NetworkSettings
from model.transformer import Transformer
from pipeline.monitoring.performance import training_flops
from tests.benchmark.__main__ import main
from tests.benchmark.baselines import TorchNetwork, baseline_network, cross_entropy
from tests.benchmark.train import PeakMemory, figures_of
from tests.model.sentence_batches import SPECIAL, VOCABULARY, Lengths, padded, states
from tests.model.test_network import copy_layer

SETTINGS = NetworkSettings(num_layers=2, d_model=16, d_ff=24, num_heads=4, dropout=0.0)
DEEP = replace(SETTINGS, num_encoder_layers=3, num_decoder_layers=1)
EVEN, RAGGED = [(7, 8)] * 3, [(7, 4), (4, 8), (6, 8)]
"""Source and target lengths."""
NETWORK_FIGURES = {"target_tokens_per_second", "step_seconds", "peak_memory_bytes"}


def test_figures_of_a_baseline(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", str(recipe_file), "--steps", "1", "--baseline", "torch"]
    command += ["--training.optimizer", "muon"]  # of which the baseline takes the part of Adam
    assert main([*command, "--network.dropout", "0.1"]) == 0
    printed = capsys.readouterr()
    figures = json.loads(printed.out.splitlines()[-1])
    for one in (figures, figures["baselines"]["torch"]):
        assert all(one[key] > 0 for key in NETWORK_FIGURES)
        assert 0 < one["mfu"] < 1
    assert figures["ratio_to_torch"] > 0
    assert figures["flops_per_target_token"] > 0
    assert 0 < figures["padding_share"] < 1
    assert figures["ceiling_flops_per_second"] > 1e9
    assert (figures["precision"], figures["device"]) == ("32-true", "cpu")
    assert (figures["threads"], figures["torch_version"]) == (torch.get_num_threads(), torch.__version__)
    assert "torch" in printed.err


def test_figures_by_hand() -> None:
    """Medians over rounds; a ratio is that of the same round."""
    comparison = SimpleNamespace(
        token_rates={"ours": [10.0, 5.0, 30.0], "torch": [2.0, 5.0, 10.0]},
        step_seconds={"ours": [1.0, 2.0, 1.0], "torch": [4.0, 2.0, 1.0]},
        product_rates=[1e9, 2e9, 3e9],
        peak_memory={"ours": 70, "torch": 90},
        num_tokens=60,
        num_row_tokens=80,
    )
    figures = figures_of(comparison, flops=7e6)
    assert (figures["target_tokens_per_second"], figures["step_seconds"]) == (10.0, 1.0)
    assert figures["ratio_to_torch"] == 3.0  # of 5, 1 and 3
    assert figures["padding_share"] == 0.25
    assert figures["mfu"] == pytest.approx(10.0 * 7e6 / 2e9)
    torch_figures = figures["baselines"]["torch"]
    assert (torch_figures["target_tokens_per_second"], torch_figures["step_seconds"]) == (5.0, 2.0)
    assert (figures["peak_memory_bytes"], torch_figures["peak_memory_bytes"]) == (70, 90)


@pytest.mark.parametrize(("settings", "lengths"), [(SETTINGS, RAGGED), (DEEP, EVEN)], ids=["2+2", "3+1"])
def test_torch_baseline_is_the_same_function(lengths: Lengths, settings: NetworkSettings) -> None:
    ours, theirs = Transformer(VOCABULARY, settings), TorchNetwork(VOCABULARY, settings)
    theirs.embedding.load_state_dict(ours.embedding.state_dict())
    for mine, other in zip(
        [*ours.encoder, *ours.decoder], [*theirs.encoder.layers, *theirs.decoder.layers], strict=True
    ):
        copy_layer(mine, other)
    batch = padded(lengths)
    ours_states = states(ours, batch)
    logits = theirs(batch.source, batch.target_input, batch.source_mask)
    torch.testing.assert_close(ours.logits(ours_states), logits, rtol=1e-4, atol=1e-5)
    smoothed = label_smoothed_loss(ours_states, ours.embedding.weight, batch.target_output, 0.1, SPECIAL.pad).smoothed
    loss = cross_entropy(logits, batch.target_output, SPECIAL.pad, 0.1)
    torch.testing.assert_close(smoothed, loss, rtol=1e-5, atol=0)
    smoothed.backward()
    loss.backward()
    torch.testing.assert_close(ours.embedding.weight.grad, theirs.embedding.weight.grad, rtol=1e-3, atol=1e-4)


def test_the_baseline_has_our_size_and_our_dropout() -> None:
    network = baseline_network(VOCABULARY, DEEP).train()
    ours = sum(p.numel() for p in Transformer(VOCABULARY, DEEP).parameters())
    assert sum(p.numel() for p in network.parameters()) == ours
    batch = padded(RAGGED)
    given = batch.source, batch.target_input, batch.source_mask
    torch.testing.assert_close(network(*given), network(*given))  # equal without dropout


@pytest.mark.parametrize("settings", [SETTINGS, DEEP], ids=["2+2", "3+1"])
def test_flops_as_pytorch_counts_them(settings: NetworkSettings) -> None:
    network = TorchNetwork(VOCABULARY, settings)
    batch = padded(EVEN)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = network(batch.source, batch.target_input, None)
        cross_entropy(logits, batch.target_output, SPECIAL.pad, 0.1).backward()
    sources, targets = np.array(EVEN).T
    counted = training_flops(settings, VOCABULARY, sources, targets)
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_peak_memory_of_tensors_held_at_once() -> None:
    memory = PeakMemory(torch.device("cpu"))
    for _ in range(3):
        first = torch.empty(1000)
        second = torch.empty(500)
        del first, second
    assert memory.read() == 6000
