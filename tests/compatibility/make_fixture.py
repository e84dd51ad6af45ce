"""Make an old run for later versions to go on with: texts, corpus, run and bundle as this version writes them.

Run once for a release, and commit what it writes, `version_X_Y_Z/` beside this file; the tests then take it up:

    git worktree add --detach /tmp/attention-pipeline REVISION
    cd /tmp/attention-pipeline
    make .venv/installed-test
    .venv/bin/python -m tests.compatibility.make_fixture

The folder has to be one that may be named in public, as above: `model.pt2` holds the paths of the source files that it
was exported from. Host names are replaced.

The run is stopped by a signal in a validation. `expected.json` holds what this version itself makes of the run: its
translations, and what another run, which was not stopped, logs after that step.
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
    # The best BLEU is that of step 100. The run is stopped between two regular checkpoints, while patience counts, and
    # ends after the next validation.
    "run": {"folder": "run", "checkpoint_every_steps": 40, "keep_last": 3, "log_every_steps": 5, "patience": 3},
    # As few pictures as can be drawn.
    "monitoring": {"attention_sentences": [1], "attention_layers": [0], "attention_heads": [1], "embedding_pieces": 4},
    "trainer": {"max_steps": 200, "val_check_interval": 25, "accelerator": "cpu", "devices": 1, "precision": "32-true"},
}


def main() -> None:
    """Make `version_X_Y_Z/`."""
    place = HERE / f"version_{version('attention-pipeline').replace('.', '_')}"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_texts(Path("texts"))
        Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
        assert as_on_any_host("fit", "--config", "recipe.yaml", stop_at=STOPPED_AT) == 75
        assert as_on_any_host("export", "run", "bundle", "--data-licence", "CC0") == 0
        kept = [path for path in Path().rglob("*") if path.is_file() and path.name != ".lock"]
        expected = what_is_expected()
        assert as_on_any_host("fit", "--config", "recipe.yaml", "--run.folder", "whole") == 0
        expected |= what_comes_after(Path("whole"))
        place.mkdir()
        with tarfile.open(place / "files.tar.xz", "w:xz", preset=9) as archive:
            for path in sorted(kept):
                archive.add(path, filter=without_owner)
    (place / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def write_texts(folder: Path) -> None:
    """300 training and 24 validation pairs: a source repeats a letter, its target goes on in the alphabet."""
    folder.mkdir()
    for split, count in (("train", 300), ("validation", 24)):
        chooser = random.Random(count)
        letters = [chooser.choice(LETTERS) for _ in range(count)]
        sources = [
            [letter if chooser.random() < 0.8 else chooser.choice(LETTERS) for _ in range(chooser.randint(3, 7))]
            for letter in letters
        ]
        targets = [
            [LETTERS[(LETTERS.index(letter) + place) % len(LETTERS)] for place in range(len(source))]
            for source, letter in zip(sources, letters, strict=True)
        ]
        for side, sentences in (("source", sources), ("target", targets)):
            (folder / f"{split}.{side}").write_text("".join(" ".join(letters) + "\n" for letters in sentences))


def as_on_any_host(*arguments: str, stop_at: int = -1) -> int:
    """The exit code of `python -m pipeline ...`, stopped by a signal in the validation after a step."""
    command = [sys.executable, "-m", "tests.compatibility.make_fixture", str(stop_at), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, check=False).returncode


def run_pipeline(stop_at: int, arguments: list[str]) -> None:
    """As `python -m pipeline` does."""
    socket.gethostname = platform.node = lambda: "host"
    sys.argv = ["pipeline", *arguments]
    if stop_at >= 0:
        from lightning.pytorch import Callback, LightningModule, Trainer

        def stop(self: Callback, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.global_step == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)

        Callback.on_validation_start = stop  # type: ignore[method-assign]
    runpy.run_module("pipeline", run_name="__main__")


def what_is_expected() -> dict[str, Any]:
    """Of the run as it was stopped."""
    scores = said("evaluate", "run", "--source", "texts/validation.source", "--reference", "texts/validation.target")
    return {
        "stopped_at": STOPPED_AT,
        "translations": translations("run"),
        "bundle": bundle_answers(Path("bundle"), Path("texts/validation.source").read_text().splitlines()),
        "scores": {name: value for name, value in json.loads(scores[-1]).items() if name in ("bleu", "chrf")},
    }


def what_comes_after(whole: Path) -> dict[str, Any]:
    """The curves of a run that was not stopped, from the validation in which the other one was; and its end."""
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    measured = ("time", "work/target", "work/step", "work/memory", "work/goodput", "work/share")
    curves = [
        {name: value for name, value in line.items() if not name.startswith(measured)}
        for line in lines
        if line["step"] > STOPPED_AT or (line["step"] == STOPPED_AT and "validation/bleu" in line)
    ]
    names = sorted(path.name for path in (whole / "checkpoints").iterdir())
    last = str(whole / "checkpoints" / names[-1])
    [average] = said("average", str(whole), "--last", "3")
    return {
        "curves": curves,
        "checkpoints": names,
        "last": translations(last),
        "average": translations(average),
    }


def translations(checkpoint: str) -> list[list[Any]]:
    """Score and text of each validation source."""
    lines = said("translate", checkpoint, "--scores", "--input", "texts/validation.source")
    return [[float(score), text] for score, text in (line.split("\t") for line in lines)]


def bundle_answers(folder: Path, sentences: list[str]) -> list[list[str]]:
    """What the Python programs of a bundle's README say, none of which uses this project's code."""
    programs = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    loads, translates = zip(*(program.partition("source = ")[::2] for program in programs), strict=True)
    answers = []
    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for load, translate in zip(loads, translates, strict=True):
            names: dict[str, Any] = {}
            # The second goes on where the first has loaded a model, and only loads another.
            exec(load if translate else loads[0] + load, names)
            program = "source = " + (translate or translates[0])
            answers.append([])
            for sentence in sentences:
                with contextlib.redirect_stdout(io.StringIO()) as said:
                    exec(program.replace('"A sentence."', repr(sentence)), names)
                answers[-1].append(said.getvalue().strip())
    return answers


def said(*arguments: str) -> list[str]:
    """The lines that a command prints."""
    done = pipeline(*arguments)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


def without_owner(file: tarfile.TarInfo) -> tarfile.TarInfo:
    """Of nobody, at no time."""
    file.mtime = file.uid = file.gid = 0
    file.uname = file.gname = ""
    return file


if __name__ == "__main__":
    if sys.argv[1:]:
        run_pipeline(int(sys.argv[1]), sys.argv[2:])
    else:
        main()
