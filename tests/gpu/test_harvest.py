"""The code of the harvest, on a CPU and with very small sizes, so that it works when a GPU is available."""

import fcntl
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.autograd import DeviceType

from tests.conftest import ROOT
from tests.gpu.harvest.__main__ import STAGES, TESTS, main, run_one, run_stage
from tests.gpu.harvest.job import NUM_STEPS, SPECIAL, STEP_TOKENS, pair_lengths, training_steps
from tests.gpu.harvest.training import Case, kernels_of

MESSAGES = ("validation_step", "LeafSpec", "torch.profiler", "Profiler clears events", "`transfer_batch_to_device`")
pytestmark = [pytest.mark.filterwarnings(f"ignore:.*{message}") for message in MESSAGES]


def read(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_every_stage_writes_its_results(tmp_path: Path) -> None:
    output = tmp_path / "harvest.jsonl"
    for stage in ("rates", "attention", "loss", "base", "decoding"):
        run_one(stage, output, "cpu", tiny=True)
    found = {stage: [one for one in read(output) if one["stage"] == stage] for stage in STAGES}
    assert [one["name"] for one in found["rates"][:2]] == ["copy", "square, forward"]
    assert all(one["milliseconds"] > 0 for one in found["rates"])
    for one in found["attention"]:
        assert one["forward_and_backward_milliseconds"] > 0 if "refused" not in one else one["refused"]
    measured = [one["name"] for one in found["attention"] if "refused" not in one]
    assert measured == ["groups"] * 4 + ["flash", "flash", "plain products", "plain products"]
    about = [(one["kernels"], one["passes"]) for one in found["loss"]]
    assert about[:4] == [("triton", 1), ("triton", 2), ("pytorch", 1), ("pytorch", 2)]
    assert about[4:] == [("triton", 1), ("pytorch", 1)] * 5
    assert all(one["peak_memory_bytes"] > 0 for one in found["loss"])
    assert [one["layers"] for one in found["decoding"]] == ["6+6"] * 4 + ["12+2"] * 4
    assert all(one["tokens_per_second"] > 0 for one in found["decoding"])
    best = found["base"][0]["product_flops_per_second"]
    steps = [one for one in found["base"] if one["name"] == "step"]
    assert len({Case(*(one[key] for key in Case._fields)) for one in steps}) == 6
    for one in steps:
        assert one["host_milliseconds"] > 0
        assert one["mfu"] == pytest.approx(1000 * one["flops_per_step"] / one["step_milliseconds"] / best)
        assert 0 < one["real_tokens"] <= 2 * 60 < one["row_tokens"]


def test_stages_run_as_processes_that_may_fail(tmp_path: Path) -> None:
    output = tmp_path / "harvest.jsonl"
    options = ["--device", "cpu", "--tiny", "--revision", "x", "--output", str(output)]
    assert main([*options, "--stages", "rates"]) == 0
    machine, *_, outcome = read(output)
    assert (machine["revision"], outcome["name"], outcome["outcome"]) == ("x", "outcome", "done")
    log = tmp_path / "log"
    failed = run_stage([sys.executable, "-Sc", "print('said'); raise SystemExit(3)"], 60, log)
    assert (failed["outcome"], failed["exit_code"], failed["last_lines"]) == ("failed", 3, ["said"])


def test_a_stage_beyond_its_limit_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    # Every process that has the file open holds the lock, the shell's child too.
    script = f"exec 9>{lock}; flock 9; echo locked; (sleep 20; echo survived) & wait"
    log = tmp_path / "log"
    stopped = run_stage(["bash", "-c", script], 0.5, log)
    assert (stopped["outcome"], stopped["last_lines"]) == ("timed out", ["locked"])
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # succeeds once all processes have ended
    assert log.read_text() == "locked\n"


def test_the_tests_that_are_run_exist() -> None:
    """Those that need a GPU come first; their outcomes are in the log."""
    assert all((ROOT / path).is_file() for path in TESTS["gpu_tests"] if path.endswith(".py"))
    assert [arguments[-1] for arguments in TESTS.values()] == ["-m=gpu and not slow", "-m=not gpu and not slow"]


def test_all_limits_together_are_less_than_nine_minutes() -> None:
    assert sum(seconds for _, seconds in STAGES.values()) < 9 * 60


def test_kernels_are_added_up_by_name_and_step() -> None:
    class Event(NamedTuple):
        said_name: str
        nanoseconds: int
        type: DeviceType = DeviceType.CUDA

        def name(self) -> str:
            return self.said_name

        def duration_ns(self) -> int:
            return self.nanoseconds

        def device_type(self) -> DeviceType:
            return self.type

    events = [Event("small", 1_000_000), Event("large", 4_000_000), Event("large", 5_000_000)]
    figures = kernels_of([*events, Event("on the host", 10**9, DeviceType.CPU)], steps=2)
    assert (figures["kernel_milliseconds"], figures["device_operations"]) == (5.0, 1.5)
    assert figures["top_kernels"] == [
        {"kernel": "large", "count": 1.0, "milliseconds": 4.5, "share": 0.9},
        {"kernel": "small", "count": 0.5, "milliseconds": 0.5, "share": 0.1},
    ]


@pytest.mark.parametrize("micro_batches", [1, 8])
def test_synthetic_steps_are_what_they_say(micro_batches: int) -> None:
    lengths = pair_lengths()
    steps = training_steps(lengths, 50, micro_batches)
    assert len({tuple(step.ids.tolist()) for step in steps}) == len(steps) == NUM_STEPS
    for step in steps:
        batches = step.micro_batches
        assert len(batches) == micro_batches
        for of_side, ids in zip(lengths, ("source", "target_output"), strict=True):
            assert 0.93 * STEP_TOKENS < of_side.sum() <= STEP_TOKENS
            rows = torch.cat([getattr(batch, ids).flatten() for batch in batches])
            assert int((rows != SPECIAL.pad).sum()) == of_side.sum()
            assert int((rows == SPECIAL.eos).sum()) == len(of_side)
        assert (step.num_target_tokens, step.num_tokens) == (lengths[1].sum(), sum(map(sum, lengths)))
