"""What is wrong with this machine, and with a recipe on it, before time is spent.

Each line is a finding: ok, or what is wrong and what to do. Exit code 1 when something is wrong.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Finding(NamedTuple):
    """One thing looked at."""

    well: bool
    what: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--config", type=Path, action="append", default=[], help="a recipe; overlays may follow")


def run(arguments: argparse.Namespace) -> int:
    """Print all findings."""
    findings = list(machine())
    if arguments.config:
        findings += recipe(arguments.config, arguments.overrides)
    for finding in findings:
        print(f"{'ok   ' if finding.well else 'WRONG'} {finding.what}")
    return 0 if all(finding.well for finding in findings) else 1


def machine() -> Iterator[Finding]:
    """Versions and hardware."""
    from importlib.metadata import version

    import torch

    python = sys.version_info
    yield Finding((3, 11) <= python[:2] < (3, 14), f"Python {python.major}.{python.minor} (3.11 to 3.13)")
    yield Finding(_release(torch.__version__) >= (2, 11), f"torch {torch.__version__} (2.11 to 2.13)")
    lightning = version("lightning")
    safe = _release(lightning) >= (2, 6, 6)
    yield Finding(safe, f"lightning {lightning}" + ("" if safe else ": unsafe; install lightning>=2.6.6"))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            name, memory = (
                torch.cuda.get_device_name(index),
                torch.cuda.get_device_properties(index).total_memory,
            )
            yield Finding(True, f"GPU {index}: {name}, {memory / 2**30:.0f} GiB")
    else:
        from pipeline.trainer_options import best_precision

        yield Finding(True, f"no GPU; {os.cpu_count()} CPU cores, precision {best_precision('cpu')}")


def recipe(paths: list[Path], overrides: list[str]) -> Iterator[Finding]:
    """The recipe, its texts, and the places it writes to."""
    from data_module.errors import InputError
    from pipeline.recipe import load_recipe
    from pipeline.trainer_options import trainer_signature

    try:
        loaded = load_recipe(paths, overrides, trainer_signature())
    except InputError as error:
        yield Finding(False, str(error))
        return
    yield Finding(True, f"recipe {loaded.name}")
    corpus = Path(loaded.corpus.folder)
    if (corpus / "manifest.json").exists():
        yield Finding(True, f"corpus {corpus} is prepared")
    else:
        for text in [*loaded.corpus.train, *loaded.corpus.validation]:
            for name in filter(None, (text.source, text.target, text.tsv)):
                there = Path(name).is_file()
                yield Finding(there, f"text {name}" + ("" if there else " is missing; put it there or change corpus:"))
    run = loaded.run_folder()
    place = next(parent for parent in [run, *run.absolute().parents] if parent.exists())
    writable = os.access(place, os.W_OK)
    yield Finding(writable, f"run folder {run}" + ("" if writable else f": {place} is not writable"))
    free = shutil.disk_usage(place).free
    needed = checkpoint_bytes(loaded.corpus.vocabulary_size, loaded.network) * (loaded.run.keep_last + 2)
    enough = free > needed
    message = f"{free / 2**30:.1f} GiB free, its checkpoints need {needed / 2**30:.1f}"
    yield Finding(enough, message + ("" if enough else "; lower run.keep_last or give another run.folder"))


def checkpoint_bytes(vocabulary_size: int, network: object) -> int:
    """Weights and Adam's two moments, in float32."""
    import torch

    from model.transformer import Transformer

    with torch.device("meta"):
        parameters = Transformer(vocabulary_size, network).parameters()  # type: ignore[arg-type]
    return 12 * sum(parameter.numel() for parameter in parameters)


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
