"""`benchmark train`: its figures, its baselines, and the FLOPs that it counts."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from data_module.batching.batch import RankBatch, SpecialIds
from data_module.batching.batch_plan import Epochs
from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer
from model.attention import CrossAttention, SelfAttention
from model.loss import label_smoothed_loss
from model.padded_transformer import PaddedTransformer
from model.settings import NetworkSettings
from model.training_module import TranslationModule
from model.transformer import Transformer
from pipeline.__main__ import main
from pipeline.benchmark import side_by_side
from pipeline.benchmark.baselines import TorchNetwork, baseline_network, cross_entropy
from pipeline.benchmark.side_by_side import PeakMemory, Round, SideBySide, figures_of
from pipeline.benchmark.train import benchmark_device, recipe_comparison
from pipeline.config.recipe import load_recipe
from pipeline.config.settings import trainer_signature
from pipeline.monitoring.performance import training_flops

SETTINGS = NetworkSettings(num_layers=2, d_model=16, d_ff=24, num_heads=4, dropout=0.0)
DEEP = replace(SETTINGS, num_encoder_layers=3, num_decoder_layers=1)
SPECIAL = SpecialIds(pad=0, bos=1, eos=2)
PIECES = 50
NETWORK_FIGURES = {"target_tokens_per_second", "step_seconds", "peak_memory_bytes"}


@pytest.mark.filterwarnings("ignore:You have overridden `transfer_batch_to_device`")
def test_figures(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["benchmark", "train", "--config", str(recipe_file), "--steps", "3"]
    command += ["--training.optimizer", "muon"]  # of which the baselines take the part of Adam
    assert main([*command, "--baseline", "torch", "--baseline", "marian", "--network.dropout", "0.1"]) == 0
    printed = capsys.readouterr()
    figures = json.loads(printed.out.splitlines()[-1])
    for one in (figures, figures["baselines"]["torch"], figures["baselines"]["marian"]):
        assert all(one[key] > 0 for key in NETWORK_FIGURES)
        low, high = one["target_tokens_per_second_quartiles"]
        assert low <= one["target_tokens_per_second"] <= high
        assert 0 < one["mfu"] < 1
    assert 0 < figures["padding_share"] < 1
    assert figures["flops_per_target_token"] > 0
    assert figures["ceiling_flops_per_second"] > 1e9
    assert figures["ratio_to_torch"] > 0
    assert figures["ratio_to_marian"] > 0
    assert figures["precision"] == "32-true"
    assert figures["device"] == "cpu"
    assert figures["threads"] == torch.get_num_threads()
    assert figures["torch_version"] == torch.__version__
    assert "marian" in printed.err


def test_figures_by_hand() -> None:
    """Medians over rounds; a ratio is that of the same round."""
    lengths = np.array([4, 6])
    rounds = [
        Round({"ours": 1.0, "torch": 4.0}, {"ours": 10.0, "torch": 8.0}, lengths, lengths, 25, 1e9),
        Round({"ours": 2.0, "torch": 2.0}, {"ours": 10.0, "torch": 10.0}, lengths, lengths, 25, 2e9),
        Round({"ours": 1.0, "torch": 1.0}, {"ours": 30.0, "torch": 10.0}, lengths, lengths, 30, 3e9),
    ]
    comparison: Any = SimpleNamespace(rounds=rounds, baselines={"torch": None}, peak_memory={"ours": 70, "torch": 90})
    figures = figures_of(comparison, SETTINGS, PIECES)
    assert (figures["target_tokens_per_second"], figures["step_seconds"]) == (10.0, 1.0)
    assert figures["ratio_to_torch"] == 3.0  # of 5, 1 and 3
    assert figures["ratio_to_torch_quartiles"] == [2.0, 4.0]
    assert figures["padding_share"] == pytest.approx(1 - 60 / 80)
    flops = training_flops(SETTINGS, PIECES, lengths, lengths) / 10
    assert figures["flops_per_target_token"] == pytest.approx(flops)
    assert figures["mfu"] == pytest.approx(10.0 * flops / 2e9)
    torch_figures = figures["baselines"]["torch"]
    assert (torch_figures["target_tokens_per_second"], torch_figures["step_seconds"]) == (5.0, 2.0)
    assert (figures["peak_memory_bytes"], torch_figures["peak_memory_bytes"]) == (70, 90)


def test_a_round_has_the_lengths_of_the_variants_that_its_epochs_train_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "MatrixProduct", lambda *_: SimpleNamespace(rate=lambda: 1.0))
    variants: list[Any] = [SimpleNamespace(lengths=lambda pairs, add=add: (pairs + add, pairs)) for add in (10, 20)]
    comparison = SideBySide({}, 1, 1, (torch.device("cpu"), torch.float32), Epochs(variants, batch_tokens=1, seed=1))
    batches: list[Any] = [
        SimpleNamespace(epoch=epoch, pairs=torch.tensor([epoch, 5]), num_row_tokens=8) for epoch in (1, 2)
    ]
    comparison._batches = batches
    measured = comparison._measured({}, {})
    assert (measured.source.tolist(), measured.target.tolist()) == ([21, 25, 12, 15], [1, 5, 2, 5])


@pytest.mark.filterwarnings("ignore:You have overridden `transfer_batch_to_device`")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec")
def test_no_step_that_compiles_is_timed(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The warm-up is the 5 steps from 5 on, steps 10 and 11 and then 12 and 13 are to measure memory, the others time.
    compiling, taken = {0, 4, 11, 15}, []
    training_step = TranslationModule.training_step

    def compiling_now_and_then(module: TranslationModule, share: RankBatch, batch_idx: int) -> dict[str, Any]:
        if batch_idx in compiling:
            # Another size, another graph.
            torch.compile(lambda x: x + 1, backend="eager", dynamic=False)(torch.zeros(2 + batch_idx))
        taken.append(batch_idx)
        return training_step(module, share, batch_idx)

    monkeypatch.setattr(TranslationModule, "training_step", compiling_now_and_then)
    recipe = load_recipe([recipe_file], (), trainer_signature())
    tokenizer = Tokenizer.load(Path(recipe.corpus.folder) / "tokenizer.model")
    comparison = recipe_comparison(recipe, tokenizer, [], 3, *benchmark_device(recipe.trainer))
    assert len(comparison.rounds) == 3
    assert set(comparison.peak_memory) == {"ours"}
    # Repeated: all that the warm-up had, both steps that measure memory, and one timed step.
    assert taken == list(range((5 + 5) + (2 + 2) + (3 + 1)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "--steps 0"),
        (["--trainer.precision", "bf16-true"], "trainer.precision bf16-true"),
        (["--baseline", "torch", "--network.pre_norm", "true"], "network.pre_norm"),
        (["--network.d_modle", "8"], "d_model"),
    ],
)
def test_mistakes(arguments: list[str], said: str, recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "train", "--config", str(recipe_file), *arguments]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"\.venv/bin/pip install -c constraints\.txt -e '\.\[huggingface\]'"):
        baseline_network("marian", PIECES, SETTINGS, SPECIAL, longest=20)


def batch(padded: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Source, target input and output, source mask."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(3, PIECES, (3, 7), generator=generator)
    target = torch.randint(3, PIECES, (3, 9), generator=generator)
    if padded:
        source[1, 4:] = source[2, 6:] = SPECIAL.pad
        target[0, 5:] = SPECIAL.pad
    return source, target[:, :-1], target[:, 1:], source != SPECIAL.pad if padded else None


def with_weights_of(ours: Transformer, settings: NetworkSettings) -> TorchNetwork:
    """Return the torch baseline with our weights."""

    def copy(theirs: nn.Module, mine: nn.Module) -> None:
        theirs.load_state_dict(mine.state_dict())

    def copy_attention(theirs: nn.MultiheadAttention, mine: SelfAttention | CrossAttention) -> None:
        inward = [mine.query_key_value] if isinstance(mine, SelfAttention) else [mine.query, mine.key_value]
        theirs.in_proj_weight.data = torch.cat([linear.weight.data for linear in inward])
        theirs.in_proj_bias.data = torch.cat([linear.bias.data for linear in inward])
        copy(theirs.out_proj, mine.output)

    network = TorchNetwork(PIECES, settings)
    copy(network.embedding, ours.embedding)
    for stack, mine_stack in ((network.encoder.layers, ours.encoder), (network.decoder.layers, ours.decoder)):
        for theirs, mine in zip(stack, mine_stack, strict=True):
            copy_attention(theirs.self_attn, mine.self_attention)
            copy(theirs.linear1, mine.feed_forward.inner)
            copy(theirs.linear2, mine.feed_forward.outer)
            norms = [mine.self_attention_residual.norm, mine.feed_forward_residual.norm]
            if isinstance(theirs, nn.TransformerDecoderLayer):
                copy_attention(theirs.multihead_attn, mine.cross_attention)
                norms.insert(1, mine.cross_attention_residual.norm)
            for number, norm in enumerate(norms, start=1):
                copy(getattr(theirs, f"norm{number}"), norm)
    return network


@pytest.mark.parametrize("settings", [SETTINGS, DEEP], ids=["2+2", "3+1"])
@pytest.mark.parametrize("padded", [False, True])
def test_torch_baseline_is_the_same_function(padded: bool, settings: NetworkSettings) -> None:
    ours = Transformer(PIECES, settings)
    theirs = with_weights_of(ours, settings)
    source, target, output, mask = batch(padded)
    states = PaddedTransformer(ours)(source, target, mask)
    logits = theirs(source, target, mask)
    torch.testing.assert_close(ours.logits(states), logits, rtol=1e-4, atol=1e-5)
    smoothed = label_smoothed_loss(states, ours.embedding.weight, output, 0.1, SPECIAL.pad).smoothed
    loss = cross_entropy(logits, output, SPECIAL.pad, 0.1)
    torch.testing.assert_close(smoothed, loss, rtol=1e-5, atol=0)
    smoothed.backward()
    loss.backward()
    torch.testing.assert_close(ours.embedding.weight.grad, theirs.embedding.weight.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("settings", [SETTINGS, DEEP], ids=["2+2", "3+1"])
def test_baselines_have_our_size_and_our_dropout(settings: NetworkSettings) -> None:
    ours = sum(p.numel() for p in Transformer(PIECES, settings).parameters())
    for name in ("torch", "marian"):
        network = baseline_network(name, PIECES, settings, SPECIAL, longest=20)
        assert sum(p.numel() for p in network.parameters() if p.requires_grad) == ours
        source, target, output, mask = batch(padded=True)
        network.train()
        # Two passes are equal without dropout; padding of the source has no effect.
        logits = network(source, target, mask)
        torch.testing.assert_close(logits, network(source, target, mask))
        assert mask is not None
        torch.testing.assert_close(logits, network(source.masked_fill(~mask, 7), target, mask))
        assert cross_entropy(logits, output, SPECIAL.pad, 0.1).isfinite()


@pytest.mark.parametrize("settings", [SETTINGS, DEEP], ids=["2+2", "3+1"])
def test_flops_as_pytorch_counts_them(settings: NetworkSettings) -> None:
    network = TorchNetwork(PIECES, settings)
    source, target, output, _ = batch(padded=False)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        cross_entropy(network(source, target, None), output, SPECIAL.pad, 0.1).backward()
    counted = training_flops(settings, PIECES, np.full(3, source.size(1)), np.full(3, target.size(1)))
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_peak_memory_of_tensors_held_at_once() -> None:
    memory = PeakMemory(torch.device("cpu"))
    for _ in range(3):
        first = torch.empty(1000)
        second = torch.empty(500)
        del first, second
    assert memory.read() == 6000
