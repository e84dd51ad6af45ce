"""The main job end to end on the demo corpus: prepare, fit, average, evaluate, translate, export, then a summary.

What is done already is not done again.
"""

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.runtime.signals import INTERRUPTED

CONFIG = Path("configs/demo.yaml")
DATA = Path("data/demo")
AVERAGED = 5
SAMPLES = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="the run folder (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """All stages, then the summary."""
    demo = Demo(arguments.folder)
    run_folder, averaged = arguments.folder, arguments.folder / f"average-last-{AVERAGED}.ckpt"
    texts = ["-m", "data_module.demo.corpus", DATA]
    fit = ["fit", "--config", CONFIG, "--run.folder", run_folder]
    demo.stage("demo corpus", texts)
    demo.stage("prepare", ["-m", "pipeline", "prepare", "--config", CONFIG])
    demo.stage("fit", ["-m", "pipeline", *fit])
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
    """Runs stages as a user types them, and remembers what they took and said."""

    def __init__(self, folder: Path) -> None:
        self._memory = folder.parent / f"{folder.name}-stages.json"
        self.done: dict[str, Any] = json.loads(self._memory.read_text()) if self._memory.exists() else {}
        recipe = CONFIG.read_text(encoding="utf-8")
        if not folder.exists() or not DATA.exists() or self.done.pop("recipe", None) != recipe:
            self.done = {}
        self._recipe = recipe

    def stage(self, name: str, command: list[Any], text: str | None = None) -> None:
        """Run a command unless an earlier demo has; its progress goes to the terminal."""
        words = [str(word) for word in command]
        if self.done.get(name, {}).get("command") == words:
            return
        print(f"\n$ python {shlex.join(words)}", file=sys.stderr, flush=True)
        start = time.monotonic()
        with _keyboard_left_to_stages():
            ended = subprocess.run([sys.executable, *words], input=text, stdout=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            stopped = ended.returncode in (INTERRUPTED, -signal.SIGINT)
            print(f"the demo stopped at '{name}'; {'' if stopped else 'mend that and '}run it again", file=sys.stderr)
            sys.exit(INTERRUPTED if stopped else ended.returncode)
        self.done[name] = {"command": words, "seconds": time.monotonic() - start, "output": ended.stdout}
        self._memory.parent.mkdir(parents=True, exist_ok=True)
        self._memory.write_text(json.dumps({**self.done, "recipe": self._recipe}))

    def summary(self, run_folder: Path, export: Path, sources: list[str]) -> None:
        """What a person wants to know."""
        print("\nStages")
        for name, stage in self.done.items():
            print(f"  {name:32} {stage['seconds']:7.1f} s")
        print("\nScores on held-out sentences (of a made grammar: they say that the program works, no more)")
        for name, what in (("test", "test"), ("test_new_combinations", "words that never met in training")):
            scores = json.loads(self.done[f"evaluate {name}"]["output"].splitlines()[-1])
            print(f"  {what}: BLEU {scores['bleu']:.1f}, chrF {scores['chrf']:.1f}")
        print(f"  BLEU signature {scores['bleu_signature']}\n  chrF signature {scores['chrf_signature']}")
        print("\nTranslations")
        translations = self.done["translate"]["output"].splitlines()
        for triple in zip(sources, translations, _lines(DATA / "test.de"), strict=False):
            for label, sentence in zip(("source", "translation", "reference"), triple, strict=True):
                print(f"  {label:12} {sentence}")
            print()
        print("Look at it  .venv/bin/tensorboard --logdir " + str(run_folder))
        print(f"The run     {run_folder}")
        print(f"The export  {export} (its README.md shows how to load it without this program)")


@contextmanager
def _keyboard_left_to_stages() -> Iterator[None]:
    """Inside, Ctrl-C is for the command that runs, which may have something to save: it is not killed for it."""
    # Not SIG_IGN, which the command would inherit.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()
