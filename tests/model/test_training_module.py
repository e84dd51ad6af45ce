"""Training steps and validation in short runs of Lightning's Trainer, against plain PyTorch."""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import model.training_module
from data_module.batch import PackedBatch, PaddedBatch, RankBatch, SpecialIds
from data_module.system.files import PlainValues
from model.backend import Backend
from model.decoding import BeamSearch
from model.loss import label_smoothed_loss
from model.optimization import OPTIMIZERS, SCHEDULES
from model.packed_attention import RowAttention, RowSentences
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from model.training_module import StepOutputs, TranslationModule
from model.transformer import PaddedTransformer, Transformer
from tests.conftest import ALONE
from tests.model.sentence_batches import PAD, SPECIAL, VOCABULARY, Lengths, packed, padded

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]
# With a large epsilon, Adam's update depends on the scale of the gradient.
TRAINING = TrainingSettings(
    label_smoothing=0.2,
    warmup_steps=2,
    learning_rate_factor=0.5,
    adam_beta1=0.8,
    adam_beta2=0.95,
    adam_epsilon=0.01,
)
# 0.5 * 16^-0.5 * min(step^-0.5, step * 2^-1.5): two warm-up steps, then decay.
RATES = [0.0441942, 0.0883883, 0.0721688, 0.0625]


def make_steps(count: int) -> list[list[Lengths]]:
    """Return the sentences of several different micro-batches of each step."""
    last: Lengths = [(4, 8), (1, 3), (5, 1)] * 4
    return [[[(3 + step, 9), (9, 2)] * 10, [(9, 7)] * 15 + [(70, 30)], last] for step in range(count)]


def make_shares(count: int, num_target_tokens: int = 300) -> list[RankBatch]:
    """Return one rank's packed micro-batches of these steps. The other target tokens are those of other ranks."""
    return [packed(step, num_target_tokens=num_target_tokens) for step in make_steps(count)]


def make_module(
    training: TrainingSettings = TRAINING, dropout: float = 0.0, seed: int = 1, scale_loss: bool = False
) -> TranslationModule:
    torch.manual_seed(3)
    network = NetworkSettings(num_layers=1, d_model=16, d_ff=24, num_heads=2, dropout=dropout)
    return TranslationModule(
        VOCABULARY,
        SPECIAL,
        network,
        training,
        DecodingSettings(max_extra_tokens=3),
        seed,
        Backend(precision="16-mixed" if scale_loss else "32-true"),
    )


class Step(NamedTuple):
    output: StepOutputs
    weights: Tensor


class Recorder(Callback):
    def __init__(self) -> None:
        self.steps: list[Step] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: StepOutputs, *_: object
    ) -> None:
        self.steps.append(Step(dict(outputs), parameters_to_vector(pl_module.parameters()).detach()))


def make_trainer(rank: int = 0, num_ranks: int = 1, **options: object) -> Trainer:
    """Return the trainer of one rank, which does not exchange gradients with others."""
    strategy = SingleDeviceStrategy("cpu")
    strategy.global_rank, strategy.world_size = rank, num_ranks
    return Trainer(
        accelerator="cpu",
        strategy=strategy,
        **ALONE,
        **options,
    )


def fit(
    module: TranslationModule,
    shares: list[RankBatch],
    rank: int = 0,
    num_ranks: int = 1,
    callbacks: Iterable[Callback] = (),
    **options: object,
) -> list[Step]:
    recorder = Recorder()
    trainer = make_trainer(rank, num_ranks, max_steps=len(shares), callbacks=[*callbacks, recorder], **options)
    trainer.fit(module, DataLoader(shares, batch_size=None))
    return recorder.steps


def fit_with_an_infinite_gradient(module: TranslationModule) -> list[Step]:
    """Train, where one element of one parameter's gradient is infinite in the second step."""
    parameter = module.network.embedding.weight
    infinite = torch.zeros_like(parameter)
    infinite[0, 0] = math.inf
    parameter.register_hook(lambda gradient: gradient + infinite if module.global_step == 1 else gradient)
    return fit(module, make_shares(len(RATES)))


def assert_same_weights(found: list[Step], expected: list[Step]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.weights, theirs.weights, rtol=0, atol=1e-5)


def sums_of(network: Transformer, batch: PaddedBatch, label_smoothing: float) -> tuple[Tensor, Tensor, int]:
    """Return label-smoothed loss, negative log-likelihood and number of correct predictions over the target tokens."""
    states = PaddedTransformer(network)(batch.source, batch.target_input, batch.source_mask)
    logits, targets = network.logits(states).flatten(0, 1), batch.target_output.flatten().long()
    smoothed = cross_entropy(logits, targets, ignore_index=PAD, reduction="sum", label_smoothing=label_smoothing)
    nll = cross_entropy(logits.detach(), targets, ignore_index=PAD, reduction="sum")
    return smoothed, nll, int(((logits.argmax(-1) == targets) & (targets != PAD)).sum())


def train_plainly(
    network: Transformer,
    num_target_tokens: int,
    clip_norm: float | None = None,
    skipped_step: int | None = None,
    weight_decay: float = 0.0,
) -> list[Step]:
    """Train on the sentences of all steps in a plain loop, on padded batches, with learning rates computed by hand."""
    network, steps = copy.deepcopy(network).train(), []
    optimizer = torch.optim.Adam(network.parameters(), betas=(0.8, 0.95), eps=0.01)
    for number, (rate, step) in enumerate(zip(RATES, make_steps(len(RATES)), strict=True), start=1):
        sums = [sums_of(network, padded(lengths), label_smoothing=0.2) for lengths in step]
        smoothed, nll, correct = map(list, zip(*sums, strict=True))
        assert sum(correct[:-1]) > 0  # so the last micro-batch alone gives another sum
        optimizer.zero_grad()
        (sum(smoothed) / num_target_tokens).backward()
        norm = clip_grad_norm_(network.parameters(), clip_norm if clip_norm is not None else math.inf)
        optimizer.param_groups[0]["lr"] = rate
        if number != skipped_step:
            for parameter in network.parameters():
                if parameter.ndim == 2:
                    parameter.data *= 1.0 - rate * weight_decay
            optimizer.step()
        output = {
            "smoothed": sum(smoothed).detach(),
            "negative_log_likelihood": sum(nll),
            "correct": sum(correct),
            "tokens": num_target_tokens,
            "gradient_norm": norm,
        }
        steps.append(Step(output, parameters_to_vector(network.parameters()).detach()))
    return steps


@pytest.mark.parametrize(("clip_norm", "scale_loss"), [(None, False), (0.2, False), (0.2, True), (100.0, True)])
def test_training_equals_a_plain_loop(clip_norm: float | None, scale_loss: bool) -> None:
    """Weights, sums, gradient norm and learning rate of each step, with a scale_loss loss and without."""
    module = make_module(replace(TRAINING, gradient_clip_norm=clip_norm), scale_loss=scale_loss)
    shares = make_shares(len(RATES))
    expected = train_plainly(module.network, 300, clip_norm)
    torch.backends.cuda.enable_cudnn_sdp(True)
    found = fit(module, shares)
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # cuDNN would plan for every batch shape
    if clip_norm == 0.2:
        assert all(step.output["gradient_norm"] > 1.5 * clip_norm for step in expected)
    for ours, theirs, rate in zip(found, expected, RATES, strict=True):
        assert ours.output["learning_rate"] == pytest.approx(rate, rel=1e-5)
        for name, value in theirs.output.items():
            assert float(ours.output[name]) == pytest.approx(float(value), rel=1e-4), name
        torch.testing.assert_close(ours.weights, theirs.weights, rtol=0, atol=1e-5)


def plain_adam(parameters: Iterable[nn.Parameter], settings: TrainingSettings) -> torch.optim.Optimizer:
    """Return Adam, not fused, for two groups of parameters."""
    matrices, vectors = [], []
    for parameter in parameters:
        (matrices if parameter.dim() == 2 else vectors).append(parameter)
    return torch.optim.Adam([{"params": matrices}, {"params": vectors}], betas=(0.8, 0.95), eps=0.01)


def listed(settings: TrainingSettings, d_model: int, max_steps: int) -> Callable[[int], float]:
    assert max_steps == len(RATES)
    return lambda step: RATES[step - 1]


@pytest.mark.parametrize(
    ("scale_loss", "changes"),
    [
        (False, {}),
        *((scale_loss, {"weight_decay": 0.5}) for scale_loss in (False, True)),
        *((scale_loss, {"optimizer": "own", "schedule": "own", "warmup_steps": 9}) for scale_loss in (False, True)),
    ],
)
def test_a_step_without_a_finite_gradient_is_skipped(
    scale_loss: bool, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch and its learning rate are used up. Weights and moments do not change.

    Weight decay shrinks matrices by its share times the learning rate, apart from Adam's moments.
    """
    monkeypatch.setitem(OPTIMIZERS, "own", plain_adam)
    monkeypatch.setitem(SCHEDULES, "own", listed)
    weight_decay = changes.get("weight_decay", 0.0)
    module = make_module(replace(TRAINING, **changes), scale_loss=scale_loss)
    expected = train_plainly(module.network, 300, skipped_step=2, weight_decay=weight_decay)
    found = fit_with_an_infinite_gradient(module)
    assert_same_weights(found, expected)
    assert torch.equal(found[0].weights, found[1].weights)
    outputs = [step.output for step in found]
    assert [float(output["skipped"]) for output in outputs] == [0, 1, 1, 1]
    assert [float(output["skipped_in_a_row"]) for output in outputs] == [0, 1, 0, 0]
    assert [float(output["tokens"]) > 0 for output in outputs] == [True, False, True, True]
    assert [float(output["smoothed"]) > 0 for output in outputs] == [True, False, True, True]
    assert [output["learning_rate"] for output in outputs] == pytest.approx(RATES, rel=1e-5)
    checkpoint: PlainValues = {}
    module.on_save_checkpoint(checkpoint)
    resumed = make_module(scale_loss=scale_loss)
    resumed.on_load_checkpoint(checkpoint)
    again: PlainValues = {}
    resumed.on_save_checkpoint(again)
    assert again == checkpoint
    # The loss scale is halved, and two finite steps are counted since.
    expected_state = {"skipped_steps": [1, 0]} | ({"loss_scale": [2.0**15, 2]} if scale_loss else {})
    assert checkpoint == expected_state


def test_r_drop() -> None:
    """Two passes over each micro-batch, with one generator's dropout; validation has one pass."""
    alpha = 4.0
    module = make_module(replace(TRAINING, r_drop_alpha=alpha), dropout=0.3)
    [batch, *_] = make_shares(1)[0].micro_batches
    torch.manual_seed(5)
    states = torch.stack([module.states(batch) for _ in range(2)])
    assert not torch.equal(*states)
    weight = module.network.embedding.weight
    # test_loss.py compares this with the plain formula.
    expected = label_smoothed_loss(states, weight, batch.target_output, 0.2, PAD, r_drop_alpha=alpha)
    single = label_smoothed_loss(module.eval().states(batch), weight, batch.target_output, 0.2, PAD)
    assert module.losses(batch).smoothed.item() == single.smoothed.item()
    torch.manual_seed(5)
    sums = module.train().losses(batch)
    assert sums.smoothed.item() == expected.smoothed.item()
    found = torch.autograd.grad(sums.smoothed, list(module.parameters()))
    torch.testing.assert_close(found, torch.autograd.grad(expected.smoothed, list(module.parameters())))


def test_a_step_uses_the_dtype_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dtype decides which kernels are used."""
    module, found = make_module(), []
    plain, [batch, *_] = model.training_module.packed_sentences, make_shares(1)[0].micro_batches

    def note(batch: PackedBatch, dtype: torch.dtype, attention: RowAttention) -> RowSentences:
        found.append(dtype)
        return plain(batch, dtype, attention)

    monkeypatch.setattr(model.training_module, "packed_sentences", note)
    with torch.autocast("cpu", torch.bfloat16):
        module.losses(batch)
    module.losses(batch)
    assert found == [torch.bfloat16, torch.float32]


def test_one_micro_batch_equals_many_and_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks take the mean of their gradients. With plain gradient descent it is the mean of their steps."""

    def sgd(parameters: Iterable[nn.Parameter], settings: TrainingSettings) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters)

    monkeypatch.setitem(OPTIMIZERS, "sgd", sgd)
    [parts] = make_steps(1)
    initial = parameters_to_vector(make_module().parameters()).detach()

    def step(micro_batches: list[Lengths], num_ranks: int = 1) -> Tensor:
        module, share = make_module(replace(TRAINING, optimizer="sgd")), packed(micro_batches, num_target_tokens=300)
        assert len(share.micro_batches) == len(micro_batches)
        return fit(module, [share], num_ranks=num_ranks)[0].weights - initial

    whole = step([[pair for part in parts for pair in part]])
    assert whole.norm() > 0.01
    of_ranks = torch.stack([step([part], num_ranks=4) for part in (*parts, [])]).mean(0)
    for found in (step(parts), of_ranks):
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_of_another_precision_has_no_loss_scale() -> None:
    module, checkpoint = make_module(scale_loss=True), {}
    module.on_load_checkpoint({"skipped_steps": [2, 1]})
    module.on_save_checkpoint(checkpoint)
    assert checkpoint == {"skipped_steps": [2, 1], "loss_scale": [2.0**16, 0]}


def test_dropout_differs_between_ranks_steps_and_micro_batches() -> None:
    """Weights and micro-batches are the same in each step, so only dropout can make a difference."""
    shares = [packed([[(5, 6), (5, 6)]] * 3)] * 3
    [batch, *others] = shares[0].micro_batches
    assert all(torch.equal(batch.source, other.source) for other in others)

    def run(rank: int, seed: int = 1) -> list[float]:
        """Return the sum of the decoder's absolute states for each micro-batch of each step."""
        module, sums = make_module(replace(TRAINING, learning_rate_factor=0.0), dropout=0.5, seed=seed), []
        last = module.network.decoder_norm
        last.register_forward_hook(lambda *arguments: sums.append(float(arguments[2].detach().abs().sum())))
        last.register_forward_hook(lambda *_: seeds.append(torch.initial_seed()))
        torch.manual_seed(rank)
        fit(module, shares, rank, num_ranks=2)
        return sums

    seeds: list[int] = []
    first, second, other_seed = run(rank=0), run(rank=1), run(rank=0, seed=2)
    assert len(first) == 9
    assert len({*first, *second, *other_seed}) == 27
    # Later versions must resume a run with the same dropout.
    assert seeds[:2] == [7991332128289010059, 7098616414842519320]
    assert (len(seeds), sum(seeds)) == (27, 125924772086081002396)
    # Other random numbers have no influence.
    torch.manual_seed(9)
    assert run(rank=1) == second


def test_validation_gives_means_over_all_target_tokens_and_those_of_each_source() -> None:
    """The second source has two batches, the third one none."""
    module = make_module(dropout=0.5)
    parts: list[Lengths] = [[(7, 9)] * 19 + [(7, 8)], [(3, 4)] * 29 + [(2, 3)], [(9, 8)] * 9 + [(8, 7)]]
    batches = [
        replace(padded(lengths), pairs=torch.arange(first, first + len(lengths), dtype=torch.int32))
        for lengths, first in zip(parts, (40, 10, 0), strict=True)
    ]
    assert [batch.source_mask is None for batch in batches] == [True, False, False]
    network = copy.deepcopy(module.network).eval()
    with torch.no_grad():
        sums = [sums_of(network, batch, label_smoothing=0.2) for batch in batches]
    num_tokens = [20 * 9 - 1, 30 * 4 - 1, 10 * 8 - 1]  # in each batch one target is a token shorter

    def validate(first: int) -> dict[str, float]:
        [found] = make_trainer().validate(module, DataLoader(batches[first:], batch_size=None), verbose=False)
        return dict(found)

    expected = []
    for first in (0, 1):  # the second validation must not include the first
        smoothed, nll, correct = (float(sum(column)) for column in zip(*sums[first:], strict=True))
        total = sum(num_tokens[first:])
        assert correct > 0
        expected.append(
            {
                "validation/loss": smoothed / total,
                "validation/negative_log_likelihood": nll / total,
                "validation/perplexity": math.exp(nll / total),
                "validation/accuracy": correct / total,
                "step": 0,
            }
        )
        assert validate(first) == pytest.approx(expected[first], rel=1e-5)
    module.report_sources(["de", "fr", "it"], torch.tensor([1] * 40 + [0] * 20))
    for _ in range(2):
        of_sources = {
            f"validation/{name}/{source}": float(sum(one[number] for one in sums[part])) / sum(num_tokens[part])
            for number, name in enumerate(("loss", "negative_log_likelihood"))
            for source, part in (("de", slice(1)), ("fr", slice(1, 3)))
        }
        assert validate(0) == pytest.approx(expected[0] | of_sources, rel=1e-5)


class _Operations(TorchDispatchMode):
    """Counts how often each tensor is converted to another type, and names what the host waits for on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = Counter[int]()
        self.host_reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("to", "_to_copy"):
            self.casts[args[0].data_ptr()] += result.dtype != args[0].dtype
        elif name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2"):
            self.host_reads.append(name)
        return result


def test_a_step_casts_each_weight_once_and_reads_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step's gradients are those of its weights, not of the casts of the first step."""
    share, num_micro_batches = packed([[(5, 6), (4, 3)] * 4] * 3, num_target_tokens=300), 3
    take_step, training_step = model.training_module.take_step, TranslationModule.training_step
    rounded: list[bool] = []
    """Whether autocast would round products of each backward pass."""

    def gradients_of_two_steps(casts: int) -> list[Tensor]:
        """Return each step's gradients, and check how often each weight is cast."""
        module = make_module(scale_loss=True)
        linears = [part for part in module.network.modules() if isinstance(part, nn.Linear)]
        gradients: list[Tensor] = []
        linears[0].weight.register_hook(lambda _: rounded.append(torch.is_autocast_enabled("cpu")))

        def noted(*arguments: object) -> None:
            gradients.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))
            take_step(*arguments)

        def watched(*arguments: object) -> StepOutputs:
            with _Operations() as operations:
                output = training_step(module, *arguments)
            assert operations.host_reads == []
            assert {operations.casts[linear.weight.data_ptr()] for linear in linears} == {casts}
            return output

        monkeypatch.setattr("model.training_module.take_step", noted)
        vars(module)["training_step"] = watched
        # As Lightning's context around a step, but around both of them.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            fit(module, [share] * 2)
        return gradients

    found = gradients_of_two_steps(casts=1)
    assert (found[1] - found[0]).norm() > 0.1 * found[0].norm()
    monkeypatch.setattr("model.training_module.weights_cast_once", lambda _: nullcontext())
    torch.testing.assert_close(found, gradients_of_two_steps(casts=num_micro_batches), rtol=1e-5, atol=1e-5)
    assert rounded == [False] * 4 * num_micro_batches


def test_validation_casts_weights_once_a_batch() -> None:
    """Not for every token of the search."""
    module = make_module().eval()
    module.on_validation_epoch_start()
    layer = module.network.decoder[0]
    linears = [layer.self_attention.query_key_value, layer.cross_attention.query, layer.feed_forward.inner]
    for _ in range(2):
        # As Lightning's context around a step.
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False), _Operations() as seen:
            _, tokens, _ = module.validation_step(padded([(5, 6), (4, 3)]), 0)
        assert tokens.size(1) > 2
        # Once for the loss, and once for the search.
        assert [seen.casts[linear.weight.data_ptr()] for linear in linears] == [2, 2, 2]


def test_a_batch_that_is_not_translated_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens count in the loss all the same."""
    module = make_module().eval()
    monkeypatch.setattr(BeamSearch, "greedy", None)
    module.on_validation_epoch_start()
    with torch.no_grad():
        assert module.validation_step(replace(padded([(5, 6), (4, 3)]), is_translated=False), 0) is None
    assert module.validation.sums[3].item() == 6 + 3


def test_validation_answers_are_those_of_greedy_search() -> None:
    """The last sentence has a shorter source."""
    module = make_module().eval()
    # Padding is not F.pad's default, 0.
    special = module.special = SpecialIds(pad=1, bos=0, eos=2)
    indices = torch.arange(131, 100, -1)  # the pairs' indices in the corpus
    batch = replace(padded([(3, 4)] * 30 + [(2, 3)], special), pairs=indices)
    module.on_validation_epoch_start()
    # Sums over more tokens than float32 can count.
    module.validation.sums += 2**30 + 1
    with torch.no_grad():
        pairs, tokens, lengths = module.validation_step(batch, 0)
    assert module.validation.sums[3].item() == 2**30 + 1 + 31 * 4 - 1
    assert pairs.tolist() == list(range(131, 100, -1))
    source = batch.source.long()
    search = BeamSearch(module.network, special.bos, special.eos, special.pad).eval()
    expected = [*search.greedy(source[:-1], None, 3).tokens, *search.greedy(source[-1:, :-1], None, 3).tokens]
    for row, length, answer in zip(tokens.tolist(), lengths.tolist(), expected, strict=True):
        assert row[:length] == answer[:length].tolist()
        assert 2 not in row[: length - 1]
        assert row[length - 1] == 2
        assert set(row[length:]) <= {special.pad}
    assert len(set(lengths.tolist())) > 1
