"""The JSON Schema that editors check recipes with: a real validator agrees with `load_recipe` and `doctor`.

They have to differ where the schema knows less. It sees one file: it accepts a recipe without a key that another file
may give, names that an extension may register, keys that do not fit together, and files that do not exist. It is
stricter with numbers in quotes, which `load_recipe` converts.
"""

import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from data_module.errors import InputError
from data_module.system.files import PlainValues
from pipeline.config.recipe import load_recipe
from pipeline.config.recipe_files import MODELINE
from pipeline.config.settings import validate_trainer_keys
from tests.docs import recipe_schema
from tests.pipeline.test_configs import CONFIGS, OVERLAYS, RECIPES

FILES = [*RECIPES, *OVERLAYS, CONFIGS / "robust_text.yaml"]
SCHEMA = yaml.safe_load(recipe_schema.FILE.read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)
MINIMAL = """\
corpus:
  folder: corpus
  train: {source: a.en, target: a.de}
  validation: {source: b.en, target: b.de}
trainer:
  max_steps: 9
"""


class EditorLoader(yaml.SafeLoader):
    """YAML 1.2, which editors read: 1e-9 is a number, and dates, `no` and `on` are text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for tag, pattern, first in (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    EditorLoader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), first)


def schema_accepts(text: str) -> bool:
    return VALIDATOR.is_valid(yaml.load(text, EditorLoader))


def doctor_accepts(path: Path) -> bool:
    """Whether the recipe passes the checks that `doctor` and `fit` make before they look at files."""
    try:
        validate_trainer_keys(load_recipe([path]).trainer)
    except InputError:
        return False
    return True


def judgements(text: str, folder: Path) -> tuple[bool, bool]:
    """What the schema and `doctor` say."""
    path = folder / "recipe.yaml"
    path.write_text(text)
    return schema_accepts(text), doctor_accepts(path)


def with_value(key: str, value: str) -> str:
    """The minimal recipe with another value for `section.key` or a deeper key."""
    recipe = yaml.load(MINIMAL, EditorLoader)
    *sections, last = key.split(".")
    inner = recipe
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[last] = yaml.load(value, EditorLoader)
    return yaml.safe_dump(recipe)


def test_the_schema_is_the_one_that_the_settings_make() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert recipe_schema.FILE.read_text(encoding="utf-8") == recipe_schema.text(), "run python -m tests.docs.generate"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid_and_name_the_schema(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert [error.message for error in VALIDATOR.iter_errors(yaml.load(text, EditorLoader))] == []
    first = text.splitlines()[0]
    assert first.startswith(MODELINE)
    assert (path.parent / first.removeprefix(MODELINE)).resolve() == recipe_schema.FILE.resolve()


RIGHT = [
    "name: 2001-01-01",
    "corpus.train: [{tsv: a}, {dataset: a/b, split: train, weight: 2.5}]",
    "corpus.user_symbols: '>>de<<'",
    "corpus.max_length_ratio: null",
    "batches.batch_tokens: 1e4",
    "training.adam_epsilon: 1e-9",
    "trainer.devices: [0, 1]",
    "trainer.max_time: '00:01:00:00'",
    "trainer.deterministic: warn",
]
WRONG = [
    "netwerk: {}",
    "corpus: text",
    "name: null",
    "extends: [a, b]",
    "network.d_modle: 64",
    "network.num_layers: many",
    "network.num_layers: 2.5",
    "network.pre_norm: 1",
    "corpus.train: {datset: a, split: train}",
    "corpus.train: {tsv: a, repeat: 0}",
    "corpus.user_symbols: {a: b}",
    "run.kernels: cuda",
    "run.seed: 2001-01-01",
    "monitoring.attention_sentences: [-1]",
    "trainer.max_step: 5",
    "trainer.val_check_interval: 0.5",
    "trainer.precision: 16-true",
    "trainer.devices: null",
    "trainer.max_time: [1]",
]
ONLY_DOCTOR_REFUSES = [
    "corpus.train: {source: a.en}",  # The target may be in the recipe that this one extends.
    "network.norm: rms_norm",  # An extension may register it.
    "network.num_heads: 7",  # 512 is not a multiple of 7.
    "training.schedule: linear",  # It needs a peak learning rate.
    "run.checkpoint_every_steps: null",
    "corpus.noise: {lower_case: 0.6, upper_case: 0.6}",
    "extends: no_such_recipe.yaml",
]
ONLY_THE_SCHEMA_REFUSES = ["network.num_layers: '6'", "training.adam_epsilon: '0.1'", "run.kernels: triton"]
TABLE = [
    *((case, (True, True)) for case in RIGHT),
    *((case, (False, False)) for case in WRONG),
    *((case, (True, False)) for case in ONLY_DOCTOR_REFUSES),
    *((case, (False, True)) for case in ONLY_THE_SCHEMA_REFUSES),
]


@pytest.mark.parametrize(("case", "expected"), TABLE, ids=[case for case, _ in TABLE])
def test_the_schema_agrees_with_doctor(case: str, expected: tuple[bool, bool], tmp_path: Path) -> None:
    key, _, value = case.partition(": ")
    assert judgements(with_value(key, value), tmp_path) == expected


def numbers() -> list[tuple[str, PlainValues]]:
    """The dotted keys of all settings that hold a number, and their schemas."""
    sections = [(name, part) for name, part in SCHEMA["properties"].items() if name != "trainer"]
    found = []
    while sections:
        key, part = sections.pop()
        if inner := part.get("properties"):
            sections += [(f"{key}.{name}", one) for name, one in inner.items()]
        elif "integer" in str(part) or "'number'" in str(part).replace("['string', 'number'", ""):
            found.append((key, part))
    return found


@pytest.mark.parametrize(("key", "part"), numbers(), ids=lambda one: one if isinstance(one, str) else "")
def test_the_ranges_are_those_that_the_code_checks(key: str, part: PlainValues, tmp_path: Path) -> None:
    """The schema finds them with the values -1, 0, 1e-9, 1 and 2; here are others."""
    around = "network.d_k", "network.d_v"
    for value in (-7, -0.5, 0, 1e-12, 0.999, 1.001, 1_000_000):
        recipe = yaml.safe_load(with_value(key, str(value) if isinstance(value, int) else f"{value:.12f}"))
        for other in around:  # d_model need not be a multiple of num_heads.
            recipe.setdefault("network", {}).setdefault(other.partition(".")[2], 8)
        if key == "training.peak_learning_rate":
            recipe["training"]["schedule"] = "linear"
        if key == "training.muon_momentum":
            recipe["training"]["optimizer"] = "muon"
        if key == "run.validation_translations":
            recipe["run"]["best_by"] = "likelihood"
        schema, doctor = judgements(yaml.safe_dump(recipe), tmp_path)
        assert schema == doctor, f"{key} {value}"
