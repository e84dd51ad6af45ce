"""The harvest's commands and the processes of its stages, without a GPU, so that it works when there is one."""

import fcntl
import json
import subprocess
import time
from pathlib import Path

import pytest

from pipeline.config.recipe import load_recipe
from tests.docs.command_lines import mistake
from tests.gpu import harvest
from tests.gpu.harvest import STAGES, main, run_stage, write_text


@pytest.mark.parametrize("stage", STAGES)
def test_commands_parse(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path, 1)
    assert mistake(["python", *STAGES[stage][0]]) is None


def test_stages_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are those of the last line; tests/benchmark shows those that its `train` prints."""
    command = ["-c", "print('...'); print('{\"target_tokens_per_second\": 5}')"]
    monkeypatch.setattr(harvest, "STAGES", {"done": (command, 60), "wrong": (["-c", "raise SystemExit(3)"], 60)})
    monkeypatch.setattr(harvest, "write_text", lambda folder, _: write_text(folder, 300))
    assert main(["--revision", "x", "--output", str(tmp_path / "harvest.jsonl")]) == 1
    about, done, wrong = map(json.loads, (tmp_path / "harvest.jsonl").read_text().splitlines())
    assert about["revision"] == "x"
    assert (done["outcome"], done["figures"]) == ("done", {"target_tokens_per_second": 5})
    assert (wrong["stage"], wrong["outcome"], wrong["exit_code"]) == ("wrong", "failed", 3)


def test_a_stage_beyond_its_limit_is_killed_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, log, wait = tmp_path / "lock", tmp_path / "log", subprocess.Popen.wait

    def out_of_time(process: "subprocess.Popen[bytes]", timeout: float | None = None) -> int:
        while timeout is not None:
            if "locked" in log.read_text():
                raise subprocess.TimeoutExpired(process.args, timeout)
            time.sleep(0.01)
        return wait(process)

    monkeypatch.setattr(subprocess.Popen, "wait", out_of_time)
    # Every process that has the file open holds the lock, the shell's child too.
    script = f"exec 9>{lock}; flock 9; echo locked; (sleep 20; echo survived) & wait"
    stopped = run_stage(["-Sc", f"import os; os.execvp('bash', ['bash', '-c', {script!r}])"], 1, tmp_path, log)
    assert (stopped["outcome"], stopped["last_lines"]) == ("timed out", ["locked"])
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # succeeds once all processes have ended
    assert log.read_text() == "locked\n"


def test_all_stages_end_within_nine_minutes() -> None:
    assert sum(limit for _, limit in STAGES.values()) <= 9 * 60


def test_the_demo_is_compiled(tmp_path: Path) -> None:
    harvest.write_demo(tmp_path)
    recipe = load_recipe([tmp_path / "configs/demo.yaml"], [])
    assert recipe.trainer["precision"] == "bf16-mixed"
    assert recipe.network == load_recipe([harvest.ROOT / "configs/demo.yaml"], []).network
