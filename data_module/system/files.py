"""Files and folders: paths as users write them, formats, writing as a whole or not at all, full disks, and locks."""

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from fnmatch import fnmatchcase
from io import BufferedReader, FileIO
from pathlib import Path
from typing import IO, Annotated, Any, TypeAlias

from data_module.errors import InputError

log = logging.getLogger(__name__)

PlainValues: TypeAlias = dict[str, Any]
"""Values by name, as in JSON, YAML and checkpoints. Code that reads a value knows or checks its type."""
PathText = Annotated[str, "path"]
"""The type of a recipe's key that holds a path."""
FORMAT_VERSION = 2
"""Stored under `format_version`. It is raised when a version cannot read the files of earlier versions."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OPEN_FILES = ("/dev/stdin", "/dev/fd", "/proc/self/fd")
"""Beginnings of paths that name a file which is already open."""
_MOST_BYTES = 2**26
"""Limit on a file that is read as a whole: a sparse file of any size takes no room on a disk."""


def user_path(text: str | Path) -> Path:
    """Return a path whose `~` or `~name` at the beginning is replaced by the home folder.

    Raises InputError if there is no such home folder.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        home = Path(text).parts[0]
        raise InputError(
            f"{text}: the home folder {home} is unknown; write the whole path, or ./{home} for a name that begins so"
        ) from None


def check_format(path: Path, version: object, start_over: str) -> None:
    """Raise InputError unless a file has the format that this version reads; `start_over` says how to make it again."""
    if type(version) is not int:  # True is an instance of int.
        problem = "missing" if version is None else f"{version!r:.60}, not a number"
        raise InputError(f"{path}: its format_version is {problem}; {start_over}")
    if version > FORMAT_VERSION:
        raise InputError(
            f"{path}: has format {version}, and this version reads format {FORMAT_VERSION}; use a newer version of "
            "attention-pipeline"
        )
    if version < FORMAT_VERSION:
        raise InputError(
            f"{path}: has format {version}, made by version 0.2 or earlier; {start_over}, or use revision 748e0fa"
        )


def open_regular(path: str | Path) -> FileIO:
    """Open a regular file for reading; opening a named pipe would wait for a writer, and a device may have no end.

    Other files are read only if the path itself names one that is already open, such as /dev/stdin.

    Raises OSError if the file cannot be opened, and InputError if it is not a regular one.
    """
    is_open = str(path).startswith(OPEN_FILES)
    file = FileIO(path, opener=lambda name, flags: os.open(name, flags | (0 if is_open else os.O_NONBLOCK)))
    if is_open or stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise InputError(f"{path}: a pipe or a device, not a file; write what it holds to a file, and name that")


def read_whole(path: Path, most: int = _MOST_BYTES) -> bytes:
    """Return the contents of a file that `open_regular` opens; raise InputError also for more than `most` bytes."""
    with BufferedReader(open_regular(path)) as file:
        contents = file.read(most + 1)
    if len(contents) > most:
        raise InputError(f"{path}: has more than {most // 2**20} MB, too many for a file of its kind; give another")
    return contents


def read_json(path: Path) -> PlainValues | None:
    """Return the JSON object in a file, as `json_object` and `read_whole` do."""
    return json_object(read_whole(path))


def json_object(text: str | bytes) -> PlainValues | None:
    """Parse text as a JSON object; return None if it is anything else."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def misshapen(value: Any, shape: Any, key: str = "") -> str:
    """Return the first key at which a value does not have the types of a shape; empty if there is none.

    Args:
        value: plain values.
        shape: a type or a tuple of types, whose integers are not negative; a list with the shape of all items; or a
            dictionary with the shape at each key, or with the shape of all values at the key `str`.
        key: the dotted key of the value.
    """
    if isinstance(shape, (type, tuple)):
        fits = type(value) in (shape if isinstance(shape, tuple) else (shape,))
        return "" if fits and not (isinstance(value, int) and value < 0) else key
    if not isinstance(value, type(shape)):  # An OrderedDict is a dictionary too.
        return key
    if isinstance(shape, list):
        return next(filter(None, (misshapen(item, shape[0], key) for item in value)), "")
    if (of_all := shape.get(str)) is not None:
        return next(filter(None, (misshapen(item, of_all, f"{key}.{name}") for name, item in value.items())), "")
    parts = (misshapen(value.get(name), inner, f"{key}.{name}".lstrip(".")) for name, inner in shape.items())
    return next(filter(None, parts), "")


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file; at the end flush it to the disk and rename it to `path`.

    A file named `path` is therefore always complete. After an error the temporary file is removed; the error of a full
    disk names `path`. A link at either name is replaced, not followed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        with naming_full_disk(path), temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_to_disk(path.parent)
    except BaseException as error:
        with suppress(OSError):  # The first error is the cause of this one.
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and str(error.filename) == str(temporary):
            error.filename = str(path)
        raise


def open_in_place(path: Path, flags: int) -> int:
    """Open a file of the program's own that is written in place, such as a lock or a log; return the descriptor.

    A link is not followed: another user who can write to the folder could let it point to a file elsewhere. `flags` are
    those of `os.open`.

    Raises OSError as `os.open` does, or if the file is a link, or another kind of file, such as a FIFO.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if not path.is_symlink():
            raise
        raise OSError(error.errno, "is a link, which is not followed", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return descriptor


def is_temporary_file(entry: Path, pattern: str) -> bool:
    """Return whether `atomic_file` left `entry` when it was killed while writing a file whose name fits the pattern."""
    return fnmatchcase(entry.name, f".{pattern}.*.tmp") and re.search(r"\.[0-9]+\.tmp$", entry.name) is not None


def remove_temporary_files(folder: Path, *patterns: str) -> None:
    """Remove temporary files of killed processes whose names fit; no process may be writing such files now."""
    for entry in folder.glob(".*.tmp"):
        if any(is_temporary_file(entry, pattern) for pattern in patterns):
            entry.unlink()


def beside(folder: Path, what: str) -> Path:
    """Return an entry beside a folder that is replaced: its `lock`, or its `partial` or `replaced` version."""
    return folder.with_name(f".{folder.name}.{what}")


@contextmanager
def locked_to_replace(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which need not exist; wait while another process holds it.

    What a killed process has left beside the folder is removed, and a folder that it had moved away is put back.

    Raises OSError if the lock cannot be created, or something cannot be removed.
    """
    path = beside(folder, "lock")
    with FileLock(path) as lock:
        if not lock.take():
            log.info("another process is writing %s; waiting for it", folder)
            lock.take(wait=True)
        try:
            _remove_leftovers(folder)
            yield
        finally:
            path.unlink(missing_ok=True)  # Another user could not lock it.


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `folder` at the end; if the block raises, `folder` stays as it is.

    The caller holds `locked_to_replace`. The new folder is flushed to disk before it is renamed, so that `folder` is
    complete even after a power failure. A process killed between the two renames leaves the previous folder beside it.
    """
    new = beside(folder, "partial")
    try:
        new.mkdir()
        yield new
        for path in (*new.rglob("*"), new):
            sync_to_disk(path)
        if folder.exists():
            folder.rename(beside(folder, "replaced"))
        new.rename(folder)
        sync_to_disk(folder.parent)
    finally:
        try:
            _remove_leftovers(folder)
        except OSError as error:  # The folder is complete, or another error is being raised.
            log.warning("%s: cannot be removed: %s; remove it", error.filename, error.strerror)


def _remove_leftovers(folder: Path) -> None:
    for leftover in (beside(folder, "partial"), beside(folder, "replaced")):
        if leftover.is_symlink():  # made by somebody else; it leads elsewhere
            leftover.unlink()
        elif leftover == beside(folder, "replaced") and leftover.exists() and not folder.exists():
            leftover.rename(folder)
        elif leftover.exists():
            shutil.rmtree(leftover)


def sync_to_disk(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def existing_parent(path: Path) -> Path:
    """Return the path, or the nearest parent that exists."""
    return next(parent for parent in [path, *path.absolute().parents] if parent.exists())


def write_error(folder: Path) -> str | None:
    """Return why no file can be created in a folder, or None."""
    try:
        # os.access is not enough: it allows root everything.
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror


def replace_error(path: Path) -> str | None:
    """Return why a rename could not put a new file or folder in the place of `path`, or None."""
    parent = existing_parent(path.parent)
    if error := write_error(parent):
        return f"{error} ({parent})"
    return pinned(path) if os.path.lexists(path) else None


def pinned(path: Path) -> str | None:
    """Return why an entry of a writable folder can be neither replaced nor removed, or None."""
    if is_mount_point(path):
        return "a mount point cannot be replaced; a folder inside it can"
    folder = path.parent.stat()
    if folder.st_mode & stat.S_ISVTX and os.geteuid() not in (0, folder.st_uid, path.lstat().st_uid):
        return "it belongs to another user"
    return None


def is_mount_point(path: Path) -> bool:
    """Return whether something is mounted at a path, which may be a file or a part of the same file system."""
    try:
        mounts = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:  # not Linux
        return os.path.ismount(path)
    # White space and backslashes in a path are written as octal escapes.
    places = (re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), line.split()[4]) for line in mounts)
    return os.fsencode(path.resolve()) in places


def disk_full_error(error: BaseException) -> OSError | None:
    """Return the error of a full disk, exceeded quota or file size limit that caused an error; None if none did.

    Libraries raise errors of their own in place of the operating system's.
    """
    return next((e for e in exception_chain(error) if isinstance(e, OSError) and e.errno in _DISK_FULL), None)


def private_folder(path: Path) -> Path:
    """Create a folder, unless it exists, and return its path without links.

    Folders above the user's home are not checked: a user who can replace those has access to the whole home.

    Raises OSError if it cannot be written, or if another user could put code into it or replace a folder on its path,
    and RuntimeError without a home.
    """
    path = path.expanduser().absolute()
    for place in reversed([path, *path.parents]):
        if not os.path.lexists(place):
            place.mkdir(mode=0o700, exist_ok=True)  # Another process may do the same.
    trusted = {0, os.geteuid()}
    identities = Path("/proc/self/uid_map")
    if identities.exists() and identities.read_text(encoding="utf-8").split()[-1] != "4294967295":
        # In a container without root's rights, the system's own files belong to an unknown user.
        trusted.add(int(Path("/proc/sys/fs/overflowuid").read_text(encoding="utf-8")))
    home = Path("~").expanduser().resolve() if os.environ.get("HOME") else Path("/")
    folder = path.resolve()
    ways = [folder, *folder.parents, path, *path.parents]  # with and without links
    for place in (one for one in ways if one not in home.parents):
        status = place.lstat()
        if status.st_uid not in (trusted if place != folder else {os.geteuid()}):
            raise PermissionError(f"{place} belongs to another user")
        # In a folder with the sticky bit, such as /tmp, only the owner of an entry can replace it.
        is_safe = stat.S_ISLNK(status.st_mode) or (status.st_mode & stat.S_ISVTX and place != folder)
        if status.st_mode & 0o022 and not is_safe:
            raise PermissionError(f"other users can write to {place}")
    tempfile.TemporaryFile(dir=folder).close()
    return folder


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Name `path` in the error of a full disk."""
    try:
        yield
    except BaseException as error:
        if (full := disk_full_error(error)) is not None:
            full.filename = str(path)
        raise


def exception_chain(error: BaseException | None) -> list[BaseException]:
    """Return an error and the errors that it was raised from."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:  # TensorBoard raises an error from itself.
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


class FileLock(AbstractContextManager["FileLock"]):
    """A lock that one process holds, or that several share; it ends with the process, however that ends.

    The lock belongs to the process that takes it: processes that it forks, such as workers of a data loader, do not
    keep the lock when it dies. Two objects exclude one another in one process too.
    """

    def __init__(self, path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> None:
        """Open the file; `take` locks it. The file may be removed while it is locked, and its folder too.

        With the default flags of `os.open`, both are created if they do not exist. On NFS, only a shared lock needs no
        permission to write.

        Raises OSError if the file cannot be created or opened; see `open_in_place`.
        """
        self._path, self._flags = path, flags
        self._descriptor: int | None = self._open()
        _open_locks.add(self)

    def take(self, *, shared: bool = False, wait: bool = False) -> bool:
        """Lock the file; return whether it is locked now.

        Args:
            shared: exclude only locks that are not shared.
            wait: wait until no other lock excludes this one.

        Raises OSError if the file system has no locks.
        """
        operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        while True:
            assert self._descriptor is not None
            try:
                fcntl.flock(self._descriptor, operation)
            except BlockingIOError:
                return False
            except OSError as error:
                error.filename = str(self._path)
                raise
            # Its previous owner may have removed the file: a lock on a removed file excludes nobody.
            with suppress(FileNotFoundError):
                if os.path.samestat(self._path.stat(), os.fstat(self._descriptor)):
                    return True
            self.close()
            self._descriptor = self._open()

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            with suppress(OSError):  # The file system may have no locks.
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._close_descriptor()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):  # else opening failed
            self.close()

    def _close_descriptor(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        if self._flags & os.O_CREAT:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        return open_in_place(self._path, self._flags)


_open_locks: "weakref.WeakSet[FileLock]" = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_open_locks):
        lock._close_descriptor()


# A forked process has the file open too, and its descriptor would keep the lock of a parent that dies. It closes the
# descriptor without unlocking, which would release the parent's lock.
os.register_at_fork(after_in_child=_close_in_child)
