"""A recipe's training, wired: module, data, callbacks, Lightning's Trainer."""

import json
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from data_module.batching.batch import SpecialIds
from data_module.corpus.manifest import read_manifest
from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer
from data_module.translation_data_module import TranslationDataModule
from model.translation_module import TranslationModule
from pipeline.checkpointing.callback import AtomicCheckpointIO, CheckpointCallback
from pipeline.checkpointing.checkpoint import step_of
from pipeline.checkpointing.ema import EMA
from pipeline.checkpointing.run_folder import STOPPED_EARLY, RunFolder
from pipeline.config.recipe import Recipe
from pipeline.config.trainer_keys import max_seconds
from pipeline.monitoring.attention_plots import AttentionPlots
from pipeline.monitoring.mfu import flops_per_target_token
from pipeline.monitoring.monitor import Monitor
from pipeline.monitoring.run_log import RunLog
from pipeline.monitoring.run_metadata import RunMetadata
from pipeline.monitoring.starts import first_submission, record_start
from pipeline.monitoring.validation_samples import ValidationSamples
from pipeline.runtime import signals as stop_request
from pipeline.runtime.atomic_file import atomic_file
from pipeline.runtime.console import say
from pipeline.runtime.slurm import JobStep
from pipeline.training.compilation import should_compile, start_compiler
from pipeline.training.early_stopping import ResumableEarlyStopping
from pipeline.training.graceful_stop import GracefulStop, disable_lightning_signals, validation_is_pending
from pipeline.training.init_from import InitialWeights
from pipeline.training.memory_probe import MemoryProbe
from pipeline.training.precision import precision_plugin
from pipeline.training.trainer import cluster_environment, trainer_options


def module_and_data(
    recipe: Recipe, tokenizer: Tokenizer, scaled: bool = False
) -> tuple[TranslationModule, TranslationDataModule]:
    """What is trained, its weights drawn by the recipe's seed, and on what; `scaled` for float16."""
    special = SpecialIds(pad=tokenizer.pad_id, bos=tokenizer.bos_id, eos=tokenizer.eos_id)
    torch.manual_seed(recipe.run.seed)
    module = TranslationModule(
        tokenizer.vocabulary_size,
        special,
        recipe.network,
        recipe.training,
        recipe.decoding,
        recipe.run.seed,
        compiled=should_compile(recipe.run.compile, recipe.trainer.get("accelerator", "auto")),
        scaled=scaled,
    )
    return module, TranslationDataModule(Path(recipe.corpus.folder), recipe.batches, special, recipe.run.seed)


def train(
    recipe: Recipe,
    folder: RunFolder | None,
    tokenizer: Tokenizer,
    begin: Path | InitialWeights | None,
    fresh: bool,
    step: JobStep | None,
) -> None:
    """Wire and run Lightning's Trainer. The folder is None on all ranks but the first, which alone writes.

    `begin` is the run's own checkpoint to go on from, or another's.

    Nothing is removed or written before everything that can be wrong with a recipe has been looked at.
    """
    path = recipe.run_folder()
    checkpoint = begin if isinstance(begin, Path) else None
    options = trainer_options(recipe.trainer, step, recipe.run.timeout_seconds)
    plugins = [AtomicCheckpointIO(), cluster_environment(step), float16 := precision_plugin(options)]
    module, data = module_and_data(recipe, tokenizer, scaled=float16 is not None)
    if module.compiled_forward is not None and torch.cuda.is_available():
        start_compiler()
    if begin is not None and not isinstance(begin, Path):
        module.network.load_state_dict(begin.weights)
    longest = max(data.longest, 1 + data.validation_corpus.longest)
    if recipe.network.learned_positions and longest > recipe.network.max_positions:
        raise InputError(
            f"network.max_positions {recipe.network.max_positions} is less than the longest sentence trained or "
            f"validated on, {longest} tokens; raise it, or lower corpus.max_tokens"
        )
    sources, references = data.validation_text()
    if tokenizer.lowercase:  # what it writes can be compared with lower-cased text only
        references = [reference.lower() for reference in references]
    # The keeper stands behind them, so that what it saves has seen what the others did.
    monitor = Monitor(
        recipe.run.log_every_steps,
        flops_per_target_token(recipe.network, tokenizer.vocabulary_size, data.train_corpus),
    )
    texts = ValidationSamples(sources, references, tokenizer)
    description = RunMetadata(recipe, read_manifest(data.folder), monitor)
    callbacks: list[Callback] = [
        MemoryProbe(data.micro_batch_tokens, data.longest),
        texts,
        AttentionPlots(recipe.monitoring, texts, sources, tokenizer, data.train_corpus, recipe.network),
        monitor,
        description,
    ]
    patience = recipe.run.patience
    early_stopping = ResumableEarlyStopping("validation/bleu", mode="max", patience=patience or 1)
    if patience is not None:
        callbacks.append(early_stopping)
    if recipe.training.ema_decay is not None:
        callbacks.append(EMA(decay=recipe.training.ema_decay))
    keeper = CheckpointCallback(path, recipe, tokenizer, monitor.clock)
    callbacks += [keeper, GracefulStop(keeper, recipe.run.timeout_seconds, max_seconds(options.pop("max_time", None)))]
    step_before, pending = (step_of(checkpoint), validation_is_pending(checkpoint)) if checkpoint else (0, False)
    log = RunLog(path, step_before, writes=folder is not None, validation_pending=pending)
    try:
        trainer = Trainer(
            **options,
            max_epochs=-1,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            logger=log,
            callbacks=callbacks,
            plugins=[plugin for plugin in plugins if plugin is not None],
        )
    except (MisconfigurationException, ValueError, ImportError) as error:
        # What the machine does not have, or keys that exclude one another.
        raise InputError(f"trainer: {' '.join(str(error).split())}") from None
    if folder is not None:
        if fresh:
            folder.remove_run(step)
        folder.write_config(recipe, tokenizer.model)
        log.truncate_after()
        description.starts = record_start(log, step)
        monitor.submitted = first_submission(description.starts)
    disable_lightning_signals(trainer)
    with stop_request.keyboard_interrupt_noted():
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    if folder is not None and patience is not None and early_stopping.wait_count >= patience:
        stop = {"step": trainer.global_step, "patience": patience}
        with atomic_file(path / STOPPED_EARLY) as file:
            file.write(json.dumps(stop).encode())
        say(f"stopped early at step {trainer.global_step} after {patience} validations without a better BLEU")
