"""The recipes that come with the program.

They are in `configs/` of a clone, and in `pipeline/recipes/` where a wheel is installed.
"""

import difflib
import re
from pathlib import Path

from data_module.errors import PROGRAM, InputError

SCHEMA = "recipe.schema.json"
MODELINE = "# yaml-language-server: $schema="
"""What a recipe's first line begins with; the path of the schema, relative to the recipe, follows."""


def shipped_folder() -> Path:
    """Return the folder of the recipes and their schema."""
    package = Path(__file__).resolve().parent.parent
    packaged = package / "recipes"
    return packaged if packaged.is_dir() else package.parent / "configs"


def shipped_recipes() -> dict[str, Path]:
    """Return recipes and overlays by name, such as `demo` and `hardware/one_gpu`; those of subfolders come last."""
    folder = shipped_folder()
    paths = sorted(folder.rglob("*.yaml"), key=lambda path: (len(path.parts), str(path)))
    return {str(path.relative_to(folder).with_suffix("")): path for path in paths}


def description(path: Path) -> str:
    """Return the first sentence of a recipe's comment."""
    return re.sub(r":? fit --config.*", "", first_sentence(leading_comment(path)))


def leading_comment(path: Path) -> str:
    """Return the comment at the top of a recipe or script, up to the first command line in it."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#") or line.startswith("#   "):
            break
        if not line.startswith(("#!", MODELINE)):
            lines.append(line.removeprefix("#").strip())
    return "\n".join(lines)


def first_sentence(text: str) -> str:
    """Return a text up to the first full stop that ends a sentence, or the first blank line."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<!et al)(?<!\.\.)\.(?= |$)", paragraph)[0].removesuffix(":")


def copy_recipe(name: str, to: Path | None) -> list[Path]:
    """Copy a shipped recipe, with the recipes that it extends and the schema beside it.

    Args:
        name: one of `shipped_recipes`.
        to: the file to write, or a folder; None for a file of the recipe's name in the working folder.

    Returns:
        The files written, the recipe first. A recipe that it extends is left out if it is there already.

    Raises:
        InputError: there is no such recipe, or a file would be overwritten.
    """
    recipes = shipped_recipes()
    if name not in recipes:
        near = difflib.get_close_matches(name, recipes, n=1, cutoff=0.5)
        way_out = f"did you mean {near[0]}?" if near else f"`{PROGRAM} recipe list` lists them"
        raise InputError(f"'{name}' is not a shipped recipe; {way_out}")
    path = recipes[name]
    target = Path(path.name) if to is None else to / path.name if to.is_dir() else to
    if target.exists():
        raise InputError(f"{target}: exists already; give another file, as in: {PROGRAM} recipe copy {name} FILE")
    texts = _with_bases(path, target)
    for copy, text in texts.items():
        if copy.exists() and copy.read_text(encoding="utf-8") != text:
            raise InputError(f"{copy}: {name} extends it, and it is not the shipped one; copy to another folder")
    written = [copy for copy in texts if not copy.exists()]
    for copy in written:
        copy.write_text(texts[copy], encoding="utf-8")
    # It is generated, and the newest version suits all recipes.
    (target.parent / SCHEMA).write_bytes((shipped_folder() / SCHEMA).read_bytes())
    return [*written, target.parent / SCHEMA]


def _with_bases(path: Path, target: Path) -> dict[Path, str]:
    """Return the texts of copies of a recipe and of those that it extends, which stand beside it."""
    texts: dict[Path, str] = {}
    while True:
        if target in texts:
            raise InputError(f"{target}: the recipe extends one of that name; give another file")
        text = re.sub(rf"^{re.escape(MODELINE)}.*", f"{MODELINE}{SCHEMA}", path.read_text(encoding="utf-8"))
        base = re.search(r"^extends: (\S+)", text, re.MULTILINE)
        if base is None:
            texts[target] = text
            return texts
        path = path.parent / base[1]
        texts[target] = text[: base.start(1)] + path.name + text[base.end(1) :]
        target = target.parent / path.name
