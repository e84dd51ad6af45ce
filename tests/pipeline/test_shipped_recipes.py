"""`recipe list` and `recipe copy`: names, and copies that are the same recipe in another folder."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.recipe import load_recipe
from pipeline.config.recipe_files import MODELINE, SCHEMA, shipped_recipes
from tests.conftest import refusal, run_here
from tests.pipeline.test_configs import CONFIGS, RECIPES, name_of


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_a_copy_is_the_same_recipe(path: Path, tmp_path: Path) -> None:
    name = name_of(path)
    run_here("recipe", "copy", name, tmp_path / "own.yaml")
    assert load_recipe([tmp_path / "own.yaml"]) == replace(load_recipe([path]), name="own")
    for copy in tmp_path.glob("*.yaml"):
        assert copy.read_text().splitlines()[0] == f"{MODELINE}{SCHEMA}"
    assert (tmp_path / SCHEMA).read_bytes() == (CONFIGS / SCHEMA).read_bytes()


def copied(name: str, place: Path) -> list[str]:
    """What `recipe copy` prints: the files that it writes."""
    return run_here("recipe", "copy", name, place)[0].splitlines()


def test_a_recipe_is_copied_with_those_that_it_extends(tmp_path: Path) -> None:
    printed = [Path(line).name for line in copied("table3/big", tmp_path)]
    assert printed == ["big.yaml", "wmt14_en_de_big.yaml", "wmt14_en_de_base.yaml", SCHEMA]
    assert sorted(printed) == sorted(path.name for path in tmp_path.iterdir())
    # What is there already and is the same is left as it is.
    assert [Path(line).name for line in copied("table3/a_heads_1", tmp_path)] == ["a_heads_1.yaml", SCHEMA]


def test_folders_are_made(tmp_path: Path) -> None:
    for to, written in (("new/folder", "new/folder/demo.yaml"), ("other/own.yaml", "other/own.yaml")):
        assert copied("demo", tmp_path / to)[0] == str(tmp_path / written)
        assert {path.name for path in (tmp_path / written).parent.iterdir()} == {Path(written).name, SCHEMA}


def test_the_list_has_every_recipe_and_overlay() -> None:
    lines = run_here("recipe", "list")[0].splitlines()
    assert len(lines) == len(list(CONFIGS.rglob("*.yaml")))
    listed = {name: text.strip() for name, text in (line.split(maxsplit=1) for line in lines)}
    assert listed["hardware/one_gpu"] == "One GPU, in bfloat16 mixed precision (Ampere and later)"
    assert listed["multi30k_tiny"].endswith("with the published network of 2.6 M parameters (Wu et al. 2021)")
    assert shipped_recipes()["table3/big"] == CONFIGS / "table3" / "big.yaml"
    assert all(listed.values())


def test_a_link_is_followed_to_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("disk").mkdir()
    Path("link.yaml").symlink_to("disk/own.yaml")
    assert copied("demo", Path("link.yaml")) == ["link.yaml", SCHEMA]
    assert Path("link.yaml").readlink() == Path("disk/own.yaml")
    Path("best.yaml").symlink_to("multi30k_tiny.yaml")
    said = "multi30k_tiny.yaml: is file too; give another file"  # which it extends
    assert said in refusal("recipe", "copy", "multi30k_best", "best.yaml")
    assert not Path("multi30k_tiny.yaml").exists()


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = functools.partial(refusal, "recipe")
    monkeypatch.chdir(tmp_path)
    assert error("copy", "dmo") == "error: 'dmo' is not a shipped recipe; did you mean demo?"
    assert "`python -m pipeline recipe list` lists them" in error("copy", "xyzxyz")
    (tmp_path / "demo.yaml").write_text("mine")
    assert error("copy", "demo").startswith("error: demo.yaml: exists already; give another file")
    assert (tmp_path / "demo.yaml").read_text() == "mine"
    (tmp_path / "multi30k_tiny.yaml").write_text("mine")
    assert error("copy", "multi30k_best") == (
        "error: multi30k_tiny.yaml: multi30k_best extends it, and it is not the shipped one; copy to another folder"
    )
    assert not (tmp_path / "multi30k_best.yaml").exists()
    assert "extends one of that name" in error("copy", "wmt14_en_de_big", "wmt14_en_de_base.yaml")
    assert "invalid choice" in error("remove", "demo")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.yaml", "multi30k_tiny.yaml"]
