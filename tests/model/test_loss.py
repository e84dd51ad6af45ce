"""The fused loss against F.linear and F.cross_entropy, and against values computed by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import model.loss
from model.fast.compilation import chunk_terms
from model.loss import ChunkTerms, label_smoothed_loss, plain_loss
from tests.model.loss_truth import PAD, plain_r_drop, problem, two_passes


def hold_rows(chunk: int, cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set how many rows of logits the loss has in a chunk and in the CPU's cache. 0 means one row."""
    monkeypatch.setattr(model.loss, "_CHUNK_LOGITS", chunk * 56)
    monkeypatch.setattr(model.loss, "_CACHED_LOGITS", cached * 50 / torch.get_num_threads())


TERMS = pytest.mark.parametrize("terms", [None, chunk_terms])
"""PyTorch's operators, and the formula that GPUs compile."""


class Products(TorchFunctionMode):
    """Records the sizes of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[torch.Size] = []

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **options or {})
        if function.__name__.strip("_") in ("matmul", "rmatmul", "mm") and result.dim() == 2:
            self.sizes.append(result.shape)
        return result


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("scale", [None, 0.25, torch.tensor(3.0)])
@pytest.mark.parametrize(("chunk_rows", "cached_rows"), [(0, 99), (7, 99), (7, 2), (7, 0), (99, 5), (99, 99)])
@TERMS
def test_equals_linear_and_cross_entropy(
    epsilon: float,
    scale: float | torch.Tensor | None,
    chunk_rows: int,
    cached_rows: int,
    terms: ChunkTerms | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scale is that of the loss and the gradients; other sums are not scaled."""
    hold_rows(chunk_rows, cached_rows, monkeypatch)
    states, weight, targets = problem()
    sums = label_smoothed_loss(states, weight, targets, epsilon, PAD, scale=scale, chunk_terms=terms)
    factor, upstream = (1.0, 0.37) if scale is None else (float(scale), 1.0)
    assert [one.requires_grad for one in sums] == [True, False, False]
    gradients = torch.autograd.grad(sums.smoothed * upstream, [states, weight])
    logits = F.linear(states, weight).flatten(0, 1)
    options = {"ignore_index": PAD, "reduction": "sum"}
    expected = F.cross_entropy(logits, targets.flatten(), label_smoothing=epsilon, **options)
    expected_gradients = torch.autograd.grad(expected * factor * upstream, [states, weight], retain_graph=True)
    assert sums.smoothed.item() == pytest.approx(expected.item() * factor, rel=1e-12)
    assert plain_loss(states, weight, targets, epsilon, PAD).item() == pytest.approx(expected.item(), rel=1e-12)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    expected = F.cross_entropy(logits, targets.flatten(), **options)
    assert sums.negative_log_likelihood.item() == pytest.approx(expected.item(), rel=1e-12)
    # If two classes are the most probable, either is correct.
    correct = logits.gather(1, targets.view(-1, 1)).squeeze(1) == logits.amax(-1)
    assert correct[targets.flatten() == PAD].any()
    assert correct[12]
    assert sums.num_correct.item() == correct[targets.flatten() != PAD].sum().item() >= 2


@pytest.mark.parametrize(("epsilon", "alpha"), [(0.0, 1.0), (0.1, 5.0)])
@pytest.mark.parametrize("scale", [None, 0.25, torch.tensor(3.0, dtype=torch.float64)])
@pytest.mark.parametrize(("chunk_rows", "cached_rows"), [(0, 99), (14, 8), (14, 0), (198, 8), (198, 400)])
def test_r_drop_equals_the_plain_formula(
    epsilon: float,
    alpha: float,
    scale: float | torch.Tensor | None,
    chunk_rows: int,
    cached_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hold_rows(chunk_rows, cached_rows, monkeypatch)
    states, weight, targets = two_passes()
    with Products() as products:
        sums = label_smoothed_loss(states, weight, targets, epsilon, PAD, scale=scale, r_drop_alpha=alpha)
    assert max(rows for rows, columns in products.sizes if columns == 56) == min(max(2, chunk_rows), 66)
    factor = 1.0 if scale is None else scale
    gradients = torch.autograd.grad(sums.smoothed * (0.37 if scale is None else 1.0), [states, weight])
    expected = plain_r_drop(states, weight, targets, epsilon, alpha)
    expected_gradients = torch.autograd.grad(expected * (0.37 if scale is None else factor), [states, weight])
    assert sums.smoothed.item() == pytest.approx((expected * factor).item(), rel=1e-12)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)
    # The divergence weighs something, and the other sums are means of the two passes.
    assert expected.item() > 1.01 * plain_r_drop(states, weight, targets, epsilon, 0.0).item()
    singles = [label_smoothed_loss(one, weight, targets, epsilon, PAD) for one in states]
    for name in ("negative_log_likelihood", "num_correct"):
        mean = sum(float(getattr(one, name)) for one in singles) / 2
        assert float(getattr(sums, name)) == pytest.approx(mean, rel=1e-12)


def test_r_drop_without_gradients_is_the_same() -> None:
    states, weight, targets = two_passes()
    with torch.no_grad():
        sums = label_smoothed_loss(states, weight, targets, 0.1, PAD, r_drop_alpha=2.0)
    assert sums.smoothed.item() == pytest.approx(plain_r_drop(states, weight, targets, 0.1, 2.0).item(), rel=1e-12)


def test_r_drop_by_hand() -> None:
    """p = (0.8, 0.2) and q = (0.5, 0.5)."""
    states = torch.tensor([[[math.log(4.0)]], [[0.0]]], dtype=torch.float64)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    sums = label_smoothed_loss(states, weight, torch.tensor([0]), 0.0, ignored_id=-1, r_drop_alpha=3.0)
    forward = 0.8 * math.log(1.6) + 0.2 * math.log(0.4)
    backward = 0.5 * math.log(0.625) + 0.5 * math.log(2.5)
    entropy = -math.log(0.8) - math.log(0.5)
    assert float(sums.smoothed) == pytest.approx((entropy + 3.0 * (forward + backward) / 2) / 2, rel=1e-12)
    assert float(sums.num_correct) == 1.0  # A tie is correct.


@pytest.mark.parametrize(
    ("dtype", "alpha", "of_loss", "of_gradients"),
    [
        (torch.float32, 0.0, 1e-5, 1e-5),
        (torch.bfloat16, 0.0, 0.02, 0.02),
        (torch.bfloat16, 2.0, 0.01, 0.03),
        (torch.float16, 2.0, 0.01, 0.03),
    ],
)
@pytest.mark.parametrize("scale", [0.25, torch.tensor(3.0)])
@pytest.mark.parametrize("chunk_rows", [0, 7, 99])
@TERMS
def test_less_precision_stays_near_float64(
    dtype: torch.dtype,
    alpha: float,
    of_loss: float,
    of_gradients: float,
    scale: float | torch.Tensor,
    chunk_rows: int,
    terms: ChunkTerms | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By autocast, in one chunk and in several."""
    hold_rows(chunk_rows, 99, monkeypatch)
    states, weight, targets = (two_passes if alpha else problem)(torch.float32)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        found = label_smoothed_loss(states, weight, targets, 0.1, PAD, scale, alpha, terms)
    exact = [one.detach().double().requires_grad_() for one in (states, weight)]
    expected = label_smoothed_loss(*exact, targets, 0.1, PAD, scale=scale, r_drop_alpha=alpha)
    for name in ("smoothed", "negative_log_likelihood"):
        assert getattr(found, name).item() == pytest.approx(getattr(expected, name).item(), rel=of_loss)
    if dtype == torch.float32:  # 16 bits may round two classes to one
        assert found.num_correct.item() == expected.num_correct.item()
    gradients = torch.autograd.grad(found.smoothed, [states, weight])
    for ours, theirs in zip(gradients, torch.autograd.grad(expected.smoothed, exact), strict=True):
        assert (ours - theirs).norm() <= of_gradients * theirs.norm()


def test_sums_over_bfloat16_states_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight's gradient is also summed in float32, over chunks of one row."""
    states, weight, targets = (one.detach().repeat_interleave(8, 0) for one in problem(torch.float32))
    states, weight = states.bfloat16().requires_grad_(), weight[::8].bfloat16().requires_grad_()
    hold_rows(0, 0, monkeypatch)
    exact_inputs = [one.detach().double().requires_grad_() for one in (states, weight)]
    exact = label_smoothed_loss(*exact_inputs, targets, 0.1, PAD)
    low = label_smoothed_loss(states, weight, targets, 0.1, PAD)
    for found, expected in zip(low, exact, strict=True):
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(expected.item(), rel=0.003)
    gradients = torch.autograd.grad(low.smoothed, [states, weight])
    for found, expected in zip(gradients, torch.autograd.grad(exact.smoothed, exact_inputs), strict=True):
        assert found.dtype == torch.bfloat16
        assert (found - expected).norm() < 0.004 * expected.norm()


@TERMS
def test_probabilities_of_bfloat16_logits_are_float32(terms: ChunkTerms | None) -> None:
    states, weight = torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(50, 3, dtype=torch.bfloat16)
    sums = label_smoothed_loss(states.requires_grad_(), weight, torch.tensor([1, 2]), 0.1, PAD, chunk_terms=terms)
    assert sums.smoothed.item() == pytest.approx(2 * math.log(50), rel=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 2.0])
@pytest.mark.parametrize("value", [math.inf, math.nan])
@TERMS
def test_a_state_that_is_not_finite_reaches_loss_and_gradient(
    alpha: float, value: float, terms: ChunkTerms | None
) -> None:
    """So that the step is skipped."""
    states, weight, targets = (two_passes if alpha else problem)(torch.float32)
    with torch.no_grad():
        states.view(-1, 8)[0, 3] = value
    smoothed = label_smoothed_loss(states, weight, targets, 0.1, PAD, None, alpha, terms).smoothed
    assert not smoothed.isfinite()
    assert not any(one.isfinite().all() for one in torch.autograd.grad(smoothed, [states, weight]))


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@TERMS
def test_extreme_logits_stay_finite(alpha: float, terms: ChunkTerms | None) -> None:
    """Of two tokens, or of two passes over one."""
    states, weight = torch.tensor([[[1e4]], [[-1e4]]]), torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    states = (states if alpha else states[:, 0]).requires_grad_()
    targets = torch.tensor([1] if alpha else [1, 1])
    sums = label_smoothed_loss(states, weight, targets, 0.1, -1, None, alpha, terms)
    sums.smoothed.backward()
    assert all(one.isfinite().all() for one in (*sums, states.grad, weight.grad))
    if not alpha:
        # Row 0: class 0 exceeds the target by 2e4. Row 1: the target is the most probable class.
        assert sums.negative_log_likelihood.item() == pytest.approx(2e4, rel=1e-6)


def test_validation_pays_for_no_gradient() -> None:
    states, weight, targets = problem()
    expected = label_smoothed_loss(states, weight, targets, 0.1, PAD)
    for context in (torch.inference_mode(), torch.no_grad()):
        with context, Products() as products:
            sums = label_smoothed_loss(states, weight, targets, 0.1, PAD)
        assert products.sizes == [(33, 56)]  # the logits alone
        assert not sums.smoothed.requires_grad
        assert sums.smoothed.item() == expected.smoothed.item()


def test_the_gradient_of_one_input_alone() -> None:
    states, weight, targets = problem()
    both = torch.autograd.grad(label_smoothed_loss(states, weight, targets, 0.1, PAD).smoothed, [states, weight])
    of_states = label_smoothed_loss(states, weight.detach(), targets, 0.1, PAD).smoothed
    of_weight = label_smoothed_loss(states.detach(), weight, targets, 0.1, PAD).smoothed
    assert torch.equal(torch.autograd.grad(of_states, states)[0], both[0])
    assert torch.equal(torch.autograd.grad(of_weight, weight)[0], both[1])


GIGABYTE = 1 << 30


def chunk_tokens(
    tokens: int, pieces: int, device: str, dtype: torch.dtype, alpha: float, terms: ChunkTerms | None = None
) -> int:
    options = model.loss._Options(0.1, PAD, dtype, torch.float32, None, alpha, True, terms)
    found = model.loss._chunk_tokens(tokens, pieces, torch.device(device), options)
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize(
    ("tokens", "memory", "dtype", "alpha", "terms", "expected"),
    [
        # 1/64 is 1,342,177,280 bytes. With 6 bytes a logit, a row of 37,000 has 222,000: 6,045 fit, so five chunks.
        (25_000, 80 * GIGABYTE, torch.float16, 0.0, None, 5_120),
        # With 8 bytes a logit 4,534 rows fit: six chunks of 4,167 rows, and the next multiple of 128.
        (25_000, 80 * GIGABYTE, torch.float32, 0.0, None, 4_224),
        # With 10 bytes a logit 3,627 rows fit: seven chunks. With 2 bytes, in a compiled formula, 18,137: two chunks.
        (25_000, 80 * GIGABYTE, torch.bfloat16, 0.0, None, 3_584),
        (25_000, 80 * GIGABYTE, torch.bfloat16, 0.0, chunk_terms, 12_544),
        (6_045, 80 * GIGABYTE, torch.float16, 0.0, None, 6_144),
        (6_046, 80 * GIGABYTE, torch.float16, 0.0, None, 3_072),
        (10_000, 141 * GIGABYTE, torch.float16, 0.0, None, 10_112),
        (100, 80 * GIGABYTE, torch.bfloat16, 0.0, None, 128),
        # 10 rows fit, which is less than the smallest chunk.
        (25_000, GIGABYTE // 4, torch.bfloat16, 0.0, None, 128),
        # Two passes: with 14 bytes a logit 2,591 rows fit, so 20 chunks.
        (50_000, 80 * GIGABYTE, torch.bfloat16, 5.0, None, 2_560),
    ],
)
def test_rows_of_a_chunk_on_a_gpu_by_hand(
    tokens: int,
    memory: int,
    dtype: torch.dtype,
    alpha: float,
    terms: ChunkTerms | None,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For 37,000 pieces, on GPUs of several sizes."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory))
    assert chunk_tokens(tokens, 37_000, "cuda", dtype, alpha, terms) == expected


@pytest.mark.parametrize(
    ("pieces", "dtype", "alpha", "expected"),
    [
        # 16,777,216 logits; in float32 a fourth of them, but 512 rows if that many rows have so many logits.
        (8_000, torch.bfloat16, 0.0, 2_097),
        (8_000, torch.float32, 0.0, 524),
        (8_000, torch.float64, 0.0, 524),
        (10_000, torch.float32, 0.0, 512),
        (37_000, torch.float32, 0.0, 453),
        (37_000, torch.bfloat16, 2.0, 452),
        (10_000, torch.float32, 2.0, 512),
        (1 << 24, torch.float32, 2.0, 2),
        (1 << 25, torch.float32, 0.0, 1),
    ],
)
def test_rows_of_a_chunk_on_a_cpu_by_hand(pieces: int, dtype: torch.dtype, alpha: float, expected: int) -> None:
    assert chunk_tokens(50_000, pieces, "cpu", dtype, alpha) == expected
