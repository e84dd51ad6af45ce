"""The project's pages: code blocks, links and anchors."""

import re
from pathlib import Path
from typing import NamedTuple

from tests.conftest import ROOT

PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / ".github").rglob("*.md"),
    ]
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LANGUAGES = {"sh", "python", "yaml", "text", "mermaid"}
_FENCE = re.compile(r"^( *)```(.*?)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!`)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    language: str
    text: str
    line: int


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(text: str) -> list[Block]:
    """The fenced blocks, without the indentation of the list that they are in."""
    found = []
    for match in _FENCE.finditer(text):
        indent, language, body = match.groups()
        lines = "".join(line.removeprefix(indent) for line in body.splitlines(keepends=True))
        found.append(Block(language.strip(), lines, text.count("\n", 0, match.start()) + 1))
    return found


def prose(text: str) -> str:
    return _FENCE.sub("", text)


def links(text: str) -> list[str]:
    """Targets of links and pictures that are not on the web."""
    return [target for target in _LINK.findall(prose(text)) if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """Fragments that GitHub gives to the page's headings."""
    found: dict[str, int] = {}
    slugs = set()
    for heading in re.findall(r"^#+ +(.+?) *#*$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        slugs.add(f"{slug}-{count}" if count else slug)
    return slugs
