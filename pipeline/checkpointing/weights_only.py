"""Reads what `torch.save` has written, without executing what is in it, and at the cost of what it holds.

`weights_only` executes nothing either, but by what it allows to be called and to be a key, a file of a few bytes can
take any memory and time. So the pickle is first read here, without PyTorch, and refused if it has more than a list.
"""

import math
import mmap
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Collection
from io import BytesIO
from pathlib import Path
from pickletools import genops
from typing import Any, NamedTuple

import torch

from pipeline.runtime.torch_private import archived_pickle


class _Storage(NamedTuple):
    size: int
    """Elements, not bytes."""


class _Tensor(NamedTuple):
    size: int


class _Parameter(NamedTuple):
    pass


_KINDS = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool", "ComplexFloat")
_GLOBALS: dict[Any, type] = {
    "collections OrderedDict": OrderedDict,
    "torch._utils _rebuild_tensor_v2": _Tensor,
    "torch._utils _rebuild_parameter": _Parameter,
    **{f"torch {kind}Storage": _Storage for kind in _KINDS},
}
"""All that a pickle may name, and what stands for it here."""
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_SCALARS = {*_CONSTANTS, "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING"}
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


def _check(pickle: Any, file_bytes: int) -> Any:
    """Read one pickle as PyTorch does; return its values, with placeholders for tensors.

    Raises exceptions for what is not allowed. What PyTorch does not read either may pass.
    """
    stack: list[Any] = []
    below: list[list[Any]] = []
    memo: dict[Any, Any] = {}
    storages: dict[str, int] = {}
    for opcode, argument, _ in genops(pickle):
        match opcode.name:
            case "PROTO":
                pass
            case name if name in _SCALARS:
                stack.append(_CONSTANTS.get(name, argument))
            case "EMPTY_DICT" | "EMPTY_LIST" as name:
                stack.append({} if name == "EMPTY_DICT" else [])
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "MARK":
                below.append(stack)
                stack = []
            case "TUPLE" | "APPENDS" | "SETITEMS" as name:
                items, stack = stack, below.pop()
                _put(stack, name, items)
            case "TUPLE1" | "TUPLE2" | "TUPLE3" | "APPEND" | "SETITEM" as name:
                count = {"APPEND": 1, "SETITEM": 2}.get(name) or int(name[-1])
                items = stack[-count:]
                del stack[-count:]
                _put(stack, name, items)
            case "GLOBAL":
                stack.append(_GLOBALS[argument])
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_called(function, arguments))
            case "BUILD":
                attributes = stack.pop()
                if type(stack[-1]) is not OrderedDict or attributes.keys() != {"_metadata"}:
                    raise ValueError("attributes other than those of a state dict")
            case "BINPERSID":
                _, kind, key, _, size, *view = stack.pop()
                is_own = kind is _Storage and type(key) is str and type(size) is int and view in ([], [None])
                if not is_own or size < 0 or storages.setdefault(key, size) != size:
                    raise ValueError("a storage that PyTorch has not written")
                stack.append(_Storage(size))
            case "STOP":
                _check_size(stack[-1], file_bytes)
                if sum(storages.values()) > file_bytes:
                    raise ValueError("storages larger than the file")
                return stack[-1]
            case name:
                raise ValueError(name)
    raise ValueError("no end")


def _put(stack: list[Any], name: str, items: list[Any]) -> None:
    """Put items into the dictionary or list on top of a stack, or a tuple of them on it."""
    if name.startswith("TUPLE"):
        stack.append(tuple(items))
    elif name.startswith("APPEND"):
        stack[-1].extend(items)
    elif {*map(type, items[::2])} <= {str, int, float, bool}:
        stack[-1].update(zip(items[::2], items[1::2], strict=True))
    else:
        raise ValueError("a key that is neither text nor a number")


def _called(function: object, arguments: tuple[Any, ...]) -> Any:
    """Return what stands for the result of a call; raise exceptions for calls that PyTorch does not write."""
    if function is OrderedDict and arguments == ():
        return OrderedDict()
    tensor, *rest, needs_gradient, hooks = arguments
    if type(needs_gradient) is not bool or type(hooks) is not OrderedDict or hooks:
        raise ValueError("arguments of no tensor")
    if function is _Parameter and type(tensor) is _Tensor and not rest:
        return tensor
    offset, shape, strides = rest
    numbers = (offset, *shape, *strides)
    is_plain = {*map(type, numbers)} == {int} and min(numbers) >= 0 and len(shape) == len(strides) <= 64
    if function is not _Tensor or type(tensor) is not _Storage or not is_plain:
        raise ValueError("arguments of no tensor")
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if 0 not in shape and last >= tensor.size:
        raise ValueError("a tensor beyond its storage, which PyTorch would enlarge")
    return _Tensor(math.prod(shape))


def _check_size(values: object, file_bytes: int) -> None:
    """Raise ValueError if values are too many or nested too deeply, or if tensors have more elements than the file."""
    todo = [(values, 0)]
    num_values = num_elements = 0
    while todo:
        value, depth = todo.pop()
        items: Collection[object] = ()
        if isinstance(value, _Tensor):
            num_elements += value.size
        elif isinstance(value, (dict, list, tuple)):
            items = value.values() if isinstance(value, dict) else value
        num_values += len(items)
        if num_values > _MAX_VALUES or depth > _MAX_DEPTH or num_elements > 4 * file_bytes:  # Weights may be tied.
            raise ValueError("its values are too many")
        todo += [(item, depth + 1) for item in items]
