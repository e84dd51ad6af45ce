"""Load a bundle for translation, with this project's code around its TorchScript file."""

import sys
from pathlib import Path
from typing import Any

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
    recipe, decoding, target_language = _card(folder / "card.json")
    settings = options.in_place_of(decoding)
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
        target_language=target_language,
    )
    translator.bleu_tokenizer = recipe["run"]["bleu_tokenizer"]
    translator.recipe, translator.prefixes = recipe, Prefixes.of_corpus(recipe["corpus"])
    return translator


def _card(path: Path) -> tuple[dict[str, Any], DecodingSettings, str]:
    """Return a card's recipe, search settings and target language; raise InputError if it is no card."""
    card = read_card(path)
    try:
        recipe: dict[str, Any] = card["recipe"]
        if not all(isinstance(recipe[section], dict) for section in ("run", "corpus")):
            raise TypeError
        return recipe, DecodingSettings(**recipe["decoding"]), str(card["target_language"])
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path}: is no card of a bundle; {START_OVER}") from None
