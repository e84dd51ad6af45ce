"""Measure how fast a checkpoint translates a text, the latency of single sentences, and memory."""

import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from data_module.files import PlainValues
from pipeline.inference.loading import load_translator
from pipeline.inference.options import SearchOptions
from pipeline.inference.translator import Translator

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
    """Peak memory of the process so far."""


def run(checkpoint: Path, options: SearchOptions, sentences: list[str]) -> PlainValues:
    """Measure the rounds; print a table and return the figures.

    Raises InputError if the checkpoint cannot be read, or an option is out of bounds.
    """
    translator = load_translator(checkpoint)
    translate = timed_translate(translator, options)
    translate(spread(sentences, WARM_UP_SENTENCES))
    rounds = [measure(translate, sentences, number, "pipeline") for number in range(ROUNDS)]
    figures = figures_of(rounds)
    print(table({"pipeline": figures}), file=sys.stderr)
    return {**about(translator, options, sentences), **figures}


def about(translator: Translator, options: SearchOptions, sentences: list[str]) -> PlainValues:
    """Return the conditions of the measurement: the text's size, the search's settings, threads and device."""
    machine = {"threads": torch.get_num_threads(), "device": translator.device.type}
    return {"sentences": len(sentences), **vars(options.in_place_of(translator.settings)), **machine}


def timed_translate(translator: Translator, options: SearchOptions) -> Translate:
    """Return this program's search, as `translate` runs it."""

    def translate(sentences: list[str]) -> tuple[list[str], int]:
        translations = translator.translate(sentences, options)
        num_tokens = sum(translation.hypotheses[0].num_tokens for translation in translations)
        return [translation.text for translation in translations], num_tokens

    return translate


def spread(sentences: list[str], count: int, first: int = 0) -> list[str]:
    """Return about `count` sentences spread evenly over a text, beginning with number `first`."""
    return sentences[first :: max(1, len(sentences) // count)][:count]


def measure(translate: Translate, sentences: list[str], number: int, name: str) -> Round:
    """Translate the text, then some of its sentences alone: round `number`, counted from 0."""

    def timed(texts: list[str]) -> tuple[float, tuple[list[str], int]]:
        started = time.perf_counter()
        output = translate(texts)
        return time.perf_counter() - started, output

    seconds, (texts, num_tokens) = timed(sentences)
    latencies = [timed([sentence])[0] for sentence in spread(sentences, SINGLE_SENTENCES, number)]
    print(f"round {number + 1} of {ROUNDS}: {name} {seconds:.2f} s", file=sys.stderr)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Round(texts, num_tokens, seconds, latencies, peak)


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
