"""The code of the harvest, on a CPU and with very small sizes, so that it works when a GPU is available."""

import fcntl
import json
import sys
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.autograd import DeviceType

from tests.gpu.harvest.__main__ import run_one
from tests.gpu.harvest.batches import LAYOUTS, NUM_STEPS, SPECIAL, STEP_TOKENS, Shares
from tests.gpu.harvest.gpu_tests import run_tests
from tests.gpu.harvest.job import Job
from tests.gpu.harvest.measurement import kernels_of
from tests.gpu.harvest.results import Results
from tests.gpu.harvest.runner import LIMITS, run_stage, write_report
from tests.gpu.harvest.training import CASES, Case


def found(output: Path, stage: str) -> list[dict]:
    return [one for one in Results(output.with_suffix(".jsonl")).read() if one["stage"] == stage][1:]


@pytest.mark.filterwarnings("ignore:.*validation_step")
@pytest.mark.filterwarnings("ignore:.*LeafSpec")
@pytest.mark.filterwarnings("ignore:.*torch.profiler")
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.filterwarnings("ignore:You have overridden `transfer_batch_to_device`")
def test_every_stage_writes_its_results(tmp_path: Path) -> None:
    output = tmp_path / "harvest.json"
    for stage in ("rates", "attention", "loss", "base", "decoding"):
        run_one(stage, output, "cpu", tiny=True)
    rates = found(output, "rates")
    assert [one["name"] for one in rates[:2]] == ["copy", "square, forward"]
    assert all(one["milliseconds"] > 0 for one in rates)
    attention = found(output, "attention")
    assert len(attention) == 3 * (3 + 1) + 1 + 4 * 2 * 2
    for one in attention:
        assert one["forward_and_backward_milliseconds"] > 0 if "refused" not in one else one["refused"]
    assert {one["name"] for one in attention if "refused" not in one} == {"blocks", "flash", "plain products"}
    loss = found(output, "loss")
    assert [one["kernels"] for one in loss] == ["triton", "triton", "pytorch", "pytorch", "triton", "pytorch"]
    assert [one["passes"] for one in loss] == [1, 2, 1, 2, 1, 1]
    assert all(one["peak_memory_bytes"] > 0 for one in loss)
    decoding = found(output, "decoding")
    assert [one["layers"] for one in decoding] == ["1+1"] * 4 + ["12+2"] * 4
    assert all(one["tokens_per_second"] > 0 for one in decoding)
    steps = [one for one in found(output, "base") if one["name"] == "step"]
    assert [Case(*(one[key] for key in Case._fields)) for one in steps] == CASES["base"]
    for one in steps:
        assert one["step_milliseconds"] > 0
        assert one["host_milliseconds"] > 0
        rate = 1000 * one["flops_per_step"] / one["step_milliseconds"]
        assert one["mfu"] == pytest.approx(rate / rates[1]["flops_per_second"], rel=1e-3)
        assert one["product_flops_per_second"] == rates[1]["flops_per_second"]
        assert 0 < one["real_tokens"] <= 2 * 60 < one["row_tokens"]
    # The report contains all results.
    report = write_report(
        output, {"revision": "x"}, {"base": {"outcome": "done"}}, Results(output.with_suffix(".jsonl"))
    )
    assert report == json.loads(output.read_text())
    assert report["stages"]["base"]["refused"] == 0
    assert report["torch"] == torch.__version__
    assert report["stages"]["base"]["outcome"] == "done"
    assert report["stages"]["base"]["results"][-1]["kernels"] == "pytorch"


def test_the_tests_outcomes_are_written_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='no device')\n"
        "def test_skipped(): pass\n"
    )
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    results = Results(tmp_path / "results.jsonl")
    job = Job("gpu_tests", results, torch.device("cpu"))
    run_tests(
        job, "not slow", ["-q", "--import-mode=importlib", "--rootdir", str(tmp_path), "-c", "/dev/null", str(tmp_path)]
    )
    *tests, end = results.read()
    found = {one["name"].split("::")[-1]: one for one in tests}
    assert {name: (one["phase"], one["outcome"]) for name, one in found.items()} == {
        "test_broken.py": ("collect", "failed"),
        "test_good": ("call", "passed"),
        "test_bad": ("call", "failed"),
        "test_skipped": ("setup", "skipped"),
    }
    assert "no_such_module" in found["test_broken.py"]["why"]
    assert "assert 1 == 2" in found["test_bad"]["why"]
    assert end["exit_code"] == 1


def test_outcomes_of_stages(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run_stage(["true"], 60, log)["outcome"] == "done"
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
    assert figures == {
        "kernel_milliseconds": 5.0,
        "device_operations": 1.5,
        "top_kernels": [
            {"kernel": "large", "count": 1.0, "milliseconds": 4.5, "share": 0.9},
            {"kernel": "small", "count": 0.5, "milliseconds": 0.5, "share": 0.1},
        ],
    }


def test_a_line_that_was_cut_off_hides_no_other(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    results.append("rates", "copy", milliseconds=1.234567)
    with results.path.open("a") as file:
        file.write('{"stage": "rat')
    assert results.read() == [{"stage": "rates", "name": "copy", "milliseconds": 1.2346}]


def test_all_limits_together_are_less_than_nine_minutes() -> None:
    assert sum(LIMITS.values()) < 9 * 60


@pytest.mark.parametrize("name", LAYOUTS)
def test_synthetic_shares_are_what_they_say(name: str) -> None:
    shares = Shares(name, pieces=50)
    assert shares.shape.in_blocks == name.endswith("in blocks")
    source, target = shares.lengths()
    steps = list(islice(shares, NUM_STEPS + 1))
    assert steps[-1] is steps[0]
    assert len({tuple(step.ids.tolist()) for step in steps}) == NUM_STEPS
    for step in steps[:NUM_STEPS]:
        batches = step.micro_batches
        assert len(batches) == (8 if name.startswith("eight") else 1)
        for lengths, ids, positions in (
            (source, "source", "source_positions"),
            (target, "target_output", "target_positions"),
        ):
            assert 0.93 * STEP_TOKENS < lengths.sum() <= STEP_TOKENS
            rows = [getattr(batch, ids) for batch in batches]
            # The end symbol is a sentence's last token, so its position is the length less one.
            ends = [getattr(batch, positions)[row == SPECIAL.eos] for batch, row in zip(batches, rows, strict=True)]
            assert sorted((torch.cat(ends) + 1).tolist()) == sorted(lengths.tolist())
            assert sum(int((row != SPECIAL.pad).sum()) for row in rows) == lengths.sum()
        assert step.num_target_tokens == target.sum()
        assert step.num_tokens == source.sum() + target.sum()


def test_synthetic_shares_are_in_blocks_on_a_cpu() -> None:
    for name in LAYOUTS:
        shares = Shares(name, pieces=50, tokens=600, on_gpu=False)
        assert all(batch.blocks for share in islice(shares, 2) for batch in share.micro_batches)
