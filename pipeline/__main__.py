"""`python -m pipeline <command>`, or `attention-pipeline <command>` where a wheel is installed.

Each command is a file in `pipeline/commands`, imported only when it is used.
"""

import sys
from types import ModuleType

from pipeline.runtime import signals

if sys.argv[1:2] == ["fit"]:
    # Before anything that takes time is imported.
    signals.install()

import argparse
import importlib
import logging
from typing import Any, NoReturn

from data_module.errors import PROGRAM, InputError
from pipeline.metrics.private import leave_out_pyplot
from pipeline.runtime.console import (
    Failure,
    MessageFormatter,
    ReaderGone,
    drop_unread_output,
    lacking_memory,
    open_closed_streams,
    report,
    use_utf8,
    user_message,
)
from pipeline.runtime.launch import forget_place, report_mistake_to_script

COMMANDS = {
    "prepare": "raw parallel text -> corpus folder",
    "fit": "corpus folder -> run folder; resumes when run again",
    "average": "last or best checkpoints of a run -> one averaged checkpoint",
    "translate": "sentences -> translations",
    "score": "source text and translations -> log-probabilities",
    "evaluate": "source and reference text -> BLEU and chrF with signatures",
    "synthesize": "text of one language -> a better model, in stages",
    "export": "checkpoint -> bundle that runs without this program",
    "recipe": "list the recipes that come with the program, copy one, print paths",
    "demo": "prepare to export on a generated corpus, in minutes",
    "doctor": "check the machine, the job and a recipe before running",
}
"""Each command in one line. Its file has `add_arguments(parser)` and `run(arguments)`, which returns the exit code."""

FILTERS = (["translate"], ["score"])
"""Commands whose product is their standard output: they end when nothing reads it. The others finish their work."""

LESS_MEMORY = {"translate": "give a smaller --beam or --n-best", "evaluate": "give a smaller --beam"}
"""What to do where a command runs out of memory."""


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake as one line, without the usage text above it.

    A recipe's file may be given without `--config` before it.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as `ArgumentParser` does, after putting `--config` before recipes that lack it."""
        if args is not None and "--config" in self._option_string_actions:
            args = self._with_config_options(args)
        return super().parse_known_args(args, namespace)

    def _with_config_options(self, words: list[str]) -> list[str]:
        """Return the words with `--config` before each YAML file that is not the value of an option."""
        result: list[str] = []
        for word in words:
            previous = result[-1] if result else ""
            action = self._option_string_actions.get(previous)
            takes_value = action.nargs != 0 if action else previous.startswith("--") and "=" not in previous
            if word.endswith((".yaml", ".yml")) and not word.startswith("-") and not takes_value:
                result.append("--config")
            result.append(word)
        return result

    def error(self, message: str) -> NoReturn:
        """Raise InputError with the message."""
        raise InputError(f"{message}; see {self.prog} --help")


def parse(command: str, words: list[str]) -> tuple[ModuleType, argparse.Namespace]:
    """Return the module of a command and its parsed arguments.

    Unknown arguments of a command that takes `--config` are overrides of the recipe: `arguments.overrides`.

    Raises InputError for an unknown or removed command, and for arguments that the command does not take.
    """
    if command == "benchmark":
        raise InputError(
            "benchmark: is no command since 1.2.0; use python -m tests.benchmark in a clone of the project"
        )
    if command not in COMMANDS:
        raise InputError(f"'{command}' is not a command; the commands are: {', '.join(COMMANDS)}")
    module = importlib.import_module(f"pipeline.commands.{command}")
    parser = OneLineParser(
        prog=f"{PROGRAM} {command}",
        description=module.__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    known, unknown = parser.parse_known_args(words)
    if unknown and not hasattr(known, "config"):
        raise InputError(f"argument '{unknown[0]}' is unknown; see {parser.prog} --help")
    known.overrides = unknown
    return module, known


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 after a user's mistake, or the command's own."""
    if arguments is None:
        open_closed_streams()
        use_utf8()
        drop_unread_output(is_product=sys.argv[1:2] in FILTERS)
        leave_out_pyplot()
        arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: {PROGRAM} <command> [--help]\n")
        for name, purpose in COMMANDS.items():
            print(f"  {name:10} {purpose}")
        return 0
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(MessageFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("data_module").setLevel(logging.INFO)
    known = None
    if arguments[0] not in ("fit", "doctor"):
        forget_place()
    try:
        module, known = parse(arguments[0], arguments[1:])
        code = int(module.run(known) or 0)
        sys.stdout.flush()
        return code
    except ReaderGone:
        return 0
    except signals.Stopped as stop:
        report(stop)
        return stop.exit_code
    except KeyboardInterrupt:
        report("interrupted")
        return 130
    except Failure as error:
        report(f"error: {error}")
        return 1
    except Exception as error:
        line = user_message(error)
        if line is None and (lacking := lacking_memory(error)) is not None:
            way_out = LESS_MEMORY.get(arguments[0], "ask for more memory")
            fewer = ", or fewer --devices" * (getattr(known, "devices", 1) > 1)
            report(f"error: out of memory ({lacking}); {way_out}{fewer}")
            return 1
        if line is None:
            raise
        report(f"error: {line}")
        report_mistake_to_script()
        return 2


if __name__ == "__main__":
    sys.exit(main())
