"""Writes bundles: folders with a model in several formats, a card, a parity report and a README."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from data_module.errors import InputError
from data_module.system.text_files import progress_bar
from data_module.tokenization.tokenizer import TOKENIZER_NAME
from pipeline.checkpointing.checkpoint import TrainedModel, load_model, resolve_checkpoint
from pipeline.export.bundle_folder import FILES, ON_REQUEST, PARITY_SENTENCES, replaced_bundle
from pipeline.export.card import make_card, readme
from pipeline.export.formats import FORMATS, Bundle
from pipeline.export.parity import Parity, Text, compare_formats, parity_text
from pipeline.inference.options import BY_RECIPE, SearchOptions
from pipeline.runtime.console import report


def export(
    checkpoint: Path,
    folder: Path,
    formats: list[str] | None,
    quantize: str | None,
    text: tuple[Path | None, Path | None],
    licences: list[str],
    options: SearchOptions = BY_RECIPE,
) -> None:
    """Write a bundle to a folder that `check_bundle_folder` has allowed, when it is complete and all formats agree.

    See `bundle_files` for `formats` and `quantize`. `text` are the files of the sentences to compare formats on and of
    their references, None for the validation text's.
    """
    path = resolve_checkpoint(checkpoint)
    report(f"exporting {path}")
    model = load_model(path)
    model = replace(model, decoding=options.in_place_of(model.decoding))
    names = bundle_files(model, formats, quantize)
    if options.n_best > 1 and "model.pt2" not in names:
        raise InputError(f"--n-best {options.n_best}: is for model.pt2; other formats take it with each search")
    sentences = parity_text(model, *text, PARITY_SENTENCES)
    with replaced_bundle(folder) as new:
        write_bundle(model, new, names, sentences, licences, options.n_best)


def bundle_files(model: TrainedModel, formats: list[str] | None, quantize: str | None) -> list[str]:
    """Return the files and folders to write.

    `formats` are keys of `FILES`; None for all except those of `ON_REQUEST`. Of these, formats whose program is not
    installed or does not support the model are left out, with a line about each. `quantize` is "int8" to add
    `ctranslate2-int8`.

    Raises InputError if a format that is asked for cannot be written.
    """
    wanted = [name for key, name in FILES.items() if key in (formats or FILES.keys() - ON_REQUEST)]
    if quantize:
        if "ctranslate2" not in wanted:  # the only format with an int8 version
            raise InputError(f"--quantize {quantize}: is for ctranslate2; add --format ctranslate2")
        wanted.append(f"ctranslate2-{quantize}")
    names = []
    for name in wanted:
        try:
            FORMATS[name].require(model)
            names.append(name)
        except InputError as error:
            if formats:
                raise
            report(f"without {name}: {error}")
    return names


def write_bundle(
    model: TrainedModel, folder: Path, names: list[str], text: Text, licences: list[str], n_best: int = 1
) -> None:
    """Write the files and folders `names` of `bundle_files`, and descriptions, into an empty folder.

    Raises InputError if a format's translations differ from the checkpoint's.
    """
    tokenizer = model.tokenizer
    report(f"comparing on {len(text.sources)} sentences ({text.name})")
    with progress_bar("searching with the checkpoint", unit=""):
        parity = Parity(model, text)
    about = {"text": text.name, "sentences": len(parity.sources)}
    scores = {name: value for name, value in parity.figures.items() if name.startswith(parity.metric)}
    card, penalty = make_card(model, about | scores, licences, n_best, parity.texts), parity.power_penalty()
    if any(name.startswith("ctranslate2") for name in names):
        card["ctranslate2_length_penalty"] = penalty
    card_text = json.dumps(card, indent=2, ensure_ascii=False) + "\n"
    bundle = Bundle(model, folder, card_text, penalty, n_best)
    for name in names:
        report(f"writing {name}")
        with progress_bar(f"writing {name}", unit=""):
            FORMATS[name].write(bundle, folder / name)
    tokenizer.save(folder / TOKENIZER_NAME)
    if tokenizer.pair:
        (folder / "source.spm").write_bytes(tokenizer.pair[0])
    (folder / "card.json").write_text(card_text, encoding="utf-8")
    bounds = {"tie": 2 * parity.tolerance, "score_difference": parity.tolerance}
    figures = {**about, "threads": torch.get_num_threads(), "bounds": bounds, "checkpoint": parity.figures}
    figures |= compare_formats(bundle, names, parity)
    (folder / "parity.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    example = [*tokenizer.encode(card["examples"][:1])[0].tolist(), tokenizer.eos_id]
    page = readme(names, card, example, tokenizer.pair is not None)
    (folder / "README.md").write_text(page, encoding="utf-8")
