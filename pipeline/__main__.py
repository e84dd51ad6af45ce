"""`python -m pipeline <verb>`: one verb a file; a verb's file is imported only when it is asked for."""

import sys

from pipeline.runtime import signals as stop_request

if sys.argv[1:2] == ["fit"]:
    # From here on, before anything that takes time is imported.
    stop_request.install()

import argparse
import importlib
import logging
import os
import threading
from typing import NoReturn

from data_module.errors import InputError
from pipeline.runtime.atomic_file import disk_full_error
from pipeline.runtime.errors import user_message
from pipeline.runtime.slurm import report_mistake_to_script

VERBS = {
    "prepare": "raw parallel text -> corpus folder",
    "fit": "corpus folder -> run folder; run again, it resumes",
    "average": "a run's last checkpoints -> one averaged checkpoint",
    "translate": "sentences -> translations",
    "evaluate": "source and reference text -> BLEU and chrF with signatures",
    "export": "a checkpoint -> a bundle that needs none of this code",
    "benchmark": "how fast, how lean, how full",
    "demo": "prepare to export on a made corpus, in minutes",
    "doctor": "what is wrong with this machine or job, before time is spent",
}


class OneLineParser(argparse.ArgumentParser):
    """Says a mistake in one line, as everything else here does, and not below the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Raises InputError."""
        raise InputError(f"{message}; see {self.prog} --help")


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0, or 2 after a user's mistake."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m pipeline <verb> [--help]\n")
        for verb, purpose in VERBS.items():
            print(f"  {verb:10} {purpose}")
        return 0
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("data_module").setLevel(logging.INFO)
    threading.excepthook = _thread_ended
    verb = arguments[0]
    try:
        if verb not in VERBS:
            raise InputError(f"'{verb}' is not a verb; known are: {', '.join(VERBS)}")
        module = importlib.import_module(f"pipeline.commands.{verb}")
        parser = OneLineParser(
            prog=f"python -m pipeline {verb}",
            description=module.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(parser)
        known, unknown = parser.parse_known_args(arguments[1:])
        if unknown and not hasattr(known, "config"):
            raise InputError(f"argument '{unknown[0]}' is unknown; see python -m pipeline {verb} --help")
        known.overrides = unknown
        return int(module.run(known) or 0)
    except BrokenPipeError:
        # The reader has gone (`| head`): nothing to say, and nothing left to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except stop_request.Stopped as stop:
        print(stop, file=sys.stderr)
        return stop.exit_code
    except KeyboardInterrupt:
        print("stopped by the keyboard", file=sys.stderr)
        return 130
    except Exception as error:
        line = user_message(error)
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        report_mistake_to_script()
        return 2


def _thread_ended(told: threading.ExceptHookArgs) -> None:
    """TensorBoard's writer hands its error on to the next call; of a full disk, that one's line is enough."""
    if told.exc_value is None or not disk_full_error(told.exc_value):
        threading.__excepthook__(told)


if __name__ == "__main__":
    sys.exit(main())
