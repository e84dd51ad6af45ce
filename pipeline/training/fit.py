"""`fit`, from its recipe to the plan of its start, which `train.py` follows.

torch and Lightning take seconds to import, so checks that do not need them come first.
"""

from contextlib import ExitStack
from pathlib import Path

from pipeline.checkpointing.run_folder import RunFolder
from pipeline.config.recipe import Recipe
from pipeline.config.settings import validate_trainer_keys
from pipeline.runtime.console import quiet_lightning
from pipeline.runtime.launch import current_step, process_rank
from pipeline.training.recipe_checks import Report, check_recipe

LOCK_PATIENCE_SECONDS = 120
"""How long a SLURM job waits for another process that writes to its run folder."""


def fit_recipe(recipe: Recipe, fresh: bool, init_from: Path | None) -> int:
    """Prepare the corpus if necessary, then start or resume the recipe's run; return the exit code.

    `fresh` removes an existing run from the run folder. `init_from` is a checkpoint, run folder or Marian model whose
    weights and tokenizer a new run takes over.

    Raises InputError for a user's mistake, Stopped when a signal or `trainer.max_time` stopped the run.
    """
    quiet_lightning()
    with recipe.naming_places(), ExitStack() as stack:
        job, folder = current_step(), None
        validate_trainer_keys(recipe.trainer)
        if process_rank() == 0:
            check_recipe(recipe, job, fresh, Report())
            # Locked until training ends, so that no other process writes to the run. A requeued job may find its
            # predecessor still writing: that process ends, or its lock is released.
            folder = RunFolder(recipe.run_folder(), patience_seconds=LOCK_PATIENCE_SECONDS if job else 0)
            stack.callback(folder.close)
        # The checks so far did not need torch and Lightning, which take seconds to import.
        from pipeline.training.start import plan_start
        from pipeline.training.train import follow

        follow(plan_start(recipe, job, fresh, init_from), folder)
    return 0
