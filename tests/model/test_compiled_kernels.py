"""The compiled attention beside its rows in `fast_paths.py`: threads, infinities, mistakes."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

from model.fast.compiled_attention import DTYPES, CompiledAttention
from pipeline.runtime.backend_choice import load_compiled_attention
from tests.model.kernel_cases import CROSS, EDGES, Heads, Sentences, inputs, run_attention

HEADS = Heads(4, 16, 32)


@pytest.fixture(scope="module")
def attention() -> CompiledAttention:
    return load_compiled_attention()


def results(attention: CompiledAttention, tensors: list[Tensor], sentences: Sentences, kind: str) -> list[Tensor]:
    result = run_attention(attention.attention(), HEADS, sentences, kind, tensors)
    return [result, *torch.autograd.grad(result, tensors, result.detach().sin())]


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_does_not_depend_on_threads(
    dtype: torch.dtype, attention: CompiledAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EDGES has enough tokens for several threads, CROSS for one only."""
    for sentences in (EDGES, CROSS):
        tensors = inputs(HEADS, sentences, "cross", dtype)
        found = []
        for num_threads in (1, 5, 64):
            monkeypatch.setattr(torch, "get_num_threads", lambda number=num_threads: number)
            found.append(results(attention, tensors, sentences, "cross"))
        for others in found[1:]:
            assert all(torch.equal(own, first) for own, first in zip(others, found[0], strict=True))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("row", [0, 18, 39])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_that_is_not_finite_reaches_the_result_of_attention(
    dtype: torch.dtype, value: float, row: int, attention: CompiledAttention
) -> None:
    """So that the step is skipped. Also at the ends of a sentence, which is the second of three."""
    sentences = Sentences([5, 40, 6], [5, 40, 6])
    [projected] = inputs(HEADS, sentences, "self", dtype)
    with torch.no_grad():
        projected[5 + row, 7] = value  # of a query
    result = run_attention(attention.attention(), HEADS, sentences, "self", [projected])
    assert not result[5 + row, : HEADS.d_v].isfinite().any()
    assert result[:5].isfinite().all()
    assert result[45:51].isfinite().all()


def test_copies_and_pickles(attention: CompiledAttention) -> None:
    tensors = inputs(HEADS, CROSS, "cross", torch.float32)
    wanted = results(attention, tensors, CROSS, "cross")
    for duplicate in (copy.deepcopy, lambda program: pickle.loads(pickle.dumps(program))):  # noqa: S301
        assert torch.equal(results(duplicate(attention), tensors, CROSS, "cross")[0], wanted[0])
