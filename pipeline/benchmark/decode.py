"""Measure how fast a checkpoint translates a text, the latency of single sentences, and memory.

Times include encoding and decoding of text. With --baseline, other programs translate the same text in float32 with the
same network, beam size and number of threads, in alternating rounds. They stop a search as --stop-rule first does.
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

BASELINES = ("ctranslate2", "huggingface")
ROUNDS = 3
SINGLE_SENTENCES = 40
"""Number of sentences, spread over the text, that are translated alone in each round."""
RATIOS = {"ratio": "seconds", "latency_ratio": "latency_median_seconds"}
"""Figures in which engines are compared, by the name of the ratio: theirs divided by ours."""
BATCH_TOKENS = 4096
"""Upper bound on the padded source tokens of a batch, for every engine."""


class EngineSettings(NamedTuple):
    """Settings that all engines share."""

    checkpoint: Path
    folder: Path
    """Folder to which `prepare` wrote the tokenizer and the network in the baselines' formats."""
    decoding: DecodingSettings
    threads: int
    device: str
    """cuda if there is a GPU."""


class EngineOutput(NamedTuple):
    """An engine's translations of some sentences."""

    texts: list[str]
    num_tokens: int
    """Number of pieces of the best translations, including their end symbols."""


Translate = Callable[[list[str]], EngineOutput]
"""Translates sentences, including encoding and decoding of text."""


class Round(NamedTuple):
    """Measurements of one engine in one round."""

    output: EngineOutput
    seconds: float
    """Time of the whole text."""
    latencies: list[float]
    """Seconds of each sentence translated alone."""
    peak_memory_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's arguments."""
    parser.add_argument("checkpoint", type=user_path, help="a .ckpt file or a run folder")
    parser.add_argument("--source", type=user_path, required=True, help="sentences to translate (plain or .gz)")
    add_search_arguments(parser)
    parser.add_argument(
        "--baseline", action="append", default=[], choices=BASELINES, help="program to compare with; may be given twice"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure in alternating rounds; print a table and return the figures."""
    from pipeline.inference.text_io import read_sentences

    sentences = [sentence for sentence in read_sentences(arguments.source) if sentence.strip()]
    if not sentences:
        raise InputError(f"{arguments.source}: has no sentences; give a text to translate")
    baselines = list(dict.fromkeys(arguments.baseline))
    names, options = ["pipeline", *baselines], SearchOptions.given(arguments)
    with tempfile.TemporaryDirectory() as folder:
        settings = prepare(arguments.checkpoint, Path(folder), baselines, options)
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
            result[f"{ratio}_to_{name}"] = figures[name][figure] / figures["pipeline"][figure]
        pairs = zip(rounds["pipeline"][0].output.texts, rounds[name][0].output.texts, strict=True)
        result[f"same_as_{name}"] = sum(ours == theirs for ours, theirs in pairs) / len(sentences)
    _print_table(figures)
    return result


def _take_turns(names: list[str], settings: EngineSettings, sentences: list[str]) -> dict[str, list[Round]]:
    """Run all engines in each round, one after another, each in a process that holds only what it imports itself."""
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
_device: str
"""Its device."""


def _start(name: str, settings: EngineSettings, sentences: list[str]) -> None:
    """Create this process's engine and warm it up."""

    global _translate, _device
    _translate, _device = ENGINES[name](settings), settings.device
    _translate(sentences)


def _measure(sentences: list[str], single: list[str]) -> Round:
    seconds, output = _timed(sentences)
    latencies = [_timed([sentence])[0] for sentence in single]
    return Round(output, seconds, latencies, _peak_memory())


def _timed(sentences: list[str]) -> tuple[float, EngineOutput]:
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
    seconds, output = statistics.median(measured.seconds for measured in rounds), rounds[0].output
    latencies = sorted(latency for measured in rounds for latency in measured.latencies)
    return {
        "seconds": seconds,
        "target_tokens_per_second": output.num_tokens / seconds,
        "sentences_per_second": len(output.texts) / seconds,
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


def prepare(checkpoint: Path, folder: Path, baselines: list[str], options: SearchOptions) -> EngineSettings:
    """Write the tokenizer and the baselines' files to a folder.

    Raises:
        InputError: the checkpoint cannot be read, a setting is out of bounds, or a baseline is not installed or does
            not support the network.
    """
    import torch

    from pipeline.checkpointing.checkpoint import load_model, resolve_checkpoint
    from pipeline.export.ctranslate2_model import write_ctranslate2
    from pipeline.export.huggingface_model import write_huggingface

    path = resolve_checkpoint(checkpoint)
    model = load_model(path)
    network, tokenizer, corpus = model.network, model.tokenizer, model.recipe["corpus"]
    if baselines and tokenizer.pair:
        raise InputError(
            f"{path}: has two tokenizers with one vocabulary, which no baseline reads; leave out --baseline"
        )
    decoding = options.in_place_of(model.decoding)
    (folder / "tokenizer.model").write_bytes(tokenizer.model)
    if "ctranslate2" in baselines:
        write_ctranslate2(network, tokenizer, folder / "ctranslate2")
    if "huggingface" in baselines:
        languages = corpus["source_language"], corpus["target_language"]
        write_huggingface(network, tokenizer, decoding, decoding.length_penalty, languages, folder / "huggingface")
    device = "cuda" if torch.cuda.is_available() else "cpu"  # as `load_translator` chooses
    return EngineSettings(path, folder, decoding, torch.get_num_threads(), device)


def pipeline_engine(settings: EngineSettings) -> Translate:
    """Return this project's engine, as `translate` runs it."""
    from pipeline.inference.translator import load_translator

    decoding = settings.decoding
    options = SearchOptions(decoding.beam_size, decoding.length_penalty, decoding.stop_rule)
    translator = load_translator(settings.checkpoint, options)

    def translate(sentences: list[str]) -> EngineOutput:
        translations = translator.translate(sentences)
        num_tokens = sum(translation.hypotheses[0].num_tokens for translation in translations)
        return EngineOutput([translation.text for translation in translations], num_tokens)

    return translate


def ctranslate2_engine(settings: EngineSettings) -> Translate:
    """Return the engine of CTranslate2 in float32. It makes its own batches of `BATCH_TOKENS`."""
    from ctranslate2 import Translator

    from data_module.tokenization.tokenizer import normalize_white_space

    decoding, tokenizer = settings.decoding, _load_tokenizer(settings)
    end = tokenizer.id_to_piece(tokenizer.eos_id())
    folder = str(settings.folder / "ctranslate2")
    translator = Translator(folder, settings.device, compute_type="float32", intra_threads=settings.threads)

    def translate(sentences: list[str]) -> EngineOutput:
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
        return EngineOutput(tokenizer.decode(best), sum(len(pieces) + 1 for pieces in best))

    return translate


def huggingface_engine(settings: EngineSettings) -> Translate:
    """Return the engine of Transformers' `generate` in float32, with this project's batches."""
    from data_module.tokenization.tokenizer import normalize_white_space
    from pipeline.export.huggingface_model import require_transformers
    from pipeline.inference.translator import length_batches, padded

    decoding, tokenizer = settings.decoding, _load_tokenizer(settings)
    model = require_transformers().MarianMTModel.from_pretrained(settings.folder / "huggingface")
    model.eval().to(settings.device)
    special = {tokenizer.pad_id(), tokenizer.bos_id(), tokenizer.eos_id()}
    # Plain search, without the restrictions that `export` saves with the model, which cost time in each step.
    options: dict[str, Any] = {"do_sample": False, "suppress_tokens": None, "forced_eos_token_id": None}
    if decoding.beam_size > 1:
        options |= {"length_penalty": decoding.length_penalty, "early_stopping": True}

    def translate(sentences: list[str]) -> EngineOutput:
        encoded = tokenizer.encode([normalize_white_space(sentence) for sentence in sentences])
        sources = [[*ids, tokenizer.eos_id()] for ids in encoded]
        answers: list[list[int]] = [[] for _ in sources]
        for batch in length_batches([len(source) for source in sources], BATCH_TOKENS):
            ids, is_token = padded([sources[index] for index in batch], tokenizer.pad_id())
            output = model.generate(
                ids.to(settings.device),
                attention_mask=is_token.long().to(settings.device),
                num_beams=decoding.beam_size,
                max_new_tokens=ids.size(1) + decoding.max_extra_tokens,
                **options,
            )
            for index, row in zip(batch, output.tolist(), strict=True):
                answers[index] = [piece for piece in row if piece not in special]
        return EngineOutput(tokenizer.decode(answers), sum(len(ids) + 1 for ids in answers))

    return translate


def _load_tokenizer(settings: EngineSettings) -> Any:
    """Return the tokenizer that `prepare` wrote, as a SentencePieceProcessor."""
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(settings.folder / "tokenizer.model"))


ENGINES: dict[str, Callable[[EngineSettings], Translate]] = {
    "pipeline": pipeline_engine,
    "ctranslate2": ctranslate2_engine,
    "huggingface": huggingface_engine,
}
