"""The terms of an optimizer step on one GPU, from the network's shapes and the GPU's data sheet: a roofline.

`Work` is a number of equal kernels. A kernel takes the longer of two times: its arithmetic at an attainable share of
the GPU's peak rate, and the bytes that it reads and writes at an attainable share of memory bandwidth. Kernels run one
after another, so a term is the sum of its work, and the step the sum of its terms. It takes longer if the host needs
longer to launch the kernels.

The step is compiled, in bf16-mixed, with sentences end to end in one micro-batch and as many tokens on each side. Left
out: dead tokens, what the loss does outside the logits, gradient clipping, loading, the monitor, and Lightning's loop.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from model.settings import NetworkSettings
from model.transformer import Transformer
from pipeline.benchmark.scaling_model import Cluster, Link, Step
from pipeline.profiling.flops import training_flops


class Gpu(NamedTuple):
    """What the data sheets of a GPU and of a server with eight of it say."""

    name: str
    flops_per_second: float
    """Dense bfloat16 matrix products."""
    bytes_per_second: float
    """Memory bandwidth."""
    memory_bytes: float
    link_bytes_per_second: float
    """NVLink in one direction. Data sheets state the sum of both."""
    network_bytes_per_second: float
    """Network of the server in one direction, an adapter for each GPU."""

    def cluster(self) -> Cluster:
        """Return servers of eight, with the bandwidth that an all-reduce attains."""
        between, inside = (
            Link(LINK_SHARE.value * bandwidth, LATENCY_MICROSECONDS.value / 1e6)
            for bandwidth in (self.network_bytes_per_second, self.link_bytes_per_second)
        )
        return Cluster(between, inside, GPUS_PER_SERVER)


class Assumption(NamedTuple):
    """A number that nothing here measures or counts."""

    meaning: str
    value: float


GPUS = {
    "a100": Gpu("A100 SXM 80 GB", 312e12, 2.039e12, 80e9, 300e9, 200e9),
    "h100": Gpu("H100 SXM", 989e12, 3.35e12, 80e9, 450e9, 400e9),
    "h200": Gpu("H200 SXM", 989e12, 4.8e12, 141e9, 450e9, 400e9),
}
GPUS_PER_SERVER = 8
PRODUCT_SHARE = Assumption("share of the peak rate that a large matrix product attains", 0.7)
TILE_SHARE = Assumption("share of the peak rate that the products of an attention kernel attain", 0.15)
BANDWIDTH_SHARE = Assumption("share of memory bandwidth that a kernel attains", 0.8)
HOST_MICROSECONDS = Assumption("microseconds in which the host launches an operation of the device", 9.0)
LINK_SHARE = Assumption("share of the links' bandwidth that an all-reduce attains", 0.75)
LATENCY_MICROSECONDS = Assumption("microseconds from one GPU to the next", 5.0)
ASSUMPTIONS = (PRODUCT_SHARE, TILE_SHARE, BANDWIDTH_SHARE, HOST_MICROSECONDS, LINK_SHARE, LATENCY_MICROSECONDS)

OPERATIONS = {"eager": 961, "compiled": 704}
"""Operations of the device in a step of six encoder and six decoder layers and one micro-batch."""
_COUNTED_SUB_LAYERS = 6 * (2 + 3)
"""Sub-layers of that network. Networks of other depths are assumed to need as many operations a sub-layer."""
KERNELS = ("pytorch", "triton")
"""For attention and the loss, as in `run.kernels`."""
FLASH_TILE = 128
"""Rows and columns of a tile of scores in flash attention. A sentence that is shorter costs a whole tile."""
ROW_TILE, KEY_TILES = 64, (64, 32)
"""Consecutive rows of a tile in Triton's kernels, of whatever sentences; and the keys that a tile's loop takes at a
time, forward and backward. Heads of more than 64 have smaller tiles."""
LOGIT_BYTES = {"pytorch": 18, "triton": 6}
"""That a logit's passes read and write between the products.

Triton's kernel reads 16 bits twice and writes them once. PyTorch's operations read 16 bits twice and 32 bits twice, and
write 32 bits and 16 bits once."""
_CHUNK_SHARE, _CHUNK_BYTES = 1 / 64, {"pytorch": 8, "triton": 2}
"""Share of a GPU's memory that a chunk of logits takes, and how much a logit needs."""
_HALF, _FLOAT, _MASK = 2, 4, 1
"""Bytes of a number in 16 bits, of one in 32, and of an element of a dropout mask."""


class Work(NamedTuple):
    """Equal kernels of a step."""

    flops: float
    """Of one kernel, in matrix products. An addition and a multiplication count as two."""
    num_bytes: float
    """That one kernel reads and writes."""
    kernels: float = 1.0
    """Number of kernels."""
    share: float = PRODUCT_SHARE.value
    """Share of the peak rate that the arithmetic attains."""
    in_backward: bool = False
    is_fixed: bool = False
    """It does not depend on the number of tokens."""

    def seconds(self, gpu: Gpu) -> float:
        """Return the time of all kernels."""
        arithmetic = self.flops / (self.share * gpu.flops_per_second)
        return self.kernels * max(arithmetic, self.num_bytes / (BANDWIDTH_SHARE.value * gpu.bytes_per_second))


class Size(NamedTuple):
    """What the terms are computed from."""

    network: NetworkSettings
    vocabulary_size: int
    tokens: int
    """On each side, in all micro-batches."""
    sentence_tokens: float = 27.0
    """Length of a sentence, its end symbol included; assumed to be the same for all sentences."""

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Return the sizes of all heads' keys and values."""
        return self.network.num_heads * self.network.key_size, self.network.num_heads * self.network.value_size

    @property
    def sub_layers(self) -> int:
        """Return the number of sub-layers: two in an encoder layer, three in a decoder layer."""
        return 2 * self.network.encoder_layers + 3 * self.network.decoder_layers

    @property
    def flops(self) -> float:
        """Return the FLOPs that the step needs, for MFU."""
        pair = np.array([self.sentence_tokens])
        return self.tokens / self.sentence_tokens * training_flops(self.network, self.vocabulary_size, pair, pair)


class Roofline(NamedTuple):
    """The terms of one step on one GPU."""

    size: Size
    gpu: Gpu
    terms: dict[str, list[Work]]

    def seconds(self) -> dict[str, float]:
        """Return the time of each term on the device."""
        return {name: sum(work.seconds(self.gpu) for work in term) for name, term in self.terms.items()}

    def host_seconds(self) -> float:
        """Return the time in which the host launches a micro-batch's operations."""
        operations = OPERATIONS["compiled"] * self.size.sub_layers / _COUNTED_SUB_LAYERS
        return operations * HOST_MICROSECONDS.value / 1e6

    def step(self, micro_batches: int = 1) -> Step:
        """Return the step for `scaling_model`."""
        everything = [work for term in self.terms.values() for work in term]
        whole, fixed, backward = (
            sum(work.seconds(self.gpu) for work in part)
            for part in (
                everything,
                [work for work in everything if work.is_fixed],
                [work for work in everything if work.in_backward],
            )
        )
        return Step(whole, backward, fixed, micro_batches, self.host_seconds())

    def mfu(self, step_seconds: float, gpus: int = 1) -> float:
        """Return the share of the data sheet's peak rate that GPUs attain which need this time for the tokens."""
        return self.size.flops / (gpus * step_seconds * self.gpu.flops_per_second)


def roofline(size: Size, gpu: Gpu, kernels: str = "triton") -> Roofline:
    """Return the terms of a step; `kernels` is one of `KERNELS`."""
    terms = {
        "products": products(size),
        "attention": flash_attention(size) if kernels == "pytorch" else segment_attention(size),
        "loss": loss(size, kernels, gpu.memory_bytes),
        "pointwise": pointwise(size),
        "optimizer": optimizer(size),
    }
    return Roofline(size, gpu, terms)


def parameter_sizes(network: NetworkSettings, vocabulary_size: int) -> list[int]:
    """Return the number of elements of each parameter, in the network's order."""
    with torch.device("meta"):
        return [parameter.numel() for parameter in Transformer(vocabulary_size, network).parameters()]


def products(size: Size) -> list[Work]:
    """Return the products of all linear layers: outputs, gradients of inputs and gradients of weights.

    A product of [a, b] and [b, c] reads and writes ab + bc + ac numbers in 16 bits, except that gradients of weights
    are written in 32.
    """
    width, inner, (keys, values) = size.network.d_model, size.network.d_ff, size.head_sizes
    own = [(width, 2 * keys + values), (values, width), (width, inner), (inner, width)]
    cross = [(width, keys), (width, keys + values), (values, width)]
    stacks = (own, size.network.encoder_layers), ([*own, *cross], size.network.decoder_layers)
    return [
        work
        for shapes, layers in stacks
        for inputs, outputs in shapes
        for work in _linear(size.tokens, inputs, outputs, layers)
    ]


def _linear(rows: int, inputs: int, outputs: int, count: int) -> list[Work]:
    """Return the forward and the backward products of linear layers."""
    flops, weights = 2.0 * rows * inputs * outputs, inputs * outputs
    states = _HALF * rows * (inputs + outputs)
    return [
        Work(flops, states + _HALF * weights, count),
        Work(flops, states + _HALF * weights, count, in_backward=True),
        Work(flops, states + _FLOAT * weights, count, in_backward=True),
    ]


def flash_attention(size: Size) -> list[Work]:
    """Return flash attention's kernels, whose tiles belong to one sentence each.

    Of each tile there are two products in the forward pass and five in the backward pass; causal attention leaves out
    tiles above the diagonal. The forward pass reads queries, keys and values and writes the result. The backward pass
    reads these and the result's gradient, and writes the gradients of the first three. Where these belong to a fused
    projection, they are then copied to one place.
    """
    across = math.ceil(size.sentence_tokens / FLASH_TILE)
    sentences = size.tokens / size.sentence_tokens
    keys, values = size.head_sizes
    encoder_layers, decoder_layers = size.network.encoder_layers, size.network.decoder_layers
    # Tiles of a sentence, width of the fused projection and number of layers: encoder, decoder, cross-attention.
    kinds = (
        (across**2, 2 * keys + values, encoder_layers),
        (across * (across + 1) / 2, 2 * keys + values, decoder_layers),
        (across**2, keys + values, decoder_layers),
    )
    works = []
    states = float(_HALF * size.tokens * (keys + values))
    for num_tiles, fused, layers in kinds:
        tile = 2.0 * FLASH_TILE**2 * num_tiles * sentences
        works += [
            Work(tile * (keys + values), 2 * states, layers, TILE_SHARE.value),
            Work(tile * (3 * keys + 2 * values), 4 * states, layers, TILE_SHARE.value, in_backward=True),
            Work(0.0, 2.0 * _HALF * size.tokens * fused, layers, in_backward=True),
        ]
    return works


def segment_attention(size: Size) -> list[Work]:
    """Return the kernels of `model/gpu/segment_kernels.py`, whose tiles are consecutive rows of any sentences.

    A tile's loop runs over the keys of all its sentences. The forward kernel has two products in each iteration. One
    backward kernel has tiles of queries and three products, the other has tiles of keys and four. Together they read
    queries, keys, values and the result's gradient twice and the result once, and write three gradients.
    """
    keys, values = size.head_sizes
    encoder_layers, decoder_layers = size.network.encoder_layers, size.network.decoder_layers
    states = float(_HALF * size.tokens * (keys + values))
    forward_keys, backward_keys = KEY_TILES
    works = []
    # Cross-attention is not causal either.
    for is_causal, kernels in ((False, encoder_layers + decoder_layers), (True, decoder_layers)):
        forward = 2.0 * ROW_TILE * forward_keys * num_iterations(size, forward_keys, is_causal)
        # Causal queries attend to the keys before them, and keys to the queries behind them: as many.
        backward = 2.0 * ROW_TILE * backward_keys * num_iterations(size, backward_keys, is_causal)
        works += [
            Work(forward * (keys + values), 2 * states, kernels, TILE_SHARE.value),
            # Of queries: scores, gradients of the weights and of queries. It reads five states and writes one.
            Work(backward * (2 * keys + values), 3 * states, kernels, TILE_SHARE.value, in_backward=True),
            # Of keys: scores, gradients of the weights, of keys and of values. It reads four and writes two.
            Work(backward * (2 * keys + 2 * values), 3 * states, kernels, TILE_SHARE.value, in_backward=True),
        ]
    return works


def num_iterations(size: Size, keys: int, is_causal: bool) -> int:
    """Return how often the loops over keys of all tiles of queries run, for one head.

    Args:
        size: size of the step.
        keys: keys of an iteration.
        is_causal: a loop ends at its tile's last row.
    """
    first = np.arange(0, size.tokens, ROW_TILE)
    last = np.minimum(first + ROW_TILE, size.tokens) - 1
    length = size.sentence_tokens
    start = np.floor(np.floor(first / length) * length)
    end = last + 1 if is_causal else np.minimum(np.ceil((np.floor(last / length) + 1) * length), size.tokens)
    return int(np.ceil((end - start) / keys).sum())


def loss(size: Size, kernels: str, memory_bytes: float) -> list[Work]:
    """Return the three products with the output projection and the passes over the logits.

    All of it takes place before the backward pass. Each chunk's product for the weight gradient reads and writes the
    sum over chunks in 32 bits.
    """
    rows, width, pieces = size.tokens, size.network.d_model, size.vocabulary_size
    logits = float(rows * pieces)
    chunks = math.ceil(logits * _CHUNK_BYTES[kernels] / (_CHUNK_SHARE * memory_bytes))
    states_and_logits = _HALF * (logits + width * rows)
    return [
        Work(2.0 * logits * width, states_and_logits + _HALF * width * pieces, 2),
        Work(2.0 * logits * width / chunks, states_and_logits / chunks + 2 * _FLOAT * width * pieces, chunks),
        Work(0.0, LOGIT_BYTES[kernels] * logits),
    ]


def pointwise(size: Size) -> list[Work]:
    """Return everything between products, in kernels that read each input and write each result once.

    Forward:

      embedding   reads 32 bits; writes the dropout mask and the sum with the positions
      residual    reads the input and the sub-layer's output; writes the dropout mask, the sum and its norm
      ReLU        reads and writes d_ff numbers

    Backward:

      residual    reads two gradients of the norm, the sum and the mask; writes the gradients of the sum and of the
                  sub-layer; reads the latter for a bias
      ReLU        reads gradient and result; writes a gradient; reads it for a bias
      projection  reads the gradients of queries, keys and values for their biases
      memory      adds the gradients of all cross-attentions in 32 bits
      embedding   reads two gradients and the mask; reads, adds to and writes 32 bits
      matrix      the gradient of the embedding matrix is set to zero for each side, and both are added to the loss's
    """
    network, (keys, values) = size.network, size.head_sizes
    width, inner = network.d_model, network.d_ff
    feed_forwards = network.encoder_layers + network.decoder_layers
    # Self-attention everywhere, and the query, key and value projections of cross-attention in decoder layers.
    attentions = network.encoder_layers + 2 * network.decoder_layers
    forward = (
        2 * width * (_FLOAT + _MASK + _HALF)
        + size.sub_layers * width * (4 * _HALF + _MASK)
        + feed_forwards * inner * 2 * _HALF
    )
    backward = (
        size.sub_layers * width * (6 * _HALF + _MASK)
        + feed_forwards * inner * 4 * _HALF
        + attentions * (2 * keys + values) * _HALF
        + width * (network.decoder_layers * _HALF + _FLOAT)
        + 2 * width * (2 * _HALF + _MASK + 2 * _FLOAT)
    )
    matrix = size.vocabulary_size * width * (2 * _FLOAT + 2 * 3 * _FLOAT)
    return [
        Work(0.0, float(size.tokens * forward)),
        Work(0.0, float(size.tokens * backward), in_backward=True),
        Work(0.0, float(matrix), in_backward=True, is_fixed=True),
    ]


def optimizer(size: Size) -> list[Work]:
    """Return what a step does to each weight.

    The norm reads its gradient. Adam reads the weight, its gradient and two moments, and writes weight and moments. The
    weight's 16-bit copy is made anew. All but the copy is in 32 bits.
    """
    weights = sum(parameter_sizes(size.network, size.vocabulary_size))
    return [Work(0.0, float(weights * (_FLOAT + 7 * _FLOAT + (_FLOAT + _HALF))), is_fixed=True)]
