"""A folder is replaced as a whole or not at all."""

import os
from pathlib import Path

import pytest

from data_module.atomic_folder import replace_folder


@pytest.fixture
def new(tmp_path: Path) -> Path:
    (tmp_path / "new" / "inner").mkdir(parents=True)
    (tmp_path / "new" / "inner" / "file").write_text("new")
    return tmp_path / "new"


def make_old(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("old")
    return tmp_path / "folder"


def test_a_folder_that_does_not_exist_is_created(tmp_path: Path, new: Path) -> None:
    replace_folder(new, tmp_path / "folder", tmp_path / "old")
    assert (tmp_path / "folder" / "inner" / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_the_previous_folder_is_moved(tmp_path: Path, new: Path) -> None:
    folder = make_old(tmp_path)
    replace_folder(new, folder, tmp_path / "old")
    assert (folder / "inner" / "file").read_text() == "new"
    assert (tmp_path / "old" / "file").read_text() == "old"


def test_the_previous_folder_is_restored_if_the_move_fails(
    tmp_path: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rename = make_old(tmp_path), Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path == new:
            raise OSError("no space")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no space"):
        replace_folder(new, folder, tmp_path / "old")
    assert (folder / "file").read_text() == "old"
    assert not (tmp_path / "old").exists()


def test_all_files_and_folders_are_flushed_before_the_move(
    tmp_path: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    replace_folder(new, tmp_path / "folder", tmp_path / "old")
    assert sorted(flushed[:-2]) == [new / "inner", new / "inner" / "file"]
    assert flushed[-2:] == [new, tmp_path]
