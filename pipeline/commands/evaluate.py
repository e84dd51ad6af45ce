"""Source and reference text -> sacreBLEU and chrF, with signatures and 95 % bootstrap intervals.

Texts are plain and detokenised, one sentence a line. The last line is JSON.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from pipeline.inference.text_io import paired_texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("checkpoint", type=Path, help="a .ckpt file or a run folder")
    parser.add_argument("--source", type=Path, required=True, help="sentences to translate (plain or .gz)")
    parser.add_argument("--reference", type=Path, required=True, help="what a person said (plain or .gz)")
    parser.add_argument("--beam", type=int, help="open hypotheses; 1 is greedy; the recipe's unless given")
    parser.add_argument("--length-penalty", type=float, help="alpha; the recipe's unless given")
    parser.add_argument("--output", type=Path, help="write the translations here")
    parser.add_argument(
        "--paper", action="store_true", help="add BLEU on Moses tokens, as in papers (needs the extra paper-score)"
    )
    parser.add_argument(
        "--versus", type=Path, metavar="OTHER", help="another checkpoint: say whether the difference to it is real"
    )


def run(arguments: argparse.Namespace) -> int:
    """Translate, score, print."""
    from pipeline.inference.metrics import compare, paper_score, reference_warnings, require_sacremoses, score
    from pipeline.inference.translator import load_translator

    sources, references = paired_texts(arguments.source, arguments.reference)
    check_output(arguments.output)
    for complaint in reference_warnings(references):
        print(f"{arguments.reference}: its lines {complaint}", file=sys.stderr)
    if arguments.paper:
        require_sacremoses()
    checkpoints = [arguments.checkpoint, *([arguments.versus] if arguments.versus else [])]
    translators = [load_translator(path, arguments.beam, arguments.length_penalty) for path in checkpoints]
    hypotheses, *others = [
        [translation.text for translation in translator.translate(sources, progress=True)] for translator in translators
    ]
    if arguments.output:
        arguments.output.write_text("".join(line + "\n" for line in hypotheses), encoding="utf-8")
    figures = score(hypotheses, references)
    if arguments.paper:
        figures |= paper_score(hypotheses, references, translators[0].target_language)
    for name in ("bleu", "bleu_lowercase", "chrf", "bleu_paper", "bleu_moses_lowercase"):
        if name in figures:
            low, high = figures[name + "_interval"]
            print(f"{name:20} {figures[name]:6.2f}  [{low:.2f}, {high:.2f}]  {figures[name + '_signature']}")
    print(f"{'exact_match':20} {figures['exact_match']:6.2f}  % of {len(sources):,} sentences")
    if others:
        figures["versus"] = {"checkpoint": translators[1].name, **compare(hypotheses, others[0], references)}
        show_comparison(figures["versus"])
    settings = translators[0].settings
    figures |= {"beam_size": settings.beam_size, "length_penalty": settings.length_penalty}
    print(json.dumps({**figures, "sentences": len(sources), "checkpoint": translators[0].name}))
    return 0


def check_output(output: Path | None) -> None:
    """Raises InputError where the translations could not be written, before they are made."""
    from data_module.errors import InputError

    if output and not output.parent.is_dir():
        raise InputError(f"{output}: its folder is not there; make it or give another --output")
    if output and output.is_dir():
        raise InputError(f"{output}: is a folder; give a file as --output")
    if output and not os.access(output if output.exists() else output.parent, os.W_OK):
        raise InputError(f"{output}: cannot be written; see to its permissions or give another --output")


def show_comparison(versus: dict[str, Any]) -> None:
    """A line a metric."""
    for name in ("bleu", "chrf"):
        said = "the difference is real" if versus[f"{name}_difference_is_real"] else "the difference may be chance"
        print(
            f"{name:20} {versus[f'{name}_difference']:+6.2f}  against {versus[name]:.2f} of {versus['checkpoint']}: "
            f"{said} (paired bootstrap, p = {versus[f'{name}_p_value']:.3f})"
        )
