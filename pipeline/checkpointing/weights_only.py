"""Reads what `torch.save` has written, without executing what is in it.

`weights_only` executes nothing either, but a few bytes that it allows can call what takes any memory, or have a key
that takes any time. So the pickle is first read here, without PyTorch: what it names has to be on a list, and its keys
have to be text or numbers.
"""

import pickle
import warnings
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import torch

from pipeline.runtime.torch_private import archived_pickle


def load_weights_only(path: Path) -> Any:
    """Return the tensors, numbers and text in a file, in dictionaries, lists and tuples.

    Tensors are on the CPU, and memory-mapped if the file is an archive; PyTorch before 1.6 wrote none.

    Raises exceptions of many types for a file that is damaged or holds anything else.
    """
    with path.open("rb") as file:
        is_archive = file.read(4) == b"PK\3\4"  # as PyTorch decides
        file.seek(0)
        if is_archive:
            with zipfile.ZipFile(file) as archive:
                if any(entry.compress_type for entry in archive.infolist()):
                    raise ValueError("compressed: what is mapped would be no weights")
            _Unpickler(BytesIO(archived_pickle(path)), encoding="utf-8").load()
        else:
            # A magic number, a version, sizes of types, the values, and the keys of storages.
            *_, keys = [_Unpickler(file, encoding="utf-8").load() for _ in range(5)]
            if {*map(type, keys)} - {str}:
                raise ValueError("a key of a storage is not text")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # About files of other kinds, which PyTorch then refuses.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)


class _Dict(dict[Any, Any]):
    def __setitem__(self, key: object, value: object) -> None:
        if type(key) not in (str, int, float, bool):
            raise ValueError("a key that is neither text nor a number")
        super().__setitem__(key, value)


_TYPES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool", "ComplexFloat")
_GLOBALS: dict[str, Any] = {
    "collections OrderedDict": lambda: _Dict(),  # without arguments
    "torch._utils _rebuild_tensor_v2": lambda *_: None,
    "torch._utils _rebuild_parameter": lambda *_: None,
    **dict.fromkeys([f"torch {name}Storage" for name in _TYPES]),
}
"""All that a pickle may name, and what stands for it here."""
_OPCODES = """PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINSTRING
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS SETITEM SETITEMS BINPUT LONG_BINPUT BINGET
    LONG_BINGET GLOBAL REDUCE BINPERSID"""


class _Unpickler(pickle._Unpickler):
    """Python's unpickler, of which PyTorch's is a copy with fewer opcodes. What PyTorch does not read may pass."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = {
        code: pickle._Unpickler.dispatch[code] for [code] in (getattr(pickle, name) for name in _OPCODES.split())
    }

    def find_class(self, module: str, name: str) -> Any:
        return _GLOBALS[f"{module} {name}"]

    def persistent_load(self, pid: Any) -> None:
        if tuple in map(type, pid):  # PyTorch takes parts of it as keys.
            raise ValueError("a storage that PyTorch has not written")

    def load_empty_dictionary(self) -> None:
        self.stack.append(_Dict())

    def load_build(self) -> None:
        attributes = self.stack.pop()
        if type(self.stack[-1]) is not _Dict or attributes.keys() != {"_metadata"}:
            raise ValueError("attributes other than those of a state dict")

    dispatch |= {pickle.EMPTY_DICT[0]: load_empty_dictionary, pickle.BUILD[0]: load_build}
