"""Score translations with BLEU, chrF and exact match: values, 95 % bootstrap intervals and signatures.

Source and reference are plain, detokenized texts with one sentence per line. Without files, the text is a test set of
sacreBLEU (`--test-set`), or `corpus.test` of the checkpoint's recipe; several sources of it are also scored apart. The
last output line is JSON.
"""

import argparse
from dataclasses import replace

from data_module.errors import InputError
from data_module.system.files import user_path
from data_module.system.outputs import require_writable
from pipeline.inference.file_options import check_files
from pipeline.inference.options import SearchOptions, add_prefix_argument, add_search_arguments
from pipeline.inference.text_io import paired_texts
from pipeline.runtime.console import report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", type=user_path, help="a .ckpt file, a run folder or a bundle")
    parser.add_argument("--source", type=user_path, help="sentences to translate (plain or .gz)")
    parser.add_argument(
        "--reference",
        type=user_path,
        action="append",
        help="their reference translations (plain or .gz); may be given several times",
    )
    parser.add_argument(
        "--test-set",
        metavar="NAME",
        help="in place of two files: a test set of sacreBLEU, such as wmt14/full, for the model's languages",
    )
    add_prefix_argument(parser)
    add_search_arguments(parser)
    parser.add_argument(
        "--n-best",
        type=int,
        metavar="N",
        help="add the share of sentences with an exact match among the best 1, 3, 5 and 10 translations, up to N; "
        "at most the beam size",
    )
    parser.add_argument(
        "--metric",
        choices=("ter", "chrf2++"),
        action="append",
        default=[],
        help="add a metric of sacreBLEU; may be given several times (default: the recipe's run.metrics)",
    )
    # Without effect since version 1.2.
    parser.add_argument("--scores", type=user_path, action="append", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=user_path, help="a file to write the translations to")
    parser.add_argument(
        "--paper", action="store_true", help="add BLEU on Moses tokens, as in papers (needs the extra paper-score)"
    )
    parser.add_argument(
        "--versus",
        type=user_path,
        metavar="OTHER",
        help="another checkpoint; test whether the difference is significant",
    )


def run(arguments: argparse.Namespace) -> int:
    """Check the options and read the texts, then translate and score."""
    options = replace(SearchOptions.given(arguments), n_best=1 if arguments.n_best is None else arguments.n_best)
    texts = given_texts(arguments)
    if arguments.scores:
        report("warning: --scores has no effect since version 1.2: compare COMET's scores by comet-compare; omit it")
    check_files(arguments)
    if arguments.output is not None:
        require_writable(arguments.output, "--output")
    from pipeline.inference.evaluation import evaluate  # torch and sacreBLEU

    evaluate(arguments, options, texts)
    return 0


def given_texts(arguments: argparse.Namespace) -> list[list[str]] | None:
    """Return the lines of `--source` and of each `--reference`; None if neither is given.

    Raises InputError if one of them is missing, a file cannot be read, `--prefix` is given without a text, or
    `--test-set` with files.
    """
    if arguments.test_set is not None and (arguments.source or arguments.reference):
        raise InputError("--test-set: cannot be given with --source and --reference; give one or the other")
    if (arguments.source is None) != (arguments.reference is None):
        missing = "--reference" if arguments.reference is None else "--source"
        raise InputError(f"{missing}: is missing; give --source and --reference, or neither to score corpus.test")
    if arguments.paper and len(arguments.reference or ()) > 1:
        raise InputError("--paper: is for one reference; omit it, or the other --reference")
    if arguments.source is not None:
        return paired_texts(arguments.source, *arguments.reference)
    if arguments.prefix is not None and arguments.test_set is None:
        raise InputError("--prefix: the sources of corpus.test have prefixes of their own; omit it, or give --source")
    return None
