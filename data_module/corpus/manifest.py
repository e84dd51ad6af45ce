"""A corpus folder's `manifest.json`: the inputs it was made from, its statistics, its sources and its files."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, NotRequired, TypeAlias, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from data_module.errors import PROGRAM, InputError, first_of
from data_module.settings import TextSource
from data_module.system.files import PlainValues, check_format, misshapen, read_json
from data_module.tokenization.text_form import SHAPE
from data_module.tokenization.tokenizer import TOKENIZER_NAME, Tokenizer

FORMAT = "attention-pipeline corpus"
MANIFEST_NAME = "manifest.json"
CORPUS_NAMES = re.compile(
    r"manifest\.json|tokenizer\.(model|seen)|\.runs|validation\.(source|target)\.txt"
    r"|(train(\.\d+)?|validation)\.(source|target)\.(tokens|offsets|lengths)\.npy"
)
"""Names of the files in a corpus, of version 1.0.0 too."""

TEXT_KEYS = ("corpus.train", "corpus.validation", "corpus.test")
"""Keys of a recipe that hold a list of text sources."""
Split: TypeAlias = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
"""The splits that a corpus stores; the test text is only read."""


class SourceFile(TypedDict):
    """A text file that a corpus was made from, to compare the corpus with."""

    file: str
    bytes: int
    sha256: str


class Inputs(TypedDict):
    """Settings and source files that a corpus is made from and compared by."""

    settings: PlainValues
    """The recipe's `corpus:` section, without the folder and without weights."""
    source_files: list[SourceFile]


class Origin(Inputs):
    """The inputs of a corpus, and for information the commits of remote data sets."""

    hub_revisions: dict[str, str]


class SourcePairs(TypedDict):
    """How many pairs of a split come from one source; they are contiguous and stored `repeat` times."""

    name: str
    pairs: int
    repeat: int


class DroppedPairs(TypedDict):
    """How many pairs were dropped for one reason, and the first of them as `file:line`."""

    pairs: int
    first_lines: list[str]


class TokenCounts(TypedDict):
    """Tokens of the two stores of a split."""

    source_tokens: int
    target_tokens: int
    longest_source: int
    longest_target: int


class PairCounts(TypedDict):
    """What became of the pairs that were read for a split."""

    pairs_read: int
    pairs_kept: int
    pairs_dropped: dict[str, DroppedPairs]
    pairs_also_in_validation: int
    pairs_also_in_test: int


class SplitAccount(PairCounts, TokenCounts):
    """A split's entry in the manifest."""

    sources: list[SourcePairs]


class TrainAccount(SplitAccount):
    """The training split's entry in the manifest; its own token counts are those of the first variant."""

    variants: list[TokenCounts]


class TokenizerRecord(TypedDict):
    """Which tokenizer encoded a corpus."""

    sha256: str
    vocabulary_size: int


class Manifest(Origin):
    """The contents of `manifest.json`."""

    format: str
    format_version: int
    tokenizer: TokenizerRecord
    token_type: str
    training_pairs: NotRequired[str]
    """The hash that `hash_pairs` returns; version 1.0 and 1.1 did not write it."""
    text_form: NotRequired[PlainValues]
    """See `text_form.SHAPE`; corpora of versions before 1.2 have none."""
    train: TrainAccount
    validation: SplitAccount
    files: dict[str, int]
    """The size of each other file of the folder in bytes, by its name."""


_COUNTS = dict.fromkeys(("source_tokens", "target_tokens", "longest_source", "longest_target"), int)
_ACCOUNT = {
    **dict.fromkeys(("pairs_read", "pairs_kept"), int),
    "pairs_dropped": {str: {"pairs": int, "first_lines": list}},
    "sources": [{"name": str, "pairs": int, "repeat": int}],
    **_COUNTS,
}
_SHAPE = {
    "files": {str: int},
    "tokenizer": {"sha256": str, "vocabulary_size": int},
    "source_files": [{"file": str}],
    "training_pairs": (str, NoneType),
    "hub_revisions": dict,
    "settings": {key.removeprefix("corpus."): [{}] for key in TEXT_KEYS},
    "train": {**_ACCOUNT, "variants": [_COUNTS]},
    "validation": _ACCOUNT,
}
"""The types of the values that programs read from a manifest."""
_HEADER_BYTES = 128
"""Size of the header of a one-dimensional .npy file; each length takes two bytes."""
_REBUILD = f"run `{PROGRAM} prepare` with --force to rebuild it"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Add the names and sizes of the folder's files to the manifest, and write it."""
    manifest["files"] = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    text = json.dumps(manifest, indent=2, ensure_ascii=False)
    (folder / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")


def is_corpus(folder: Path) -> bool:
    """Return whether the folder was made by `prepare`, of any version and whether complete or not."""
    return _manifest(folder) is not None


def _manifest(folder: Path) -> PlainValues | None:
    """Return a corpus's manifest, not yet checked; None if the folder has none."""
    try:
        manifest = read_json(folder / MANIFEST_NAME)
    except OSError:
        return None
    return manifest if manifest is not None and manifest.get("format") == FORMAT else None


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a corpus folder, after checking that every file exists and has the right size.

    The time this takes does not depend on the size of the corpus.

    Raises InputError if the folder does not exist, is no corpus, is truncated, or has another format version.
    """
    if not folder.exists():
        raise InputError(f"{folder}: no such corpus; run `{PROGRAM} prepare`")
    manifest = _manifest(folder)
    if manifest is None:
        raise InputError(
            f"{folder}: not a corpus (it has no {MANIFEST_NAME} written by prepare); name another corpus.folder"
        )
    check_format(folder / MANIFEST_NAME, manifest.get("format_version"), _REBUILD)
    shape = _SHAPE | ({"text_form": SHAPE} if "text_form" in manifest else {})
    if wrong := misshapen(manifest, shape) or _uncounted(manifest):
        raise InputError(f"{folder / MANIFEST_NAME}: {wrong} is missing or damaged; {_REBUILD}")
    for name, size in manifest["files"].items():
        path = folder / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual} bytes, not {size}"
            raise InputError(f"{path}: the corpus is incomplete, this file {state}; {_REBUILD}")
    return cast(Manifest, manifest)  # Its shape has been checked.


def corpus_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a corpus, with what is known of its training text.

    Raises InputError as `read_manifest` and `Tokenizer.load` do.
    """
    tokenizer = Tokenizer.load(folder / TOKENIZER_NAME)
    return Tokenizer(tokenizer.model, seen=tokenizer.seen, form=read_manifest(folder).get("text_form"))


def _uncounted(manifest: PlainValues) -> str:
    """Return a key whose counts do not match the corpus's files; empty if all keys match."""
    if not manifest["train"]["variants"]:
        return "train.variants"
    for split in SPLITS:
        num_pairs = sum(source["pairs"] * source["repeat"] for source in manifest[split]["sources"])
        if manifest["files"].get(f"{split}.source.lengths.npy") != _HEADER_BYTES + 2 * num_pairs:
            return f"{split}.sources"
    return ""


def numbers(manifest: Manifest) -> dict[str, object]:
    """Return the vocabulary size and, for each split, the numbers of pairs and tokens."""
    keys = ("pairs_read", "pairs_kept", "source_tokens", "target_tokens")
    splits: dict[str, object] = {
        split: {key: value for key, value in manifest[split].items() if key in keys} for split in SPLITS
    }
    return {"vocabulary_size": manifest["tokenizer"]["vocabulary_size"], **splits}


def summary(manifest: Manifest) -> str:
    """Return the numbers of pairs as text, one line per split, with a few of the dropped lines."""
    lines = []
    for split in SPLITS:
        account = manifest[split]
        dropped = {reason: entry for reason, entry in account["pairs_dropped"].items() if entry["pairs"]}
        count = sum(entry["pairs"] for entry in dropped.values())
        reasons = "; ".join(
            f"{entry['pairs']:,} {reason.replace('_', ' ')} "
            f"({first_of(entry['first_lines'], separator=', ', total=entry['pairs'])})"
            for reason, entry in dropped.items()
        )
        lines.append(
            f"{split}: {account['pairs_read']:,} pairs read, {account['pairs_kept']:,} kept, {count:,} dropped"
            + (f": {reasons}" if reasons else "")
        )
    return "\n".join(lines)


def differences(manifest: Mapping[str, object], wanted: Mapping[str, object]) -> list[str]:
    """Return the differences between a corpus and the settings and source files in `wanted`, one phrase each.

    Only the keys of `wanted` are compared, so it may contain settings alone.
    """
    names = {"settings": "corpus"}  # as in the recipe
    phrases: list[str] = []
    for key in wanted:
        # Changed text sources explain changed files.
        if key != "source_files" or not any(phrase.startswith(TEXT_KEYS) for phrase in phrases):
            phrases += changes(names.get(key, key), manifest.get(key), wanted[key])
    return phrases


def _changed_texts(before: list[PlainValues], now: list[PlainValues]) -> str:
    """Return the text sources that only one of two lists has, a few of them by name."""
    old, new = ([_text_name(text) for text in texts] for texts in (before, now))
    gone, added = [name for name in old if name not in new], [name for name in new if name not in old]
    if not gone and not added:
        return "another order, repetition, weight or name"
    parts = [(gone, "no longer"), (added, "now")]
    return ", ".join(f"{word} {first_of(names, separator=', ')}" for names, word in parts if names)


def _text_name(text: PlainValues) -> str:
    keys = ("prefix", "source", "target", "tsv", "dataset", "subset", "split", "target_language", "path")
    name = " ".join(str(text[key]) for key in keys if text.get(key))
    return name if text.get("repeat", 1) == 1 else f"{name} (repeat {text['repeat']})"


def changes(name: str, had: Any, wanted: Any) -> list[str]:
    """Return the differences between the stored and the wanted value of a key, one phrase each.

    Each phrase begins with the key that differs; `name` is "" for a whole recipe.
    """
    if isinstance(had, dict) and isinstance(wanted, dict):
        names = {key: f"{name}.{key}" if name else key for key in {**wanted, **had}}
        return [phrase for key in names for phrase in changes(names[key], had.get(key), wanted.get(key))]
    if name == "source_files" and had is not None:
        old, own = ({entry["file"]: entry for entry in files} for files in (had, wanted))
        changed = [f"{file} has changed" for file in own if old.get(file, own[file]) != own[file]]
        new, gone = [file for file in own if file not in old], [file for file in old if file not in own]
        return changed + [f"{file} is new" for file in new] + [f"{file} is gone" for file in gone]
    if had == wanted:
        return []
    if name in TEXT_KEYS and (had or wanted):
        return [f"{name}: {_changed_texts(had or [], wanted or [])}"]
    # YAML has values that JSON lacks, such as dates.
    before, now = (json.dumps(value, ensure_ascii=False, default=str) for value in (had, wanted))
    return [f"{name} was {before}, now {now}"]


class SplitSources(NamedTuple):
    """Which pairs of a split come from which source. Sources that share a name are one."""

    names: list[str]
    """In the order of the recipe."""
    of_pair: NDArray[np.int64]
    """[pairs]: the index into `names` of each pair's source."""


def split_sources(account: SplitAccount) -> SplitSources | None:
    """Return the sources of a split from its entry in the manifest; None if all have one name."""
    record = account["sources"]
    names = list(dict.fromkeys(source["name"] for source in record))
    if len(names) < 2:
        return None
    indices = [names.index(source["name"]) for source in record]
    return SplitSources(names, np.repeat(indices, [source["pairs"] * source["repeat"] for source in record]))


def source_names(texts: Sequence[TextSource]) -> list[str]:
    """Return a name for each text source of a split, of letters, digits, `_`, `-` and `.`.

    A source is named by its `name`, else by the letters and digits of its `prefix` (`de` for `>>de<<`), else by its
    file or data set (`news` for `text/news.en.gz`). Sources that share a name or a prefix are one source in reports.
    A name made from a file gets a number if another source has the same name.
    """
    # Of a prefix, what is from its first letter or digit to its last.
    given = [text.name or _only_allowed(re.sub(r"^[\W_]+|[\W_]+$", "", text.prefix or "")) for text in texts]
    taken, names = set(given), []
    for name, text in zip(given, texts, strict=True):
        base = _of_file(text)
        numbered = (f"{base}_{number}" for number in count(2))
        names.append(name or next(free for free in chain([base], numbered) if free not in taken))
        taken.add(names[-1])
    return names


def _of_file(text: TextSource) -> str:
    if text.dataset:
        name = "_".join([Path(text.dataset).name, *([text.subset] if text.subset else [])])
    else:
        name = Path(Path(str(text.source or text.tsv or text.path)).name.removesuffix(".gz")).stem
    return _only_allowed(name) or "text"


def _only_allowed(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)
