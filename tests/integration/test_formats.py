"""Corpora, runs, checkpoints and bundles of another format are refused in one line, before any work is done."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import pipeline
from data_module.system.files import FORMAT_VERSION, PlainValues
from tests.conftest import refusal, run_here

VERSIONS = {
    "old": (1, "has format 1, made by version 0.2 or earlier; {start_over}, or use revision 748e0fa"),
    "new": (99, "has format 99, and this version reads format 2; use a newer version of attention-pipeline"),
    "missing": (None, "its format_version is missing; {start_over}"),
    "not a number": ("2", "its format_version is '2', not a number; {start_over}"),
}


@pytest.fixture
def place(trained_run: Path, tiny_corpus: Path, bundle: Path, tmp_path: Path) -> Path:
    """A folder with copies of what a run of this version has made, and its recipe."""
    for name, folder in (("run", trained_run), ("corpus", tiny_corpus), ("bundle", bundle)):
        shutil.copytree(folder, tmp_path / name)
    shutil.copy(trained_run.parent / "tiny.yaml", tmp_path)
    (tmp_path / "text").write_text("a red dog\n")
    return tmp_path


def commands(place: Path, kind: str) -> list[list[object]]:
    """Return the commands that read a kind of file."""
    recipe, run, checkpoint = [place / "tiny.yaml", "--corpus.folder", place / "corpus"], place / "run", place / NEWEST
    with_text = ["--source", place / "text", "--reference", place / "text"]
    fit = ["fit", *recipe, "--run.folder"]
    return {
        # The texts are not there: they are not read.
        "corpus": [["prepare", *recipe, "--corpus.train", "{tsv: absent}"], [*fit, place / "new"]],
        "run": [[*fit, run]],
        "checkpoint": [
            ["evaluate", checkpoint, *with_text],
            ["export", checkpoint, place / "exported"],
            ["average", run, "--last", 1],
            [*fit, run],
            [*fit, place / "new", "--init-from", checkpoint],
        ],
        "card": [["evaluate", place / "bundle", *with_text]],
        "model.ts": [],
    }[kind]


def set_format(values: PlainValues, version: object) -> None:
    assert values.pop("format_version") == FORMAT_VERSION
    if version is not None:
        values["format_version"] = version


def change_json(path: Path, version: object) -> None:
    values = json.loads(path.read_text())
    set_format(values, version)
    path.write_text(json.dumps(values))


def change_checkpoint(path: Path, version: object) -> None:
    contents = torch.load(path, weights_only=True)
    set_format(contents["translation"], version)
    torch.save(contents, path)


def change_torchscript(path: Path, version: object) -> None:
    extra = {"card.json": "", "tokenizer.model": ""}
    search = torch.jit.load(path, _extra_files=extra)
    card = json.loads(extra["card.json"])
    set_format(card, version)
    torch.jit.save(search, path, _extra_files={**extra, "card.json": json.dumps(card)})


NEWEST = "run/checkpoints/step=00000240.ckpt"
KINDS = {
    "corpus": ("corpus/manifest.json", change_json, "run `python -m pipeline prepare` with --force to rebuild it"),
    "run": ("run/versions.json", change_json, "start a new run with --fresh or another run.folder"),
    "checkpoint": (NEWEST, change_checkpoint, "start a new run"),
    "card": ("bundle/card.json", change_json, "export it again"),
    "model.ts": ("bundle/model.ts", change_torchscript, "export it again"),
}
"""Each kind of file, how its format is changed, and what to do with an old one."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "found"),
    [
        *(("corpus", found) for found in VERSIONS),
        *((kind, "old") for kind in KINDS if kind != "corpus"),
        ("run", "missing"),
    ],
)
def test_another_format_is_refused(kind: str, found: str, place: Path) -> None:
    # Runs of version 0.2 have no format.
    version, message = VERSIONS["old" if (kind, found) == ("run", "missing") else found]
    name, change, start_over = KINDS[kind]
    path = place / name
    change(path, None if found == "missing" else version)
    expected = f"{path}: {message.format(start_over=start_over)}"
    for command in commands(place, kind):
        assert refusal(*command) == f"error: {expected}"
    if kind in ("checkpoint", "card", "model.ts"):
        with pytest.raises(pipeline.InputError) as caught:
            pipeline.load(path if kind == "checkpoint" else place / "bundle")
        assert str(caught.value) == expected
    assert not list(place.glob("new*")) + list(place.glob("exported*"))


def test_what_replaces_the_old_format(place: Path) -> None:
    """The way out of each message is open: `prepare --force`, `fit --fresh` and `export --force`."""
    for name, version in (("corpus", 1), ("run", None), ("card", 1)):
        change_json(place / KINDS[name][0], version)
    recipe, run, bundle = [place / "tiny.yaml", "--corpus.folder", place / "corpus"], place / "run", place / "bundle"
    few = ["--trainer.max_steps", 6, "--trainer.val_check_interval", 6]
    run_here("prepare", *recipe, "--force")
    run_here("fit", *recipe, "--run.folder", run, "--fresh", *few)
    run_here("export", run, bundle, "--force", "--format", "torchscript")
    assert pipeline.load(bundle).translate("a red dog") == pipeline.load(run).translate("a red dog")


@pytest.mark.parametrize("contents", [None, "{", "[]"])
def test_a_run_without_its_versions_is_refused(contents: str | None, place: Path) -> None:
    path = place / "run" / "versions.json"
    path.unlink()
    if contents is not None:
        path.write_text(contents)
    expected = f"error: {path}: is missing or damaged; start a new run with --fresh or another run.folder"
    assert refusal(*commands(place, "run")[0]) == expected
