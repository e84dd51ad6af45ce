"""Predict an optimizer step on 1 to 512 GPUs from the network's shapes and the GPU's data sheet: a roofline.

A kernel takes the longer of two times: its arithmetic at an attainable share of the GPU's peak rate, and the bytes that
it reads and writes at an attainable share of memory bandwidth. Kernels run one after another, so their times add up. A
step takes at least the time in which the host launches its kernels; then it waits for the part of the all-reduce that
the backward pass does not hide. Each prediction is made twice, with the fast and the slow end of what is assumed.
docs/roofline.md describes the terms and the assumptions.

Nothing is measured: neither a GPU nor the corpus is needed. The step is compiled, in 16-bit mixed precision, with
Triton's kernels and sentences end to end in a row without padding.
"""

import argparse
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from data_module.errors import InputError
from model.settings import NetworkSettings
from pipeline.config.recipe import Recipe, add_recipe_arguments, load_recipe


@dataclass(frozen=True)
class Assumptions:
    """Numbers that nothing here measures or counts; the defaults are the fast end."""

    product_share: float = 0.75
    """Share of the peak rate that a deep matrix product attains."""
    half_depth: float = 256
    """Length of a product's sums at which it attains half of that; for a GPU of 1,000 TFLOP/s, in proportion to it."""
    attention_share: float = 0.15
    """Share of the peak rate that the products of an attention kernel attain."""
    bandwidth_share: float = 0.8
    """Share of memory bandwidth that a kernel attains."""
    kernel_microseconds: float = 2.0
    """Microseconds between the work of two kernels: one ends, the next begins."""
    host_microseconds: float = 12.0
    """Microseconds in which the host launches an operation."""
    backward_share: float = 0.5
    """Share of the device's time that the backward pass takes."""
    link_share: float = 0.75
    """Share of the links' bandwidth that an all-reduce attains."""
    latency_microseconds: float = 5.0
    """Microseconds from one GPU to the next."""


FAST = Assumptions()
SLOW = Assumptions(product_share=0.65, half_depth=320, kernel_microseconds=4.0, host_microseconds=18.0)
ENDS = {"fast": FAST, "slow": SLOW}
SENTENCE_TOKENS = 27
"""Tokens of every sentence, its end symbol included."""
OPERATIONS, COUNTED_SUB_LAYERS = 630, 30
"""Operations of a compiled step with 6 encoder and 6 decoder layers, and the sub-layers of these."""
QUERIES_PER_TILE = 64
"""Consecutive queries, of whatever sentences, that a program of the attention kernels has; heads of more than 64 have
smaller tiles."""
BYTES_PER_LOGIT = 6
"""What the loss kernel moves between the products: it reads 16 bits twice and writes them once."""
BUCKET_BYTES = 25 << 20
"""Gradients that DDP sends at once, by default."""
HALF, FLOAT, MASK = 2, 4, 1
"""Bytes of a number in 16 bits, of one in 32, and of an element of a dropout mask."""


class Gpu(NamedTuple):
    """What data sheets say of a GPU, and of a node's links in one direction."""

    name: str
    flops_per_second: float
    """Dense 16-bit matrix products."""
    bytes_per_second: float
    """Memory bandwidth."""
    link_bytes_per_second: float
    """NVLink. Data sheets give the sum of both directions."""
    adapter_bytes_per_second: float
    """Network adapter, one for each GPU of a node."""
    gpus_per_node: int = 8

    def all_reduce_seconds(self, num_bytes: float, gpus: int, times: int = 1, assumed: Assumptions = FAST) -> float:
        """Return the time in which GPUs reduce these bytes in equal parts, in rings or trees, as NCCL chooses.

        A ring of n GPUs sends 2 (n - 1) / n of the bytes in 2 (n - 1) hops. A double tree sends all bytes twice, up
        and down, in 2 log2(n) hops. Between nodes, the network is the slowest link.
        """
        one_node = gpus <= self.gpus_per_node
        bandwidth = self.link_bytes_per_second if one_node else self.gpus_per_node * self.adapter_bytes_per_second
        once, hop = num_bytes / (assumed.link_share * bandwidth), times * assumed.latency_microseconds / 1e6
        ring = 2 * (gpus - 1) / gpus * once + 2 * (gpus - 1) * hop
        return min(ring, 2 * once + 2 * math.ceil(math.log2(gpus)) * hop)


GPUS = {
    "a100": Gpu("A100 SXM 80 GB", 312e12, 2.039e12, 300e9, 25e9),
    "h100": Gpu("H100 SXM", 989e12, 3.35e12, 450e9, 50e9),
    "h200": Gpu("H200 SXM", 989e12, 4.8e12, 450e9, 50e9),
}


class Work(NamedTuple):
    """A kernel."""

    flops: float
    """In matrix products. An addition and a multiplication count as two."""
    num_bytes: float
    """That it reads and writes."""
    depth: int = 0
    """Length of the sums of a matrix product; 0 for attention, which attains another share of the peak rate."""

    def seconds(self, gpu: Gpu, assumed: Assumptions) -> float:
        """Return the kernel's time."""
        share = assumed.attention_share
        if self.depth:
            # To begin and to end a tile takes as long as the arithmetic of `half` terms of its sums.
            half = assumed.half_depth * gpu.flops_per_second / 1e15
            share = assumed.product_share * self.depth / (self.depth + half)
        arithmetic = self.flops / (share * gpu.flops_per_second)
        return max(arithmetic, self.num_bytes / (assumed.bandwidth_share * gpu.bytes_per_second))


class Batch(NamedTuple):
    """One GPU's batch of a step, and the network that it trains."""

    network: NetworkSettings
    vocabulary_size: int
    tokens: int
    """Tokens on each side."""

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Return the sizes of all heads' keys and values."""
        return self.network.num_heads * self.network.key_size, self.network.num_heads * self.network.value_size

    @property
    def sub_layers(self) -> int:
        """Return the number of sub-layers: two in an encoder layer, three in a decoder layer."""
        return 2 * self.network.encoder_layers + 3 * self.network.decoder_layers

    @property
    def attentions(self) -> int:
        """Return the number of sub-layers that are attention: one in an encoder layer, two in a decoder layer."""
        return self.network.encoder_layers + 2 * self.network.decoder_layers


def linear(tokens: int, inputs: int, outputs: int) -> list[Work]:
    """Return a linear layer's products: outputs, gradients of inputs and gradients of weights.

    A product of [a, b] and [b, c] reads and writes ab + bc + ac numbers in 16 bits, except that gradients of weights
    are written in 32.
    """
    flops, weights = 2.0 * tokens * inputs * outputs, inputs * outputs
    states = HALF * tokens * (inputs + outputs)
    # Gradients of weights are sums over all tokens, but of so few tiles that several multiprocessors share a sum.
    return [
        Work(flops, states + HALF * weights, depth=inputs),
        Work(flops, states + HALF * weights, depth=outputs),
        Work(flops, states + FLOAT * weights, depth=min(tokens, inputs, outputs)),
    ]


def products(batch: Batch) -> list[Work]:
    """Return the products of all linear layers of encoder and decoder."""
    width, inner, (keys, values) = batch.network.d_model, batch.network.d_ff, batch.head_sizes
    own = [(width, 2 * keys + values), (values, width), (width, inner), (inner, width)]
    cross = [(width, keys), (width, keys + values), (values, width)]
    works = []
    for shapes, layers in (own, batch.network.encoder_layers), ([*own, *cross], batch.network.decoder_layers):
        for inputs, outputs in shapes:
            works += layers * linear(batch.tokens, inputs, outputs)
    return works


def attention(batch: Batch) -> list[Work]:
    """Return the kernels of `model/fast/triton_attention.py`.

    A tile of queries meets all keys of the sentences that it has a part of: on average a sentence more than it has
    queries, of which causal attention skips few. There are two products in the forward pass: scores and result. In the
    backward pass there are three for the gradients of queries, and four for those of keys and values: both compute
    scores and the gradients of the weights.
    """
    keys, values = batch.head_sizes
    scores = 2.0 * batch.tokens * (QUERIES_PER_TILE + SENTENCE_TOKENS)
    states = HALF * batch.tokens * (keys + values)
    # Queries, keys and values are read; the result is written.
    forward = Work(scores * (keys + values), 2 * states)
    # These and the result's gradient are read twice, the result once; three gradients are written.
    backward = Work(scores * (4 * keys + 3 * values), 6 * states)
    return batch.attentions * [forward, backward]


def loss(batch: Batch) -> list[Work]:
    """Return the three products with the output projection, and what passes over the logits."""
    passes = Work(0.0, BYTES_PER_LOGIT * batch.tokens * batch.vocabulary_size)
    return [*linear(batch.tokens, batch.network.d_model, batch.vocabulary_size), passes]


def pointwise(batch: Batch) -> list[Work]:
    """Return what is between products, in kernels that read each input and write each result once."""
    network, (keys, values) = batch.network, batch.head_sizes
    # Forward: reads the input and the sub-layer's output; writes the dropout mask, the sum and its norm. Backward:
    # reads two gradients of the norm, the sum and the mask; writes two gradients; reads one for a bias.
    residual = batch.sub_layers * network.d_model * ((4 * HALF + MASK) + (6 * HALF + MASK))
    # Forward: a part of the product. Backward: reads gradient and result; writes a gradient, whose sum is a bias's.
    relu = (network.encoder_layers + network.decoder_layers) * network.d_ff * 3 * HALF
    # Backward: reads the gradients of queries, keys and values for their biases.
    projection = batch.attentions * (2 * keys + values) * HALF
    return [Work(0.0, batch.tokens * (residual + relu + projection))]


@cache
def count_weights(network: NetworkSettings, vocabulary_size: int) -> tuple[int, int]:
    """Return the number of trained weights, and of the tensors that they form."""
    import torch

    from model.transformer import Transformer

    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in Transformer(vocabulary_size, network).parameters()]
    return sum(sizes), len(sizes)


def terms(batch: Batch, gpu: Gpu, assumed: Assumptions, gpus: int = 1) -> dict[str, float]:
    """Return the seconds of a step's terms on one of the GPUs, and last the host's."""
    seconds = {
        term.__name__: sum(work.seconds(gpu, assumed) for work in term(batch))
        for term in (products, attention, loss, pointwise)
    }
    weights, tensors = count_weights(batch.network, batch.vocabulary_size)
    # The norm reads a weight's gradient. Adam reads the weight, its gradient and two moments, and writes weight and
    # moments, in 32 bits. The weight's 16-bit copy is made anew.
    bytes_per_weight = FLOAT + 7 * FLOAT + (FLOAT + HALF)
    operations = OPERATIONS * batch.sub_layers / COUNTED_SUB_LAYERS
    if gpus > 1:  # DDP copies each gradient into a bucket.
        bytes_per_weight += 2 * FLOAT
        operations += tensors
    seconds["optimizer"] = Work(0.0, bytes_per_weight * weights).seconds(gpu, assumed)
    seconds["gaps"] = operations * assumed.kernel_microseconds / 1e6
    seconds["host"] = operations * assumed.host_microseconds / 1e6
    return seconds


def predict(batch: Batch, gpu: Gpu, gpus: int, is_shared: bool, assumed: Assumptions) -> dict[str, float]:
    """Predict the step of GPUs that share the batch (strong scaling), or that have such a batch each (weak scaling).

    Returns:
        The number of `gpus`; `step_seconds`, and `exposed_seconds` of these, which wait for gradients;
        `target_tokens_per_second` of all GPUs together; `mfu`, the share of the data sheet's peak rate.
    """
    from pipeline.monitoring.performance import training_flops

    parts, batches = (gpus, 1) if is_shared else (1, gpus)
    *device, host = terms(batch._replace(tokens=math.ceil(batch.tokens / parts)), gpu, assumed, gpus).values()
    own = max(sum(device), host)
    # The shared embedding's gradient is complete only when the backward pass ends. The others travel during the pass,
    # in DDP's buckets.
    embedding = FLOAT * batch.vocabulary_size * batch.network.d_model
    others = FLOAT * count_weights(batch.network, batch.vocabulary_size)[0] - embedding
    during = gpu.all_reduce_seconds(others, gpus, math.ceil(others / BUCKET_BYTES), assumed)
    exposed = max(0.0, during - assumed.backward_share * own)
    exposed += gpu.all_reduce_seconds(embedding, gpus, assumed=assumed)
    rate = batches * batch.tokens / (own + exposed)
    pair = np.array([SENTENCE_TOKENS])
    flops = training_flops(batch.network, batch.vocabulary_size, pair, pair) / SENTENCE_TOKENS
    return {
        "gpus": gpus,
        "step_seconds": own + exposed,
        "exposed_seconds": exposed,
        "target_tokens_per_second": rate,
        "mfu": rate * flops / (gpus * gpu.flops_per_second),
    }


def predict_all(batch: Batch, gpu: Gpu) -> dict[str, Any]:
    """Return the terms of a step on one GPU and the steps on 1, 2, 4 ... 512, for each end."""
    return {
        end: {
            "term_seconds": terms(batch, gpu, assumed),
            "strong": [predict(batch, gpu, 2**power, True, assumed) for power in range(10)],
            "weak": [predict(batch, gpu, 2**power, False, assumed) for power in range(10)],
        }
        for end, assumed in ENDS.items()
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's arguments."""
    add_recipe_arguments(parser)
    parser.add_argument("--gpu", choices=GPUS, default="h100", help="default: %(default)s")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="default: %(default)s")
    parser.add_argument(
        "--network-gb-s",
        type=float,
        help="bandwidth of a node's network, 10^9 bytes a second in each direction (default: an adapter for each GPU)",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Predict steps, print a table and return the figures."""

    gpu, network, per_node = GPUS[arguments.gpu], arguments.network_gb_s, arguments.gpus_per_node
    if per_node < 1:
        raise InputError(f"--gpus-per-node {per_node}: must be 1 or more")
    gpu = gpu._replace(gpus_per_node=per_node)
    if network is not None:
        if not 0 < network < math.inf:
            raise InputError(f"--network-gb-s {network}: must be more than 0")
        gpu = gpu._replace(adapter_bytes_per_second=network * 1e9 / per_node)
    recipe = load_recipe(arguments.config, arguments.overrides)
    batch = batch_of(recipe)
    figures = predict_all(batch, gpu)
    print(f"{gpu.name}, {batch.tokens:,} tokens a side\n{table(figures)}", file=sys.stderr)
    return {"recipe": recipe.name, "gpu": gpu.name, **figures}


def batch_of(recipe: Recipe) -> Batch:
    """Return the recipe's batch; raise InputError if its steps are not those that are predicted."""
    from model.fast.triton_check import LARGEST_HEAD, can_run

    precision = str(recipe.trainer.get("precision", "bf16-mixed"))
    for key, value, is_predicted, instead in (
        ("trainer.precision", precision, precision.startswith(("bf16", "16")), "bf16-mixed"),
        ("run.kernels", recipe.run.kernels, recipe.run.kernels != "pytorch", "null"),
        ("training.optimizer", recipe.training.optimizer, recipe.training.optimizer == "adam", "adam"),
    ):
        if not is_predicted:
            raise InputError(f"{key} {value}: steps with it are not predicted; set it to {instead}")
    d_k, d_v = recipe.network.key_size, recipe.network.value_size
    if not can_run(d_k, d_v):
        raise InputError(
            f"network.num_heads {recipe.network.num_heads}: heads have d_k {d_k} and d_v {d_v}; predicted are kernels "
            f"that take up to {LARGEST_HEAD}; give more heads"
        )
    return Batch(recipe.network, recipe.corpus.vocabulary_size, recipe.batches.batch_tokens)


def table(figures: dict[str, Any]) -> str:
    """Return what `predict_all` returned as text, from the fast to the slow end."""
    ends = [figures[end] for end in ENDS]
    times = [f"{name} {_range(1000 * end['term_seconds'][name] for end in ends)}" for name in ends[0]["term_seconds"]]
    columns = f"{'ms (exposed)':>28}{'million tokens/s':>18}{'MFU %':>10}"
    lines = [
        f"ms on one: {', '.join(times)}",
        f"{'':4}{'batch shared':>56}{'batch each':>56}",
        f"GPUs{columns}{columns}",
    ]
    for row, gpus in enumerate(step["gpus"] for step in ends[0]["strong"]):
        lines.append(f"{gpus:<4}")
        for steps in ([end[scaling][row] for end in ends] for scaling in ("strong", "weak")):
            milliseconds, exposed = (
                _range(1000 * step[f"{name}_seconds"] for step in steps) for name in ("step", "exposed")
            )
            rate = _range((step["target_tokens_per_second"] / 1e6 for step in steps), ".3g")
            mfu = _range((100 * step["mfu"] for step in steps), ".0f")
            lines[-1] += f"{f'{milliseconds} ({exposed})':>28}{rate:>18}{mfu:>10}"
    return "\n".join(lines)


def _range(ends: Iterable[float], form: str = ".1f") -> str:
    """Return both ends, or one number where they are the same."""
    return " to ".join(dict.fromkeys(f"{value:{form}}" for value in ends))
