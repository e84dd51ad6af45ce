"""The compiled attention beside its row in `fast_paths.py`: threads, numbers that are not finite, copies, mistakes."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

from model.fast.compiled_attention import DTYPES, CompiledAttention
from pipeline.runtime.backend import load_compiled_attention
from tests.model.kernel_cases import CROSS, EDGES, Heads, Sentences, inputs, run_attention

HEADS = Heads(4, 16, 32)


@pytest.fixture(scope="module")
def compiled() -> CompiledAttention:
    return load_compiled_attention()


def results(compiled: CompiledAttention, tensors: list[Tensor], sentences: Sentences, kind: str) -> list[Tensor]:
    result = run_attention(compiled.attention(), tensors, HEADS, sentences, kind)
    return [result, *torch.autograd.grad(result, tensors, result.detach().sin())]


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_threads(
    dtype: torch.dtype, compiled: CompiledAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EDGES has enough tokens for several threads, CROSS for one only."""
    for sentences in (EDGES, CROSS):
        tensors = inputs(HEADS, sentences, "cross", dtype, "cpu")
        found = []
        for num_threads in (1, 5, 64):
            monkeypatch.setattr(torch, "get_num_threads", lambda number=num_threads: number)
            found.append(results(compiled, tensors, sentences, "cross"))
        for others in found[1:]:
            assert all(torch.equal(own, first) for own, first in zip(others, found[0], strict=True))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("row", [0, 18, 39])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_that_is_not_finite_reaches_the_result(
    dtype: torch.dtype, value: float, row: int, compiled: CompiledAttention
) -> None:
    """So that the step is skipped. Also at the ends of a sentence, which is the second of three."""
    sentences = Sentences([5, 40, 6], [5, 40, 6])
    [projected] = inputs(HEADS, sentences, "self", dtype, "cpu")
    with torch.no_grad():
        projected[5 + row, 7] = value  # of a query
    result = run_attention(compiled.attention(), [projected], HEADS, sentences, "self")
    assert not result[5 + row, : HEADS.d_v].isfinite().any()
    assert result[:5].isfinite().all()
    assert result[45:51].isfinite().all()


def test_copies_and_pickles(compiled: CompiledAttention) -> None:
    tensors = inputs(HEADS, CROSS, "cross", torch.float32, "cpu")
    wanted = results(compiled, tensors, CROSS, "cross")
    for other in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):  # noqa: S301
        assert torch.equal(results(other, tensors, CROSS, "cross")[0], wanted[0])
