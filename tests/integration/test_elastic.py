"""A run that goes on with another number of ranks: the same pairs, the same curve."""

import json
import time
from pathlib import Path

import pytest
import torch

from data_module.corpus.store import open_corpus
from tests.integration.runs import checkpoints, kill, position, scalars, start, step_of

Step = dict[int, list[int]]
"""What each rank trained on."""


class Stage:
    """One start of a run, and the notes of what it trained on."""

    def __init__(self, notes: Path, *command: object, kill_after: Path | None = None) -> None:
        notes.mkdir()
        process = start(*command, module="tests.integration.recording", NOTES=str(notes))
        while kill_after is not None and not kill_after.exists() and process.poll() is None:
            time.sleep(0.01)
        assert kill(process) if kill_after is not None else process.wait() == 0
        self.steps: dict[int, Step] = {}
        self.places: dict[int, tuple[int, int]] = {}
        """Epoch and place in it, by step."""
        lines = [json.loads(line) for file in notes.iterdir() for line in file.read_text().splitlines()]
        for line in lines:
            share = self.steps.setdefault(line["step"], {})
            assert line["rank"] not in share
            share[line["rank"]] = line["pairs"]
            place = (line["epoch"], line["index"])
            assert self.places.setdefault(line["step"], place) == place
            self.ranks = line["ranks"]


def together(step: Step) -> list[int]:
    return sorted(pair for pairs in step.values() for pair in pairs)


@pytest.mark.slow
def test_one_two_three_one(tiny_corpus: Path, recipe_file: Path, tmp_path: Path) -> None:
    command = ["fit", "--config", recipe_file, "--run.log_every_steps", 1, "--run.checkpoint_every_steps", 5]
    # Key biases have no gradient but rounding, which Adam would blow up with the paper's 1e-9.
    command += ["--training.adam_epsilon", 1e-3, "--training.learning_rate_factor", 0.1]
    command += ["--trainer.val_check_interval", 10, "--run.keep_last", 100]
    whole, run = tmp_path / "whole", tmp_path / "elastic"
    last = 48
    alone = Stage(tmp_path / "alone", *command, "--run.folder", whole, "--trainer.max_steps", last)

    stages: list[Stage] = []
    begins = [1]
    for ranks, end in ((1, 9), (2, 25), (3, 33), (1, last)):
        # Two ranks are killed in the midst of the second epoch, somewhere after step 20; the others come to their end.
        killed = run / "checkpoints" / "step=00000020.ckpt" if ranks == 2 else None
        options = ["--run.folder", run, "--trainer.devices", ranks, "--trainer.max_steps", 1000 if killed else end]
        stages.append(Stage(tmp_path / f"stage{len(stages)}", *command, *options, kill_after=killed))
        newest = checkpoints(run)[-1]
        where = position(torch.load(newest, weights_only=True, mmap=True))
        assert where["next_batch"] > 0  # inside an epoch
        assert step_of(newest) == end or killed
        begins.append(step_of(newest) + 1)
    assert [stage.ranks for stage in stages] == [1, 2, 3, 1]
    assert begins[-1] == last + 1

    # The history that counts: each stage from where it began to the next one's beginning.
    history: dict[int, Step] = {}
    for stage, begin, end in zip(stages, begins, begins[1:], strict=False):
        assert min(stage.steps) == begin
        history |= {step: stage.steps[step] for step in range(begin, end)}
        for step, place in stage.places.items():
            if step <= last:  # also those that were done again
                assert place == alone.places[step]
    assert len(history) == last
    for step, shares in history.items():
        assert together(shares) == together(alone.steps[step]), step
    every = list(range(len(open_corpus(tiny_corpus, "train"))))
    epochs = [epoch for epoch, _ in alone.places.values()]
    assert epochs[-1] >= 3
    for epoch in range(epochs[-1]):  # the last one is not over
        steps = [step for step in history if alone.places[step][0] == epoch]
        assert sorted(pair for step in steps for pair in together(history[step])) == every

    losses = [loss for _, loss in scalars(whole, "train/loss")]
    assert losses[-1] < 0.9 * losses[0]  # there is a curve to agree on
    for tag in ("train/loss", "train/learning_rate", "work/epoch", "validation/loss"):
        assert scalars(run, tag) == [(step, pytest.approx(value, rel=2e-6)) for step, value in scalars(whole, tag)], tag
    ours, theirs = (torch.load(checkpoints(path)[-1], weights_only=True)["state_dict"] for path in (run, whole))
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-5, msg=name)
