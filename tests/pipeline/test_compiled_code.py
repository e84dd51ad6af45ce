"""Where compiled code is kept, and that no other user can put code there."""

import os
import tempfile
from pathlib import Path

import pytest

from data_module.errors import InputError
from pipeline.runtime import compiled_code
from pipeline.runtime.compiled_code import compiled_code_folder, keep_compiled_code

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """The user's folder of compiled code, and the one in the temporary folder; neither exists yet."""
    for name in (INDUCTOR, TRITON):
        monkeypatch.setenv(name, "")  # so that what is set is removed afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "cache/attention-pipeline/compiled", tmp_path / f"attention-pipeline-{os.geteuid()}"


def assert_kept_in(folder: Path) -> None:
    assert (os.environ[INDUCTOR], os.environ[TRITON]) == (str(folder / "inductor"), str(folder / "triton"))
    assert folder.stat().st_mode & 0o777 == 0o700


def test_it_is_in_the_users_cache(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # a second start finds the folder
        keep_compiled_code()
        assert_kept_in(folders[0])
        monkeypatch.delenv(INDUCTOR)
        monkeypatch.delenv(TRITON)
    assert capsys.readouterr().err == ""


def test_the_users_own_setting_is_kept(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INDUCTOR, "/elsewhere")
    keep_compiled_code()
    assert os.environ[INDUCTOR] == "/elsewhere"
    assert TRITON not in os.environ  # Inductor keeps Triton's code in its own folder
    assert not folders[0].exists()
    monkeypatch.delenv(INDUCTOR)
    monkeypatch.setenv(TRITON, "/elsewhere")
    keep_compiled_code()
    assert (os.environ[INDUCTOR], os.environ[TRITON]) == (str(folders[0] / "inductor"), "/elsewhere")


def test_a_home_that_cannot_be_written(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folders[0].parents[1].write_text("a file where a folder should be")
    keep_compiled_code()
    assert compiled_code_folder() == folders[1]  # of the next program: the line comes once
    assert_kept_in(folders[1])
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"compiled code is kept in {folders[1]} instead of {folders[0]}: Not a directory"


def test_no_home(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a container, a user may be in no list of users."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setenv("USER", "nobody")  # PyTorch 2.12 asks for a name when it is imported.
    unknown: dict[int, None] = {}
    monkeypatch.setattr("pwd.getpwuid", unknown.__getitem__)
    keep_compiled_code()
    assert_kept_in(folders[1])
    assert "Could not determine home directory" in capsys.readouterr().err


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_may_write_is_not_used(
    folders: tuple[Path, Path], mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folders[0].mkdir(parents=True)
    folders[0].chmod(mode)
    keep_compiled_code()
    assert_kept_in(folders[1])
    assert f"instead of {folders[0]}: other users can write to {folders[0]}\n" in capsys.readouterr().err
    del os.environ[INDUCTOR]
    folders[1].chmod(mode)
    with pytest.raises(InputError, match=rf"nor in {folders[1]} \(.*\); set {INDUCTOR} to a folder"):
        keep_compiled_code()
    assert INDUCTOR not in os.environ


def test_a_folder_of_another_user_is_not_used(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folders[0].parent.mkdir(parents=True)
    if os.geteuid() == 0:
        folders[0].mkdir(mode=0o700)
        os.chown(folders[0], 65534, 65534)
    else:
        folders[0].symlink_to("/usr")
    keep_compiled_code()
    assert_kept_in(folders[1])
    assert "belongs to another user" in capsys.readouterr().err


def test_a_program_is_compiled_again_where_anything_that_it_depends_on_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder may be in a home that machines with other processors share."""
    compilers = []
    for version in ("1", "2"):
        compilers.append(tmp_path / version / "g++")
        compilers[-1].parent.mkdir()
        compilers[-1].write_text(f"#!/bin/sh\necho {version}\n")
        compilers[-1].chmod(0o755)
    sources = (tmp_path / "a.cpp", tmp_path / "a.h")
    for source in sources:
        source.write_text("int a;")
    own, link = [str(compilers[0])], tmp_path / "g++"
    link.symlink_to(compilers[0])
    keys = [compiled_code._key(own, sources), compiled_code._key([*own, "-g"], sources)]
    keys.append(compiled_code._key([str(link)], sources))
    link.unlink()
    link.symlink_to(compilers[1])  # another version of the same name
    keys.append(compiled_code._key([str(link)], sources))
    with monkeypatch.context() as changed:
        changed.setattr(compiled_code, "FLAGS", (*compiled_code.FLAGS, "-g"))
        keys.append(compiled_code._key(own, sources))
    with monkeypatch.context() as changed:
        changed.setattr(compiled_code, "_processor", lambda: "another")
        keys.append(compiled_code._key(own, sources))
    sources[1].write_text("int b;")
    keys.append(compiled_code._key(own, sources))
    assert len(set(keys)) == len(keys)
    sources[1].write_text("int a;")
    assert compiled_code._key(own, sources) == keys[0]


def test_folders_on_the_way_are_private_or_refused(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, before = folders[0].parents[1], os.umask(0o002)
    try:
        keep_compiled_code()
    finally:
        os.umask(before)
    for folder in (folders[0], *folders[0].parents[:2]):
        assert folder.stat().st_mode & 0o777 == 0o700
    # Who can write to a folder can exchange what is in it, unless it has the sticky bit.
    for mode, expected in ((0o1777, folders[0]), (0o770, folders[1]), (0o702, folders[1]), (0o755, folders[0])):
        cache.chmod(mode)
        for name in (INDUCTOR, TRITON):
            del os.environ[name]
        capsys.readouterr()
        compiled_code._say_once.cache_clear()  # as in another process
        keep_compiled_code()
        assert_kept_in(expected)
        said = capsys.readouterr().err
        assert said.endswith(f": other users can write to {cache}\n") if expected is folders[1] else said == ""
    # Links are followed, and the way to them is checked as well.
    (tmp_path / "open" / "mine").mkdir(parents=True)
    (tmp_path / "open").chmod(0o770)
    cache.rename(tmp_path / "open" / "mine" / "cache")
    cache.symlink_to("open/mine/cache")
    del os.environ[INDUCTOR]
    keep_compiled_code()
    assert os.environ[INDUCTOR].startswith(str(folders[1]))
    (tmp_path / "open").chmod(0o700)
    del os.environ[INDUCTOR]
    keep_compiled_code()
    assert os.environ[INDUCTOR] == str(tmp_path / "open/mine/cache/attention-pipeline/compiled/inductor")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs files of two users")
def test_a_link_of_another_user_is_not_followed(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """As one that was put into a folder with the sticky bit."""
    (tmp_path / "mine").mkdir(mode=0o700)
    folders[0].parents[1].symlink_to(tmp_path / "mine")
    os.chown(folders[0].parents[1], 65534, 65534, follow_symlinks=False)
    keep_compiled_code()
    assert_kept_in(folders[1])


def test_what_lies_above_the_home_is_not_checked(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "lab" / "me"
    home.mkdir(parents=True)
    home.parent.chmod(0o775)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME")
    keep_compiled_code()
    assert_kept_in(home / ".cache/attention-pipeline/compiled")
