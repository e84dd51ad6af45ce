"""Measure how fast a checkpoint translates a text, the latency of single sentences, and memory.

Times include encoding and decoding of text. With --baseline, CTranslate2 translates the same text in float32 with the
same network, beam size and number of threads, in alternating rounds. It stops a search as --stop-rule first does.
OMP_NUM_THREADS sets the number of threads.
"""

import argparse
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from data_module.errors import InputError
from data_module.files import user_path
from model.settings import DecodingSettings
from pipeline.inference.options import SearchOptions, add_search_arguments

ROUNDS = 3
SINGLE_SENTENCES = 40
"""Number of sentences, spread over the text, that are translated alone in each round."""
BATCH_TOKENS = 4096
"""Upper bound on the padded source tokens of a batch, for both engines."""


class EngineSettings(NamedTuple):
    """Settings that the engines share."""

    checkpoint: Path
    folder: Path
    """Folder to which `prepare` wrote the tokenizer and the network for CTranslate2."""
    decoding: DecodingSettings
    threads: int
    device: str
    """cuda if there is a GPU."""


Translate = Callable[[list[str]], tuple[list[str], int]]
"""Translates sentences, including encoding and decoding of text; returns the best translations and the number of their
pieces, end symbols included."""


class Round(NamedTuple):
    """Measurements of one engine in one round."""

    texts: list[str]
    num_tokens: int
    """Number of pieces of the texts, end symbols included."""
    seconds: float
    """Time of the whole text."""
    latencies: list[float]
    """Seconds of each sentence translated alone."""
    peak_memory_bytes: int
    """Of the process so far."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's arguments."""
    parser.add_argument("checkpoint", type=user_path, help="a .ckpt file or a run folder")
    parser.add_argument("--source", type=user_path, required=True, help="sentences to translate (plain or .gz)")
    add_search_arguments(parser)
    parser.add_argument("--baseline", choices=("ctranslate2",), help="program to compare with")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure in alternating rounds; print a table and return the figures."""
    from pipeline.inference.text_io import read_sentences

    sentences = [sentence for sentence in read_sentences(arguments.source) if sentence]
    if not sentences:
        raise InputError(f"{arguments.source}: has no sentences; give a text to translate")
    baseline = arguments.baseline
    with tempfile.TemporaryDirectory() as folder:
        settings = prepare(arguments.checkpoint, Path(folder), baseline, SearchOptions.given(arguments))
        rounds = _take_turns(["pipeline", *([baseline] if baseline else [])], settings, sentences)
    figures = {name: _figures(measured) for name, measured in rounds.items()}
    result: dict[str, Any] = {
        "sentences": len(sentences),
        **vars(settings.decoding),
        "threads": settings.threads,
        "device": settings.device,
        **figures["pipeline"],
    }
    if baseline:
        result[baseline] = theirs = figures[baseline]
        result[f"ratio_to_{baseline}"] = theirs["seconds"] / result["seconds"]
        result[f"latency_ratio_to_{baseline}"] = theirs["latency_median_seconds"] / result["latency_median_seconds"]
        pairs = zip(rounds["pipeline"][0].texts, rounds[baseline][0].texts, strict=True)
        result[f"same_as_{baseline}"] = sum(one == other for one, other in pairs) / len(sentences)
    _print_table(figures)
    return result


def _take_turns(names: list[str], settings: EngineSettings, sentences: list[str]) -> dict[str, list[Round]]:
    """Run the engines in each round, one after another, each in a process that holds only what it imports itself."""
    processes = {name: ProcessPoolExecutor(1, mp_context=get_context("spawn")) for name in names}
    rounds: dict[str, list[Round]] = {name: [] for name in names}
    try:
        for name, process in processes.items():
            process.submit(_start, name, settings, sentences[:: max(1, len(sentences) // 8)]).result()
        for number in range(ROUNDS):
            single = sentences[number :: max(1, len(sentences) // SINGLE_SENTENCES)][:SINGLE_SENTENCES]
            for name, process in processes.items():
                rounds[name].append(process.submit(_measure, sentences, single).result())
                print(f"round {number + 1} of {ROUNDS}: {name} {rounds[name][-1].seconds:.2f} s", file=sys.stderr)
    finally:
        for process in processes.values():
            process.shutdown(cancel_futures=True)
    return rounds


_translate: Translate
"""This process's engine."""


def _start(name: str, settings: EngineSettings, sentences: list[str]) -> None:
    """Create this process's engine and warm it up."""

    global _translate
    _translate = (pipeline_engine if name == "pipeline" else ctranslate2_engine)(settings)
    _translate(sentences)


def _measure(sentences: list[str], single: list[str]) -> Round:
    seconds, (texts, num_tokens) = _timed(sentences)
    latencies = [_timed([sentence])[0] for sentence in single]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Round(texts, num_tokens, seconds, latencies, peak)


def _timed(sentences: list[str]) -> tuple[float, tuple[list[str], int]]:
    started = time.perf_counter()
    output = _translate(sentences)
    return time.perf_counter() - started, output


def _figures(rounds: list[Round]) -> dict[str, float]:
    """Return an engine's figures: the median round and the latencies of all rounds."""
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


def _print_table(figures: dict[str, dict[str, float]]) -> None:
    print(f"{'':12} tokens/s  sentences/s  latency ms (p95)  memory MB", file=sys.stderr)
    for name, of_engine in figures.items():
        print(
            f"{name:12} {of_engine['target_tokens_per_second']:8,.0f}  {of_engine['sentences_per_second']:11,.1f}  "
            f"{1e3 * of_engine['latency_median_seconds']:7.1f} ({1e3 * of_engine['latency_p95_seconds']:6.1f})  "
            f"{of_engine['peak_memory_bytes'] / 1e6:9,.0f}",
            file=sys.stderr,
        )


def prepare(checkpoint: Path, folder: Path, baseline: str | None, options: SearchOptions) -> EngineSettings:
    """Write what the baseline reads to a folder.

    Raises:
        InputError: the checkpoint cannot be read, a setting is out of bounds, or the baseline is not installed or does
            not support the network.
    """
    import torch

    from pipeline.checkpointing.checkpoint import load_model, resolve_checkpoint
    from pipeline.export.ctranslate2_model import write_ctranslate2

    path = resolve_checkpoint(checkpoint)
    model = load_model(path)
    if baseline:
        if model.tokenizer.pair:
            raise InputError(
                f"{path}: has two tokenizers with one vocabulary, which no baseline reads; leave out --baseline"
            )
        (folder / "tokenizer.model").write_bytes(model.tokenizer.model)
        write_ctranslate2(model.network, model.tokenizer, folder / "ctranslate2")
    device = "cuda" if torch.cuda.is_available() else "cpu"  # as `load_translator` chooses
    return EngineSettings(path, folder, options.in_place_of(model.decoding), torch.get_num_threads(), device)


def pipeline_engine(settings: EngineSettings) -> Translate:
    """Return this project's engine, as `translate` runs it."""
    from pipeline.inference.translator import load_translator

    decoding = settings.decoding
    options = SearchOptions(decoding.beam_size, decoding.length_penalty, decoding.stop_rule)
    translator = load_translator(settings.checkpoint, options)

    def translate(sentences: list[str]) -> tuple[list[str], int]:
        translations = translator.translate(sentences)
        num_tokens = sum(translation.hypotheses[0].num_tokens for translation in translations)
        return [translation.text for translation in translations], num_tokens

    return translate


def ctranslate2_engine(settings: EngineSettings) -> Translate:
    """Return the engine of CTranslate2 in float32. It makes its own batches of `BATCH_TOKENS`."""
    from ctranslate2 import Translator
    from sentencepiece import SentencePieceProcessor

    from data_module.tokenization.tokenizer import normalize_white_space

    decoding = settings.decoding
    tokenizer: Any = SentencePieceProcessor(model_file=str(settings.folder / "tokenizer.model"))
    end = tokenizer.id_to_piece(tokenizer.eos_id())
    folder = str(settings.folder / "ctranslate2")
    translator = Translator(folder, settings.device, compute_type="float32", intra_threads=settings.threads)

    def translate(sentences: list[str]) -> tuple[list[str], int]:
        sources = tokenizer.encode([normalize_white_space(sentence) for sentence in sentences], out_type=str)
        longest = max(map(len, sources), default=0) + 1
        results = translator.translate_batch(
            [[*source, end] for source in sources],
            beam_size=decoding.beam_size,
            num_hypotheses=decoding.beam_size,
            length_penalty=decoding.length_penalty,
            max_decoding_length=longest + decoding.max_extra_tokens,
            max_batch_size=BATCH_TOKENS,
            batch_type="tokens",
        )
        best = [result.hypotheses[0] for result in results]
        return tokenizer.decode(best), sum(len(pieces) + 1 for pieces in best)

    return translate
