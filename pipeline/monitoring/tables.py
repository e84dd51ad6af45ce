"""Markdown that shows text as it is, whatever stands in it."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

LONGEST_CELL = 600
_MARKUP = re.compile(r"[|*_`\[\]\\~#!{}()<>&\n\r]")


def table(header: list[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table."""
    lines = [" | ".join(header), " | ".join("---" for _ in header)]
    lines += [" | ".join(cell(str(value)) for value in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def cell(text: str) -> str:
    """Text as it is; what is very long is cut."""
    cut = text if len(text) <= LONGEST_CELL else text[:LONGEST_CELL] + " …"
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", cut)


def facts(values: Mapping[str, Any]) -> str:
    """Names and values, a line each."""
    return table(["what", "value"], values.items())


def code(text: str) -> str:
    """A block of text as it is, with its white space."""
    return "\n".join(f"    {line}" for line in text.splitlines())
