"""The formats of a bundle: how each is written, and what is found when it is read again and laid beside the rest."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from model.cpu.packed_linear import can_pack, pack_linears
from pipeline.checkpointing.checkpoint import TrainedModel
from pipeline.export import exported_program, torchscript
from pipeline.export.ctranslate2_model import write_ctranslate2
from pipeline.export.parity import Figures, Parity, clocked, largest, size
from pipeline.export.runners import CTranslate2Runner, ExportedProgramRunner, SearchRunner


class Bundle(NamedTuple):
    """A bundle that is being made."""

    model: TrainedModel
    folder: Path
    card: str
    """What goes into files that can hold it."""
    ctranslate2_penalty: float
    max_positions: int
    """0: no end."""


def _torchscript(bundle: Bundle) -> None:
    path = bundle.folder / torchscript.NAME
    torchscript.write_torchscript(bundle.model.network, bundle.model.tokenizer, bundle.card, path)


def _torchscript_int8(bundle: Bundle) -> None:
    path = bundle.folder / torchscript.INT8_NAME
    torchscript.write_int8(bundle.model.network, bundle.model.tokenizer, bundle.card, path)


def _pt2(bundle: Bundle) -> None:
    exported_program.write_exported_program(bundle.model.network, bundle.card, bundle.folder / exported_program.NAME)


def _ctranslate2(bundle: Bundle) -> None:
    write_ctranslate2(bundle.model.network, bundle.model.tokenizer, bundle.folder / "ctranslate2")


def _ctranslate2_int8(bundle: Bundle) -> None:
    write_ctranslate2(bundle.model.network, bundle.model.tokenizer, bundle.folder / "ctranslate2-int8", "int8")


def _compare_torchscript(bundle: Bundle, parity: Parity) -> Figures:
    path = bundle.folder / torchscript.NAME
    seconds, search = clocked(lambda: torchscript.load_torchscript(path, packed=False))
    figures = {"float32": {"load_seconds": seconds, **_as_searched(bundle, search, parity)}}
    if can_pack(bundle.model.network):
        # The same operations in the same order are compared: packed with packed.
        network = copy.deepcopy(bundle.model.network)
        pack_linears(network)
        eager = parity.with_network(network)
        seconds, search = clocked(lambda: torchscript.load_torchscript(path))
        figures["float32, packed"] = {"load_seconds": seconds, **_as_searched(bundle, search, eager)}
        figures["checkpoint, packed"] = eager.figures
    seconds, search = clocked(lambda: torchscript.load_torchscript(path, packed=False).to(torch.bfloat16))
    figures["bfloat16"] = {"load_seconds": seconds, **_reported(parity, _runner(bundle, search).beam)}
    return figures


def _compare_torchscript_int8(bundle: Bundle, parity: Parity) -> Figures:
    path = bundle.folder / torchscript.INT8_NAME
    seconds, search = clocked(lambda: torchscript.load_torchscript(path))
    return {"int8": {"load_seconds": seconds, **_reported(parity, _runner(bundle, search).beam)}}


def _compare_pt2(bundle: Bundle, parity: Parity) -> Figures:
    path = bundle.folder / exported_program.NAME
    seconds, programs = clocked(lambda: exported_program.load_exported_program(path))
    model = bundle.model
    runner = ExportedProgramRunner(programs, model.tokenizer, model.decoding, bundle.max_positions)
    greedy, figures = parity.timed(lambda sources: [[one] for one in runner.greedy(sources)])
    figures = {
        "load_seconds": seconds,
        "search": "greedy",
        "largest_logit_difference": parity.logits_difference(runner.logits),
        **parity.greedy_against([one for (one,) in greedy]),
        **figures,
    }
    return {"float32": _judged(parity, figures)}


def _compare_ctranslate2(bundle: Bundle, parity: Parity) -> Figures:
    seconds, runner = clocked(lambda: _ctranslate2_runner(bundle, "ctranslate2", "float32"))
    pairs = zip(parity.log_probabilities(), runner.forced(parity.sources, parity.greedy), strict=True)
    figures = {
        "load_seconds": seconds,
        "length_penalty": bundle.ctranslate2_penalty,
        "largest_forced_score_difference": largest(abs(one - other) for one, other in pairs),
        **parity.greedy_against(runner.greedy(parity.sources)),
        **_reported(parity, runner.beam),
    }
    return {"float32": _judged(parity, figures)}


def _compare_ctranslate2_int8(bundle: Bundle, parity: Parity) -> Figures:
    seconds, runner = clocked(lambda: _ctranslate2_runner(bundle, "ctranslate2-int8", "int8"))
    return {"int8": {"load_seconds": seconds, **_reported(parity, runner.beam)}}


def _runner(bundle: Bundle, search: Any) -> SearchRunner:
    return SearchRunner(search, bundle.model.tokenizer, bundle.model.decoding)


def _ctranslate2_runner(bundle: Bundle, name: str, compute_type: str) -> CTranslate2Runner:
    return CTranslate2Runner(
        bundle.folder / name,
        compute_type,
        bundle.model.tokenizer,
        bundle.model.decoding,
        bundle.ctranslate2_penalty,
        bundle.max_positions,
    )


def _as_searched(bundle: Bundle, search: Any, parity: Parity) -> Figures:
    """Of a search that must find what the checkpoint's finds."""
    runner = _runner(bundle, search)
    beam, figures = parity.timed(runner.beam)
    figures = {**parity.against(beam), **parity.greedy_against(runner.greedy(parity.sources)), **figures}
    return _judged(parity, figures)


def _reported(parity: Parity, beam: Callable[..., Any]) -> Figures:
    found, figures = parity.timed(beam)
    difference = {"bleu_difference": round(figures["bleu"] - parity.bleu, 4)} if parity.bleu is not None else {}
    return {"share_equal": parity.share_equal(found), **difference, **figures}


def _judged(parity: Parity, figures: Figures) -> Figures:
    return {"broken": parity.broken(figures), **figures}


class Format(NamedTuple):
    """How to write it, and how to compare it."""

    write: Callable[[Bundle], None]
    compare: Callable[[Bundle, Parity], Figures]


FORMATS = {
    torchscript.NAME: Format(_torchscript, _compare_torchscript),
    torchscript.INT8_NAME: Format(_torchscript_int8, _compare_torchscript_int8),
    exported_program.NAME: Format(_pt2, _compare_pt2),
    "ctranslate2": Format(_ctranslate2, _compare_ctranslate2),
    "ctranslate2-int8": Format(_ctranslate2_int8, _compare_ctranslate2_int8),
}


def compare(bundle: Bundle, names: list[str], parity: Parity) -> dict[str, Figures]:
    """All formats' figures; a format's size beside them."""
    figures: dict[str, Figures] = {}
    for name in names:
        print(f"comparing {name}", file=sys.stderr)
        figures[name] = {"size_bytes": size(bundle.folder / name), **FORMATS[name].compare(bundle, parity)}
    return figures


def broken(figures: dict[str, Figures]) -> list[str]:
    """The bounds that do not hold, each with its format and precision."""
    return [
        f"{name} ({precision}): {what}"
        for name, precisions in figures.items()
        for precision, one in precisions.items()
        if isinstance(one, dict)
        for what in one.get("broken", [])
    ]
