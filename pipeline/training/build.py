"""Builds what `fit` trains with: the module, the data, the callbacks and Lightning's Trainer.

Each `build_*` function can be read alone; `fit.py` calls them.
"""

import json
from dataclasses import replace

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping

from data_module.batch import SpecialIds
from data_module.corpus.store import training_pairs
from data_module.errors import InputError
from data_module.system.files import PlainValues, atomic_file
from data_module.tokenization.tokenizer import Tokenizer
from data_module.translation_data_module import TranslationDataModule
from model.backend import Backend
from model.optimization import build_optimizer
from model.training_module import TranslationModule
from model.transformer import Transformer
from pipeline.checkpointing.callback import EMA, CheckpointCallback
from pipeline.checkpointing.checkpoint_io import AtomicCheckpointIO
from pipeline.checkpointing.run_folder import STOPPED_EARLY, settings_of_ranks
from pipeline.config.recipe import Recipe
from pipeline.config.settings import max_seconds, validation_tag
from pipeline.metrics.bleu_tokenizer import spacing_warning
from pipeline.metrics.metrics import mode_of, title
from pipeline.monitoring.attention_plots import AttentionPlots
from pipeline.monitoring.performance import flops_per_target_token
from pipeline.monitoring.run_log import RunLog
from pipeline.monitoring.run_metadata import RunMetadata, first_submission, record_start
from pipeline.monitoring.training_monitor import TrainingMonitor
from pipeline.monitoring.validation_samples import ValidationSamples
from pipeline.runtime.console import say
from pipeline.runtime.devices import TrainerOptions, shared_processor
from pipeline.runtime.lightning_private import disable_signal_handling
from pipeline.training.graceful_stop import GracefulStop
from pipeline.training.memory_probe import MemoryProbe
from pipeline.training.start import Start, choose_bleu_tokenizer
from pipeline.training.trainer import ConnectedDDP, make_trainer


class RunFolderSetup(Callback):
    """On rank 0, remove what a new start replaces, then write the recipe and the record of this start."""

    def __init__(self, start: Start, backend: Backend, monitor: TrainingMonitor, metadata: RunMetadata) -> None:
        self._start, self._backend, self._monitor, self._metadata = start, backend, monitor, metadata

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write before the first step."""
        start, log = self._start, trainer.logger
        if start.folder is None or not isinstance(log, RunLog):
            return
        if start.plan.reset:
            start.folder.remove_run(start.plan.job)
        start.folder.write_config(start.plan.recipe, start.tokenizer.model, str(start.identity.run_id))
        log.truncate_after()
        self._metadata.starts = record_start(log, start.plan.job, self._backend.summary())
        self._monitor.submitted = first_submission(self._metadata.starts)


class ResumableEarlyStopping(EarlyStopping):
    """Lightning's EarlyStopping by `run.best_by`; a resumed run uses the recipe's patience, even if it had another.

    It leaves a note in the run folder if it has ended the run, so that the next start does not resume it.
    """

    def __init__(self, start: Start, patience: int) -> None:
        self._metric = start.plan.recipe.run.best_by
        # A score of NaN is not a better score, as for the best checkpoint, and it does not end the run.
        super().__init__(
            validation_tag(self._metric), mode=mode_of(self._metric), patience=patience, check_finite=False
        )
        self._folder = start.folder

    def load_state_dict(self, state_dict: PlainValues) -> None:
        """Restore the callback's state, except for the patience."""
        super().load_state_dict({**state_dict, "patience": self.patience})

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the run if no patience is left; it may have been kept from ending by `trainer.min_steps` and improved."""
        out_of_patience = self.wait_count >= self.patience
        super().on_validation_end(trainer, pl_module)
        if out_of_patience and self.wait_count < self.patience:
            trainer.should_stop = False  # Lightning never takes it back.

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the note on rank 0. By now the last checkpoint is written."""
        if self._folder is None or self.wait_count < self.patience:
            return
        note = {"step": trainer.global_step, "patience": self.patience}
        with atomic_file(self._folder.path / STOPPED_EARLY) as file:
            file.write(json.dumps(note).encode())
        without = f"{self.patience} validations without a better {title(self._metric)}"
        say(f"stopped early at step {trainer.global_step} after {without}")


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    """Return the ids of the padding, begin and end symbols."""
    return SpecialIds(pad=tokenizer.pad_id, bos=tokenizer.bos_id, eos=tokenizer.eos_id, unk=tokenizer.unk_id)


def refuse_optimizer(recipe: Recipe) -> None:
    """Raise InputError where `training.optimizer` does not fit the network.

    A network with one layer in each stack is enough to show it, which takes a fraction of a second.
    """
    settings = replace(recipe.network, num_layers=1, num_encoder_layers=None, num_decoder_layers=None)
    network = Transformer(1, settings)
    try:
        build_optimizer(network.parameters(), recipe.training)
    except ValueError as error:
        raise InputError(f"training.optimizer {recipe.training.optimizer}: {error}") from error


def build_module(recipe: Recipe, tokenizer: Tokenizer, backend: Backend) -> TranslationModule:
    """Return the LightningModule, its weights initialized by `run.seed`."""
    torch.manual_seed(recipe.run.seed)
    return TranslationModule(
        tokenizer.vocabulary_size,
        special_ids(tokenizer),
        recipe.network,
        recipe.training,
        recipe.decoding,
        recipe.run.seed,
        backend,
    )


def build_data(recipe: Recipe, tokenizer: Tokenizer, backend: Backend) -> TranslationDataModule:
    """Return the LightningDataModule over the prepared corpus.

    Raises InputError where the corpus has longer sentences or fewer validation pairs than the recipe allows for.
    """
    data = TranslationDataModule(
        recipe.corpus_folder(),
        recipe.batches,
        special_ids(tokenizer),
        recipe.run.seed,
        recipe.corpus,
        backend.attention.constant_rows,
        recipe.run.validation_translations,
    )
    last, num_pairs = max(recipe.monitoring.attention_sentences or (), default=0), len(data.validation_corpus)
    if last >= num_pairs:
        raise InputError(f"monitoring.attention_sentences: {last} does not exist; give numbers up to {num_pairs - 1}")
    if others := set(recipe.monitoring.attention_sentences or ()).difference(data.translated_pairs):
        raise InputError(
            f"monitoring.attention_sentences: {min(others)} is none of the sentences that run.validation_translations "
            f"{recipe.run.validation_translations} translates; give one of these, or raise the latter"
        )
    longest = max(data.longest, 1 + data.validation_corpus.longest)
    if recipe.network.learned_positions and longest > recipe.network.max_positions:
        raise InputError(
            f"network.max_positions {recipe.network.max_positions} is less than the longest sentence trained or "
            f"validated on, {longest} tokens; raise it, or lower corpus.max_tokens"
        )
    return data


def build_callbacks(start: Start, data: TranslationDataModule, backend: Backend) -> list[Callback]:
    """Return all callbacks in the order in which Lightning calls them.

    This is the only place that decides the order:

    1. `MemoryProbe` first: what does not fit ends the run before anything is written.
    2. `RunFolderSetup` before all that write to the run folder or log.
    3. `ValidationSamples` before `AttentionPlots`, which draws the translations that it has collected.
    4. `TrainingMonitor` before `RunMetadata`, whose summary reads its counters.
    5. `ResumableEarlyStopping` anywhere before `CheckpointCallback`.
    6. `EMA` after the callbacks above: it restores the weights at the end of a validation, and they must still see
       the average.
    7. `CheckpointCallback` after all whose state it saves.
    8. `GracefulStop` last: it saves, then raises, and callbacks after it would not see the step.
    """
    recipe, tokenizer = start.plan.recipe, start.tokenizer
    sources, references = data.validation_text()
    if tokenizer.lowercase:  # The model writes lower case: its text compares with lower-cased references only.
        references = tokenizer.lower(references)
    bleu, note = choose_bleu_tokenizer(recipe, start.plan.resume)
    if note:
        say(note)
    elif warning := spacing_warning(references, bleu):
        say(f"the validation text's references {warning}")
    text_sources = data.validation_sources()
    best_by = recipe.run.best_by
    translated, requested = data.translated_pairs, recipe.run.metrics
    samples = ValidationSamples(sources, references, tokenizer, bleu, text_sources, best_by, translated, requested)
    num_passes = 2 if recipe.training.r_drop_alpha else 1
    flops = num_passes * flops_per_target_token(recipe.network, tokenizer.vocabulary_size, data.train_corpus)
    monitor = TrainingMonitor(recipe.run.log_every_steps, flops, backend, best_by)
    metadata = RunMetadata(recipe, start.manifest, monitor)
    callbacks: list[Callback] = [
        MemoryProbe(data),
        RunFolderSetup(start, backend, monitor, metadata),
        samples,
        AttentionPlots(recipe.monitoring, samples, sources, tokenizer, data.train_corpus, recipe.network),
        monitor,
        metadata,
    ]
    if recipe.run.patience is not None:
        callbacks.append(ResumableEarlyStopping(start, recipe.run.patience))
    if recipe.training.ema_decay is not None:
        callbacks.append(EMA(decay=recipe.training.ema_decay))
    folder, mode = recipe.run_folder(), mode_of(best_by)
    checkpoints = CheckpointCallback(folder, recipe, tokenizer, monitor.clock, mode, start.identity)
    limit = max_seconds(recipe.trainer.get("max_time"))
    return [*callbacks, checkpoints, GracefulStop(checkpoints, recipe.run.timeout_seconds, limit)]


def build_trainer(start: Start, options: TrainerOptions, callbacks: list[Callback]) -> Trainer:
    """Return Lightning's Trainer; `options` are those of `trainer_options`.

    Raises InputError as `make_trainer` does.
    """
    resume = start.plan.resume
    log = RunLog(
        start.plan.recipe.run_folder(),
        resume.step if resume else 0,
        writes=start.folder is not None,
        validation_pending=resume is not None and resume.validation_pending,
    )
    trainer = make_trainer(options, start.plan.job, (AtomicCheckpointIO(),), logger=log, callbacks=callbacks)
    disable_signal_handling(trainer)
    if isinstance(trainer.strategy, ConnectedDDP):
        recipe, device, validation = start.plan.recipe, trainer.strategy.root_device, start.manifest["validation"]
        trainer.strategy.settings = {
            **settings_of_ranks(recipe),
            **shared_processor(recipe.training.optimizer, device.index if device.type == "cuda" else None),
            "BLEU's tokenizer": choose_bleu_tokenizer(recipe, resume).tokenizer,
            # Each node may have a copy of the corpus.
            "training pairs": (start.identity.training_pairs or training_pairs(recipe.corpus_folder()))[:12],
            "validation tokens": [validation["source_tokens"], validation["target_tokens"]],
        }
    return trainer
