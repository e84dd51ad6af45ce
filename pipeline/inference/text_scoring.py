"""What `score` does: it scores pairs with one model or two, and prints numbers, sorted lists or alignments."""

import argparse
import math
from array import array
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np

from data_module.errors import InputError
from data_module.system.outputs import output_file
from data_module.system.text_files import progress_bar
from data_module.tokenization.tokenizer import SPACE_MARK, is_blank, symbol_places
from pipeline.inference.file_options import check_files
from pipeline.inference.loading import load_translator, require_direction
from pipeline.inference.options import with_prefix
from pipeline.inference.scoring import Alignment, Pieces, Scorer, dual_cross_entropy
from pipeline.inference.text_io import CHUNK, Pair, translation_pairs
from pipeline.inference.translator import Hypothesis, Translator
from pipeline.runtime.console import ReaderGone


class ScoredPair(NamedTuple):
    """A pair and what the models say about it."""

    pair: Pair
    forward: Hypothesis
    reverse: Hypothesis | None
    alignment: Alignment
    pieces: Pieces


def score_text(arguments: argparse.Namespace, pairs: Iterator[Pair], total: int | None) -> None:
    """Score pairs and print the result of each; `total` is their number, None if it is not known.

    Raises InputError if a model cannot be read, the models do not belong together, or the pairs cannot be read.
    """
    models = [load_translator(path, searches=False) for path in (arguments.checkpoint, arguments.reverse) if path]
    check_files(arguments, [model.recipe for model in models])
    models[0].prefixes.require(arguments.prefix)
    is_list = arguments.n_best is not None
    if arguments.reverse:
        check_reverse(models[0], models[1], compares_tokens=not is_list)
    with output_file(arguments.alignments) if arguments.alignments else nullcontext() as file:
        scored = score_windows(pairs, models, arguments.prefix, file is not None, total)
        if is_list:
            _print_best(scored, arguments.n_best)
            return
        costs, strange = array("d"), unknown_symbols(models)
        for one in scored:
            costs.append(_cost(one, strange, models[0].tokenizer.model_type))
            columns = _numbers(one)
            if arguments.pieces:
                pieces, scores = zip(*one.pieces, strict=True) if one.pieces else ((), ())
                columns += [" ".join(pieces), " ".join(f"{score:.4f}" for score in scores)]
            try:
                print(*columns, sep="\t")
            except ReaderGone:
                if file is None and arguments.keep is None:  # Otherwise files are still to be written.
                    raise
            if file is not None:
                file.write((" ".join(f"{i}-{j}" for i, j in one.alignment) + "\n").encode())
    if arguments.keep is not None:
        _write_kept(arguments, np.array(costs))


def check_reverse(forward: Translator, reverse: Translator, compares_tokens: bool) -> None:
    """Raise InputError if `reverse` has the direction of `forward`, or with `compares_tokens` another vocabulary."""
    corpus = forward.recipe["corpus"]
    require_direction("--reverse", reverse, corpus["target_language"], corpus["source_language"])
    if compares_tokens and sorted(forward.tokenizer.pieces()) != sorted(reverse.tokenizer.pieces()):
        raise InputError(
            f"--reverse {reverse.name}: has another vocabulary than {forward.name}, so that cross-entropies for each"
            " token cannot be compared; name the first model's run as corpus.tokenizer of the second"
        )


def score_windows(
    pairs: Iterator[Pair], models: list[Translator], prefix: str | None, aligned: bool, total: int | None
) -> Iterator[ScoredPair]:
    """Score a stream of pairs, `CHUNK` at a time, with a progress bar.

    `models` are the model, and one of the opposite direction if there is one. `prefix` is put before each source
    sentence for the first model; alignments count words without it.
    """
    scorers = [Scorer(model) for model in models]
    with progress_bar("scoring", total) as bar:
        while window := list(islice(pairs, CHUNK)):
            numbers, sources, targets = (list(column) for column in zip(*window, strict=True))
            prefixed = [with_prefix(prefix, one) for one in sources]
            forward, alignments, pieces = scorers[0].score(numbers, prefixed, targets, aligned)
            reverse = scorers[1].score(numbers, targets, sources)[0] if scorers[1:] else [None] * len(window)
            if prefix is not None:
                alignments = [[(i - 1, j) for i, j in alignment if i] for alignment in alignments]
            yield from map(ScoredPair, window, forward, reverse, alignments, pieces)
            bar.update(len(window))
    for scorer in scorers:
        scorer.warnings.print()


def _numbers(scored: ScoredPair) -> list[str]:
    directions = [scored.forward, *([scored.reverse] if scored.reverse else [])]
    numbers = [text for one in directions for text in (f"{one.log_probability:.4f}", str(one.num_tokens))]
    return [*numbers, f"{dual_cross_entropy(*directions):.4f}"] if scored.reverse else numbers


def unknown_symbols(models: list[Translator]) -> list[set[str]]:
    """Return the user symbols that a model has never seen: in a source sentence, and in a target sentence.

    A network may write such a symbol by chance when it samples. `models` are the model, and one of the opposite
    direction if there is one.
    """
    found: list[set[str]] = [set(), set()]
    for side, symbols in enumerate(found):
        for is_reverse, model in enumerate(models):
            pieces = model.tokenizer.pieces()
            never_seen = model.tokenizer.never_seen(bool(side) != bool(is_reverse))
            unseen = {pieces[number].removeprefix(SPACE_MARK) for number in never_seen}
            symbols |= unseen & set(model.tokenizer.user_symbols)
    return found


def _cost(scored: ScoredPair, strange: list[set[str]], model_type: str) -> float:
    """Return the cost of a pair: the dual cross-entropy, or that of one direction; infinity if it is unusable."""
    for text, symbols in zip((scored.pair.source, scored.pair.target), strange, strict=True):
        places = symbol_places(text, model_type)
        if is_blank(text) or any(symbol in places for symbol in symbols):
            return math.inf
    if scored.reverse:
        return dual_cross_entropy(scored.forward, scored.reverse)
    return -scored.forward.log_probability / scored.forward.num_tokens


def _write_kept(arguments: argparse.Namespace, costs: np.ndarray) -> None:
    """Write the pairs of lowest cost to the files of `--kept-source` and `--kept-target`; `costs` is float64 [pairs].

    Raises InputError if no pair can be kept.
    """
    count = math.floor(arguments.keep * np.count_nonzero(np.isfinite(costs)) + 0.5)
    if not count:
        raise InputError(f"--keep {arguments.keep:g}: no pair is left; give a larger share, or texts with more pairs")
    kept = np.zeros(len(costs), dtype=bool)
    kept[np.argsort(costs, kind="stable")[:count]] = True
    pairs = translation_pairs(arguments.source, arguments.target, False, warn=False)
    with output_file(arguments.kept_source) as source, output_file(arguments.kept_target) as target:
        for pair, is_kept in zip(pairs, kept.tolist(), strict=True):
            if is_kept:
                source.write(f"{pair.source}\n".encode())
                target.write(f"{pair.target}\n".encode())


def _print_best(scored: Iterable[ScoredPair], n_best: int) -> None:
    def score(one: ScoredPair) -> float:
        return one.forward.score + (one.reverse.score if one.reverse else 0.0)

    for number, translations in groupby(scored, lambda one: one.pair.number):
        for one in sorted(translations, key=score, reverse=True)[:n_best]:
            print(number, f"{score(one):.4f}", one.pair.target, sep="\t")
