"""Train the recipe as `fit` does and the LSTM for the same time, in turns, and score both on the validation text.

The network that has trained for less time takes the next step, so that both are exposed to the same changes in the
machine's speed. Both take the same batches in the same order; the slower one comes less far. Time counts from a batch's
arrival to the end of its optimizer step. Scoring does not count.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from tqdm import tqdm

from data_module.batching.batch import PaddedBatch, RankBatch
from data_module.tokenization.tokenizer import Tokenizer
from data_module.translation_data_module import TranslationDataModule
from model.decoding import BeamSearch
from model.loss import LossSums, label_smoothed_loss
from model.settings import DecodingSettings
from model.translation_module import TranslationModule
from pipeline.benchmark.lstm import LSTMNetwork
from pipeline.benchmark.side_by_side import BareLoop
from pipeline.inference.metrics import Bleu, corpus_score
from pipeline.profiling.stopwatch import Stopwatch

NUM_SCORES = 4
"""How often both networks are scored, after equal times; the last one is at the end."""

Losses = Callable[[PaddedBatch], LossSums]
"""Returns the sums of the loss over a batch."""
Greedy = Callable[[PaddedBatch], tuple[Tensor, Tensor]]
"""Returns the translations of a batch, ids [B, L], and their lengths [B], end symbols included."""


class ValidationText(NamedTuple):
    """What both networks translate."""

    data: TranslationDataModule
    tokenizer: Tokenizer
    references: list[str]
    """In the order of the validation corpus."""
    bleu: Bleu
    decoding: DecodingSettings
    """Greedy search uses `max_extra_tokens` only."""


class EqualTime(Callback):
    """Trains an LSTM beside the network of the Trainer until both have trained for the same time."""

    def __init__(
        self, loop: BareLoop, text: ValidationText, seconds: float, precision: tuple[torch.device, torch.dtype]
    ) -> None:
        """Train each network for `seconds`.

        Args:
            loop: trains the LSTM.
            text: what is scored.
            seconds: training time of each network.
            precision: device that the networks train on, and type of matrix products.
        """
        self.scores: dict[str, list[dict[str, float]]] = {"ours": [], "lstm": []}
        """Of each network, for each time of scoring, what `score` returns and `seconds`, `steps`, `target_tokens`."""
        self._loop, self._text, self._limit = loop, text, seconds
        self._device, self._dtype = precision
        self._watch = Stopwatch(self._device)
        self._done = {name: {"seconds": 0.0, "steps": 0, "target_tokens": 0} for name in self.scores}
        self._batches: Iterator[RankBatch] = iter(())
        self._bar = tqdm(total=round(2 * seconds), desc="training", unit="s", mininterval=1.0, leave=False)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the LSTM's own loader, which has the same batches as the Trainer's."""
        self._batches = iter(self._text.data.train_dataloader())

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: RankBatch, batch_idx: int
    ) -> None:
        """Start the clock."""
        self._watch.begin("step")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: RankBatch, batch_idx: int
    ) -> None:
        """Stop the clock, let the LSTM catch up, and score both when it is time."""
        self._count("ours", batch.num_target_tokens)
        assert isinstance(pl_module, TranslationModule)
        ours, lstm = self._done["ours"], self._done["lstm"]
        due = self._limit * (1 + len(self.scores["ours"])) / NUM_SCORES
        while lstm["seconds"] < min(ours["seconds"], due):
            step = self._loop.next_step(next(self._batches).to(self._device))
            self._watch.begin("step")
            self._loop.step(step, self._watch)
            self._count("lstm", step.num_target_tokens)
        if ours["seconds"] >= due:
            self._score(pl_module)
            trainer.should_stop = len(self.scores["ours"]) == NUM_SCORES

    def _count(self, name: str, num_target_tokens: int) -> None:
        seconds = sum(self._watch.read().values())
        done = self._done[name]
        done["seconds"] += seconds
        done["steps"] += 1
        done["target_tokens"] += num_target_tokens
        self._bar.update(round(sum(one["seconds"] for one in self._done.values())) - self._bar.n)

    def _score(self, module: TranslationModule) -> None:
        """Score both networks."""
        lstm = self._loop.network
        assert isinstance(lstm, LSTMNetwork)
        text, special = self._text, module.special
        search = BeamSearch(module.network, special.bos, special.eos, special.pad)

        def greedy(batch: PaddedBatch) -> tuple[Tensor, Tensor]:
            answers = search.greedy(batch.source.long(), batch.source_mask, text.decoding.max_extra_tokens)
            return answers.tokens, answers.lengths

        def lstm_losses(batch: PaddedBatch) -> LossSums:
            states = lstm(batch.source, batch.target_input, batch.source_mask)
            return label_smoothed_loss(states, lstm.embedding.weight, batch.target_output, 0.0, special.pad)

        def lstm_greedy(batch: PaddedBatch) -> tuple[Tensor, Tensor]:
            return lstm.greedy(batch.source, batch.source_mask, special, text.decoding.max_extra_tokens)

        systems: dict[str, tuple[nn.Module, Losses, Greedy]]
        systems = {"ours": (module, module.losses, greedy), "lstm": (lstm, lstm_losses, lstm_greedy)}
        for name, (network, losses, translate) in systems.items():
            network.eval()
            with torch.no_grad(), torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
                self.scores[name].append({**self._done[name], **score(text, self._device, losses, translate)})
            network.train()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the progress bar."""
        self._bar.close()


def score(
    text: ValidationText,
    device: torch.device,
    losses: Losses,
    greedy: Greedy,
) -> dict[str, float]:
    """Return BLEU in percent of the translations as `bleu`, and `negative_log_likelihood` a target token.

    Args:
        text: what is translated.
        device: device of the network.
        losses: the network's losses.
        greedy: the network's search.
    """
    hypotheses = [""] * len(text.references)
    likelihood, num_tokens = 0.0, 0
    for cpu_batch in text.data.val_dataloader():
        batch = cpu_batch.to(device)
        likelihood += float(losses(batch).negative_log_likelihood)
        num_tokens += int((batch.target_output != text.data.special.pad).sum())
        tokens, lengths = (result.tolist() for result in greedy(batch))
        answers = [row[: length - 1] for row, length in zip(tokens, lengths, strict=True)]
        for pair, line in zip(cpu_batch.pairs.tolist(), text.tokenizer.decode(answers), strict=True):
            hypotheses[pair] = line
    return {
        "bleu": corpus_score(text.bleu, hypotheses, text.references),
        "negative_log_likelihood": likelihood / num_tokens,
    }
