"""Choose which checkpoints of a run to average, by scores on its validation text (`average --best`)."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_module.errors import PROGRAM, InputError
from pipeline.checkpointing.checkpoint import WeightMean, average, check_same_model, load_model, read_checkpoint
from pipeline.checkpointing.checkpoint_files import (
    around_best_checkpoints,
    around_best_path,
    is_valid,
    nearest_steps,
    step_checkpoints,
    step_of,
)
from pipeline.inference.bleu_tokenizer import choose_tokenizer
from pipeline.inference.text_io import progress_bar
from pipeline.inference.validation_scorer import ValidationScorer
from pipeline.runtime.console import say


@dataclass(frozen=True)
class Saved:
    """A checkpoint of a run."""

    path: Path
    step: int

    def read(self) -> dict[str, Any]:
        """Return its contents, memory-mapped; they are not kept, so that not all checkpoints are in memory.

        Raises InputError when `fit` has removed or replaced the file.
        """
        moved = self.path.parent / around_best_path(Path(), self.step).parent.name / self.path.name
        path = moved if not self.path.exists() and moved.exists() else self.path
        contents = read_checkpoint(path) if path.exists() else None
        if contents is None or int(contents.get("global_step", self.step)) != self.step:
            raise InputError(f"{self.path}: fit has removed it during the comparison; run the same command again")
        return contents


def saved_checkpoints(run: Path) -> dict[int, Saved]:
    """Return a run's complete checkpoints by step: the newest, those around the best validation, and the best one.

    Raises InputError when there is none, or when networks or vocabularies differ.
    """
    found: dict[int, Saved] = {}
    paths = {step_of(path): path for path in (*around_best_checkpoints(run), *step_checkpoints(run)) if is_valid(path)}
    for step, path in paths.items():
        found[step] = Saved(path, step)
    best = run / "checkpoints" / "best.ckpt"
    if is_valid(best):
        # A validation need not be at a step that is saved.
        step = int(read_checkpoint(best).get("global_step", 0))
        found.setdefault(step, Saved(best, step))
    if not found:
        raise InputError(f"{run}: holds no checkpoint; give a run folder that fit wrote")
    newest = found[max(found)]
    contents = newest.read()
    for saved in found.values():
        check_same_model(saved.path, saved.read(), newest.path, contents)
    return dict(sorted(found.items()))


def greedy_search(
    steps: Iterable[int], limit: int, score: Callable[[int], float], add: Callable[[int], None]
) -> list[tuple[int, float]]:
    """Add checkpoints to an average, each time the one that lowers its score most, until none does.

    It is the greedy soup of Wortsman et al. (2022, arXiv 2203.05482), which tries each model once in the order of their
    own scores; here all that are left are tried in each round.

    Args:
        steps: the checkpoints.
        limit: how many to add at most.
        score: returns the score of the average with one more checkpoint; lower is better.
        add: adds a checkpoint to the average.

    Returns:
        The checkpoints in the order in which they were added, each with the score of the average after it.
    """
    left, chosen = sorted(steps), list[tuple[int, float]]()
    while left and len(chosen) < limit:
        best, step = min((score(step), step) for step in left)
        if chosen and not best < chosen[-1][1]:
            break
        add(step)
        left.remove(step)
        chosen.append((step, best))
    return chosen


class BestAverage:
    """Compares two averages of a run's checkpoints, and takes the one with the better BLEU on the validation text.

    One is of the checkpoints around the best validation, the other is what `greedy_search` finds by negative
    log-likelihood, which takes a forward pass where BLEU takes a translation.
    """

    def __init__(self, run: Path, saved: dict[int, Saved]) -> None:
        """Load the network and open the validation text.

        Args:
            run: the run folder.
            saved: what `saved_checkpoints` returned.

        Raises:
            InputError: the validation text is gone or has another vocabulary.
        """
        self._saved = saved
        model = load_model(saved[max(saved)].path)
        corpus = model.recipe["corpus"]
        bleu_tokenizer, _ = choose_tokenizer(model.recipe["run"].get("bleu_tokenizer"), corpus["target_language"])
        network = model.network.to("cuda" if torch.cuda.is_available() else "cpu")
        try:
            self._scorer = ValidationScorer(
                network, model.tokenizer, model.decoding, Path(corpus["folder"]), bleu_tokenizer
            )
        except (InputError, FileNotFoundError) as error:
            reason = str(error).split(";")[0]
            raise InputError(
                f"{run}: its validation text is needed to choose checkpoints, and {reason}; prepare it again with "
                f"{PROGRAM} prepare --config {run / 'config.yaml'}, or give --last N"
            ) from None

    def choose(self, best_step: int, count: int) -> dict[str, Any]:
        """Return what was compared and chosen, as plain values.

        Args:
            best_step: the step of the best validation.
            count: the number of checkpoints around it; the greedy search chooses as many at most.
        """
        window = nearest_steps(self._saved, best_step, count)
        alone: dict[int, float] = {}
        greedy = self._search(count, alone)
        sets = {"window": window, "greedy": sorted(step for step, _ in greedy)}
        averages: dict[str, dict[str, Any]] = {}
        for name, steps in sets.items():
            same = next((other for other in averages.values() if other["steps"] == steps), None)
            averages[name] = dict(same) if same else self._scores(steps, name)
        averages["greedy"]["search"] = [{"added": step, "negative_log_likelihood": score} for step, score in greedy]
        chosen = max(averages, key=lambda name: (averages[name]["bleu"], -averages[name]["negative_log_likelihood"]))
        checkpoints = [
            {"step": step, "checkpoint": saved.path.name, "negative_log_likelihood": alone[step]}
            for step, saved in self._saved.items()
        ]
        return {"chosen": chosen, **averages, "checkpoints": checkpoints, "bleu_signature": self._scorer.signature}

    def average(self, steps: list[int]) -> dict[str, Any]:
        """Return the averaged checkpoint of these steps."""
        saved = {self._saved[step].path: self._saved[step] for step in steps}
        return average(list(saved), lambda path: saved[path].read())

    def _search(self, count: int, alone: dict[int, float]) -> list[tuple[int, float]]:
        """Return what `greedy_search` finds; `alone` receives the score of each checkpoint by itself."""
        mean, size = WeightMean(), len(self._scorer)
        # Each round tries those that are left.
        trials = sum(len(self._saved) - round_ for round_ in range(count))
        with progress_bar(trials * size, description="scoring averages") as bar:

            def score(step: int) -> float:
                self._load(mean, self._saved[step].read())
                found = _or_worst(self._scorer.negative_log_likelihood(bar))
                if not mean.count:
                    alone[step] = found
                return found

            return greedy_search(self._saved, count, score, lambda step: mean.add(self._saved[step].read()))

    def _scores(self, steps: list[int], name: str) -> dict[str, Any]:
        mean = WeightMean()
        for step in steps:
            mean.add(self._saved[step].read())
        self._load(mean)
        with progress_bar(2 * len(self._scorer), description=f"scoring {name}") as bar:
            scores = {
                "negative_log_likelihood": _or_worst(self._scorer.negative_log_likelihood(bar)),
                "bleu": self._scorer.bleu(bar),
            }
        say(
            f"{name}: steps {', '.join(map(str, steps))}: validation BLEU {scores['bleu']:.2f}, "
            f"negative log-likelihood {scores['negative_log_likelihood']:.4f}"
        )
        return {"steps": steps, **scores}

    @torch.no_grad()
    def _load(self, mean: WeightMean, other: dict[str, Any] | None = None) -> None:
        """Copy a mean into the network, with one more checkpoint in it if that is given."""
        weights = self._scorer.network.state_dict()
        for name, tensor in mean.items(other):
            if name.startswith("network."):
                weights[name.removeprefix("network.")].copy_(tensor)


def _or_worst(score: float) -> float:
    """Return infinity in place of NaN, which compares as neither better nor worse."""
    return math.inf if math.isnan(score) else score
