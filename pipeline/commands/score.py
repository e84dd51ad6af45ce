"""Score given translations: print the log-probability and the number of tokens of each pair, in order.

Both numbers include the end symbol; a tab separates them. With --reverse, those of the other direction follow, then the
dual conditional cross-entropy |H1 - H2| + (H1 + H2) / 2 (Junczys-Dowmunt 2018), where H is the negative log-probability
divided by the number of tokens. The higher it is, the worse the pair.

With --n-best, the target is a list that `translate --n-best` has written. Its N best translations of each source line
are printed in the same format, best first by the model's score, or with --reverse by the sum of both models' scores.

With --keep, the best share of the pairs is written to two files, in order: the pairs with the highest log-probability
per token, or, with --reverse, with the lowest dual cross-entropy. A pair is never kept if one of its sides is empty, or
has one of `corpus.user_symbols` that a model has never seen on that side.
"""

import argparse

from data_module.errors import InputError
from data_module.system.files import user_path
from data_module.system.outputs import require_writable
from pipeline.inference.bundle_layout import bundle_of
from pipeline.inference.file_options import check_files
from pipeline.inference.options import add_prefix_argument
from pipeline.inference.text_io import translation_pairs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", type=user_path, help="a .ckpt file, a run folder or a bundle")
    parser.add_argument("--source", type=user_path, required=True, help="source sentences (plain or .gz)")
    parser.add_argument("--target", type=user_path, required=True, help="their translations (plain or .gz)")
    add_prefix_argument(parser)
    parser.add_argument(
        "--reverse", type=user_path, metavar="CHECKPOINT", help="a model that translates from target to source"
    )
    parser.add_argument("--n-best", type=int, metavar="N", help="--target is an n-best list: print its N best, sorted")
    parser.add_argument(
        "--pieces", action="store_true", help="add two columns: the target's pieces, and the log-probability of each"
    )
    parser.add_argument(
        "--alignments", type=user_path, metavar="FILE", help="write the pairs of aligned words, as in 0-0 1-2, to FILE"
    )
    parser.add_argument("--keep", type=float, metavar="SHARE", help="also write the best pairs, 0.9 for nine in ten")
    for side in ("source", "target"):
        parser.add_argument(f"--kept-{side}", type=user_path, metavar="FILE", help=f"with --keep, their {side} side")


def run(arguments: argparse.Namespace) -> int:
    """Check the options and the texts, then score them."""
    source, target, is_list = arguments.source, arguments.target, arguments.n_best is not None
    _check_options(arguments)
    total = None
    if source.is_file() and target.is_file():
        # Check the texts before anything is printed. A pipe can be read only once: it is checked while it is scored.
        total = sum(1 for _ in translation_pairs(source, target, is_list, warn=False))
    from pipeline.inference.text_scoring import score_text  # torch

    score_text(arguments, translation_pairs(source, target, is_list), total)
    return 0


def require_share(keep: float) -> None:
    """Raise InputError if the share of pairs to keep is out of bounds."""
    if not 0 < keep <= 1:
        raise InputError(f"--keep {keep:g}: must be above 0 and at most 1, as 0.9 for nine pairs in ten")


def _check_options(arguments: argparse.Namespace) -> None:
    if arguments.n_best is not None and arguments.n_best < 1:
        raise InputError(f"--n-best {arguments.n_best}: must be 1 or more")
    if arguments.pieces and arguments.n_best is not None:
        raise InputError("--pieces: cannot be given with --n-best, whose lines are those of translate --n-best")
    if arguments.alignments and arguments.n_best is not None:
        raise InputError("--alignments: cannot be given with --n-best, which changes the order of the translations")
    if arguments.alignments and bundle_of(arguments.checkpoint) is not None:
        raise InputError("--alignments: a bundle does not give its attention weights; give the checkpoint")
    kept = arguments.kept_source, arguments.kept_target
    if 0 < [arguments.keep, *kept].count(None) < 3:
        raise InputError("--keep: goes with --kept-source and --kept-target; give all three")
    if arguments.keep is not None:
        require_share(arguments.keep)
        if arguments.n_best is not None or not (arguments.source.is_file() and arguments.target.is_file()):
            raise InputError("--keep: needs two texts that can be read again, no pipe and no --n-best")
    check_files(arguments)
    for name in ("alignments", "kept_source", "kept_target"):
        if (path := getattr(arguments, name)) is not None:
            require_writable(path, f"--{name.replace('_', '-')}")
