"""Average the weights of a run's checkpoints: the last N, or the N around its best validation.

The paper averages the last 5 for base and 20 for big (section 6.1).
"""

import argparse

from data_module.errors import InputError
from data_module.system.files import replace_error, user_path
from data_module.system.outputs import followed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", type=user_path, help="a run folder")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--last", type=int, metavar="N", help="number of checkpoints, from the newest")
    which.add_argument("--best", type=int, metavar="N", help="number of checkpoints around the best validation")
    parser.add_argument(
        "--output",
        type=user_path,
        help="the file to write (default: RUN/average-last-N.ckpt or RUN/average-best-N.ckpt)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the averaged checkpoint and print its path."""
    option = "last" if arguments.best is None else "best"
    count: int = getattr(arguments, option)
    if not arguments.run.is_dir():
        raise InputError(f"{arguments.run}: is no run folder; give the folder that fit wrote")
    if count < 1:
        raise InputError(f"--{option} {count} is not 1 or more")
    output = arguments.output or arguments.run / f"average-{option}-{count}.ckpt"
    if arguments.output is not None:
        output = followed(output)
    if output.exists() and not output.is_file():
        # The file would also replace a device, such as /dev/null.
        raise InputError(f"{output}: is a folder or a device; give a file as --output")
    if error := replace_error(output):
        raise InputError(f"{output}: cannot be written ({error}); give another file as --output")
    from pipeline.commands.averaging import write_average  # torch

    write_average(arguments.run, option, count, output)
    print(arguments.output or output)
    return 0
