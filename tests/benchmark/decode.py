"""Measure decoding as `python -m pipeline benchmark decode` does, in turns with CTranslate2.

With --baseline, CTranslate2 translates the same text in float32 with the same network, beam size and number of threads,
in alternating rounds. It stops a search as --stop-rule first does.
"""

import argparse
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import ctranslate2
from sentencepiece import SentencePieceProcessor

from data_module.errors import InputError
from data_module.files import PlainValues
from data_module.tokenization.tokenizer import normalize_white_space
from pipeline.benchmark.decode import (
    ROUNDS,
    WARM_UP_SENTENCES,
    Round,
    Translate,
    about,
    figures_of,
    measure,
    spread,
    table,
    timed_translate,
)
from pipeline.checkpointing.checkpoint import load_model, resolve_checkpoint
from pipeline.commands.benchmark import add_decode_arguments, checked_sentences
from pipeline.export.ctranslate2_model import require_ctranslate2, write_ctranslate2
from pipeline.inference.loading import load_translator
from pipeline.inference.options import SearchOptions

BATCH_TOKENS = 4096
"""Upper bound on the padded source tokens of a batch, for both."""
OURS, BASELINE = "pipeline", "ctranslate2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_decode_arguments(parser)
    parser.add_argument("--baseline", choices=(BASELINE,), help="program to compare with")


def run(arguments: argparse.Namespace) -> PlainValues:
    sentences, options = checked_sentences(arguments), SearchOptions.given(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) if arguments.baseline else None
        if folder:
            write_baseline(arguments.checkpoint, folder)
        found, rounds = take_turns(arguments.checkpoint, options, folder, sentences)
    figures = {name: figures_of(measured) for name, measured in rounds.items()}
    print(table(figures), file=sys.stderr)
    ours = figures[OURS]
    result = {**found, **ours}
    if arguments.baseline:
        result[BASELINE] = theirs = figures[BASELINE]
        result[f"ratio_to_{BASELINE}"] = theirs["seconds"] / ours["seconds"]
        result[f"latency_ratio_to_{BASELINE}"] = theirs["latency_median_seconds"] / ours["latency_median_seconds"]
        pairs = zip(rounds[OURS][0].texts, rounds[BASELINE][0].texts, strict=True)
        result[f"same_as_{BASELINE}"] = sum(one == other for one, other in pairs) / len(sentences)
    return result


def write_baseline(checkpoint: Path, folder: Path) -> None:
    """Write what CTranslate2 reads."""
    path = resolve_checkpoint(checkpoint)
    model = load_model(path)
    if model.tokenizer.pair:
        raise InputError(
            f"{path}: has two tokenizers with one vocabulary, which no baseline reads; leave out --baseline"
        )
    (folder / "tokenizer.model").write_bytes(model.tokenizer.model)
    require_ctranslate2(model.network)
    write_ctranslate2(model.network, model.tokenizer, folder / "ctranslate2")


def take_turns(
    checkpoint: Path, options: SearchOptions, folder: Path | None, sentences: list[str]
) -> tuple[PlainValues, dict[str, list[Round]]]:
    """Return what is measured, and each program's rounds. Each runs in a process of its own, which tells its memory.

    Args:
        checkpoint: the checkpoint.
        options: settings of the search.
        folder: what `write_baseline` has written, if there is a baseline.
        sentences: the text.
    """
    names = [OURS, *([BASELINE] if folder else [])]
    processes = {name: ProcessPoolExecutor(1, mp_context=get_context("spawn")) for name in names}
    rounds: dict[str, list[Round]] = {name: [] for name in names}
    try:
        found = processes[OURS].submit(_start_ours, checkpoint, options, sentences).result()
        if folder:
            processes[BASELINE].submit(_start_baseline, folder, found, sentences).result()
        for number in range(ROUNDS):
            for name, process in processes.items():
                rounds[name].append(process.submit(_measure, sentences, number, name).result())
    finally:
        for process in processes.values():
            process.shutdown(cancel_futures=True)
    return found, rounds


_translate: Translate
"""That of this process."""


def _start_ours(checkpoint: Path, options: SearchOptions, sentences: list[str]) -> PlainValues:
    """Load the checkpoint, warm up, and return what is measured."""
    global _translate
    translator = load_translator(checkpoint)
    _translate = timed_translate(translator, options)
    _translate(spread(sentences, WARM_UP_SENTENCES))
    return about(translator, options, sentences)


def _start_baseline(folder: Path, settings: PlainValues, sentences: list[str]) -> None:
    """Load CTranslate2 with our settings, and warm up."""
    global _translate
    _translate = ctranslate2_search(folder, settings)
    _translate(spread(sentences, WARM_UP_SENTENCES))


def _measure(sentences: list[str], number: int, name: str) -> Round:
    return measure(_translate, sentences, number, name)


def ctranslate2_search(folder: Path, settings: PlainValues) -> Translate:
    """Return the search of CTranslate2 in float32. It makes its own batches of `BATCH_TOKENS`."""
    tokenizer = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    end = tokenizer.id_to_piece(tokenizer.eos_id())
    translator = ctranslate2.Translator(
        str(folder / "ctranslate2"), settings["device"], compute_type="float32", intra_threads=settings["threads"]
    )

    def translate(sentences: list[str]) -> tuple[list[str], int]:
        sources = tokenizer.encode([normalize_white_space(sentence) for sentence in sentences], out_type=str)
        longest = max(map(len, sources), default=0) + 1
        results = translator.translate_batch(
            [[*source, end] for source in sources],
            beam_size=settings["beam_size"],
            num_hypotheses=settings["beam_size"],
            length_penalty=settings["length_penalty"],
            max_decoding_length=longest + settings["max_extra_tokens"],
            max_batch_size=BATCH_TOKENS,
            batch_type="tokens",
        )
        best = [result.hypotheses[0] for result in results]
        return tokenizer.decode(best), sum(len(pieces) + 1 for pieces in best)

    return translate
