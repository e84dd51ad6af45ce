"""Test sets by name, such as `wmt14/full`: those that sacreBLEU knows, from its folder or downloaded to it."""

import difflib
from pathlib import Path

from data_module.errors import InputError
from pipeline.inference.bleu_tokenizer import language_code
from pipeline.inference.evaluation_text import EvaluationText, TextPart
from pipeline.inference.text_io import read_sentences


def require_test_set(name: str) -> None:
    """Check the name of a test set.

    Raises:
        InputError: sacreBLEU has no test set of that name.
    """
    from sacrebleu.dataset import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.7)
        way_out = f"did you mean {' or '.join(near)}?" if near else "`sacrebleu --list` lists them"
        raise InputError(f"--test-set {name}: sacreBLEU has no such test set; {way_out}")


def text_of_test_set(name: str, source_language: str, target_language: str, prefix: str | None) -> EvaluationText:
    """Return source and reference of a test set.

    Args:
        name: sacreBLEU's name of the test set.
        source_language: `corpus.source_language` of the model; a region or script may follow the language.
        target_language: likewise.
        prefix: put before each source sentence.

    Raises:
        InputError: there is no such set, it lacks the pair of languages, it has not one reference, or it is neither
            in sacreBLEU's folder nor can it be downloaded.
    """
    from sacrebleu.dataset import DATASETS

    require_test_set(name)
    pair = f"{language_code(source_language)}-{language_code(target_language)}"
    pairs = sorted(DATASETS[name].langpairs)
    if pair not in pairs:
        raise InputError(
            f"--test-set {name}: has no {pair} (corpus.source_language and corpus.target_language of the model); it has"
            f" {', '.join(pairs)}"
        )
    source, references = _files(name, pair)
    if len(references) != 1:
        fields = f"src (and {_first_reference(name, pair)})"
        raise InputError(
            f"--test-set {name}: has {len(references)} references of each sentence and is scored against one; write"
            f" files with sacrebleu -t {name} -l {pair} --echo {fields}, and give them as --source and --reference"
        )
    sources, targets = read_sentences(source), read_sentences(references[0])
    if len(sources) != len(targets) or not sources:
        raise InputError(f"--test-set {name}: {source} and {references[0]} do not pair up; remove them and try again")
    part = TextPart(name, prefix, [line.strip() for line in sources], [line.strip() for line in targets])
    return EvaluationText(f"{name} {pair}", [part])


def _first_reference(name: str, pair: str) -> str:
    from sacrebleu.dataset import DATASETS

    return next(field for field in DATASETS[name].fieldnames(pair) if field.startswith("ref"))


def _files(name: str, pair: str) -> tuple[Path, list[Path]]:
    """Return the files of source and references; sacreBLEU downloads them if they are not there."""
    from sacrebleu.dataset import DATASETS
    from sacrebleu.utils import SACREBLEU_DIR

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
