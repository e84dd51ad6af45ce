"""A run whose encoder and decoder differ in depth: every command works, and a run keeps its depths."""

import json
from pathlib import Path

import pytest
import yaml

from tests.conftest import pipeline, tiny_recipe
from tests.integration.runs import accumulator

DEPTHS = ["--network.num_encoder_layers", 3, "--network.num_decoder_layers", 1]


@pytest.fixture(scope="module")
def run(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of twelve steps with 3 encoder layers and 1 decoder layer."""
    folder = tmp_path_factory.mktemp("depths")
    recipe = tiny_recipe(tiny_corpus.parent)
    del recipe["monitoring"]  # so that pictures are drawn
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    options = ["--run.folder", folder / "run", "--monitoring.attention_layers", "[1, 2]"]
    done = pipeline("fit", "--config", folder / "tiny.yaml", *DEPTHS, *options)
    assert done.returncode == 0, done.stderr.decode()
    return folder / "run"


def images(run: Path) -> set[str]:
    return {tag for tag in accumulator(run).Tags()["images"] if tag.endswith("_1")}


def test_plots_show_the_layers_that_a_stack_has(run: Path, tmp_path: Path) -> None:
    """Layers 1 and 2 are the encoder's. By default, the first and the last layer of each stack are drawn."""
    assert images(run) == {"validation_attention/encoder_1"}
    options = ["--run.folder", tmp_path / "run", "--trainer.max_steps", 6]
    done = pipeline("fit", "--config", run.parent / "tiny.yaml", *DEPTHS, *options)
    assert done.returncode == 0, done.stderr.decode()
    assert images(tmp_path / "run") == {f"validation_attention/{kind}_1" for kind in ("encoder", "decoder", "cross")}
    options = ["--run.folder", tmp_path / "other", "--monitoring.attention_layers", "[0, 3]"]
    done = pipeline("fit", "--config", run.parent / "tiny.yaml", *DEPTHS, *options)
    assert done.returncode == 2
    error = done.stderr.decode().splitlines()[-1]
    assert error == "error: command line: monitoring.attention_layers: 3 does not exist; give numbers up to 2"


def test_every_command_works(run: Path, tiny_corpus: Path, tmp_path: Path) -> None:
    text = tiny_corpus.parent / "validation.source"
    done = pipeline("average", run, "--last", 2)
    assert done.returncode == 0, done.stderr.decode()
    done = pipeline("translate", run, text=text.read_text())
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.count(b"\n") == 40
    done = pipeline("evaluate", run, "--source", text, "--reference", text.with_suffix(".target"))
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout.splitlines()[-1])["sentences"] == 40
    done = pipeline("export", run, tmp_path / "bundle", "--format", "torchscript", "--parity-source", text)
    assert done.returncode == 0, done.stderr.decode()
    parity = json.loads((tmp_path / "bundle" / "parity.json").read_text())
    assert parity["model.ts"]["float32"]["broken"] == []  # test_export.py has the other formats, in miniature


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ([], "network.num_decoder_layers 1 -> null; network.num_encoder_layers 3 -> null; change it back"),
        ([*DEPTHS[:2], "--network.num_decoder_layers", 3], "network.num_decoder_layers 1 -> 3; change it back"),
    ],
)
def test_a_run_keeps_its_depths(run: Path, options: list[object], difference: str) -> None:
    recipe = run.parent / "tiny.yaml"
    done = pipeline("fit", "--config", recipe, "--run.folder", run, "--trainer.max_steps", 14, *options)
    assert done.returncode == 2
    [error] = [line for line in done.stderr.decode().splitlines() if line.startswith("error: ")]
    assert f"{run}: contains a run of another recipe: {difference}" in error


def test_a_run_continues_with_the_same_depths_by_other_keys(run: Path, tmp_path: Path) -> None:
    recipe = run.parent / "tiny.yaml"
    same = ["--network.num_layers", 3, "--network.num_decoder_layers", 1]
    other = ["--network.num_encoder_layers", 3, "--network.num_decoder_layers", 2]
    done = pipeline("fit", "--config", recipe, "--run.folder", run, "--trainer.max_steps", 14, *same)
    assert done.returncode == 0, done.stderr.decode()
    assert (run / "checkpoints" / "step=00000014.ckpt").is_file()
    # So does a run that starts from its weights, and one of other depths does not.
    new = ["--init-from", run, "--trainer.max_steps", 1]
    done = pipeline("fit", "--config", recipe, "--run.folder", tmp_path / "new", *new, *same)
    assert done.returncode == 0, done.stderr.decode()
    done = pipeline("fit", "--config", recipe, "--run.folder", tmp_path / "other", *new, *other)
    assert done.returncode == 2
    error = done.stderr.decode().splitlines()[-1]
    assert "has another network: network.num_decoder_layers 1 there, 2 here; give the recipe the same" in error


def test_depths_below_one_are_refused(run: Path, tmp_path: Path) -> None:
    for key, value in (("num_encoder_layers", 0), ("num_decoder_layers", -1)):
        done = pipeline(
            "fit", "--config", run.parent / "tiny.yaml", "--run.folder", tmp_path / "run", f"--network.{key}", value
        )
        assert done.returncode == 2
        assert f"network.{key} {value} is not 1 or more" in done.stderr.decode().splitlines()[-1]
