"""Writes the parts of docs/ that repeat what the sources say, and the recipes' schema: `python -m tests.docs.generate`.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end of generated -->`; its NAME is a key of
`PARTS`.
"""

import dataclasses
import re
import sys
import types
import typing
from collections.abc import Iterator

from data_module.settings import TextSource
from data_module.system.files import PathText
from pipeline.config.recipe import Recipe
from pipeline.config.recipe_files import description
from pipeline.config.settings import TRAINER_KEYS
from tests.conftest import ROOT
from tests.docs import recipe_schema
from tests.docs.recipe_schema import meanings
from tests.test_structure import LAYERS

_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end of generated -->)", re.DOTALL)
_KINDS = {int: "integer", float: "number", bool: "boolean", str: "text", PathText: "path", types.NoneType: "null"}


def updated(page: str) -> str:
    return _PART.sub(lambda match: f"{match[1]}\n{PARTS[match[2]]().strip()}\n\n{match[3]}", page)


def recipe_keys() -> str:
    """A table for each section of a recipe."""
    hints = typing.get_type_hints(Recipe)
    texts = meanings(Recipe)
    parts = [f"`name` (text, default: the file's name): {texts['name']}"]
    for section in dataclasses.fields(Recipe):
        kind = hints[section.name]
        if not dataclasses.is_dataclass(kind):
            continue
        parts.append(f"### `{section.name}`\n\n{_table(kind, section.name)}")
        if section.name == "corpus":
            parts.append(
                "A text source, an item of `corpus.train`, `corpus.validation` and `corpus.test`:\n\n"
                + _table(TextSource, "")
            )
    return "\n\n".join(parts)


def _table(kind: type, section: str) -> str:
    return "\n".join(["| key | type | default | meaning |", "| --- | --- | --- | --- |", *_rows(kind, section)])


def _rows(kind: type, section: str) -> Iterator[str]:
    """A row for each key; a section's keys in place of its own row."""
    texts, hints = meanings(kind), typing.get_type_hints(kind, include_extras=True)
    for one in dataclasses.fields(kind):
        key, hint = (f"{section}.{one.name}" if section else one.name), hints[one.name]
        if dataclasses.is_dataclass(hint):
            yield from _rows(hint, key)
            continue
        meaning = texts[one.name].replace("|", r"\|")
        kind = _type(hint)
        if one.default is None:  # which says that null is allowed
            kind = kind.removesuffix(" or null")
        yield f"| `{key}` | {kind} | {_default(one)} | {meaning} |"


def _type(hint: object) -> str:
    members = typing.get_args(hint)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(map(_type, members))
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{one}`" for one in members)
    if typing.get_origin(hint) is list:
        kind = "text source" if members[0] is TextSource else _type(members[0])
        return f"list of {kind if '`' in kind else f'{kind}s'}"
    return _KINDS[hint]


def _default(one: "dataclasses.Field[object]") -> str:
    if one.default is dataclasses.MISSING:
        return "required" if one.default_factory is dataclasses.MISSING else "empty"
    if isinstance(one.default, str):
        return f"`{one.default}`"
    if one.default is None or isinstance(one.default, bool):
        return {None: "null", True: "true", False: "false"}[one.default]
    return f"{one.default:g}" if isinstance(one.default, float) else f"{one.default:,}"


def trainer_keys() -> str:
    """The keys of Lightning's Trainer that a recipe may set."""
    return f"Accepted: {', '.join(f'`{name}`' for name in TRAINER_KEYS)}."


def configs() -> str:
    """A row for each recipe, from the first sentence of its comment; those of a folder share a row."""
    rows = ["| file | what it is |", "| --- | --- |"]
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        name = path.relative_to(ROOT)
        rows.append(f"| [`{name}`](../{name}) | {description(path)} |")
    overlays = ", ".join(f"`{path.stem}`" for path in sorted((ROOT / "configs" / "hardware").glob("*.yaml")))
    folders = {"hardware": f"Overlays for devices: {overlays}", "table3": "The rows of the paper's Table 3"}
    rows += [f"| [`configs/{folder}/`](../configs/{folder}) | {what} |" for folder, what in folders.items()]
    return "\n".join(rows)


def layers() -> str:
    rows = ["| package | layers, from the top down |", "| --- | --- |"]
    for package, names in LAYERS.items():
        rows.append(f"| `{package}` | {' > '.join(f'`{name}`' for name in names)} |")
    return "\n".join(rows)


PARTS = {"recipe_keys": recipe_keys, "trainer_keys": trainer_keys, "configs": configs, "layers": layers}


def main() -> int:
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := updated(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))
    if recipe_schema.text() != recipe_schema.FILE.read_text(encoding="utf-8"):
        recipe_schema.FILE.write_text(recipe_schema.text(), encoding="utf-8")
        print(recipe_schema.FILE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
