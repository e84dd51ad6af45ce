"""The formats of a bundle: how each is written, loaded and compared with the checkpoint."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from model.compiled_search import CompiledSearch
from model.packing import can_pack, pack_linears
from pipeline.checkpointing.checkpoint import TrainedModel
from pipeline.export import cpp_program, exported_program, onnx_model, torchscript
from pipeline.export.ctranslate2_model import write_ctranslate2
from pipeline.export.huggingface_model import write_huggingface
from pipeline.export.parity import Figures, Parity, different, largest, size, timed
from pipeline.export.readme import model_card
from pipeline.export.runners import CTranslate2Runner, HuggingFaceRunner, ProgramRunner, SearchRunner


class Bundle(NamedTuple):
    """A bundle that is being written."""

    model: TrainedModel
    folder: Path
    card: str
    """Text of `card.json`, which some formats hold as well."""
    power_penalty: float
    """Length penalty for the beam search of CTranslate2 and Transformers."""
    max_positions: int
    """Upper bound on the tokens of a source; 0 for none."""


def _torchscript(bundle: Bundle) -> None:
    path = bundle.folder / torchscript.NAME
    torchscript.write_torchscript(bundle.model.network, bundle.model.tokenizer, bundle.card, path)


def _torchscript_int8(bundle: Bundle) -> None:
    path = bundle.folder / torchscript.INT8_NAME
    torchscript.write_int8(bundle.model.network, bundle.model.tokenizer, bundle.card, path)


def _pt2(bundle: Bundle) -> None:
    exported_program.write_exported_program(bundle.model.network, bundle.card, bundle.folder / exported_program.NAME)


def _onnx(bundle: Bundle) -> None:
    onnx_model.write_onnx(bundle.model.network, bundle.folder / onnx_model.NAME)


def _ctranslate2(bundle: Bundle) -> None:
    write_ctranslate2(bundle.model.network, bundle.model.tokenizer, bundle.folder / "ctranslate2")


def _ctranslate2_int8(bundle: Bundle) -> None:
    write_ctranslate2(bundle.model.network, bundle.model.tokenizer, bundle.folder / "ctranslate2-int8", "int8")


def _cpp(bundle: Bundle) -> None:
    num_positions = cpp_program.num_positions(bundle.max_positions, bundle.model.decoding.max_extra_tokens)
    cpp_program.write_cpp(bundle.model.network, num_positions, bundle.folder / cpp_program.NAME)


def _huggingface(bundle: Bundle) -> None:
    model, card = bundle.model, json.loads(bundle.card)
    languages = card["source_language"], card["target_language"]
    folder = bundle.folder / "huggingface"
    write_huggingface(model.network, model.tokenizer, model.decoding, bundle.power_penalty, languages, folder)
    (folder / "README.md").write_text(model_card(card), encoding="utf-8")


def _compare_torchscript(bundle: Bundle, parity: Parity) -> Figures:
    path = bundle.folder / torchscript.NAME
    seconds, search = timed(lambda: torchscript.load_torchscript(path, packed=False))
    figures = {"float32": {"load_seconds": seconds, **_compare_search(bundle, search, parity, "model.ts")}}
    if can_pack(bundle.model.network):
        # Packed with packed, which computes the same operations in the same order.
        network = copy.deepcopy(bundle.model.network)
        pack_linears(network)
        eager = parity.with_network(network, "checkpoint, packed weights")
        seconds, search = timed(lambda: torchscript.load_torchscript(path))
        compared = _compare_search(bundle, search, eager, "model.ts, packed weights")
        figures["float32, packed"] = {"load_seconds": seconds, **compared}
        figures["checkpoint, packed"] = eager.figures
    seconds, search = timed(lambda: torchscript.load_torchscript(path, packed=False).to(torch.bfloat16))
    some = parity.sample()
    reported = _report(some, _runner(bundle, search, "model.ts in bfloat16").beam)
    figures["bfloat16"] = {"load_seconds": seconds, "sentences": len(some.sources), **reported}
    return figures


def _compare_torchscript_int8(bundle: Bundle, parity: Parity) -> Figures:
    path = bundle.folder / torchscript.INT8_NAME
    seconds, search = timed(lambda: torchscript.load_torchscript(path))
    return {"int8": {"load_seconds": seconds, **_report(parity, _runner(bundle, search, path.name).beam)}}


def _compare_pt2(bundle: Bundle, parity: Parity) -> Figures:
    return _compare_programs(bundle, parity, exported_program.NAME, exported_program.load_exported_program)


def _compare_onnx(bundle: Bundle, parity: Parity) -> Figures:
    return _compare_programs(bundle, parity, onnx_model.NAME, onnx_model.load_onnx)


def _compare_programs(
    bundle: Bundle, parity: Parity, name: str, load: Callable[[Path], dict[str, Callable[..., Any]]]
) -> Figures:
    """Compare a format that has an encoder and a decoding step."""
    seconds, programs = timed(lambda: load(bundle.folder / name))
    runner = ProgramRunner(programs, bundle.model.tokenizer, bundle.model.decoding, bundle.max_positions, name)
    greedy, figures = parity.measure(lambda sources: [[one] for one in runner.greedy(sources)])
    figures = {
        "load_seconds": seconds,
        "search": "greedy",
        "largest_logit_difference": parity.logits_difference(runner.logits),
        **parity.greedy_against([one for (one,) in greedy]),
        **figures,
    }
    return {"float32": _with_bounds(parity, figures)}


def _compare_ctranslate2(bundle: Bundle, parity: Parity) -> Figures:
    seconds, runner = timed(lambda: _ctranslate2_runner(bundle, "ctranslate2", "float32"))
    pairs = zip(parity.log_probabilities(), runner.forced(parity.sources, parity.greedy), strict=True)
    figures = {
        "load_seconds": seconds,
        "length_penalty": bundle.power_penalty,
        "largest_forced_score_difference": largest(abs(one - other) for one, other in pairs),
        **parity.greedy_against(runner.greedy(parity.sources)),
        **_report(parity, runner.beam),
    }
    return {"float32": _with_bounds(parity, figures)}


def _compare_ctranslate2_int8(bundle: Bundle, parity: Parity) -> Figures:
    seconds, runner = timed(lambda: _ctranslate2_runner(bundle, "ctranslate2-int8", "int8"))
    return {"int8": {"load_seconds": seconds, **_report(parity, runner.beam)}}


def _compare_cpp(bundle: Bundle, parity: Parity) -> Figures:
    library = cpp_program.compile_cpp(bundle.folder / cpp_program.NAME)
    path = bundle.folder / cpp_program.NAME / cpp_program.WEIGHTS
    tokenizer = bundle.model.tokenizer
    ids = tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id
    seconds, search = timed(lambda: CompiledSearch(library, path, *ids))
    return {"float32": {"load_seconds": seconds, **_compare_search(bundle, search, parity, cpp_program.NAME)}}


def _compare_huggingface(bundle: Bundle, parity: Parity) -> Figures:
    seconds, runner = timed(
        lambda: HuggingFaceRunner(bundle.folder / "huggingface", bundle.model.tokenizer, bundle.model.decoding)
    )
    tokens = [answer.tokens[:-1] for answer in parity.greedy]
    # Transformers leaves no white space at the end of a text.
    expected = [text.strip() for text in bundle.model.tokenizer.decode(tokens)]
    figures = {
        "load_seconds": seconds,
        "length_penalty": bundle.power_penalty,
        "tokenizer_sources_different": different(runner.encode(parity.texts, parity.longest), parity.sources),
        "tokenizer_answers_different": different(runner.decode(tokens), expected),
        "largest_logit_difference": parity.logits_difference(runner.logits),
        **parity.greedy_against(runner.greedy(parity.sources)),
        **_report(parity, runner.beam),
    }
    return {"float32": _with_bounds(parity, figures)}


def _runner(bundle: Bundle, search: Any, name: str) -> SearchRunner:
    return SearchRunner(search, bundle.model.tokenizer, bundle.model.decoding, name)


def _ctranslate2_runner(bundle: Bundle, name: str, compute_type: str) -> CTranslate2Runner:
    return CTranslate2Runner(
        bundle.folder / name,
        compute_type,
        bundle.model.tokenizer,
        bundle.model.decoding,
        bundle.power_penalty,
        bundle.max_positions,
    )


def _compare_search(bundle: Bundle, search: Any, parity: Parity, name: str) -> Figures:
    """Compare a search that must give the checkpoint's translations."""
    runner = _runner(bundle, search, name)
    beam, figures = parity.measure(runner.beam)
    figures = {**parity.against(beam), **parity.greedy_against(runner.greedy(parity.sources)), **figures}
    return _with_bounds(parity, figures)


def _report(parity: Parity, beam: Callable[..., Any]) -> Figures:
    """Compare a search that may give other translations."""
    found, figures = parity.measure(beam)
    difference = {"bleu_difference": round(figures["bleu"] - parity.bleu, 4)} if parity.bleu is not None else {}
    return {"share_equal": parity.share_equal(found), **difference, **figures}


def _with_bounds(parity: Parity, figures: Figures) -> Figures:
    """Add the bounds that do not hold."""
    return {"broken": parity.broken(figures), **figures}


class Format(NamedTuple):
    """How a format is written, and how it is compared with the checkpoint."""

    write: Callable[[Bundle], None]
    compare: Callable[[Bundle, Parity], Figures]


FORMATS = {
    torchscript.NAME: Format(_torchscript, _compare_torchscript),
    torchscript.INT8_NAME: Format(_torchscript_int8, _compare_torchscript_int8),
    exported_program.NAME: Format(_pt2, _compare_pt2),
    onnx_model.NAME: Format(_onnx, _compare_onnx),
    "ctranslate2": Format(_ctranslate2, _compare_ctranslate2),
    "ctranslate2-int8": Format(_ctranslate2_int8, _compare_ctranslate2_int8),
    cpp_program.NAME: Format(_cpp, _compare_cpp),
    "huggingface": Format(_huggingface, _compare_huggingface),
}


def compare_formats(bundle: Bundle, names: list[str], parity: Parity) -> dict[str, Figures]:
    """Return the size and the figures of each format."""
    figures: dict[str, Figures] = {}
    for name in names:
        print(f"comparing {name}", file=sys.stderr)
        figures[name] = {"size_bytes": size(bundle.folder / name), **FORMATS[name].compare(bundle, parity)}
    return figures


def broken_bounds(figures: dict[str, Figures]) -> list[str]:
    """Return messages about the bounds that do not hold, with format and precision."""
    return [
        f"{name} ({precision}): {message}"
        for name, precisions in figures.items()
        for precision, one in precisions.items()
        if isinstance(one, dict)
        for message in one.get("broken", [])
    ]
