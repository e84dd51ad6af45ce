"""Average the weights of a run's last N checkpoints (section 6.1 of the paper: 5 for base, 20 for big)."""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--last", type=int, required=True, metavar="N", help="number of checkpoints, from the newest")
    parser.add_argument("--output", type=Path, help="the file to write (default: RUN/average-last-N.ckpt)")


def run(arguments: argparse.Namespace) -> int:
    """Write the averaged checkpoint and print its path."""
    from data_module.errors import InputError
    from pipeline.checkpointing.checkpoint import average, write_atomic
    from pipeline.checkpointing.checkpoint_files import is_valid, step_checkpoints

    if arguments.run.is_file():
        raise InputError(f"{arguments.run}: is a file; give the run folder")
    if not arguments.run.is_dir():
        raise InputError(f"{arguments.run}: there is no such run folder; give the folder that fit wrote")
    if arguments.last < 1:
        raise InputError(f"--last {arguments.last} is not 1 or more")
    paths = [path for path in step_checkpoints(arguments.run) if is_valid(path)]
    if not paths:
        raise InputError(f"{arguments.run}: holds no checkpoint; give a run folder that fit wrote")
    if arguments.last > len(paths):
        has = f"{len(paths)} valid checkpoint{'s' if len(paths) > 1 else ''}"
        raise InputError(
            f"{arguments.run}: has {has}, --last is {arguments.last}; give --last {len(paths)} or less, and keep more "
            "with run.keep_last"
        )
    output = arguments.output or arguments.run / f"average-last-{arguments.last}.ckpt"
    chosen = paths[-arguments.last :]
    write_atomic(average(chosen), output)
    print(f"averaged {', '.join(path.name for path in chosen)}", file=sys.stderr)
    print(output)
    return 0
