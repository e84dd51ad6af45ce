"""The recipes in configs/: they load, have the paper's hyperparameters and parameter counts, and train."""

import subprocess
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import yaml

from data_module.corpus.noise import NOISE_KINDS
from model.optimization import build_schedule
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from model.transformer import Transformer
from pipeline.config.recipe import Recipe, load_recipe
from tests.conftest import ROOT

CONFIGS = ROOT / "configs"
TRACKED = subprocess.run(["git", "ls-files"], cwd=CONFIGS, capture_output=True, text=True, check=False).stdout.split()
"""Untracked recipes, which are the user's own, are not tested. Without git, all recipes are."""
RECIPES = sorted(
    path
    for path in CONFIGS.rglob("*.yaml")
    if path.parent.name != "hardware"
    and path.name != "robust_text.yaml"
    and (not TRACKED or str(path.relative_to(CONFIGS)) in TRACKED)
)
OVERLAYS = sorted((CONFIGS / "hardware").glob("*.yaml"))

PARAMETERS = {
    **{f"table3/a_heads_{heads}": (63_082_496, None) for heads in (1, 4, 16, 32)},
    **{f"table3/d_{kind}_{value}": (63_082_496, None) for kind in ("dropout", "smoothing") for value in (0.0, 0.2)},
    "table3/b_keys_16": (55_990_784, 58),
    "table3/b_keys_32": (58_354_688, 60),
    "table3/c_layers_2": (33_656_832, 36),
    "table3/c_layers_4": (48_369_664, 50),
    "table3/c_layers_8": (77_795_328, 80),
    "table3/c_model_256": (26_834_944, 28),
    "table3/c_model_1024": (163_889_152, 168),
    "table3/c_inner_1024": (50_487_296, 53),
    "table3/c_inner_4096": (88_272_896, 90),
    "table3/e_learned_positions": (63_344_640, None),
    "table3/big": (214_245_376, 213),
    "wmt14_en_de_base": (63_082_496, 65),
    "wmt14_en_de_big": (214_245_376, 213),
    "wmt14_en_fr_base": (60_522_496, None),
    "wmt14_en_fr_big": (209_125_376, None),
    "wmt14_en_de_many_gpus": (214_245_376, None),
    "wmt14_en_de_record": (214_249_472, None),
    "deep_encoder": (65_180_672, None),
}
"""Parameter counts computed by hand, and the count in millions of the paper's Table 3, if given.

The base model, with a vocabulary of 37,000 and d_model 512, has embeddings (37,000 x 512), six encoder layers with one
attention, one feed-forward layer and two layer norms each, and six decoder layers with two attentions, one feed-forward
layer and three layer norms each. An attention has 4 x (512 x 512 + 512) parameters, a feed-forward layer
2 x 512 x 2048 + 2048 + 512, a layer norm 2 x 512. Learned positions add 512 x 512, pre-norm adds two final layer norms.
"""


def name_of(path: Path) -> str:
    return str(path.relative_to(CONFIGS).with_suffix(""))


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_loads(path: Path) -> None:
    recipe = load_recipe([path])
    assert recipe.name == path.stem
    assert recipe.trainer["max_steps"] > 0
    if path.stem not in ("demo", "your_text"):
        own = path.relative_to(ROOT)
        commands = ("fit --config", "slurm/train.sbatch", "synthesize back-translation --config")
        assert any(f"{command} {own}" in path.read_text() for command in commands)


def test_parameters_covers_every_recipe_of_wmt14() -> None:
    folders = {path: load_recipe([path]).corpus.folder for path in RECIPES}
    assert {name_of(path) for path, folder in folders.items() if folder.startswith("data/wmt14/")} == set(PARAMETERS)


def test_the_deep_encoder_differs_from_base_in_its_depths() -> None:
    deep, base = (load_recipe([CONFIGS / f"{name}.yaml"]) for name in ("deep_encoder", "wmt14_en_de_base"))
    assert (deep.network.encoder_layers, deep.network.decoder_layers) == (12, 2)
    assert replace(deep, name=base.name, network=base.network) == base
    assert replace(deep.network, num_encoder_layers=None, num_decoder_layers=None) == base.network


@pytest.mark.parametrize("name", PARAMETERS)
def test_number_of_parameters(name: str) -> None:
    expected, paper_millions = PARAMETERS[name]
    recipe = load_recipe([CONFIGS / f"{name}.yaml"])
    with torch.device("meta"):
        network = Transformer(recipe.corpus.vocabulary_size, recipe.network)
    assert sum(p.numel() for p in network.parameters()) == expected
    if paper_millions is not None:
        assert abs(expected / 1e6 - paper_millions) <= 0.07 * paper_millions


def test_the_papers_models() -> None:
    """The hyperparameters of sections 5 and 6.1."""
    base, big = (load_recipe([CONFIGS / f"wmt14_en_de_{size}.yaml"]) for size in ("base", "big"))
    french, french_big = (load_recipe([CONFIGS / f"wmt14_en_fr_{size}.yaml"]) for size in ("base", "big"))
    assert (base.network, base.training, base.decoding) == (NetworkSettings(), TrainingSettings(), DecodingSettings())
    large = NetworkSettings(d_model=1024, d_ff=4096, num_heads=16, dropout=0.3)
    assert (big.network, french_big.network) == (large, replace(large, dropout=0.1))
    assert [r.trainer["max_steps"] for r in (base, big, french, french_big)] == [100_000, 300_000, 100_000, 300_000]
    assert [r.run.keep_last for r in (base, big, french, french_big)] == [5, 20, 5, 20]
    assert {r.run.checkpoint_every_minutes for r in (base, big, french, french_big)} == {10}
    assert {r.batches.batch_tokens for r in (base, big, french, french_big)} == {25_000}
    assert (base.corpus, french.corpus) == (big.corpus, french_big.corpus)
    assert (base.corpus.vocabulary_size, french.corpus.vocabulary_size) == (37_000, 32_000)
    assert (french.corpus.train[0].subset, french.corpus.target_language) == ("fr-en", "fr")


@pytest.mark.parametrize("path", sorted((CONFIGS / "table3").iterdir()), ids=lambda path: path.stem)
def test_a_row_changes_only_its_section(path: Path) -> None:
    """Rows of Table 3 differ from the base or big recipe in one section and in the name."""
    other = "big" if path.stem == "big" else "base"
    row, plain = load_recipe([path]), load_recipe([CONFIGS / f"wmt14_en_de_{other}.yaml"])
    changed = {
        section for section in [one.name for one in fields(row)] if getattr(row, section) != getattr(plain, section)
    }
    assert changed == {"name"} | {"big": set(), "d_smoothing_0.0": {"training"}, "d_smoothing_0.2": {"training"}}.get(
        path.stem, {"network"}
    )


def peak_learning_rate(recipe: Recipe) -> float:
    """Return the learning rate at the end of the warm-up, which is the highest one."""
    schedule = build_schedule(recipe.training, recipe.network.d_model, recipe.trainer["max_steps"])
    warmup_steps = recipe.training.warmup_steps
    assert schedule(warmup_steps) > max(schedule(warmup_steps - 1), schedule(warmup_steps + 1))
    return schedule(warmup_steps)


def test_modern_recipes_have_the_peak_learning_rates_of_their_sources() -> None:
    many, record, tiny, iwslt = (
        load_recipe([CONFIGS / f"{name}.yaml"])
        for name in ("wmt14_en_de_many_gpus", "wmt14_en_de_record", "multi30k_tiny", "iwslt14_de_en")
    )
    assert peak_learning_rate(many) == pytest.approx(1e-3, rel=1e-3)
    assert peak_learning_rate(record) == pytest.approx(1.9e-3, rel=1e-3)
    assert peak_learning_rate(tiny) == pytest.approx(5e-3, rel=1e-3)
    assert (many.batches.batch_tokens, record.batches.batch_tokens) == (400_000, 101_000)
    assert peak_learning_rate(iwslt) == 5e-4
    assert (iwslt.training.weight_decay, iwslt.network.dropout, iwslt.network.d_ff) == (1e-4, 0.3, 1024)
    assert (iwslt.network.attention_dropout, iwslt.network.activation_dropout) == (0.0, 0.0)
    assert (record.network.attention_dropout, record.network.activation_dropout) == (0.1, 0.1)


PLAIN = [path for path in RECIPES if path.parent.name != "table3"]
"""Without the rows of Table 3, which change a network or a loss: see `test_a_row_changes_only_its_section`."""


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_overlays_fit_every_recipe(overlay: Path) -> None:
    """Overlays change only `trainer` and `run`, so that they do not affect what is learned."""
    settings = yaml.safe_load(overlay.read_text())
    for path in PLAIN:
        plain, with_overlay = (load_recipe(paths).as_dict() for paths in ([path], [path, overlay]))
        different = {key for key in plain if plain[key] != with_overlay[key]}
        assert settings["trainer"].items() <= with_overlay["trainer"].items()
        assert different <= {"trainer", "run"}


def test_the_overlay_of_noise_fits_every_recipe() -> None:
    """It changes noise, variants and byte fallback alone, and each kind of noise is on in few pairs."""
    for path in PLAIN:
        plain, noisy = load_recipe([path]), load_recipe([path, CONFIGS / "robust_text.yaml"])
        kinds = {kind: getattr(noisy.corpus.noise, kind) for kind in NOISE_KINDS}
        assert 0.01 <= min(kinds.values()) <= max(kinds.values()) <= 0.1
        assert sum(kinds.values()) < 0.5
        assert noisy.corpus.byte_fallback
        same = {key: getattr(plain.corpus, key) for key in ("noise", "variants", "byte_fallback")}
        assert replace(noisy, corpus=replace(noisy.corpus, **same)) == plain
