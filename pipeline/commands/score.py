"""Score given translations: print the log-probability and the number of tokens of each pair, in order.

Both numbers count the end symbol; a tab separates them. With --reverse, those of the other direction follow, and the
dual conditional cross-entropy |H1 - H2| + (H1 + H2) / 2 (Junczys-Dowmunt 2018), where H is the negative log-probability
divided by the number of tokens. The higher it is, the worse is the pair.

With --n-best, the target is a list that `translate --n-best` has written. Its N best translations of each source line
are printed in the same format, best first by the model's score, or with --reverse by the sum of both models' scores.
"""

import argparse
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import groupby, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from data_module.errors import InputError
from data_module.files import user_path
from data_module.settings import CorpusSettings
from data_module.text_files import open_file
from pipeline.commands.evaluate import output_file, require_writable
from pipeline.inference.options import SearchOptions, add_prefix_argument, with_prefix
from pipeline.inference.text_io import CHUNK, progress_bar, sentences
from pipeline.runtime.console import discard_output

if TYPE_CHECKING:
    from pipeline.inference.scoring import Alignment
    from pipeline.inference.translator import Hypothesis, Translator


class Pair(NamedTuple):
    """A source sentence and one of its translations."""

    number: int
    """The source's line, from 1."""
    source: str
    target: str


class ScoredPair(NamedTuple):
    """A pair and what the models say about it."""

    pair: Pair
    forward: "Hypothesis"
    reverse: "Hypothesis | None"
    alignment: "Alignment"


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
        "--alignments", type=user_path, metavar="FILE", help="write the pairs of aligned words, as in 0-0 1-2, to FILE"
    )


def run(arguments: argparse.Namespace) -> int:
    """Check the texts, then score them."""
    source, target, is_list = arguments.source, arguments.target, arguments.n_best is not None
    _check_options(arguments)
    total = None
    if source.is_file() and target.is_file():
        # Before anything is printed. A pipe can be read only once, and is checked while it is scored.
        total = sum(1 for _ in read_pairs(source, target, is_list, warn=False))
    models = [_load(path) for path in (arguments.checkpoint, arguments.reverse) if path]
    models[0].prefixes.check(arguments.prefix)
    if arguments.reverse:
        check_reverse(models[0], models[1], compares_tokens=not is_list)
    with output_file(arguments.alignments) if arguments.alignments else nullcontext() as file:
        pairs = read_pairs(source, target, is_list)
        scored = score_windows(pairs, models, arguments.prefix, file is not None, total)
        if is_list:
            _print_best(scored, arguments.n_best)
            return 0
        for one in scored:
            try:
                print(*_numbers(one), sep="\t")
            except BrokenPipeError:
                if file is None:
                    raise
                discard_output()  # The alignments are still to be written.
            if file is not None:
                file.write((" ".join(f"{i}-{j}" for i, j in one.alignment) + "\n").encode())
    return 0


def _check_options(arguments: argparse.Namespace) -> None:
    require_writable(arguments.alignments, arguments.source, arguments.target, option="--alignments")
    from pipeline.export.bundle_folder import bundle_of

    if arguments.n_best is not None and arguments.n_best < 1:
        raise InputError(f"--n-best {arguments.n_best}: must be 1 or more")
    if arguments.alignments and arguments.n_best is not None:
        raise InputError("--alignments: cannot be given with --n-best, which changes the order of the translations")
    if arguments.alignments and bundle_of(arguments.checkpoint) is not None:
        raise InputError("--alignments: a bundle does not give its attention weights; give the checkpoint")


def read_pairs(source: Path, target: Path, is_list: bool, *, warn: bool = True) -> Iterator[Pair]:
    """Yield the pairs of two texts.

    Args:
        source: source sentences.
        target: their translations.
        is_list: whether `target` is an n-best list.
        warn: whether to warn of lines that are not UTF-8.

    Raises:
        InputError: a file cannot be read, the texts do not pair up or are empty, or `target` is no n-best list.
    """
    number = 0
    with open_file(source) as source_stream, open_file(target) as target_stream:
        sources = sentences(source_stream, str(source), warn=warn)
        targets = sentences(target_stream, str(target), warn=warn)
        lists = _lists(targets, target) if is_list else ([text] for text in targets)
        for number, (line, translations) in enumerate(zip_longest(sources, lists), 1):
            if line is None or translations is None:
                shorter = source if line is None else target
                raise InputError(
                    f"{source} and {target}: {shorter} ends after {number - 1} lines and the other goes on; give texts"
                    " whose lines pair up"
                )
            yield from (Pair(number, line, text) for text in translations)
    if not number:
        raise InputError(f"{source}: is empty; there is nothing to score")


def _lists(lines: Iterable[str], path: Path) -> Iterator[list[str]]:
    """Yield the translations of each source line from an n-best list, whose scores are left out."""
    translations: list[str] = []
    number = 1
    for place, line in enumerate(lines, 1):
        first, *others = line.split("\t", 2)
        if translations and first == str(number + 1):
            yield translations
            translations, number = [], number + 1
        if first != str(number) or not others:
            raise InputError(
                f"{path}: line {place} is not of an n-best list; give what translate --n-best has written: the number"
                " of the source line, a tab and a translation, with --scores a score and a tab before it"
            )
        translations.append(others[-1])
    if translations:
        yield translations


def _load(path: Path) -> "Translator":
    """Load a model with PyTorch's operators: the compiled search scores nothing."""
    from pipeline.export.bundle import load_checkpoint_or_bundle
    from pipeline.runtime.memory import limit_onednn_cache

    limit_onednn_cache()
    return load_checkpoint_or_bundle(path, SearchOptions(), searches=False)


def check_reverse(forward: "Translator", reverse: "Translator", compares_tokens: bool) -> None:
    """Check the model of `--reverse`.

    Raises:
        InputError: it is of the same direction, or has another vocabulary and `compares_tokens`.
    """
    languages, others = ([model.recipe["corpus"][f"{side}_language"] for side in ("source", "target")]
                         for model in (forward, reverse))  # fmt: skip
    # Recipes that do not name their languages all have the same two.
    if languages == others != [CorpusSettings.source_language, CorpusSettings.target_language]:
        source, target = languages
        raise InputError(
            f"--reverse {reverse.name}: translates from {source} to {target}, as {forward.name} does; give a model that"
            f" translates from {target} to {source}"
        )
    if compares_tokens and sorted(forward.tokenizer.pieces()) != sorted(reverse.tokenizer.pieces()):
        raise InputError(
            f"--reverse {reverse.name}: has another vocabulary than {forward.name}, so that cross-entropies for each"
            " token cannot be compared; name the first model's run as corpus.tokenizer of the second"
        )


def score_windows(
    pairs: Iterator[Pair], models: "list[Translator]", prefix: str | None, aligned: bool, total: int | None
) -> Iterator[ScoredPair]:
    """Score a stream of pairs, `CHUNK` at a time, with a progress bar.

    Args:
        pairs: the pairs.
        models: the model, and that of the other direction if there is one.
        prefix: put before each source sentence for the first model. Alignments do not count it.
        aligned: whether to align words.
        total: number of pairs, if it is known.
    """
    from pipeline.inference.scoring import Scorer

    scorers = [Scorer(model) for model in models]
    with progress_bar(total, description="scoring", smoothing=0) as bar:
        while window := list(islice(pairs, CHUNK)):
            numbers, sources, targets = (list(column) for column in zip(*window, strict=True))
            forward, alignments = scorers[0].score(numbers, list(with_prefix(prefix, sources)), targets, aligned)
            reverse = scorers[1].score(numbers, targets, sources)[0] if scorers[1:] else [None] * len(window)
            if prefix is not None:
                alignments = [[(i - 1, j) for i, j in alignment if i] for alignment in alignments]
            yield from map(ScoredPair, window, forward, reverse, alignments)
            bar.update(len(window))
    for scorer in scorers:
        scorer.print_warnings()


def _numbers(scored: ScoredPair) -> list[str]:
    from pipeline.inference.scoring import dual_cross_entropy

    directions = [scored.forward, *([scored.reverse] if scored.reverse else [])]
    numbers = [text for one in directions for text in (f"{one.log_probability:.4f}", str(one.num_tokens))]
    return [*numbers, f"{dual_cross_entropy(*directions):.4f}"] if scored.reverse else numbers


def _print_best(scored: Iterable[ScoredPair], n_best: int) -> None:
    def score(one: ScoredPair) -> float:
        return one.forward.score + (one.reverse.score if one.reverse else 0.0)

    for number, translations in groupby(scored, lambda one: one.pair.number):
        for one in sorted(translations, key=score, reverse=True)[:n_best]:
            print(number, f"{score(one):.4f}", one.pair.target, sep="\t")
