"""What `fit` does with the run folder it is given: start a run, resume one, or report that it has finished."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.runtime.console import quiet_lightning
from pipeline.runtime.launch import process_rank
from pipeline.runtime.slurm import JobStep, current_step
from pipeline.training.corpus import ensure_corpus

if TYPE_CHECKING:
    from pipeline.config.recipe import Recipe
    from pipeline.training.init_from import InitialWeights

LOCK_PATIENCE_SECONDS = 120
"""How long a job waits for another writer of its run folder to end."""


def fit(arguments: argparse.Namespace) -> int:
    """As `run`; raises Stopped when it was asked to stop by a signal."""
    quiet_lightning()
    from pipeline.checkpointing.checkpoint import latest_valid
    from pipeline.checkpointing.run_folder import count_start
    from pipeline.config.recipe import load_recipe
    from pipeline.config.trainer_keys import refuse, trainer_signature
    from pipeline.training.init_from import load_initial_weights

    step = current_step()
    recipe = load_recipe(arguments.config, arguments.overrides, trainer_signature())
    refuse(recipe.trainer)
    path = recipe.run_folder()
    fresh = should_reset(arguments.fresh, path, step)
    begins = fresh or latest_valid(path)[0] is None
    start = load_initial_weights(arguments.init_from, recipe) if arguments.init_from and begins else None
    if arguments.init_from and not begins and process_rank() == 0:
        print(f"{path}: this run has begun already, so --init-from is not looked at", file=sys.stderr)
    ensure_corpus(recipe.corpus, start.tokenizer if start else None)
    if step is None or step.rank > 0:
        return resume_or_start(recipe, start, fresh, step)
    with count_start(path, step, latest_valid(path)[0]):
        return resume_or_start(recipe, start, fresh, step)


def should_reset(fresh: bool, path: Path, step: JobStep | None) -> bool:
    """Whether the run that is there is to be removed: `--fresh`, but for a job that has done so and is back."""
    from pipeline.checkpointing.run_folder import reset_marker

    return fresh and not (step is not None and reset_marker(path, step).exists())


def resume_or_start(recipe: "Recipe", start: "InitialWeights | None", fresh: bool, step: JobStep | None) -> int:
    """Train from where the run stands, or from `start`, if anything is left to train."""
    from data_module.errors import InputError
    from data_module.tokenization.tokenizer import Tokenizer
    from pipeline.checkpointing.checkpoint import latest_valid, read_checkpoint
    from pipeline.checkpointing.run_folder import RunFolder, another_run_message, differences
    from pipeline.training.build import train

    path = recipe.run_folder()
    tokenizer = Tokenizer.load(Path(recipe.corpus.folder) / "tokenizer.model")
    # A job that was just requeued may find the owner it was before; that one ends, or its lock does.
    folder = RunFolder(path, patience_seconds=LOCK_PATIENCE_SECONDS if step else 0) if process_rank() == 0 else None
    checkpoint, skipped = (None, []) if fresh else latest_valid(path)
    for broken in skipped if folder is not None else ():
        print(f"{broken}: is not whole; skipped", file=sys.stderr)
    if folder is not None and checkpoint is not None:
        forbidden, allowed = differences(path, recipe)
        if forbidden:
            raise InputError(another_run_message(path, forbidden))
        if bytes(read_checkpoint(checkpoint)["translation"]["tokenizer"].numpy()) != tokenizer.model:
            raise InputError(
                f"{recipe.corpus.folder}: has another vocabulary than the run in {path}; name another corpus.folder "
                f"and make it with `prepare --init-from {path}`, or use --fresh to start over, or another run.folder"
            )
        for change in allowed:
            print(f"changed since the run began: {change}", file=sys.stderr)
    if checkpoint is not None:
        if end := finished_reason(recipe, path, checkpoint):
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


def finished_reason(recipe: "Recipe", path: Path, checkpoint: Path) -> str | None:
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
