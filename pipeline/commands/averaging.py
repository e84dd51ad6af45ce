"""What `average` does: it chooses checkpoints of a run and writes the mean of their weights."""

from contextlib import suppress
from pathlib import Path

from data_module.errors import InputError
from data_module.system.files import PlainValues
from pipeline.checkpointing.checkpoint import Checkpoint, average, check_members, read_checkpoint, write_atomic
from pipeline.checkpointing.run_folder import (
    METRICS,
    all_checkpoints,
    best_by,
    best_path,
    is_valid,
    nearest_steps,
    read_metrics,
    step_checkpoints,
    step_of,
)
from pipeline.config.settings import validation_tag
from pipeline.metrics.metrics import mode_of, title_and_score
from pipeline.runtime.console import report


def write_average(run: Path, option: str, count: int, output: Path) -> None:
    """Write the average of a run's newest checkpoints ("last"), or of those around its best validation ("best").

    Raises InputError when there are fewer checkpoints, no validation scores, or checkpoints of another run, or `output`
    is a file other than an average.
    """
    if output.is_file() and not output.is_symlink() and not is_average(output):
        raise InputError(f"{output}: is there, and is no average; give another file as --output, or move it away")
    check_members(run, all_checkpoints(run))
    if option == "best":
        averaged = average_best(run, count)
    else:
        paths = [path for path in step_checkpoints(run) if is_valid(path)]
        require_enough(run, "--last", count, len(paths))
        averaged = average([*map(read_checkpoint, paths[-count:])])
    write_atomic(averaged, output)
    report(f"averaged {', '.join(averaged['averaged'])}")


def is_average(path: Path) -> bool:
    """Return whether a file is an averaged checkpoint, and not damaged."""
    with suppress(InputError):
        return "averaged" in read_checkpoint(path).contents
    return False


def average_best(run: Path, count: int) -> PlainValues:
    """Return the average of the checkpoints around the best validation, with a record of how they were chosen."""
    saved = saved_checkpoints(run)
    require_enough(run, "--best", count, len(saved))
    metric = best_by(run)
    step, score = best_validation(run, metric)
    report(f"best validation: step {step}: {title_and_score(metric, score)}")
    chosen = nearest_steps(saved, step, count)
    selection = {
        "option": f"--best {count}",
        "run_step": max(saved),
        "best_validation": {"step": step, metric: score},
        "steps": chosen,
    }
    return {**average([saved[near] for near in chosen]), "selection": selection}


def saved_checkpoints(run: Path) -> dict[int, Checkpoint]:
    """Return a run's complete checkpoints by step: the newest, those around the best validation, and the best one.

    All are open from then on, since `fit` may move, remove or replace their files meanwhile.
    """
    # The newest are listed first, because `fit` moves checkpoints from their folder to `around-best`.
    paths = [*step_checkpoints(run), *step_checkpoints(run, around_best=True)]
    saved = {step_of(path): read_checkpoint(path) for path in paths if is_valid(path)}
    if is_valid(best_path(run)):
        # The best validation may be at a step without another checkpoint.
        best = read_checkpoint(best_path(run))
        saved.setdefault(best.step, best)
    return saved


def best_validation(run: Path, metric: str) -> tuple[int, float]:
    """Return the step and the score of the best validation in the run's log.

    Raises InputError when the log has none, or when the metric is not registered.
    """
    best, key = (max if mode_of(metric) == "max" else min), validation_tag(metric)
    scores = [(line["step"], float(line[key])) for line in read_metrics(run) if line.get(key) is not None]
    if not scores:
        raise InputError(f"{run}: {METRICS} has no validation scores to choose checkpoints by; give --last N")
    return best(scores, key=lambda score: score[1])  # The first of equal scores, as for best.ckpt.


def require_enough(run: Path, option: str, count: int, available: int) -> None:
    """Raise InputError when there are fewer checkpoints than are to be averaged."""
    if not available:
        raise InputError(f"{run}: holds no checkpoint; give a run folder that fit wrote")
    if count > available:
        has = f"{available} valid checkpoint{'s' if available > 1 else ''}"
        raise InputError(
            f"{run}: has {has}, {option} is {count}; give {option} {available} or less, and keep more with "
            "run.keep_last"
        )
