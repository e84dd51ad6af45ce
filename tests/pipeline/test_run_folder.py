"""What a run folder says to a recipe that is not the one it was begun with."""

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from pipeline.recipe import Recipe, load_recipe
from pipeline.run_folder import RunFolder, differences
from tests.conftest import ROOT


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe([ROOT / "configs" / "demo.yaml"], ["--run.folder", str(tmp_path / "run")])


def test_another_recipe(recipe: Recipe) -> None:
    folder = RunFolder(recipe.run_folder())
    assert differences(folder.path, recipe) == ([], [])
    folder.write_config(recipe, b"")
    assert differences(folder.path, recipe) == ([], [])
    wider = replace(recipe, network=replace(recipe.network, d_ff=2 * recipe.network.d_ff))
    assert differences(folder.path, wider)[0] == [f"network.d_ff {recipe.network.d_ff} -> {wider.network.d_ff}"]
    greedy = replace(recipe, decoding=replace(recipe.decoding, beam_size=1))
    assert differences(folder.path, greedy) == ([], [f"decoding.beam_size {recipe.decoding.beam_size} -> 1"])
    noted = folder.path / "versions.json"
    noted.write_text(json.dumps({**json.loads(noted.read_text()), "torch": "2.10.0", "host": "another"}))
    assert differences(folder.path, recipe) == ([], [f"torch 2.10.0 -> {version('torch')}"])
    folder.close()


def test_a_setting_newer_than_the_run_has_its_default_there(recipe: Recipe) -> None:
    folder = RunFolder(recipe.run_folder())
    folder.write_config(recipe, b"")
    config = folder.path / "config.yaml"
    written = yaml.safe_load(config.read_text())
    del written["training"]["adam_epsilon"]
    config.write_text(yaml.safe_dump(written))
    assert differences(folder.path, recipe) == ([], [])
    other = replace(recipe, training=replace(recipe.training, adam_epsilon=1e-6))
    assert differences(folder.path, other)[0] == [f"training.adam_epsilon {recipe.training.adam_epsilon} -> 1e-06"]
    # One that this version does not know is named.
    written["training"]["momentum"] = 0.5
    config.write_text(yaml.safe_dump(written))
    assert "training.momentum 0.5 -> None" in differences(folder.path, recipe)[0]
    folder.close()
