"""Measure how fast a checkpoint translates a text, the latency of single sentences, and memory.

Times include encoding and decoding of text; that of the whole text is the median of three rounds. OMP_NUM_THREADS sets
the number of threads. With --baseline, CTranslate2 translates the same text in float32 with the same network, beam size
and number of threads, in alternating rounds. It stops a search as --stop-rule first does.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from sentencepiece import SentencePieceProcessor

from data_module.errors import InputError
from data_module.system.files import PlainValues, user_path
from data_module.tokenization.tokenizer import normalize_white_space
from pipeline.checkpointing.checkpoint import load_model, resolve_checkpoint
from pipeline.export.ctranslate2_model import require_ctranslate2, write_ctranslate2
from pipeline.inference.loading import load_translator
from pipeline.inference.options import SearchOptions, add_search_arguments
from pipeline.inference.text_io import read_sentences
from pipeline.runtime.memory import resident_peak

BATCH_TOKENS = 4096
"""Upper bound on the padded source tokens of a batch, for both."""
OURS, BASELINE = "pipeline", "ctranslate2"
ROUNDS = 3
WARM_UP_SENTENCES = 8
SINGLE_SENTENCES = 40
"""Number of sentences, spread over the text, that are translated alone in each round."""

Translate = Callable[[list[str]], tuple[list[str], int]]
"""Translates sentences, including encoding and decoding of text; returns the best translations and the number of their
pieces, end symbols included."""


class Round(NamedTuple):
    """Measurements of one round."""

    texts: list[str]
    num_tokens: int
    """Number of pieces of the texts, end symbols included."""
    seconds: float
    """Time of the whole text."""
    latencies: list[float]
    """Seconds of each sentence translated alone."""
    peak_memory_bytes: int
    """Peak of the resident memory of the process so far."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=user_path, help="a .ckpt file or a run folder")
    parser.add_argument("--source", type=user_path, required=True, help="sentences to translate (plain or .gz)")
    add_search_arguments(parser)
    parser.add_argument("--baseline", choices=(BASELINE,), help="program to compare with")


def run(arguments: argparse.Namespace) -> PlainValues:
    sentences, options = [line for line in read_sentences(arguments.source) if line], SearchOptions.given(arguments)
    if not sentences:
        raise InputError(f"{arguments.source}: has no sentences; give a text to translate")
    resolve_checkpoint(arguments.checkpoint)
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
                rounds[name].append(process.submit(measure, sentences, number, name).result())
    finally:
        for process in processes.values():
            process.shutdown(cancel_futures=True)
    return found, rounds


_translate: Translate
"""That of this process."""


def _start_ours(checkpoint: Path, options: SearchOptions, sentences: list[str]) -> PlainValues:
    """Load the checkpoint, warm up, and return the conditions: the text's size, the search's settings, the machine."""
    global _translate
    translator = load_translator(checkpoint)

    def translate(sentences: list[str]) -> tuple[list[str], int]:
        translations = translator.translate(sentences, options)
        num_tokens = sum(translation.hypotheses[0].num_tokens for translation in translations)
        return [translation.text for translation in translations], num_tokens

    _translate = translate
    _translate(spread(sentences, WARM_UP_SENTENCES))
    machine = {"threads": torch.get_num_threads(), "device": translator.device.type}
    return {"sentences": len(sentences), **vars(options.in_place_of(translator.settings)), **machine}


def _start_baseline(folder: Path, settings: PlainValues, sentences: list[str]) -> None:
    """Load CTranslate2 with our settings, and warm up."""
    global _translate
    _translate = ctranslate2_search(folder, settings)
    _translate(spread(sentences, WARM_UP_SENTENCES))


def ctranslate2_search(folder: Path, settings: PlainValues) -> Translate:
    """Return the search of CTranslate2 in float32. It makes its own batches of `BATCH_TOKENS`."""
    import ctranslate2  # which a machine that measures this program alone may lack

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


def spread(sentences: list[str], count: int, first: int = 0) -> list[str]:
    """Return about `count` sentences spread evenly over a text, beginning with number `first`."""
    return sentences[first :: max(1, len(sentences) // count)][:count]


def measure(sentences: list[str], number: int, name: str) -> Round:
    """Translate the text, then some of its sentences alone: round `number`, counted from 0."""

    def timed(texts: list[str]) -> tuple[float, tuple[list[str], int]]:
        started = time.perf_counter()
        output = _translate(texts)
        return time.perf_counter() - started, output

    seconds, (texts, num_tokens) = timed(sentences)
    latencies = [timed([sentence])[0] for sentence in spread(sentences, SINGLE_SENTENCES, number)]
    print(f"round {number + 1} of {ROUNDS}: {name} {seconds:.2f} s", file=sys.stderr)
    return Round(texts, num_tokens, seconds, latencies, resident_peak())


def figures_of(rounds: list[Round]) -> dict[str, float]:
    """Return the figures of the round with the median time, and of the latencies of all rounds."""
    seconds = statistics.median(measured.seconds for measured in rounds)
    latencies = sorted(latency for measured in rounds for latency in measured.latencies)
    return {
        "seconds": seconds,
        "target_tokens_per_second": rounds[0].num_tokens / seconds,
        "sentences_per_second": len(rounds[0].texts) / seconds,
        "latency_median_seconds": statistics.median(latencies),
        "latency_p95_seconds": latencies[int(0.95 * (len(latencies) - 1))],
        "peak_memory_bytes": max(measured.peak_memory_bytes for measured in rounds),
    }


def table(figures: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table with a line for each program."""
    lines = [f"{'':12} tokens/s  sentences/s  latency ms (p95)  memory MB"]
    for name, one in figures.items():
        lines.append(
            f"{name:12} {one['target_tokens_per_second']:8,.0f}  {one['sentences_per_second']:11,.1f}  "
            f"{1e3 * one['latency_median_seconds']:7.1f} ({1e3 * one['latency_p95_seconds']:6.1f})  "
            f"{one['peak_memory_bytes'] / 1e6:9,.0f}"
        )
    return "\n".join(lines)
