"""Hugging Face data sets of various layouts, read by the library; every error is reported in one line."""

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from zipfile import ZipFile

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import yaml

from data_module.corpus import dataset_reader
from data_module.corpus.pairs import read_pairs
from data_module.errors import InputError
from data_module.settings import CorpusSettings, TextSource
from pipeline.training.new_corpus import ensure_corpus
from tests.conftest import ROOT, pipeline, run_here, sentences
from tests.data_module.conftest import contents, fails, made, text_of, write_pairs

Rows = Sequence[tuple[str | bytes | None, str | None]]
"""English and German."""

README = """\
---
configs:
- config_name: cs-en
  data_files:
  - {split: train, path: cs-en/train-*}
- config_name: de-en
  data_files:
  - {split: train, path: de-en/train-*}
  - {split: validation, path: de-en/validation-*}
dataset_info:
- config_name: de-en
  features:
  - name: translation
    dtype:
      translation:
        languages: [de, en]
---
"""


def write_card(path: Path, place: str) -> None:
    """Write a data set's README.md, or the file that may replace it, which names its only file."""
    files = [{"split": "train", "path": place}]
    card = yaml.safe_dump({"configs": [{"config_name": "default", "data_files": files}]})
    path.write_text(f"---\n{card}---\n" if path.name == "README.md" else card)


def rows(count: int, seed: int) -> list[tuple[str, str]]:
    return [(line, " ".join(reversed(line.split()))) for line in sentences(count, seed)]


def write_parquet(path: Path, pairs: Rows) -> None:
    text = pa.binary() if any(isinstance(en, bytes) for en, _ in pairs) else pa.string()
    columns = [pa.array([de for _, de in pairs], pa.string()), pa.array([en for en, _ in pairs], text)]
    if text == pa.binary():
        columns[1] = columns[1].view(pa.string())  # a string column with invalid UTF-8
    translation = pa.StructArray.from_arrays(columns, ["de", "en"])
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table({"id": range(len(pairs)), "translation": translation}), path, row_group_size=7)


def write_json(path: Path, pairs: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"translation": {"en": en, "de": de}}, ensure_ascii=False) for en, de in pairs]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def wmt_like(folder: Path, *, readme: bool = True) -> Path:
    """Write the layout of wmt/wmt14: 90 training and 20 validation pairs, and a subset of another language."""
    pairs = rows(90, 1)
    for i in range(3):
        write_parquet(folder / f"de-en/train-{i:05}-of-00003.parquet", pairs[30 * i : 30 * i + 30])
    write_parquet(folder / "de-en/validation-00000-of-00001.parquet", rows(20, 2))
    write_parquet(folder / "cs-en/train-00000-of-00001.parquet", [("wrong", "language")])
    if readme:
        (folder / "README.md").write_text(README)
    return folder


@pytest.fixture
def settings(tmp_path: Path) -> CorpusSettings:
    train = TextSource(dataset=str(wmt_like(tmp_path / "wmt14")), subset="de-en", split="train")
    return CorpusSettings(
        str(tmp_path / "corpus"), [train], [replace(train, split="validation")], [], "en", "de", vocabulary_size=60
    )


def changed(settings: CorpusSettings, **changes: object) -> list[TextSource]:
    return [replace(settings.train[0], **changes)]


def test_a_data_set_is_the_same_corpus_as_its_text_in_files(settings: CorpusSettings, tmp_path: Path) -> None:
    made(settings)
    lists = {"train": rows(90, 1), "validation": rows(20, 2)}
    texts = {split: [write_pairs(tmp_path, split, pairs)] for split, pairs in lists.items()}
    made(replace(settings, folder=str(tmp_path / "files"), **texts))
    same = {**contents(settings.folder), "manifest.json": contents(tmp_path / "files")["manifest.json"]}
    assert contents(tmp_path / "files") == same


def json_named(name: str) -> Callable[[Path], object]:
    return lambda folder: write_json(folder / name, rows(90, 1))


@pytest.mark.parametrize(
    ("name", "write", "subset"),
    [
        ("wmt14", wmt_like, "de-en"),
        ("json", lambda folder: wmt_like(folder, readme=False), "de-en"),  # a format of this name is known
        # Only one of the subsets that the README lists has been downloaded.
        ("part", lambda folder: shutil.rmtree(wmt_like(folder) / "cs-en"), "de-en"),
        *(("lines", json_named(f"{stem}.{end}"), None) for stem in ("train", "data/train-00000-of-00001")
          for end in ("json", "jsonl")),
    ],
)  # fmt: skip
def test_layouts(
    settings: CorpusSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    write: Callable[[Path], object],
    subset: str | None,
) -> None:
    write(tmp_path / "data" / name)
    monkeypatch.chdir(tmp_path / "data")
    train = TextSource(dataset=name, subset=subset, split="train", repeat=2)
    manifest = made(replace(settings, train=[train]))
    assert text_of(settings) == rows(90, 1) * 2
    assert manifest["hub_revisions"] == {}


def test_one_of_several_files_is_missing(settings: CorpusSettings, tmp_path: Path) -> None:
    (tmp_path / "wmt14/de-en/train-00001-of-00003.parquet").unlink()
    fails(settings, "wmt14: only 2 of the 3 files of 'train' exist; fetch the others")


def test_each_data_set_may_name_its_languages(settings: CorpusSettings) -> None:
    """The second source is read the other way round; its keys are part of the corpus."""
    reverse = replace(settings.train[0], source_language="de", target_language="en")
    manifest = made(replace(settings, train=[settings.train[0], reverse]))
    pairs = rows(90, 1)
    assert text_of(settings) == [*pairs, *((target, source) for source, target in pairs)]
    assert manifest["settings"]["train"][1]["target_language"] == "en"
    assert manifest["settings"]["train"][0]["target_language"] is None
    with pytest.raises(InputError, match=r"corpus\.train: no longer .* en, now "):
        made(replace(settings, train=[settings.train[0], replace(reverse, target_language="de")]))


def test_null_translations_and_row_numbers_across_files(settings: CorpusSettings, tmp_path: Path) -> None:
    """A row may be null as a whole, or have line ends; row numbers continue after the first chunk and file."""
    pairs = rows(10_050, 4)
    write_parquet(tmp_path / "long/train-00000-of-00002.parquet", pairs)
    struct = pa.array(
        [{"de": "ein\r\nHund\n", "en": "a\u2028dog"}, None], pa.struct({"de": pa.large_string(), "en": pa.string()})
    )
    parquet.write_table(pa.table({"translation": struct}), tmp_path / "long/train-00001-of-00002.parquet")
    text = TextSource(dataset=str(tmp_path / "long"), split="train")
    manifest = made(replace(settings, train=[text]))
    empty = manifest["train"]["pairs_dropped"]["empty_side"]
    assert empty == {"pairs": 1, "first_lines": [f"{tmp_path}/long:train:10052"]}
    chunks = list(read_pairs(text, settings))
    found = [pair for chunk in chunks for pair in zip(chunk.source, chunk.target, strict=True)]
    assert found == [*pairs, ("a dog", "ein Hund"), ("", "")]
    assert max(len(chunk.source) for chunk in chunks) == 10_000


def test_by_name_from_the_hub(settings: CorpusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is told to find the hub's data sets in a folder, at one commit."""
    import datasets

    hub, load, fetched = tmp_path / "hub", datasets.load_dataset_builder, []
    wmt_like(hub / "wmt/wmt14")
    monkeypatch.chdir(tmp_path)

    def builder_of(path: str, *arguments: object, **options: object) -> datasets.DatasetBuilder:
        if not (hub / path).exists():
            raise datasets.exceptions.DatasetNotFoundError(path)
        builder = load(str(hub / path), *arguments, **options)
        builder.hash = "a" * 40
        return builder

    def download(_: object, files: list[str]) -> list[str]:
        fetched.extend(files)
        return files

    monkeypatch.setattr(datasets, "load_dataset_builder", builder_of)
    monkeypatch.setattr(datasets.DownloadManager, "download", download)
    train = replace(settings.train[0], dataset="wmt/wmt14")
    named = replace(settings, train=[train], validation=[replace(train, split="validation")])
    manifest = made(named)
    assert text_of(named) == rows(90, 1)
    assert manifest["hub_revisions"] == {"wmt/wmt14": "a" * 40}
    names = [f"de-en/train-0000{i}-of-00003.parquet" for i in range(3)] + ["de-en/validation-00000-of-00001.parquet"]
    assert [entry["file"] for entry in manifest["source_files"]] == [f"wmt/wmt14/{name}" for name in names]
    assert fetched == [f"{hub}/wmt/wmt14/{name}" for name in names]  # once, and no file of the other language
    write_parquet(hub / "wmt/wmt14" / names[1], rows(30, 9))
    with pytest.raises(InputError, match=rf"wmt/wmt14/{names[1]} has changed"):
        made(named)
    # A card on the hub leads to no local file, and to no other data set.
    secret = tmp_path / "secret.json"
    for path in (secret, hub / "a/b/train.json", hub / "a/b-secret/secret.json"):
        write_json(path, rows(40, 1))
    with ZipFile(tmp_path / "secret.zip", "w") as archive:
        archive.write(secret, "secret.json")
    sibling, zipped = str(hub / "a/b-secret/secret.json"), f"zip://secret.json::{tmp_path}/secret.zip"
    for place in (str(secret), f"local://{secret}", zipped, sibling, "../b-secret/secret.json"):
        write_card(hub / "a/b/README.md", place)
        with pytest.raises(InputError, match=r"a/b: its card names .*/?secret.json.*, outside the folder"):
            made(replace(named, train=[TextSource(dataset="a/b", split="train")]))
        dataset_reader._open_once.cache_clear()
    assert not [name for name in fetched if "secret" in name]
    # Training does not contact the hub, because compute nodes may have no network.
    shutil.rmtree(hub)
    dataset_reader._open_once.cache_clear()
    ensure_corpus(named)
    message = r"wmt/none: no such folder, and it cannot be fetched from the Hugging Face hub \(wmt/none\); correct"
    with pytest.raises(InputError, match=message):
        made(replace(named, train=[replace(train, dataset="wmt/none")]))


def test_invalid_utf8(settings: CorpusSettings, tmp_path: Path) -> None:
    write_parquet(tmp_path / "bad/train.parquet", [*rows(40, 1), (b"H\xe4user", "houses")])
    text = TextSource(dataset=str(tmp_path / "bad"), split="train")
    fails(settings, f"{tmp_path}/bad:train:41: invalid UTF-8; correct", train=[text])
    account = made(replace(settings, train=[text], drop_invalid_utf8=True))["train"]
    assert account["pairs_dropped"]["invalid_utf8"] == {"pairs": 1, "first_lines": [f"{tmp_path}/bad:train:41"]}


def test_no_such_data_set_subset_split_or_language(settings: CorpusSettings, tmp_path: Path) -> None:
    card, empty = tmp_path / "wmt14/README.md", tmp_path / "empty"
    empty.mkdir()
    for message, changes in (
        ("none: no such folder", {"dataset": "a/b/none"}),
        ("README.md: a file, not a data set; name", {"dataset": str(card)}),
        ("empty: cannot be read as a data set (", {"dataset": str(empty)}),
        ("(BuilderConfig 'fr-en' not found. Available: ['cs-en', 'de-en']); name", {"subset": "fr-en"}),
        ("wmt14: there is no split 'dev'; give `split`, one of: train, validation", {"split": "dev"}),
    ):
        fails(settings, message, train=changed(settings, **changes))
    [(ok, said)] = dataset_reader.HubDataset(TextSource(dataset=str(card), split="train"), ("de", "en")).check()
    assert (ok, said.endswith("a file, not a data set; name the folder that it is in")) == (False, True)
    message = ".parquet: is damaged, or lacks a `translation` column with text in 'en' and 'fr' ("
    fails(settings, message, " in struct<de: string, en: string>); correct source_language or", target_language="fr")
    fails(settings, "are both 'de'; name its two languages", source_language="de")
    card.write_text(README.partition("dataset_info")[0] + "---\n")
    fails(settings, "pick one among the available configs: ['cs-en',", train=changed(settings, subset=None))
    card.unlink()
    fails(settings, "'fr-en' not found", train=changed(settings, subset="fr-en"))
    made(settings)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda f: parquet.write_table(pa.table({"id": [1], "text": ["a"]}), f / "train.parquet"),
         """('Field "translation" does not exist in schema'); correct source_language"""),
        (lambda f: parquet.write_table(pa.table({"translation": ["a"]}), f / "train.parquet"),
         "has no kernel matching input types (string)); correct"),
        (lambda f: parquet.write_table(pa.table({"translation": [{"de": [1], "en": [2]}]}), f / "train.parquet"),
         "(Unsupported cast from list<"),
        (lambda f: write_parquet(f / "train.parquet", []), ":train: has no text; name a source with text"),
        (lambda f: (f / "train.parquet").write_bytes(b"PAR1 no parquet"), "train.parquet: is damaged, or lacks"),
        (lambda f: (f / "train.json").write_text('{"translation": {"de": "a", '), "train.json: is damaged, or lacks"),
        (lambda f: (f / "train.csv").write_text("de,en\na,b\n"), "its files are read as csv; name a data set of"),
        (lambda f: (f / "train.pkl").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR."), "No (supported) data files"),
        (lambda f: (f / f"{f.name}.py").write_text("1 / 0"), "Dataset scripts are no longer supported"),
    ],
)  # fmt: skip
def test_folders_that_are_not_data_sets_of_translations(
    settings: CorpusSettings, tmp_path: Path, write: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    write(folder)
    fails(settings, message, train=[TextSource(dataset=str(folder), split="train")])


@pytest.mark.parametrize("page", ["README.md", ".huggingface.yaml"])
def test_files_outside_the_folder(settings: CorpusSettings, tmp_path: Path, page: str) -> None:
    folder, secret, sibling = tmp_path / "other", tmp_path / "secret.json", tmp_path / "other-secret/secret.json"
    for path in (folder / "train.json", secret, sibling):
        write_json(path, rows(40, 1))
    text = [TextSource(dataset=str(folder), split="train")]
    # A sibling's path begins with the text of the folder's own.
    absolute = [str(secret), f"file:{secret}", f"local://{secret}", str(sibling)]
    for place in ("../secret.json", "../other-secret/*.json", *absolute):
        write_card(folder / page, place)
        fails(settings, "other: its card names ", "secret.json, outside the folder; put the file into", train=text)
    # The library does not read these.
    for place in ("a/../../secret.*", "file:///secret.json", f"zip://secret.json::{secret}"):
        write_card(folder / page, place)
        fails(settings, "other: cannot be read as a data set (", train=text)
    for place in ("./train.json", f"{folder}/train.json"):
        write_card(folder / page, place)
        assert made(replace(settings, train=text), force=True)["train"]["pairs_kept"] == 40


def test_a_damaged_file_among_several_is_named(settings: CorpusSettings, tmp_path: Path) -> None:
    path = tmp_path / "wmt14/de-en/train-00001-of-00003.parquet"
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(196)
    path.write_bytes(data)
    message = fails(settings, "wmt14/de-en/train-00001-of-00003.parquet: is damaged, or lacks", " fetch the file again")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"corpus": asdict(settings)}))
    _, said = run_here("prepare", "--config", tmp_path / "recipe.yaml", code=2)
    assert said == f"error: {message}\n"  # and no output of the library


def test_without_the_library(settings: CorpusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text files do not need it."""
    for name in ("datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    fails(settings, "datasets is not installed; run: .venv/bin/pip install -c constraints.txt")
    text = [write_pairs(tmp_path, "text", rows(50, 3))]
    made(replace(settings, train=text, validation=text))


def test_without_a_network_the_error_is_one_line(tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = pipeline("prepare", "--config", ROOT / "configs/wmt14_en_de_base.yaml", cwd=tmp_path, environment=offline)
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 2
    assert lines[-1].startswith("error: wmt/wmt14: no such folder, and it cannot be fetched from the Hugging Face hub")
    assert "hf download wmt/wmt14 --repo-type dataset" in lines[-1]
    assert len(lines) == 2
