"""What a user is told where memory runs out: how much the network alone needs, and what to change."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from model.transformer import Transformer
from pipeline.checkpointing.run_folder import latest_valid, step_of
from pipeline.config.recipe import Recipe
from pipeline.runtime.console import Failure, lacking_memory
from pipeline.runtime.devices import TrainerOptions, device_indices
from pipeline.runtime.launch import node_name, process_rank
from pipeline.runtime.memory import MemoryLimit, host_memory_limit


def memory_of_weights(recipe: Recipe, vocabulary_size: int, options: TrainerOptions) -> tuple[bool, str]:
    """Return whether weights, gradients and two moments fit into a device's memory, and a line that says so."""
    with torch.device("meta"):
        weights = Transformer(vocabulary_size, recipe.network).parameters()
    needed = 4 * sum(weight.nbytes for weight in weights) * (2 if str(options["precision"]).startswith("64") else 1)
    limit = host_memory_limit(len(device_indices(options)))
    if options["accelerator"] != "cpu":
        limit = MemoryLimit(torch.cuda.get_device_properties(0).total_memory, "this GPU")
    line = f"weights, gradients and moments need {needed / 1e9:.1f} GB, and {limit.owner} has {limit.size / 1e9:.1f}"
    return needed < limit.size, line


@contextmanager
def memory_failures_in_one_line(recipe: Recipe, vocabulary_size: int, options: TrainerOptions) -> Iterator[None]:
    """Raise Failure with a line for the user where memory runs out or a loader process is killed."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        batches, lacking = recipe.batches, lacking_memory(error)
        # PyTorch raises it from a signal handler, in whatever the main thread does.
        killed = re.search(r"DataLoader worker.* ((?:is|are) killed by signal: [^.]+|exited unexpectedly)", str(error))
        if killed is not None:
            problem = (
                f"a loader process (batches.workers {batches.workers}) {killed[1]}, as when memory runs out; ask for "
                "more memory, or lower batches.workers"
            )
        elif lacking is not None:
            micro_batch = batches.max_tokens_per_device or batches.batch_tokens
            # Those of validation are smaller.
            fewer = max(recipe.corpus.max_tokens + 1, min(batches.batch_tokens // 8, micro_batch) // 2)
            _, weights = memory_of_weights(recipe, vocabulary_size, options)
            problem = (
                f"out of memory ({lacking}): {weights}; ask for more memory, train a smaller network, or set "
                f"batches.max_tokens_per_device to {fewer} or less"
            )
        else:
            raise
        rank = f"rank {process_rank()} on {node_name()}: " if process_rank() else ""
        newest, _ = latest_valid(recipe.run_folder())
        resumes = f"resumes from step {step_of(newest)}" if newest else "begins again, since no checkpoint was written"
        raise Failure(f"{rank}{problem}; the run {resumes}") from None
