"""The LSTM that `benchmark train --baseline lstm` compares with: its network, its batches, its size and its figures."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from lightning.pytorch import Trainer
from torch import Tensor, nn

from data_module.batching.batch import PaddedBatch, SpecialIds
from data_module.settings import BatchSettings
from data_module.tokenization.tokenizer import Tokenizer
from data_module.translation_data_module import TranslationDataModule
from model.decoding import BeamSearch
from model.loss import LossSums
from model.lr_schedule import build_schedule
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from model.transformer import Transformer
from pipeline.__main__ import main
from pipeline.benchmark import lstm
from pipeline.benchmark.equal_time import ValidationText, score
from pipeline.benchmark.lstm import LSTMNetwork, lstm_loop, lstm_of_size, padded_parts, token_states
from pipeline.benchmark.side_by_side import LoopStep
from pipeline.benchmark.train import benchmark_device, equal_time
from pipeline.config.recipe import load_recipe
from pipeline.config.trainer_keys import trainer_signature
from pipeline.inference.metrics import Bleu
from pipeline.profiling.stopwatch import Stopwatch
from pipeline.training.build import build_data, build_module, special_ids
from pipeline.training.kernels import choose_loss

SPECIAL = SpecialIds(pad=0, bos=1, eos=2)
PIECES, D_MODEL, WIDTH = 30, 12, 10
TWO_MINUTES = ["--minutes", "2", "--baseline", "lstm"]
SOURCE_LENGTHS, TARGET_LENGTHS = (7, 4, 1), (3, 6, 2)


def network(dropout: float = 0.0, width: int = WIDTH) -> LSTMNetwork:
    torch.manual_seed(3)
    return LSTMNetwork(PIECES, D_MODEL, width, dropout)


def sentences(lengths: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, PIECES, (length,), generator=generator) for length in lengths]


def padded(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=SPECIAL.pad)


def bidirectional(layer: lstm.BidirectionalLayer) -> nn.LSTM:
    """Return PyTorch's own bidirectional LSTM with the weights of a layer of ours."""
    weights = layer.state_dict()
    theirs = nn.LSTM(layer.forwards.input_size, WIDTH // 2, batch_first=True, bidirectional=True)
    theirs.load_state_dict(
        {key.removeprefix("forwards."): value for key, value in weights.items() if key.startswith("forwards.")}
        | {f"{key.removeprefix('backwards.')}_reverse": v for key, v in weights.items() if key.startswith("backwards.")}
    )
    return theirs


def states_of_one(ours: LSTMNetwork, source: Tensor, target: Tensor) -> Tensor:
    """Return the attentional states [T, D] of a sentence without padding, a token at a time."""
    x = ours.embedding.weight[source][None] * D_MODEL**0.5
    hidden = []
    for layer in ours.encoder:
        assert isinstance(layer, lstm.BidirectionalLayer)
        x, (last, _) = bidirectional(layer)(x)
        hidden.append(last.flatten(0))
    memory = x[0]
    cells = [nn.LSTMCell(D_MODEL if index == 0 else WIDTH, WIDTH) for index in range(lstm.LAYERS)]
    for index, cell in enumerate(cells):
        cell.load_state_dict({name: getattr(ours.decoder, f"{name}_l{index}") for name in cell.state_dict()})
    states = [(one, torch.zeros(WIDTH)) for one in hidden]
    results = []
    for token in target:
        y = ours.embedding.weight[token] * D_MODEL**0.5
        for index, cell in enumerate(cells):
            states[index] = cell(y, states[index])
            y = states[index][0]
        weights = torch.stack([y @ ours.score.weight.T @ position for position in memory]).softmax(0)
        context = sum(weight * position for weight, position in zip(weights, memory, strict=True))
        results.append(torch.tanh(ours.combine.weight @ torch.cat([context, y])))
    return torch.stack(results)


def test_states_are_those_of_each_sentence_alone() -> None:
    ours, sources, targets = network(), sentences(SOURCE_LENGTHS), sentences(TARGET_LENGTHS)
    source = padded(sources)
    states = ours(source, padded(targets), source != SPECIAL.pad)
    for row, (one, other) in enumerate(zip(sources, targets, strict=True)):
        torch.testing.assert_close(states[row, : len(other)], states_of_one(ours, one, other), rtol=1e-4, atol=1e-6)
    alone = ours(sources[0][None], targets[0][None], None)
    torch.testing.assert_close(states[:1, : len(targets[0])], alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("width", [WIDTH, WIDTH + 1])
def test_gradients_are_those_of_each_sentence_alone(width: int) -> None:
    ours, sources, targets = network(width=width), sentences(SOURCE_LENGTHS), sentences(TARGET_LENGTHS)
    source, target = padded(sources), padded(targets)
    ours(source, target, source != SPECIAL.pad)[target != SPECIAL.pad].square().sum().backward()
    found = {name: parameter.grad for name, parameter in ours.named_parameters()}
    ours.zero_grad(set_to_none=True)
    for one, other in zip(sources, targets, strict=True):
        ours(one[None], other[None], None).square().sum().backward()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_greedy_takes_the_most_probable_piece_at_each_step() -> None:
    ours, sources = network().eval(), sentences((7, 4, 1, 5, 3))
    source = padded(sources)
    # A piece that occurs becomes the end symbol: it has to end some sentences before the limit, and not all.
    piece = int(ours.greedy(source, source != SPECIAL.pad, SPECIAL, 4)[0][1, 2])
    ours.embedding.weight.data[[SPECIAL.eos, piece]] = ours.embedding.weight.data[[piece, SPECIAL.eos]]
    tokens, lengths = ours.greedy(source, source != SPECIAL.pad, SPECIAL, 4)
    ends = []
    for row, one in enumerate(sources):
        answer = [SPECIAL.bos]
        while answer[-1] != SPECIAL.eos and len(answer) <= len(one) + 4:
            logits = ours(one[None], torch.tensor([answer]), None)[0, -1] @ ours.embedding.weight.T
            logits[[SPECIAL.pad, SPECIAL.bos]] = -torch.inf
            answer.append(int(logits.argmax()))
        ends.append(answer[-1] == SPECIAL.eos)
        answer[-1] = SPECIAL.eos  # the limit
        assert tokens[row, : lengths[row]].tolist() == answer[1:]
    assert {True, False} == set(ends)


def test_dropout_is_in_training_only() -> None:
    ours, source, target = network(0.5), padded(sentences((4, 4))), padded(sentences((5, 5)))
    assert not torch.equal(ours(source, target, None), ours(source, target, None))
    ours.eval()
    torch.testing.assert_close(ours(source, target, None), ours(source, target, None), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("pieces", "settings"),
    [
        (37_000, NetworkSettings()),
        (37_000, NetworkSettings(d_model=1024, d_ff=4096, num_heads=16)),
        (10_000, NetworkSettings(num_layers=4, d_model=128, d_ff=256, num_heads=4)),
        (8_000, NetworkSettings(num_layers=1, d_model=64, d_ff=64, num_heads=4)),
    ],
)
def test_number_of_parameters(pieces: int, settings: NetworkSettings) -> None:
    with torch.device("meta"):
        wanted = sum(p.numel() for p in Transformer(pieces, settings).parameters())
    found = lstm_of_size(wanted, pieces, settings.d_model, settings.dropout)
    assert sum(p.numel() for p in found.parameters()) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_batches_have_the_same_sentences(in_blocks: bool, tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lstm, "PART", 4)
    batches = BatchSettings(batch_tokens=600, max_tokens_per_device=128, workers=0)
    data = TranslationDataModule(tiny_corpus, batches, SPECIAL, 1, in_blocks)
    batch = next(iter(data.train_dataloader()))
    step = padded_parts(batch, SPECIAL.pad)
    assert step.num_target_tokens == batch.num_target_tokens
    assert len(step.micro_batches) == len(batch.micro_batches) > 1
    found: list[int] = []
    for micro_batch in step.micro_batches:
        found_before = len(found)
        source_lengths = []
        for part in micro_batch.parts:
            assert len(part.pairs) <= 4
            rows = zip(part.pairs, part.source, part.source_mask, part.target_input, part.target_output, strict=True)
            for pair, source, mask, target_input, labels in rows:
                corpus = data.train_corpus
                pieces, answer = ([*side[int(pair)].tolist(), SPECIAL.eos] for side in (corpus.source, corpus.target))
                assert source[mask].tolist() == pieces
                assert mask.tolist() == [True] * len(pieces) + [False] * (len(mask) - len(pieces))
                assert not source[~mask].any()
                assert labels[: len(answer)].tolist() == answer
                assert not labels[len(answer) :].any()
                assert target_input[: len(answer)].tolist() == [SPECIAL.bos, *answer[:-1]]
                found.append(int(pair))
                source_lengths.append(len(pieces))
        assert source_lengths == sorted(source_lengths, reverse=True)
        labels = [part.target_output[part.target_output != SPECIAL.pad] for part in micro_batch.parts]
        assert micro_batch.target_output.tolist() == torch.cat(labels).tolist()
        assert len(found) > found_before + 4
    assert sorted(found) == sorted(batch.pairs.tolist())


def test_it_learns_to_copy() -> None:
    ours = LSTMNetwork(PIECES, 32, 32, 0.0)
    settings = TrainingSettings(label_smoothing=0.0, warmup_steps=20, learning_rate_factor=0.16)
    schedule = build_schedule(settings, 32, -1)
    loop = lstm_loop(ours, settings, schedule, (torch.device("cpu"), torch.float32), SPECIAL.pad)
    generator, watch = torch.Generator().manual_seed(0), Stopwatch(torch.device("cpu"))

    def copies() -> lstm.PaddedParts:
        text = torch.randint(3, PIECES, (64, 5), generator=generator)
        text[:32, 3:] = SPECIAL.pad
        text[:32, 2] = text[32:, 4] = SPECIAL.eos
        begin = torch.full((64, 1), SPECIAL.bos)
        part = PaddedBatch(text, text != 0, torch.cat([begin, text[:, :-1]], 1), text, torch.arange(64))
        return lstm.PaddedParts([part], text[text != 0])

    def loss(batch: lstm.PaddedParts) -> float:
        with torch.no_grad():
            states = token_states(ours, batch, SPECIAL.pad)
            return float(F.cross_entropy(states @ ours.embedding.weight.T, batch.target_output))

    before = loss(copies())
    for _ in range(200):
        batch = copies()
        loop.step(LoopStep([batch], len(batch.target_output)), watch)
    assert before > 3.0
    assert loss(copies()) < 0.5


@pytest.mark.filterwarnings("ignore:You have overridden `transfer_batch_to_device`")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec")
def test_figures(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["benchmark", "train", "--config", str(recipe_file), "--steps", "2", "--baseline", "lstm"]
    assert main([*command, "--minutes", "0.02", "--network.d_model", "64", "--network.dropout", "0.1"]) == 0
    printed = capsys.readouterr()
    figures = json.loads(printed.out.splitlines()[-1])
    beside = figures["baselines"]["lstm"]
    assert beside["parameters"] == pytest.approx(figures["parameters"], rel=0.02)
    assert all(beside[key] > 0 for key in ("target_tokens_per_second", "peak_memory_bytes", "forward_seconds"))
    assert "mfu" in figures
    assert "mfu" not in beside
    assert figures["ratio_to_lstm"] > 0
    scored = figures["equal_time"]
    recipe = load_recipe([recipe_file], (), trainer_signature())
    tokenizer = Tokenizer.load(Path(recipe.corpus.folder) / "tokenizer.model")
    loader = build_data(recipe, tokenizer, {"accelerator": "cpu", "precision": "32-true"}).train_dataloader()
    most = max(scored[name][-1]["steps"] for name in ("ours", "lstm"))
    tokens = np.cumsum([batch.num_target_tokens for batch, _ in zip(loader, range(most), strict=False)])
    assert "tok:13a" in scored["bleu_signature"]
    for name in ("ours", "lstm"):
        scores = scored[name]
        assert len(scores) == 4
        for quarter, one in enumerate(scores, start=1):
            assert set(one) == {"seconds", "steps", "target_tokens", "bleu", "negative_log_likelihood"}
            # The last step ends after the time.
            assert 0.3 * quarter <= one["seconds"] < 0.3 * quarter + 1.0
            assert one["target_tokens"] == tokens[one["steps"] - 1]
            assert 0 <= one["bleu"] <= 100
        assert scores[-1]["steps"] > scores[0]["steps"]
        assert scores[-1]["negative_log_likelihood"] < scores[0]["negative_log_likelihood"]
    assert "BLEU" in printed.err


@pytest.mark.filterwarnings("ignore:You have overridden `transfer_batch_to_device`")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec")
def test_the_lstm_beside_it_changes_nothing_in_our_training(recipe_file: Path) -> None:
    recipe = load_recipe([recipe_file], ("--network.dropout", "0.1"), trainer_signature())
    tokenizer = Tokenizer.load(Path(recipe.corpus.folder) / "tokenizer.model")
    device = benchmark_device(recipe.trainer)
    beside = equal_time(recipe, tokenizer, 1.0, device)["ours"]
    loss = choose_loss(recipe.run.kernels, device.options)
    module = build_module(recipe, tokenizer, compiled_loss=loss)
    data = build_data(recipe, tokenizer, device.options)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=beside[-1]["steps"],
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, datamodule=data)
    module.eval()
    text = ValidationText(data, tokenizer, data.validation_text()[1], Bleu(), recipe.decoding)
    search = BeamSearch(module.network, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)

    def greedy(batch: PaddedBatch) -> tuple[Tensor, Tensor]:
        answers = search.greedy(batch.source.long(), batch.source_mask, recipe.decoding.max_extra_tokens)
        return answers.tokens, answers.lengths

    with torch.no_grad():
        alone = score(text, torch.device("cpu"), module.losses, greedy)
    assert beside[-1]["steps"] > 10
    assert {key: beside[-1][key] for key in alone} == pytest.approx(alone, rel=1e-6)


def test_score_of_known_translations(tiny_corpus: Path) -> None:
    tokenizer = Tokenizer.load(tiny_corpus / "tokenizer.model")
    data = TranslationDataModule(tiny_corpus, BatchSettings(batch_tokens=400), special_ids(tokenizer), 1)
    references = data.validation_text()[1]
    text = ValidationText(data, tokenizer, references, Bleu(), DecodingSettings())

    def losses(batch: PaddedBatch) -> LossSums:
        num_tokens = (batch.target_output != tokenizer.pad_id).sum()
        return LossSums(torch.tensor(0.0), 2.5 * num_tokens, torch.tensor(0))

    def right(batch: PaddedBatch) -> tuple[Tensor, Tensor]:
        return batch.target_output, (batch.target_output != tokenizer.pad_id).sum(1)

    def late(batch: PaddedBatch) -> tuple[Tensor, Tensor]:
        tokens, lengths = right(batch)
        return tokens.roll(1, 0), lengths.roll(1, 0)

    scores = score(text, torch.device("cpu"), losses, right)
    assert scores == {"bleu": pytest.approx(100.0), "negative_log_likelihood": pytest.approx(2.5)}
    assert score(text, torch.device("cpu"), losses, late)["bleu"] < 50.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--minutes", "1"], "--minutes: compares with the LSTM; add --baseline lstm"),
        (["--minutes", "0", "--baseline", "lstm"], "--minutes 0.0: must be more than 0"),
        (["--minutes", "nan", "--baseline", "lstm"], "--minutes nan"),
        (["--minutes", "inf", "--baseline", "lstm"], "--minutes inf"),
        (
            [*TWO_MINUTES, "--training.schedule", "linear", "--training.peak_learning_rate", "1e-3"],
            "--minutes: training.schedule linear ends at a step",
        ),
        (
            ["--training.r_drop_alpha", "2"],
            "training.r_drop_alpha 2.0: the benchmark has steps of one pass; give --training.r_drop_alpha 0",
        ),
        (["--baseline", "gru"], "invalid choice: 'gru'"),
    ],
)
def test_mistakes(arguments: list[str], said: str, recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code: object
    try:
        code = main(["benchmark", "train", "--config", str(recipe_file), *arguments])
    except SystemExit as error:  # argparse
        code = error.code
    assert code == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert said in line


def test_a_recipe_without_validation_text(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = yaml.safe_load(recipe_file.read_text())
    del recipe["corpus"]["validation"]
    recipe_file.write_text(yaml.safe_dump(recipe))
    command = ["benchmark", "train", "--config", str(recipe_file), "--baseline", "lstm", "--minutes", "1"]
    assert main(command) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "corpus.validation" in line
