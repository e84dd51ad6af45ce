"""Measure how fast a checkpoint translates a text, the latency of single sentences, and memory.

Times include encoding and decoding of text. With --baseline, other programs translate the same text in float32 with the
same network, beam size and number of threads, in alternating rounds. A search that stops earlier takes fewer steps;
seconds_per_sentence_step is therefore reported as well: the total time divided by the number of decoder steps, summed
over sentences. OMP_NUM_THREADS sets the number of threads.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from data_module.files import user_path
from pipeline.inference.options import SearchOptions, add_search_arguments

if TYPE_CHECKING:
    from pipeline.benchmark.engines import EngineOutput, EngineSettings, Translate

BASELINES = ("ctranslate2", "huggingface")
ROUNDS = 3
SINGLE_SENTENCES = 40
"""Number of sentences, spread over the text, that are translated alone in each round."""
RATIOS = {
    "ratio": "seconds",
    "step_ratio": "seconds_per_sentence_step",
    "latency_ratio": "latency_median_seconds",
}
"""Figures in which engines are compared, by the name of the ratio: theirs divided by ours."""


class Round(NamedTuple):
    """Measurements of one engine in one round."""

    output: "EngineOutput"
    seconds: float
    """Time of the whole text."""
    latencies: list[float]
    """Seconds of each sentence translated alone."""
    peak_memory_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's arguments."""
    parser.add_argument("--checkpoint", type=user_path, required=True, help="a .ckpt file or a run folder")
    parser.add_argument("--bundle", type=user_path, help="exported bundle of the checkpoint; compare with its model.ts")
    parser.add_argument("--source", type=user_path, required=True, help="sentences to translate (plain or .gz)")
    add_search_arguments(parser)
    parser.add_argument(
        "--baseline", action="append", default=[], choices=BASELINES, help="program to compare with; may be given twice"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure in alternating rounds; print a table and the JSON."""
    from data_module.errors import InputError
    from pipeline.benchmark.engines import prepare
    from pipeline.benchmark.report import rounded
    from pipeline.inference.text_io import read_sentences

    sentences = [sentence for sentence in read_sentences(arguments.source) if sentence.strip()]
    if not sentences:
        raise InputError(f"{arguments.source}: has no sentences; give a text to translate")
    baselines = list(dict.fromkeys(arguments.baseline))
    names = ["pipeline", *(["bundle"] if arguments.bundle else []), *baselines]
    options = SearchOptions.given(arguments)
    with tempfile.TemporaryDirectory() as folder:
        with _process() as process:
            settings = process.submit(
                prepare, arguments.checkpoint, Path(folder), arguments.bundle, baselines, options
            ).result()
        rounds = _take_turns(names, settings, sentences)
    figures = {name: _figures(rounds[name]) for name in names}
    result: dict[str, Any] = {
        "sentences": len(sentences),
        **vars(settings.decoding),
        "threads": settings.threads,
        "device": settings.device,
        **figures["pipeline"],
    }
    for name in names[1:]:
        result[name] = figures[name]
        for ratio, figure in RATIOS.items():
            if figure in figures[name]:
                result[f"{ratio}_to_{name}"] = figures[name][figure] / figures["pipeline"][figure]
        pairs = zip(rounds["pipeline"][0].output.texts, rounds[name][0].output.texts, strict=True)
        result[f"same_as_{name}"] = sum(ours == theirs for ours, theirs in pairs) / len(sentences)
    _print_table(figures)
    print(json.dumps(rounded(result)))
    return 0


def _process() -> ProcessPoolExecutor:
    """Return an executor with one new process, whose memory holds only what it imports itself."""
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def _take_turns(names: list[str], settings: "EngineSettings", sentences: list[str]) -> dict[str, list[Round]]:
    """Run all engines in each round, one after another."""
    processes = {name: _process() for name in names}
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


_translate: "Translate"
"""This process's engine."""
_device: str
"""Its device."""


def _start(name: str, settings: "EngineSettings", sentences: list[str]) -> None:
    """Create this process's engine and warm it up."""
    from pipeline.benchmark.engines import ENGINES

    global _translate, _device
    _translate, _device = ENGINES[name](settings), settings.device
    _translate(sentences)


def _measure(sentences: list[str], single: list[str]) -> Round:
    seconds, output = _timed(sentences)
    latencies = [_timed([sentence])[0] for sentence in single]
    return Round(output, seconds, latencies, _peak_memory())


def _timed(sentences: list[str]) -> "tuple[float, EngineOutput]":
    started = time.perf_counter()
    output = _translate(sentences)
    return time.perf_counter() - started, output


def _peak_memory() -> int:
    """Return peak bytes of this process; on a GPU, those of PyTorch's tensors, and 0 for an engine without PyTorch."""
    if _device == "cuda":
        torch: Any = sys.modules.get("torch")
        return int(torch.cuda.max_memory_allocated()) if torch is not None else 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _figures(rounds: list[Round]) -> dict[str, float]:
    """Return an engine's figures: the median round and the latencies of all rounds."""
    seconds, output = statistics.median(one.seconds for one in rounds), rounds[0].output
    latencies = sorted(latency for one in rounds for latency in one.latencies)
    figures = {
        "seconds": seconds,
        "target_tokens_per_second": output.num_tokens / seconds,
        "sentences_per_second": len(output.texts) / seconds,
        "latency_median_seconds": statistics.median(latencies),
        "latency_p95_seconds": latencies[int(0.95 * (len(latencies) - 1))],
        "peak_memory_bytes": max(one.peak_memory_bytes for one in rounds),
    }
    if steps := output.sentence_steps:
        figures |= {"sentence_steps": steps, "seconds_per_sentence_step": seconds / steps}
    return figures


def _print_table(figures: dict[str, dict[str, float]]) -> None:
    print(f"{'':12} tokens/s  sentences/s  latency ms (p95)  memory MB", file=sys.stderr)
    for name, one in figures.items():
        print(
            f"{name:12} {one['target_tokens_per_second']:8,.0f}  {one['sentences_per_second']:11,.1f}  "
            f"{1e3 * one['latency_median_seconds']:7.1f} ({1e3 * one['latency_p95_seconds']:6.1f})  "
            f"{one['peak_memory_bytes'] / 1e6:9,.0f}",
            file=sys.stderr,
        )
