"""Recipe files: reading them, with file and line of each key, and the recipes that come with the program.

Shipped recipes are in `configs/` of a clone, and in `pipeline/recipes/` where a wheel is installed.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from data_module.errors import PROGRAM, InputError
from data_module.registry import did_you_mean
from data_module.settings import keys_of_other_places
from data_module.system.files import PlainValues, atomic_file, read_whole, user_path
from data_module.system.outputs import check_outputs, followed

_TEXTS = ("corpus.train", "corpus.validation", "corpus.test")
SCHEMA = "recipe.schema.json"
MODELINE = "# yaml-language-server: $schema="
"""Beginning of a recipe's first line; the path of the schema, relative to the recipe, follows."""


def read_extended(path: Path, places: dict[str, str], seen: tuple[Path, ...] = ()) -> PlainValues:
    """Return a file's values, merged into those of the file that it extends."""
    own_places: dict[str, str] = {}
    own = _read(path, own_places)
    return extended(own, own_places, path, places, seen)


def extended(
    own: PlainValues, own_places: dict[str, str], path: Path, places: dict[str, str], seen: tuple[Path, ...]
) -> PlainValues:
    """Return the values `own` of the file `path`, merged into those of the file that it extends."""
    base = own.pop("extends", None)
    if base is None:
        places |= own_places
        return own
    place = own_places.pop("extends", str(path))
    if not isinstance(base, str):
        raise InputError(f"{place}: extends must name one recipe, relative to this one's folder")
    extended = path.parent / user_path(base)
    try:
        is_there = extended.is_file()
    except OSError:  # such as a name that is too long
        is_there = False
    if not is_there:
        raise InputError(f"{place}: extends {base}, which does not exist; name a recipe relative to {path.parent}")
    if path.resolve() in seen:
        raise InputError(f"{place}: extends {base}, which extends this one; remove one of the two")
    values = read_extended(extended, places, (*seen, path.resolve()))
    places |= own_places
    merge(values, own)
    return values


def _read(path: Path, places: dict[str, str]) -> PlainValues:
    """Return a YAML mapping; `places` receives file and line of each dotted key."""
    try:
        text = "" if path == Path(os.devnull) else read_whole(path, MOST_BYTES).decode()
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such recipe; `{PROGRAM} recipe list` lists the shipped ones") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a recipe ({error}); give a YAML file") from None
    try:
        node = compose(text)
        values = plain_copy(yaml.load(text, RecipeLoader))
        if values is None:
            return {}
        if not isinstance(values, dict):
            raise InputError(
                f"{path}:1: a recipe must be a mapping of sections; `{PROGRAM} recipe list` lists examples"
            )
        _note_places(node, path, "", places)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        is_text = re.search(r"'[^\\]+' that cannot start any token|chomping or indentation", str(error.problem))
        way_out = "put the text that begins with it in quotes" if is_text else "correct that line"
        raise InputError(f"{path}:{line}: not valid YAML: {error.problem}; {way_out}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InputError(f"{path}:{line}: not valid YAML: character {error.character:#x}; remove it") from None
    except RecursionError:
        raise InputError(f"{path}: values are nested too deeply, or one contains itself; write them out") from None
    return values


MOST_BYTES = 2**22
"""Limit on the size of a YAML file."""
MAX_VALUES = 100_000
"""Limit on the values of a YAML file, including those that aliases repeat."""
INVALID_SCALAR = (ValueError, LookupError, AttributeError, ArithmeticError)
"""What PyYAML raises for a scalar that does not fit its tag, such as `!!int ""`."""
_LONGEST_NUMBER = 1_000
"""Limit on the characters of a number. The time of reading 1:1:1:..., digits of base 60, grows with their square."""
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def compose(text: str) -> yaml.Node | None:
    """Return the root node of a YAML text.

    Raises YAMLError if aliases make more than `MAX_VALUES` values of it, or a number is too long.
    """
    root = yaml.compose(text, yaml.SafeLoader)
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if node.tag in _NUMBERS and len(node.value) > _LONGEST_NUMBER:
            problem = f"a number has more than {_LONGEST_NUMBER:,} characters"
            raise yaml.composer.ComposerError(problem=problem, problem_mark=node.start_mark)
        if id(node) not in sizes:
            inner = [] if isinstance(node.value, str) else node.value
            sizes[id(node)] = 1 + sum(map(size, chain(*inner) if isinstance(node, yaml.MappingNode) else inner))
        return sizes[id(node)]

    if root is not None and size(root) > MAX_VALUES:
        problem = f"with its aliases it has more than {MAX_VALUES:,} values"
        raise yaml.composer.ComposerError(problem=problem, problem_mark=root.start_mark)
    return root


def plain_copy(value: object) -> Any:
    """Return a copy with types of YAML only: paths as text, tuples as lists.

    No part of it is shared: a value that a YAML alias repeats in two places may then change in one of them.
    """
    if isinstance(value, Mapping):
        return {key: plain_copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_copy(item) for item in value]
    return str(value) if isinstance(value, Path) else value


class RecipeLoader(yaml.SafeLoader):
    """Keeps as text what YAML would change: dates, and numbers such as 010, 1.50, 0x1F, 12:30 and 2024_01_15.

    A key that takes text then gets what was written, and a key that takes a number converts the text.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":value"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node; report the line of a scalar that is invalid."""
        try:
            return super().construct_object(node, deep)
        except INVALID_SCALAR as error:
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                problem=f"'{node.value:.100}' is not a valid {kind}", problem_mark=node.start_mark
            ) from error


def _number_or_text(loader: RecipeLoader, node: yaml.ScalarNode) -> object:
    value = yaml.SafeLoader.yaml_constructors[node.tag](loader, node)
    return value if str(value) == node.value else node.value


def _text(loader: RecipeLoader, node: yaml.ScalarNode) -> str:
    return node.value


for _tag in _NUMBERS:
    RecipeLoader.add_constructor(_tag, _number_or_text)
RecipeLoader.add_constructor("tag:yaml.org,2002:merge", _text)  # `<<` that is not a key


def _note_places(node: yaml.Node | None, path: Path, prefix: str, places: dict[str, str]) -> None:
    if isinstance(node, yaml.MappingNode):
        counts = Counter(key.value for key, _ in node.value)
        for key, value in node.value:
            dotted = f"{prefix}{key.value}"
            if counts[key.value] > 1:
                raise InputError(f"{path}:{key.start_mark.line + 1}: {dotted} is given twice; remove one of them")
            places[dotted] = f"{path}:{key.start_mark.line + 1}"
            _note_places(value, path, dotted + ".", places)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:  # List items share one place: their keys have no number.
            _note_places(item, path, prefix, places)


def merge(into: PlainValues, values: PlainValues, section: str = "") -> None:
    """Overwrite values of `into` by `values`; mappings are merged.

    A text source loses its place if `values` has one of another kind, such as `tsv` for `source` and `target`.
    """
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            if f"{section}{key}" in _TEXTS:
                for other in keys_of_other_places(value):
                    into[key].pop(other, None)
            merge(into[key], value, f"{section}{key}.")
        else:
            into[key] = value


def shipped_folder() -> Path:
    """Return the folder of the recipes and their schema."""
    package = Path(__file__).resolve().parent.parent
    packaged = package / "recipes"
    return packaged if packaged.is_dir() else package.parent / "configs"


def shipped_recipes() -> dict[str, Path]:
    """Return recipes and overlays by name, such as `demo` and `hardware/one_gpu`; subfolders come last."""
    folder = shipped_folder()
    paths = sorted(folder.rglob("*.yaml"), key=lambda path: (len(path.parts), str(path)))
    return {str(path.relative_to(folder).with_suffix("")): path for path in paths}


def description(path: Path) -> str:
    """Return the first sentence of the comment at the top of a recipe, up to the first command line in it."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#") or line.startswith("#   "):
            break
        if not line.startswith(MODELINE):
            lines.append(line.removeprefix("#").strip())
    return re.sub(r":? fit --config.*", "", first_sentence("\n".join(lines)))


def first_sentence(text: str) -> str:
    """Return a text up to the first full stop that ends a sentence, or the first blank line."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<!et al)(?<!\.\.)\.(?= |$)", paragraph)[0].removesuffix(":")


def copy_recipe(name: str, to: Path | None) -> list[Path]:
    """Copy a shipped recipe, with the recipes that it extends and the schema beside it.

    Args:
        name: one of `shipped_recipes`.
        to: the file to write, or a folder if the name does not end in .yaml; None for a file of the recipe's name in
            the working folder. Folders are created.

    Returns:
        The files written, the recipe first. A recipe that it extends is left out if it already exists.

    Raises InputError if there is no such recipe, or a file would be overwritten.
    """
    recipes = shipped_recipes()
    if name not in recipes:
        way_out = did_you_mean(name, recipes, f"`{PROGRAM} recipe list` lists them")
        raise InputError(f"'{name}' is not a shipped recipe; {way_out}")
    path = recipes[name]
    to = Path() if to is None else to
    target = to if to.is_file() or (to.suffix in (".yaml", ".yml") and not to.is_dir()) else to / path.name
    if target.exists():
        raise InputError(f"{target}: exists already; give another file, as in: {PROGRAM} recipe copy {name} FILE")
    texts = _with_bases(path, target)
    for copy, text in texts.items():
        if copy.exists() and read_whole(copy) != text.encode():
            raise InputError(f"{copy}: {name} extends it, and it is not the shipped one; copy to another folder")
    written = [copy for copy in texts if not copy.exists()]
    check_outputs([("file", copy) for copy in (*written, target.parent / SCHEMA)], ())
    for copy in written:
        with atomic_file(followed(copy) if copy == target else copy) as file:
            file.write(texts[copy].encode())
    # The schema is replaced: it is generated, and the newest one fits all recipes.
    with atomic_file(target.parent / SCHEMA) as file:
        file.write((shipped_folder() / SCHEMA).read_bytes())
    return [*written, target.parent / SCHEMA]


def _with_bases(path: Path, target: Path) -> dict[Path, str]:
    """Return the texts of the copies, in one folder, of a recipe and of the recipes that it extends."""
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
