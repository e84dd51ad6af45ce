"""Run prepare, fit, average, evaluate, translate and export on a generated corpus, and print a summary.

A training that an earlier demo began is resumed.
"""

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from data_module.errors import PROGRAM, SCRIPTS
from data_module.system.files import user_path
from pipeline.config.recipe_files import shipped_recipes
from pipeline.runtime.console import report
from pipeline.runtime.signals import INTERRUPTED

CONFIG = Path("configs/demo.yaml")
"""The recipe, if this file exists; else the installed one is used."""
DATA = Path("data/demo")
AVERAGED = 5
SAMPLES = 6


class StageResult(NamedTuple):
    """Time and output of a command."""

    seconds: float
    output: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--folder", type=user_path, default=Path("runs/demo"), help="the run folder (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run all stages and print the summary."""
    config = CONFIG if CONFIG.is_file() else shipped_recipes()["demo"]
    run_folder, averaged = arguments.folder, arguments.folder / f"average-last-{AVERAGED}.ckpt"
    stages: dict[str, StageResult] = {}

    def stage(name: str, *words: object, text: str | None = None, module: str = "pipeline") -> None:
        stages[name] = run_stage(name, ["-m", module, *words], text)

    stage("demo corpus", DATA, module="data_module.demo.corpus")
    stage("prepare", "prepare", "--config", config)
    stage("fit", "fit", "--config", config, "--run.folder", run_folder)
    stage("average", "average", run_folder, "--last", AVERAGED)
    for name in ("test", "test_new_combinations"):
        source, reference = DATA / f"{name}.en", DATA / f"{name}.de"
        stage(f"evaluate {name}", "evaluate", averaged, "--source", source, "--reference", reference)
    sources = _lines(DATA / "test.en")[:SAMPLES]
    stage("translate", "translate", averaged, text="".join(s + "\n" for s in sources))
    export = run_folder / "export"
    stage("export", "export", averaged, export, "--force", "--format", "torchscript")
    print_summary(stages, run_folder, export, sources)
    return 0


def run_stage(name: str, command: Sequence[object], text: str | None = None) -> StageResult:
    """Run `python COMMAND`, with `text` as its standard input; exit if it fails or is interrupted."""
    words = [str(word) for word in command]
    report("")
    report(f"$ python {shlex.join(words)}")
    start = time.monotonic()
    with _ignore_keyboard_interrupt():
        ended = subprocess.run(
            [sys.executable, *words], input=text, stdout=subprocess.PIPE, encoding="utf-8", check=False
        )
    if ended.returncode:
        interrupted = ended.returncode in (INTERRUPTED, -signal.SIGINT)
        hint = "run the demo again to continue" if interrupted else "fix the error, then run the demo again"
        report(f"the demo stopped at '{name}'; {hint}")
        sys.exit(INTERRUPTED if interrupted else ended.returncode)
    return StageResult(time.monotonic() - start, ended.stdout)


def print_summary(stages: dict[str, StageResult], run_folder: Path, export: Path, sources: list[str]) -> None:
    """Print times, scores and sample translations."""
    print("\nStages")
    for name, stage in stages.items():
        print(f"  {name:32} {stage.seconds:7.1f} s")
    print("\nScores on held-out sentences (generated text: high scores show only that the program works)")
    for name, label in (("test", "test"), ("test_new_combinations", "word combinations not seen in training")):
        scores = json.loads(stages[f"evaluate {name}"].output.splitlines()[-1])
        print(f"  {label}: BLEU {scores['bleu']:.1f}, chrF {scores['chrf']:.1f}")
    print(f"  BLEU signature {scores['bleu_signature']}\n  chrF signature {scores['chrf_signature']}")
    print("\nTranslations")
    translations = stages["translate"].output.splitlines()
    for triple in zip(sources, translations, _lines(DATA / "test.de"), strict=False):
        for label, sentence in zip(("source", "translation", "reference"), triple, strict=True):
            print(f"  {label:12} {sentence}")
        print()
    print(f"run          {run_folder}")
    print(f"curves       {SCRIPTS}tensorboard --logdir {run_folder}")
    program = f"{SCRIPTS}{PROGRAM}"
    print(f"export       {export} (its README.md shows how to load it without this project)")
    print(f"             other formats: {program} export {run_folder} {export} --force")
    print("\nNext")
    print(f"  a sentence   echo 'The teacher sees a small dog.' | {program} translate {run_folder}")
    print(f"  your text    {program} recipe copy your_text mine.yaml; name your files in it; then")
    print(f"               {program} doctor mine.yaml; {program} fit mine.yaml")


@contextmanager
def _ignore_keyboard_interrupt() -> Iterator[None]:
    """Let only the command that runs inside react to Ctrl-C: it may have to save a checkpoint."""
    # Not SIG_IGN, which the command would inherit.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()
