"""Atomic file writes: the order of system calls, and what remains after an error."""

import errno
import os
from pathlib import Path

import pytest

from pipeline.runtime.atomic_file import atomic_file, disk_full_error, remove_temporary_files


def test_data_is_synchronized_before_the_rename_and_the_rename_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure at any time, either the old or the new file exists."""
    calls: list[tuple[object, ...]] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        synced = Path(f"/proc/self/fd/{descriptor}").readlink()
        # Data in Python's buffer would not be synchronized.
        calls.append(("fsync", synced, synced.read_bytes() if synced.is_file() else None))
        fsync(descriptor)

    def record_replace(source: object, target: object, **directories: int) -> None:
        calls.append(("replace", Path(str(source)), Path(str(target))))
        replace(source, target, **directories)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "fsync", record_fsync)
    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, record_replace)
    path = tmp_path / "folder" / "file"
    for contents in (b"old", b"new"):
        calls.clear()
        with atomic_file(path) as file:
            file.write(contents)
            temporary = Path(file.name)
        assert calls == [
            ("fsync", temporary, contents),
            ("replace", temporary, path),
            ("fsync", path.parent, None),
        ]
        assert temporary.parent == path.parent  # a rename is atomic only within one file system
        assert path.read_bytes() == contents
        assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def write_half(path: Path, error: BaseException, implicitly: bool = False) -> None:
    with atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        if not implicitly:
            raise error
        try:
            raise error
        except OSError:
            raise RuntimeError("cannot write")  # noqa: B904


def test_an_error_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    for error in (ArithmeticError(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            write_half(path, error)
        assert path.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_final_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        # Libraries replace the error of a full disk with their own, with and without `from`.
        for implicitly in (False, True):
            disk_error = OSError(number, os.strerror(number))
            error = disk_error if implicitly else RuntimeError("cannot write")
            error.__cause__ = None if implicitly else disk_error
            with pytest.raises(RuntimeError) as caught:
                write_half(path, error, implicitly)
            assert disk_full_error(caught.value) is disk_error
            assert disk_error.filename == str(path)
    assert disk_full_error(OSError(errno.EACCES, "no permission")) is None
    path.mkdir()
    with pytest.raises(IsADirectoryError) as refused, atomic_file(path):
        pass
    assert refused.value.filename == str(path)
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    temporary_files = [".step=4.ckpt.99.tmp", ".config.yaml.7.tmp"]
    others = ["notes.tmp", ".hidden", "step=4.ckpt"]
    for name in (*temporary_files, *others):
        (tmp_path / name).touch()
    remove_temporary_files(tmp_path, "config.yaml")
    assert {path.name for path in tmp_path.iterdir()} == {temporary_files[0], *others}
    remove_temporary_files(tmp_path, "")
    assert {path.name for path in tmp_path.iterdir()} == set(others)
