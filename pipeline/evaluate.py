"""Source and reference text -> sacreBLEU and chrF, with signatures and 95 % bootstrap intervals.

Texts are plain and detokenised, one sentence a line. The last line is JSON.
"""

import argparse
import json
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("checkpoint", type=Path, help="a .ckpt file or a run folder")
    parser.add_argument("--source", type=Path, required=True, help="sentences to translate (plain or .gz)")
    parser.add_argument("--reference", type=Path, required=True, help="what a person said (plain or .gz)")
    parser.add_argument("--beam", type=int, help="open hypotheses; 1 is greedy; the recipe's unless given")
    parser.add_argument("--length-penalty", type=float, help="alpha; the recipe's unless given")
    parser.add_argument("--output", type=Path, help="write the translations here")


def run(arguments: argparse.Namespace) -> int:
    """Translate, score, print."""
    from data_module.errors import InputError
    from pipeline.translate import read_sentences
    from pipeline.translator import load_translator

    sources, references = read_sentences(arguments.source), read_sentences(arguments.reference)
    if len(sources) != len(references):
        shorter = arguments.source if len(sources) < len(references) else arguments.reference
        raise InputError(
            f"{arguments.source} has {len(sources)} lines and {arguments.reference} {len(references)}; "
            f"{shorter} is shorter: give texts whose lines pair up"
        )
    if not sources:
        raise InputError(f"{arguments.source}: is empty; there is nothing to score")
    if arguments.output and not arguments.output.parent.is_dir():
        raise InputError(f"{arguments.output}: its folder is not there; make it or give another --output")
    translator = load_translator(arguments.checkpoint, arguments.beam, arguments.length_penalty)
    hypotheses = [translation.text for translation in translator.translate(sources, progress=True)]
    if arguments.output:
        arguments.output.write_text("".join(line + "\n" for line in hypotheses), encoding="utf-8")
    scores = score(hypotheses, references)
    for name in ("bleu", "bleu_lowercase", "chrf"):
        low, high = scores[name + "_interval"]
        print(f"{name:15} {scores[name]:6.2f}  [{low:.2f}, {high:.2f}]  {scores[name + '_signature']}")
    settings = {
        "beam_size": translator.settings.beam_size,
        "length_penalty": translator.settings.length_penalty,
    }
    print(json.dumps({**scores, **settings, "sentences": len(sources), "checkpoint": translator.name}))
    return 0


def score(hypotheses: list[str], references: list[str]) -> dict[str, Any]:
    """Corpus scores with signatures and the bounds of their 95 % bootstrap intervals."""
    from sacrebleu.metrics import BLEU, CHRF

    scores: dict[str, Any] = {}
    for name, metric in (("bleu", BLEU()), ("bleu_lowercase", BLEU(lowercase=True)), ("chrf", CHRF())):
        result: Any = metric.corpus_score(hypotheses, [references], n_bootstrap=1000)
        # sacreBLEU gives the bootstrap's mean and half the width of its 95 % interval.
        scores[name] = round(result.score, 4)
        scores[name + "_interval"] = [round(float(result._mean + sign * result._ci), 4) for sign in (-1, 1)]
        scores[name + "_signature"] = str(metric.get_signature())
    return scores
