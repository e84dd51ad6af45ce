"""Markdown for TensorBoard's Text tab. Text is escaped, so that it is shown literally."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

MAX_CELL_CHARACTERS = 600
_MARKUP = re.compile(r"[|*_`\[\]\\~#!{}()<>&\n\r]")


def table(header: list[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a Markdown table."""
    lines = [" | ".join(header), " | ".join("---" for _ in header)]
    lines += [" | ".join(escape_cell(str(value)) for value in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def escape_cell(text: str) -> str:
    """Escape a cell's text, and shorten it to `MAX_CELL_CHARACTERS`."""
    shortened = text if len(text) <= MAX_CELL_CHARACTERS else text[:MAX_CELL_CHARACTERS] + " …"
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", shortened)


def key_value_table(values: Mapping[str, Any]) -> str:
    """Return a table with a row per key."""
    return table(["name", "value"], values.items())


def code_block(text: str) -> str:
    """Return preformatted text."""
    return "\n".join(f"    {line}" for line in text.splitlines())
