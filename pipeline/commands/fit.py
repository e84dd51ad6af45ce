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

from pipeline.runtime import signals as stop_request
from pipeline.runtime.slurm import Step, current_step
from pipeline.runtime.signals import Stopped, speaks_for_all

if TYPE_CHECKING:
    from data_module.settings import CorpusSettings
    from data_module.tokenization.tokenizer import Tokenizer
    from pipeline.config.recipe import Recipe
    from pipeline.training.init_from import StartingPoint

LOCK_PATIENCE_SECONDS = 120
"""How long a job waits for another writer of its run folder to end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--config", type=Path, action="append", required=True, help="a recipe; again for each overlay")
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
    finally:
        stop_request.ignore()


def fit(arguments: argparse.Namespace) -> int:
    """As `run`; raises Stopped when it was asked to stop by a signal."""
    quiet_lightning()
    from pipeline.checkpointing.checkpoint import newest_whole
    from pipeline.config.recipe import load_recipe
    from pipeline.checkpointing.run_folder import counted_start
    from pipeline.training.init_from import starting_point
    from pipeline.training.trainer import refuse, trainer_signature

    step = current_step()
    recipe = load_recipe(arguments.config, arguments.overrides, trainer_signature())
    refuse(recipe.trainer)
    path = recipe.run_folder()
    fresh = begins_afresh(arguments.fresh, path, step)
    begins = fresh or newest_whole(path)[0] is None
    start = starting_point(arguments.init_from, recipe) if arguments.init_from and begins else None
    if arguments.init_from and not begins and process_rank() == 0:
        print(f"{path}: this run has begun already, so --init-from is not looked at", file=sys.stderr)
    ensure_corpus(recipe.corpus, start.tokenizer if start else None)
    if step is None or step.rank > 0:
        return go_on(recipe, start, fresh, step)
    with counted_start(path, step, newest_whole(path)[0]):
        return go_on(recipe, start, fresh, step)


def begins_afresh(fresh: bool, path: Path, step: Step | None) -> bool:
    """Whether the run that is there is to be removed: `--fresh`, but for a job that has done so and is back."""
    from pipeline.checkpointing.run_folder import begun_afresh

    return fresh and not (step is not None and begun_afresh(path, step).exists())


def go_on(recipe: "Recipe", start: "StartingPoint | None", fresh: bool, step: Step | None) -> int:
    """Train from where the run stands, or from `start`, if anything is left to train."""
    from data_module.errors import InputError
    from data_module.tokenization.tokenizer import Tokenizer
    from pipeline.checkpointing.checkpoint import newest_whole, read_checkpoint
    from pipeline.checkpointing.run_folder import RunFolder, another_run, differences
    from pipeline.training.build import train

    path = recipe.run_folder()
    tokenizer = Tokenizer.load(Path(recipe.corpus.folder) / "tokenizer.model")
    # A job that was just requeued may find the owner it was before; that one ends, or its lock does.
    folder = RunFolder(path, patience_seconds=LOCK_PATIENCE_SECONDS if step else 0) if process_rank() == 0 else None
    checkpoint, skipped = (None, []) if fresh else newest_whole(path)
    for broken in skipped if folder is not None else ():
        print(f"{broken}: is not whole; skipped", file=sys.stderr)
    if folder is not None and checkpoint is not None:
        forbidden, allowed = differences(path, recipe)
        if forbidden:
            raise InputError(another_run(path, forbidden))
        if bytes(read_checkpoint(checkpoint)["translation"]["tokenizer"].numpy()) != tokenizer.model:
            raise InputError(
                f"{recipe.corpus.folder}: has another vocabulary than the run in {path}; name another corpus.folder "
                f"and make it with `prepare --init-from {path}`, or use --fresh to start over, or another run.folder"
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
    train(recipe, folder, tokenizer, checkpoint or start, fresh, step)
    if folder is not None:
        print(f"the run lies in {path}; look at it with: .venv/bin/tensorboard --logdir {path}", file=sys.stderr)
        folder.close()
    return 0


def how_it_ended(recipe: "Recipe", path: Path, checkpoint: Path) -> str | None:
    """Why there is nothing left to train, and what would change that; None where there is something."""
    from pipeline.checkpointing.checkpoint import step_of
    from pipeline.checkpointing.run_folder import STOPPED_EARLY

    step = step_of(checkpoint)
    if step >= recipe.trainer["max_steps"]:
        return f"finished at step {step}; raise trainer.max_steps to go on"
    if (path / STOPPED_EARLY).exists():
        stop = json.loads((path / STOPPED_EARLY).read_text())
        if stop["step"] == step and recipe.run.patience is not None and recipe.run.patience <= stop["patience"]:
            without = f"{stop['patience']} validations without a better BLEU"
            return f"stopped early at step {step} after {without}; raise run.patience to go on"
    return None


def ensure_corpus(settings: "CorpusSettings", tokenizer: "Tokenizer | None" = None) -> None:
    """Prepare the corpus, or see that the one that is there is of these texts and settings.

    A given tokenizer takes the place of one learned from the text.

    Of several ranks one prepares it and the others wait; only the first looks at texts again, where they are at hand.
    Asked to stop while a corpus is made, all end at once. Where there is one, no rank ends by itself, before or after:
    the others would wait for it in vain until they are killed. They agree on it when they have met.

    Raises InputError as `prepare` does.
    """
    from data_module.errors import InputError
    from data_module.corpus.manifest import is_corpus, read_manifest, summary
    from data_module.corpus.preparation import differs_from, prepare
    from data_module.readers.text_sources import is_at_hand

    folder = Path(settings.folder)
    if not is_corpus(folder):
        with stop_request.at_once():
            manifest = prepare(settings, tokenizer)
        if process_rank() == 0:
            print(summary(manifest), file=sys.stderr)
    elif process_rank() == 0 and all(map(is_at_hand, settings.texts())):
        prepare(settings)  # reads all texts to see that they are the same: once is enough
    elif differences := differs_from(read_manifest(folder), settings):
        raise InputError(
            f"{folder}: was made with other settings: {'; '.join(differences)}; name another corpus.folder"
        )


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
