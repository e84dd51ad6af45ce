"""Which packages a command imports before it does its work: most of a short command's time is spent importing.

Commands run one after another in an interpreter of their own. No time is measured.
"""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

from lightning.pytorch import Trainer

from pipeline.config.settings import RESERVED_KEYS, TRAINER_KEYS
from tests.conftest import ROOT

SLOW = ("torch", "torch._dynamo", "lightning", "sympy", "triton", "sacrebleu", "tensorboard", "sentencepiece")
SLOW += ("datasets",)
RUN = """
import json, sys
from pipeline.__main__ import main
for words in json.loads(sys.argv[2]):
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    print(json.dumps([code, sorted(set(json.loads(sys.argv[1])) & set(sys.modules))]), file=sys.stderr)
"""


def imported(*commands: list[object], text: str = "") -> list[tuple[int, set[str]]]:
    """Run commands; return the exit code of each, and which of the packages SLOW are imported after it."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(SLOW), json.dumps([[*map(str, words)] for words in commands])],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    found = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[")]
    return [(code, set(names)) for code, names in found]


def test_refusals_and_help_import_nothing_slow(recipe_file: Path, trained_run: Path, tmp_path: Path) -> None:
    """Mistakes in a recipe, a text that is not there, and the run of another recipe."""
    text = ["--corpus.folder", tmp_path / "new", "--corpus.train", "{source: no.en, target: no.de}"]
    run = ["--run.folder", trained_run, "--network.d_ff", 64]
    mistakes: list[list[object]] = [
        [f"--{key}", "many"] for key in ("corpus.nokey", "trainer.nokey", "trainer.max_steps")
    ]
    refused = [["fit", recipe_file, *mistake] for mistake in (*mistakes, text, run)]
    commands = ["prepare", "fit", "average", "translate", "evaluate", "export", "doctor", "demo", "recipe"]
    found = imported(*refused, *([command, "--help"] for command in commands))
    assert found == [(2, set())] * len(refused) + [(0, set())] * len(commands)


def test_prepare_needs_only_the_tokenizer(recipe_file: Path, tmp_path: Path) -> None:
    assert imported(["prepare", recipe_file, "--corpus.folder", tmp_path / "new"]) == [(0, {"sentencepiece"})]


def test_translate_and_evaluate_need_no_lightning(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a red dog\n")
    texts = ["--source", tmp_path / "text", "--reference", tmp_path / "text"]
    assert imported(["translate", trained_run], ["evaluate", trained_run, *texts], text="the red dog\n") == [
        (0, {"torch", "sentencepiece"}),
        (0, {"torch", "sentencepiece", "sacrebleu"}),
    ]


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
