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
DEEP = BASE._replace(network=NetworkSettings(num_encoder_layers=12, num_decoder_layers=2))
ROUND = Gpu("round figures", 1e12, 1e12, 80e9, 1e11, 1e10)
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


@pytest.mark.parametrize(
    "size",
    [
        ODD,
        Size(NetworkSettings(num_layers=2), 100, 40),
        Size(NetworkSettings(num_encoder_layers=3, num_decoder_layers=1), 100, 40),
    ],
)
def test_products_are_those_that_pytorch_counts(size: Size) -> None:
    network, ids = Transformer(size.vocabulary_size, size.network), torch.zeros(1, size.tokens, dtype=torch.long)
    forward, backward = product_flops(lambda: network(ids, ids))
    term = step_terms.products(size)
    assert flops([work for work in term if not work.in_backward]) == forward
    assert flops([work for work in term if work.in_backward]) == backward
    states = torch.zeros(size.tokens, size.network.d_model, requires_grad=True)
    assert flops(step_terms.loss(size, "triton", 80e9)) == sum(
        product_flops(lambda: F.linear(states, network.embedding.weight))
    )


def test_the_products_of_base_by_hand() -> None:
    # A token on each side, in multiples of d_model^2 = 262,144 multiplications: an encoder layer has 4 in attention
    # and 8 in the feed-forward network, a decoder layer 4 more.
    assert flops(step_terms.products(BASE)) == 3 * 2 * 25_000 * 6 * (12 + 16) * 512**2
    # The third layer: 25,000 x 512 by 512 x 2,048, at 2 bytes; the gradient of its weight at 4.
    for number, weight in enumerate((2, 2, 4)):
        inner = step_terms.products(BASE)[6 + number]
        assert inner.flops == 2 * 25_000 * 512 * 2048
        assert inner.num_bytes == 2 * 25_000 * (512 + 2048) + weight * 512 * 2048
        assert inner.in_backward == (number > 0)


def test_a_deep_encoder_by_hand() -> None:
    """12 encoder and 2 decoder layers, by the sums of the tests of base."""
    assert flops(step_terms.products(DEEP)) == 3 * 2 * 25_000 * (12 * 12 + 2 * 16) * 512**2
    # 12 attentions in the encoder, 2 in the decoder and 2 over the encoder's output; 14 fused queries, keys and values
    # and 2 keys and values.
    term = step_terms.flash_attention(DEEP)
    assert flops(term) == pytest.approx(7 * 2 * 128 * 128 * 64 * 16 * 8 * 25_000 / 27)
    assert num_bytes(term, in_backward=False) == 16 * 25_000 * 512 * 2 * 4
    assert num_bytes(term, in_backward=True) == 25_000 * 512 * 2 * (16 * 8 + 2 * (14 * 3 + 2 * 2))
    # Sentences of 256 have 2 x 2 tiles, 3 of them below the diagonal or on it.
    long = step_terms.flash_attention(DEEP._replace(tokens=2_560, sentence_tokens=256.0))
    assert flops(long) == 7 * 2 * 128 * 128 * 64 * 8 * 10 * (14 * 4 + 2 * 3)
    # One sentence of 128: its two tiles of rows meet 2 keys' tiles, or 1 and 2 if causal; 32 keys at a time backward.
    term = step_terms.segment_attention(DEEP._replace(tokens=128, sentence_tokens=128.0))
    forward, backward = (flops([work for work in term if work.in_backward is one]) for one in (False, True))
    assert forward == (14 * 4 + 2 * 3) * 2 * 64 * 64 * 2 * 512
    assert backward == (14 * 8 + 2 * 6) * 2 * 64 * 32 * 7 * 512
    # 30 residuals as in base, but 14 inner layers; biases of 14 fused projections of three widths and, in
    # cross-attention, 2 of one and 2 of two; the gradient of the encoder's output from 2 layers.
    forward_work, backward_work, _ = step_terms.pointwise(DEEP)
    assert forward_work.num_bytes == 25_000 * 512 * (2 * 7 + 30 * 9 + 14 * 4 * 4)
    assert backward_work.num_bytes == 25_000 * 512 * (30 * 13 + 14 * 4 * 8 + (42 + 2 + 4) * 2 + 2 * 2 + 4 + 2 * 13)
    assert sum(step_terms.parameter_sizes(DEEP.network, 37_000)) == 65_180_672


def test_work_takes_the_longer_of_arithmetic_and_memory() -> None:
    assert Work(7e11, 1.0).seconds(ROUND) == pytest.approx(1.0)
    assert Work(7e11, 8e11, kernels=3).seconds(ROUND) == pytest.approx(3.0)
    assert Work(7e11, 16e11).seconds(ROUND) == pytest.approx(2.0)
    assert Work(0.3e12, 0.0, share=0.15).seconds(ROUND) == pytest.approx(2.0)


def test_flash_attention_by_hand() -> None:
    # 926 sentences of 27 tokens have one tile of 128 x 128 a head, in each of 18 attentions of 8 heads with
    # d_k = d_v = 64: 2 products of 2 x 128 x 128 x 64 forward and 5 backward.
    term = step_terms.flash_attention(BASE)
    assert flops(term) == pytest.approx(7 * 2 * 128 * 128 * 64 * 18 * 8 * 25_000 / 27)
    # Forward: three states of 512 numbers read and one written.
    assert num_bytes(term, in_backward=False) == 18 * 25_000 * 512 * 2 * 4
    # Backward: five read and three written. 12 fused queries, keys and values and 6 keys and values, read and written.
    assert num_bytes(term, in_backward=True) == 25_000 * 512 * 2 * (18 * 8 + 2 * (12 * 3 + 6 * 2))


def test_flash_attention_over_long_sentences() -> None:
    # 300 tokens in tiles of 128: 3 x 3 tiles, of which causal attention computes 6. 2 sentences, 2 heads, 3 layers.
    size = ODD._replace(tokens=600, sentence_tokens=300)
    tiles = (9 + 6 + 9) * 2 * 2 * 3
    forward, backward = (
        flops([work for work in step_terms.flash_attention(size) if work.in_backward is one]) for one in (False, True)
    )
    assert forward == tiles * 2 * 128 * 128 * (6 + 10)
    assert backward == tiles * 2 * 128 * 128 * (3 * 6 + 2 * 10)


@pytest.mark.parametrize(("tokens", "length"), [(3_000, 27), (100, 64), (130, 200), (64, 1), (27 * 64, 27)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_iterations_are_those_of_the_kernels(tokens: int, length: int, is_causal: bool) -> None:
    """The kernel's loops, written out: it begins at the first key of the tile's sentences and ends at the last."""
    sentence_of = [token // length for token in range(tokens)]
    for keys in (64, 32):
        expected = 0
        for first in range(0, tokens, 64):
            rows = range(first, min(first + 64, tokens))
            own = [key for key in range(tokens) if sentence_of[rows[0]] <= sentence_of[key] <= sentence_of[rows[-1]]]
            end = min(own[-1], rows[-1]) if is_causal else own[-1]
            expected += len(range(own[0], end + 1, keys))
        size = BASE._replace(tokens=tokens, sentence_tokens=float(length))
        assert step_terms.num_iterations(size, keys, is_causal) == expected


def test_segment_attention_by_hand() -> None:
    # 128 tokens in sentences of 64: two tiles, whose loops run once over 64 keys, or twice over 32. 3 layers with 3
    # attentions, 2 heads of d_k 6 and d_v 10.
    size = ODD._replace(tokens=128, sentence_tokens=64)
    term = step_terms.segment_attention(size)
    forward, backward = (flops([work for work in term if work.in_backward is one]) for one in (False, True))
    assert forward == 9 * 2 * 2 * 1 * 2 * 64 * 64 * (6 + 10)
    assert backward == 9 * 2 * 2 * 2 * 2 * 64 * 32 * ((2 * 6 + 10) + (2 * 6 + 2 * 10))
    assert num_bytes(term, in_backward=False) == 9 * 128 * 2 * 2 * 2 * (6 + 10)
    assert num_bytes(term, in_backward=True) == 9 * 128 * 2 * 2 * 6 * (6 + 10)


def test_tiles_are_those_of_the_kernels() -> None:
    from model.gpu import segment_kernels

    forward, queries, keys = (
        segment_kernels.tiles(kernel, 64, 64, torch.bfloat16)
        for kernel in (segment_kernels._forward, segment_kernels._backward_queries, segment_kernels._backward_keys)
    )
    assert (forward["QUERIES"], forward["KEYS"]) == (step_terms.ROW_TILE, step_terms.KEY_TILES[0])
    assert (queries["QUERIES"], queries["KEYS"]) == (step_terms.ROW_TILE, step_terms.KEY_TILES[1])
    assert (keys["KEYS"], keys["QUERIES"]) == (step_terms.ROW_TILE, step_terms.KEY_TILES[1])


def test_the_loss_by_hand() -> None:
    # 925 million logits. A chunk may take 1.25 of 80 GB: 1.85 GB of 16-bit logits need two, 7.4 GB of PyTorch's six.
    logits = 25_000 * 37_000
    for kernels, chunks, per_logit in (("triton", 2, 6), ("pytorch", 6, 18)):
        products, weight_gradients, passes = term = step_terms.loss(BASE, kernels, 80e9)
        assert flops(term) == 3 * 2 * logits * 512
        assert products.num_bytes == 2 * (logits + 25_000 * 512 + 37_000 * 512)
        assert weight_gradients.kernels == chunks
        # All chunks read logits and states once; each reads and writes 32 bits of 37,000 x 512 sums.
        assert chunks * weight_gradients.num_bytes == 2 * (logits + 25_000 * 512) + chunks * 8 * 37_000 * 512
        assert passes.num_bytes == per_logit * logits
        assert not any(work.in_backward for work in term)
    # On 141 GB one chunk is enough.
    assert step_terms.loss(BASE, "triton", 141e9)[1].kernels == 1


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
    # Bytes of a weight: norm 4, Adam reads four and writes three numbers, 16-bit copy 4 + 2.
    [work] = step_terms.optimizer(BASE)
    assert work.num_bytes == weights * (4 + 28 + 6)
    assert work.is_fixed


def line(*works: Work, network: NetworkSettings | None = None) -> Roofline:
    size = BASE._replace(network=network or BASE.network)
    return Roofline(size, ROUND, {"first": list(works[:1]), "rest": list(works[1:])})


def test_a_step_is_the_sum_of_its_terms() -> None:
    works = Work(0.7e12, 0.0, 0.1), Work(0.7e12, 0.0, 0.2, in_backward=True), Work(0.0, 0.8e12, 0.3, is_fixed=True)
    one = line(*works)
    assert one.seconds() == {"first": pytest.approx(0.1), "rest": pytest.approx(0.5)}
    # 704 launches of 9 us are hidden.
    assert one.step() == Step(pytest.approx(0.6), pytest.approx(0.2), pytest.approx(0.3), 1, pytest.approx(0.006336))
    assert one.step().own_seconds() == pytest.approx(0.6)
    # Of 12 layers there are twice as many; a hundred micro-batches have 1.3 s of them.
    # 12 encoder and 2 decoder layers have as many sub-layers as six of each; 3 and 1 have 9 of 30.
    for encoder, decoder, launches in ((12, 2, 0.006336), (3, 1, 0.3 * 0.006336)):
        depths = NetworkSettings(num_encoder_layers=encoder, num_decoder_layers=decoder)
        assert line(*works, network=depths).host_seconds() == pytest.approx(launches)
    deep = line(*works, network=NetworkSettings(num_layers=12)).step(micro_batches=100)
    assert deep.own_seconds() == pytest.approx(1.2672)
    assert deep.own_seconds(3) == pytest.approx(34 * 0.012672)  # the device needs 0.4 s


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
            for kernels in step_terms.KERNELS
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
    host = 704 * 9e-6
    assert shared.step_seconds == pytest.approx(host + shared.exposed_seconds)
    assert own.step_seconds == pytest.approx(step.seconds + own.exposed_seconds)
    # Gradients travel during half of the launches.
    assert step.last_backward_seconds(64) == pytest.approx(0.5 * host)
    assert step.last_backward_seconds() == step.backward_seconds
