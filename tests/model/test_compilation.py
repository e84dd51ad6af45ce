"""torch.compile in training gives the same results and checkpoints, with one graph for all micro-batches."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import model.packed_attention
from data_module.batch import PackedBatch
from model.backend import Backend
from model.dropout import Dropout
from model.fast.compilation import CompiledForward, chunk_terms, compiled_chunk_terms
from model.packed_attention import FLASH_ATTENTION
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from model.training_module import TranslationModule
from model.transformer import PaddedTransformer, Transformer
from tests.model.sentence_batches import (
    PAD,
    SPECIAL,
    VOCABULARY,
    Lengths,
    arguments,
    masked_attention,
    packed,
    padded,
    row_shape,
)

SETTINGS = NetworkSettings(num_layers=1, d_model=16, d_ff=24, num_heads=2, dropout=0.0)


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start each test without compiled code, and with an attention that can be compiled without a GPU."""
    monkeypatch.setattr(model.packed_attention, "_flash", masked_attention)
    torch.compiler.reset()
    yield
    torch.compiler.set_stance("default")
    torch.compiler.reset()


def micro_batches() -> list[PackedBatch]:
    """Return micro-batches of one shape, of different sentences, from steps of one to four; the last has none."""
    parts: list[Lengths] = [[(3 + number, 9), (9, 2 + number)] * (number + 1) for number in range(9)] + [[]]
    shape = row_shape(parts)
    steps = (parts[:1], parts[1:3], parts[3:6], parts[6:])
    return [batch for step in steps for batch in packed(step, shape=shape).micro_batches]


def network() -> Transformer:
    torch.manual_seed(3)
    return Transformer(VOCABULARY, SETTINGS).train()


class Graphs:
    """A compiler that runs what has been traced, and counts it."""

    count = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        self.count += 1
        return graph.forward


def test_constant_shapes_are_one_graph() -> None:
    """With eager states; `fast_paths.py` compares gradients."""
    net, graphs = network(), Graphs()
    forward = CompiledForward(net, backend=graphs)  # type: ignore[arg-type]
    for batch in micro_batches():
        live = (batch.target_output != PAD).unsqueeze(1)  # states of padding have no meaning
        given = arguments(batch, attention=FLASH_ATTENTION)
        torch.testing.assert_close(forward(*given) * live, net.rows(*given) * live)
    assert graphs.count == 1


def module(compiled: bool, dropout: float = 0.0) -> TranslationModule:
    torch.manual_seed(3)
    settings = replace(SETTINGS, dropout=dropout)
    parts = {"compiled": CompiledForward, "chunk_terms": compiled_chunk_terms()} if compiled else {}
    backend = Backend(attention=FLASH_ATTENTION, **parts)
    return TranslationModule(VOCABULARY, SPECIAL, settings, TrainingSettings(), DecodingSettings(), 1, backend)


@pytest.mark.slow
def test_a_compiled_step_is_the_eager_one_and_validation_compiles_nothing() -> None:
    """As `fit` does, with Inductor and autocast to bfloat16."""
    ours, theirs = (module(compiled).train() for compiled in (True, False))

    def step(one: TranslationModule, batch: PackedBatch) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            sums = one.losses(batch)
        sums.smoothed.backward()
        found = [parameter.grad for parameter in one.parameters()]
        one.zero_grad()
        return [torch.cat([gradient.flatten() for gradient in found if gradient is not None]), *sums]

    for number, batch in enumerate(micro_batches()):
        if number == 1:
            torch.compiler.set_stance("fail_on_recompile")
        (gradient, *sums), (expected, *expected_sums) = step(ours, batch), step(theirs, batch)
        assert (gradient - expected).norm() <= 0.02 * expected.norm()
        torch.testing.assert_close(sums[:2], expected_sums[:2], rtol=0.01, atol=0.01)
    ours.eval(), theirs.eval()
    batch = padded([(5, 4), (7, 9)])
    with torch.inference_mode():
        assert torch.equal(ours.losses(batch).smoothed, theirs.losses(batch).smoothed)


def test_training_alone_runs_compiled_code() -> None:
    """Calls of the compiled network and of the compiled loss are counted; the plain ones stand in for them."""
    calls: list[tuple[object, ...]] = []
    lengths = [(7, 7), (7, 6), (6, 7)]
    [batch] = packed([lengths]).micro_batches
    for compiled in (True, False):
        made = module(compiled)
        assert (made.compiled_forward is not None) == compiled
        if compiled:
            plain = made.network.rows
            made.compiled_forward = lambda *given, plain=plain: calls.append(given) or plain(*given)
            terms = lambda *given: calls.append(given) or chunk_terms(*given)  # noqa: E731
            made.backend = replace(made.backend, chunk_terms=terms)
        trained = made.train().losses(batch)
        with torch.no_grad():
            torch.testing.assert_close(trained, made.eval().losses(padded(lengths)))
        assert len(calls) == 2  # both from the training pass of the compiled module


def test_dropout_that_is_compiled_or_scripted_is_pytorchs() -> None:
    x = torch.ones(40, 50)
    for translate in (lambda module: torch.compile(module, backend="eager", fullgraph=True), torch.jit.script):
        torch.manual_seed(7)
        found = translate(Dropout(0.3))(x)
        torch.manual_seed(7)
        assert torch.equal(found, F.dropout(x, 0.3))


@pytest.mark.slow
def test_compiled_dropout_depends_on_the_seed_alone() -> None:
    one = module(compiled=True, dropout=0.3).train()
    batch = micro_batches()[3]
    torch.manual_seed(5)
    first = one.losses(batch).smoothed
    assert one.losses(batch).smoothed != first
    torch.rand(7)
    torch.manual_seed(5)
    assert one.losses(batch).smoothed == first


def test_compiled_or_not_the_checkpoint_is_the_same() -> None:
    """Parameter names, TorchScript, and loading in both directions."""
    ours, theirs = module(compiled=True), module(compiled=False)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    batch = padded([(7, 7), (6, 5)])
    inputs = batch.source.long(), batch.target_input.long(), batch.source_mask
    mine, other = (PaddedTransformer(one.network).eval() for one in (ours, theirs))
    torch.testing.assert_close(torch.jit.script(mine)(*inputs), other(*inputs))
