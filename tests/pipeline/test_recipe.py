"""Recipes: merging files, overriding settings, and reporting all mistakes at once with positions and suggestions."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from data_module.errors import InputError
from data_module.settings import CorpusSettings, TextSource
from pipeline.commands.recipe import recipe_paths
from pipeline.config.recipe import REMOVED_KEYS, Recipe, load_recipe, recipe_from_dict
from pipeline.config.settings import TRAINER_KEYS, RunSettings

MINIMAL = """\
corpus:
  folder: corpus
  train: {source: a.en, target: a.de}
  validation: {source: b.en, target: b.de}
"""


def write(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def error_message(path: Path, *overrides: str) -> str:
    """Load a recipe that must be refused, and return the error message."""
    with pytest.raises(InputError) as caught:
        load_recipe([path], overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_recipe_of_texts_alone_has_the_papers_corpus_and_batches(tmp_path: Path) -> None:
    recipe = load_recipe([write(tmp_path, MINIMAL)])
    assert recipe.name == "recipe"
    assert recipe.batches.batch_tokens == 25_000
    assert recipe.corpus.vocabulary_size == 37_000
    assert recipe.corpus.train[0].source == "a.en"  # one source needs no list
    assert str(recipe.run_folder()) == "runs/recipe"


def test_paths_for_scripts(tmp_path: Path) -> None:
    """The validation text is named only where `evaluate` has no test text, of whatever kind."""
    path, run = write(tmp_path, MINIMAL), Path("runs/recipe")
    texts = [Path("corpus/validation.source.txt"), Path("corpus/validation.target.txt")]
    assert recipe_paths(load_recipe([path])) == [run, *texts]
    assert recipe_paths(load_recipe([path], ["--corpus.test.tsv", "c.tsv"])) == [run]


def test_overlays_and_overrides(tmp_path: Path) -> None:
    overlay = write(tmp_path, "network: {d_model: 64}\ntrainer: {max_steps: 7}", "overlay.yaml")
    base = write(tmp_path, MINIMAL + "network: {d_model: 32, d_ff: 48}\n")
    recipe = load_recipe(
        [base, overlay], ["--training.adam_epsilon", "1e-8", "--trainer.devices=[0,1]", "--batches.batch_tokens", "1e4"]
    )
    assert recipe.name == load_recipe([overlay, base]).name == "recipe"  # The overlay has no `corpus:`.
    assert (recipe.network.d_model, recipe.network.d_ff) == (64, 48)
    assert recipe.trainer == {"max_steps": 7, "devices": [0, 1]}
    assert recipe.training.adam_epsilon == 1e-8  # YAML reads this as text
    assert recipe.batches.batch_tokens == 10_000
    assert load_recipe([write(tmp_path, yaml.safe_dump(recipe.as_dict()), "config.yaml")]) == recipe


def test_all_mistakes_are_reported_with_their_positions(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "netwerk: {}\nnetwork:\n  d_modle: 64\n  num_layers: many\n  pre_norm: 1\n")
    message = error_message(path, "--training.warmup_step", "5", "--run.keep_last=0")
    assert message.startswith("6 mistakes: ")
    assert f"{path}:5: netwerk is not a key; did you mean network?" in message
    assert f"{path}:7: network.d_modle is not a key; did you mean network.d_model?" in message
    assert f"{path}:8: network.num_layers must be a whole number, not 'many'" in message
    assert f"{path}:9: network.pre_norm must be true or false, not 1" in message
    assert "command line: training.warmup_step is not a key; did you mean training.warmup_steps?" in message
    assert "command line: run.keep_last 0 is not 1 or more" in message


def test_values_of_the_wrong_type(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert "training.label_smoothing must be a number, not True" in error_message(
        path, "--training.label_smoothing=true"
    )
    assert "name must be text, not nothing" in error_message(write(tmp_path, MINIMAL + "name: null\n", "other.yaml"))
    assert "trainer.devices must be" in error_message(path, "--trainer.devices", "null")
    assert "trainer.strategy must be one of 'auto', 'ddp', not 'fsdp'" in error_message(path, "--trainer.strategy=fsdp")
    assert load_recipe([path], ["--trainer.strategy", "ddp"]).trainer["strategy"] == "ddp"


def test_checkpoints_by_steps_or_by_minutes(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert "give checkpoint_every_steps or" in error_message(path, "--run.checkpoint_every_steps=null")
    options = ["--run.checkpoint_every_steps=null", "--run.checkpoint_every_minutes=0.5"]
    run = load_recipe([path], options).run
    assert (run.checkpoint_every_steps, run.checkpoint_every_minutes) == (None, 0.5)


def test_text_sources(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL.replace("train: {source: a.en, target: a.de}", "train: {datset: a, split: train}"))
    assert f"{path}:3: corpus.train.datset is not a key; did you mean corpus.train.dataset?" in error_message(path)
    listed = "train: [{tsv: a}, {dataset: a, splits: train}]"
    path = write(tmp_path, MINIMAL.replace("train: {source: a.en, target: a.de}", listed))
    assert f"{path}:3: corpus.train.splits is not a key; did you mean corpus.train.split?" in error_message(path)
    path = write(tmp_path, MINIMAL)
    message = error_message(path, "--corpus.train", "{dataset: a/b, split: train, tsv: c}")
    assert message.startswith(
        "command line: a text source is `source` and `target`, or `tsv`, or `dataset` and `split`,"
    )
    assert message.endswith("this one has tsv and dataset and split")
    assert "`repeat` of a text source is 0" in error_message(path, "--corpus.test", "{tsv: c, repeat: 0}")
    recipe = load_recipe([path], ["--corpus.test", "{dataset: a/b, subset: de-en, split: test}"])
    assert recipe.corpus.test[0].subset == "de-en"
    assert load_recipe([write(tmp_path, yaml.safe_dump(recipe.as_dict()), "config.yaml")]) == recipe
    aliased = write(tmp_path, MINIMAL.replace("train: {", "train: &text {") + "  test: *text\n")
    corpus = load_recipe([aliased], ["--corpus.test.source", "c.en"]).corpus
    assert (corpus.train[0].source, corpus.test[0].source) == ("a.en", "c.en")


def test_texts_of_other_types(tmp_path: Path) -> None:
    """A date is the text that it is written as; bytes and sets are none."""
    dated = write(tmp_path, MINIMAL + "name: 2001-01-01\ntraining:\n  schedule: 2001-01-01\n")
    assert "training.schedule '2001-01-01' is not registered" in error_message(dated)
    assert load_recipe([write(tmp_path, MINIMAL + "name: 2001-01-01\n")]).name == "2001-01-01"
    for value in ('!!binary "YQ=="', "!!set {a}"):
        message = error_message(write(tmp_path, MINIMAL + f"training:\n  schedule: {value}\n"))
        assert "training.schedule must be text, not" in message


@pytest.mark.parametrize(
    ("section", "key", "name", "way_out"),
    [
        ("network", "norm", "layernorm", "did you mean layer_norm?"),
        ("network", "norm", "rms", "registered are: layer_norm; register it before the command starts"),
        ("network", "activation", "Relu", "did you mean relu?"),
        ("training", "schedule", "Paper", "did you mean paper?"),
        ("training", "optimizer", "adams", "did you mean adam?"),
    ],
)
def test_names_that_are_not_registered(tmp_path: Path, section: str, key: str, name: str, way_out: str) -> None:
    path = write(tmp_path, MINIMAL + f"{section}:\n  {key}: {name}\nrun:\n  keep_last: 0\n")
    line = 1 + path.read_text().splitlines().index(f"  {key}: {name}")
    message = error_message(path)
    assert f"{path}:{line}: {section}.{key} '{name}' is not registered; {way_out}" in message
    assert "run.keep_last 0" in message
    message = error_message(write(tmp_path, MINIMAL), f"--{section}.{key}={name}")
    assert message == f"command line: {section}.{key} '{name}' is not registered; {way_out}"


def test_reserved_trainer_keys(tmp_path: Path) -> None:
    message = error_message(write(tmp_path, MINIMAL), "--trainer.max_epochs=3", "--trainer.barebones=1")
    assert "trainer.barebones is not a key; " in message
    assert "trainer.max_epochs may not be set; count in steps with trainer.max_steps" in message


def test_removed_keys_are_refused_with_what_to_do(tmp_path: Path) -> None:
    for key, what_to_do in REMOVED_KEYS.items():
        message = error_message(write(tmp_path, MINIMAL), f"--{key}=1")
        assert message == f"command line: {key} may not be set; {what_to_do}"


def test_positions_of_mistakes(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "run:\n  seed: 3\n  keep_last: 0\n")
    line = 1 + path.read_text().splitlines().index("  keep_last: 0")
    assert error_message(path) == f"{path}:{line}: run.keep_last 0 is not 1 or more"
    twice = write(tmp_path, MINIMAL + "run:\n  seed: 3\n  seed: 4\n")
    assert error_message(twice).startswith(f"{twice}:{line - 1}: run.seed is given twice; ")
    path = write(tmp_path, MINIMAL)
    for name in ("", ".."):
        named = write(tmp_path, f"{MINIMAL}name: {name!r}\n", "named.yaml")
        assert error_message(named).startswith(f"{named}: name {name!r} does not name a folder; ")
    for seed in (-1, 1 << 63):
        expected = f"command line: run.seed {seed} is not 0 or more and less than 2 ** 63"
        assert error_message(path, f"--run.seed={seed}") == expected
    assert error_message(path, "--networks.d_model=5").startswith(
        "command line: networks is not a key; did you mean network?"
    )
    empty = write(tmp_path, MINIMAL + "trainer:\n")
    assert "trainer must be a mapping, not nothing" in error_message(empty)
    path = write(tmp_path, MINIMAL)
    overlay = write(tmp_path, "run: {seed: 3}", "overlay.yaml")
    assert error_message(overlay) == f"{overlay}: corpus is missing; add it"


def test_paths_have_no_control_characters(tmp_path: Path) -> None:
    """A job script reads a path a line. What a recipe holds does nothing to a terminal."""
    path = write(tmp_path, MINIMAL)
    for key in ("run.folder", "corpus.folder", "corpus.train.source", "corpus.test.path"):
        for character in ("\n", "\t", "\x1b", "\x9b"):
            message = error_message(path, f"--{key}", f"runs/a{character}b")
            assert f"{key}: {f'runs/a{character}b'!r} has control characters; give it a name without" in message
    named = write(tmp_path, f'{MINIMAL}name: "a\\nb"\n', "named.yaml")
    assert r"name 'a\nb' does not name a folder; " in error_message(named)
    colours = error_message(path, "--run.best_\x1b[31mby=1")
    assert "run.best_\\x1b[31mby is not a key" in colours
    assert load_recipe([path], ["--run.folder", "runs/ä b"]).run_folder() == Path("runs/ä b")


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    assert "there is no such recipe" in error_message(tmp_path / "none.yaml")
    broken = write(tmp_path, "a: [1,\nb: 2")
    assert f"{broken}:2" in error_message(broken)
    assert "mapping" in error_message(write(tmp_path, "- 1"))
    assert "corpus is missing" in error_message(write(tmp_path, "seed: 1"))
    assert "network must be a mapping" in error_message(write(tmp_path, "network: 3\n" + MINIMAL))
    executed = write(tmp_path, MINIMAL + "network: !!python/object/apply:os.system ['true']\n")
    assert "not valid YAML" in error_message(executed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "run:\n  seed: !!timestamp 2001-99-99\n",
            ":2: not valid YAML: '2001-99-99' is not a valid timestamp; correct that line",
        ),
        ("run:\n  seed: !!int many\n", ":2: not valid YAML: 'many' is not a valid int; correct that line"),
        ("run:\n  compile: !!bool maybe\n", ":2: not valid YAML: 'maybe' is not a valid bool; correct that line"),
        ("run:\n  seed: 1\x07\n", ":2: not valid YAML: character 0x7; remove it"),
        ("run: &a\n  seed: *a\n", ": values are nested too deeply, or one contains itself"),
        ("run: " + 2000 * "[" + 2000 * "]", ": values are nested too deeply, or one contains itself"),
        ('"a\\nb": 1\n', r":1: a\nb is not a key; "),
        (f"extends: {300 * 'a'}\n", f":1: extends {300 * 'a'}, which does not exist"),
    ],
)
def test_values_that_yaml_cannot_read(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    assert f"{path}{message}" in error_message(path)


WRITTEN = ["2024_01_15", "010", "1.50", "0x1F", "12:30", "2024-1-5", "2024-01-15 10:00:00", "1e3", ".inf", "+5", "-0"]
"""Text that YAML 1.1 reads as a number or a date and would print in another way."""


def test_text_is_what_was_written(tmp_path: Path) -> None:
    """In a file and on the command line, for single texts and lists. A file asks for quotes where YAML has no text."""
    for written in [*WRITTEN, "=", "<<", "5", "1.5"]:
        path = write(
            tmp_path, MINIMAL + f"  user_symbols: [{written}, x]\n  test: {{tsv: {written}}}\nname: {written}\n"
        )
        recipe = load_recipe([path])
        assert (recipe.name, recipe.corpus.user_symbols) == (written, [written, "x"])
        assert recipe.corpus.test[0].tsv == written
    path = write(tmp_path, MINIMAL)
    words = [*WRITTEN, "no", "true", "#1", "a #b", "a: b", "'a'", "{x}"]
    for word in words:
        options = ["--run.folder", word, f"--corpus.user_symbols={word}", f"--corpus.validation.target={word}"]
        recipe = load_recipe([path], options)
        assert recipe.run.folder == recipe.corpus.validation[0].target == word
        assert recipe.corpus.user_symbols == [word]
    recipe = load_recipe([path], ["--corpus.user_symbols", "[010, <<]", "--corpus.test", "{tsv: 010}"])
    assert (recipe.corpus.user_symbols, recipe.corpus.test[0].tsv) == (["010", "<<"], "010")
    assert load_recipe([path], ["--run.folder=null"]).run.folder is None
    for written, name in (("no", "False"), ("[{x}]", "a mapping")):
        path = write(tmp_path, MINIMAL + f"  user_symbols: {written}\n")
        message = f"{path}:5: corpus.user_symbols must be text, not {name}; put it in quotes"
        assert error_message(path) == message
    assert load_recipe([write(tmp_path, yaml.safe_dump(recipe.as_dict()), "config.yaml")]) == recipe


def test_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every key that holds a path, in `extends`, on the command line and in the Python API."""
    monkeypatch.setenv("HOME", str(tmp_path))
    kinds = {"run": RunSettings, "corpus": CorpusSettings, "corpus.train": TextSource}
    hints = {section: get_type_hints(kind, include_extras=True) for section, kind in kinds.items()}
    keys = {f"{section}.{key}" for section, types in hints.items() for key in types if "path" in str(types[key])}
    names = {f"corpus.train.{key}" for key in ("source", "target", "tsv", "dataset", "path")}
    assert keys == {"run.folder", "corpus.folder", *names}
    texts = "train: {source: ~/a, target: ~/b}, validation: {tsv: ~/c}"
    write(tmp_path, f"corpus: {{folder: ~/corpus, {texts}}}\n", "base.yaml")
    (tmp_path / "deep").mkdir()
    path = write(tmp_path / "deep", "extends: ~/base.yaml\ncorpus: {test: {dataset: ~, reader: x, path: ~/d}}\n")
    recipe = load_recipe([path], ["--run.folder=~/run"])
    train, validation, test = recipe.corpus.train[0], recipe.corpus.validation[0], recipe.corpus.test[0]
    given = [recipe.run.folder, recipe.corpus.folder, train.source, train.target, validation.tsv, test.path]
    assert given == [f"{tmp_path}/{name}" for name in ("run", "corpus", "a", "b", "c", "d")]
    base = load_recipe([tmp_path / "base.yaml"])
    assert recipe_from_dict({"name": "base", "extends": "~/base.yaml"}) == base
    unknown = write(tmp_path, MINIMAL + "run: {folder: ~nobody-of-this-name/run}\n")
    assert error_message(unknown) == (
        f"{unknown}:5: run.folder: ~nobody-of-this-name/run: the home folder ~nobody-of-this-name is unknown; write the"
        " whole path, or ./~nobody-of-this-name for a name that begins so"
    )


def test_half_of_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + '  user_symbols: ["\\ud83d"]\nname: "\\ud83d"\nrun: {folder: "\\ud83d"}\n')
    message = error_message(path)
    for line, key in ((5, "corpus.user_symbols"), (6, "name"), (7, "run.folder")):
        assert f"{path}:{line}: {key} must be text, not '\\ud83d'" in message
    # The name of a file that is not UTF-8.
    assert load_recipe([write(tmp_path, MINIMAL)], ["--run.folder=\udcf6"]).run.folder == "\udcf6"
    assert "must be text" in error_message(path, "--corpus.user_symbols=\udcf6")


def test_numbers_are_read_as_decimals(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "run: {seed: 010, keep_last: +5}\n")
    big = 2**53 + 1
    recipe = load_recipe([path], [f"--corpus.seed={big:_}", "--corpus.max_length_ratio", ".inf"])
    assert (recipe.run.seed, recipe.run.keep_last, recipe.corpus.seed) == (10, 5, big)
    assert load_recipe([write(tmp_path, yaml.safe_dump(recipe.as_dict()), "config.yaml")]) == recipe
    for written in ("0x1F", "12:30", "2001-01-01"):
        message = error_message(write(tmp_path, MINIMAL + f"run: {{seed: {written}}}\n"))
        assert message.endswith(f"run.seed must be a whole number, not '{written}'")
    path = write(tmp_path, MINIMAL + "trainer: {max_time: 1:00:00:00, devices: 2}\n")
    assert load_recipe([path]).trainer == {"max_time": "1:00:00:00", "devices": 2}
    recipe = load_recipe([path], ["--trainer.max_time", "1:30:00:00", "--trainer.devices", "2"])
    assert recipe.trainer == {"max_time": "1:30:00:00", "devices": 2}


def test_overrides_that_yaml_cannot_read_are_text(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    for text in ("2001-99-99", "!!int x", 2000 * "["):
        assert f"command line: run.seed must be a whole number, not '{text}'" in error_message(
            path, f"--run.seed={text}"
        )
    assert load_recipe([path], ["--run.folder", "2001-99-99"]).run.folder == "2001-99-99"


def test_unknown_arguments(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert "argument '--fersh' is unknown; settings are given as" in error_message(path, "--fersh")
    assert error_message(path, "--warmup_steps", "9") == (
        "argument '--warmup_steps' is unknown; did you mean --training.warmup_steps?"
    )
    assert "argument 'cpu.yaml' is unknown; overlays are given as --config FILE" in error_message(path, "cpu.yaml")
    assert "'--network.d_ff' needs a value" in error_message(path, "--network.d_ff")


def test_a_recipe_extends_another(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path, MINIMAL + "network: {d_model: 32, d_ff: 48}\n", "base.yaml")
    write(tmp_path, "extends: base.yaml\nnetwork: {d_ff: 64}\nrun: {checkpoint_every_steps: 5}\n", "middle.yaml")
    path = write(
        tmp_path / "deep", "extends: ../middle.yaml\ncorpus: {train: {target: a.fr}}\nrun: {seed: 3}\n", "own.yaml"
    )
    recipe = load_recipe([path])
    assert recipe.name == "own"
    assert (recipe.network.d_model, recipe.network.d_ff) == (32, 64)
    assert (recipe.corpus.train[0].source, recipe.corpus.train[0].target) == ("a.en", "a.fr")
    assert (recipe.run.checkpoint_every_steps, recipe.run.seed) == (5, 3)


def test_a_mistake_is_blamed_on_the_file_that_has_its_key(tmp_path: Path) -> None:
    base = write(tmp_path, MINIMAL + "network:\n  num_heads: 7\n", "base.yaml")
    line = base.read_text().count("\n")
    own = write(tmp_path, "extends: base.yaml\nnetwork: {dropout: 0.2}\n")
    # The message begins with the width, which has its default.
    assert error_message(own).startswith(f"{base}:{line}: network.d_model 512 is not a multiple of network.num_heads 7")
    source = error_message(base, "--corpus.train", "{source: 1.5, target: [a]}", "--network.num_heads", "4")
    assert source == "command line: corpus.train.target must be text, not ['a']; put it in quotes"
    given = {"name": "mine", "extends": str(base), "network": {"d_model": "wide", "num_heads": 4}}
    with pytest.raises(InputError, match=r"^the recipe: network\.d_model must be a whole number"):
        recipe_from_dict(given)


def test_invalid_extends(tmp_path: Path) -> None:
    path = write(tmp_path, "\nextends: none.yaml\n")
    assert error_message(path).startswith(f"{path}:2: extends none.yaml, which does not exist")
    write(tmp_path, "extends: recipe.yaml\n", "other.yaml")
    assert "which extends this one" in error_message(write(tmp_path, "extends: other.yaml\n"))
    assert f"{path}:1: extends must name one recipe" in error_message(write(tmp_path, "extends: [a, b]\n"))
    write(tmp_path, MINIMAL + "network: {d_modle: 5}\n", "base.yaml")
    message = error_message(write(tmp_path, "extends: base.yaml\nnetwork: {d_fff: 5}\n"))
    assert f"{tmp_path / 'base.yaml'}:5: network.d_modle" in message
    assert f"{path}:2: network.d_fff" in message


SECTIONS = {one.name: [key.name for key in fields(one.type)] for one in fields(Recipe) if is_dataclass(one.type)}
SECTIONS["trainer"] = list(TRAINER_KEYS)
SCALARS = st.one_of(
    st.integers(1, 9),
    st.sampled_from([0.5, True, "auto", "1e4", None]),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.dates(),
    st.binary(max_size=4),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | SCALARS, inner, max_size=3),
    max_leaves=4,
)
FILES = {"source": "a.en", "target": "a.de"}


@st.composite
def documents(draw: st.DrawFn) -> str:
    """Draw a recipe with arbitrary values for some keys, and sometimes an unknown key."""
    recipe: dict[Any, Any] = {"corpus": {"folder": "corpus", "train": FILES, "validation": FILES}}
    for _ in range(draw(st.integers(0, 3))):
        section = draw(st.sampled_from(list(SECTIONS)))
        key, value = draw(st.sampled_from(SECTIONS[section])), draw(SCALARS | ANYTHING)
        recipe[section] = {**recipe.get(section, {}), key: value}
    if draw(st.integers(0, 3)) == 3:
        recipe[draw(st.sampled_from([*SECTIONS, "extends", "name"]) | SCALARS)] = draw(ANYTHING)
    return yaml.safe_dump(recipe, allow_unicode=draw(st.booleans()))


def read_or_refuse(path: Path, text: str, *overrides: str) -> Recipe | None:
    path.write_text(text, encoding="utf-8")
    try:
        return load_recipe([path], overrides)
    except InputError as error:
        message = str(error)
    assert not {"\n", "\r"} & set(message)
    return None


@settings(max_examples=60)
@given(text=documents())
def test_any_values_yield_a_recipe_or_one_line_of_error(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "values.yaml"
    if recipe := read_or_refuse(path, text):
        # The recipe that a run saves is the same.
        assert repr(read_or_refuse(path, yaml.safe_dump(recipe.as_dict()))) == repr(recipe)


@settings(max_examples=60)
@given(
    text=st.text(alphabet="ab:-?,[]{}&*!|>%@#'\"0123. \n\t\x07", max_size=40) | st.text(max_size=20),
    override=st.builds("--{}={}".format, st.sampled_from(["run.seed", "a.b", "trainer.devices"]), st.text())
    | st.text(max_size=8),
)
def test_any_text_yields_a_recipe_or_one_line_of_error(
    text: str, override: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "text.yaml"
    read_or_refuse(path, text)
    read_or_refuse(path, MINIMAL, override)


def test_a_dictionary_is_read_as_a_file_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {"name": "mine", **yaml.safe_load(MINIMAL), "training": {"warmup_steps": 5}}
    assert recipe_from_dict(values) == load_recipe([write(tmp_path, yaml.safe_dump(values))])
    given = {"name": "mine", "extends": "base.yaml", "corpus": {"folder": Path("other")}, "network": {"d_ff": 64}}
    kept = {**given, "corpus": dict(given["corpus"])}  # type: ignore[call-overload]
    write(tmp_path, MINIMAL + "network: {d_model: 32}\n", "base.yaml")
    monkeypatch.chdir(tmp_path)
    recipe = recipe_from_dict(given)
    assert (recipe.name, recipe.corpus.folder, recipe.network.d_ff, recipe.network.d_model) == ("mine", "other", 64, 32)
    assert recipe.corpus.train[0].source == "a.en"
    assert given == kept
    sources = ({"source": "a", "target": "b"}, {"source": Path("c"), "target": "d"})
    recipe = recipe_from_dict({**values, "corpus": {**values["corpus"], "train": sources}})
    assert [one.source for one in recipe.corpus.train] == ["a", "c"]


def test_mistakes_in_a_dictionary() -> None:
    values: dict[str, Any] = {"name": "mine", **yaml.safe_load(MINIMAL)}
    endless: dict[str, Any] = {}
    endless["corpus"] = endless
    for wrong, said in (
        ({}, "2 mistakes: the recipe: name is missing; add it; the recipe: corpus is missing; add it"),
        (values | {"network": {"d_modell": 5}}, "network.d_modell is not a key; did you mean network.d_model?"),
        (values | {"network": {"num_heads": 7}}, "network.d_model 512 is not a multiple"),
        (values | {"extends": "none.yaml"}, "the recipe: extends none.yaml, which does not exist"),
        (values | {"extends": 3}, "the recipe: extends must name one recipe"),
        (values | {"network": {"norm": "nosuch"}}, "network.norm 'nosuch'"),
        (endless, "the recipe: values are nested too deeply"),
        ("recipe.yaml", "a recipe is a dictionary, not 'recipe.yaml'"),
    ):
        with pytest.raises(InputError) as caught:
            recipe_from_dict(wrong)  # type: ignore[arg-type]
        assert str(caught.value).startswith(said)


@pytest.mark.parametrize(("value", "warns"), [("null", False), ("false", False), ("true", True)])
def test_keys_of_version_1_0_that_have_no_effect(
    value: str, warns: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are accepted, typed or stored, and change no recipe; asking for something is answered once."""
    plain = load_recipe([write(tmp_path, MINIMAL)])
    path = write(tmp_path, f"{MINIMAL}run:\n  cuda_graphs: {value}\n")
    for _ in range(2):
        assert load_recipe([path]).as_dict() == plain.as_dict()
    warning = f"warning: {path}:6: run.cuda_graphs has no effect since version 1.1: steps run kernel by kernel; remove "
    assert [line.startswith(warning) for line in capsys.readouterr().err.splitlines()] == [True] * warns
    assert load_recipe([path], ["--run.cuda_graphs", value]).as_dict() == plain.as_dict()
