"""torch.compile in training gives the same results and checkpoints, with one graph for all batch shapes."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import model.loss
from data_module.batching.batch import MicroBatch, RankBatch, SpecialIds
from model.compilation import CompiledForward
from model.cpu.dropout import Dropout
from model.cpu.linear import Linear
from model.loss import label_smoothed_loss
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from model.transformer import Transformer
from model.translation_module import TranslationModule
from tests.model.test_loss import hold_rows

PAD, VOCABULARY = 0, 50
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SETTINGS = NetworkSettings(num_layers=1, d_model=16, d_ff=24, num_heads=2, dropout=0.0)
SHAPES = [
    (3, 7, 7),
    (5, 9, 7),
    (7, 7, 7),
    (2, 3, 2),
    (4, 2, 30),
    (30, 4, 4),
    (1, 9, 5),
    (4, 1, 6),
    (6, 5, 1),
    (1, 1, 1),
]
"""(B, S, T), including equal sizes and sizes of 1."""


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Start each test without compiled code."""
    torch.compiler.reset()
    model.loss._compiled_over_classes.cache_clear()
    yield
    torch.compiler.set_stance("default")
    torch.compiler.reset()


def share_of(shapes: list[tuple[int, int, int]], masked: bool) -> RankBatch:
    """Return random pairs. If `masked`, the last source of each micro-batch is one token shorter, where possible."""
    generator = torch.Generator().manual_seed(len(shapes))
    parts = []
    for pairs, source_length, target_length in shapes:
        source = torch.randint(3, VOCABULARY, (pairs, source_length), generator=generator)
        target = torch.randint(3, VOCABULARY, (pairs, target_length + 1), generator=generator)
        if masked and source_length > 1:
            source[-1, -1] = PAD
        if target_length > 1:
            target[-1, -1] = PAD
        parts += [torch.arange(pairs), source.flatten(), target.flatten()]
    return RankBatch(
        ids=torch.cat(parts).int(),
        shapes=shapes,
        pad=PAD,
        is_filler=False,
        num_target_tokens=100,
        epoch=0,
        index=0,
        num_batches=1,
        one_length=[not masked] * len(shapes),
    )


def batches(masked: bool) -> list[MicroBatch]:
    return share_of(SHAPES, masked).micro_batches


def network() -> Transformer:
    torch.manual_seed(3)
    return Transformer(VOCABULARY, SETTINGS).train()


def gradients(net: Transformer, states: Tensor, batch: MicroBatch) -> list[Tensor]:
    sums = label_smoothed_loss(states, net.embedding.weight, batch.target_output, 0.1, PAD)
    return list(torch.autograd.grad(sums.smoothed, list(net.parameters()), materialize_grads=True))


@pytest.mark.slow
def test_no_shape_compiles_anew_and_all_give_eager_gradients() -> None:
    net = network()
    forward = CompiledForward(net, backend="aot_eager")
    for masked in (False, True):
        first = batches(masked)[0]
        gradients(net, forward(first.source, first.target_input, first.source_mask), first)
    torch.compiler.set_stance("fail_on_recompile")
    for masked in (True, False):
        for batch in batches(masked):
            states = forward(batch.source, batch.target_input, batch.source_mask)
            eager = net(batch.source, batch.target_input, batch.source_mask)
            torch.testing.assert_close(states, eager)
            ours, theirs = gradients(net, states, batch), gradients(net, eager, batch)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class _Aligned(Transformer):
    """Reads its sizes as Inductor does on a GPU, so each combination needs a graph of its own."""

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor | None) -> Tensor:
        aligned = (source.size(1) % 8 == 0) + 2 * (target.size(1) % 8 == 0) + 4 * (target.numel() >= 100)
        return super().forward(source, target, source_mask) + aligned


@pytest.mark.slow
def test_more_graphs_than_pytorch_allows_by_default() -> None:
    torch.manual_seed(3)
    network = _Aligned(VOCABULARY, SETTINGS)
    forward = CompiledForward(network, backend="eager")
    shapes = [(pairs, source, target) for pairs in (2, 30) for source in (8, 9) for target in (8, 9)]
    for masked in (False, True):
        for batch in share_of(shapes, masked).micro_batches:
            arguments = batch.source, batch.target_input, batch.source_mask
            torch.testing.assert_close(forward(*arguments), network(*arguments))


@pytest.mark.parametrize(
    ("backend", "autocast", "cached_rows"),
    [
        ("eager", False, 6),
        *[
            pytest.param("inductor", *rest, marks=pytest.mark.slow)
            for rest in itertools.product([False, True], [6, 99])
        ],
    ],
)
def test_the_compiled_loss_equals_the_plain_one_in_chunks_of_any_size(
    backend: str, autocast: bool, cached_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend "eager" runs what the compiler has traced, without generating kernels."""
    if backend == "eager":
        traced = torch.compile(model.loss._over_classes, fullgraph=True, backend=backend)
        monkeypatch.setattr(model.loss, "_compiled_over_classes", lambda: traced)
    hold_rows(16, cached_rows, monkeypatch, VOCABULARY)
    torch.manual_seed(0)
    weight = torch.randn(VOCABULARY, 16).requires_grad_()

    def sums_and_gradients(states: Tensor, targets: Tensor, compiled: bool) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            sums = label_smoothed_loss(states, weight, targets, 0.1, PAD, compiled)
        return [*sums, *torch.autograd.grad(sums.smoothed, [states, weight])]

    tolerance = 1e-2 if autocast else 1e-5
    # The first size compiles and the others must not: chunks of 16 rows and 5 more rows; less than a chunk; chunks and
    # 1 more row, which is not compiled; exactly one chunk; 1 row.
    for number, rows in enumerate((6, 37, 7, 33, 16, 1)):
        if number == 1:
            torch.compiler.set_stance("fail_on_recompile")
        states = torch.randn(rows, 16).requires_grad_()
        targets = torch.randint(0, VOCABULARY, (rows,))  # padding among them
        ours, theirs = (sums_and_gradients(states, targets, compiled) for compiled in (True, False))
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def module(compiled: bool, dropout: float = 0.0) -> TranslationModule:
    torch.manual_seed(3)
    settings = NetworkSettings(**{**vars(SETTINGS), "dropout": dropout})
    special = SpecialIds(pad=PAD, bos=1, eos=2)
    return TranslationModule(
        VOCABULARY, special, settings, TrainingSettings(), DecodingSettings(), seed=1, compiled=compiled
    )


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_step_is_the_eager_one_and_validation_compiles_nothing(device: str) -> None:
    """As `fit` does, with Inductor and autocast to bfloat16."""
    ours, theirs = (module(compiled).to(device).train() for compiled in (True, False))

    def step(one: TranslationModule, batch: MicroBatch) -> list[Tensor]:
        with torch.autocast(device, torch.bfloat16):
            sums = one.losses(batch)
        sums.smoothed.backward()
        found = [parameter.grad for parameter in one.parameters()]
        one.zero_grad()
        return [torch.cat([gradient.flatten() for gradient in found if gradient is not None]), *sums]

    shapes = [*SHAPES, (3, 8, 7), (3, 7, 8), (3, 8, 8)]
    every = [batch for masked in (False, True) for batch in share_of(shapes, masked).to(device).micro_batches]
    kinds: dict[tuple[bool, ...], MicroBatch] = {}
    for batch in every:
        lengths = batch.source.size(1), batch.target_input.size(1)
        aligned = [device == "cuda" and length % 8 == 0 for length in lengths]
        kinds.setdefault((batch.source_mask is None, *aligned), batch)
    for number, batch in enumerate([*kinds.values(), *every]):
        if number == len(kinds):
            torch.compiler.set_stance("fail_on_recompile")
        (gradient, *sums), (expected, *expected_sums) = step(ours, batch), step(theirs, batch)
        assert (gradient - expected).norm() < 0.02 * expected.norm()
        torch.testing.assert_close(sums[:2], expected_sums[:2], rtol=0.01, atol=0.01)
    ours.eval(), theirs.eval()
    with torch.inference_mode():
        assert torch.equal(ours.losses(every[0]).smoothed, theirs.losses(every[0]).smoothed)


def test_training_alone_runs_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the compiled network and loss are counted; plain ones stand in for them."""
    calls: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: calls.append(name) or function(*arguments)

    monkeypatch.setattr(model.loss, "_compiled_over_classes", lambda: counted("loss", model.loss._over_classes))
    [batch] = share_of([(3, 7, 7)], masked=True).micro_batches
    for compiled in (True, False):
        made = module(compiled)
        assert (made.compiled_forward is not None) == compiled
        if compiled:
            made.compiled_forward = counted("network", made.network)
        found = [made.train(training).losses(batch) for training in (True, False)]
        torch.testing.assert_close(*found)
        assert calls == ["network", "loss"]  # from the training pass of the compiled module


def test_dropout_that_is_compiled_or_scripted_is_pytorchs() -> None:
    x = torch.ones(40, 50)
    for translate in (lambda module: torch.compile(module, backend="eager", fullgraph=True), torch.jit.script):
        torch.manual_seed(7)
        found = translate(Dropout(0.3))(x)
        torch.manual_seed(7)
        assert torch.equal(found, F.dropout(x, 0.3))


def test_a_compiled_linear_layer_is_one_product() -> None:
    """In bfloat16 too. Rows are padded for oneDNN only."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(Linear(24, 40), backend=keep, fullgraph=True)(torch.randn(5, 24))
    [graph] = graphs
    assert [node.target for node in graph.graph.nodes if node.op.startswith("call")] == [F.linear]


@pytest.mark.slow
def test_compiled_dropout_depends_on_the_seed_alone() -> None:
    one = module(compiled=True, dropout=0.3).train()
    batch = batches(masked=False)[0]
    torch.manual_seed(5)
    first = one.losses(batch).smoothed
    assert one.losses(batch).smoothed != first
    torch.rand(7)
    torch.manual_seed(5)
    assert one.losses(batch).smoothed == first


@pytest.mark.slow
def test_compiled_gradients_travel_while_others_are_computed(tmp_path: Path) -> None:
    """Under DDP the graph is split at its buckets. A single graph would return all gradients at its end."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        settings = NetworkSettings(num_layers=2, d_model=128, d_ff=512, num_heads=4, dropout=0.0)
        net = Transformer(VOCABULARY, settings)

        class Training(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net, self.compiled = net, CompiledForward(net, backend="aot_eager")

            def forward(self, batch: MicroBatch) -> Tensor:
                return self.compiled(batch.source, batch.target_input, batch.source_mask)

        parallel = DistributedDataParallel(Training(), gradient_as_bucket_view=True, bucket_cap_mb=1)
        order: list[str] = []

        def note_bucket(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            order.append("bucket")
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        parallel.register_comm_hook(None, note_bucket)
        last = net.encoder[0].self_attention.output.weight  # among the last gradients of the backward pass
        last.register_post_accumulate_grad_hook(lambda _: order.append("last gradients"))
        kinds = [batches(masked)[0] for masked in (False, True)] + batches(False)[1:6] + batches(True)[1:6]
        for number, batch in enumerate(kinds):
            if number == 2:  # both kinds are compiled, and DDP has built its buckets
                torch.compiler.set_stance("fail_on_recompile")
            order.clear()
            parallel.zero_grad()
            parallel(batch).square().sum().backward()
            if number >= 2:
                assert order.index("last gradients") >= 2
            expected = net(batch.source, batch.target_input, batch.source_mask).square().sum()
            parameters = dict(net.named_parameters())
            found = {name: parameter.grad for name, parameter in parameters.items()}
            eager = dict(zip(parameters, torch.autograd.grad(expected, list(parameters.values())), strict=True))
            torch.testing.assert_close(found, eager, rtol=1e-3, atol=1e-3)
    finally:
        dist.destroy_process_group()


def test_compiled_or_not_the_checkpoint_is_the_same() -> None:
    """Parameter names, TorchScript, and loading in both directions."""
    ours, theirs = module(compiled=True), module(compiled=False)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    batch = batches(masked=True)[0]
    arguments = batch.source.long(), batch.target_input.long(), batch.source_mask
    scripted = torch.jit.script(ours.network.eval())
    torch.testing.assert_close(scripted(*arguments), theirs.network.eval()(*arguments))
