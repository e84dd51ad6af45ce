"""Write the fixture that later versions are tested with: texts, corpus, run and bundle of this version.

Run this once per release and commit its output, `version_X_Y_Z/` beside this file. The tests find it there.

    git worktree add --detach /tmp/attention-pipeline REVISION
    cd /tmp/attention-pipeline
    make .venv/installed-test
    .venv/bin/python -m tests.compatibility.make_fixture

Use a folder whose name may be published, as above: `model.pt2` holds the paths of the source files that it was exported
from. Host names are replaced.

The run is stopped by a signal during a validation. `expected.json` holds this version's translations with it, and what
an uninterrupted run logs after that step.
"""

import contextlib
import io
import json
import os
import platform
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import ROOT, pipeline

HERE = Path(__file__).resolve().parent
STOPPED_AT = 150
LETTERS = "abcdef"
RECIPE: dict[str, Any] = {
    "name": "old",
    "corpus": {
        "folder": "corpus",
        "train": {"source": "texts/train.source", "target": "texts/train.target"},
        "validation": {"source": "texts/validation.source", "target": "texts/validation.target"},
        "vocabulary_size": 17,
    },
    "batches": {"batch_tokens": 400, "group_tokens": 100, "workers": 0},
    "network": {"num_layers": 1, "d_model": 4, "d_ff": 8, "num_heads": 2, "dropout": 0.1},
    "training": {"label_smoothing": 0.1, "warmup_steps": 60, "ema_decay": 0.8},
    "decoding": {"length_penalty": 1.0, "max_extra_tokens": 10},
    # The best BLEU is that of step 100. The run is stopped between two regular checkpoints, after validations without a
    # better BLEU, and ends early after the next one.
    "run": {"folder": "run", "checkpoint_every_steps": 40, "keep_last": 3, "log_every_steps": 5, "patience": 3},
    # The smallest possible number of plots.
    "monitoring": {"attention_sentences": [1], "attention_layers": [0], "attention_heads": [1], "embedding_pieces": 4},
    "trainer": {"max_steps": 200, "val_check_interval": 25, "accelerator": "cpu", "devices": 1, "precision": "32-true"},
}


def main() -> None:
    """Write `version_X_Y_Z/`."""
    fixture = HERE / f"version_{version('attention-pipeline').replace('.', '_')}"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_texts(Path("texts"))
        Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
        assert run_in_subprocess("fit", "--config", "recipe.yaml", stop_at=STOPPED_AT) == 75
        assert run_in_subprocess("export", "run", "bundle", "--data-licence", "CC0") == 0
        paths = [path for path in Path().rglob("*") if path.is_file() and path.name != ".lock"]
        expected = expected_when_stopped()
        assert run_in_subprocess("fit", "--config", "recipe.yaml", "--run.folder", "whole") == 0
        expected |= expected_after_resuming(Path("whole"))
        fixture.mkdir()
        with tarfile.open(fixture / "files.tar.xz", "w:xz", preset=9) as archive:
            for path in sorted(paths):
                archive.add(path, filter=without_metadata)
    (fixture / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def write_texts(folder: Path) -> None:
    """Write 300 training and 24 validation pairs: mostly one letter repeated, and the alphabet from that letter on."""
    folder.mkdir()
    for split, count in (("train", 300), ("validation", 24)):
        rng = random.Random(count)
        letters = [rng.choice(LETTERS) for _ in range(count)]
        sources = [
            [letter if rng.random() < 0.8 else rng.choice(LETTERS) for _ in range(rng.randint(3, 7))]
            for letter in letters
        ]
        targets = [
            [LETTERS[(LETTERS.index(letter) + index) % len(LETTERS)] for index in range(len(source))]
            for source, letter in zip(sources, letters, strict=True)
        ]
        for side, sentences in (("source", sources), ("target", targets)):
            (folder / f"{split}.{side}").write_text("".join(" ".join(letters) + "\n" for letters in sentences))


def run_in_subprocess(*arguments: str, stop_at: int = -1) -> int:
    """Run `python -m pipeline ...` and stop it in the validation after step `stop_at`; return the exit code."""
    command = [sys.executable, "-m", "tests.compatibility.make_fixture", str(stop_at), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, check=False).returncode


def run_pipeline(stop_at: int, arguments: list[str]) -> None:
    """Run `python -m pipeline` in this process, with a fixed host name."""
    socket.gethostname = platform.node = lambda: "host"
    sys.argv = ["pipeline", *arguments]
    if stop_at >= 0:
        from lightning.pytorch import Callback, LightningModule, Trainer

        def stop(self: Callback, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.global_step == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)

        Callback.on_validation_start = stop  # type: ignore[method-assign]
    runpy.run_module("pipeline", run_name="__main__")


def expected_when_stopped() -> dict[str, Any]:
    """Return translations and scores of the stopped run."""
    scores = output_lines(
        "evaluate", "run", "--source", "texts/validation.source", "--reference", "texts/validation.target"
    )
    return {
        "stopped_at": STOPPED_AT,
        "translations": translations("run"),
        "bundle": bundle_outputs(Path("bundle"), Path("texts/validation.source").read_text().splitlines()),
        "scores": {name: value for name, value in json.loads(scores[-1]).items() if name in ("bleu", "chrf")},
    }


def expected_after_resuming(whole: Path) -> dict[str, Any]:
    """Return what an uninterrupted run logs from the interrupted validation on, and its final state."""
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    measured = (
        "time",
        "train_perf/target",
        "train_perf/step",
        "train_perf/memory",
        "train_perf/goodput",
        "train_perf/mfu",
    )
    curves = [
        {name: value for name, value in line.items() if not name.startswith(measured)}
        for line in lines
        if line["step"] > STOPPED_AT or (line["step"] == STOPPED_AT and "validation/bleu" in line)
    ]
    names = sorted(path.name for path in (whole / "checkpoints").iterdir())
    last = str(whole / "checkpoints" / names[-1])
    [average] = output_lines("average", str(whole), "--last", "3")
    return {
        "curves": curves,
        "checkpoints": names,
        "last": translations(last),
        "average": translations(average),
    }


def translations(checkpoint: str) -> list[list[Any]]:
    """Return score and text of the translation of each validation source."""
    lines = output_lines("translate", checkpoint, "--scores", "--input", "texts/validation.source")
    return [[float(score), text] for score, text in (line.split("\t") for line in lines)]


def bundle_outputs(folder: Path, sentences: list[str]) -> list[list[str]]:
    """Return what the Python programs of a bundle's README print for each sentence."""
    programs = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    load_parts, translate_parts = zip(*(program.partition("source = ")[::2] for program in programs), strict=True)
    outputs = []
    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for load, translate in zip(load_parts, translate_parts, strict=True):
            names: dict[str, Any] = {}
            # The second program follows the first, and only loads another model.
            exec(load if translate else load_parts[0] + load, names)
            program = "source = " + (translate or translate_parts[0])
            outputs.append([])
            for sentence in sentences:
                with contextlib.redirect_stdout(io.StringIO()) as stdout:
                    exec(program.replace('"A sentence."', repr(sentence)), names)
                outputs[-1].append(stdout.getvalue().strip())
    return outputs


def output_lines(*arguments: str) -> list[str]:
    """Run a command and return the lines of its output."""
    done = pipeline(*arguments)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


def without_metadata(file: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove owner and time."""
    file.mtime = file.uid = file.gid = 0
    file.uname = file.gname = ""
    return file


if __name__ == "__main__":
    if sys.argv[1:]:
        run_pipeline(int(sys.argv[1]), sys.argv[2:])
    else:
        main()
