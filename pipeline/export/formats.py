"""The formats of a bundle: how each is written, loaded and compared with the checkpoint."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data_module.tokenization.tokenizer import Tokenizer
from model.fast.compiled_search import CompiledSearch
from model.packing import can_pack
from model.settings import DecodingSettings
from model.transformer import Transformer
from pipeline.export import cpp_program, exported_program, onnx_model, torchscript
from pipeline.export.card import model_card
from pipeline.export.ctranslate2_model import write_ctranslate2
from pipeline.export.huggingface_model import write_huggingface
from pipeline.export.parity import Figures, Parity, size, timed
from pipeline.export.runners import CTranslate2Runner, HuggingFaceRunner, ProgramRunner, Runner, SearchRunner


class Bundle(NamedTuple):
    """A bundle that is being written."""

    network: Transformer
    tokenizer: Tokenizer
    settings: DecodingSettings
    folder: Path
    card: str
    """Text of `card.json`, which some formats hold as well."""
    power_penalty: float
    """Length penalty for the beam search of CTranslate2 and Transformers."""
    max_positions: int
    """Upper bound on the tokens of a source; 0 for none."""


Loaders = dict[str, Callable[[], Runner]]
"""Functions that load a format, by the precision that it computes in."""


class Format(NamedTuple):
    """How a format is written to a path and loaded from it."""

    write: Callable[[Bundle, Path], None]
    load: Callable[[Bundle, Path], Loaders]


def _torchscript(bundle: Bundle, path: Path) -> Loaders:
    def load(packed: bool) -> Any:
        return torchscript.load_torchscript(path, packed=packed)

    loaders: Loaders = {"float32": lambda: _runner(bundle, load(packed=False), path.name)}
    if can_pack(bundle.network):
        loaders["float32, packed"] = lambda: _runner(bundle, load(packed=True), f"{path.name}, packed weights")
    loaders["bfloat16"] = lambda: _runner(bundle, load(packed=False).to(torch.bfloat16), f"{path.name} in bfloat16")
    return loaders


def _torchscript_int8(bundle: Bundle, path: Path) -> Loaders:
    return {"int8": lambda: _runner(bundle, torchscript.load_torchscript(path), path.name)}


def _cpp(bundle: Bundle, path: Path) -> Loaders:
    library, tokenizer = cpp_program.compile_cpp(path), bundle.tokenizer
    ids = tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id
    weights = path / cpp_program.WEIGHTS
    return {"float32": lambda: _runner(bundle, CompiledSearch(library, weights, *ids), path.name)}


def _runner(bundle: Bundle, search: Any, name: str) -> Runner:
    return SearchRunner(search, bundle.tokenizer, bundle.settings, name)


def _programs(load: Callable[[Path], dict[str, Callable[..., Any]]]) -> Callable[[Bundle, Path], Loaders]:
    def loaders(bundle: Bundle, path: Path) -> Loaders:
        options = bundle.tokenizer, bundle.settings, bundle.max_positions, path.name
        return {"float32": lambda: ProgramRunner(load(path), *options)}

    return loaders


def _ctranslate2(precision: str) -> Callable[[Bundle, Path], Loaders]:
    def loaders(bundle: Bundle, path: Path) -> Loaders:
        options = bundle.tokenizer, bundle.settings, bundle.power_penalty, bundle.max_positions
        return {precision: lambda: CTranslate2Runner(path, precision, *options)}

    return loaders


def _huggingface(bundle: Bundle, path: Path) -> Loaders:
    return {"float32": lambda: HuggingFaceRunner(path, bundle.tokenizer, bundle.settings)}


def _write_cpp(bundle: Bundle, path: Path) -> None:
    num_positions = cpp_program.num_positions(bundle.max_positions, bundle.settings.max_extra_tokens)
    cpp_program.write_cpp(bundle.network, num_positions, path)


def _write_huggingface(bundle: Bundle, path: Path) -> None:
    card = json.loads(bundle.card)
    languages = card["source_language"], card["target_language"]
    write_huggingface(bundle.network, bundle.tokenizer, bundle.settings, bundle.power_penalty, languages, path)
    (path / "README.md").write_text(model_card(card), encoding="utf-8")


FORMATS = {
    torchscript.NAME: Format(
        lambda bundle, path: torchscript.write_torchscript(bundle.network, bundle.tokenizer, bundle.card, path),
        _torchscript,
    ),
    torchscript.INT8_NAME: Format(
        lambda bundle, path: torchscript.write_int8(bundle.network, bundle.tokenizer, bundle.card, path),
        _torchscript_int8,
    ),
    exported_program.NAME: Format(
        lambda bundle, path: exported_program.write_exported_program(bundle.network, bundle.card, path),
        _programs(exported_program.load_exported_program),
    ),
    onnx_model.NAME: Format(
        lambda bundle, path: onnx_model.write_onnx(bundle.network, path), _programs(onnx_model.load_onnx)
    ),
    "ctranslate2": Format(
        lambda bundle, path: write_ctranslate2(bundle.network, bundle.tokenizer, path), _ctranslate2("float32")
    ),
    "ctranslate2-int8": Format(
        lambda bundle, path: write_ctranslate2(bundle.network, bundle.tokenizer, path, "int8"), _ctranslate2("int8")
    ),
    cpp_program.NAME: Format(_write_cpp, _cpp),
    "huggingface": Format(_write_huggingface, _huggingface),
}


def compare_formats(bundle: Bundle, names: list[str], parity: Parity) -> dict[str, Figures]:
    """Return the size of each format and its figures in each precision. Only float32 has bounds."""
    figures: dict[str, Figures] = {}
    for name in names:
        print(f"comparing {name}", file=sys.stderr)
        path = bundle.folder / name
        figures[name] = {"size_bytes": size(path)}
        for precision, load in FORMATS[name].load(bundle, path).items():
            # No file is in bfloat16: fewer sentences are enough.
            text = parity.sample() if precision == "bfloat16" else parity
            seconds, runner = timed(load)
            compared = text.compare(runner, bounded=precision.startswith("float32"))
            figures[name][precision] = {"load_seconds": seconds, "sentences": len(text.sources), **compared}
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
