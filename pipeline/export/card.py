"""`card.json`: how to use an exported model, and what it was trained on and with."""

import json
from pathlib import Path
from typing import Any

from data_module.corpus.manifest import read_manifest
from data_module.errors import InputError
from data_module.file_format import FORMAT_VERSION, check_format
from pipeline.checkpointing.checkpoint import TrainedModel
from pipeline.inference.prefixes import Prefixes
from pipeline.runtime.launch import versions

START_OVER = "export it again"
"""What to do with a bundle that this version cannot read."""


def make_card(model: TrainedModel, scores: dict[str, Any], licences: list[str], max_positions: int) -> dict[str, Any]:
    """Return the card as JSON values.

    Args:
        model: the checkpoint.
        scores: BLEU, its signature and the name of the text.
        licences: licences of the training data, as the user gave them.
        max_positions: upper bound on the tokens of a source; 0 for none.
    """
    tokenizer, decoding, corpus = model.tokenizer, model.decoding, model.recipe["corpus"]
    return {
        "format_version": FORMAT_VERSION,
        "name": model.recipe["name"],
        "checkpoint": model.path.name,
        "step": model.step,
        "source_language": corpus["source_language"],
        "target_language": corpus["target_language"],
        "prefixes": list(Prefixes.of_corpus(corpus).trained),
        "vocabulary_size": tokenizer.vocabulary_size,
        "tokenizer_sha256": tokenizer.sha256,
        "pad_id": tokenizer.pad_id,
        "unk_id": tokenizer.unk_id,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "max_source_tokens": max_positions or None,
        "beam_size": decoding.beam_size,
        "length_penalty": decoding.length_penalty,
        "max_extra_tokens": decoding.max_extra_tokens,
        "scores": scores,
        "data": _data(Path(corpus["folder"]), tokenizer.sha256),
        "data_licences": licences or "not given",
        "code": {"trained": _trained_with(model.path), "exported": _code_of(versions())},
        "recipe": model.recipe,
    }


def read_card(path: Path) -> dict[str, Any]:
    """Return the card that a file holds.

    Raises:
        InputError: it is no card, or of another format.
    """
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        card = None
    if not isinstance(card, dict):
        raise InputError(f"{path}: is no card of a bundle; {START_OVER}")
    check_format(path, card.get("format_version"), START_OVER)
    return card


def _data(corpus: Path, tokenizer_sha256: str) -> dict[str, Any] | str:
    """Return the manifest's entries about the texts, if the corpus that the model was trained on is available."""
    try:
        manifest = read_manifest(corpus)
    except InputError:
        return "the corpus was not available"
    if manifest["tokenizer"]["sha256"] != tokenizer_sha256:
        return "the corpus in its place is another one"
    pairs = {f"{split}_pairs": manifest[split]["pairs_kept"] for split in ("train", "validation")}
    return {**pairs, "source_files": manifest["source_files"], "hub_revisions": manifest["hub_revisions"]}


def _trained_with(checkpoint: Path) -> dict[str, Any] | str:
    """Return the versions that `fit` recorded in the run folder."""
    for folder in (checkpoint.parent, checkpoint.parent.parent):
        try:
            recorded = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(recorded, dict):
            return _code_of(recorded)
    return "the run folder was not available"


def _code_of(recorded: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in recorded.items() if name not in ("host", "format_version")}
