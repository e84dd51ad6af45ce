"""`synthesize`, killed in several stages, goes on, does nothing twice, and writes what an undisturbed one writes."""

import io
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml

from tests.conftest import pipeline, sentences, tiny_recipe, write_text
from tests.fork_server import ForkServer
from tests.integration.runs import assert_ended, descendants, held, start

SHARD_WRITTEN = "pipeline.inference.shards.Shards.write"
"""The function that gets each translation of a shared text."""


def results(work: Path) -> dict[str, bytes]:
    """Return plan, recipes, translations, scores, averaged weights and evaluations."""
    wanted = ("plan*", "recipes/*", "texts/*", "runs/*/average*.ckpt", "evaluation/*")
    files = [path for pattern in wanted for path in work.glob(pattern) if path.is_file()]
    return {str(path.relative_to(work)): content(path) for path in files}


def content(path: Path) -> bytes:
    """Return a file's bytes, a checkpoint's with a fixed name of its run, which is random in each run."""
    if path.suffix != ".ckpt":
        return path.read_bytes()
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["translation"]["run_id"] = "run"
    written = io.BytesIO()
    torch.save(checkpoint, written)
    return written.getvalue()


def stages(log: str) -> list[str]:
    return re.findall(r"^stage \d+ of \d+, (\S+) \(", log, re.MULTILINE)


@pytest.mark.slow
def test_killed_in_several_stages(trained_run: Path, tmp_path: Path) -> None:
    """tests/slurm/test_scripts.py has other stages."""
    write_text(tmp_path)
    recipe = tiny_recipe(tmp_path)
    recipe["run"]["checkpoint_every_steps"] = 20
    recipe["trainer"] |= {"max_steps": 80, "val_check_interval": 40}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "mono").write_text("".join(f"{line}\n" for line in sentences(2000, 77)))
    work = tmp_path / "work"
    command = ["synthesize", "back-translation", "--config", tmp_path / "tiny.yaml", "--text", tmp_path / "mono"]
    command += ["--reverse-model", trained_run, "--folder", work]
    undisturbed = pipeline(*command)
    assert undisturbed.returncode == 0, undisturbed.stderr.decode()
    order, expected = stages(undisturbed.stderr.decode()), results(work)
    assert len(expected) == 11
    work.rename(tmp_path / "undisturbed")

    for stage, signum, moment, hold in (
        ("prepare-forward", signal.SIGKILL, "", held(0, "data_module.corpus.builder.write_manifest")),
        ("translate-round1.source", signal.SIGKILL, "using", held(700, SHARD_WRITTEN)),
        ("fit-round1", signal.SIGTERM, "training:", held(50)),
    ):
        log = tmp_path / "log"
        with log.open("w") as stderr:
            module = "tests.integration.changed_program"
            process = start(*command, module=module, stderr=stderr, **hold, **ForkServer.shared().for_children)
        while moment not in log.read_text().partition(f", {stage} (")[2] or f", {stage} (" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.01)
        children = descendants(process)
        process.send_signal(signum)
        # A run that is asked to stop saves a checkpoint and ends with code 75.
        assert process.wait() == (75 if signum == signal.SIGTERM else -signum), log.read_text()
        assert_ended(children)
        done = stages(log.read_text())
        assert order[: len(done)] == done
        assert done[-1] == stage
        order = order[len(done) - 1 :]
    last = pipeline(*command)
    assert last.returncode == 0, last.stderr.decode()
    assert stages(last.stderr.decode()) == order
    assert order[0] == "fit-round1"
    assert last.stdout == undisturbed.stdout
    assert results(work) == expected
