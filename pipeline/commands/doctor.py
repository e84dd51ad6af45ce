"""What is wrong with this machine, and with a recipe on it, before time is spent.

Each line is a finding: ok, or what is wrong and what to do. Exit code 1 when something is wrong.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.preflight.check_result import Finding

if TYPE_CHECKING:
    from data_module.settings import CorpusSettings, TextSource
    from pipeline.preflight.distributed import Ranks
    from pipeline.config.recipe import Recipe
    from pipeline.runtime.slurm import Step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--config", type=Path, action="append", default=[], help="a recipe; again for each overlay")
    parser.add_argument("--fresh", action="store_true", help="as for fit, whose arguments are taken here as well")
    parser.add_argument("--init-from", type=Path, metavar="CHECKPOINT", help="what fit would begin a new run from")


def run(arguments: argparse.Namespace) -> int:
    """Print all findings; of several ranks, the first one does for all."""
    from pipeline.runtime.slurm import tell_script_of_mistake

    if code := examine(arguments):
        tell_script_of_mistake()
    return code


def examine(arguments: argparse.Namespace) -> int:
    """Look at everything; returns the exit code."""
    from pipeline.runtime.slurm import current_step, mistakes

    started_wrong = [Finding(False, mistake) for mistake in mistakes()]
    step = current_step() if not started_wrong else None
    if step is None or step.num_tasks == 1:
        findings = [*started_wrong, *machine(step), *recipe(arguments, step)]
        return say([*findings, *alone(step, arguments)])
    return together(step, arguments)


def alone(step: "Step | None", arguments: argparse.Namespace) -> Iterator[Finding]:
    """What a recipe says of devices that the job's only task has not."""
    from pipeline.preflight.distributed import hardware_keys

    loaded = load(arguments.config, arguments.overrides)
    if step is not None and not isinstance(loaded, Finding):
        yield from hardware_keys(step, loaded)


def say(findings: list[Finding]) -> int:
    """Print findings; what several ranks have found alike, once. Returns the exit code."""
    places: dict[tuple[bool, str], list[str]] = {}
    for finding in findings:
        places.setdefault(finding[:2], []).append(finding.where)
    for (well, what), where in places.items():
        at = "; ".join(dict.fromkeys(filter(None, where)))
        print(f"{'ok   ' if well else 'WRONG'} {what}" + (f" [{at}]" if at else ""), flush=True)
    return 0 if all(finding.well for finding in findings) else 1


def together(step: "Step", arguments: argparse.Namespace) -> int:
    """All ranks of a job step."""
    from pipeline.preflight.distributed import WAIT, Ranks, SilentError

    ranks = Ranks(step)
    ranks.give_up_after(3 * WAIT)
    if apart := ranks.meet():
        return say(apart)
    try:
        return exchange(ranks, arguments)
    except SilentError as silent:
        return say([Finding(False, str(silent), ranks.here)])


def exchange(ranks: "Ranks", arguments: argparse.Namespace) -> int:
    """What all find, said by the first rank."""
    from pipeline.preflight.distributed import check

    step = ranks.step
    findings = [finding._replace(where=ranks.here) for finding in machine(step) if not finding.well or step.rank == 0]
    loaded = load(arguments.config, arguments.overrides)
    if step.rank == 0:
        findings += recipe(arguments, step)
    findings += check(ranks, None if isinstance(loaded, Finding) else loaded)
    everything = [Finding(*one) for theirs in ranks.exchange(findings) for one in theirs]
    if step.rank > 0:
        # Whoever ends with an error ends the others: not before the first has spoken, whose store this is.
        ranks.wait_for("said", [0])
        ranks.store.set(f"left/{step.rank}", "")
        return int(not all(finding.well for finding in everything))
    code = say(everything)
    ranks.store.set("said/0", "")
    ranks.wait_for("left", list(range(1, step.num_tasks)))
    return code


def machine(step: "Step | None" = None) -> Iterator[Finding]:
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
        from pipeline.training.trainer import best_precision

        count = torch.cuda.device_count()  # the driver's
        cores = f"{f'{count} GPUs that torch cannot use' if count else 'no GPU'}; {os.cpu_count()} CPU cores"
        yield Finding(True, f"{cores}, precision {best_precision('cpu')} unless a recipe gives another")
    if step is not None:
        from pipeline.preflight.distributed import gpus

        usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
        yield from gpus(step, usable, os.environ.get("SLURM_GPUS_ON_NODE"))


def load(paths: list[Path], overrides: list[str]) -> "Recipe | Finding":
    """The recipe, or what is wrong with it."""
    from data_module.errors import InputError
    from pipeline.config.recipe import load_recipe
    from pipeline.training.trainer import refuse, trainer_signature

    if not paths:
        if overrides:
            return Finding(False, f"argument '{overrides[0]}' is unknown without a recipe; give one as --config FILE")
        return Finding(True, "no recipe to look at; give one with --config")
    try:
        loaded = load_recipe(paths, overrides, trainer_signature())
        refuse(loaded.trainer)
        return loaded
    except InputError as error:
        return Finding(False, str(error))


def recipe(arguments: argparse.Namespace, step: "Step | None") -> Iterator[Finding]:
    """The recipe, its texts, what it begins from, and the places it writes to."""
    from pipeline.checkpointing.checkpoint import newest_whole
    from pipeline.commands.fit import begins_afresh

    loaded = load(arguments.config, arguments.overrides)
    if isinstance(loaded, Finding):
        yield loaded
        return
    yield Finding(True, f"recipe {loaded.name}")
    yield from accelerator(loaded.trainer.get("accelerator", "auto"))
    corpus = Path(loaded.corpus.folder)
    if (corpus / "manifest.json").exists():
        yield prepared(corpus, loaded.corpus)
    else:
        for text in [*loaded.corpus.train, *loaded.corpus.validation, *loaded.corpus.test]:
            yield from texts(text)
    run = loaded.run_folder()
    if not begins_afresh(arguments.fresh, run, step) and newest_whole(run)[0] is not None:
        yield from going_on(run, loaded)
    elif arguments.init_from:
        yield from beginning(arguments, loaded)
    place = next(parent for parent in [run, *run.absolute().parents] if parent.exists())
    problem = unwritable(place)
    hint = f": {place} is not writable ({problem}); give another run.folder"
    yield Finding(problem is None, f"run folder {run}" + ("" if problem is None else hint))
    free = shutil.disk_usage(place).free
    needed = checkpoint_bytes(loaded) * (loaded.run.keep_last + 2)
    enough = free > needed
    message = f"{free / 2**30:.1f} GiB free, its checkpoints need {needed / 2**30:.1f}"
    yield Finding(enough, message + ("" if enough else "; lower run.keep_last or give another run.folder"))


def beginning(arguments: argparse.Namespace, loaded: "Recipe") -> Iterator[Finding]:
    """Whether a new run could begin from the weights it is to have."""
    from data_module.errors import InputError
    from pipeline.training.init_from import starting_point

    try:
        yield Finding(True, f"begins from the weights of {starting_point(arguments.init_from, loaded).path}")
    except InputError as error:
        yield Finding(False, str(error))


def going_on(run: Path, loaded: "Recipe") -> Iterator[Finding]:
    """Whether the run that is there is the recipe's."""
    from pipeline.checkpointing.run_folder import another_run, differences

    if forbidden := differences(run, loaded)[0]:
        yield Finding(False, another_run(run, forbidden))


def prepared(corpus: Path, settings: "CorpusSettings") -> Finding:
    """Whether the corpus that is there is whole and the recipe's."""
    from data_module.errors import InputError
    from data_module.corpus.manifest import read_manifest
    from data_module.corpus.preparation import differs_from

    try:
        found = differs_from(read_manifest(corpus), settings)
    except InputError as error:
        return Finding(False, str(error))
    hint = f" with other settings: {'; '.join(found)}; name another corpus.folder, or run `prepare --force`"
    return Finding(not found, f"corpus {corpus} is prepared" + (hint if found else ""))


def accelerator(asked: str) -> Iterator[Finding]:
    """Whether what the recipe asks for is here."""
    from pipeline.training.trainer import no_gpu

    if missing := no_gpu(asked):
        yield Finding(False, missing)


def unwritable(place: Path) -> str | None:
    """Why no file can be made there; root may do all that it is asked about, so it is tried."""
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return error.strerror


def texts(text: "TextSource") -> Iterator[Finding]:
    """Whether a source's files are there, or its data set can be read."""
    from importlib.util import find_spec

    from data_module.errors import install

    for name in filter(None, (text.source, text.target, text.tsv)):
        there = Path(name).is_file()
        hint = " is missing; put it there or correct its path in corpus:"
        yield Finding(there, f"text {name}" + ("" if there else hint))
    if text.dataset:
        known = find_spec("datasets") is not None
        hint = f"; it needs: {install('datasets')}"
        where = (
            "lies here" if Path(text.dataset).is_dir() else "comes from the Hugging Face hub: prepare needs a network"
        )
        yield Finding(known, f"data set {text.dataset} {where}" + ("" if known else hint))


def checkpoint_bytes(recipe: "Recipe") -> int:
    """Weights, Adam's two moments, and a moving average where there is one, in float32."""
    import torch

    from model.transformer import Transformer

    with torch.device("meta"):
        parameters = Transformer(recipe.corpus.vocabulary_size, recipe.network).parameters()
    copies = 3 if recipe.training.ema_decay is None else 4
    return 4 * copies * sum(parameter.numel() for parameter in parameters)


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
