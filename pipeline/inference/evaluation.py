"""What `evaluate` does: it translates a text with one model or two, scores the translations and prints the scores."""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

from sacrebleu.utils import SACREBLEU_DIR

from data_module.errors import InputError, require_package
from data_module.system.files import PlainValues
from data_module.system.outputs import output_file
from data_module.system.text_files import progress_bar
from pipeline.config.settings import LIKELIHOOD
from pipeline.inference.evaluation_text import (
    EvaluationText,
    require_test_set,
    text_of_files,
    text_of_recipe,
    text_of_test_set,
)
from pipeline.inference.file_options import check_files
from pipeline.inference.loading import load_translator
from pipeline.inference.options import SearchOptions
from pipeline.inference.text_io import SentenceWarnings
from pipeline.inference.translator import Translator
from pipeline.metrics import metrics
from pipeline.metrics.bleu_tokenizer import spacing_warning, tokenizer_of
from pipeline.runtime.console import report

TOKENIZED_LINES = 100
"""Number of translations that must look tokenized for a warning, as in sacreBLEU."""


class Scored(NamedTuple):
    """The references of a text, with the translations of one system or two, and settings of the scores."""

    names: list[str]
    """The evaluated checkpoint, and that of `--versus`."""
    translations: list[list[list[str]]]
    """The translations of each sentence by each system, best first."""
    references: list[list[str]]
    """One list or several."""
    tokenizer: str
    """BLEU's tokenizer."""
    n_best: int | None
    """The number of `--n-best`, if it is given."""
    best_by: str
    """The metric to print first."""
    requested: list[str]
    """Names of further metrics; see `metrics_on`."""
    language: str | None
    """The references' language code to add the scores of `--paper`; None to leave them out."""

    def part(self, indices: list[int]) -> "Scored":
        """Return some of the sentences."""
        columns = ("translations", "references")
        chosen: PlainValues = {name: [[one[i] for i in indices] for one in getattr(self, name)] for name in columns}
        return self._replace(**chosen)


def evaluate(arguments: argparse.Namespace, options: SearchOptions, texts: list[list[str]] | None) -> None:
    """Translate, score and print.

    `texts` are the lines of `--source` and of each `--reference`, None for a test set or the recipe's text.

    Raises InputError if a model or its text cannot be read, or an option does not suit them.
    """
    # Checked before a checkpoint is loaded, so that a mistake is reported at once.
    if arguments.test_set is not None:
        require_test_set(arguments.test_set)
    if arguments.paper:
        require_package(*metrics.SACREMOSES)
    checkpoints = [arguments.checkpoint, *([arguments.versus] if arguments.versus else [])]
    translators = [load_translator(path) for path in checkpoints]
    translators[0].prefixes.require(arguments.prefix)
    if texts is not None:
        text = text_of_files(str(arguments.reference[0]), str(arguments.source), arguments.prefix, texts)
    else:
        text = text_of_model(translators[0], arguments)
    test_set = Path(SACREBLEU_DIR, arguments.test_set).rglob("*") if arguments.test_set else ()
    check_files(arguments, [translator.recipe for translator in translators], *test_set)
    settings, *_ = [options.in_place_of(translator.settings) for translator in translators]
    settings_of_scores = score_settings(translators[0], arguments, text)
    translated = [translations(translator, text, options) for translator in translators]
    names = [translator.name for translator in translators]
    scored = Scored(names, translated, text.references, *settings_of_scores)
    hypotheses = [best for best, *_ in translated[0]]
    for message in metrics.reference_warnings(text.references[0], hypotheses):
        report(f"{text.name}: its lines {message}")
    if sum(line.endswith(" .") for line in hypotheses) >= TOKENIZED_LINES and not metrics.are_characters(hypotheses):
        report("the translations look tokenized: train on detokenized text for comparable scores")
    if arguments.output:
        with output_file(arguments.output) as file:
            file.write("".join(line + "\n" for line in hypotheses).encode())
    sources = {}
    for name, indices in text.by_part().items():
        print(f"{name}:")
        sources[name] = print_scores(scored.part(indices))
    if sources:
        print("all sources:")
    figures = print_scores(scored)
    figures |= {"sources": sources} if sources else {}
    figures |= {"test_set": text.name} if arguments.test_set else {}
    figures |= {name: getattr(settings, name) for name in ("beam_size", "length_penalty", "stop_rule")}
    print(json.dumps({**figures, "checkpoint": translators[0].name}))


def text_of_model(translator: Translator, arguments: argparse.Namespace) -> EvaluationText:
    """Return the text of `--test-set` for the model's languages, or else the test text of its recipe.

    Raises InputError as `text_of_test_set` does, and if the recipe names no text, or one that cannot be read.
    """
    corpus = translator.recipe["corpus"]
    if arguments.test_set is not None:
        languages = corpus["source_language"], corpus["target_language"]
        return text_of_test_set(arguments.test_set, *languages, arguments.prefix)
    try:
        return text_of_recipe(corpus)
    except InputError as error:
        raise InputError(f"{translator.name}: {error}") from None


def translations(translator: Translator, text: EvaluationText, options: SearchOptions) -> list[list[str]]:
    """Return the best translations of each sentence, and print warnings about the text."""
    prefixes = translator.prefixes
    if unknown := [one for one in dict.fromkeys(text.prefixes) if one is not None and one not in prefixes.symbols]:
        report(f"{translator.name}: sources are without {' '.join(unknown)}, which it does not know")
    sources = text.sources_for(prefixes)
    with progress_bar("translating", len(sources)) as bar:
        answers = translator.translate(sources, options, finished=bar.update)
    warnings = SentenceWarnings(prefixes, translator.max_source_tokens, translator.name)
    for number, answer in enumerate(answers, 1):
        warnings.add(number, answer.defects)
    warnings.print()
    return [[hypothesis.text for hypothesis in answer.hypotheses] for answer in answers]


def score_settings(
    translator: Translator, arguments: argparse.Namespace, text: EvaluationText
) -> tuple[str, int | None, str, list[str], str | None]:
    """Return the fields of `Scored` from `tokenizer` on, by the checkpoint's recipe and the options; print warnings.

    Raises InputError if the recipe's tokenizer is not installed, or `--paper` was not made for the language or the
    text.
    """
    language = translator.recipe["corpus"]["target_language"]
    if arguments.paper:
        metrics.require_moses_language(language)
        if text.references[1:]:
            raise InputError(f"--paper: is for one reference, and {text.name} has several; omit it")
    tokenizer = tokenizer_of(translator.recipe)
    if warning := spacing_warning(text.references[0], tokenizer):
        report(f"{text.name}: its lines {warning}")
    run = translator.recipe["run"]
    if run["best_by"] not in (LIKELIHOOD, *metrics.METRICS, *metrics.ON_REQUEST):
        report(f"{translator.name}: without run.best_by {run['best_by']}, which no extension has registered")
    requested = list(dict.fromkeys([*run["metrics"], run["best_by"], *arguments.metric]))
    if text.references[1:] and (single := metrics.of_one_reference(requested)):
        report(f"{text.name}: without {', '.join(single)}, made for one reference of a sentence")
    return tokenizer, arguments.n_best, run["best_by"], requested, language if arguments.paper else None


def print_scores(scored: Scored) -> PlainValues:
    """Print a line for each score of a text, that of `best_by` first, and return the scores."""
    references, *more = scored.references
    hypotheses, *others = ([best for best, *_ in one] for one in scored.translations)
    options: PlainValues = {"more": more, "requested": scored.requested, "other": next(iter(others), None)}
    figures, versus = metrics.score_and_compare(hypotheses, references, scored.tokenizer, **options)
    if scored.language is not None:
        figures |= metrics.paper_score(hypotheses, references, scored.language)
    if scored.n_best is not None:
        answers, *of_other = scored.translations
        shares, difference = metrics.n_best_scores(answers, scored.references, scored.n_best, *of_other)
        figures, versus = figures | shares, versus | difference
    names = sorted(figures, key=lambda name: name.partition("@")[0] != scored.best_by)
    for name in [name for name in names if f"{name}_interval" in figures]:
        low, high = figures[f"{name}_interval"]
        print(f"{name:20} {figures[name]:6.2f}  [{low:.2f}, {high:.2f}]  {figures[f'{name}_signature']}")
    if others:
        figures["versus"] = {"checkpoint": scored.names[1], **versus}
    for name in [name for name in names if f"{name}_difference" in versus]:
        significant = "significant" if versus[f"{name}_difference_is_real"] else "not significant"
        print(
            f"{name:20} {versus[f'{name}_difference']:+6.2f}  against {versus[name]:.2f} of {scored.names[1]}: "
            f"the difference is {significant} (paired bootstrap, p = {versus[f'{name}_p_value']:.3f})"
        )
    return {**figures, "sentences": len(references)}
