"""The model card of a `huggingface/` folder, from what `card.json` says."""

import json
from typing import Any

from pipeline.export.readme import HUGGINGFACE_PROGRAM, example_sentence
from pipeline.inference.prefixes import Prefixes

_HEADER = """---
library_name: transformers
pipeline_tag: translation
language: [{source_language}, {target_language}]
---

# {name}: {source_language} to {target_language}

A Transformer as in *Attention Is All You Need*, in the format of Transformers' Marian models.

"""

_USE = f"""## Use

{HUGGINGFACE_PROGRAM}
It needs `transformers`, `sentencepiece` and `torch`. With Transformers before version 5,
`pipeline("translation", model="huggingface")` does the same.

`generation_config.json` has the beam size, the length penalty and the symbols that are never chosen. Probabilities are
those of the checkpoint. The search is not quite: Transformers divides log-probabilities by length ** alpha, the
checkpoint by ((5 + length) / 6) ** alpha, and `length_penalty` is the alpha that comes nearest for translations of
usual length. The checkpoint gives a translation at most EXTRA tokens more than its source has; Transformers' limit is a
number, which the program sets for its batch.

"""


def model_card(card: dict[str, Any]) -> str:
    """Return the text of README.md, with the data, scores, signatures and licences of `card.json`."""
    corpus = card["recipe"]["corpus"]
    sections = [_HEADER.format(**{**card, "name": card["name"] or "model"})]
    example = json.dumps(example_sentence(card["recipe"]), ensure_ascii=False)
    sections.append(_USE.replace('"A sentence."', example).replace("EXTRA", str(card["max_extra_tokens"])))
    prefixes = Prefixes.of_corpus(corpus)
    if prefixes.trained:
        begins = "begins" if prefixes.always else "may begin"
        known = ", ".join(f"`{prefix}`" for prefix in prefixes.trained)
        sections.append(f"A source sentence {begins} with a prefix: {known}.\n\n")
    sections.append(_scores(card["scores"]))
    sections.append(_data(card))
    return "".join(sections).rstrip("\n") + "\n"


def _scores(scores: dict[str, Any]) -> str:
    if "bleu" not in scores:
        return "## Scores\n\nNot measured: the text that the export was compared on had no references.\n\n"
    return (
        f"## Scores\n\n| text | sentences | BLEU | signature |\n| --- | --- | --- | --- |\n"
        f"| {scores['text']} | {scores['sentences']} | {scores['bleu']:.2f} | `{scores['bleu_signature']}` |\n\n"
        "By the checkpoint's own search.\n\n"
    )


def _data(card: dict[str, Any]) -> str:
    licences, data = card["data_licences"], card["data"]
    lines = ["## Training data", ""]
    if isinstance(data, str):
        lines.append(f"- {data}")
    else:
        lines.append(f"- pairs: {data['train_pairs']:,} for training, {data['validation_pairs']:,} for validation")
        lines += [f"- {one['file']}, SHA-256 {one['sha256']}" for one in data["source_files"]]
        lines += [f"- {name}, revision {revision}" for name, revision in data["hub_revisions"].items()]
    lines.append(f"- licence: {licences if isinstance(licences, str) else '; '.join(licences)}")
    trained = card["code"]["trained"]
    if isinstance(trained, dict):
        lines += ["", "Trained with " + ", ".join(f"{name} {version}" for name, version in trained.items()) + "."]
    return "\n".join(lines) + "\n"
