"""Corpora, runs, checkpoints and bundles of another format are refused in one line, before any work is done."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import pipeline
from data_module.files import FORMAT_VERSION, PlainValues
from tests.conftest import refusal

VERSIONS = {
    "old": (1, "has format 1, made by version 0.2 or earlier; {start_over}, or use revision 748e0fa"),
    "new": (99, "has format 99, and this version reads format 2; use a newer version of attention-pipeline"),
    "missing": (None, "its format_version is missing; {start_over}"),
    "not a number": ("2", "its format_version is '2', not a number; {start_over}"),
}


FEW_STEPS = ["--trainer.max_steps", "6", "--trainer.val_check_interval", "6"]


class Place(NamedTuple):
    """Copies of what a run of this version has made, and its recipe."""

    recipe: Path
    corpus: Path
    run: Path
    checkpoint: Path
    bundle: Path
    text: Path

    def commands(self, kind: str) -> list[list[object]]:
        fit = ["fit", "--config", self.recipe, "--corpus.folder", self.corpus]
        with_text = ["--source", self.text, "--reference", self.text]
        return {
            # The texts are not there: they are not read.
            "corpus": [
                ["prepare", "--config", self.recipe, "--corpus.folder", self.corpus, "--corpus.train", "{tsv: absent}"],
                [*fit, "--run.folder", self.run.with_name("new")],
            ],
            "run": [[*fit, "--run.folder", self.run]],
            "checkpoint": [
                ["evaluate", self.checkpoint, *with_text],
                ["export", self.checkpoint, self.run.with_name("exported")],
                ["average", self.run, "--last", 1],
                [*fit, "--run.folder", self.run],
                [*fit, "--run.folder", self.run.with_name("new"), "--init-from", self.checkpoint],
            ],
            "card": [["evaluate", self.bundle, *with_text]],
            "model.ts": [],
        }[kind]


@pytest.fixture
def place(trained_run: Path, tiny_corpus: Path, bundle: Path, tmp_path: Path) -> Place:
    for name, folder in (("run", trained_run), ("corpus", tiny_corpus), ("bundle", bundle)):
        shutil.copytree(folder, tmp_path / name)
    (tmp_path / "text").write_text("a red dog\n")
    run = tmp_path / "run"
    newest = sorted((run / "checkpoints").glob("step=*.ckpt"))[-1]
    return Place(
        trained_run.parent / "tiny.yaml", tmp_path / "corpus", run, newest, tmp_path / "bundle", tmp_path / "text"
    )


def set_format(values: PlainValues, version: object) -> None:
    assert values.pop("format_version") == FORMAT_VERSION
    if version is not None:
        values["format_version"] = version


def change_json(path: Path, version: object) -> Path:
    values = json.loads(path.read_text())
    set_format(values, version)
    path.write_text(json.dumps(values))
    return path


def change_checkpoint(path: Path, version: object) -> Path:
    contents = torch.load(path, weights_only=True)
    set_format(contents["translation"], version)
    torch.save(contents, path)
    return path


def change_torchscript(path: Path, version: object) -> Path:
    extra = {"card.json": "", "tokenizer.model": ""}
    search = torch.jit.load(path, _extra_files=extra)
    card = json.loads(extra["card.json"])
    set_format(card, version)
    torch.jit.save(search, path, _extra_files={**extra, "card.json": json.dumps(card)})
    return path


class Kind(NamedTuple):
    """How a file's format is changed, and what to do with an old one."""

    change: Callable[[Place, object], Path]
    start_over: str


KINDS = {
    "corpus": Kind(
        lambda place, version: change_json(place.corpus / "manifest.json", version),
        "run `python -m pipeline prepare` with --force to rebuild it",
    ),
    "run": Kind(
        lambda place, version: change_json(place.run / "versions.json", version),
        "start a new run with --fresh or another run.folder",
    ),
    "checkpoint": Kind(lambda place, version: change_checkpoint(place.checkpoint, version), "start a new run"),
    "card": Kind(lambda place, version: change_json(place.bundle / "card.json", version), "export it again"),
    "model.ts": Kind(lambda place, version: change_torchscript(place.bundle / "model.ts", version), "export it again"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "found"),
    [
        *(("corpus", found) for found in VERSIONS),
        *((kind, "old") for kind in KINDS if kind != "corpus"),
        ("run", "missing"),
    ],
)
def test_another_format_is_refused(kind: str, found: str, place: Place) -> None:
    # Runs of version 0.2 have no format.
    version, message = VERSIONS["old" if (kind, found) == ("run", "missing") else found]
    path = KINDS[kind].change(place, None if found == "missing" else version)
    expected = f"{path}: {message.format(start_over=KINDS[kind].start_over)}"
    for command in place.commands(kind):
        assert refusal(*command) == f"error: {expected}"
    if kind in ("checkpoint", "card", "model.ts"):
        with pytest.raises(pipeline.InputError) as caught:
            pipeline.load(path if kind == "checkpoint" else place.bundle)
        assert str(caught.value) == expected
    assert not list(place.run.parent.glob("new*")) + list(place.run.parent.glob("exported*"))


def test_what_replaces_the_old_format(place: Place) -> None:
    """The way out of each message is open: `prepare --force`, `fit --fresh` and `export --force`."""
    from pipeline.__main__ import main

    change_json(place.corpus / "manifest.json", 1)
    change_json(place.run / "versions.json", None)
    change_json(place.bundle / "card.json", 1)
    recipe = ["--config", str(place.recipe), "--corpus.folder", str(place.corpus)]
    assert main(["prepare", *recipe, "--force"]) == 0
    assert main(["fit", *recipe, "--run.folder", str(place.run), "--fresh", *FEW_STEPS]) == 0
    assert main(["export", str(place.run), str(place.bundle), "--force", "--format", "torchscript"]) == 0
    assert pipeline.load(place.bundle).translate("a red dog") == pipeline.load(place.run).translate("a red dog")


@pytest.mark.parametrize("contents", [None, "{", "[]"])
def test_a_run_without_its_versions_is_refused(contents: str | None, place: Place) -> None:
    path = place.run / "versions.json"
    path.unlink()
    if contents is not None:
        path.write_text(contents)
    expected = f"error: {path}: is missing or damaged; start a new run with --fresh or another run.folder"
    assert refusal(*place.commands("run")[0]) == expected
