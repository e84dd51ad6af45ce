"""Which packages a command imports before it does its work: most of a short command's time is spent importing.

Each command runs in an interpreter of its own. No time is measured.
"""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer

from pipeline.config.settings import RESERVED_KEYS, TRAINER_KEYS
from tests.conftest import ROOT, tiny_recipe

SLOW = ("torch", "torch._dynamo", "lightning", "sympy", "triton", "sacrebleu", "tensorboard", "sentencepiece")
RUN = """
import json, sys
from pipeline.__main__ import main
try:
    code = main(sys.argv[2:])
except SystemExit as end:
    code = end.code
print(json.dumps([code, sorted(set(json.loads(sys.argv[1])) & set(sys.modules))]), file=sys.stderr)
"""


def imported(*arguments: object, text: str = "") -> tuple[int, set[str]]:
    """Run a command; return its exit code and which of the packages SLOW it has imported."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(SLOW), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    code, names = json.loads(done.stderr.splitlines()[-1])
    return code, set(names)


@pytest.fixture
def recipe(tiny_corpus: Path, tmp_path: Path) -> dict[str, Any]:
    return tiny_recipe(tiny_corpus.parent) | {"name": "tiny"}


def write(folder: Path, recipe: dict[str, Any]) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.mark.parametrize("mistake", ["corpus.nokey", "trainer.nokey", "trainer.max_steps", "text"])
def test_fit_refuses_a_recipe_before_anything_slow_is_imported(
    mistake: str, recipe: dict[str, Any], tmp_path: Path
) -> None:
    if mistake == "text":
        recipe["corpus"] |= {"folder": str(tmp_path / "new"), "train": {"source": "no.en", "target": "no.de"}}
    else:
        section, key = mistake.split(".")
        recipe[section][key] = "many"
    assert imported("fit", "--config", write(tmp_path, recipe)) == (2, set())


def test_fit_refuses_the_run_of_another_recipe_before_torch_is_imported(
    recipe: dict[str, Any], trained_run: Path, tmp_path: Path
) -> None:
    recipe["network"]["d_ff"] = 64
    path = write(tmp_path, recipe)
    assert imported("fit", "--config", path, "--run.folder", trained_run) == (2, set())


def test_prepare_needs_only_the_tokenizer(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["corpus"]["folder"] = str(tmp_path / "new")
    assert imported("prepare", "--config", write(tmp_path, recipe)) == (0, {"sentencepiece"})


def test_translate_needs_only_torch_and_the_tokenizer(trained_run: Path) -> None:
    assert imported("translate", trained_run, text="the red dog\n") == (0, {"torch", "sentencepiece"})


def test_evaluate_needs_no_lightning(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a red dog\n")
    texts = ["--source", tmp_path / "text", "--reference", tmp_path / "text"]
    assert imported("evaluate", trained_run, *texts) == (0, {"torch", "sentencepiece", "sacrebleu"})


@pytest.mark.parametrize(
    "command", ["prepare", "fit", "average", "translate", "evaluate", "export", "benchmark", "doctor", "demo", "recipe"]
)
def test_help_imports_nothing_slow(command: str) -> None:
    assert imported(command, "--help") == (0, set())


def test_importing_the_package_imports_nothing_slow() -> None:
    """Its names are imported when they are used."""
    code = "import json, sys, pipeline; dir(pipeline); pipeline.InputError; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    modules = set(json.loads(done.stdout))
    assert not modules & {*SLOW, "numpy", "yaml"}
    assert "pipeline.api" not in modules


def test_the_trainer_keys_are_those_of_lightning() -> None:
    """They are written out in the program, which reports mistakes before it imports Lightning."""
    assert inspect.signature(Trainer.__init__).parameters.keys() >= {*RESERVED_KEYS, *TRAINER_KEYS}
