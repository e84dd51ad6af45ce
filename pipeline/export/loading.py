"""Load a bundle for translation, with this project's code around its TorchScript file."""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer
from model.settings import DecodingSettings
from pipeline.export import torchscript
from pipeline.export.card import START_OVER, read_card
from pipeline.inference.prefixes import Prefixes
from pipeline.inference.search_options import SearchOptions
from pipeline.inference.translator import LONGEST, Translator


def bundle_of(path: Path) -> Path | None:
    """Return the folder of the bundle that a path names, the folder itself or its `model.ts`; None if it is none."""
    folder = path.parent if path.name == torchscript.NAME else path
    return folder if (folder / "card.json").is_file() else None


def load_bundle(folder: Path, options: SearchOptions) -> Translator:
    """Load `model.ts` of a bundle for translation, on the GPU if there is one. That file is a program.

    Args:
        folder: the bundle.
        options: search settings in place of the recipe's.

    Raises:
        InputError: a file is missing, damaged or of another format, or a setting is out of bounds.
    """
    path = folder / torchscript.NAME
    if not path.is_file():
        raise InputError(f"{folder}: has no {path.name}, which translates; export it again with --format torchscript")
    card = _read_card(folder / "card.json")
    settings = options.in_place_of(card.decoding)
    print(f"translating with {path}", file=sys.stderr)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        search = torchscript.load_torchscript(path, device)
    except RuntimeError:
        raise InputError(f"{path}: is damaged or not a TorchScript file; export it again") from None
    tokenizer = Tokenizer.load(folder / "tokenizer.model")
    # The first call packs weights, which threads must not do at the same time.
    search.greedy(torch.tensor([[tokenizer.eos_id]], device=device), None, 0)
    translator = Translator(
        search,
        tokenizer,
        settings,
        max_source_tokens=LONGEST,
        device=device,
        name=str(path),
        target_language=card.target_language,
    )
    translator.bleu_tokenizer = card.bleu_tokenizer
    translator.recipe, translator.prefixes = card.recipe, card.prefixes
    return translator


class _Card(NamedTuple):
    """What `card.json` says of the model."""

    recipe: dict[str, Any]
    decoding: DecodingSettings
    target_language: str
    bleu_tokenizer: str | None
    prefixes: Prefixes


def _read_card(path: Path) -> _Card:
    """Read a bundle's card; raise InputError if it is none."""
    card = read_card(path)
    try:
        recipe: dict[str, Any] = card["recipe"]
        if not all(isinstance(recipe[section], dict) for section in ("run", "corpus")):
            raise TypeError
        return _Card(
            recipe,
            DecodingSettings(**recipe["decoding"]),
            str(card["target_language"]),
            recipe["run"]["bleu_tokenizer"],
            Prefixes.of_corpus(recipe["corpus"]),
        )
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path}: is no card of a bundle; {START_OVER}") from None
