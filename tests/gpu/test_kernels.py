"""The Triton kernels on a GPU, with the comparisons that `tests/model/interpreted_kernels.py` makes on the CPU."""

from collections.abc import Callable

import pytest
import torch

from model.fast.triton_check import failure
from model.fast.triton_loss import read_logits
from tests.model.fast_paths import cases
from tests.model.kernel_cases import (
    CROSS,
    EDGES,
    KINDS,
    RAGGED,
    UNUSED,
    Heads,
    Sentences,
    check_attention,
    check_dropout,
    check_logits_that_are_not_finite,
    inputs,
    run,
)

pytestmark = pytest.mark.gpu
PAPER = Heads(8, 64, 64)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_the_papers_heads(kind: str, dtype: torch.dtype) -> None:
    """Also of lengths beside the sizes of tiles; the table of fast paths has other heads."""
    check_attention(PAPER, CROSS if kind == "cross" else RAGGED, kind, dtype, "cuda")
    if dtype == torch.bfloat16:
        check_attention(PAPER, EDGES, kind, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "causal" else pytest.mark.slow) for kind in KINDS]
)
def test_dropout(kind: str, dtype: torch.dtype) -> None:
    check_dropout(kind, dtype, "cuda")


def test_two_runs_have_the_same_bits() -> None:
    """At the size of a training step."""
    sentences = Sentences([27] * 920, [30] * 830)
    for kind in ("causal", "cross"):
        one = sentences if kind != "cross" else Sentences(sentences.queries[:830], sentences.keys)
        tensors = [x.detach().nan_to_num().requires_grad_() for x in inputs(PAPER, one, kind, torch.bfloat16, "cuda")]
        results = []
        for _ in range(2):
            result, log_sums = run(tensors, PAPER, one, kind)
            results.append([result, log_sums, *torch.autograd.grad(result, tensors, torch.ones_like(result))])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        assert results[0][0][:-UNUSED].isfinite().all()


@pytest.mark.parametrize(("check", "case"), cases("triton", "cuda or cpu"))
def test_equals_the_plain_function(check: Callable[..., None], case: tuple[object, ...]) -> None:
    check("cuda", *case)


def test_logits_that_are_not_finite() -> None:
    check_logits_that_are_not_finite("cuda")


def test_more_logits_than_32_bits_count() -> None:
    rows, vocabulary_size = 60_000, 37_000
    assert rows * vocabulary_size > 2**31
    logits = torch.zeros(rows, vocabulary_size, dtype=torch.bfloat16, device="cuda")
    last = torch.randn(vocabulary_size, device="cuda").bfloat16()
    logits[-1] = last
    targets = torch.full((rows, 1), 5, device="cuda")
    largest, target, max_probability, gradient = read_logits(logits, targets, torch.float32, 0.1, True)
    probabilities = last.double().softmax(0)
    assert float(largest[-1]) == float(last.max())
    assert float(target[-1]) == float(last[5])
    assert float(max_probability[-1]) == pytest.approx(float(probabilities.max()), rel=1e-4)
    assert gradient is not None
    probabilities[5] -= 0.9
    assert (gradient[-1] - probabilities).norm() < 0.01 * probabilities.norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_check_before_training_accepts_the_kernels(dtype: torch.dtype) -> None:
    assert failure(dtype, 8, 64, 64) is None
