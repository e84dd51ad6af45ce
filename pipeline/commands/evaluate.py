"""Score translations with BLEU and chrF: values, 95 % bootstrap intervals and signatures.

Source and reference are plain, detokenized texts with one sentence a line. The last output line is JSON.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.inference.text_io import add_search_arguments, paired_texts

if TYPE_CHECKING:
    from pipeline.inference.translator import Translator

TOKENIZED_LINES = 100
"""Number of translations that must look tokenized for a warning; sacreBLEU's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", type=Path, help="a .ckpt file or a run folder")
    parser.add_argument("--source", type=Path, required=True, help="sentences to translate (plain or .gz)")
    parser.add_argument("--reference", type=Path, required=True, help="their reference translations (plain or .gz)")
    add_search_arguments(parser)
    parser.add_argument("--output", type=Path, help="a file to write the translations to")
    parser.add_argument(
        "--paper", action="store_true", help="add BLEU on Moses tokens, as in papers (needs the extra paper-score)"
    )
    parser.add_argument(
        "--versus", type=Path, metavar="OTHER", help="another checkpoint; test whether the difference is significant"
    )


def run(arguments: argparse.Namespace) -> int:
    """Translate, score and print."""
    from pipeline.inference.metrics import compare, paper_score, reference_warnings, require_sacremoses, score
    from pipeline.inference.translator import load_translator

    sources, references = paired_texts(arguments.source, arguments.reference)
    require_writable(arguments.output)
    for message in reference_warnings(references):
        print(f"{arguments.reference}: its lines {message}", file=sys.stderr)
    if arguments.paper:
        require_sacremoses()
    checkpoints = [arguments.checkpoint, *([arguments.versus] if arguments.versus else [])]
    translators = [load_translator(path, arguments.beam, arguments.length_penalty) for path in checkpoints]
    tokenizer = scoring_tokenizer(translators[0], arguments, references)
    hypotheses, *others = [
        [translation.text for translation in translator.translate(sources, progress=True)] for translator in translators
    ]
    if arguments.output:
        arguments.output.write_text("".join(line + "\n" for line in hypotheses), encoding="utf-8")
    if sum(line.endswith(" .") for line in hypotheses) >= TOKENIZED_LINES:
        print("the translations look tokenized: train on detokenized text for comparable scores", file=sys.stderr)
    figures = score(hypotheses, references, tokenizer)
    if arguments.paper:
        figures |= paper_score(hypotheses, references, translators[0].target_language)
    print_scores(figures, len(sources))
    if others:
        figures["versus"] = {"checkpoint": translators[1].name, **compare(hypotheses, others[0], references, tokenizer)}
        print_comparison(figures["versus"])
    settings = translators[0].settings
    figures |= {"beam_size": settings.beam_size, "length_penalty": settings.length_penalty}
    print(json.dumps({**figures, "sentences": len(sources), "checkpoint": translators[0].name}))
    return 0


def scoring_tokenizer(translator: "Translator", arguments: argparse.Namespace, references: list[str]) -> str:
    """Return BLEU's tokenizer by the checkpoint's recipe, and print what the user should know about it.

    Raises:
        InputError: the recipe's tokenizer is not installed, or `--paper` was not made for the language.
    """
    from pipeline.inference.bleu_tokenizer import choose_tokenizer, spacing_warning
    from pipeline.inference.metrics import require_moses_language

    if arguments.paper:
        require_moses_language(translator.target_language, references)
    tokenizer, note = choose_tokenizer(translator.bleu_tokenizer, translator.target_language)
    if note:
        print(note, file=sys.stderr)
    if warning := spacing_warning(references, tokenizer):
        print(f"{arguments.reference}: its lines {warning}", file=sys.stderr)
    return tokenizer


def require_writable(output: Path | None) -> None:
    """Check that translations can be written, before they are made.

    Raises:
        InputError: the file cannot be written.
    """
    from data_module.errors import InputError

    if output and not output.parent.is_dir():
        raise InputError(f"{output}: its folder is not there; make it or give another --output")
    if output and output.is_dir():
        raise InputError(f"{output}: is a folder; give a file as --output")
    if output and not os.access(output if output.exists() else output.parent, os.W_OK):
        raise InputError(f"{output}: cannot be written; change its permissions or give another --output")


def print_scores(figures: dict[str, Any], num_sentences: int) -> None:
    """Print one line for each score."""
    for name in [name for name in figures if f"{name}_interval" in figures]:
        low, high = figures[f"{name}_interval"]
        print(f"{name:20} {figures[name]:6.2f}  [{low:.2f}, {high:.2f}]  {figures[f'{name}_signature']}")
    print(f"{'exact_match':20} {figures['exact_match']:6.2f}  % of {num_sentences:,} sentences")


def print_comparison(versus: dict[str, Any]) -> None:
    """Print one line for each metric that was compared."""
    for name in [name for name in versus if f"{name}_difference" in versus]:
        significant = "significant" if versus[f"{name}_difference_is_real"] else "not significant"
        print(
            f"{name:20} {versus[f'{name}_difference']:+6.2f}  against {versus[name]:.2f} of {versus['checkpoint']}: "
            f"the difference is {significant} (paired bootstrap, p = {versus[f'{name}_p_value']:.3f})"
        )
