"""Loads a checkpoint or a bundle for translation."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer
from model.settings import DecodingSettings
from pipeline.config.recipe import Recipe, stored_settings
from pipeline.export.bundle_folder import FILES, bundle_of
from pipeline.export.card import START_OVER, parse_card
from pipeline.export.torchscript import load_torchscript
from pipeline.inference.options import SearchOptions
from pipeline.inference.translator import LONGEST, Translator, load_translator


def load_checkpoint_or_bundle(path: Path, options: SearchOptions, *, searches: bool = True) -> Translator:
    """Load a checkpoint, a run folder's or a bundle's network for translation; see `load_translator`, `load_bundle`."""
    folder = bundle_of(path)
    return load_translator(path, options, searches=searches) if folder is None else load_bundle(folder, options)


def load_bundle(folder: Path, options: SearchOptions) -> Translator:
    """Load `model.ts` of a bundle for translation, on the GPU if there is one. That file is a program.

    Args:
        folder: the bundle.
        options: search settings in place of the recipe's.

    Raises:
        InputError: a file is missing, damaged or of another format, or a setting is out of bounds.
    """
    path = folder / FILES["torchscript"]
    if not path.is_file():
        raise InputError(f"{folder}: has no {path.name}, which translates; export it again with --format torchscript")
    recipe, decoding, tokenizer_sha256 = _settings_of(folder / "card.json")
    settings = options.in_place_of(decoding)
    print(f"using {path}", file=sys.stderr)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        search = load_torchscript(path, device)
    except RuntimeError:
        raise InputError(f"{path}: is damaged or not a TorchScript file; export it again") from None
    tokenizer = None
    with suppress(InputError):  # It is refused below.
        tokenizer = Tokenizer.load(folder / "tokenizer.model")
    if not tokenizer or (tokenizer.sha256, tokenizer.vocabulary_size) != (tokenizer_sha256, search.vocabulary_size):
        raise InputError(
            f"{folder}: tokenizer.model, card.json and {path.name} do not belong together; export it again"
        )
    # The first call compiles, which threads must not do at the same time.
    search.greedy(torch.tensor([[tokenizer.eos_id]], device=device), None, 0)
    return Translator(
        search, tokenizer, settings, max_source_tokens=LONGEST, device=device, name=str(path), recipe=recipe
    )


def _settings_of(path: Path) -> tuple[dict[str, Any], DecodingSettings, str]:
    """Return the recipe in a bundle's card, its settings of the search and the tokenizer's hash.

    Raises InputError if it is no card.
    """
    card = parse_card(path, path.read_bytes())
    try:
        recipe = stored_settings(card.get("recipe"), Recipe, "")
    except ValueError as error:
        raise InputError(f"{path}: is no card of a bundle: {str(error)[:300]}; {START_OVER}") from None
    return recipe.as_dict(), recipe.decoding, str(card.get("tokenizer_sha256"))
