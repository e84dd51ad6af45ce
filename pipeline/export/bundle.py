"""Bundles: folders with a model in several formats, a card, a parity report and a README. Written and loaded here."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_module.errors import InputError

if TYPE_CHECKING:
    from model.settings import DecodingSettings
    from pipeline.checkpointing.checkpoint import TrainedModel
    from pipeline.export.parity import Text
    from pipeline.inference.options import SearchOptions
    from pipeline.inference.translator import Translator

FILES = {
    "torchscript": "model.ts",
    "pt2": "model.pt2",
    "ctranslate2": "ctranslate2",
    "huggingface": "huggingface",
    "onnx": "onnx",
    "cpp": "cpp",
}
"""File or folder of each format."""

ON_REQUEST = {"onnx", "cpp"}
"""Formats that are written only if they are asked for by name."""

PARITY_SENTENCES = 100
"""Sentences of the validation text to compare formats on."""


def check_bundle_folder(folder: Path, force: bool) -> None:
    """Raise InputError if the folder cannot be replaced, or holds something else, or a bundle and not `force`."""
    from data_module.files import replace_error, write_error

    if folder.resolve() == Path.cwd():
        raise InputError(f"{folder}: is the working folder, which cannot be replaced; give another folder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if bundle_of(folder) is None or not any((folder / name).exists() for name in FILES.values()):
            raise InputError(f"{folder}: is not empty and not a bundle; give another folder")
        if not force:
            raise InputError(f"{folder}: holds a bundle already; use --force to replace it")
    if error := replace_error(folder) or (folder.exists() and write_error(folder)):
        raise InputError(f"{folder}: cannot be written ({error}); give another folder")


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `folder` at the end; if the block raises, `folder` stays as it is.

    Raises:
        InputError: the folder cannot be created.
    """
    from data_module.files import naming_full_disk, replace_folder

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary_folder = tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror}); give another folder") from error
    with temporary_folder as name, naming_full_disk(folder):
        new, old = Path(name) / "new", Path(name) / "old"
        new.mkdir()
        yield new
        replace_folder(new, folder, old)  # `old` is removed together with the temporary folder


def bundle_files(model: "TrainedModel", formats: list[str] | None, quantize: str | None) -> list[str]:
    """Return the files and folders to write.

    Args:
        model: the checkpoint.
        formats: keys of `FILES`; None for all but those of `ON_REQUEST`, and but those whose program is not installed
            or does not support the model, with a line about each.
        quantize: "int8" to add `ctranslate2-int8`.

    Raises:
        InputError: a format that is asked for cannot be written.
    """
    from pipeline.export.formats import require_format

    wanted = [name for key, name in FILES.items() if key in (formats or FILES.keys() - ON_REQUEST)]
    if quantize:
        if "ctranslate2" not in wanted:  # the only format with an int8 version
            raise InputError(f"--quantize {quantize}: is for ctranslate2; add --format ctranslate2")
        wanted.append(f"ctranslate2-{quantize}")
    names = []
    for name in wanted:
        try:
            require_format(name, model)
            names.append(name)
        except InputError as error:
            if formats:
                raise
            print(f"without {name}/: {error}", file=sys.stderr)
    return names


def write_bundle(model: "TrainedModel", folder: Path, names: list[str], text: "Text", licences: list[str]) -> None:
    """Write all files into an empty folder.

    Args:
        model: the checkpoint.
        folder: an empty folder.
        names: files and folders to write, from `bundle_files`.
        text: sentences to compare formats on.
        licences: licences of the training data.

    Raises:
        InputError: a format's translations differ from the checkpoint's.
    """
    import torch

    from model.fast.packed_linear import can_pack
    from pipeline.export.card import example_sentence, make_card, readme
    from pipeline.export.formats import Bundle, write_format
    from pipeline.export.parity import Parity, compare_formats

    tokenizer = model.tokenizer
    print(f"comparing on {len(text.sources)} sentences ({text.name})", file=sys.stderr)
    parity = Parity(model, text)
    about = {"text": text.name, "sentences": len(parity.sources)}
    scores = {name: value for name, value in parity.figures.items() if name.startswith(parity.metric)}
    card, penalty = make_card(model, about | scores, licences), parity.power_penalty()
    if any(name.startswith("ctranslate2") for name in names):
        card["ctranslate2_length_penalty"] = penalty
    card_text = json.dumps(card, indent=2, ensure_ascii=False) + "\n"
    bundle = Bundle(model, folder, card_text, penalty)
    for name in names:
        print(f"writing {name}", file=sys.stderr)
        write_format(name, bundle)
    tokenizer.save(folder / "tokenizer.model")
    if tokenizer.pair:
        (folder / "source.spm").write_bytes(tokenizer.pair[0])
    (folder / "card.json").write_text(card_text, encoding="utf-8")
    bounds = {"tie": 2 * parity.tolerance, "score_difference": parity.tolerance}
    report = {**about, "threads": torch.get_num_threads(), "bounds": bounds, "checkpoint": parity.figures}
    report |= compare_formats(bundle, names, parity)
    (folder / "parity.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    example = [*tokenizer.encode([example_sentence(model.recipe)])[0].tolist(), tokenizer.eos_id]
    page = readme(names, card, example, can_pack(model.network), tokenizer.pair is not None)
    (folder / "README.md").write_text(page, encoding="utf-8")


def bundle_of(path: Path) -> Path | None:
    """Return the folder of the bundle that a path names, the folder itself or its `model.ts`; None if it is none.

    A run folder is none, whatever else is in it: `model.ts` is a program, and a run executes nothing.
    """
    folder = path.parent if path.name == FILES["torchscript"] else path
    is_run = any(map(os.path.lexists, (folder / "config.yaml", folder / "checkpoints")))
    return folder if not is_run and (folder / "card.json").is_file() else None


def load_checkpoint_or_bundle(path: Path, options: "SearchOptions", *, searches: bool = True) -> "Translator":
    """Load a checkpoint, a run folder's or a bundle's network for translation; see `load_translator`, `load_bundle`."""
    from pipeline.inference.translator import load_translator

    folder = bundle_of(path)
    return load_translator(path, options, searches=searches) if folder is None else load_bundle(folder, options)


def load_bundle(folder: Path, options: "SearchOptions") -> "Translator":
    """Load `model.ts` of a bundle for translation, on the GPU if there is one. That file is a program.

    Args:
        folder: the bundle.
        options: search settings in place of the recipe's.

    Raises:
        InputError: a file is missing, damaged or of another format, or a setting is out of bounds.
    """
    import torch

    from data_module.tokenization.tokenizer import Tokenizer
    from pipeline.export.torchscript import load_torchscript
    from pipeline.inference.translator import LONGEST, Translator

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
    # The first call packs weights, which threads must not do at the same time.
    search.greedy(torch.tensor([[tokenizer.eos_id]], device=device), None, 0)
    return Translator(
        search, tokenizer, settings, max_source_tokens=LONGEST, device=device, name=str(path), recipe=recipe
    )


def _settings_of(path: Path) -> tuple[dict[str, Any], "DecodingSettings", str]:
    """Return the recipe in a bundle's card, its settings of the search and the tokenizer's hash.

    Raises InputError if it is no card.
    """
    from pipeline.config.recipe import Recipe, stored_settings
    from pipeline.export.card import START_OVER, parse_card

    card = parse_card(path, path.read_bytes())
    try:
        recipe = stored_settings(card.get("recipe"), Recipe, "")
    except ValueError as error:
        raise InputError(f"{path}: is no card of a bundle: {str(error)[:300]}; {START_OVER}") from None
    return recipe.as_dict(), recipe.decoding, str(card.get("tokenizer_sha256"))
