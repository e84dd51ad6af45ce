"""Loads a `Translator` from the path of a checkpoint, a run folder or a bundle to a device."""

import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from data_module.errors import InputError
from data_module.settings import CorpusSettings
from data_module.system.files import PlainValues, check_format, json_object, misshapen, read_whole
from data_module.tokenization.text_form import SHAPE
from data_module.tokenization.tokenizer import TOKENIZER_NAME, Tokenizer
from model.settings import DecodingSettings
from pipeline.checkpointing.checkpoint import load_model, resolve_checkpoint
from pipeline.config.recipe import Recipe, stored_settings
from pipeline.inference.bundle_layout import CARD_FILE, PROGRAM_FILE, START_OVER, bundle_of
from pipeline.inference.translator import Translator
from pipeline.runtime.backend_choice import choose_search
from pipeline.runtime.console import report
from pipeline.runtime.memory import limit_onednn_cache


def load_translator(path: Path, *, searches: bool = True) -> Translator:
    """Load the translator that a path stands for, on the GPU if there is one; see `chosen_file` and `load_file`."""
    return load_file(chosen_file(path), searches=searches)


def load_file(file: Path, device: str | None = None, *, searches: bool = True) -> Translator:
    """Load a translator from a checkpoint, or from the `model.ts` of a bundle, which is a program.

    `device` is `cpu`, or a GPU as `cuda:0`; None for the GPU if there is one. With `searches`, the network is optimized
    for searches; on a CPU, it cannot score or align afterwards.

    Raises InputError if the model cannot be read.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if (bundle := bundle_of(file)) is not None:
        search, tokenizer, settings, recipe = _load_bundle(bundle, device)
    else:
        model = load_model(file)
        search, tokenizer, settings, recipe = model.network, model.tokenizer, model.decoding, model.recipe
        if searches:
            search = choose_search(device, search, tokenizer.search_ids)
        else:
            limit_onednn_cache()
    return Translator(search, tokenizer, settings, device=device, name=str(file), recipe=recipe)


def chosen_file(path: Path) -> Path:
    """Return the checkpoint or the `model.ts` of a checkpoint, run folder or bundle, and print it on standard error.

    Raises InputError if the path holds no model.
    """
    bundle = bundle_of(path)
    file = resolve_checkpoint(path) if bundle is None else bundle / PROGRAM_FILE
    if not file.is_file():
        raise InputError(f"{bundle}: has no {file.name}, which translates; {START_OVER} with --format torchscript")
    report(f"using {file}")
    return file


def require_direction(option: str, model: Translator, source: str, target: str) -> None:
    """Raise InputError if a model translates in the opposite direction, from `target` to `source`."""
    corpus = model.recipe["corpus"]
    found = [corpus["source_language"], corpus["target_language"]]
    # Recipes that do not name their languages all have the same two names.
    if found == [target, source] != [CorpusSettings.source_language, CorpusSettings.target_language]:
        raise InputError(
            f"{option} {model.name}: translates from {target} to {source}; give a model that translates from {source}"
            f" to {target}"
        )


def _load_bundle(folder: Path, device: str) -> tuple[Any, Tokenizer, DecodingSettings, PlainValues]:
    """Load a bundle's search, `model.ts`, its tokenizer, the settings of searches and the recipe.

    Raises InputError if a file is missing, damaged or of another format.
    """
    path = folder / PROGRAM_FILE
    recipe, tokenizer_sha256, form = _recipe_of(folder / CARD_FILE)
    try:
        search = load_torchscript(path, device)
    except RuntimeError:
        raise InputError(f"{path}: is damaged or not a TorchScript file; {START_OVER}") from None
    tokenizer = None
    with suppress(InputError):  # It is refused below.
        loaded = Tokenizer.load(folder / TOKENIZER_NAME)
        tokenizer = Tokenizer(loaded.model, seen=loaded.seen, form=form)
    if not tokenizer or (tokenizer.sha256, tokenizer.vocabulary_size) != (tokenizer_sha256, search.vocabulary_size):
        raise InputError(f"{folder}: tokenizer.model, card.json and {path.name} do not belong together; {START_OVER}")
    # The first call compiles, which threads must not do at the same time.
    search.greedy(torch.tensor([[tokenizer.eos_id]], device=device), None, 0)
    return search, tokenizer, recipe.decoding, recipe.as_dict()


def _recipe_of(path: Path) -> tuple[Recipe, str, PlainValues | None]:
    """Return a bundle's recipe, hash of the tokenizer and form of training text; raise InputError if it is no card."""
    card = _parse_card(path, read_whole(path))
    try:
        if (form := card.get("text_form")) is not None and (wrong := misshapen(form, SHAPE, "text_form")):
            raise ValueError(f"{wrong} is missing or wrong")
        return stored_settings(card.get("recipe"), Recipe, ""), str(card.get("tokenizer_sha256")), form
    except ValueError as error:
        raise InputError(f"{path}: is no card of a bundle: {str(error)[:300]}; {START_OVER}") from None


def load_torchscript(path: Path, device: str = "cpu") -> Any:
    """Load the search from a file to a device.

    Raises InputError if the file has no card, or a card of another format.
    """
    extra = {CARD_FILE: ""}
    with warnings.catch_warnings():
        # PyTorch deprecates TorchScript.
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.load(path, map_location=device, _extra_files=extra)
    _parse_card(path, extra[CARD_FILE])
    return model


def _parse_card(path: Path, text: str | bytes) -> PlainValues:
    """Return the card that a file holds.

    Raises InputError if it is no card, or of another format.
    """
    card = json_object(text)
    if card is None:
        raise InputError(f"{path}: is no card of a bundle; {START_OVER}")
    check_format(path, card.get("format_version"), START_OVER)
    return card
