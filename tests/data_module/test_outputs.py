"""Outputs that a user names: they are no inputs, no two of them are one file, and links to them are kept."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data_module.errors import InputError
from data_module.system.outputs import check_outputs, output_file, require_own


def as_link(path: Path, name: Path) -> Path:
    name.symlink_to(path)
    return name


def as_hard_link(path: Path, name: Path) -> Path:
    path.touch()
    name.hardlink_to(path)
    return name


def below_a_link(path: Path, name: Path) -> Path:
    name.symlink_to(path.parent)
    return name / path.name


NAMES: list[Callable[[Path, Path], Path]] = [
    lambda path, name: path,
    lambda path, name: path.parent / ".." / path.parent.name / path.name,
    as_link,
    as_hard_link,
    below_a_link,
]
"""Make another name of a file."""


@pytest.mark.parametrize("another", NAMES)
@pytest.mark.parametrize("exists", [True, False])
def test_one_file_by_two_names(tmp_path: Path, another: Callable[[Path, Path], Path], exists: bool) -> None:
    path = tmp_path / "text"
    if exists:
        path.touch()
    name = another(path, tmp_path / "name")
    with pytest.raises(InputError, match=f"^{re.escape(str(name))}: is --first too; give another --second$"):
        check_outputs([("--first", path), ("--second", name)], [])
    if path.exists():
        said = f"^{re.escape(str(name))}: is read by this command, and would be overwritten; give another --first$"
        with pytest.raises(InputError, match=said):
            check_outputs([("--first", name)], [tmp_path / "none", path])
    else:
        check_outputs([("--first", name)], [path])  # as the text of an old recipe, which is no longer there


def test_what_is_no_regular_file_may_be_named_twice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        check_outputs([("--first", path), ("--second", path)], [path])
    own, other = tmp_path / "own", tmp_path / "other"
    own.touch()
    other.write_text("the same")
    check_outputs([("--first", own), ("--second", tmp_path / "new")], [other, tmp_path])


def test_a_folder_that_holds_an_input(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    text = folder / "inner" / "text"
    text.touch()
    (tmp_path / "link").symlink_to(text)
    with pytest.raises(InputError, match=f"^{tmp_path}/link: is read by this command, and {folder} would be replaced;"):
        check_outputs([("folder", folder)], [tmp_path / "link"])
    (tmp_path / "folders").touch()
    check_outputs([("folder", folder)], [tmp_path / "folders"])


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_where_standard_output_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    path, other = tmp_path / "text", tmp_path / "other"
    other.touch()
    with path.open("a") as file:
        opened = Path(f"/dev/fd/{file.fileno()}")
        with pytest.raises(InputError, match=f"^{opened}: is read by this command"):
            check_outputs([("--output", opened)], [path])
        monkeypatch.setattr(sys, stream, file)
        with pytest.raises(InputError, match=f"^{path}: is read, and standard .* goes to it; redirect that"):
            check_outputs([], [other, path])
        with pytest.raises(InputError, match=f"^{path}: is standard .* too; give another --output$"):
            check_outputs([("--output", path)], [other])
        check_outputs([("--output", opened), ("--other", opened)], [other])


def test_links_are_followed_and_kept(tmp_path: Path) -> None:
    target, link, loop = tmp_path / "disk" / "text", tmp_path / "link", tmp_path / "loop"
    target.parent.mkdir()
    link.symlink_to("disk/text")
    for text in (b"first", b"second"):
        with output_file(link) as file:
            file.write(text)
        assert (link.readlink(), target.read_bytes()) == (Path("disk/text"), text)
    assert [path.name for path in target.parent.iterdir()] == ["text"]
    loop.symlink_to(loop)
    with pytest.raises(InputError, match=f"^{loop}: is a link that leads to itself; give another --output"):
        check_outputs([("--output", loop)], [])


def test_an_open_file_is_written_where_it_is(tmp_path: Path) -> None:
    with (tmp_path / "text").open("wb", buffering=0) as opened:
        opened.write(b"before, ")
        with output_file(Path(f"/dev/fd/{opened.fileno()}")) as file:
            file.write(b"inside, ")
        opened.write(b"after")
    assert (tmp_path / "text").read_bytes() == b"before, inside, after"


def test_a_folder_with_anything_else_is_not_replaced(tmp_path: Path) -> None:
    names = re.compile(r"own|inner(/own)?")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "own").touch()
    (tmp_path / "own").symlink_to("elsewhere")
    require_own(tmp_path, names, "")
    for name in ("owned", ".own", "inner/mine", "inner/inner"):
        (tmp_path / name).mkdir()
        with pytest.raises(InputError, match=f"^{tmp_path / name}: was not made by this program, and {tmp_path} would"):
            require_own(tmp_path, names, "give another folder")
        (tmp_path / name).rmdir()
