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
from data_module.system.files import PlainValues
from pipeline.commands.recipe import recipe_paths
from pipeline.config.recipe import Recipe, load_recipe, recipe_from_dict, stored_settings
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


TRAIN = "train: {source: a.en, target: a.de}"
MISTAKES = [
    # What follows the minimal recipe, or a word of it and what stands there instead; options; the message.
    ("netwerk: {}", [], "{file}:5: netwerk is not a key; did you mean network?"),
    ("network:\n  d_modle: 64", [], "{file}:6: network.d_modle is not a key; did you mean network.d_model?"),
    ("network:\n  num_layers: many", [], "{file}:6: network.num_layers must be a whole number, not 'many'"),
    ("network:\n  pre_norm: 1", [], "{file}:6: network.pre_norm must be true or false, not 1"),
    ("name: null", [], "{file}:5: name must be text, not nothing"),
    ("name: ''", [], "{file}: name '' does not name a folder; "),
    ("name: '..'", [], "{file}: name '..' does not name a folder; "),
    ('name: "a\\nb"', [], r"name 'a\nb' does not name a folder; "),
    ("trainer:", [], "{file}:5: trainer must be a mapping, not nothing"),
    ("run:\n  seed: 3\n  seed: 4", [], "{file}:6: run.seed is given twice; "),
    ("run:\n  seed: 3\n  keep_last: 0", [], "{file}:7: run.keep_last 0 is not 1 or more"),
    ("", ["--run.keep_last=0"], "command line: run.keep_last 0 is not 1 or more"),
    ("", ["--networks.d_model=5"], "command line: networks is not a key; did you mean network?"),
    ("", ["--training.label_smoothing=true"], "training.label_smoothing must be a number, not True"),
    ("", ["--trainer.devices", "null"], "trainer.devices must be"),
    ("", ["--trainer.strategy=fsdp"], "trainer.strategy must be one of 'auto', 'ddp', not 'fsdp'"),
    ("", ["--trainer.max_epochs=3"], "trainer.max_epochs may not be set; count in steps with trainer.max_steps"),
    ("", ["--trainer.barebones=1"], "trainer.barebones is not a key; "),
    ("", [f"--run.seed={1 << 63}"], f"command line: run.seed {1 << 63} is not 0 or more and less than 2 ** 63"),
    ("", ["--run.checkpoint_every_steps=null"], "give checkpoint_every_steps or"),
    ("", ["--run.validation_translations=0"], "run.best_by bleu is a score of translations, and run.validation_transl"),
    # Text sources.
    ((TRAIN, "train: [{tsv: a}, {splits: b}]"), [], "{file}:3: corpus.train.splits is not a key; did you mean corpus."),
    ("", ["--corpus.train", "{dataset: a/b, split: c, tsv: d}"], "this one has tsv and dataset and split"),
    ("", ["--corpus.test", "{tsv: c, repeat: 0}"], "`repeat` of a text source is 0"),
    # Names that are not registered; a date is the text that it is written as.
    ("network: {norm: layernorm}", [], "{file}:5: network.norm 'layernorm' is not registered; did you mean layer_norm"),
    ("network: {norm: rms}", [], "registered are: layer_norm; register it before the command start"),
    ("", ["--training.optimizer=adams"], "training.optimizer 'adams' is not registered; did you mean adam?"),
    ("training: {schedule: 2001-01-01}", [], "{file}:5: training.schedule '2001-01-01' is not registered"),
    ('training: {schedule: !!binary "YQ=="}', [], "training.schedule must be text, not"),
    # Half of a surrogate pair, and control characters: a job script reads a path a line.
    ('name: "\\ud83d"', [], r"{file}:5: name must be text, not '\ud83d'"),
    ("", ["--corpus.user_symbols=\udcf6"], "must be text"),
    *(
        ("", [f"--{key}", f"runs/a{character}b"], f"{key}: {f'runs/a{character}b'!r} has control characters; give it a")
        for key in ("run.folder", "corpus.folder", "corpus.train.source", "corpus.test.path")
        for character in ("\n", "\t", "\x1b", "\x9b")
    ),
    ("", ["--run.best_\x1b[31mby=1"], r"run.best_\x1b[31mby is not a key"),
    # What YAML reads as something else.
    *((f"run: {{seed: {one}}}", [], f"run.seed must be a whole number, not '{one}'") for one in ("0x1F", "12:30")),
    *(("", [f"--run.seed={one}"], f"whole number, not '{one}'") for one in ("2001-99-99", "!!int x", 2000 * "[")),
    ("  user_symbols: no", [], "{file}:5: corpus.user_symbols must be text, not False; put it in quotes"),
    ("  user_symbols: [{x}]", [], "{file}:5: corpus.user_symbols must be text, not a mapping; put it in quotes"),
    ("run:\n  seed: !!timestamp 2001-99-99", [], "{file}:6: not valid YAML: '2001-99-99' is not a valid timestamp; co"),
    ("run:\n  compile: !!bool maybe", [], "{file}:6: not valid YAML: 'maybe' is not a valid bool; correct that line"),
    ("  user_symbols: [>>de<<]", [], "{file}:5: not valid YAML: found character '>' that cannot start any token; put"),
    ("  user_symbols: >>de<<", [], "indicators, but found '>'; put the text that begins with it in quotes"),
    ("run:\n\tseed: 1", [], "{file}:6: not valid YAML: found character '\\t' that cannot start any token; correct"),
    ("run:\n  seed: 1\x07", [], "{file}:6: not valid YAML: character 0x7; remove it"),
    ("run: &a\n  seed: *a", [], "{file}: values are nested too deeply, or one contains itself"),
    ("run: " + 2000 * "[" + 2000 * "]", [], "{file}: values are nested too deeply, or one contains itself"),
    ('"a\\nb": 1', [], r"{file}:5: a\nb is not a key; "),
    ("network: !!python/object/apply:os.system ['true']", [], "{file}:5: not valid YAML"),
    # Files that are no recipe, or extend none.
    ((MINIMAL, "a: [1,\nb: 2"), [], "{file}:2: not valid YAML"),
    ((MINIMAL, "- 1"), [], "{file}:1: a recipe must be a mapping of sections"),
    ((MINIMAL, "run: {seed: 1}"), [], "{file}: corpus is missing; add it"),
    ((MINIMAL, "network: 3"), [], "{file}:1: network must be a mapping"),
    ("extends: none.yaml", [], "{file}:5: extends none.yaml, which does not exist"),
    (f"extends: {300 * 'a'}", [], f"{{file}}:5: extends {300 * 'a'}, which does not exist"),
    ("extends: recipe.yaml", [], "{file}:5: extends recipe.yaml, which extends this one"),
    ("extends: [a, b]", [], "{file}:5: extends must name one recipe"),
    # Options.
    ("", ["--fersh"], "argument '--fersh' is unknown; give settings as --section.key VALUE, and"),
    ("", ["--warmup_steps", "9"], "argument '--warmup_steps' is unknown; give settings as --section.key VALUE, and"),
    ("", ["cpu.yaml"], "argument 'cpu.yaml' is unknown; give settings as --section.key VALUE, and overlays as --con"),
    ("", ["--network.d_ff"], "argument '--network.d_ff' needs a value"),
]


@pytest.mark.parametrize(("text", "options", "message"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_one_line(text: str | tuple[str, str], options: list[str], message: str, tmp_path: Path) -> None:
    recipe = MINIMAL.replace(*text) if isinstance(text, tuple) else f"{MINIMAL}{text}\n"
    path = write(tmp_path, recipe)
    assert message.replace("{file}", str(path)) in error_message(path, *options)


def test_all_mistakes_are_reported(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "netwerk: {}\nnetwork:\n  d_modle: 64\n")
    assert error_message(path, "--training.warmup_step", "5", "--run.keep_last=0", "--d_ff", "4").startswith(
        "5 mistakes: "
    )
    assert "there is no such recipe" in error_message(tmp_path / "none.yaml")
    write(tmp_path, MINIMAL + "network: {d_modle: 5}\n", "base.yaml")
    message = error_message(write(tmp_path, "extends: base.yaml\nnetwork: {d_fff: 5}\n"))
    assert f"{tmp_path / 'base.yaml'}:5: network.d_modle" in message
    assert f"{path}:2: network.d_fff" in message


def test_values_that_look_wrong_and_are_right(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "name: 2001-01-01\ntrainer: {max_time: 1:00:00:00, devices: 2}\n")
    assert load_recipe([path]).name == "2001-01-01"
    assert load_recipe([path]).trainer == {"max_time": "1:00:00:00", "devices": 2}
    recipe = load_recipe([path], ["--trainer.max_time", "1:30:00:00", "--trainer.strategy", "ddp"])
    assert recipe.trainer == {"max_time": "1:30:00:00", "devices": 2, "strategy": "ddp"}
    # The name of a file that is not UTF-8, and names that are no date and no option.
    for folder in ("\udcf6", "2001-99-99", "runs/ä b"):
        assert load_recipe([path], ["--run.folder", folder]).run_folder() == Path(folder)
    run = load_recipe([path], ["--run.checkpoint_every_steps=null", "--run.checkpoint_every_minutes=0.5"]).run
    assert (run.checkpoint_every_steps, run.checkpoint_every_minutes) == (None, 0.5)
    path, big = write(tmp_path, MINIMAL + "run: {seed: 010, keep_last: +5}\n"), 2**53 + 1
    recipe = load_recipe([path], [f"--corpus.seed={big:_}", "--corpus.max_length_ratio", ".inf"])
    assert (recipe.run.seed, recipe.run.keep_last, recipe.corpus.seed) == (10, 5, big)
    assert load_recipe([write(tmp_path, yaml.safe_dump(recipe.as_dict()), "config.yaml")]) == recipe


def test_text_sources(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    recipe = load_recipe([path], ["--corpus.test", "{dataset: a/b, subset: de-en, split: test}"])
    assert recipe.corpus.test[0].subset == "de-en"
    assert load_recipe([write(tmp_path, yaml.safe_dump(recipe.as_dict()), "config.yaml")]) == recipe
    aliased = write(tmp_path, MINIMAL.replace("train: {", "train: &text {") + "  test: *text\n")
    corpus = load_recipe([aliased], ["--corpus.test.source", "c.en"]).corpus
    assert (corpus.train[0].source, corpus.test[0].source) == ("a.en", "c.en")


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
    assert load_recipe([write(tmp_path, yaml.safe_dump(recipe.as_dict()), "config.yaml")]) == recipe


def test_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every key that holds a path, in `extends`, on the command line and in the Python API."""
    monkeypatch.setenv("HOME", str(tmp_path))
    kinds = {"run": RunSettings, "corpus": CorpusSettings, "corpus.train": TextSource}
    hints = {section: get_type_hints(kind, include_extras=True) for section, kind in kinds.items()}
    keys = {f"{section}.{key}" for section, types in hints.items() for key in types if "path" in str(types[key])}
    names = {f"corpus.train.{key}" for key in ("source", "target", "tsv", "dataset", "path")}
    assert keys == {"run.folder", "corpus.folder", "corpus.tokenizer", *names}
    texts = "train: {source: ~/a, target: ~/b}, validation: {tsv: ~/c}"
    write(tmp_path, f"corpus: {{folder: ~/corpus, {texts}}}\n", "base.yaml")
    (tmp_path / "deep").mkdir()
    path = write(tmp_path / "deep", "extends: ~/base.yaml\ncorpus: {test: {dataset: ~, reader: x, path: ~/d}}\n")
    recipe = load_recipe([path], ["--run.folder=~/run", "--corpus.tokenizer=~/t"])
    train, validation, test = recipe.corpus.train[0], recipe.corpus.validation[0], recipe.corpus.test[0]
    given = [recipe.run.folder, recipe.corpus.folder, train.source, train.target, validation.tsv, test.path]
    given.append(recipe.corpus.tokenizer)
    assert given == [f"{tmp_path}/{name}" for name in ("run", "corpus", "a", "b", "c", "d", "t")]
    base = load_recipe([tmp_path / "base.yaml"])
    assert recipe_from_dict({"name": "base", "extends": "~/base.yaml"}) == base
    unknown = write(tmp_path, MINIMAL + "run: {folder: ~nobody-of-this-name/run}\n")
    assert error_message(unknown) == (
        f"{unknown}:5: run.folder: ~nobody-of-this-name/run: the home folder ~nobody-of-this-name is unknown; write the"
        " whole path, or ./~nobody-of-this-name for a name that begins so"
    )


@pytest.mark.parametrize(
    ("base", "own", "merged"),
    [
        ("tsv: a", "source: b, target: c", TextSource("b", "c", prefix="<x>")),
        ("source: b, target: c", "tsv: a", TextSource(tsv="a", prefix="<x>")),
        ("dataset: d, split: e, source_language: f", "tsv: a", TextSource(tsv="a", prefix="<x>")),
        ("tsv: a", "dataset: d, split: e", TextSource(dataset="d", split="e", prefix="<x>")),
        # Of the same kind, or of none.
        ("source: b, target: c", "target: d", TextSource("b", "d", prefix="<x>")),
        ("dataset: d, subset: s, split: e", "dataset: f", TextSource(dataset="f", subset="s", split="e", prefix="<x>")),
        (
            "dataset: d, split: e, source_language: f",
            "reader: r, path: p",
            TextSource(reader="r", path="p", source_language="f", prefix="<x>"),
        ),
        ("tsv: a", "repeat: 2", TextSource(tsv="a", repeat=2, prefix="<x>")),
        ("tsv: a", "tsv: null, source: b, target: c", TextSource("b", "c", prefix="<x>")),
        # What names two kinds itself is refused as before, and so is the command line.
        ("tsv: a", "source: b, target: c, tsv: d", "this one has source and target and tsv"),
        ("tsv: a", "source: b", "this one has source"),
        ("source: b, target: c", "source_language: e", "are for data sets"),
    ],
)
def test_a_text_source_in_another_place(tmp_path: Path, base: str, own: str, merged: TextSource | str) -> None:
    """In a recipe that extends another one, and in an overlay."""
    given = write(tmp_path, MINIMAL.replace(TRAIN, f'train: {{prefix: "<x>", {base}}}'), "base.yaml")
    text = f"corpus: {{train: {{{own}}}}}\n"
    for paths in ([write(tmp_path, f"extends: base.yaml\n{text}")], [given, write(tmp_path, text, "overlay.yaml")]):
        if isinstance(merged, TextSource):
            assert load_recipe(paths).corpus.train == [merged]
        else:
            with pytest.raises(InputError, match=merged):
                load_recipe(paths)
    with pytest.raises(InputError, match="this one has"):
        load_recipe([given], ["--corpus.train.path=x"])


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


def test_a_mistake_is_blamed_on_the_last_file_that_gives_its_key(tmp_path: Path) -> None:
    base = write(tmp_path, MINIMAL + "run:\n  seed: 1\nnetwork:\n  d_ff: narrow\n", "base.yaml")
    middle = write(tmp_path, "extends: base.yaml\nrun: {seed: few}\n", "middle.yaml")
    own = write(tmp_path, "extends: middle.yaml\nname: own\nrun:\n  seed: wide\nnetwork: {d_ff: 64}\n", "own.yaml")
    overlay = write(tmp_path, "\n\nrun: {seed: last}\n", "overlay.yaml")
    for paths, place in (([own], f"{own}:4"), ([own, overlay], f"{overlay}:3"), ([overlay, own], f"{own}:4")):
        with pytest.raises(InputError, match=rf"^{place}: run\.seed must be a whole number"):
            load_recipe(paths)
    both = [rf"{base}:\d+: network\.d_ff must be .*", rf"{middle}:2: run\.seed must be .*"]
    with pytest.raises(InputError, match=f"^2 mistakes: {'; '.join(both)}"):
        load_recipe([middle])
    assert load_recipe([own], ["--run.seed", "3"]).network.d_ff == 64


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
    values: PlainValues = {"name": "mine", **yaml.safe_load(MINIMAL), "training": {"warmup_steps": 5}}
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
    values: PlainValues = {"name": "mine", **yaml.safe_load(MINIMAL)}
    endless: PlainValues = {}
    endless["corpus"] = endless
    for wrong, said in (
        ({}, "2 mistakes: the recipe: name is missing; add it; the recipe: corpus is missing; add it"),
        (values | {"extends": "none.yaml"}, "the recipe: extends none.yaml, which does not exist"),
        (values | {"extends": 3}, "the recipe: extends must name one recipe"),
        (endless, "the recipe: values are nested too deeply"),
        ("recipe.yaml", "a recipe is a dictionary, not 'recipe.yaml'"),
    ):
        with pytest.raises(InputError) as caught:
            recipe_from_dict(wrong)  # type: ignore[arg-type]
        assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("key", "value", "warning"),
    [
        ("run.cuda_graphs", "null", None),
        ("run.cuda_graphs", "false", None),
        (
            "run.cuda_graphs",
            "true",
            "run.cuda_graphs has no effect since version 1.1: steps run kernel by kernel; remove ",
        ),
        ("run.kernels", "triton", "run.kernels triton has no effect since version 1.2: PyTorch's kernels train on"),
        ("monitoring.attention_heads", "[1]", "monitoring.attention_heads has no effect since version 1.2: pictures "),
    ],
)
def test_keys_and_values_that_have_no_effect_any_more(
    key: str, value: str, warning: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are accepted, typed or stored, and change no recipe; asking for something is answered once."""
    plain = load_recipe([write(tmp_path, MINIMAL)])
    section, name = key.split(".")
    path = write(tmp_path, f"{MINIMAL}{section}:\n  {name}: {value}\n")
    for _ in range(2):
        assert load_recipe([path]).as_dict() == plain.as_dict()
    said = capsys.readouterr().err.splitlines()
    assert [line.startswith(f"warning: {path}:6: {warning}") for line in said] == [True] * (warning is not None)
    assert load_recipe([path], [f"--{key}", value]).as_dict() == plain.as_dict()
    capsys.readouterr()
    stored = plain.as_dict()
    stored[section] |= {name: yaml.safe_load(value)}
    assert stored_settings(stored, Recipe, "", exact=True) == plain
    assert (stored[section][name], capsys.readouterr().err) == (yaml.safe_load(value), "")
