"""`python -m pipeline <verb>`: one verb a file; a verb's file is imported only when it is asked for."""

import argparse
import gzip
import importlib
import logging
import os
import sys
import zlib

from data_module.errors import InputError

VERBS = {
    "prepare": "raw parallel text -> corpus folder",
    "fit": "corpus folder -> run folder; run again, it resumes",
    "average": "a run's last checkpoints -> one averaged checkpoint",
    "translate": "sentences -> translations",
    "evaluate": "source and reference text -> BLEU and chrF with signatures",
    "export": "a checkpoint -> a bundle that needs none of this code",
    "demo": "all of the above on a made corpus, in minutes",
    "doctor": "what is wrong with this machine or job, before time is spent",
}


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
    verb = arguments[0]
    try:
        if verb not in VERBS:
            raise InputError(f"'{verb}' is not a verb; known are: {', '.join(VERBS)}")
        module = importlib.import_module(f"pipeline.{verb}")
        parser = argparse.ArgumentParser(
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
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has gone (`| head`): nothing to say, and nothing left to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, EOFError, zlib.error) as error:
        name = getattr(error, "filename", None)
        if name is None and not isinstance(error, (gzip.BadGzipFile, EOFError, zlib.error)):
            raise
        reason = getattr(error, "strerror", None) or error
        print(f"error: {name or 'the input'}: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped by the keyboard", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
