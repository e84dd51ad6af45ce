"""The compiled attention and loss beside their rows in `fast_paths.py`: threads, infinities, mistakes."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

from model.fast.compiled_attention import DTYPES, CompiledAttention
from model.fast.compiled_loss import CompiledLoss
from pipeline.runtime.backend import load_compiled_attention, load_compiled_loss
from tests.model.kernel_cases import CROSS, EDGES, Heads, Sentences, inputs, run_attention

HEADS = Heads(4, 16, 32)


@pytest.fixture(scope="module")
def attention() -> CompiledAttention:
    return load_compiled_attention()


@pytest.fixture(scope="module")
def loss() -> CompiledLoss:
    return load_compiled_loss()


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


@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_gradients_in_bfloat16_are_rounded_to_nearest(alpha: float, loss: CompiledLoss) -> None:
    """The exact gradient of the same logits is in float32."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, 77, generator=generator).bfloat16()
    target = torch.randint(77, (20, 1), generator=generator).repeat_interleave(2, 0)
    found, exact = (
        (loss.read_logit_pairs(*arguments, alpha) if alpha else loss.read_logits(*arguments))[-1].double()
        for arguments in ((one, target, torch.float32, 0.1, True) for one in (logits.clone(), logits.float()))
    )
    # Half a unit in the last place of bfloat16 is at most 2^-8 of a number; float32 is off by far less.
    assert ((found - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_the_loss_depends_on_neither_threads_nor_other_rows(
    alpha: float, loss: CompiledLoss, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many logits as many threads take, and with so few that there is one."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(802, 1009, generator=generator)
    targets = torch.randint(1009, (401, 1), generator=generator).repeat_interleave(2, 0)
    found = []
    for num_threads, num_rows in ((1, 802), (5, 802), (64, 802), (5, 4)):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=num_threads: number)
        parts = []
        for rows, target in zip(logits.clone().split(num_rows), targets.split(num_rows), strict=True):
            arguments = (rows, target, torch.float32, 0.1, True)
            parts.append(loss.read_logit_pairs(*arguments, alpha) if alpha else loss.read_logits(*arguments))
        found.append([torch.cat(part) for part in zip(*parts, strict=True)])
    for results in found[1:]:
        assert all(torch.equal(own, first) for own, first in zip(results, found[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", [0.0, 2.0])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("column", [0, 20])
def test_a_logit_that_is_not_finite_reaches_loss_and_gradient(
    dtype: torch.dtype, alpha: float, value: float, column: int, loss: CompiledLoss
) -> None:
    """So that the step is skipped. Also in the last vector of a row, which is not full."""
    logits = torch.zeros(4, 21, dtype=dtype)
    logits[2, column] = value
    target = torch.zeros(4, 1, dtype=torch.int64)
    arguments = (logits, target, torch.float32, 0.1, True)
    if alpha:
        *results, gradient = loss.read_logit_pairs(*arguments, alpha)
        assert results[3].isfinite().flatten().tolist() == [True, False]
    else:
        *results, gradient = loss.read_logits(*arguments)
    assert gradient is not None
    assert results[2].isfinite().flatten().tolist() == [True, True, False, True]
    assert gradient[:2].isfinite().all()
    assert not gradient[2].isfinite().any()


def test_copies_and_pickles(attention: CompiledAttention, loss: CompiledLoss) -> None:
    tensors = inputs(HEADS, CROSS, "cross", torch.float32)
    wanted = results(attention, tensors, CROSS, "cross")
    for duplicate in (copy.deepcopy, lambda program: pickle.loads(pickle.dumps(program))):  # noqa: S301
        assert torch.equal(results(duplicate(attention), tensors, CROSS, "cross")[0], wanted[0])
        largest, *_ = duplicate(loss).read_logits(torch.ones(1, 3), torch.zeros(1, 1).long(), torch.float32, 0.1, False)
        assert largest.item() == 1.0


@pytest.mark.parametrize("target", [-1, 3, 1 << 40])
def test_a_target_that_is_no_class_is_refused(target: int, loss: CompiledLoss) -> None:
    with pytest.raises(IndexError, match=r"a target is not in 0 \.\. 2"):
        loss.read_logits(torch.zeros(2, 3), torch.tensor([[0], [target]]), torch.float32, 0.1, True)


def test_memory_that_is_not_there_is_reported(loss: CompiledLoss) -> None:
    logits = torch.empty(1, 1 << 60, device="meta")  # reserved for in float32 before any is read
    with pytest.raises(MemoryError, match="not enough memory for the loss"):
        loss.read_logits(logits, torch.zeros(1, 1).long(), torch.float32, 0.1, False)
