"""What `score` does: it scores pairs with one model or two, and prints numbers, sorted lists or alignments."""

import argparse
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import groupby, islice
from typing import NamedTuple

from data_module.errors import InputError
from data_module.settings import CorpusSettings
from pipeline.inference.loading import load_translator
from pipeline.inference.options import with_prefix
from pipeline.inference.scoring import Alignment, Pieces, Scorer, dual_cross_entropy
from pipeline.inference.text_io import CHUNK, Pair, output_file, progress_bar
from pipeline.inference.translator import Hypothesis, Translator
from pipeline.runtime.console import discard_output


class ScoredPair(NamedTuple):
    """A pair and what the models say about it."""

    pair: Pair
    forward: Hypothesis
    reverse: Hypothesis | None
    alignment: Alignment
    pieces: Pieces


def score_text(arguments: argparse.Namespace, pairs: Iterator[Pair], total: int | None) -> None:
    """Score pairs and print the result of each.

    Args:
        arguments: those of `score`.
        pairs: the pairs.
        total: their number, if it is known.

    Raises:
        InputError: a model cannot be read, the models do not belong together, or the pairs cannot be read.
    """
    models = [load_translator(path, searches=False) for path in (arguments.checkpoint, arguments.reverse) if path]
    models[0].prefixes.check(arguments.prefix)
    is_list = arguments.n_best is not None
    if arguments.reverse:
        check_reverse(models[0], models[1], compares_tokens=not is_list)
    with output_file(arguments.alignments) if arguments.alignments else nullcontext() as file:
        scored = score_windows(pairs, models, arguments.prefix, file is not None, total)
        if is_list:
            _print_best(scored, arguments.n_best)
            return
        for one in scored:
            try:
                print(*_numbers(one), *(_piece_columns(one.pieces) if arguments.pieces else []), sep="\t")
            except BrokenPipeError:
                if file is None:
                    raise
                discard_output()  # The alignments are still to be written.
            if file is not None:
                file.write((" ".join(f"{i}-{j}" for i, j in one.alignment) + "\n").encode())


def check_reverse(forward: Translator, reverse: Translator, compares_tokens: bool) -> None:
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
    pairs: Iterator[Pair], models: list[Translator], prefix: str | None, aligned: bool, total: int | None
) -> Iterator[ScoredPair]:
    """Score a stream of pairs, `CHUNK` at a time, with a progress bar.

    Args:
        pairs: the pairs.
        models: the model, and that of the other direction if there is one.
        prefix: put before each source sentence for the first model. Alignments do not count it.
        aligned: whether to align words.
        total: number of pairs, if it is known.
    """
    scorers = [Scorer(model) for model in models]
    with progress_bar(total, description="scoring", smoothing=0) as bar:
        while window := list(islice(pairs, CHUNK)):
            numbers, sources, targets = (list(column) for column in zip(*window, strict=True))
            prefixed = list(with_prefix(prefix, sources))
            forward, alignments, pieces = scorers[0].score(numbers, prefixed, targets, aligned)
            reverse = scorers[1].score(numbers, targets, sources)[0] if scorers[1:] else [None] * len(window)
            if prefix is not None:
                alignments = [[(i - 1, j) for i, j in alignment if i] for alignment in alignments]
            yield from map(ScoredPair, window, forward, reverse, alignments, pieces)
            bar.update(len(window))
    for scorer in scorers:
        scorer.print_warnings()


def _numbers(scored: ScoredPair) -> list[str]:
    directions = [scored.forward, *([scored.reverse] if scored.reverse else [])]
    numbers = [text for one in directions for text in (f"{one.log_probability:.4f}", str(one.num_tokens))]
    return [*numbers, f"{dual_cross_entropy(*directions):.4f}"] if scored.reverse else numbers


def _piece_columns(pieces: Pieces) -> list[str]:
    """Return the pieces and their log-probabilities, each in a column."""
    return [" ".join(piece for piece, _ in pieces), " ".join(f"{score:.4f}" for _, score in pieces)]


def _print_best(scored: Iterable[ScoredPair], n_best: int) -> None:
    def score(one: ScoredPair) -> float:
        return one.forward.score + (one.reverse.score if one.reverse else 0.0)

    for number, translations in groupby(scored, lambda one: one.pair.number):
        for one in sorted(translations, key=score, reverse=True)[:n_best]:
            print(number, f"{score(one):.4f}", one.pair.target, sep="\t")
