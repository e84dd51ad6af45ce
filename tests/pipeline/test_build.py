"""What `fit` builds from a recipe."""

from pathlib import Path

from data_module.corpus.manifest import read_manifest
from data_module.tokenization.tokenizer import Tokenizer
from pipeline.config.recipe import load_recipe
from pipeline.training.build import build_callbacks, build_data
from pipeline.training.start import Start
from pipeline.training.trainer import trainer_options

ORDER = [
    "MemoryProbe",
    "RunFolderSetup",
    "ValidationSamples",
    "AttentionPlots",
    "TrainingMonitor",
    "RunMetadata",
    "ResumableEarlyStopping",
    "EMA",
    "CheckpointCallback",
    "GracefulStop",
]
"""`build_callbacks` gives the reasons."""


def test_the_order_of_callbacks(recipe_file: Path) -> None:
    recipe = load_recipe([recipe_file], ["--run.patience", "2", "--training.ema_decay", "0.9"])
    folder = recipe.corpus_folder()
    tokenizer = Tokenizer.load(folder / "tokenizer.model")
    start = Start(recipe, None, None, False, None, None, tokenizer, read_manifest(folder))
    callbacks = build_callbacks(start, build_data(recipe, tokenizer, trainer_options(recipe.trainer)))
    assert [type(callback).__name__ for callback in callbacks] == ORDER
