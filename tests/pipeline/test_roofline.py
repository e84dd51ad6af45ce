"""`benchmark roofline`: its terms against PyTorch's count of FLOPs, DDP's buckets and numbers worked by hand."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from model.fast import triton_attention
from model.settings import NetworkSettings
from model.transformer import PaddedTransformer, Transformer
from pipeline.__main__ import main
from pipeline.benchmark import roofline
from pipeline.benchmark.roofline import BUCKET_BYTES, FAST, GPUS, SLOW, Assumptions, Batch, Gpu, Work, predict, terms
from tests.conftest import refusal

aten = torch.ops.aten

BASE = Batch(NetworkSettings(), vocabulary_size=37_000, tokens=25_000)
BIG = Batch(NetworkSettings(d_model=1024, d_ff=4096, num_heads=16), vocabulary_size=37_000, tokens=25_000)
ODD = Batch(NetworkSettings(num_layers=3, d_model=24, d_ff=40, num_heads=2, d_k=6, d_v=10), 50, 60)
ROUND = Gpu("round figures", 1e12, 1e12, 4e9 / 3, 1e9 / 6, gpus_per_node=2)
"""Attains 0.15 TFLOP/s in attention, 0.8 TB/s, and 1 GB/s in a node of two or 0.25 between nodes."""
MB = 10**6


def flops(works: list[Work]) -> float:
    return sum(work.flops for work in works)


def num_bytes(works: list[Work]) -> float:
    return sum(work.num_bytes for work in works)


@pytest.mark.parametrize(
    "batch",
    [
        ODD,
        Batch(NetworkSettings(num_layers=2), 100, 40),
        Batch(NetworkSettings(num_encoder_layers=3, num_decoder_layers=1), 100, 40),
    ],
)
def test_products_are_those_that_pytorch_counts(batch: Batch) -> None:
    network, ids = Transformer(batch.vocabulary_size, batch.network), torch.zeros(1, batch.tokens, dtype=torch.long)
    states = torch.zeros(batch.tokens, batch.network.d_model, requires_grad=True)
    for works, compute in (
        (roofline.products(batch), lambda: PaddedTransformer(network)(ids, ids)),
        (roofline.loss(batch), lambda: F.linear(states, network.embedding.weight)),
    ):
        with FlopCounterMode(display=False) as counter:
            compute().sum().backward()
        counts = counter.get_flop_counts()["Global"]
        # Attention's products are counted under other names.
        assert flops(works) == sum(counts.get(kind, 0) for kind in (aten.mm, aten.addmm))


def test_attention_by_hand() -> None:
    # A tile of 64 queries in sentences of 27 meets 91 keys on average. 3 layers with 3 attentions, 2 heads of d_k 6 and
    # d_v 10.
    works = roofline.attention(ODD._replace(tokens=128))
    forward, backward = works[::2], works[1::2]
    assert flops(forward) == 9 * 2 * 2 * 128 * 91 * (6 + 10)
    assert flops(backward) == 9 * 2 * 2 * 128 * 91 * ((2 * 6 + 10) + (2 * 6 + 2 * 10))
    assert num_bytes(forward) == 9 * 128 * 2 * 2 * 2 * (6 + 10)
    assert num_bytes(backward) == 9 * 128 * 2 * 2 * 6 * (6 + 10)
    kernel = triton_attention.tiles(triton_attention._forward, 64, 64, torch.bfloat16)
    assert kernel["QUERIES"] == roofline.QUERIES_PER_TILE


def test_the_rate_of_products_by_hand() -> None:
    """Half of the peak for sums as long as `half_depth`, which grows with the GPU's rate; else the memory's rate."""
    assumed = Assumptions(product_share=0.8, half_depth=300)
    gpu = ROUND._replace(flops_per_second=2e15, bytes_per_second=1e12)
    assert Work(8e12, 0, depth=600).seconds(gpu, assumed) == pytest.approx(8e12 / (0.4 * 2e15))
    assert Work(8e12, 0, depth=1_800).seconds(gpu, assumed) == pytest.approx(8e12 / (0.6 * 2e15))
    assert Work(8e12, 8e12, depth=1_800).seconds(gpu, assumed) == pytest.approx(8e12 / 0.8e12)
    assert Work(3e12, 0).seconds(gpu, assumed) == pytest.approx(3e12 / (0.15 * 2e15))
    # Outputs of 24 numbers, gradients of 40 inputs, and gradients of weights.
    assert [work.depth for work in roofline.linear(60, inputs=24, outputs=40)] == [24, 40, 24]


def test_terms_by_hand() -> None:
    gpu = GPUS["h100"]
    one, two = (terms(BASE, gpu, FAST, gpus) for gpus in (1, 2))
    assert one["products"] == sum(work.seconds(gpu, FAST) for work in roofline.products(BASE))
    # 630 operations of 12 us with 6 and 6 layers; 12 and 2 have as many sub-layers, 3 and 1 have 9 of 30.
    deep, shallow = (
        BASE._replace(network=NetworkSettings(num_encoder_layers=encoder, num_decoder_layers=decoder))
        for encoder, decoder in ((12, 2), (3, 1))
    )
    assert one["host"] == terms(deep, gpu, FAST)["host"] == pytest.approx(0.00756)
    assert one["gaps"] == pytest.approx(630 * 2e-6)
    assert terms(shallow, gpu, FAST)["host"] == pytest.approx(0.3 * 0.00756)
    # Base has 63,082,496 weights in 193 tensors. Several GPUs copy the gradients, each by an operation of its own.
    assert one["optimizer"] == pytest.approx(63_082_496 * 38 / (0.8 * 3.35e12))
    assert two["optimizer"] == pytest.approx(63_082_496 * 46 / (0.8 * 3.35e12))
    assert two["host"] - one["host"] == pytest.approx(193 * 12e-6)
    assert {name: two[name] for name in ("products", "loss")} == {name: one[name] for name in ("products", "loss")}


def test_all_reduce_by_hand() -> None:
    # Two: a ring sends 100 MB in 2 hops of 5 us. Four, between nodes: 150 MB in 6, where a tree would send 200 MB in 4.
    assert ROUND.all_reduce_seconds(100 * MB, 1) == 0
    assert ROUND.all_reduce_seconds(100 * MB, 2) == pytest.approx(0.100 + 10e-6)
    assert ROUND.all_reduce_seconds(100 * MB, 4) == pytest.approx(4 * 0.150 + 30e-6)
    assert ROUND.all_reduce_seconds(100 * MB, 4, times=3) == pytest.approx(4 * 0.150 + 90e-6)
    # 512 with little to send: 1 kB up and down a tree of 9 levels beats 1,022 hops.
    assert ROUND.all_reduce_seconds(1000, 512) == pytest.approx(8e-6 + 90e-6)


@pytest.mark.parametrize("batch", [BASE, BIG])
@pytest.mark.parametrize("gpus", [8, 64])
def test_exposed_time_is_about_that_of_buckets_of_ddp(batch: Batch, gpus: int) -> None:
    """DDP's own assignment; gradients become complete evenly, the embedding's at the end of the backward pass."""
    with torch.device("meta"):
        backwards = [p.numel() * 4 for p in Transformer(batch.vocabulary_size, batch.network).parameters()][::-1]
        gradients = [torch.empty(size // 4) for size in backwards]
    buckets, _ = dist._compute_bucket_assignment_by_size(gradients, [1 << 20, BUCKET_BYTES])
    backward = 0.5 * sum(list(terms(batch, GPUS["h100"], FAST, gpus).values())[:-1])
    end, done = 0.0, 0
    for bucket in buckets:
        num_bytes_of_bucket = sum(backwards[index] for index in bucket)
        done += num_bytes_of_bucket
        ready = done / sum(backwards[:-1]) if bucket is not buckets[-1] else 1.0
        end = max(end, ready * backward) + GPUS["h100"].all_reduce_seconds(num_bytes_of_bucket, gpus)
    exposed = predict(batch, GPUS["h100"], gpus, False, FAST)["exposed_seconds"]
    assert exposed == pytest.approx(end - backward, rel=0.2)


def test_a_batch_each_by_hand() -> None:
    one, two = (predict(BASE, ROUND, gpus, False, SLOW) for gpus in (1, 2))
    assert one["step_seconds"] == pytest.approx(sum(list(terms(BASE, ROUND, SLOW).values())[:-1]))
    assert one["exposed_seconds"] == 0
    # The products of 25,000 tokens, and 18 attentions of two products with 27 keys, 512 wide.
    needed = 25_000 * 3 * 2 * (6 * 28 * 512**2 + 37_000 * 512 + 18 * 2 * 27 * 512)
    assert one["mfu"] == pytest.approx(needed / one["step_seconds"] / 1e12)
    assert two["mfu"] == pytest.approx(2 * needed / two["step_seconds"] / 2e12)
    assert two["target_tokens_per_second"] == pytest.approx(50_000 / two["step_seconds"])
    # The embedding's 75.776 MB always wait, at 1 GB/s. The others' 176.5 MB travel during the backward pass, which
    # takes longer.
    assert two["exposed_seconds"] == pytest.approx(0.075776 + 10e-6)
    # Four GPUs are two nodes: 4 x 1.5 times the bytes, in 7 buckets of 6 hops.
    four = predict(BASE._replace(tokens=108), ROUND, 4, False, SLOW)
    others = 4 * (63_082_496 - 37_000 * 512)
    backward = 0.5 * (four["step_seconds"] - four["exposed_seconds"])
    assert four["exposed_seconds"] == pytest.approx(6 * (others + 75.776e6) / 1e9 + 8 * 30e-6 - backward)


def test_a_shared_batch_by_hand() -> None:
    """Each GPU has as many tokens less."""
    shared = predict(BASE, ROUND, 8, True, FAST)
    own = terms(BASE._replace(tokens=3_125), ROUND, FAST, 8)
    assert shared["step_seconds"] - shared["exposed_seconds"] == pytest.approx(sum(list(own.values())[:-1]))
    assert shared["target_tokens_per_second"] == pytest.approx(25_000 / shared["step_seconds"])
    # The host takes longer than 391 tokens on a device.
    shared = predict(BASE, GPUS["h200"], 64, True, FAST)
    assert shared["step_seconds"] == pytest.approx((630 + 193) * 12e-6 + shared["exposed_seconds"])


PREDICTED = ["--trainer.precision", "bf16-mixed", "--batches.batch_tokens", "400"]


def test_the_command_needs_no_corpus(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["benchmark", "roofline", "--config", str(recipe_file), "--gpu", "a100", *PREDICTED]
    assert main([*command, "--corpus.folder", "nowhere", "--gpus-per-node", "4", "--network-gb-s", "1e-4"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("A100 SXM 80 GB, 400 tokens a side\nms on one: products 0.0, ")
    assert "host 1.3 to 1.9\n" in printed.err
    assert "1 1.3 to 1.9 (0.0) 0.317 to 0.212 0 1.3 to 1.9 (0.0) 0.317 to 0.212 0" in " ".join(printed.err.split())
    figures = json.loads(printed.out)
    # A tiny network of one layer: the host needs a sixth of 630 x 12 us.
    one, _, four, eight, *_, last = figures["fast"]["strong"]
    assert one["step_seconds"] == figures["fast"]["term_seconds"]["host"] == pytest.approx(0.00126)
    assert figures["slow"]["strong"][0]["step_seconds"] == pytest.approx(1.5 * 0.00126)
    assert one["target_tokens_per_second"] == pytest.approx(400 / 0.00126, rel=1e-4)
    numbers, tensors = roofline.count_weights(NetworkSettings(num_layers=1, d_model=16, d_ff=32, num_heads=2), 60)
    assert four["step_seconds"] == pytest.approx(0.00126 + tensors * 12e-6 + four["exposed_seconds"], rel=1e-4)
    # Four GPUs are a node; eight are a ring through networks of 100 kB/s, of which they attain three quarters.
    assert four["exposed_seconds"] < 0.001
    assert eight["exposed_seconds"] == pytest.approx(2 * 7 / 8 * 4 * numbers / 75_000, rel=0.05)
    assert last["gpus"] == 512
    assert [way["gpus"] for way in figures["slow"]["weak"]] == [2**power for power in range(10)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--network-gb-s", "0"], "--network-gb-s 0.0"),
        (["--network-gb-s", "nan"], "--network-gb-s nan"),
        (["--gpus-per-node", "0"], "--gpus-per-node 0"),
        (["--gpu", "v100"], "--gpu"),
        (["--trainer.precision", "32-true"], "trainer.precision 32-true"),
        (["--run.kernels", "pytorch"], "run.kernels pytorch"),
        (["--training.optimizer", "muon"], "training.optimizer muon"),
        (["--network.d_v", "129"], "d_k 8 and d_v 129"),
    ],
)
def test_mistakes(arguments: list[str], said: str, recipe_file: Path) -> None:
    assert said in refusal("benchmark", "roofline", "--config", recipe_file, *PREDICTED, *arguments)


@pytest.mark.parametrize("options", [[], ["--config", "no.yaml", "--gpu", "h100", "--bandwidth-gb-s", "25"]])
def test_scaling_is_refused_by_name(options: list[str]) -> None:
    assert "'benchmark roofline'" in refusal("benchmark", "scaling", *options)
