"""Writes a bundle: every format, the card, the parity report and the README, as a whole or not at all."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.checkpointing.checkpoint import TrainedModel
    from pipeline.export.parity import Text

FORMATS = {"torchscript": "model.ts", "pt2": "model.pt2", "ctranslate2": "ctranslate2"}

INT8 = {"model.ts": "model.int8.ts", "ctranslate2": "ctranslate2-int8"}

DEFAULT_SENTENCES = 200


def check_bundle_folder(folder: Path, force: bool) -> None:
    """Raises InputError where something else is, or a bundle that may not be replaced."""
    from data_module.errors import InputError

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        is_bundle = (folder / "card.json").is_file() and any((folder / name).exists() for name in FORMATS.values())
        if not is_bundle:
            raise InputError(f"{folder}: holds something else than a bundle; give another folder")
        if not force:
            raise InputError(f"{folder}: holds a bundle already; use --force to replace it")


def bundle_files(formats: list[str] | None, quantize: str | None) -> list[str]:
    """The files and folders to write."""
    from data_module.errors import InputError

    names = [name for key, name in FORMATS.items() if formats is None or key in formats]
    if quantize and not INT8.keys() & names:
        raise InputError(f"--quantize {quantize}: is for torchscript and ctranslate2; add one of them as --format")
    return [one for name in names for one in (name, *([INT8[name]] if quantize and name in INT8 else []))]


def ctranslate2_obstacle(model: "TrainedModel") -> str | None:
    """Why this model cannot become CTranslate2's, in a line; None if it can."""
    from data_module.errors import InputError
    from pipeline.export.ctranslate2_model import require_shape

    try:
        require_shape(model.network)
    except InputError as reason:
        return str(reason)
    return None


def parity_text(model: "TrainedModel", source: Path | None, reference: Path | None) -> "Text":
    """What is given, else some of the corpus's validation text.

    Raises InputError where it cannot be read, is empty, or is not at hand.
    """
    from data_module.errors import InputError
    from pipeline.export.parity import Text
    from pipeline.inference.text_io import paired_texts, read_sentences

    if source is not None:
        if reference is not None:
            sources, references = paired_texts(source, reference)
        else:
            sources, references = read_sentences(source), None
        if not any(sentence.strip() for sentence in sources):
            raise InputError(f"{source}: has no sentences; give a text to compare formats on")
        return Text(source.name, sources, references)
    folder = Path(model.recipe["corpus"]["folder"])
    source, reference = folder / "validation.source.txt", folder / "validation.target.txt"
    if not (source.is_file() and reference.is_file()):
        raise InputError(
            f"{source}: is not at hand, and formats are compared on real sentences; give --parity-source FILE "
            "and --parity-reference FILE"
        )
    sources, references = paired_texts(source, reference)
    every = max(1, len(sources) // DEFAULT_SENTENCES)
    return Text("validation text", *(lines[::every][:DEFAULT_SENTENCES] for lines in (sources, references)))


def write_bundle(model: "TrainedModel", folder: Path, names: list[str], text: "Text", licences: list[str]) -> None:
    """All files into a folder that is there and empty.

    Raises InputError where a format does not give what the checkpoint gives.
    """
    import torch

    from data_module.errors import InputError
    from model.cpu.packed_linear import can_pack
    from pipeline.export import formats
    from pipeline.export.card import make_card
    from pipeline.export.ctranslate2_model import NUM_POSITIONS
    from pipeline.export.parity import BOUNDS, Parity
    from pipeline.export.readme import readme
    from pipeline.inference.translator import LONGEST

    max_positions = model.network.positions.max_positions
    longest = min(LONGEST, max_positions or LONGEST)
    print(f"comparing on {len(text.sources)} sentences ({text.name})", file=sys.stderr)
    parity = Parity(model.network, model.tokenizer, model.decoding, text, longest)
    scores: dict[str, Any] = {"text": text.name, "sentences": len(parity.sources)}
    scores |= {name: value for name, value in parity.figures.items() if name.startswith("bleu")}
    card = make_card(model, scores, licences, max_positions)
    if any(name.startswith("ctranslate2") for name in names):
        card["ctranslate2_length_penalty"] = parity.ctranslate2_penalty()
    about = json.dumps(card, indent=2, ensure_ascii=False) + "\n"
    penalty = card.get("ctranslate2_length_penalty", 0.0)
    bundle = formats.Bundle(model, folder, about, penalty, max_positions)
    for name in names:
        print(f"writing {name}", file=sys.stderr)
        formats.FORMATS[name].write(bundle)
    (folder / "tokenizer.model").write_bytes(model.tokenizer.model)
    (folder / "card.json").write_text(about, encoding="utf-8")
    figures = formats.compare(bundle, names, parity)
    found = formats.broken(figures)
    if found:
        raise InputError(
            f"{model.path}: formats do not give what the checkpoint gives: {'; '.join(found)}; nothing was written; "
            "leave such a format out with --format"
        )
    report = {
        "text": text.name,
        "sentences": len(parity.sources),
        "threads": torch.get_num_threads(),
        "bounds": BOUNDS,
        "checkpoint": parity.figures,
        **figures,
    }
    (folder / "parity.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    example = [*model.tokenizer.encode(["A sentence."])[0].tolist(), model.tokenizer.eos_id]
    how_to = readme(names, card, example, max_positions or NUM_POSITIONS, can_pack(model.network))
    (folder / "README.md").write_text(how_to, encoding="utf-8")
