"""The compiled loss beside its row in `fast_paths.py`: rounding, threads, logits that are not finite, mistakes."""

import copy
import pickle

import pytest
import torch

from model.fast.compiled_loss import CompiledLoss
from pipeline.runtime.backend import load_compiled_loss


@pytest.fixture(scope="module")
def compiled() -> CompiledLoss:
    return load_compiled_loss()


@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_gradients_in_bfloat16_are_rounded_to_nearest(alpha: float, compiled: CompiledLoss) -> None:
    """The exact gradient of the same logits is in float32."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, 77, generator=generator).bfloat16()
    target = torch.randint(77, (20, 1), generator=generator).repeat_interleave(2, 0)
    found, exact = (
        (compiled.read_logit_pairs(*arguments, alpha) if alpha else compiled.read_logits(*arguments))[-1].double()
        for arguments in ((one, target, torch.float32, 0.1, True) for one in (logits.clone(), logits.float()))
    )
    # Half a unit in the last place of bfloat16 is at most 2^-8 of a number; float32 is off by far less.
    assert ((found - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_results_depend_on_neither_threads_nor_other_rows(
    alpha: float, compiled: CompiledLoss, monkeypatch: pytest.MonkeyPatch
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
            parts.append(compiled.read_logit_pairs(*arguments, alpha) if alpha else compiled.read_logits(*arguments))
        found.append([torch.cat(part) for part in zip(*parts, strict=True)])
    for results in found[1:]:
        assert all(torch.equal(own, first) for own, first in zip(results, found[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", [0.0, 2.0])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("column", [0, 20])
def test_a_logit_that_is_not_finite_reaches_loss_and_gradient(
    dtype: torch.dtype, alpha: float, value: float, column: int, compiled: CompiledLoss
) -> None:
    """So that the step is skipped. Also in the last vector of a row, which is not full."""
    logits = torch.zeros(4, 21, dtype=dtype)
    logits[2, column] = value
    target = torch.zeros(4, 1, dtype=torch.int64)
    arguments = (logits, target, torch.float32, 0.1, True)
    if alpha:
        *results, gradient = compiled.read_logit_pairs(*arguments, alpha)
        assert results[3].isfinite().flatten().tolist() == [True, False]
    else:
        *results, gradient = compiled.read_logits(*arguments)
    assert gradient is not None
    assert results[2].isfinite().flatten().tolist() == [True, True, False, True]
    assert gradient[:2].isfinite().all()
    assert not gradient[2].isfinite().any()


def test_copies_and_pickles(compiled: CompiledLoss) -> None:
    for other in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):  # noqa: S301
        largest, *_ = other.read_logits(torch.ones(1, 3), torch.zeros(1, 1).long(), torch.float32, 0.1, False)
        assert largest.item() == 1.0


@pytest.mark.parametrize("target", [-1, 3, 1 << 40])
def test_a_target_that_is_no_class_is_refused(target: int, compiled: CompiledLoss) -> None:
    with pytest.raises(IndexError, match=r"a target is not in 0 \.\. 2"):
        compiled.read_logits(torch.zeros(2, 3), torch.tensor([[0], [target]]), torch.float32, 0.1, True)


def test_memory_that_is_not_there_is_reported(compiled: CompiledLoss) -> None:
    logits = torch.empty(1, 1 << 60, device="meta")  # reserved for in float32 before any is read
    with pytest.raises(MemoryError, match="not enough memory for the loss"):
        compiled.read_logits(logits, torch.zeros(1, 1).long(), torch.float32, 0.1, False)
