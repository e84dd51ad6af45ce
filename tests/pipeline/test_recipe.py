"""Recipes: merged, overridden, and every mistake named at once with its place and the nearest right name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_module.errors import InputError
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from pipeline.recipe import load_recipe, recipe_from_dict
from pipeline.trainer_options import trainer_signature
from tests.conftest import ROOT, pipeline

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


def mistakes(path: Path, *overrides: str, trainer: dict[str, Any] | None = None) -> str:
    with pytest.raises(InputError) as caught:
        load_recipe([path], overrides, trainer)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_the_papers_base_model(tmp_path: Path) -> None:
    recipe = load_recipe([write(tmp_path, MINIMAL)])
    assert recipe.name == "recipe"
    assert (recipe.network.num_layers, recipe.network.d_model, recipe.network.d_ff) == (6, 512, 2048)
    assert (recipe.training.warmup_steps, recipe.training.label_smoothing) == (4000, 0.1)
    assert (recipe.decoding.beam_size, recipe.decoding.length_penalty) == (4, 0.6)
    assert recipe.batches.batch_tokens == 25_000
    assert recipe.corpus.vocabulary_size == 37_000
    assert recipe.corpus.train[0].source == "a.en"  # one source needs no list
    assert str(recipe.run_folder()) == "runs/recipe"


def test_overlays_and_overrides(tmp_path: Path) -> None:
    overlay = write(tmp_path, "network: {d_model: 64}\ntrainer: {max_steps: 7}", "overlay.yaml")
    base = write(tmp_path, MINIMAL + "network: {d_model: 32, d_ff: 48}\n")
    recipe = load_recipe(
        [base, overlay], ["--training.adam_epsilon", "1e-8", "--trainer.devices=[0,1]", "--batches.batch_tokens", "1e4"]
    )
    assert (recipe.network.d_model, recipe.network.d_ff) == (64, 48)
    assert recipe.trainer == {"max_steps": 7, "devices": [0, 1]}
    assert recipe.training.adam_epsilon == 1e-8  # which YAML takes for text
    assert recipe.batches.batch_tokens == 10_000
    assert recipe_from_dict(recipe.as_dict()) == recipe


def test_all_mistakes_at_once_each_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "netwerk: {}\nnetwork:\n  d_modle: 64\n  num_layers: many\n  pre_norm: 1\n")
    said = mistakes(path, "--training.warmup_step", "5")
    assert said.startswith("5 mistakes: ")
    assert f"{path}:5: netwerk is not a key; did you mean network?" in said
    assert f"{path}:7: network.d_modle is not a key; did you mean network.d_model?" in said
    assert f"{path}:8: network.num_layers has to be a whole number, not 'many'" in said
    assert f"{path}:9: network.pre_norm has to be true or false, not 1" in said
    assert "command line: training.warmup_step is not a key; did you mean training.warmup_steps?" in said


def test_values_that_cannot_be(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert "network.d_model 10 is not a multiple" in mistakes(path, "--network.d_model", "10")
    assert "label_smoothing" in mistakes(path, "--training.label_smoothing", "1.5")
    assert "batches.batch_tokens has to be a whole number, not 2.5" in mistakes(path, "--batches.batch_tokens", "2.5")
    assert "run.patience has to be a whole number, not True" in mistakes(path, "--run.patience", "true")


def test_text_sources(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL.replace("train: {source: a.en, target: a.de}", "train: {datset: a, split: train}"))
    assert f"{path}:3: corpus.train.datset is not a key; did you mean corpus.train.dataset?" in mistakes(path)
    listed = "train: [{tsv: a}, {dataset: a, splits: train}]"
    path = write(tmp_path, MINIMAL.replace("train: {source: a.en, target: a.de}", listed))
    assert "corpus.train.splits is not a key; did you mean corpus.train.split?" in mistakes(path)
    path = write(tmp_path, MINIMAL)
    said = mistakes(path, "--corpus.train", "{dataset: a/b, split: train, tsv: c}")
    assert said.startswith("command line: a text source is `source` and `target`, or `tsv`, or `dataset` and `split`;")
    assert said.endswith("this one has tsv and dataset and split")
    assert "`repeat` of a text source is 0" in mistakes(path, "--corpus.test", "{tsv: c, repeat: 0}")
    recipe = load_recipe([path], ["--corpus.test", "{dataset: a/b, subset: de-en, split: test}"])
    assert recipe.corpus.test[0].subset == "de-en"
    assert recipe_from_dict(recipe.as_dict()) == recipe


def test_the_papers_models_on_wmt14() -> None:
    base, big = (load_recipe([ROOT / f"configs/wmt14_en_de_{size}.yaml"]) for size in ("base", "big"))
    assert base.corpus == big.corpus
    assert (base.network, base.training, base.decoding) == (NetworkSettings(), TrainingSettings(), DecodingSettings())
    assert big.network == NetworkSettings(d_model=1024, d_ff=4096, num_heads=16, dropout=0.3)
    assert (base.trainer["max_steps"], big.trainer["max_steps"]) == (100_000, 300_000)


@pytest.mark.parametrize(
    "setting",
    ["run.log_every_steps=0", "run.seed=-1", "batches.workers=-1", "batches.batch_tokens=0", "decoding.beam_size=0",
     "decoding.max_extra_tokens=-1", "decoding.length_penalty=-1", "training.adam_beta2=1", "run.patience=0"],
)  # fmt: skip
def test_values_out_of_range_are_named(tmp_path: Path, setting: str) -> None:
    assert setting.split("=")[0] in mistakes(write(tmp_path, MINIMAL), f"--{setting}")


def test_trainer_values_get_their_type(tmp_path: Path) -> None:
    signature = {"max_steps": int, "devices": list[int] | str | int, "val_check_interval": int | float | None}
    arguments = ["--trainer.max_steps", "1e4", "--trainer.devices", "2", "--trainer.val_check_interval", "5"]
    recipe = load_recipe([write(tmp_path, MINIMAL)], arguments, signature)
    assert recipe.trainer == {"max_steps": 10_000, "devices": 2, "val_check_interval": 5}
    assert isinstance(recipe.trainer["max_steps"], int)


def test_trainer_keys_are_lightnings(tmp_path: Path) -> None:
    signature = {"max_steps": int, "devices": list[int] | str | int}
    path = write(tmp_path, MINIMAL)
    said = mistakes(path, "--trainer.max_step", "5", "--trainer.devices", "{}", trainer=signature)
    assert "did you mean trainer.max_steps?" in said
    assert "trainer.devices has to be" in said


def test_what_is_no_recipe(tmp_path: Path) -> None:
    assert "there is no such recipe" in mistakes(tmp_path / "none.yaml")
    broken = write(tmp_path, "a: [1,\nb: 2")
    assert f"{broken}:2" in mistakes(broken)
    assert "mapping" in mistakes(write(tmp_path, "- 1"))
    assert "corpus is missing" in mistakes(write(tmp_path, "seed: 1"))
    assert "recipe.yaml" in mistakes(write(tmp_path, "network: 3\n" + MINIMAL))
    executed = write(tmp_path, MINIMAL + "network: !!python/object/apply:os.system ['true']\n")
    assert "not valid YAML" in mistakes(executed)


def test_arguments_that_are_no_settings(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert "argument '--fersh' is unknown" in mistakes(path, "--fersh")
    assert "'--network.d_ff' needs a value" in mistakes(path, "--network.d_ff")


def test_the_command_says_it_in_one_line(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "netwerk: {}\n")
    done = pipeline("fit", "--config", path, "--trainer.max_step", 5, "--trainer.max_epochs", 3)
    assert done.returncode == 2
    said = done.stderr.decode()
    assert said.count("\n") == 1
    assert "did you mean network?" in said
    assert "did you mean trainer.max_steps?" in said
    assert "trainer.max_epochs" in said
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize("overlay", sorted((ROOT / "configs" / "hardware").glob("*.yaml")), ids=lambda path: path.stem)
def test_overlays_touch_the_trainer_only(overlay: Path) -> None:
    recipe = ROOT / "configs" / "multi30k_tiny.yaml"
    plain, laid_over = load_recipe([recipe]), load_recipe([recipe, overlay])
    assert replace(laid_over, trainer={}) == replace(plain, trainer={})
    assert laid_over.trainer != plain.trainer


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_that_come_along_load(path: Path) -> None:
    recipe = load_recipe([path])
    assert recipe.name == path.stem
    assert yaml.safe_load(path.read_text())["trainer"]["max_steps"] > 0


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "hardware").iterdir()), ids=lambda path: path.stem)
def test_overlays_fit_every_recipe(path: Path) -> None:
    """They say where a recipe runs and how often it saves, and nothing of what is learned."""
    signature = trainer_signature()
    for recipe in (ROOT / "configs").glob("*.yaml"):
        plain, laid_over = (load_recipe(paths, (), signature).as_dict() for paths in ([recipe], [recipe, path]))
        different = {key for key in plain if plain[key] != laid_over[key]}
        assert "trainer" in different
        assert different <= {"trainer", "run"}
