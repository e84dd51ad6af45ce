"""Files and folders are written as a whole or not at all; locks end with the process that took them."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data_module.system.files import (
    FileLock,
    atomic_file,
    disk_full_error,
    open_in_place,
    remove_temporary_files,
    replaced_folder,
)
from tests.conftest import ROOT


def test_the_previous_folder_is_restored_if_the_move_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rename = tmp_path / "folder", Path.rename
    folder.mkdir()
    (folder / "file").write_text("old")

    def fail(path: Path, target: Path) -> Path:
        if path.name == ".folder.partial":
            raise OSError("no space")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no space"), replaced_folder(folder) as new:
        (new / "file").write_text("new")
    assert (folder / "file").read_text() == "old"
    assert list(tmp_path.iterdir()) == [folder]


def test_all_files_and_folders_are_flushed_before_the_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    with replaced_folder(tmp_path / "folder") as new:
        (new / "inner").mkdir()
        (new / "inner" / "file").write_text("new")
    assert sorted(flushed[:-2]) == [new / "inner", new / "inner" / "file"]
    assert flushed[-2:] == [new, tmp_path]


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
        assert calls == [("fsync", temporary, contents), ("replace", temporary, path), ("fsync", path.parent, None)]
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


def test_a_planted_link_gets_nothing(tmp_path: Path) -> None:
    victim, missing = tmp_path / "victim", tmp_path / "missing"
    victim.write_text("precious")
    for target in (victim, missing):
        planted = [tmp_path / f".file.{os.getpid()}.tmp", tmp_path / "file", tmp_path / "log"]
        for path in planted:
            path.unlink(missing_ok=True)
            path.symlink_to(target)
        with atomic_file(tmp_path / "file") as file:
            file.write(b"new")
        assert not (tmp_path / "file").is_symlink()
        assert (tmp_path / "file").read_bytes() == b"new"
        for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_TRUNC):
            with pytest.raises(OSError, match="is a link, which is not followed") as refused:
                open_in_place(tmp_path / "log", flags)
            assert refused.value.filename == str(tmp_path / "log")
        with pytest.raises(OSError, match="is a link, which is not followed"):
            FileLock(tmp_path / "log")
    assert victim.read_text() == "precious"
    assert not missing.exists()


def test_a_link_planted_in_the_last_moment_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f".file.{os.getpid()}.tmp").symlink_to(tmp_path / "victim")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(FileExistsError), atomic_file(tmp_path / "file"):
            pass
    assert not (tmp_path / "victim").exists()


def test_what_is_no_regular_file_is_not_opened_in_place(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for flags in (os.O_RDONLY, os.O_RDWR):  # Neither waits for another process.
        with pytest.raises(OSError, match="is not a regular file"):
            open_in_place(tmp_path / "fifo", flags)
    with pytest.raises(OSError, match="such file"):
        open_in_place(tmp_path / "missing", os.O_RDONLY)


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    temporary_files = [".step=4.ckpt.99.tmp", ".config.yaml.7.tmp"]
    others = ["notes.tmp", ".hidden", "step=4.ckpt", ".important.tmp", ".step=4.ckpt.mine.tmp", ".other.yaml.7.tmp"]
    for name in (*temporary_files, *others):
        (tmp_path / name).touch()
    remove_temporary_files(tmp_path, "config.yaml")
    assert {path.name for path in tmp_path.iterdir()} == {temporary_files[0], *others}
    remove_temporary_files(tmp_path, "step=*.ckpt", "best.ckpt")
    assert {path.name for path in tmp_path.iterdir()} == set(others)


FORK_AND_WAIT = """
import os, sys, time
from pathlib import Path
from data_module.system.files import FileLock
lock = FileLock(Path(sys.argv[1]))
assert lock.take()
if os.fork() == 0:
    time.sleep(600)
print("forked", flush=True)
time.sleep(600)
"""


def test_a_lock_ends_with_its_process_though_a_process_that_it_forked_goes_on(tmp_path: Path) -> None:
    """As a worker of a data loader does for a moment when its parent is killed."""
    path = tmp_path / "lock"
    command = [sys.executable, "-c", FORK_AND_WAIT, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"forked\n"
            with FileLock(path) as lock:
                assert not lock.take()
                assert not lock.take(shared=True)
                process.kill()
                assert lock.take(wait=True)
                os.killpg(process.pid, 0)  # The forked process lives.
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_locks_in_one_process(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.take(shared=True)
    assert second.take(shared=True)
    assert not first.take()
    second.close()
    assert first.take()


def test_a_lock_of_a_file_that_was_removed_excludes_nobody_and_is_taken_anew(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = FileLock(path), FileLock(path)
    path.unlink()
    assert first.take()
    assert path.exists()
    assert not second.take()


def test_a_lock_whose_folder_was_removed_is_taken_anew(tmp_path: Path) -> None:
    """A run that waits for one that then ends without having written anything."""
    first, second = FileLock(tmp_path / "run" / "lock"), FileLock(tmp_path / "run" / "lock")
    assert first.take()
    assert not second.take()
    shutil.rmtree(tmp_path / "run")
    first.close()
    assert second.take()
    assert (tmp_path / "run" / "lock").exists()
