"""Recipes: YAML files and command-line overrides, checked against typed settings."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import yaml

from data_module.errors import PROGRAM, InputError
from data_module.files import user_path
from data_module.settings import BatchSettings, CorpusSettings
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from pipeline.config.schema import Checker, Signature, annotation, place_of, takes_text
from pipeline.config.settings import MonitoringSettings, RunSettings
from pipeline.config.trainer_keys import RESERVED_KEYS


@dataclass(frozen=True)
class Recipe:
    """All settings of a run. `trainer` holds arguments of Lightning's Trainer."""

    name: str
    """Names the run and its default folder."""
    corpus: CorpusSettings
    batches: BatchSettings = field(default_factory=BatchSettings)
    network: NetworkSettings = field(default_factory=NetworkSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    decoding: DecodingSettings = field(default_factory=DecodingSettings)
    run: RunSettings = field(default_factory=RunSettings)
    monitoring: MonitoringSettings = field(default_factory=MonitoringSettings)
    trainer: dict[str, Any] = field(default_factory=dict)
    places: ClassVar[Mapping[str, str]] = {}
    """File and line of each key that was read; of a recipe that `load_recipe` has returned."""

    def run_folder(self) -> Path:
        """Return the folder that `fit` writes to: `run.folder`, or `runs/<name>`."""
        return Path(self.run.folder) if self.run.folder else Path("runs") / self.name

    def corpus_folder(self) -> Path:
        """Return the folder of the prepared corpus."""
        return Path(self.corpus.folder)

    def inherit_network(self, network: Mapping[str, Any]) -> "Recipe":
        """Return the recipe with the settings that a network has brought along from another program.

        Such a network has an output bias. A recipe need not repeat that, nor the activation.

        Args:
            network: the network's settings.
        """
        if not network.get("output_bias"):
            return self
        own = self.network.activation
        activation = network["activation"] if own == NetworkSettings.activation else own
        return replace(self, network=replace(self.network, output_bias=True, activation=activation))

    @contextmanager
    def naming_places(self) -> Iterator[None]:
        """Put file and line before the message of an InputError that begins with a key."""
        try:
            yield
        except InputError as error:
            message = str(error)
            key = message.partition(" ")[0].rstrip(":,")
            place = place_of(key, self.places) if re.fullmatch(r"\w+(\.\w+)+", key) else None
            error.args = (f"{place}: {message}" if place else message,)
            raise

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as they are written to YAML and to checkpoints."""
        return asdict(self)


def load_recipe(
    paths: Iterable[Path], overrides: Iterable[str] = (), trainer_signature: Signature | None = None
) -> Recipe:
    """Read, merge and check a recipe.

    A recipe may extend another one with `extends: FILE`, relative to its own folder, and then contains what differs. It
    is named after its first file with a `corpus:` section.

    Args:
        paths: a recipe and its overlays. Later files take precedence; mappings are merged, lists replaced.
        overrides: `--section.key value` or `--section.key=value`, split into words as on the command line.
        trainer_signature: the keys that `trainer:` may have; not checked if None (for commands that do not train).

    Raises InputError that names all unknown keys and wrong types, and of each section the first value out of range.
    """
    paths = list(paths)
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    names = [path.stem for path in paths]
    for path in paths:
        contents = _read_extended(path, places)
        if "corpus" not in contents and len(names) > 1:
            names.remove(path.stem)  # An overlay, which may come before the recipe.
        _merge(values, contents)
    mistakes = _override(values, places, list(overrides), trainer_signature or {})
    values.setdefault("name", names[0])
    places[""] = str(paths[0])
    return _checked(values, places, trainer_signature, mistakes)


def recipe_from_dict(recipe: Mapping[str, Any], trainer_signature: Signature | None = None) -> Recipe:
    """Check a recipe that is given as a dictionary with the keys of a recipe file, and leave the dictionary as it is.

    Paths may be `Path`s. `extends` names a file relative to the current folder.

    Args:
        recipe: the recipe.
        trainer_signature: as for `load_recipe`.

    Raises InputError as `load_recipe` does.
    """
    if not isinstance(recipe, Mapping):
        raise InputError(
            f"a recipe is a dictionary, not {recipe!r}; for a file, give a dictionary with the keys name and extends"
        )
    places = {"": "the recipe"}
    try:
        values = _plain(recipe)
    except RecursionError:
        raise InputError("the recipe: values are nested too deeply, or one contains itself; write them out") from None
    # Named as a file of the current folder would be.
    values = _extended(values, {}, Path("the recipe"), places, ())
    return _checked(values, places, trainer_signature, [])


def _plain(value: Any) -> Any:
    """Return a copy that has only what YAML has: paths as text, tuples as lists."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _checked(
    values: dict[str, Any], places: dict[str, str], trainer_signature: Signature | None, mistakes: list[str]
) -> Recipe:
    """Return the recipe; raise InputError that names `mistakes` and all that are found."""
    refused = {f"trainer.{key}": why or "the pipeline sets it" for key, why in RESERVED_KEYS.items()}
    check = Checker(places, refused | REMOVED_KEYS)
    recipe = check.dataclass(values, Recipe, "")
    check.mistakes += _unregistered_names(values, places)
    if trainer_signature is not None and isinstance(values.get("trainer"), dict):
        check.signature(values["trainer"], trainer_signature, "trainer")
    mistakes += check.mistakes
    if mistakes:
        many = f"{len(mistakes)} mistakes: " if len(mistakes) > 1 else ""
        raise InputError(many + "; ".join(mistakes))
    assert isinstance(recipe, Recipe)
    object.__setattr__(recipe, "places", dict(places))
    return recipe


REMOVED_KEYS = {
    "batches.group_tokens": "batches are no longer divided into groups; remove the key",
    "training.share_casings": "casings no longer share embeddings; remove the key",
}
"""Keys of earlier revisions, each with what to do."""
_REGISTRY_KEYS = {
    "network.norm": NetworkSettings.norm,
    "network.activation": NetworkSettings.activation,
    "training.schedule": TrainingSettings.schedule,
    "training.optimizer": TrainingSettings.optimizer,
}
"""Keys that hold a registered name, and their defaults."""


def _unregistered_names(values: dict[str, Any], places: dict[str, str]) -> list[str]:
    """Return a mistake for each name that is not registered, such as that of a norm."""
    names = {}
    for key in _REGISTRY_KEYS:
        section, _, name = key.partition(".")
        value = values[section].get(name) if isinstance(values.get(section), dict) else None
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            names[key] = str(value)
    # The registries import torch, which some commands do not need.
    if all(name == _REGISTRY_KEYS[key] for key, name in names.items()):
        return []
    from model.layers import ACTIVATIONS, NORMS
    from model.optimization import OPTIMIZERS, SCHEDULES

    mistakes = []
    for registry in (NORMS, ACTIVATIONS, SCHEDULES, OPTIMIZERS):
        if registry.key in names and names[registry.key] not in registry:
            place = f"{places[registry.key]}: " if registry.key in places else ""
            mistakes.append(place + registry.unknown(names[registry.key]))
    return mistakes


def _read_extended(path: Path, places: dict[str, str], seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return a file's values, merged into those of the file that it extends."""
    own_places: dict[str, str] = {}
    own = _read(path, own_places)
    return _extended(own, own_places, path, places, seen)


def _extended(
    own: dict[str, Any], own_places: dict[str, str], path: Path, places: dict[str, str], seen: tuple[Path, ...]
) -> dict[str, Any]:
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
    values = _read_extended(extended, places, (*seen, path.resolve()))
    places |= own_places
    _merge(values, own)
    return values


def _read(path: Path, places: dict[str, str]) -> dict[str, Any]:
    """Return a YAML mapping; `places` receives file and line of each dotted key."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such recipe; `{PROGRAM} recipe list` lists the shipped ones") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a recipe ({error}); give a YAML file") from None
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        values = yaml.load(text, _Loader)
        if values is None:
            return {}
        if not isinstance(values, dict):
            raise InputError(
                f"{path}:1: a recipe must be a mapping of sections; `{PROGRAM} recipe list` lists examples"
            )
        _note_places(node, path, "", places)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InputError(f"{path}:{line}: not valid YAML: {error.problem}; correct that line") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InputError(f"{path}:{line}: not valid YAML: character {error.character:#x}; remove it") from None
    except RecursionError:
        raise InputError(f"{path}: values are nested too deeply, or one contains itself; write them out") from None
    return values


class _Loader(yaml.SafeLoader):
    """Keeps as text what YAML would change: dates, and numbers such as 010, 1.50, 0x1F, 12:30 and 2024_01_15.

    A key that takes text then gets what was written, and a key that takes a number converts the text. The line of a
    scalar that is invalid, such as `!!int many`, is reported.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":value"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError) as error:
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                problem=f"'{node.value}' is not a valid {kind}", problem_mark=node.start_mark
            ) from error


def _number_or_text(loader: _Loader, node: Any) -> Any:
    value = yaml.SafeLoader.yaml_constructors[node.tag](loader, node)
    return value if str(value) == node.value else node.value


def _text(loader: _Loader, node: Any) -> Any:
    return node.value


_Loader.add_constructor("tag:yaml.org,2002:int", _number_or_text)
_Loader.add_constructor("tag:yaml.org,2002:float", _number_or_text)
_Loader.add_constructor("tag:yaml.org,2002:merge", _text)  # `<<` that is not a key


def _note_places(node: Any, path: Path, prefix: str, places: dict[str, str]) -> None:
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value]
        for key, value in node.value:
            dotted = f"{prefix}{key.value}"
            if names.count(key.value) > 1:
                raise InputError(f"{path}:{key.start_mark.line + 1}: {dotted} is given twice; remove one of them")
            places[dotted] = f"{path}:{key.start_mark.line + 1}"
            _note_places(value, path, dotted + ".", places)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:  # List items share one place: their keys have no number.
            _note_places(item, path, prefix, places)


def _merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _override(
    values: dict[str, Any], places: dict[str, str], arguments: list[str], trainer_signature: Signature
) -> list[str]:
    """Apply overrides to `values`; return the mistakes found."""
    mistakes = []
    while arguments:
        argument = arguments.pop(0)
        key, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or "." not in key:
            as_what = "settings are given as --section.key value"
            if argument.endswith(".yaml"):
                as_what = "overlays are given as --config FILE"
            elif meant := [f"--{place}" for place in _settings_named(key, trainer_signature)]:
                as_what = f"did you mean {' or '.join(meant)}?"
                if not equals and arguments and not arguments[0].startswith("--"):
                    arguments.pop(0)
            elif argument.startswith("--") and not equals and arguments and not arguments[0].startswith("--"):
                arguments.pop(0)
            mistakes.append(f"argument '{argument}' is unknown; {as_what}")
            continue
        if not equals:
            if not arguments:
                mistakes.append(f"argument '{argument}' needs a value, as in {argument} VALUE")
                continue
            text = arguments.pop(0)
        *sections, last = key.split(".")
        section = values
        for depth, name in enumerate(sections, 1):
            places.setdefault(".".join(sections[:depth]), "command line")
            inner = section.setdefault(name, {})
            if not isinstance(inner, dict):
                inner = section[name] = {}
            section = inner
        section[last] = _parse(text, annotation(key, Recipe, {"trainer": trainer_signature}))
        places[key] = "command line"
    return mistakes


def _parse(text: str, kind: Any) -> Any:
    """Return the value that a word of the command line has for a key of type `kind`; text is taken as it is written."""
    if takes_text(kind):
        return None if text in ("", "null") else text
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError):
        return text
    return text if kind == list[str] and not isinstance(value, list) else value


def _settings_named(key: str, trainer_signature: Signature) -> list[str]:
    """Return the settings with this name in any section, as `section.key`."""
    sections = {section.name: section.type for section in fields(Recipe)}
    named = {name: {one.name for one in fields(kind)} for name, kind in sections.items() if is_dataclass(kind)}
    named["trainer"] = set(trainer_signature)
    return [f"{section}.{key}" for section, keys in named.items() if key in keys]
