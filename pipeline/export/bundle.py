"""Bundles: folders with a model in several formats, a card, a parity report and a README. Written and loaded here."""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_module.errors import InputError

if TYPE_CHECKING:
    from model.settings import DecodingSettings
    from pipeline.checkpointing.checkpoint import TrainedModel
    from pipeline.export.parity import Parity, Text
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
    """Raise InputError if the folder holds something else, or a bundle and not `force`."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        is_bundle = (folder / "card.json").is_file() and any((folder / name).exists() for name in FILES.values())
        if not is_bundle:
            raise InputError(f"{folder}: is not empty and not a bundle; give another folder")
        if not force:
            raise InputError(f"{folder}: holds a bundle already; use --force to replace it")


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `folder` at the end; if the block raises, `folder` stays as it is.

    Raises:
        InputError: the folder cannot be created.
    """
    from data_module.files import replace_folder

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary_folder = tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror}); give another folder") from error
    with temporary_folder as name:
        new, old = Path(name) / "new", Path(name) / "old"
        new.mkdir()
        yield new
        replace_folder(new, folder, old)  # `old` is removed together with the temporary folder


def bundle_files(formats: list[str] | None, quantize: str | None) -> list[str]:
    """Return the files and folders to write.

    Args:
        formats: keys of `FILES`; None for all but those of `ON_REQUEST`.
        quantize: "int8" to add `ctranslate2-int8`.

    Raises:
        InputError: CTranslate2, the only format with an int8 version, is not among the formats.
    """

    names = [name for key, name in FILES.items() if key in (formats or FILES.keys() - ON_REQUEST)]
    if not quantize:
        return names
    if "ctranslate2" not in names:
        raise InputError(f"--quantize {quantize}: is for ctranslate2; add --format ctranslate2")
    return [*names, f"ctranslate2-{quantize}"]


def obstacles(model: "TrainedModel", names: list[str]) -> dict[str, str]:
    """Return the formats among `names` that the model cannot be exported to, and why.

    Those are formats of programs that are not installed or do not support its network or tokenizer.
    """
    from pipeline.export.ctranslate2_model import require_shape
    from pipeline.export.huggingface_model import require_marian

    checks = {
        "ctranslate2": lambda: require_shape(model.network),
        "huggingface": lambda: require_marian(model.network, model.tokenizer),
    }
    reasons = {}
    for name in names:
        try:
            checks.get(name, lambda: None)()
        except InputError as error:
            reasons[name] = str(error)
    return reasons


def parity_text(model: "TrainedModel", source: Path | None, reference: Path | None) -> "Text":
    """Return the given text, or some sentences of the corpus's validation text.

    Raises:
        InputError: the text cannot be read, is empty, or is missing.
    """
    from pipeline.export.parity import Text
    from pipeline.inference.bleu_tokenizer import DEFAULT, tokenizer_of
    from pipeline.inference.text_io import paired_texts, read_sentences

    if source is not None:
        if reference is not None:
            sources, references = paired_texts(source, reference)
        else:
            sources, references = read_sentences(source), None
        if not any(map(len, model.tokenizer.encode(sources))):  # U+2581 and the like are no pieces
            raise InputError(f"{source}: has no sentences; give a text to compare formats on")
        return Text(source.name, sources, references, tokenizer_of(model.recipe) if references else DEFAULT)
    folder = Path(model.recipe["corpus"]["folder"])
    source, reference = folder / "validation.source.txt", folder / "validation.target.txt"
    if not (source.is_file() and reference.is_file()):
        raise InputError(
            f"{source}: is missing, and formats are compared on real sentences; give --parity-source FILE and "
            "--parity-reference FILE"
        )
    sources, references = paired_texts(source, reference)
    stride = max(1, len(sources) // PARITY_SENTENCES)
    sources, references = (lines[::stride][:PARITY_SENTENCES] for lines in (sources, references))
    return Text("validation text", sources, references, tokenizer_of(model.recipe))


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
    from model.fast.packed_linear import can_pack
    from pipeline.export.card import example_sentence, make_card, readme
    from pipeline.export.ctranslate2_model import NUM_POSITIONS
    from pipeline.export.formats import FORMATS, Bundle
    from pipeline.export.parity import Parity, broken_bounds, compare_formats

    max_positions = model.network.positions.max_positions
    print(f"comparing on {len(text.sources)} sentences ({text.name})", file=sys.stderr)
    parity = Parity(model, text)
    scores: dict[str, Any] = {"text": text.name, "sentences": len(parity.sources)}
    scores |= {name: value for name, value in parity.figures.items() if name.startswith("bleu")}
    card, penalty = make_card(model, scores, licences, max_positions), parity.power_penalty()
    if any(name.startswith("ctranslate2") for name in names):
        card["ctranslate2_length_penalty"] = penalty
    card_text = json.dumps(card, indent=2, ensure_ascii=False) + "\n"
    bundle = Bundle(model, folder, card_text, penalty)
    for name in names:
        print(f"writing {name}", file=sys.stderr)
        FORMATS[name].write(bundle, folder / name)
    (folder / "tokenizer.model").write_bytes(model.tokenizer.model)
    if model.tokenizer.pair:
        (folder / "source.spm").write_bytes(model.tokenizer.pair[0])
    (folder / "card.json").write_text(card_text, encoding="utf-8")
    figures = compare_formats(bundle, names, parity)
    if failures := broken_bounds(figures):
        raise InputError(
            f"{model.path}: formats differ from the checkpoint: {'; '.join(failures)}; nothing was written; leave "
            "such a format out with --format"
        )
    _write_report(folder / "parity.json", text.name, parity, figures)
    example = [*model.tokenizer.encode([example_sentence(model.recipe)])[0].tolist(), model.tokenizer.eos_id]
    options = max_positions or NUM_POSITIONS, can_pack(model.network), model.tokenizer.pair is not None
    readme_text = readme(names, card, example, *options)
    (folder / "README.md").write_text(readme_text, encoding="utf-8")


def _write_report(path: Path, text_name: str, parity: "Parity", figures: dict[str, Any]) -> None:
    """Write what each format produced beside the checkpoint."""
    import torch

    report = {
        "text": text_name,
        "sentences": len(parity.sources),
        "threads": torch.get_num_threads(),
        "bounds": parity.bounds,
        "checkpoint": parity.figures,
        **figures,
    }
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def bundle_of(path: Path) -> Path | None:
    """Return the folder of the bundle that a path names, the folder itself or its `model.ts`; None if it is none."""
    folder = path.parent if path.name == FILES["torchscript"] else path
    return folder if (folder / "card.json").is_file() else None


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
    recipe, decoding = _settings_of(folder / "card.json")
    settings = options.in_place_of(decoding)
    print(f"using {path}", file=sys.stderr)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        search = load_torchscript(path, device)
    except RuntimeError:
        raise InputError(f"{path}: is damaged or not a TorchScript file; export it again") from None
    tokenizer = Tokenizer.load(folder / "tokenizer.model")
    # The first call packs weights, which threads must not do at the same time.
    search.greedy(torch.tensor([[tokenizer.eos_id]], device=device), None, 0)
    return Translator(
        search, tokenizer, settings, max_source_tokens=LONGEST, device=device, name=str(path), recipe=recipe
    )


def _settings_of(path: Path) -> tuple[dict[str, Any], "DecodingSettings"]:
    """Return the recipe in a bundle's card and its settings of the search; raise InputError if it is no card."""
    from model.settings import DecodingSettings
    from pipeline.export.card import START_OVER, read_card
    from pipeline.inference.options import Prefixes

    card = read_card(path)
    try:
        recipe: dict[str, Any] = card["recipe"]
        Prefixes.of_corpus(recipe["corpus"])
        recipe["run"]["bleu_tokenizer"]  # `evaluate` reads it later
        return recipe, DecodingSettings(**recipe["decoding"])
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path}: is no card of a bundle; {START_OVER}") from None
