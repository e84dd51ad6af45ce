"""Recipes: YAML files and command-line overrides, checked against typed settings."""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import ClassVar, TypeVar

import yaml

from data_module.errors import InputError, printable
from data_module.settings import BatchSettings, CorpusSettings
from data_module.system.files import PlainValues, user_path
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from pipeline.config.recipe_files import RecipeLoader, extended, merge, plain_copy, read_extended
from pipeline.config.schema import Checker, annotation, place_in, place_of
from pipeline.config.settings import RESERVED_KEYS, TRAINER_KEYS, MonitoringSettings, RunSettings
from pipeline.runtime.console import report


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
    trainer: PlainValues = field(default_factory=dict)
    places: ClassVar[Mapping[str, str]] = {}
    """File and line of each key that was read; empty unless `load_recipe` has returned the recipe."""

    def __post_init__(self) -> None:
        # Otherwise the run folder would be `runs` or its parent, or its path would not be one line in scripts.
        if self.name in ("", ".", "..") or printable(self.name) != self.name:
            raise ValueError(f"name {self.name!r} does not name a folder; give another name, or leave the key out")

    def run_folder(self) -> Path:
        """Return the folder that `fit` writes to: `run.folder`, or `runs/<name>`."""
        return Path(self.run.folder) if self.run.folder else Path("runs") / self.name

    def corpus_folder(self) -> Path:
        """Return the folder of the prepared corpus."""
        return Path(self.corpus.folder)

    def inherit_network(self, network: PlainValues) -> "Recipe":
        """Return the recipe with settings of a network that was imported from another program.

        Such a network has an output bias. A recipe need not repeat the bias or the activation.
        """
        if not network.get("output_bias"):
            return self
        own = self.network.activation
        activation = network.get("activation", own) if own == NetworkSettings.activation else own
        return replace(self, network=replace(self.network, output_bias=True, activation=activation))

    @contextmanager
    def naming_places(self) -> Iterator[None]:
        """Put a key's file and line before the message of an InputError that begins with the key."""
        try:
            yield
        except InputError as error:
            message = str(error)
            key = message.partition(" ")[0].rstrip(":,")
            place = place_in(message, self.places, key) if re.fullmatch(r"\w+(\.\w+)+", key) else None
            error.args = (f"{place}: {message}" if place else message,)
            raise

    def as_dict(self) -> PlainValues:
        """Return plain values, as they are written to YAML and to checkpoints."""
        return asdict(self)


def add_recipe_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add `--config`, a list of recipe files; without `required`, the list may be empty."""
    parser.add_argument(
        "--config",
        type=user_path,
        action="append",
        metavar="FILE",
        required=required,
        default=None if required else [],
        help="recipe file; repeat the option for overlays, the last one wins; `--config` itself may be left out",
    )


def load_recipe(paths: Iterable[Path], overrides: Iterable[str] = ()) -> Recipe:
    """Read, merge and check a recipe.

    A recipe may extend another one with `extends: FILE`, relative to its own folder, and then contains the differences.
    It is named after its first file with a `corpus:` section.

    Args:
        paths: a recipe and its overlays. Later files take precedence; mappings are merged, lists replaced.
        overrides: `--section.key value` or `--section.key=value`, split into words as on the command line.

    Raises InputError that names all unknown keys and wrong types, and the first value out of range of each section.
    """
    paths = list(paths)
    values: PlainValues = {}
    places: dict[str, str] = {}
    names = [path.stem for path in paths]
    for path in paths:
        contents = read_extended(path, places)
        if "corpus" not in contents and len(names) > 1:
            names.remove(path.stem)  # An overlay, which may come before the recipe.
        merge(values, contents)
    mistakes = _override(values, places, list(overrides))
    values.setdefault("name", names[0])
    places[""] = str(paths[0])
    return _checked(values, places, mistakes)


_Settings = TypeVar("_Settings")


def stored_settings(values: object, kind: type[_Settings], section: str, exact: bool = False) -> _Settings:
    """Check settings in a file that this program has written; settings that are newer get their defaults.

    `section` is the key of `kind` in a recipe, "" for the recipe itself. With `exact`, unknown keys, which another
    version may have written, are refused; otherwise they are ignored.

    Raises ValueError that names the first mistake.
    """
    check = Checker({}, knows_all=exact)
    if isinstance(values, dict) and not section:
        values = _without_old_keys(values, {}, warns=False)
    settings = check.dataclass(values, kind, f"{section}." if section else "")
    if not isinstance(settings, kind):
        raise ValueError(check.mistakes[0])
    return settings


def recipe_from_dict(recipe: Mapping[str, object]) -> Recipe:
    """Check a recipe that is a dictionary with the keys of a recipe file. The dictionary is not changed.

    Paths may be `Path`s. `extends` names a file relative to the current folder.

    Raises InputError as `load_recipe` does.
    """
    if not isinstance(recipe, Mapping):
        raise InputError(
            f"a recipe is a dictionary, not {recipe!r}; for a file, give a dictionary with the keys name and extends"
        )
    places = {"": "the recipe"}
    try:
        values = plain_copy(recipe)
    except RecursionError:
        raise InputError("the recipe: values are nested too deeply, or one contains itself; write them out") from None
    # `extends` is relative to the current folder, as in a file there.
    own_places = _places(values) if "extends" in values else {}
    values = extended(values, own_places, Path("the recipe"), places, ())
    return _checked(values, places, [])


def _places(values: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Return the place of each dotted key of a dictionary, to replace the places of a file that it extends."""
    places = {f"{prefix}{name}": "the recipe" for name in values}
    for name, value in values.items():
        places |= _places(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {}
    return places


def _checked(values: PlainValues, places: dict[str, str], mistakes: list[str]) -> Recipe:
    """Return the recipe; raise InputError with `mistakes` and all mistakes that are found here."""
    values = _without_old_keys(values, places)
    refused = {f"trainer.{key}": why for key, why in RESERVED_KEYS.items()}
    check = Checker(places, refused)
    recipe = check.dataclass(values, Recipe, "")
    if isinstance(values.get("trainer"), dict):
        check.signature(values["trainer"], TRAINER_KEYS, "trainer")
    mistakes += check.mistakes
    for mistake in _unregistered_names(recipe) if recipe is not None else ():
        place = place_of(mistake.partition(" ")[0], places)
        mistakes.append(f"{place}: {mistake}" if place else mistake)
    if mistakes:
        many = f"{len(mistakes)} mistakes: " if len(mistakes) > 1 else ""
        raise InputError(many + "; ".join(mistakes))
    assert isinstance(recipe, Recipe)
    object.__setattr__(recipe, "places", dict(places))
    return recipe


OLD_KEYS: dict[str, tuple[object, str, str]] = {
    "run.cuda_graphs": (..., "1.1", "steps run kernel by kernel"),
    "monitoring.attention_layers": (..., "1.2", "pictures show the first and the last layer of each stack"),
    "monitoring.attention_heads": (..., "1.2", "pictures show the first eight heads"),
    "run.kernels": ("triton", "1.2", "PyTorch's kernels train on a GPU, and the C++ programs on a CPU"),
}
"""Keys without effect: the value that has none (`...` for all), the version since which, and what happens instead.

All versions 1.x accept them."""


def _without_old_keys(values: PlainValues, places: Mapping[str, str], warns: bool = True) -> PlainValues:
    """Return a recipe's values without those of `OLD_KEYS`; warn about one that asks for something."""
    for key, (old, since, instead) in OLD_KEYS.items():
        section, _, name = key.partition(".")
        inner = values.get(section)
        if not isinstance(inner, dict) or name not in inner or (old is not ... and inner[name] != old):
            continue
        values = {**values, section: {other: value for other, value in inner.items() if other != name}}
        if warns and inner[name] not in (None, False):
            place, value = f"{places[key]}: " if key in places else "", "" if old is ... else f" {old}"
            _warn_once(f"warning: {place}{key}{value} has no effect since version {since}: {instead}; remove the key")
    return values


@cache
def _warn_once(message: str) -> None:
    report(message)


def _unregistered_names(recipe: Recipe) -> list[str]:
    """Return a mistake for each name that is not registered, such as that of a norm."""
    given = {
        f"{section}.{name}": getattr(settings, name)
        for section, settings, names in (
            ("network", recipe.network, ("norm", "activation", "self_attention")),
            ("training", recipe.training, ("schedule", "optimizer")),
        )
        for name in names
        if getattr(settings, name) != getattr(type(settings), name)
    }
    if not given:
        return []
    # The registries import torch, which some commands do not need.
    from model.layers import ACTIVATIONS, NORMS, SELF_ATTENTIONS
    from model.optimization import OPTIMIZERS, SCHEDULES

    registries = (NORMS, ACTIVATIONS, SELF_ATTENTIONS, SCHEDULES, OPTIMIZERS)
    return [one.unknown(given[one.key]) for one in registries if one.key in given and given[one.key] not in one]


def _override(values: PlainValues, places: dict[str, str], arguments: list[str]) -> list[str]:
    """Apply overrides to `values`, up to the first argument that is none; return the mistake in it."""
    while arguments:
        argument = arguments.pop(0)
        key, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or "." not in key:
            way_out = "give settings as --section.key VALUE, and overlays as --config FILE"
            return [f"argument '{argument}' is unknown; {way_out}"]
        if not equals:
            if not arguments:
                return [f"argument '{argument}' needs a value, as in {argument} VALUE"]
            text = arguments.pop(0)
        *sections, last = key.split(".")
        section = values
        for depth, name in enumerate(sections, 1):
            places.setdefault(".".join(sections[:depth]), "command line")
            inner = section.setdefault(name, {})
            if not isinstance(inner, dict):
                inner = section[name] = {}
            section = inner
        section[last] = _parse(text, annotation(key, Recipe, {"trainer": TRAINER_KEYS}))
        for inside in [other for other in places if other.startswith(f"{key}.")]:
            del places[inside]  # They belong to a value that this one replaces.
        places[key] = "command line"
    return []


def _parse(text: str, kind: object) -> object:
    """Parse a word of the command line for a key of type `kind`; a key that takes text gets it unchanged."""
    if kind in (str, str | None):
        return None if text in ("", "null") else text
    try:
        value = yaml.load(text, RecipeLoader)
    except (yaml.YAMLError, RecursionError):
        return text
    return text if kind == list[str] and not isinstance(value, list) else value
