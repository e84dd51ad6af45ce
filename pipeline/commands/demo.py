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
from data_module.files import user_path
from pipeline.config.recipe_files import shipped_recipes
from pipeline.runtime.signals import INTERRUPTED

CONFIG = Path("configs/demo.yaml")
"""The recipe, if this file exists; else the installed one is used."""
DATA = Path("data/demo")
AVERAGED = 5
SAMPLES = 6


class Stage(NamedTuple):
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
    demo = Demo()
    demo.stage("demo corpus", ["-m", "data_module.demo.corpus", DATA])
    demo.stage("prepare", ["-m", "pipeline", "prepare", "--config", config])
    demo.stage("fit", ["-m", "pipeline", "fit", "--config", config, "--run.folder", run_folder])
    demo.stage("average", ["-m", "pipeline", "average", run_folder, "--last", AVERAGED])
    for name in ("test", "test_new_combinations"):
        source, reference = DATA / f"{name}.en", DATA / f"{name}.de"
        pair = ["--source", source, "--reference", reference]
        demo.stage(f"evaluate {name}", ["-m", "pipeline", "evaluate", averaged, *pair])
    sources = _lines(DATA / "test.en")[:SAMPLES]
    demo.stage("translate", ["-m", "pipeline", "translate", averaged], text="".join(s + "\n" for s in sources))
    export = run_folder / "export"
    demo.stage("export", ["-m", "pipeline", "export", averaged, export, "--force"])
    demo.summary(run_folder, export, sources)
    return 0


class Demo:
    """Runs stages as commands, and keeps their times and outputs."""

    def __init__(self) -> None:
        self._stages: dict[str, Stage] = {}

    def stage(self, name: str, command: Sequence[object], text: str | None = None) -> None:
        """Run `python COMMAND`, with `text` as its standard input; exit if it fails or is interrupted."""
        words = [str(word) for word in command]
        print(f"\n$ python {shlex.join(words)}", file=sys.stderr, flush=True)
        start = time.monotonic()
        with _ignore_keyboard_interrupt():
            ended = subprocess.run(
                [sys.executable, *words], input=text, stdout=subprocess.PIPE, encoding="utf-8", check=False
            )
        if ended.returncode:
            interrupted = ended.returncode in (INTERRUPTED, -signal.SIGINT)
            hint = "run the demo again to continue" if interrupted else "fix the error, then run the demo again"
            print(f"the demo stopped at '{name}'; {hint}", file=sys.stderr)
            sys.exit(INTERRUPTED if interrupted else ended.returncode)
        self._stages[name] = Stage(time.monotonic() - start, ended.stdout)

    def summary(self, run_folder: Path, export: Path, sources: list[str]) -> None:
        """Print times, scores and sample translations."""
        print("\nStages")
        for name, stage in self._stages.items():
            print(f"  {name:32} {stage.seconds:7.1f} s")
        print("\nScores on held-out sentences (generated text: high scores show only that the program works)")
        for name, label in (("test", "test"), ("test_new_combinations", "word combinations not seen in training")):
            scores = json.loads(self._stages[f"evaluate {name}"].output.splitlines()[-1])
            print(f"  {label}: BLEU {scores['bleu']:.1f}, chrF {scores['chrf']:.1f}")
        print(f"  BLEU signature {scores['bleu_signature']}\n  chrF signature {scores['chrf_signature']}")
        print("\nTranslations")
        translations = self._stages["translate"].output.splitlines()
        for triple in zip(sources, translations, _lines(DATA / "test.de"), strict=False):
            for label, sentence in zip(("source", "translation", "reference"), triple, strict=True):
                print(f"  {label:12} {sentence}")
            print()
        print(f"run          {run_folder}")
        print(f"curves       {SCRIPTS}tensorboard --logdir {run_folder}")
        print(f"export       {export} (its README.md shows how to load it without this project)")
        program = f"{SCRIPTS}{PROGRAM}"
        print("\nNext")
        print(f"  a sentence   echo 'the red dog sees a small cat' | {program} translate {run_folder}")
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
