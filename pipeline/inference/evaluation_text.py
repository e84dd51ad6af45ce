"""The text that `evaluate` scores: given files, the recipe's test text by source, or a test set by name."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sacrebleu.dataset import DATASETS
from sacrebleu.utils import SACREBLEU_DIR

from data_module.corpus.manifest import source_names
from data_module.corpus.pairs import read_pairs
from data_module.errors import InputError
from data_module.registry import did_you_mean
from data_module.settings import CorpusSettings
from data_module.system.files import PlainValues
from pipeline.config.recipe import stored_settings
from pipeline.inference.options import Prefixes, with_prefix
from pipeline.inference.text_io import read_sentences
from pipeline.metrics.bleu_tokenizer import language_code


class EvaluationText(NamedTuple):
    """Sentences and their references; each list has an entry for each sentence."""

    name: str
    """The file of the references, or the recipe's key."""
    sources: list[str]
    """Source sentences without prefixes."""
    references: list[list[str]]
    """One list or several."""
    prefixes: list[str | None]
    parts: list[str]
    """Names of the text sources that the sentences come from."""

    def sources_for(self, known: Prefixes) -> list[str]:
        """Return the source sentences for a model: with their prefix, unless the model does not know it."""
        pairs = zip(self.prefixes, self.sources, strict=True)
        return [with_prefix(prefix if prefix in known.symbols else None, source) for prefix, source in pairs]

    def by_part(self) -> dict[str, list[int]]:
        """Return the indices of the sentences of each text source; empty if there are fewer than two sources."""
        indices: dict[str, list[int]] = {}
        for index, name in enumerate(self.parts):
            indices.setdefault(name, []).append(index)
        return indices if len(indices) > 1 else {}


def text_of_files(name: str, source: str, prefix: str | None, texts: list[list[str]]) -> EvaluationText:
    """Return the text of one source, from its sentences and one or more lists of references."""
    sources, *references = texts
    return EvaluationText(name, sources, references, [prefix] * len(sources), [source] * len(sources))


def text_of_recipe(corpus: PlainValues) -> EvaluationText:
    """Return the text of `corpus.test`, each source once. Pairs with invalid UTF-8 are left out or raise an error.

    Raises InputError if the recipe names no test text, a source cannot be read or has sides of unequal length, or no
    pair is left.
    """
    settings = stored_settings(corpus, CorpusSettings, "corpus")
    if not settings.test:
        raise InputError("the recipe has no corpus.test; give a text to score with --source FILE and --reference FILE")
    result = EvaluationText("corpus.test", [], [[]], [], [])
    for name, text in zip(source_names(settings.test), settings.test, strict=True):
        for chunk in read_pairs(replace(text, prefix=None), settings):
            valid = sorted(set(range(len(chunk.source))) - set(chunk.invalid))
            result.sources.extend(chunk.source[i] for i in valid)
            result.references[0].extend(chunk.target[i] for i in valid)
            result.prefixes.extend([text.prefix] * len(valid))
            result.parts.extend([name] * len(valid))
    if not result.sources:
        raise InputError("corpus.test: all lines have invalid UTF-8; correct them, or give --source and --reference")
    return result


def require_test_set(name: str) -> None:
    """Raise InputError if sacreBLEU has no test set of this name."""
    if name not in DATASETS:
        way_out = did_you_mean(name, DATASETS, "`sacrebleu --list` lists them")
        raise InputError(f"--test-set {name}: sacreBLEU has no such test set; {way_out}")


def text_of_test_set(name: str, source_language: str, target_language: str, prefix: str | None) -> EvaluationText:
    """Return the text of a test set of sacreBLEU for a model's languages, whose names may end with a region or script.

    `require_test_set` has allowed the name. Raises InputError if the set lacks the pair of languages, or is not in
    sacreBLEU's folder and cannot be downloaded.
    """
    pair = f"{language_code(source_language)}-{language_code(target_language)}"
    pairs = sorted(DATASETS[name].langpairs)
    if pair not in pairs:
        raise InputError(
            f"--test-set {name}: has no {pair} (corpus.source_language and corpus.target_language of the model); it has"
            f" {', '.join(pairs)}"
        )
    try:  # sacreBLEU downloads files that do not exist.
        files = [DATASETS[name].get_source_file(pair), *DATASETS[name].get_reference_files(pair)]
    except (OSError, SystemExit) as error:
        folder = Path(SACREBLEU_DIR) / name
        reason = "" if isinstance(error, SystemExit) else f" ({error})"
        raise InputError(
            f"--test-set {name}: is not in {folder} and cannot be downloaded{reason}; where there is a network, run"
            f" sacrebleu -t {name} -l {pair} --echo src, and copy ~/.sacrebleu/{name} from there to {folder}, or set"
            " SACREBLEU to a copy of ~/.sacrebleu"
        ) from None
    paths = [Path(file) for file in files]
    texts = [[line.strip() for line in read_sentences(path)] for path in paths]
    if not texts[0] or any(len(lines) != len(texts[0]) for lines in texts):
        raise InputError(f"--test-set {name}: {paths[0]} and {paths[1]} do not pair up; remove them and try again")
    return text_of_files(f"{name} {pair}", name, prefix, texts)
