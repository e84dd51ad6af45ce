"""The files that a command reads and writes, by its options."""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from data_module.system.files import PlainValues
from data_module.system.outputs import check_outputs, files_of_texts
from pipeline.checkpointing.run_folder import files_of_run
from pipeline.inference.bundle_layout import BUNDLE_NAMES, bundle_of

_OUTPUTS = ("output", "alignments", "kept_source", "kept_target", "folder")
"""Arguments that name what a command writes; all other paths among its arguments are read."""


def check_files(arguments: argparse.Namespace, recipes: Iterable[PlainValues] = (), *further: Path) -> None:
    """Raise InputError if a command would write over what it reads, or write two outputs to one file.

    `recipes` are those of its models, whose texts it may read, once they are known; `further` are other files that it
    reads.
    """
    outputs = []
    inputs = [Path("/dev/stdin")] if getattr(arguments, "source", "") is None else []
    for name, value in vars(arguments).items():
        paths = [path for path in (value if isinstance(value, list) else [value]) if isinstance(path, Path)]
        if name not in _OUTPUTS:
            inputs += [file for path in paths for file in _files(path)]
        else:
            outputs += [(name if name == "folder" else f"--{name.replace('_', '-')}", path) for path in paths]
    if hasattr(arguments, "shard_lines") and (output := arguments.output) is not None:
        outputs.append(("--output", output.with_name(f"{output.name}.shards")))
    inputs += [file for recipe in recipes for file in files_of_texts(recipe["corpus"])]
    check_outputs(outputs, [*inputs, *further])


def _files(path: Path) -> Iterator[Path]:
    """Yield a file; of a run folder or a bundle, the files that this program has written there."""
    if (bundle := bundle_of(path)) is not None:
        yield from (file for file in bundle.rglob("*") if BUNDLE_NAMES.fullmatch(str(file.relative_to(bundle))))
    yield from files_of_run(path) if path.is_dir() else [path]
