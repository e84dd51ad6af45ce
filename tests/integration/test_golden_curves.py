"""The losses of 20 steps, in float64, are those in golden_curves.txt.

Its columns: `demo` is the demo's recipe with smaller batches and the paper's optimizer, without dropout; `dropout` is
the same with dropout, and several micro-batches a step; `base` has the layers and heads of the base model, and an
eighth of its width. All train on what the demo's grammar writes first. Text, pieces, order of pairs, initial weights,
network, loss, schedule, optimizer and dropout's seeds all have a part in them. After a change that is
meant to move them, write the file anew:

    OMP_NUM_THREADS=1 python -m tests.integration.test_golden_curves

With the instructions of AVX2 and with those of SSE alone, losses differ by 9e-16 at most, the last bit of a number. The
bound is larger, for other processors; a learning rate or a label smoothing that differs by a millionth moves them by
1e-8.
"""

import random
import tempfile
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from data_module.corpus.manifest import corpus_tokenizer
from data_module.corpus.preparation import prepare
from data_module.demo.corpus import Author, Lexicon, distinct_sentences
from model.backend import Backend
from model.training_module import StepOutputs
from pipeline.config.recipe import Recipe, load_recipe
from pipeline.training.build import build_data, build_module
from tests.conftest import ALONE, ROOT

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]
CURVES = Path(__file__).with_name("golden_curves.txt")
TOLERANCE = 1e-12
PAPER = "--training.optimizer adam --training.schedule paper --training.peak_learning_rate null"
PAPER += " --training.warmup_steps 400"
RECIPES = {
    "demo": f"demo {PAPER} --network.dropout 0",
    "dropout": f"demo {PAPER} --batches.max_tokens_per_device 150",
    "base": "wmt14_en_de_base --network.dropout 0 --network.d_model 64 --network.d_ff 256 --training.warmup_steps 10",
}
"""A recipe and its changes, for each curve."""


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: StepOutputs, *_: object
    ) -> None:
        self.losses.append(float(outputs["smoothed"] / outputs["tokens"]))


def golden_recipe(name: str, folder: Path) -> Recipe:
    given, *changes = RECIPES[name].split()
    for split in ("train", "validation"):
        changes += [f"--corpus.{split}={{source: {folder}/{split}.en, target: {folder}/{split}.de}}"]
    changes += [f"--corpus.folder={folder}/corpus", "--corpus.vocabulary_size=400", "--batches.batch_tokens=256"]
    return load_recipe([ROOT / "configs" / f"{given}.yaml"], [*changes, "--batches.workers=0"])


def prepare_text(folder: Path) -> Path:
    """Write the first 300 pairs of the demo, and 9 for validation, and prepare their corpus."""
    pairs = list(islice(distinct_sentences(Author(Lexicon(), random.Random(1))), 309))
    for split, part in (("train", pairs[:300]), ("validation", pairs[300:])):
        (folder / f"{split}.en").write_text("".join(f"{pair.english}\n" for pair in part), encoding="utf-8")
        (folder / f"{split}.de").write_text("".join(f"{pair.german}\n" for pair in part), encoding="utf-8")
    prepare(golden_recipe("demo", folder).corpus, progress=False)
    return folder


def curve(name: str, folder: Path) -> list[float]:
    """Train for 20 steps, which are more than an epoch, and return their losses."""
    recipe, found = golden_recipe(name, folder), Losses()
    tokenizer = corpus_tokenizer(recipe.corpus_folder())
    options = {"max_steps": 20, "accelerator": "cpu", "precision": "64-true", "limit_val_batches": 0}
    trainer = Trainer(**options, callbacks=[found], **ALONE)
    with trainer.init_module():
        module = build_module(recipe, tokenizer, Backend())
    trainer.fit(module, build_data(recipe, tokenizer, Backend()))
    return found.losses


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_golden_curve(text: Path, name: str) -> None:
    expected = np.genfromtxt(CURVES, names=True)[name]
    assert curve(name, text) == pytest.approx(expected.tolist(), rel=0.0, abs=TOLERANCE)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        place = prepare_text(Path(folder))
        curves = [curve(name, place) for name in RECIPES]
    lines = [" ".join(RECIPES), *(" ".join(map(repr, losses)) for losses in zip(*curves, strict=True))]
    CURVES.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
