"""The text that `evaluate` scores: two files, the recipe's test text by source, or a test set by name."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sacrebleu.dataset import DATASETS
from sacrebleu.utils import SACREBLEU_DIR

from data_module.corpus.manifest import source_names
from data_module.corpus.pairs import read_pairs
from data_module.errors import InputError
from data_module.files import PlainValues
from data_module.registry import did_you_mean
from data_module.settings import CorpusSettings
from pipeline.config.schema import Checker
from pipeline.inference.bleu_tokenizer import language_code
from pipeline.inference.options import Prefixes, with_prefix
from pipeline.inference.text_io import read_sentences


class TextPart(NamedTuple):
    """The text of one source."""

    name: str
    prefix: str | None
    sources: list[str]
    """Without the prefix."""
    references: list[str]


class EvaluationText(NamedTuple):
    """Sentences and their references."""

    name: str
    """The file of the references, or the recipe's key."""
    parts: list[TextPart]
    more_references: Sequence[list[str]] = ()
    """Further references of all sentences, one list or several."""

    @property
    def references(self) -> list[str]:
        """The references of all parts."""
        return [line for part in self.parts for line in part.references]

    def sources(self, prefixes: Prefixes) -> list[str]:
        """Return the source sentences for a model: with their prefix, unless the model does not know it."""
        return [
            line
            for part in self.parts
            for line in with_prefix(part.prefix if part.prefix in prefixes.symbols else None, part.sources)
        ]

    def unknown_prefixes(self, prefixes: Prefixes) -> list[str]:
        """Return the prefixes of this text that a model does not know."""
        used = dict.fromkeys(part.prefix for part in self.parts if part.prefix is not None)
        return [prefix for prefix in used if prefix not in prefixes.symbols]

    def by_source(self) -> dict[str, list[int]]:
        """Return the indices of the sentences of each source, by name; empty if there are fewer than two sources."""
        indices: dict[str, list[int]] = {}
        start = 0
        for part in self.parts:
            indices.setdefault(part.name, []).extend(range(start, start + len(part.sources)))
            start += len(part.sources)
        return indices if len(indices) > 1 else {}


def text_of_recipe(corpus: PlainValues) -> EvaluationText:
    """Return the text of `corpus.test`, each source once. Pairs with invalid UTF-8 are left out, or an error.

    Args:
        corpus: the section `corpus` of the recipe in a checkpoint.

    Raises:
        InputError: the recipe names no test text, or a source cannot be read or has sides of unequal length.
    """
    checker = Checker({})
    settings = checker.dataclass(corpus, CorpusSettings, "corpus.")
    if checker.mistakes:
        raise InputError(f"the recipe's corpus.test cannot be read: {'; '.join(checker.mistakes)}")
    assert isinstance(settings, CorpusSettings)
    if not settings.test:
        raise InputError("the recipe has no corpus.test; give a text to score with --source FILE and --reference FILE")
    parts = []
    for name, text in zip(source_names(settings.test), settings.test, strict=True):
        part = TextPart(name, text.prefix, [], [])
        for chunk in read_pairs(replace(text, prefix=None), settings):
            valid = sorted(set(range(len(chunk.source))) - set(chunk.invalid))
            part.sources.extend(chunk.source[i] for i in valid)
            part.references.extend(chunk.target[i] for i in valid)
        parts.append(part)
    return EvaluationText("corpus.test", parts)


def require_test_set(name: str) -> None:
    """Check the name of a test set.

    Raises:
        InputError: sacreBLEU has no test set of that name.
    """
    if name not in DATASETS:
        way_out = did_you_mean(name, DATASETS, "`sacrebleu --list` lists them")
        raise InputError(f"--test-set {name}: sacreBLEU has no such test set; {way_out}")


def text_of_test_set(name: str, source_language: str, target_language: str, prefix: str | None) -> EvaluationText:
    """Return the text of a test set: its sources and references.

    Args:
        name: sacreBLEU's name of the test set.
        source_language: `corpus.source_language` of the model; a region or script may follow the language.
        target_language: likewise.
        prefix: put before each source sentence.

    Raises:
        InputError: there is no such set, it lacks the pair of languages, or it is not in sacreBLEU's folder and cannot
            be downloaded.
    """
    require_test_set(name)
    pair = f"{language_code(source_language)}-{language_code(target_language)}"
    pairs = sorted(DATASETS[name].langpairs)
    if pair not in pairs:
        raise InputError(
            f"--test-set {name}: has no {pair} (corpus.source_language and corpus.target_language of the model); it has"
            f" {', '.join(pairs)}"
        )
    source, references = _files(name, pair)
    sources, *targets = [[line.strip() for line in read_sentences(path)] for path in (source, *references)]
    if not sources or any(len(lines) != len(sources) for lines in targets):
        raise InputError(f"--test-set {name}: {source} and {references[0]} do not pair up; remove them and try again")
    return EvaluationText(f"{name} {pair}", [TextPart(name, prefix, sources, targets[0])], targets[1:])


def _files(name: str, pair: str) -> tuple[Path, list[Path]]:
    """Return the files of source and references; sacreBLEU downloads them if they do not exist."""
    data_set = DATASETS[name]
    try:
        source, references = data_set.get_source_file(pair), data_set.get_reference_files(pair)
    except (OSError, SystemExit) as error:
        folder = Path(SACREBLEU_DIR) / name
        reason = "" if isinstance(error, SystemExit) else f" ({error})"
        raise InputError(
            f"--test-set {name}: is not in {folder} and cannot be downloaded{reason}; where there is a network, run"
            f" sacrebleu -t {name} -l {pair} --echo src, and copy ~/.sacrebleu/{name} from there to {folder}, or set"
            " SACREBLEU to a copy of ~/.sacrebleu"
        ) from None
    return Path(source), [Path(path) for path in references]
