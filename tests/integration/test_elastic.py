"""Resuming with a different number of ranks: every step has the same pairs and the same loss."""

import json
import time
from pathlib import Path

import pytest
import torch

from data_module.corpus.store import open_corpus
from tests.fork_server import ForkServer
from tests.integration.runs import checkpoints, held, kill, position, scalars, start, step_of

Step = dict[int, list[int]]
"""The pairs that each rank trained on."""


class RecordedFit:
    def __init__(self, records: Path, *command: object, kill_after: Path | None = None) -> None:
        """With `kill_after`, it is killed when this checkpoint exists, three steps later at the latest."""
        records.mkdir()
        node = records.with_name(f"{records.name}-node")  # has no plan of an epoch from another start
        node.mkdir()
        places = {"RECORDS": str(records), "TMPDIR": str(node), **ForkServer.shared().for_children}
        change = {"CHANGE": "record_batches"}
        if kill_after is not None:
            steps = step_of(kill_after) - step_of(checkpoints(kill_after.parents[1])[-1])
            change = held(steps + 3) | {"CHANGE": "record_batches hold"}
        process = start(*command, module="tests.integration.changed_program", **change, **places)
        while kill_after is not None and not kill_after.exists() and process.poll() is None:
            time.sleep(0.01)
        assert kill(process) if kill_after is not None else process.wait() == 0
        self.steps: dict[int, Step] = {}
        self.positions: dict[int, tuple[int, int]] = {}
        """Epoch and index of the batch in it, by step."""
        lines = [json.loads(line) for file in records.iterdir() for line in file.read_text().splitlines()]
        for line in lines:
            pairs_by_rank = self.steps.setdefault(line["step"], {})
            assert line["rank"] not in pairs_by_rank
            pairs_by_rank[line["rank"]] = line["pairs"]
            position_in_data = (line["epoch"], line["index"])
            assert self.positions.setdefault(line["step"], position_in_data) == position_in_data
            self.ranks = line["ranks"]


def all_pairs_of(step: Step) -> list[int]:
    return sorted(pair for pairs in step.values() for pair in pairs)


@pytest.mark.slow
def test_resuming_with_one_two_three_and_one_ranks(recipe_file: Path, tmp_path: Path) -> None:
    command = ["fit", "--config", recipe_file, "--run.log_every_steps", 1, "--run.checkpoint_every_steps", 5]
    # Epochs take these in turn; with another one than before, a step's loss would be another.
    command += ["--corpus.folder", tmp_path / "corpus", "--corpus.variants", 2, "--corpus.noise.typos", 0.2]
    command += ["--corpus.bpe_dropout", "{source: 0.2, target: 0.2}", "--batches.batch_tokens", 600]
    # The gradient of key biases is only rounding error, which Adam amplifies with the paper's epsilon of 1e-9.
    command += ["--training.adam_epsilon", 1e-3, "--training.learning_rate_factor", 0.1]
    command += ["--trainer.val_check_interval", 10, "--run.keep_last", 100]
    whole, run = tmp_path / "whole", tmp_path / "elastic"
    last = 48
    alone = RecordedFit(tmp_path / "alone", *command, "--run.folder", whole, "--trainer.max_steps", last)

    stages: list[RecordedFit] = []
    begins = [1]
    for ranks, end in ((1, 9), (2, 25), (3, 33), (1, last)):
        # The two ranks are killed in the second epoch, after step 20; the other stages run to their end.
        killed = run / "checkpoints" / "step=00000020.ckpt" if ranks == 2 else None
        options = ["--run.folder", run, "--trainer.devices", ranks, "--trainer.max_steps", 1000 if killed else end]
        stages.append(RecordedFit(tmp_path / f"stage{len(stages)}", *command, *options, kill_after=killed))
        newest = checkpoints(run)[-1]
        state = position(torch.load(newest, weights_only=True, mmap=True))
        assert state["next_batch"] > 0  # inside an epoch
        assert step_of(newest) == (20 if killed else end)
        begins.append(step_of(newest) + 1)
    assert [stage.ranks for stage in stages] == [1, 2, 3, 1]
    assert begins[-1] == last + 1

    # The steps that led to the final weights: those of each stage up to where the next one resumed.
    kept_steps: dict[int, Step] = {}
    for stage, begin, end in zip(stages, begins, begins[1:], strict=False):
        assert min(stage.steps) == begin
        kept_steps |= {step: stage.steps[step] for step in range(begin, end)}
        for step, position_in_data in stage.positions.items():
            if step <= last:  # including those that were repeated
                assert position_in_data == alone.positions[step]
    assert len(kept_steps) == last
    for step, pairs_by_rank in kept_steps.items():
        assert all_pairs_of(pairs_by_rank) == all_pairs_of(alone.steps[step]), step
    all_pairs = list(range(len(open_corpus(tmp_path / "corpus", "train"))))
    epochs = [epoch for epoch, _ in alone.positions.values()]
    assert epochs[-1] >= 3
    for epoch in range(epochs[-1]):  # the last one is incomplete
        steps = [step for step in kept_steps if alone.positions[step][0] == epoch]
        assert sorted(pair for step in steps for pair in all_pairs_of(kept_steps[step])) == all_pairs

    losses = [loss for _, loss in scalars(whole, "train/loss")]
    assert losses[-1] < 0.9 * losses[0]  # it has learned something
    for tag in ("train/loss", "train/learning_rate", "train_perf/epoch", "validation/loss"):
        assert scalars(run, tag) == [(step, pytest.approx(value, rel=2e-6)) for step, value in scalars(whole, tag)], tag
    resumed, expected = (torch.load(checkpoints(path)[-1], weights_only=True)["state_dict"] for path in (run, whole))
    for name, weight in resumed.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5, msg=name)
