"""Score translations with BLEU, chrF and exact match: values, 95 % bootstrap intervals and signatures.

Source and reference are plain, detokenized texts with one sentence a line. Without files, the text is a test set of
sacreBLEU (`--test-set`), or `corpus.test` of the checkpoint's recipe; several sources of it are also scored apart. The
last output line is JSON.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from data_module.errors import InputError
from data_module.files import atomic_file, naming_full_disk, replace_error, user_path
from pipeline.inference.options import SearchOptions, add_prefix_argument, add_search_arguments
from pipeline.inference.text_io import SentenceWarnings, progress_bar

if TYPE_CHECKING:
    from pipeline.inference.evaluation_text import EvaluationText
    from pipeline.inference.translator import Translator

TOKENIZED_LINES = 100
"""Number of translations that must look tokenized for a warning; sacreBLEU's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", type=user_path, help="a .ckpt file, a run folder or a bundle")
    parser.add_argument("--source", type=user_path, help="sentences to translate (plain or .gz)")
    parser.add_argument("--reference", type=user_path, help="their reference translations (plain or .gz)")
    parser.add_argument(
        "--test-set",
        metavar="NAME",
        help="in place of both: a test set of sacreBLEU, such as wmt14/full, for the model's languages",
    )
    add_prefix_argument(parser)
    add_search_arguments(parser)
    parser.add_argument("--output", type=user_path, help="a file to write the translations to")
    parser.add_argument(
        "--paper", action="store_true", help="add BLEU on Moses tokens, as in papers (needs the extra paper-score)"
    )
    parser.add_argument(
        "--versus",
        type=user_path,
        metavar="OTHER",
        help="another checkpoint; test whether the difference is significant",
    )


def run(arguments: argparse.Namespace) -> int:
    """Translate, score and print."""
    from pipeline.export.bundle import load_checkpoint_or_bundle
    from pipeline.inference.metrics import are_characters, reference_warnings, require_sacremoses

    # Before a checkpoint is loaded, so that a missing file is reported at once.
    text = given_text(arguments)
    require_writable(arguments.output, arguments.source, arguments.reference)
    if arguments.paper:
        require_sacremoses()
    checkpoints = [arguments.checkpoint, *([arguments.versus] if arguments.versus else [])]
    translators = [load_checkpoint_or_bundle(path, SearchOptions.given(arguments)) for path in checkpoints]
    translators[0].prefixes.check(arguments.prefix)
    text = text or text_of_model(translators[0], arguments)
    references = text.references
    tokenizer = scoring_tokenizer(translators[0], arguments, text)
    hypotheses, *others = [translations(translator, text) for translator in translators]
    for message in reference_warnings(references, hypotheses):
        print(f"{text.name}: its lines {message}", file=sys.stderr)
    if arguments.output:
        with output_file(arguments.output) as file:
            file.write("".join(line + "\n" for line in hypotheses).encode())
    if sum(line.endswith(" .") for line in hypotheses) >= TOKENIZED_LINES and not are_characters(hypotheses):
        print("the translations look tokenized: train on detokenized text for comparable scores", file=sys.stderr)
    systems = list(zip([translator.name for translator in translators], [hypotheses, *others], strict=True))
    language = translators[0].recipe["corpus"]["target_language"] if arguments.paper else None
    sources = {}
    for name, indices in text.by_source().items():
        print(f"{name}:")
        part = [(system, [lines[i] for i in indices]) for system, lines in systems]
        sources[name] = print_scores(part, [references[i] for i in indices], tokenizer, language)
    if sources:
        print("all sources:")
    figures = print_scores(systems, references, tokenizer, language)
    settings = translators[0].settings
    figures |= {"sources": sources} if sources else {}
    figures |= {"test_set": text.name} if arguments.test_set else {}
    figures |= {name: getattr(settings, name) for name in ("beam_size", "length_penalty", "stop_rule")}
    print(json.dumps({**figures, "checkpoint": translators[0].name}))
    return 0


def given_text(arguments: argparse.Namespace) -> "EvaluationText | None":
    """Return the text of `--source` and `--reference`; None if neither is given.

    Raises:
        InputError: one of them is missing, a file cannot be read, `--prefix` is given without a text, or `--test-set`
            names no test set or is given with files.
    """
    from pipeline.inference.evaluation_text import require_test_set, text_of_files

    if arguments.test_set is not None:
        if arguments.source or arguments.reference:
            raise InputError("--test-set: cannot be given with --source and --reference; give one or the other")
        require_test_set(arguments.test_set)
        return None
    if (arguments.source is None) != (arguments.reference is None):
        missing = "--reference" if arguments.reference is None else "--source"
        raise InputError(f"{missing}: is missing; give --source and --reference, or neither to score corpus.test")
    if arguments.source is not None:
        return text_of_files(arguments.source, arguments.reference, arguments.prefix)
    if arguments.prefix is not None:
        raise InputError("--prefix: the sources of corpus.test have prefixes of their own; omit it, or give --source")
    return None


def text_of_model(translator: "Translator", arguments: argparse.Namespace) -> "EvaluationText":
    """Return the text of `--test-set` for the model's languages, or else the test text of its recipe.

    Raises:
        InputError: see `text_of_test_set`; the recipe names no text, or it cannot be read.
    """
    from pipeline.inference.evaluation_text import text_of_recipe, text_of_test_set

    corpus = translator.recipe["corpus"]
    if arguments.test_set is not None:
        languages = corpus["source_language"], corpus["target_language"]
        return text_of_test_set(arguments.test_set, *languages, arguments.prefix)
    try:
        return text_of_recipe(corpus)
    except InputError as error:
        raise InputError(f"{translator.name}: {error}") from None


def translations(translator: "Translator", text: "EvaluationText") -> list[str]:
    """Return the translations of a text, and print what the user should know about its sentences."""
    prefixes = translator.prefixes
    if unknown := text.unknown_prefixes(prefixes):
        print(f"{translator.name}: sources are without {' '.join(unknown)}, which it does not know", file=sys.stderr)
    sources = text.sources(prefixes)
    with progress_bar(len(sources)) as bar:
        answers = translator.translate(sources, finished=bar.update)
    warnings = SentenceWarnings(prefixes, translator.max_source_tokens, translator.name)
    for number, answer in enumerate(answers, 1):
        warnings.add(number, answer.defects)
    warnings.print()
    return [answer.text for answer in answers]


def scoring_tokenizer(translator: "Translator", arguments: argparse.Namespace, text: "EvaluationText") -> str:
    """Return BLEU's tokenizer by the checkpoint's recipe, and print what the user should know about it.

    Raises:
        InputError: the recipe's tokenizer is not installed, or `--paper` was not made for the language.
    """
    from pipeline.inference.bleu_tokenizer import spacing_warning, tokenizer_of
    from pipeline.inference.metrics import require_moses_language

    if arguments.paper:
        require_moses_language(translator.recipe["corpus"]["target_language"])
    tokenizer = tokenizer_of(translator.recipe)
    if warning := spacing_warning(text.references, tokenizer):
        print(f"{text.name}: its lines {warning}", file=sys.stderr)
    return tokenizer


def output_file(path: Path) -> AbstractContextManager[IO[bytes]]:
    """Open a file that is written as a whole, and where that cannot be, as for a pipe, in place."""
    # Before links are resolved: what /dev/fd has for a pipe is a link to no file.
    if (path.exists() and not path.is_file()) or replace_error(path.resolve()):
        return _in_place(path)
    return atomic_file(path.resolve())


@contextmanager
def _in_place(path: Path) -> Iterator[IO[bytes]]:
    with naming_full_disk(path), path.open("wb") as file:
        yield file


def require_writable(output: Path | None, *inputs: Path | None, option: str = "--output") -> None:
    """Check that a file can be written, before what it is for is computed.

    Raises:
        InputError: the file cannot be written, or is one of the inputs.
    """
    if output and any(path and path.is_file() and output.exists() and path.samefile(output) for path in inputs):
        raise InputError(f"{output}: is the text to score, and would be overwritten; give another {option}")
    if output and not output.parent.is_dir():
        raise InputError(f"{output}: its folder is not there; make it or give another {option}")
    if output and output.is_dir():
        raise InputError(f"{output}: is a folder; give a file as {option}")
    if output and not os.access(output if output.exists() else output.parent, os.W_OK):
        raise InputError(f"{output}: cannot be written; change its permissions or give another {option}")


def print_scores(
    systems: list[tuple[str, list[str]]], references: list[str], tokenizer: str, language: str | None
) -> dict[str, Any]:
    """Print a line for each score of a text, and return the scores.

    Args:
        systems: name and translations of the evaluated checkpoint, and of that of `--versus`.
        references: the references.
        tokenizer: BLEU's.
        language: the references' language code to add the scores of `--paper`; None to leave them out.
    """
    from pipeline.inference.metrics import compare, paper_score, score

    (_, hypotheses), *others = systems
    figures = score(hypotheses, references, tokenizer)
    if language is not None:
        figures |= paper_score(hypotheses, references, language)
    for name in [name for name in figures if f"{name}_interval" in figures]:
        low, high = figures[f"{name}_interval"]
        print(f"{name:20} {figures[name]:6.2f}  [{low:.2f}, {high:.2f}]  {figures[f'{name}_signature']}")
    for checkpoint, other in others:
        figures["versus"] = {"checkpoint": checkpoint, **compare(hypotheses, other, references, tokenizer)}
        print_comparison(figures["versus"])
    return {**figures, "sentences": len(references)}


def print_comparison(versus: dict[str, Any]) -> None:
    """Print one line for each metric that was compared."""
    for name in [name for name in versus if f"{name}_difference" in versus]:
        significant = "significant" if versus[f"{name}_difference_is_real"] else "not significant"
        print(
            f"{name:20} {versus[f'{name}_difference']:+6.2f}  against {versus[name]:.2f} of {versus['checkpoint']}: "
            f"the difference is {significant} (paired bootstrap, p = {versus[f'{name}_p_value']:.3f})"
        )
