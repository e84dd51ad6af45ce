"""The Triton kernels in Triton's interpreter, on the CPU. `test_kernels.py` runs this file in a process of its own.

TRITON_INTERPRET=1 must be set before Triton is imported, and holds for the whole process.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch.library import opcheck
from triton.runtime.jit import JITFunction

import model.loss
from model.fast import triton_attention, triton_check
from model.fast.triton_attention import TRITON_ATTENTION, segment_attention, segment_attention_backward
from model.fast.triton_check import failure
from model.fast.triton_loss import TRITON_LOSS
from model.loss import label_smoothed_loss
from model.settings import NetworkSettings
from model.transformer import Transformer
from tests.model.fast_paths import cases
from tests.model.kernel_cases import (
    CROSS,
    EDGES,
    KINDS,
    Heads,
    Sentences,
    check_attention,
    check_dropout,
    check_logits_that_are_not_finite,
    dropout_state,
    inputs,
    kept_weights,
    philox,
    run,
    segments,
)
from tests.model.loss_truth import problem, two_passes
from tests.model.sentence_batches import VOCABULARY, losses_and_gradient, packed, padded

# NumPy, which Triton's interpreter computes with, warns of -inf - -inf and the like.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton 3.6
    pytest.mark.usefixtures("uninitialized_memory_is_nan"),
]


def test_kernels_are_interpreted() -> None:
    assert not isinstance(triton_attention._forward, JITFunction)


@pytest.mark.parametrize(("check", "case"), cases("triton"))
def test_equals_the_plain_function(check: Callable[..., None], case: tuple[object, ...]) -> None:
    check("cpu", *case)


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_beside_the_sizes_of_tiles(kind: str) -> None:
    """Tiles of 16-bit numbers are the larger ones."""
    check_attention(Heads(1, 16, 16), EDGES, kind, torch.float16, "cpu")


@pytest.mark.parametrize(("kind", "dtype"), [("cross", torch.float32), ("causal", torch.float16)], ids=str)
def test_dropout(kind: str, dtype: torch.dtype) -> None:
    check_dropout(kind, dtype, "cpu")


def test_weights_are_kept_at_random() -> None:
    """By the authors' own numbers for Philox with 7 rounds; and other seeds, steps and heads keep others."""
    zero = np.zeros((), np.uint64)
    assert [int(x) for x in philox(0, [zero] * 4)] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    masks = [kept_weights(0.3, *state, 2, 100, 100) for state in ((5, 7), (6, 7), (5, 8), (5 + 2**32, 7))]
    several = [head for mask in masks for head in mask]
    for number, mask in enumerate(several):
        assert float(mask.double().mean()) == pytest.approx(0.7, abs=0.02)
        for other in several[:number]:
            # Two independent masks differ in 2 p (1 - p) of the weights.
            assert float((mask != other).double().mean()) == pytest.approx(0.42, abs=0.02)
        for shift in (1, 8):
            for one, other in ((mask[shift:], mask[:-shift]), (mask[:, shift:], mask[:, :-shift])):
                assert float((one != other).double().mean()) == pytest.approx(0.42, abs=0.02)


def test_inputs_and_gradients_of_any_strides() -> None:
    """A sum has a gradient of stride 0."""
    heads, kind = Heads(2, 8, 12), "cross"
    tensors = [x.detach() for x in inputs(heads, CROSS, kind, torch.float32, "cpu")]
    plain = [x.clone().requires_grad_() for x in tensors]
    strided = [x.t().contiguous().t().requires_grad_() for x in tensors]
    assert not strided[0].is_contiguous()
    results = [run(one, heads, CROSS, kind)[0] for one in (plain, strided)]
    assert torch.equal(*results)
    gradients = [torch.autograd.grad(result.sum(), one) for result, one in zip(results, (plain, strided), strict=True)]
    ones = torch.autograd.grad(run(plain, heads, CROSS, kind)[0], plain, torch.ones_like(results[0]))
    for one, other, wanted in zip(*gradients, ones, strict=True):
        assert torch.equal(one, wanted)
        assert torch.equal(other, wanted)


@pytest.mark.parametrize("kind", ["causal", "cross"])
@pytest.mark.parametrize("with_dropout", [False, True])
def test_the_operators_are_what_they_tell_the_compiler(kind: str, with_dropout: bool) -> None:
    """Schema and autograd, by PyTorch's own check. Interpreted kernels cannot be traced."""
    checks = ("test_schema", "test_autograd_registration")
    heads, sentences = Heads(2, 8, 12), Sentences([5, 3], [4, 6])
    tensors = [x.detach().nan_to_num().requires_grad_() for x in inputs(heads, sentences, kind, torch.float32, "cpu")]
    state = dropout_state(0.5, 1, 2, "cpu") if with_dropout else None
    rest = segments(sentences, kind, "cpu"), state, heads.count, heads.d_k, kind == "causal"
    opcheck(segment_attention, (tensors, *rest), test_utils=checks)
    with torch.no_grad():
        results = list(segment_attention(tensors, *rest))
        opcheck(segment_attention_backward, (torch.ones_like(results[0]), results, tensors, *rest), test_utils=checks)


def test_the_network_is_that_of_padded_batches() -> None:
    """Loss and gradients; the last micro-batch has no sentence."""
    settings = NetworkSettings(num_layers=1, d_model=16, d_ff=24, num_heads=2, dropout=0.0, d_k=5, d_v=7, pre_norm=True)
    torch.manual_seed(3)
    network = Transformer(VOCABULARY, settings)
    lengths = [(7, 9), (20, 34), (3, 1)]
    [batch, empty] = packed([lengths, []]).micro_batches
    expected = losses_and_gradient(network, padded(lengths))
    for found, wanted in zip(losses_and_gradient(network, batch, TRITON_ATTENTION), expected, strict=True):
        assert (found - wanted).norm() < 1e-5 * wanted.norm()
    assert not any(one.any() for one in losses_and_gradient(network, empty, TRITON_ATTENTION))


def test_logits_that_are_not_finite() -> None:
    check_logits_that_are_not_finite("cpu")


@pytest.mark.parametrize("alpha", [0.0, 5.0])
def test_the_whole_loss_in_chunks_of_padded_rows(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 classes, which products pad to 64; 33 tokens, or twice as many with R-Drop, in chunks of 14."""
    monkeypatch.setattr(model.loss, "_CHUNK_LOGITS", 14 * 64)
    states, weight, targets = two_passes(torch.float32) if alpha else problem(torch.float32)
    chunks = []

    def noted(function: Callable[..., object], logits: torch.Tensor, *rest: object) -> object:
        chunks.append((*logits.shape, logits.stride(0)))
        return function(logits, *rest)

    functions = TRITON_LOSS._replace(
        read_logits=partial(noted, TRITON_LOSS.read_logits),
        read_logit_pairs=partial(noted, TRITON_LOSS.read_logit_pairs),
    )
    found = label_smoothed_loss(states, weight, targets, 0.1, 0, 0.25, functions, alpha)
    assert chunks == [(14, 50, 64)] * (4 if alpha else 2) + [(10 if alpha else 5, 50, 64)]
    exact = [x.detach().double().requires_grad_() for x in (states, weight)]
    expected = label_smoothed_loss(*exact, targets, 0.1, 0, 0.25, None, alpha)
    gradients = torch.autograd.grad(found.smoothed, [states, weight])
    for one, other in zip(found, expected, strict=True):
        assert one.item() == pytest.approx(other.item(), rel=1e-5)
    for one, other in zip(gradients, torch.autograd.grad(expected.smoothed, exact), strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


def test_the_check_before_training_accepts_the_kernels_and_names_those_that_are_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = partial(failure, torch.float32, 1, 8, 12, device="cpu")
    monkeypatch.setattr(triton_check, "_LENGTHS", [(1, 3), (7, 9)])  # enough to be wrong, and soon interpreted
    assert check() is None
    plain = triton_attention.segment_attention

    def wrong(*given: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Is wrong where it is causal."""
        result, log_sums = plain(*given)
        return result * (1.2 if given[-1] else 1.0), log_sums

    monkeypatch.setattr(triton_attention, "segment_attention", wrong)
    assert check() == "Triton's kernels give wrong results here, for causal self-attention"
    monkeypatch.setattr(triton_attention, "segment_attention", lambda *given: [plain(*given)[0] * float("nan")])
    assert "for self-attention, causal self-attention, cross-attention" in (check() or "")
