"""Writes the fixture of format 2: texts, corpus, run and bundle, and what the version that made them does with them.

    python -m tests.integration.format_2.make

`files.tar.xz` and `expected.json` beside this file are never made anew while the format is 2: `test_format_2.py` shows
with them that every version reads what an earlier one has written. A new format gets a fixture of its own.
"""

import json
import os
import platform
import random
import socket
import sys
import tarfile
import tempfile
import zipfile
from contextlib import redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from pipeline import load
from pipeline.__main__ import main
from pipeline.checkpointing.checkpoint import read_checkpoint
from pipeline.checkpointing.run_folder import read_metrics, step_path

HERE = Path(__file__).resolve().parent
LAST_STEP = 400
RECIPE: dict[str, Any] = {
    "name": "format_2",
    "corpus": {
        "folder": "corpus",
        "train": {"source": "texts/train.source", "target": "texts/train.target"},
        "validation": {"source": "texts/validation.source", "target": "texts/validation.target"},
        "vocabulary_size": 17,
    },
    "batches": {"batch_tokens": 400, "workers": 0},
    "network": {"num_layers": 1, "d_model": 8, "d_ff": 16, "num_heads": 2, "dropout": 0.0},
    "training": {"warmup_steps": 60, "ema_decay": 0.8},
    "decoding": {"max_extra_tokens": 4},
    "monitoring": {"attention_sentences": [], "embedding_pieces": 4},
    "run": {"folder": "run", "checkpoint_every_steps": 100, "keep_last": 2, "log_every_steps": 50},
    "trainer": {
        "max_steps": LAST_STEP,
        "val_check_interval": 200,
        "accelerator": "cpu",
        "devices": 1,
        "precision": "32-true",
    },
}
RESUME = ["fit", "--config", "recipe.yaml", "--trainer.max_steps", str(LAST_STEP + 4)]
RESUME += ["--trainer.val_check_interval", "4", "--run.log_every_steps", "1"]
TEXT = ["--source", "texts/validation.source", "--reference", "texts/validation.target"]


def write_texts(folder: Path) -> None:
    """Write 300 training and 24 validation pairs: letters, and the same letters in capitals."""
    folder.mkdir()
    for split, count in (("train", 300), ("validation", 24)):
        chooser = random.Random(count)
        lines = [" ".join(chooser.choices("abcdef", k=chooser.randint(2, 6))) for _ in range(count)]
        for side, text in (("source", lines), ("target", [line.upper() for line in lines])):
            (folder / f"{split}.{side}").write_text("".join(line + "\n" for line in text), encoding="utf-8")


def run(*arguments: str) -> list[str]:
    """Run a command in this process and return the lines of its output."""
    with redirect_stdout(StringIO()) as output:
        assert main(list(arguments)) == 0
    return output.getvalue().splitlines()


def uses() -> dict[str, Any]:
    """Return what is read from the files in the working folder: translations of the run and the bundle, and BLEU."""
    sentences = Path("texts/validation.source").read_text(encoding="utf-8").splitlines()
    found = {
        name: [[best.text, best.score] for (best,) in load(name).translate(sentences, n_best=1)]
        for name in ("run", "bundle")
    }
    return {**found, "bleu": json.loads(run("evaluate", "run", *TEXT)[-1])["bleu"]}


def state_after_resuming() -> dict[str, Any]:
    """Return the curves of the resumed run, and the sum of Adam's second moments in its last checkpoint."""
    curves = [line for line in read_metrics(Path("run")) if line["step"] > LAST_STEP]
    [optimizer] = read_checkpoint(step_path(Path("run"), LAST_STEP + 4)).contents["optimizer_states"]
    return {
        "loss": [line["train/loss"] for line in curves if "train/loss" in line],
        "learning_rate": [line["train/learning_rate"] for line in curves if "train/loss" in line],
        "validation_loss": [line["validation/loss"] for line in curves if "validation/loss" in line],
        "second_moments": sum(float(state["exp_avg_sq"].sum()) for state in optimizer["state"].values()),
    }


def without_paths(program: bytes) -> bytes:
    """Return a TorchScript file without what names the source files on this machine; PyTorch loads it without."""
    result = BytesIO()
    with zipfile.ZipFile(BytesIO(program)) as archive, zipfile.ZipFile(result, "w") as other:
        for name in archive.namelist():
            if not name.endswith(".debug_pkl"):
                other.writestr(name, archive.read(name))
    return result.getvalue()


def without_metadata(file: tarfile.TarInfo) -> tarfile.TarInfo:
    file.mtime = file.uid = file.gid = 0
    file.uname = file.gname = ""
    return file


def write() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_texts(Path("texts"))
        Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False), encoding="utf-8")
        run("fit", "--config", "recipe.yaml")
        run("export", "run", "bundle", "--format", "torchscript", "--data-licence", "CC0")
        program = Path("bundle/model.ts")
        program.write_bytes(without_paths(program.read_bytes()))
        with tarfile.open(HERE / "files.tar.xz", "w:xz", preset=9) as archive:
            for path in sorted(Path().rglob("*")):
                if path.is_file() and not path.name.startswith("."):
                    archive.add(path, filter=without_metadata)
        expected = uses()
        run(*RESUME)
        expected |= state_after_resuming()
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if any(HERE.glob("*.json")):
        sys.exit("the fixture is there; a format has one, made once")
    host = {"return_value": "host"}
    with mock.patch.object(socket, "gethostname", **host), mock.patch.object(platform, "node", **host):
        write()
