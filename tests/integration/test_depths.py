"""A run whose encoder and decoder differ in depth shows the layers that each stack has."""

from pathlib import Path

import yaml

from tests.conftest import pipeline, tiny_recipe
from tests.integration.runs import accumulator


def test_plots_show_the_layers_that_a_stack_has(tiny_corpus: Path, tmp_path: Path) -> None:
    """By default, the first and the last layer of each stack are drawn."""
    recipe = tiny_recipe(tiny_corpus.parent)
    del recipe["monitoring"]  # so that pictures are drawn
    recipe["network"] |= {"num_encoder_layers": 3, "num_decoder_layers": 1}
    recipe["trainer"]["max_steps"] = 6
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    # Layers 1 and 2 are the encoder's.
    for name, options, kinds in (
        ("chosen", ["--monitoring.attention_layers", "[1, 2]"], ("encoder",)),
        ("default", [], ("encoder", "decoder", "cross")),
    ):
        done = pipeline("fit", "--config", tmp_path / "tiny.yaml", "--run.folder", tmp_path / name, *options)
        assert done.returncode == 0, done.stderr.decode()
        images = {tag for tag in accumulator(tmp_path / name).Tags()["images"] if tag.endswith("_1")}
        assert images == {f"validation_attention/{kind}_1" for kind in kinds}
