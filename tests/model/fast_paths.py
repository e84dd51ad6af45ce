"""The table of fast paths: each is compared with the plain function that it stands for.

The comparison is of results and, where training uses the path, of gradients. The truth is the plain function in float64
on the same rounded inputs. A new fast path is a row here.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from model.decoding import BeamSearch
from model.dropout import Dropout
from model.fast import compiled_search
from model.fast.compilation import CompiledForward, compiled_chunk_terms
from model.fast.compiled_search import CompiledSearch
from model.fast.packed_linear import PackedLinear, PackedProjection, can_pack, pack_linears
from model.loss import label_smoothed_loss
from model.packed_attention import FLASH_ATTENTION, RowAttention
from model.settings import NetworkSettings
from model.transformer import PaddedTransformer, Transformer
from pipeline.runtime.backend_choice import load_compiled_attention, load_compiled_search
from tests.compilations import Compilations
from tests.model import kernel_cases
from tests.model.search_truth import LENGTHS, exact, make_sources, trained_network
from tests.model.sentence_batches import PAD, VOCABULARY, arguments, masked_attention, packed, upstream

TOLERANCES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Difference that is allowed, as a share of the largest value."""

Result = Tensor | tuple[Tensor | None, ...]


class FastPath(NamedTuple):
    check: Callable[..., None]
    """Compares; takes a case."""
    cases: list[tuple[object, ...]]


def compare(
    plain: Callable[..., Result],
    fast: Callable[..., Result],
    inputs: list[Tensor],
    dtype: torch.dtype,
    differentiated: int = 0,
) -> None:
    """Compare results, and gradients of the first of them by the first inputs; inputs that are numbers are rounded."""
    given = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    exact = [x.double() if x.is_floating_point() else x for x in given]
    found, wanted = [], []
    for function, tensors, results in ((fast, given, found), (plain, exact, wanted)):
        leaves = [x.requires_grad_() for x in tensors[:differentiated]]
        result = function(*tensors)
        results += [one for one in (result if isinstance(result, tuple) else (result,)) if one is not None]
        if leaves:
            results += torch.autograd.grad(results[0], leaves, upstream(results[0]))
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        largest = float(other.detach().abs().max()) if other.numel() else 0.0
        difference = (one.detach().double() - other.detach()).abs().max() if other.numel() else 0.0
        assert difference <= TOLERANCES[dtype] * largest, f"{difference} of {largest}"


def check_attention(
    heads: tuple[int, int, int], dtype: torch.dtype, kind: str, attention: Callable[[], RowAttention]
) -> None:
    """`model.packed_attention.flash_attention`, which needs a GPU: by the formula, one sentence at a time.

    Also with lengths beside the sizes of tiles.
    """
    own, sizes = attention(), kernel_cases.Heads(*heads)
    for lengths in (kernel_cases.CROSS if kind == "cross" else kernel_cases.RAGGED, kernel_cases.EDGES):
        compute = partial(kernel_cases.run_attention, own, sizes, lengths, kind)
        kernel_cases.check_attention(sizes, lengths, kind, dtype, compute)


def check_linear(make: Callable[[nn.Linear], Callable[[Tensor], Tensor]], rows: int, width: int) -> None:
    """`nn.Linear`, without gradients."""
    torch.manual_seed(1)
    linear, x = nn.Linear(width, 512), torch.randn(rows, 1, width)
    with torch.no_grad():
        fast = make(linear)
        for _ in range(2):  # the first call may pack the weight
            compare(copy.deepcopy(linear).double(), fast, [x], torch.float32)


def check_dropout(dtype: torch.dtype) -> None:
    """`F.dropout` with the elements that the same seed drops from ones."""

    def drop(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return Dropout(0.25).train()(x)

    compare(lambda x: x * (drop(torch.ones_like(x)) != 0) / 0.75, drop, [torch.randn(30, 7)], dtype, 1)


def check_packed_network(variant: str) -> None:
    """Logits of padded sentences, with every linear layer and the projection replaced."""
    network, (source, mask) = trained_network(variant), make_sources(LENGTHS)
    fast = copy.deepcopy(network)
    assert can_pack(fast)
    pack_linears(fast)
    # Seven in a decoder layer, four in an encoder layer, and the projection.
    assert sum(isinstance(module, PackedLinear) for module in fast.modules()) == 7 + 4 + 1
    assert not any(isinstance(module, nn.Linear) for module in fast.modules())

    def logits(padded: PaddedTransformer) -> Tensor:
        return padded.network.logits(padded(source, source, mask))

    with torch.no_grad():
        compare(lambda: logits(exact(network)), lambda: logits(PaddedTransformer(fast)), [], torch.float32)


def check_network(
    forward: Callable[[Transformer], Callable[..., Tensor]], attention: Callable[[], RowAttention], dtype: torch.dtype
) -> None:
    """`Transformer.rows` with plain attention: states of tokens, and the gradient of the loss by all weights.

    In 16 bits by autocast, as in training.
    """
    settings = NetworkSettings(num_layers=1, d_model=16, d_ff=24, num_heads=2, d_k=16, d_v=32, dropout=0.0)
    torch.manual_seed(3)
    network = Transformer(VOCABULARY, settings)
    [batch] = packed([[(7, 9), (20, 34), (1, 1)]]).micro_batches
    is_token = (batch.target_output != PAD).unsqueeze(1)  # states of padding have no meaning

    def results(network: Transformer, compute: Callable[..., Tensor], *given: object) -> tuple[Tensor, Tensor]:
        result = compute(*given).where(is_token, 0)
        loss = label_smoothed_loss(result, network.embedding.weight, batch.target_output, 0.1, PAD).smoothed
        return result, parameters_to_vector(torch.autograd.grad(loss, list(network.parameters())))

    exact_network = copy.deepcopy(network).double()
    truth = results(exact_network, exact_network.rows, *arguments(batch, torch.float64))
    torch.compiler.reset()
    low = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
    with mock.patch("model.packed_attention._flash", masked_attention), low:
        found = results(network, forward(network), *arguments(batch, dtype, attention()))
    torch.compiler.reset()
    for one, other in zip(found, truth, strict=True):
        assert (one - other).norm() <= (0.03 if dtype == torch.bfloat16 else 1e-5) * other.norm()


def check_chunk_terms(dtype: torch.dtype, compiler: str, device: str = "cpu") -> None:
    """Softmax and its gradient, for chunks of two sizes, and rows that end before the memory's; see `test_loss.py`."""
    torch.compiler.reset()
    terms = compiled_chunk_terms(compiler)

    def plain(logits: Tensor, target: Tensor) -> Result:
        probabilities = logits.softmax(-1)
        gradient = probabilities - 0.9 * F.one_hot(target.squeeze(1), 53)
        return *(x.amax(-1, keepdim=True) for x in (logits, probabilities)), logits.gather(1, target), gradient

    def fast(logits: Tensor, target: Tensor) -> Result:
        logits = F.pad(logits, [0, 3])[:, :53]
        largest, target_logits, probability = terms(logits, target, 0.1)
        return largest, probability, target_logits, logits

    with Compilations() as compilations:
        for rows in (128, 128, 9):
            inputs = torch.randn(rows, 53, device=device) * 4, torch.randint(0, 53, (rows, 1), device=device)
            compare(plain, fast, list(inputs), dtype)
    assert compilations.num_graphs == 2
    torch.compiler.reset()


def check_search(case: int) -> None:
    """`BeamSearch.beam`, for networks and sources whose best answers do not depend on rounding."""
    network, source, lengths = compiled_search.agreement_cases()[case]
    mask = torch.arange(source.size(1)) < torch.tensor(lengths).unsqueeze(1)
    options = source, mask, compiled_search.BEAM_SIZE, compiled_search.LENGTH_PENALTY, compiled_search.EXTRA_TOKENS, 2
    found = CompiledSearch(load_compiled_search(), network, 2, 3, 0).beam(*options)
    with torch.no_grad():
        wanted = BeamSearch(network.double(), 2, 3, 0).eval().beam(*options)
    assert torch.equal(found.tokens, wanted.tokens)
    torch.testing.assert_close(found.scores.double(), wanted.scores.double(), rtol=1e-5, atol=1e-5)


def _projection(kind: Callable[..., nn.Module]) -> Callable[[nn.Linear], Callable[[Tensor], Tensor]]:
    return lambda linear: lambda x: kind(linear)(x, linear.weight.detach())


CPU_DTYPES, GPU_DTYPES = [torch.float32, torch.bfloat16], [torch.float32, torch.float16, torch.bfloat16]
FAST_PATHS = {
    "attention in C++": FastPath(
        check_attention,
        [
            (heads, dtype, kind, lambda: load_compiled_attention().attention())
            for dtype in CPU_DTYPES
            for kind in kernel_cases.KINDS
            for heads in ((2, 16, 48), (1, 64, 16), (3, 32, 32))
        ],
    ),
    "linear layers with packed weights": FastPath(
        check_linear,
        [
            (make, rows, 1000)
            for rows in (1, 64)
            for make in (
                lambda linear: PackedLinear(linear.weight, linear.bias),
                _projection(lambda linear: PackedProjection(linear.weight, linear.bias)),
            )
        ],
    ),
    "dropout": FastPath(check_dropout, [(dtype,) for dtype in GPU_DTYPES]),
    "network with packed weights": FastPath(check_packed_network, [("pre-norm",), ("biased",)]),
    "network with attention in C++": FastPath(
        check_network,
        [(lambda one: one.rows, lambda: load_compiled_attention().attention(), one) for one in CPU_DTYPES],
    ),
    "compiled forward pass": FastPath(
        check_network,
        [(lambda one: CompiledForward(one, "aot_eager"), lambda: FLASH_ATTENTION, torch.float32)],
    ),
    "compiled terms of the loss": FastPath(check_chunk_terms, [(dtype, "aot_eager") for dtype in GPU_DTYPES]),
    "search in C++": FastPath(check_search, [(0,), (1,)]),
}
"""The fast paths of `model/fast/`."""


def cases() -> list[object]:
    """Return the rows' cases as parameters `check` and `case` of a test."""
    return [
        pytest.param(path.check, case, id=f"{name} {number}")
        for name, path in FAST_PATHS.items()
        for number, case in enumerate(path.cases)
    ]
