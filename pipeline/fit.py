"""Corpus folder -> run folder. Run again, it resumes; the corpus is prepared first if it is not there.

Settings of the recipe may be given as --section.key value, Lightning's as --trainer.key value.
"""

import argparse
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import stop_request
from pipeline.slurm_job import Step, current_step
from pipeline.stop_request import Stopped, speaks_for_all, stop_if_asked

if TYPE_CHECKING:
    from data_module.settings import CorpusSettings
    from data_module.tokenizer import Tokenizer
    from pipeline.recipe import Recipe
    from pipeline.run_folder import RunFolder
    from pipeline.starting_point import StartingPoint

LOCK_PATIENCE_SECONDS = 120
"""How long a job waits for another writer of its run folder to end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--config", type=Path, action="append", required=True, help="a recipe; overlays may follow")
    parser.add_argument("--fresh", action="store_true", help="start over: remove the run that is there")
    parser.add_argument(
        "--init-from", type=Path, metavar="CHECKPOINT", help="begin a new run from another's weights and tokenizer"
    )


def run(arguments: argparse.Namespace) -> int:
    """Train, or go on training."""
    try:
        return fit(arguments)
    except Stopped as stop:
        if not speaks_for_all(process_rank()):
            return 0
        raise stop if process_rank() == 0 else SystemExit(stop.exit_code) from None


def fit(arguments: argparse.Namespace) -> int:
    """As `run`; raises Stopped when it was asked to stop by a signal."""
    quiet_lightning()
    from data_module.errors import InputError
    from pipeline.checkpoint import newest_whole
    from pipeline.recipe import load_recipe
    from pipeline.run_folder import counted_start
    from pipeline.starting_point import starting_point
    from pipeline.trainer_options import trainer_signature

    step = current_step()
    recipe = load_recipe(arguments.config, arguments.overrides, trainer_signature())
    if not recipe.trainer.get("max_steps"):
        raise InputError("trainer.max_steps is missing; give the number of optimizer steps")
    path = recipe.run_folder()
    begins = arguments.fresh or newest_whole(path)[0] is None
    start = starting_point(arguments.init_from, recipe) if arguments.init_from and begins else None
    with stop_request.at_once():
        ensure_corpus(recipe.corpus, start.tokenizer if start else None)
    if step is None or step.rank > 0:
        return go_on(recipe, start, arguments.fresh, step)
    with counted_start(path, step, newest_whole(path)[0]):
        return go_on(recipe, start, arguments.fresh, step)


def go_on(recipe: "Recipe", start: "StartingPoint | None", fresh: bool, step: Step | None) -> int:
    """Train from where the run stands, or from `start`, if anything is left to train."""
    from data_module.errors import InputError
    from data_module.tokenizer import Tokenizer
    from pipeline.checkpoint import newest_whole
    from pipeline.run_folder import RunFolder, begun_afresh

    path = recipe.run_folder()
    fresh = fresh and not (step is not None and begun_afresh(path, step).exists())
    tokenizer = Tokenizer.load(Path(recipe.corpus.folder) / "tokenizer.model")
    # A job that was just requeued may find the owner it was before; that one ends, or its lock does.
    folder = RunFolder(path, patience_seconds=LOCK_PATIENCE_SECONDS if step else 0) if process_rank() == 0 else None
    checkpoint, skipped = (None, []) if fresh else newest_whole(path)
    for broken in skipped if folder is not None else ():
        print(f"{broken}: is not whole; skipped", file=sys.stderr)
    if folder is not None and checkpoint is not None:
        forbidden, allowed = folder.differences(recipe)
        if forbidden:
            raise InputError(
                f"{path}: holds a run of another recipe: {'; '.join(forbidden)}; "
                "use --fresh to start over, or another run.folder"
            )
        for change in allowed:
            print(f"changed since the run began: {change}", file=sys.stderr)
    if checkpoint is not None:
        if end := how_it_ended(recipe, path, checkpoint):
            if folder is not None:
                print(f"{path}: {end}, or use --fresh", file=sys.stderr)
            return 0
        if folder is not None:
            print(f"resuming from {checkpoint}", file=sys.stderr)
    elif start is not None and folder is not None:
        print(f"beginning from the weights and the tokenizer of {start.path}", file=sys.stderr)
    stop_if_asked("during start-up")
    train(recipe, folder, tokenizer, checkpoint or start, fresh, step)
    if folder is not None:
        print(f"the run lies in {path}; look at it with: tensorboard --logdir {path}", file=sys.stderr)
        folder.close()
    return 0


def how_it_ended(recipe: "Recipe", path: Path, checkpoint: Path) -> str | None:
    """Why there is nothing left to train, and what would change that; None where there is something."""
    from pipeline.run_folder import STOPPED_EARLY

    step = step_of(checkpoint)
    if step >= recipe.trainer["max_steps"]:
        return f"finished at step {step}; raise trainer.max_steps to go on"
    if (path / STOPPED_EARLY).exists():
        stop = json.loads((path / STOPPED_EARLY).read_text())
        if stop["step"] == step and recipe.run.patience is not None and recipe.run.patience <= stop["patience"]:
            return f"stopped early at step {step} after {stop['patience']} validations; raise run.patience to go on"
    return None


def step_of(checkpoint: Path) -> int:
    """The optimizer steps that a checkpoint has behind it, from its name."""
    return int(checkpoint.stem.removeprefix("step="))


def ensure_corpus(settings: "CorpusSettings", tokenizer: "Tokenizer | None" = None) -> None:
    """Prepare the corpus, or see that the one that is there is of these texts and settings.

    A given tokenizer takes the place of one learned from the text.

    Of several ranks one prepares it and the others wait; only the first looks at texts again, where they are at hand.

    Raises InputError as `prepare` does.
    """
    from data_module.errors import InputError
    from data_module.manifest import is_corpus, read_manifest, summary
    from data_module.preparation import differs_from, prepare
    from data_module.text_sources import is_at_hand

    folder = Path(settings.folder)
    if not is_corpus(folder):
        manifest = prepare(settings, tokenizer)
        if process_rank() == 0:
            print(summary(manifest), file=sys.stderr)
    elif process_rank() == 0 and all(map(is_at_hand, settings.texts())):
        prepare(settings)  # reads all texts to see that they are the same: once is enough
    elif differences := differs_from(read_manifest(folder), settings):
        raise InputError(
            f"{folder}: was made with other settings: {'; '.join(differences)}; name another corpus.folder"
        )


def train(
    recipe: "Recipe",
    folder: "RunFolder | None",
    tokenizer: "Tokenizer",
    begin: "Path | StartingPoint | None",
    fresh: bool,
    step: Step | None,
) -> None:
    """Wire and run Lightning's Trainer. The folder is None on all ranks but the first, which alone writes.

    `begin` is the run's own checkpoint to go on from, or another's.

    Nothing is removed or written before everything that can be wrong with a recipe has been looked at.
    """
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import Callback, EarlyStopping
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from data_module.batch import SpecialIds
    from data_module.errors import InputError
    from data_module.manifest import read_manifest
    from data_module.translation_data_module import TranslationDataModule
    from model.translation_module import TranslationModule
    from pipeline.checkpoint_keeper import CheckpointKeeper, MovingAverage, WholeCheckpointIO
    from pipeline.memory import MemoryProbe
    from pipeline.monitoring.ceiling import flops_per_target_token
    from pipeline.monitoring.description import Description
    from pipeline.monitoring.history import first_submission, note_start
    from pipeline.monitoring.looking import Pictures
    from pipeline.monitoring.monitor import Monitor
    from pipeline.monitoring.run_log import RunLog
    from pipeline.monitoring.validation_text import ValidationText
    from pipeline.run_folder import STOPPED_EARLY
    from pipeline.together import Together, own_signals
    from pipeline.trainer_options import (
        cluster_environment,
        compiles,
        precision_plugin,
        seconds_allowed,
        trainer_options,
    )
    from pipeline.whole_file import whole_file

    path = recipe.run_folder()
    checkpoint = begin if isinstance(begin, Path) else None
    special = SpecialIds(pad=tokenizer.pad_id, bos=tokenizer.bos_id, eos=tokenizer.eos_id)
    options = trainer_options(recipe.trainer, step, recipe.run.timeout_seconds)
    plugins = [WholeCheckpointIO(), cluster_environment(step), float16 := precision_plugin(options)]
    torch.manual_seed(recipe.run.seed)
    module = TranslationModule(
        tokenizer.vocabulary_size,
        special,
        recipe.network,
        recipe.training,
        recipe.decoding,
        recipe.run.seed,
        compiled=compiles(recipe.run.compile, recipe.trainer.get("accelerator", "auto")),
        scaled=float16 is not None,
    )
    if begin is not None and not isinstance(begin, Path):
        module.network.load_state_dict(begin.weights)
    data = TranslationDataModule(Path(recipe.corpus.folder), recipe.batches, special, recipe.run.seed)
    if recipe.network.learned_positions and data.longest > recipe.network.max_positions:
        raise InputError(
            f"network.max_positions {recipe.network.max_positions} is less than the longest training sentence, "
            f"{data.longest} tokens; raise it, or lower corpus.max_tokens"
        )
    sources, references = data.validation_text()
    if tokenizer.lowercase:  # what it writes can be compared with lower-cased text only
        references = [reference.lower() for reference in references]
    # The keeper stands behind them, so that what it saves has seen what the others did.
    monitor = Monitor(
        recipe.run.log_every_steps,
        flops_per_target_token(recipe.network, tokenizer.vocabulary_size, data.train_corpus),
    )
    texts = ValidationText(sources, references, tokenizer)
    description = Description(recipe, read_manifest(data.folder), monitor)
    callbacks: list[Callback] = [
        MemoryProbe(data.micro_batch_tokens, data.longest),
        texts,
        Pictures(recipe.monitoring, texts, sources, tokenizer, data.train_corpus, recipe.network),
        monitor,
        description,
    ]
    patience = recipe.run.patience
    early_stopping = EarlyStopping("validation/bleu", mode="max", patience=patience or 1)
    if patience is not None:
        callbacks.append(early_stopping)
    if recipe.training.ema_decay is not None:
        callbacks.append(MovingAverage(decay=recipe.training.ema_decay))
    keeper = CheckpointKeeper(path, recipe, tokenizer, monitor.clock)
    callbacks += [keeper, Together(keeper, recipe.run.timeout_seconds, seconds_allowed(options.pop("max_time", None)))]
    log = RunLog(path, step_of(checkpoint) if checkpoint else 0, writes=folder is not None)
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
        log.cut_back()
        description.starts = note_start(log, step)
        monitor.submitted = first_submission(description.starts)
    own_signals(trainer)
    with stop_request.keyboard_too():
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    if folder is not None and patience is not None and early_stopping.wait_count >= patience:
        stop = {"step": trainer.global_step, "patience": patience}
        with whole_file(path / STOPPED_EARLY) as file:
            file.write(json.dumps(stop).encode())


def process_rank() -> int:
    """This process's rank before Lightning has set anything up."""
    # Lightning's own launcher sets LOCAL_RANK, also inside an interactive SLURM job, where SLURM_PROCID is 0 for all.
    for names in (("RANK",), ("LOCAL_RANK", "NODE_RANK"), ("SLURM_PROCID",)):
        if os.environ.get(names[0], "").isdigit():
            return sum(int(os.environ.get(name, 0)) for name in names)
    return 0


def quiet_lightning() -> None:
    """Lightning's greetings and its advice on loaders it does not know."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*treespec, LeafSpec.*")
    warnings.filterwarnings("ignore", ".*overridden `transfer_batch_to_device`.*")  # which is meant
    warnings.filterwarnings("ignore", ".*`srun` command is available.*")
    # Scores are summed over ranks before they are logged.
    warnings.filterwarnings("ignore", ".*recommended to use .*sync_dist=True.*")
