"""Reads what `torch.save` has written, without executing what is in it, and at the cost of what it holds.

`weights_only` executes nothing either, but by what it allows to be called and to be a key, a file of a few bytes can
take any memory and time. So the pickle is first read here, without PyTorch, and refused if it has more than a list.
"""

import math
import mmap
import pickle
import warnings
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from pipeline.runtime.torch_private import archived_pickle

_MAX_VALUES, _MAX_DEPTH = 1_000_000, 64
"""Limits on the number of values in a file, those that are in several places counted in each, and on their depth."""


def load_weights_only(path: Path) -> Any:
    """Return the tensors, numbers and text in a file, in dictionaries, lists and tuples.

    Tensors are on the CPU, and memory-mapped if the file is an archive; PyTorch before 1.6 wrote none.

    Raises exceptions of many types for a file that is damaged or holds anything else.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as contents:
        is_archive = contents[:4] == b"PK\3\4"  # as PyTorch decides
        if is_archive:
            with zipfile.ZipFile(file) as archive:
                if any(entry.compress_type for entry in archive.infolist()):
                    raise ValueError("compressed: what is mapped would be no weights")
            _check(BytesIO(archived_pickle(path)), len(contents))
        else:
            # A magic number, a version, sizes of types, the values, and the keys of storages.
            *_, keys = [_check(contents, len(contents)) for _ in range(5)]
            if {*map(type, keys)} - {str}:
                raise ValueError("a key of a storage is not text")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # About files of other kinds, which PyTorch then refuses.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)


def _check(file: Any, file_bytes: int) -> Any:
    """Read one pickle and return its values; raise exceptions for what is not allowed or larger than the file."""
    unpickler = _Unpickler(file, encoding="utf-8")
    unpickler.storages = {}
    values = unpickler.load()
    _take(values, [_MAX_VALUES, 4 * file_bytes], 0)  # Weights may be tied.
    if sum(unpickler.storages.values()) > file_bytes:
        raise ValueError("storages larger than the file")
    return values


def _take(value: Any, room: list[int], depth: int) -> None:
    """Subtract the numbers of values and of elements of tensors from `room`; raise ValueError if it is too small."""
    room[0] -= 1
    room[1] -= value.size if isinstance(value, _Elements) else 0
    if min(room) < 0 or depth > _MAX_DEPTH:
        raise ValueError("its values are too many")
    for item in value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else ():
        _take(item, room, depth + 1)


class _Elements(NamedTuple):
    """Stands for a storage or a tensor. PyTorch itself refuses one in place of the other."""

    size: int


class _Dict(dict[Any, Any]):
    def __setitem__(self, key: object, value: object) -> None:
        if type(key) not in (str, int, float, bool):
            raise ValueError("a key that is neither text nor a number")
        super().__setitem__(key, value)


def _tensor(storage: _Elements, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *rest: Any) -> _Elements:
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if min((offset, *shape, *strides)) < 0 or len(shape) > 64 or (0 not in shape and last >= storage.size):
        raise ValueError("a tensor beyond its storage, which PyTorch would enlarge")
    return _parameter(_Elements(math.prod(shape)), *rest)


def _parameter(tensor: Any, needs_gradient: bool, hooks: Any) -> _Elements:
    if type(tensor) is not _Elements or hooks != {}:
        raise ValueError("arguments of no tensor")
    return tensor


_TYPES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool", "ComplexFloat")
_GLOBALS: dict[str, Any] = {
    "collections OrderedDict": lambda: _Dict(),  # without arguments
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch._utils _rebuild_parameter": _parameter,
    **{f"torch {name}Storage": _Elements for name in _TYPES},
}
"""All that a pickle may name, and what stands for it here."""
_OPCODES = """PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINSTRING
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS SETITEM SETITEMS BINPUT LONG_BINPUT BINGET
    LONG_BINGET GLOBAL REDUCE BINPERSID"""


class _Unpickler(pickle._Unpickler):
    """Python's unpickler, of which PyTorch's is a copy with fewer opcodes. What PyTorch does not read may pass."""

    stack: list[Any]
    storages: dict[str, int]
    dispatch: ClassVar[dict[int, Any]] = {
        code: pickle._Unpickler.dispatch[code] for [code] in (getattr(pickle, name) for name in _OPCODES.split())
    }

    def find_class(self, module: str, name: str) -> Any:
        return _GLOBALS[f"{module} {name}"]

    def persistent_load(self, pid: Any) -> _Elements:
        _, kind, key, _, size, *view = pid
        is_own = kind is _Elements and type(key) is str and type(size) is int and view in ([], [None])
        if not is_own or size < 0 or self.storages.setdefault(key, size) != size:
            raise ValueError("a storage that PyTorch has not written")
        return _Elements(size)

    def load_empty_dictionary(self) -> None:
        self.stack.append(_Dict())

    def load_build(self) -> None:
        attributes = self.stack.pop()
        if type(self.stack[-1]) is not _Dict or attributes.keys() != {"_metadata"}:
            raise ValueError("attributes other than those of a state dict")

    dispatch |= {pickle.EMPTY_DICT[0]: load_empty_dictionary, pickle.BUILD[0]: load_build}
