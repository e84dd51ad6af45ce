"""Checks plain values against typed settings; a mistake names its file and line and the nearest valid key."""

import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType
from typing import Any

from data_module.errors import InputError, printable
from data_module.registry import did_you_mean
from data_module.system.files import PathText, PlainValues, user_path

Signature = dict[str, object]
"""The keys of a section that has no dataclass, and their type annotations."""


def annotation(key: str, kind: type, sections: Mapping[str, Signature]) -> object:
    """Return the type annotation of a key of `kind`, such as `corpus.train.source`; Any if there is no such key."""
    section, _, rest = key.partition(".")
    if section in sections:
        return sections[section].get(rest, Any)
    reached: object = kind
    for name in key.split("."):
        if typing.get_origin(reached) is list:
            reached = typing.get_args(reached)[0]
        reached = typing.get_type_hints(reached).get(name, Any) if is_dataclass(reached) else Any
    return reached


def place_of(key: str, places: Mapping[str, str]) -> str | None:
    """Return file and line of a key, or of the innermost section around it that was read; None if none was."""
    while key not in places and "." in key:
        key = key.rpartition(".")[0]  # The place of `--corpus.train {...}` is that of all keys inside.
    return places.get(key)


def place_in(message: str, places: Mapping[str, str], section: str) -> str | None:
    """Return the place of the first key in a message that was read, or else the place of a section.

    A message about two keys may begin with one that was not given.
    """
    keys = re.findall(r"\w+(?:\.\w+)+", message)
    return next((places[key] for key in keys if key in places), place_of(section, places))


class Checker:
    """Converts plain values to typed ones and collects the mistakes."""

    def __init__(self, places: dict[str, str], refused: dict[str, str] | None = None, knows_all: bool = True) -> None:
        """`places` maps keys to file and line; `refused` maps keys that may not be given to what to do instead.

        Without `knows_all`, unknown keys are left out.
        """
        self._places = places
        self._refused = refused or {}
        self._knows_all = knows_all
        self.mistakes: list[str] = []

    def _wrong(self, key: str, message: str) -> None:
        place = place_of(key, self._places)
        self.mistakes.append(f"{place}: {message}" if place else message)

    def dataclass(self, values: object, kind: type, prefix: str) -> Any:
        """Return an instance of the dataclass; on a mistake, add it to `mistakes` and return None."""
        if not isinstance(values, dict):
            name = prefix.rstrip(".")
            self._wrong(name, f"{name or 'the recipe'} must be a mapping, not {_value_name(values)}")
            return None
        before = len(self.mistakes)
        hints = typing.get_type_hints(kind, include_extras=True)
        known = {f.name: f for f in fields(kind)}
        self._unknown(values, known, prefix)
        arguments = {}
        for name, setting in known.items():
            if name in values:
                arguments[name] = self.value(values[name], hints[name], prefix + name)
            elif setting.default is MISSING and setting.default_factory is MISSING:
                self._wrong(prefix.rstrip("."), f"{prefix}{name} is missing; add it")
        if len(self.mistakes) > before:
            return None
        try:
            return kind(**arguments)
        except ValueError as error:
            place = place_in(str(error), self._places, prefix.rstrip("."))
            self.mistakes.append(f"{place}: {error}" if place else str(error))
            return None

    def signature(self, values: PlainValues, signature: Signature, prefix: str) -> None:
        """Check keys and types of a section that has no dataclass; replace its values by typed ones."""
        self._unknown(values, signature, prefix + ".")
        for key in values.keys() & signature.keys():
            values[key] = self.value(values[key], signature[key], f"{prefix}.{key}")

    def _unknown(self, values: PlainValues, known: Iterable[str], prefix: str) -> None:
        known = list(known)
        for name in values:
            if name not in known and self._knows_all:
                key = f"{prefix}{name}"
                if (instead := self._refused.get(key)) is not None:
                    self._wrong(key, f"{key} may not be set; {instead}")
                else:
                    way_out = did_you_mean(str(name), known, f"the keys are: {', '.join(known)}", prefix)
                    self._wrong(key, f"{key} is not a key; {way_out}")

    def value(self, value: object, kind: object, key: str) -> Any:
        """Return the value converted to the annotation; on a mistake, add it to `mistakes` and return None."""
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if kind is Any or (isinstance(kind, type) and kind is type(value) and kind is not str):
            return value
        if origin in (typing.Union, types.UnionType):
            return self._union(value, arguments, key)
        if origin is typing.Literal:
            if value in arguments:
                return value
        elif isinstance(kind, type) and is_dataclass(kind):
            return self.dataclass(value, kind, key + ".")
        elif origin is list:
            items = value if isinstance(value, list) else [value]
            return [self.value(item, arguments[0], key) for item in items]
        elif origin is dict or kind is dict:
            if isinstance(value, dict):
                return value
        else:
            parse = _SCALARS.get(kind)
            if parse is not None:
                try:
                    return parse(value)
                except (TypeError, ValueError, OverflowError):
                    pass
                except InputError as error:
                    self._wrong(key, f"{key}: {error}")
                    return None
        # YAML reads the languages' names no and on as false and true, and the placeholder {x} as a mapping.
        quoted = "; put it in quotes" if kind in (str, PathText) and not isinstance(value, (str, NoneType)) else ""
        self._wrong(key, f"{key} must be {_kind_name(kind)}, not {_value_name(value)}{quoted}")
        return None

    def _union(self, value: object, kinds: tuple[object, ...], key: str) -> Any:
        if value is None and type(None) in kinds:
            return None
        if type(value) in kinds:
            return self.value(value, type(value), key)
        kinds = tuple(kind for kind in kinds if kind is not type(None))
        if len(kinds) == 1:
            return self.value(value, kinds[0], key)
        for kind in kinds:
            attempt = Checker(self._places, self._refused, self._knows_all)
            converted = attempt.value(value, kind, key)
            if not attempt.mistakes:
                return converted
        self._wrong(key, f"{key} must be {' or '.join(_kind_name(k) for k in kinds)}, not {_value_name(value)}")
        return None


def _parse_int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, str):
        with suppress(ValueError):
            return int(value)  # float would round a long one
    number = float(value)
    if number != int(number):
        raise ValueError
    return int(number)


_NOT_FINITE = {".inf": "inf", "-.inf": "-inf", ".nan": "nan"}
"""Numbers that are not finite: YAML's spelling -> Python's."""


def _parse_float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(_NOT_FINITE.get(value, value))


def _parse_str(value: object, errors: str = "strict") -> str:
    if not isinstance(value, (str, int, float)) or isinstance(value, bool):
        raise TypeError
    text = str(value)
    text.encode(errors=errors)  # Half of a surrogate pair is no character.
    return text


def _parse_path(value: object) -> str:
    text = _parse_str(value, "surrogateescape")  # The bytes of a file's name need not be UTF-8.
    if printable(text) != text or "\t" in text:  # Job scripts and logs have one path per line.
        raise InputError(f"{text!r} has control characters; give it a name without them")
    return str(user_path(text)) if text.startswith("~") else text


_SCALARS: dict[object, Callable[[Any], Any]] = {
    int: _parse_int,
    float: _parse_float,
    str: _parse_str,
    PathText: _parse_path,
}


def _value_name(value: object) -> str:
    if isinstance(value, dict):
        return "a mapping"
    return "nothing" if value is None else repr(value)


def _kind_name(kind: object) -> str:
    names: dict[object, str] = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        dict: "a mapping",
    }
    if kind == PathText:
        return "text"
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(kind)))
    if typing.get_origin(kind) is list:
        return "a list"
    return names.get(typing.get_origin(kind) or kind, getattr(kind, "__name__", str(kind)))
