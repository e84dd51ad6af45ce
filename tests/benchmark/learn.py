"""Measure what a recipe learns by minute and by update, beside Hugging Face's MarianMTModel of the same size.

The recipe trains as `fit` does, on one device, in turns with Marian. The first updates of each are timed, and its
schedule ends with the updates that fit into the minutes. Marian has label smoothing of 0.1, Adam (0.9, 0.98, 1e-9) with
a peak rate of 1e-3, a warm-up of a tenth of its updates, a linear decay to 0, and gradients clipped at 1. Scores are
nats a token of the validation text, without label smoothing, and BLEU of greedy search.

The output folder gets a line of JSON for each validation (learning.jsonl), a picture (learning.png) and the run (run).
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from matplotlib.figure import Figure
from torch import Tensor, nn

from data_module.errors import InputError
from data_module.files import PlainValues, naming_full_disk, user_path
from data_module.tokenization.tokenizer import Tokenizer
from pipeline.benchmark.train import prepare
from pipeline.config.recipe import Recipe, add_recipe_arguments, load_recipe
from pipeline.export.huggingface_model import from_marian
from pipeline.monitoring.validation_samples import ValidationSamples
from pipeline.runtime.console import say
from pipeline.runtime.signals import Stopped
from pipeline.training.fit import fit_recipe
from pipeline.training.start import choose_bleu_tokenizer
from pipeline.training.trainer import make_trainer
from tests.benchmark.baselines import Baseline

VALIDATIONS = 12
NEVER = 1 << 40
"""Updates between validations of which there is none."""
UNTIMED, TIMED = 5, 25
"""Updates before the training: those that are not timed, and those that are."""
TURN_SECONDS = 30.0
MARIAN = (
    *("label_smoothing=0.1", "r_drop_alpha=0", "optimizer=adam", "adam_beta1=0.9", "adam_beta2=0.98"),
    *("muon_momentum=null", "adam_epsilon=1e-9", "weight_decay=0", "gradient_clip_norm=1", "ema_decay=null"),
    *("schedule=linear", "peak_learning_rate=1e-3", "learning_rate_factor=1"),
)
"""The baseline's `training:`, but for its warm-up."""
SCORES = {"negative_log_likelihood": "nats a token", "bleu": "BLEU"}
Rows = list[dict[str, float]]
"""A network's validations: `update`, `minutes` and the scores."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--minutes", type=float, required=True, help="how long each network trains")
    parser.add_argument("--output", type=user_path, help="folder to write to (default: runs/<recipe>_learn)")


def run(arguments: argparse.Namespace) -> PlainValues:
    minutes = arguments.minutes
    if not 0 < minutes < math.inf:
        raise InputError(f"--minutes {minutes:g}: must be more than 0")
    recipe = load_recipe(arguments.config, arguments.overrides)
    marians = load_recipe(arguments.config, [*arguments.overrides, *(f"--training.{setting}" for setting in MARIAN)])
    folder = arguments.output or Path("runs") / f"{recipe.name}_learn"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: is there already; remove it, or give another --output")
    marian = Marian(marians)
    folder.mkdir(parents=True, exist_ok=True)
    curves = {name: Curve(name, folder) for name in ("ours", "marian")}
    turns = marian.turns(minutes, curves["marian"])
    train_recipe(recipe, minutes, folder, curves["ours"], turns)
    for _ in turns:
        pass  # It has updates left.
    rows = {name: curve.rows for name, curve in curves.items()}
    draw(rows, folder / "learning.png")
    print(f"the picture is {folder / 'learning.png'}", file=sys.stderr)
    trained = {"ours": recipe, "marian": with_warm_up(marians, int(rows["marian"][-1]["update"]))}
    return {
        "recipe": recipe.name,
        "precision": str(marian.training.options["precision"]),
        **{name: {**rows[name][-1], "training": asdict(one.training)} for name, one in trained.items()},
        "minutes_to_baseline": minutes_until(rows["ours"], rows["marian"][-1]),
        "curves": rows,
    }


class Curve:
    """Counts a network's updates and the seconds that it trains, and writes a line for each validation."""

    def __init__(self, network: str, folder: Path) -> None:
        self._network, self._file = network, folder / "learning.jsonl"
        self._seconds = self._started = self._turn_started = 0.0
        self.seconds_after = [0.0]
        """Seconds of training after each number of updates."""
        self.rows: Rows = []

    def start(self) -> None:
        """Count the time from here on."""
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Count the time up to here."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._seconds += time.perf_counter() - self._started

    def update(self) -> bool:
        """Count an update, and return whether the turn is over."""
        now = self._seconds + time.perf_counter() - self._started
        self.seconds_after.append(now)
        if now - self._turn_started < TURN_SECONDS:
            return False
        self._turn_started = now
        return True

    def validated(self, metrics: Mapping[str, Tensor]) -> None:
        """Write the scores, which Lightning has logged."""
        updates, scores = len(self.seconds_after) - 1, {name: float(metrics[f"validation/{name}"]) for name in SCORES}
        if not math.isfinite(scores["negative_log_likelihood"]):
            raise InputError(
                f"{self._network}: the likelihood after {updates:,} updates is not finite; lower its learning rate"
            )
        row = {"update": updates, "minutes": self._seconds / 60, **scores}
        self.rows.append(row)
        with naming_full_disk(self._file), self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"network": self._network, **row}) + "\n")
        said = ", ".join(f"{scores[name]:.4g} {unit}" for name, unit in SCORES.items())
        say(f"{self._network}: {updates:,} updates, {row['minutes']:.2f} minutes: {said}")


def spaced(minutes: float, train: Callable[[int, Curve], None]) -> tuple[int, int]:
    """Return how many updates to train, and how many lie between validations, of which the last ends the training.

    Args:
        minutes: how long to train; updates are rounded up.
        train: trains for some updates, without a validation, to find how many fit into the minutes. It takes the
            number of updates, and what measures them.
    """
    timing = Curve("", Path())
    say(f"timing {UNTIMED + TIMED} updates, to find how many fit into the minutes")
    train(UNTIMED + TIMED, timing)
    seconds = (timing.seconds_after[-1] - timing.seconds_after[UNTIMED]) / TIMED
    updates = max(1, round(60 * minutes / seconds))
    every = -(-updates // VALIDATIONS)
    return -(-updates // every) * every, every


def train_recipe(recipe: Recipe, minutes: float, folder: Path, curve: Curve, baseline: Iterator[None]) -> None:
    """Train the recipe as `fit` does, in turns with the baseline."""

    def fit(run: Path, updates: int, every: int, curve: Curve, others: Iterator[None], **training: object) -> None:
        def after_update(*_: object) -> None:
            if curve.update():
                curve.stop()
                next(others, None)
                curve.start()

        def after_validation(trainer: Trainer, *_: object) -> None:
            curve.validated(trainer.callback_metrics)
            curve.start()

        callback = LambdaCallback(
            on_train_start=lambda *_: curve.start(),
            on_train_batch_end=after_update,
            on_validation_start=lambda *_: curve.stop(),
            on_validation_end=after_validation,
        )
        options = {key: value for key, value in recipe.trainer.items() if key != "max_time"}
        options |= {"devices": 1, "max_steps": updates, "val_check_interval": every}
        changed = replace(
            recipe,
            training=replace(recipe.training, **training),
            run=replace(recipe.run, folder=str(run), patience=None),
            trainer=options,
        )
        try:
            fit_recipe(changed, fresh=False, init_from=None, further_callbacks=[callback])
        except Stopped:  # Its message says how to resume `fit`.
            raise InputError(f"asked to stop: a benchmark cannot resume; remove {folder} to start again") from None

    def only_for_time(updates: int, curve: Curve) -> None:
        # So few updates have no warm-up, so that a rate other than 0 might be too high.
        with TemporaryDirectory() as unused:
            run = Path(unused) / "run"
            fit(run, updates, NEVER, curve, iter(()), warmup_steps=1, learning_rate_factor=0.0)

    fit(folder / "run", *spaced(minutes, only_for_time), curve, baseline)


class Marian:
    """Trains Marian by a recipe, and scores it with the code that scores this program's network."""

    def __init__(self, recipe: Recipe) -> None:
        self.training = prepare(recipe)
        data = self.training.data
        tokenizer = Tokenizer.load(recipe.corpus_folder() / "tokenizer.model")
        sources, references = data.validation_text()
        if tokenizer.lowercase:
            references = tokenizer.lower(references)
        bleu, _ = choose_bleu_tokenizer(recipe, None)
        samples = ValidationSamples(sources, references, tokenizer, bleu)
        self._trainer = make_trainer(self.training.options, None, logger=False, callbacks=[samples])
        self.baseline(1)  # refuses a network that Marian cannot have

    def baseline(self, updates: int) -> Baseline:
        """Return a network with its optimizer, whose schedule ends after `updates`."""
        recipe = with_warm_up(self.training.recipe, updates)
        torch.manual_seed(recipe.run.seed)
        return Baseline("marian", self.training._replace(recipe=recipe), updates)

    def turns(self, minutes: float, curve: Curve) -> Iterator[None]:
        """Train, and yield at the end of each turn."""

        def only_for_time(updates: int, curve: Curve) -> None:
            for _ in self._train(updates, NEVER, curve):
                pass

        yield from self._train(*spaced(minutes, only_for_time), curve)

    def _train(self, updates: int, every: int, curve: Curve) -> Iterator[None]:
        baseline = self.baseline(updates)
        # A thread makes the next batch meanwhile, as the loader's workers do for `fit`.
        with ThreadPoolExecutor(1) as loader:
            batch = loader.submit(baseline.next_step)
            curve.start()
            for update in range(1, updates + 1):
                ready, batch = batch.result(), loader.submit(baseline.next_step)
                baseline.train(ready)
                turn_is_over = curve.update()
                if turn_is_over or update % every == 0:
                    curve.stop()
                    if update % every == 0:
                        curve.validated(self.scores(baseline.network))
                    if turn_is_over:
                        yield
                    curve.start()

    def scores(self, network: nn.Module) -> Mapping[str, Tensor]:
        """Return what Lightning logs in a validation of Marian's weights."""
        shape, module = self.training.recipe.network, self.training.module
        marian: Any = network
        weights = from_marian(marian.model.state_dict(), (shape.encoder_layers, shape.decoder_layers))
        del weights["projection.bias"]  # It is 0, and not trained.
        module.network.load_state_dict(weights)
        self._trainer.validate(module, datamodule=self.training.data, verbose=False)
        return self._trainer.callback_metrics


def with_warm_up(recipe: Recipe, updates: int) -> Recipe:
    """Return the baseline's recipe with a warm-up of a tenth of its updates."""
    return replace(recipe, training=replace(recipe.training, warmup_steps=max(1, updates // 10)))


def minutes_until(rows: Rows, goal: dict[str, float]) -> float | None:
    """Return when a curve reaches the likelihood of another one's row, on lines between validations; None if never."""
    key = "negative_log_likelihood"
    for before, after in pairwise([{**rows[0], "minutes": 0.0}, *rows]):
        if after[key] <= goal[key]:
            share = (before[key] - goal[key]) / (before[key] - after[key]) if before[key] > after[key] else 1.0
            return before["minutes"] + share * (after["minutes"] - before["minutes"])
    return None


def draw(curves: dict[str, Rows], path: Path) -> None:
    """Draw each score by minute and by update."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(2, 2, sharex="col", sharey="row")
    for (score, unit), line in zip(SCORES.items(), panels, strict=True):
        line[0].set_ylabel(unit)
        for x, panel in zip(("minutes", "update"), line, strict=True):
            for network, rows in curves.items():
                panel.plot([row[x] for row in rows], [row[score] for row in rows], ".-", label=network)
            panel.grid(alpha=0.3)
            panel.set_xlabel(x)
    panels[0][0].legend()
    figure.savefig(path)
