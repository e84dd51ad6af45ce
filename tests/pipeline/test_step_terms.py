"""The terms of a step: against PyTorch's count of FLOPs, the network's parameters, and numbers worked by hand."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from model.settings import NetworkSettings
from model.transformer import Transformer
from pipeline.benchmark import step_terms
from pipeline.benchmark.scaling_model import Step, ddp_buckets, strong_scaling, weak_scaling
from pipeline.benchmark.step_terms import GPUS, Gpu, Roofline, Size, Work, roofline

aten = torch.ops.aten

BASE = Size(NetworkSettings(), vocabulary_size=37_000, tokens=25_000)
BIG = Size(NetworkSettings(d_model=1024, d_ff=4096, num_heads=16), vocabulary_size=37_000, tokens=25_000)
ODD = Size(NetworkSettings(num_layers=3, d_model=24, d_ff=40, num_heads=2, d_k=6, d_v=10), 50, 60, sentence_tokens=20)
ROUND = Gpu("round figures", 1e12, 1e12, 1e11, 1e10)
"""Attains 0.7 TFLOP/s in products, 0.15 in attention, and 0.8 TB/s."""


def flops(term: list[Work]) -> float:
    return sum(work.kernels * work.flops for work in term)


def num_bytes(term: list[Work], in_backward: bool | None = None) -> float:
    return sum(work.kernels * work.num_bytes for work in term if in_backward is None or work.in_backward is in_backward)


def product_flops(compute: Callable[[], Tensor]) -> tuple[float, float]:
    """Return the FLOPs of matrix products, forward and backward, without those of attention."""
    with FlopCounterMode(display=False) as forward:
        result = compute().sum()
    with FlopCounterMode(display=False) as backward:
        result.backward()
    counts = [counter.get_flop_counts()["Global"] for counter in (forward, backward)]
    one, other = (float(sum(count.get(kind, 0) for kind in (aten.mm, aten.addmm))) for count in counts)
    return one, other


@pytest.mark.parametrize("size", [ODD, Size(NetworkSettings(num_layers=2), 100, 40)])
def test_products_are_those_that_pytorch_counts(size: Size) -> None:
    network, ids = Transformer(size.vocabulary_size, size.network), torch.zeros(1, size.tokens, dtype=torch.long)
    forward, backward = product_flops(lambda: network(ids, ids))
    term = step_terms.products(size)
    assert flops([work for work in term if not work.in_backward]) == forward
    assert flops([work for work in term if work.in_backward]) == backward
    states = torch.zeros(size.tokens, size.network.d_model, requires_grad=True)
    assert flops(step_terms.loss(size)) == sum(product_flops(lambda: F.linear(states, network.embedding.weight)))


def test_the_products_of_base_by_hand() -> None:
    # A token on each side, in multiples of d_model^2 = 262,144 multiplications: an encoder layer has 4 in attention
    # and 8 in the feed-forward network, a decoder layer 4 more.
    assert flops(step_terms.products(BASE)) == 3 * 2 * 25_000 * 6 * (12 + 16) * 512**2
    # The product with the most rows: 25,000 x 512 by 512 x 2,048, at 2 bytes.
    inner = step_terms.products(BASE)[4]
    assert inner.flops == 2 * 25_000 * 512 * 2048
    assert inner.num_bytes == 2 * (25_000 * 512 + 512 * 2048 + 25_000 * 2048)


def test_work_takes_the_longer_of_arithmetic_and_memory() -> None:
    assert Work(7e11, 1.0).seconds(ROUND) == pytest.approx(1.0)
    assert Work(7e11, 8e11, kernels=3).seconds(ROUND) == pytest.approx(3.0)
    assert Work(7e11, 16e11).seconds(ROUND) == pytest.approx(2.0)
    assert Work(0.3e12, 0.0, share=0.15).seconds(ROUND) == pytest.approx(2.0)


def test_attention_by_hand() -> None:
    # 926 sentences of 27 tokens have one tile of 128 x 128 a head, in each of 18 attentions of 8 heads with
    # d_k = d_v = 64: 2 products of 2 x 128 x 128 x 64 forward and 5 backward.
    tile = 2 * 128 * 128 * 64
    wide = step_terms.attention(BASE, 128, joins_gradients=False)
    assert flops(wide) == pytest.approx(7 * tile * 18 * 8 * 25_000 / 27)
    # Forward: three states of 512 numbers read and one written; backward: five read and three written.
    assert num_bytes(wide, in_backward=False) == 18 * 25_000 * 512 * 2 * 4
    assert num_bytes(wide, in_backward=True) == 18 * 25_000 * 512 * 2 * 8
    # Of fused queries, keys and values 12, and of fused keys and values 6, read and written.
    joined = step_terms.attention(BASE, 128, joins_gradients=True)
    assert num_bytes(joined) - num_bytes(wide) == 25_000 * 512 * 2 * 2 * (12 * 3 + 6 * 2)
    assert flops(joined) == flops(wide)


def test_tiles_of_long_sentences() -> None:
    # 20 tokens in tiles of 8: 3 x 3 tiles, of which causal attention computes 6. 3 sentences, 2 heads, 3 layers.
    tiles = (9 + 6 + 9) * 3 * 2 * 3
    term = step_terms.attention(ODD, 8, joins_gradients=False)
    forward, backward = (flops([work for work in term if work.in_backward is one]) for one in (False, True))
    assert forward == tiles * 2 * 8 * 8 * (6 + 10)
    assert backward == tiles * 2 * 8 * 8 * (3 * 6 + 2 * 10)


def test_the_loss_by_hand() -> None:
    # 925 million logits in 14 chunks. Two passes read and one writes 16 bits.
    logits = 25_000 * 37_000
    products, passes, chunks = step_terms.loss(BASE)
    assert products.kernels * products.flops == 3 * 2 * logits * 512
    assert passes.num_bytes == 6 * logits
    # A chunk writes and reads 16 bits and reads and writes 32 for each of 37,000 x 512 weights.
    assert chunks.num_bytes == 14 * 12 * 37_000 * 512
    assert not any(work.in_backward for work in (products, passes, chunks))


def test_pointwise_work_by_hand() -> None:
    # Of base, per token and number of the width: 2 embeddings of 7 bytes, 30 residuals of 9, and 12 inner layers of
    # four widths with 4.
    forward, backward, matrix = step_terms.pointwise(BASE)
    assert forward.num_bytes == 25_000 * 512 * (2 * 7 + 30 * 9 + 12 * 4 * 4)
    # Residuals 13, inner layers 8; biases of 12 fused projections of three widths and, in cross-attention, 6 of one
    # and 6 of two; the encoder's output 6 x 2 + 4; embeddings 13.
    assert backward.num_bytes == 25_000 * 512 * (30 * 13 + 12 * 4 * 8 + (36 + 6 + 12) * 2 + 16 + 2 * 13)
    # Set to zero twice (4), added twice (12).
    assert matrix.num_bytes == 37_000 * 512 * (2 * 4 + 2 * 12)
    assert [work.is_fixed for work in (forward, backward, matrix)] == [False, False, True]


def test_the_optimizer_by_hand() -> None:
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in Transformer(37_000, BASE.network).parameters())
    # Bytes of a weight: gradient 2 + 4, norm 4, Adam reads four and writes three numbers, 16-bit copy 4 + 2.
    [work] = step_terms.optimizer(BASE)
    assert work.num_bytes == weights * (6 + 4 + 28 + 6)
    assert work.is_fixed


def line(*works: Work, network: NetworkSettings | None = None) -> Roofline:
    size = BASE._replace(network=network or BASE.network)
    return Roofline(size, ROUND, {"first": list(works[:1]), "rest": list(works[1:])})


def test_a_step_is_the_sum_of_its_terms() -> None:
    works = Work(0.7e12, 0.0, 0.1), Work(0.7e12, 0.0, 0.2, in_backward=True), Work(0.0, 0.8e12, 0.3, is_fixed=True)
    one = line(*works)
    assert one.seconds() == {"first": pytest.approx(0.1), "rest": pytest.approx(0.5)}
    # 1,020 launches of 9 us are hidden.
    assert one.step() == Step(pytest.approx(0.6), pytest.approx(0.2), pytest.approx(0.3), 1, pytest.approx(0.00918))
    assert one.step().own_seconds() == pytest.approx(0.6)
    # Of 12 layers there are twice as many; a hundred micro-batches have 1.8 s of them.
    deep = line(*works, network=NetworkSettings(num_layers=12)).step(micro_batches=100)
    assert deep.own_seconds() == pytest.approx(1.836)
    assert deep.own_seconds(4) == pytest.approx(0.459)  # the device needs 0.375 s


def test_mfu_counts_what_real_tokens_need() -> None:
    # By hand: the products of 25,000 tokens, and 18 attentions of two products with 27 keys, 512 wide.
    needed = 25_000 * 3 * 2 * (6 * 28 * 512**2 + 37_000 * 512 + 18 * 2 * 27 * 512)
    assert BASE.flops == pytest.approx(needed)
    assert line(Work(1.0, 1.0)).mfu(100.0) == pytest.approx(needed / 100e12)
    assert line(Work(1.0, 1.0)).mfu(100.0, gpus=8) == pytest.approx(needed / 800e12)


def test_predictions_lie_in_the_possible_range() -> None:
    """Whatever is assumed: no faster than the data sheet's peak, and more of everything is never slower."""
    for size in (BASE, BIG):
        seconds = {
            (name, kernels): roofline(size, gpu, kernels).step().own_seconds()
            for name, gpu in GPUS.items()
            for kernels in step_terms.ATTENTION_TILES
        }
        for (name, kernels), step in seconds.items():
            assert size.flops / GPUS[name].flops_per_second < step < 0.5
            assert seconds["h200", kernels] <= seconds["h100", kernels] < seconds["a100", kernels]
            assert seconds[name, "triton"] < seconds[name, "pytorch"]


def test_servers_of_eight() -> None:
    cluster = GPUS["h100"].cluster()
    assert cluster.link(8).bytes_per_second == pytest.approx(0.75 * 450e9)
    assert cluster.link(16).bytes_per_second == pytest.approx(0.75 * 400e9)
    assert cluster.link(16).latency_seconds == 5e-6


def test_hosts_limit_gpus_that_share_a_batch() -> None:
    predicted = roofline(BASE, GPUS["h200"])
    buckets = ddp_buckets([4 * size for size in step_terms.parameter_sizes(BASE.network, BASE.vocabulary_size)])
    step, cluster = predicted.step(), GPUS["h200"].cluster()
    shared, own = strong_scaling(step, buckets, cluster, 64), weak_scaling(step, buckets, cluster, 64)
    host = 1020 * 9e-6
    assert shared.step_seconds == pytest.approx(host + shared.exposed_seconds)
    assert own.step_seconds == pytest.approx(step.seconds + own.exposed_seconds)
    # Gradients travel during 0.4 of the launches.
    assert step.last_backward_seconds(64) == pytest.approx(0.4 * host)
    assert step.last_backward_seconds() == step.backward_seconds
