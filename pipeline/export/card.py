"""A bundle's descriptions of itself: `card.json`, the README, and the model card of its `huggingface/` folder.

The pages are made from the files in `templates/`. A line `<!-- name -->` of a template begins a block, which ends at
the next such line. A page consists of the blocks that it needs, with values in place of `$name`, as in
`string.Template`.
"""

import json
import re
from contextlib import suppress
from pathlib import Path
from string import Template

from data_module.corpus.manifest import read_manifest
from data_module.errors import InputError
from data_module.system.files import FORMAT_VERSION, PlainValues, read_json
from pipeline.checkpointing.checkpoint import TrainedModel
from pipeline.export.ctranslate2_model import NUM_POSITIONS
from pipeline.inference.options import Prefixes
from pipeline.inference.translator import LONGEST
from pipeline.runtime.launch import versions

_LINE = 80
"""Characters of an example that fit into a line."""
TEMPLATES = Path(__file__).with_name("templates")


def make_card(
    model: TrainedModel, scores: PlainValues, licences: list[str], n_best: int, sentences: list[str]
) -> PlainValues:
    """Return the card as JSON values.

    `scores` are the score of the metric of `run.best_by`, its signature and the name of the text; `n_best` is the
    number of answers to a sentence that `model.pt2` returns; two of `sentences` are the README's examples.
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
        "model_type": tokenizer.model_type,
        "vocabulary_size": tokenizer.vocabulary_size,
        "tokenizer_sha256": tokenizer.sha256,
        "pad_id": tokenizer.pad_id,
        "unk_id": tokenizer.unk_id,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "text_form": tokenizer.form,
        "max_source_tokens": model.network.positions.max_positions or None,
        "beam_size": decoding.beam_size,
        "length_penalty": decoding.length_penalty,
        "max_extra_tokens": decoding.max_extra_tokens,
        "stop_rule": decoding.stop_rule,
        "n_best": n_best,
        "scores": scores,
        "examples": _examples(sentences),
        "data": _data(Path(corpus["folder"]), tokenizer.sha256),
        "data_licences": licences or "not given",
        "code": {"trained": _trained_with(model.path), "exported": _code_of(versions())},
        "recipe": model.recipe,
    }


def _data(corpus: Path, tokenizer_sha256: str) -> PlainValues | str:
    """Return the manifest's entries about the texts, if the corpus that the model was trained on is available."""
    try:
        manifest = read_manifest(corpus)
    except InputError:
        return "the corpus was not available"
    if manifest["tokenizer"]["sha256"] != tokenizer_sha256:
        return "the corpus in its place is another one"
    pairs = {f"{split}_pairs": manifest[split]["pairs_kept"] for split in ("train", "validation")}
    return {**pairs, "source_files": manifest["source_files"], "hub_revisions": manifest["hub_revisions"]}


def _trained_with(checkpoint: Path) -> PlainValues | str:
    """Return the versions that `fit` recorded in the run folder."""
    for folder in (checkpoint.parent, checkpoint.parent.parent):
        with suppress(OSError):  # The checkpoint may be in no run folder.
            if recorded := read_json(folder / "versions.json"):
                return _code_of(recorded)
    return "the run folder was not available"


def _code_of(recorded: PlainValues) -> PlainValues:
    return {name: value for name, value in recorded.items() if name not in ("host", "format_version")}


def _examples(sentences: list[str]) -> list[str]:
    """Return two sentences that fit into a line of a page, or else the shortest one."""
    short = [one for one in dict.fromkeys(sentences) if len(one) <= _LINE and "```" not in one]
    return short[:2] or [min(sentences, key=len)]


def readme(names: list[str], card: PlainValues, example: list[int], two_models: bool = False) -> str:
    """Return the README, with a section for each format in `names`.

    `example` are the ids of the first of the card's examples, with the end symbol. With `two_models`, `source.spm`
    encodes and `tokenizer.model` only decodes.
    """
    values = _values(card)
    sentence, load_pieces = values["sentence"], ""
    ids, pieces = f"tokenizer.encode({sentence})", f"tokenizer.encode({sentence}, out_type=str)"
    if two_models:
        load_pieces = '\npieces = sentencepiece.SentencePieceProcessor(model_file="source.spm").encode_as_pieces'
        ids, pieces = f"tokenizer.piece_to_id(pieces({sentence}))", f"pieces({sentence})"
    values |= {
        "load_pieces": load_pieces,
        "ids": ids,
        "pieces": pieces,
        "example": ", ".join(map(str, example)),
        "length_penalty": repr(float(card["length_penalty"])),
        "ctranslate2_positions": card["max_source_tokens"] or NUM_POSITIONS,
        "stops_at_first": int(card["stop_rule"] == "first"),
        "num_positions": card["max_source_tokens"] or LONGEST + card["max_extra_tokens"],
    }
    blocks = {"page", *names, *(f"{name} program" for name in names)}
    # Of two models, the type is that of `source.spm`; a card of an earlier version has none.
    wanted = {"prefixes": values["prefixes"], "two models": two_models, f"{card.get('model_type')} pieces": True}
    return _page("readme.md", blocks.union(name for name, is_wanted in wanted.items() if is_wanted), values)


def model_card(card: PlainValues) -> str:
    """Return the model card, with the scores, data, licences and versions of `card.json`."""
    values, scores = _values(card), card["scores"]
    about = {"data": card["data"], "licences": card["data_licences"], "code": card["code"]}
    values |= {
        "name": card["name"] or "model",
        "program": _page("readme.md", {"huggingface program"}, values),
        "about": json.dumps(about, indent=2, ensure_ascii=False),
    }
    blocks = {"page", "no scores"}
    from pipeline.metrics.metrics import title  # imports sacreBLEU

    if name := next((name for name in scores if f"{name}_signature" in scores), None):
        blocks = {"page", "scores"}
        values |= {
            **scores,
            "metric": title(name),
            "score": f"{scores[name]:.2f}",
            "signature": scores[f"{name}_signature"],
        }
    return _page("model_card.md", blocks | ({"prefixes"} if values["prefixes"] else set()), values)


def _values(card: PlainValues) -> PlainValues:
    """Return the card's entries, the example sentence as a literal of Python and C++, and text about prefixes."""
    prefixes = Prefixes.of_corpus(card["recipe"]["corpus"])
    return {
        **card,
        "sentence": json.dumps(card["examples"][0], ensure_ascii=False),
        "examples": "\n".join(card["examples"]),
        "prefixes": ", ".join(f"`{prefix}`" for prefix in prefixes.trained),
        "begins": "begins" if prefixes.always else "may begin",
    }


def _page(template: str, blocks: set[str], values: PlainValues) -> str:
    """Return the given blocks of a template with values in them."""
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    _, *parts = re.split(r"^<!-- (.+) -->\n", text, flags=re.MULTILINE)
    kept = [part for name, part in zip(parts[::2], parts[1::2], strict=True) if name in blocks]
    return Template("".join(kept)).substitute(values)
