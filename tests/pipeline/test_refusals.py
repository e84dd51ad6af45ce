"""Mistakes that `fit` refuses and `doctor` finds: the same line for both, before anything is prepared or written."""

import json
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from data_module.corpus.preparation import prepare
from data_module.errors import InputError
from model.optimization import OPTIMIZERS, muon
from pipeline.config.recipe import load_recipe
from pipeline.doctor.doctor import check_fit, load
from tests.conftest import fit_recipe, tiny_recipe


class Place:
    """A folder with texts, a recipe for them, and what a mistake needs beside it."""

    def __init__(self, folder: Path, trained_run: Path) -> None:
        self.folder, self.trained_run = folder, trained_run
        self.recipe = folder / "mine.yaml"
        self.options: list[str] = []
        self.init_from: Path | None = None

    def give(self, **settings: object) -> None:
        """Give settings on the command line; `__` in a name stands for the dot."""
        for key, value in settings.items():
            self.options += [f"--{key.replace('__', '.')}", json.dumps(value) if not isinstance(value, str) else value]

    def resume(self) -> Path:
        """Let the recipe resume a copy of the trained run, and return it."""
        run = Path(shutil.copytree(self.trained_run, self.folder / "resumed"))
        self.recipe = run / "config.yaml"
        self.give(run__folder=str(run), trainer__max_steps=300)
        return run

    def files(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.fixture
def place(tiny_corpus: Path, trained_run: Path, tmp_path: Path) -> Place:
    folder = tmp_path / "place"
    folder.mkdir()
    for file in tiny_corpus.parent.glob("*.*"):
        shutil.copy(file, folder)
    recipe = tiny_recipe(folder)
    recipe["run"]["folder"] = str(folder / "run")
    (folder / "mine.yaml").write_text(yaml.safe_dump(recipe))
    return Place(folder, trained_run)


def settings(**values: object) -> Callable[[Place], None]:
    return lambda place: place.give(**values)


def trainer(**values: object) -> Callable[[Place], None]:
    return lambda place: place.give(**{f"trainer__{key}": value for key, value in values.items()})


def prepared(**values: object) -> Callable[[Place], None]:
    """Prepare the corpus first, so that a setting can be compared with it."""

    def damage(place: Place) -> None:
        prepare(load_recipe([place.recipe]).corpus, progress=False)
        place.give(**values)

    return damage


def text(change: Callable[[bytes], bytes], is_prepared: bool = False) -> Callable[[Place], None]:
    """Change a training text, before or after the corpus is prepared."""

    def damage(place: Place) -> None:
        if is_prepared:
            prepare(load_recipe([place.recipe]).corpus, progress=False)
        path = place.folder / "train.target"
        path.write_bytes(change(path.read_bytes()))

    return damage


def a_long_validation_sentence(place: Place) -> None:
    path = place.folder / "validation.target"
    path.write_text(path.read_text().replace("\n", 30 * " the old house" + "\n", 1))
    prepared(network__learned_positions=True, network__max_positions=60)(place)


def tokenized(name: str = "", **values: object) -> Callable[[Place], None]:
    """Name the tokenizer of the trained run. The training text is not there, which would be said next."""
    return lambda place: place.give(
        corpus__tokenizer=str(place.trained_run / name), corpus__train={"source": "none", "target": "none"}, **values
    )


def photos(key: str) -> Callable[[Place], None]:
    """Name a folder of photos as that of the corpus or the run."""

    def damage(place: Place) -> None:
        (place.folder / "photos").mkdir()
        (place.folder / "photos" / "cat.jpg").touch()
        place.give(**{key: str(place.folder / "photos")})

    return damage


def resumed(**values: object) -> Callable[[Place], None]:
    """Resume the trained run with other settings."""

    def damage(place: Place) -> None:
        place.resume()
        place.give(**values)

    return damage


def begun_from_run(**values: object) -> Callable[[Place], None]:
    """Begin a run of other settings with the weights of the trained run."""

    def damage(place: Place) -> None:
        place.init_from = place.trained_run
        place.give(**values)

    return damage


def a_link(place: Place) -> None:
    run = place.resume()
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(place.folder / "train.source")


def another_format(place: Place) -> None:
    (place.resume() / "versions.json").write_text('{"format_version": 99}')


def a_damaged_checkpoint(place: Place) -> None:
    newest = place.resume() / "checkpoints" / "step=00000240.ckpt"
    torch.save(torch.load(newest, weights_only=True) | {"optimizer_states": []}, newest)


def another_vocabulary(place: Place) -> None:
    place.resume()
    corpus = Path(shutil.copytree(load_recipe([place.recipe]).corpus_folder(), place.folder / "other"))
    manifest = json.loads((corpus / "manifest.json").read_text())
    manifest["tokenizer"]["sha256"] = 64 * "0"
    (corpus / "manifest.json").write_text(json.dumps(manifest))
    place.give(corpus__folder=str(corpus))


def nothing_to_start_from(place: Place) -> None:
    place.init_from = place.folder / "none"


# What is done, and the line's words; "…" stands for a path in it.
MISTAKES: dict[str, tuple[Callable[[Place], None], str]] = {
    "devices -1": (trainer(devices=-1), "trainer.devices -1: cannot be used on a CPU; give a number of processes"),
    "a list of devices": (trainer(devices=[0]), "trainer.devices [0]: cannot be used on a CPU"),
    "no nodes": (trainer(num_nodes=0), "trainer: `num_nodes` must be a positive integer"),
    "two nodes": (trainer(num_nodes=2), "trainer.num_nodes 2: nothing starts ranks on other nodes here; use srun"),
    "a tpu": (trainer(accelerator="tpu"), "trainer.accelerator must be one of 'auto', 'cpu', 'gpu', 'cuda', not 'tpu'"),
    "no GPU": (trainer(accelerator="gpu"), "trainer.accelerator gpu: torch finds no GPU; "),
    "a precision": (trainer(precision="16-true"), "trainer.precision must be one of 'bf16-mixed', '16-mixed'"),
    "no steps": (trainer(max_steps=-1), "trainer.max_steps -1 is not a number of steps; give 1 or more"),
    "too many steps": (trainer(max_steps="1e21"), f"trainer.max_steps {10**21} is not a number of steps; give 1 or mo"),
    "steps of the least": (trainer(min_steps=-1), "trainer.min_steps -1 is not a number of steps; give 0 or more"),
    "an interval": (
        trainer(val_check_interval="1e13"),
        f"trainer.val_check_interval {10**13} is not a number of",
    ),
    "many devices": (trainer(devices=10**9), "trainer.devices 1000000000: cannot be used on a CPU; give a number of"),
    "a large network": (
        settings(network__d_model=10**6, network__d_ff=10**6, network__num_layers=100),
        "network: weights, gradients and moments need ",
    ),
    "half an interval": (trainer(val_check_interval=0.5), "trainer.val_check_interval must be a whole number, not 0.5"),
    "no duration": (trainer(max_time="45"), "trainer.max_time 45 is not a duration; give days:hours:minutes:seconds"),
    "a metric": (settings(run__best_by="exact_mach"), "run.best_by 'exact_mach' is not registered; did you mean"),
    "no such optimizer": (settings(training__optimizer="own"), "training.optimizer own: it finds no projection in thi"),
    "no warm-up": (
        settings(training__schedule="linear", training__peak_learning_rate=0.1, trainer__max_steps=5),
        "training.warmup_steps 10 leaves no step to training.schedule linear",
    ),
    "no dropout": (settings(network__dropout=0, training__r_drop_alpha=5.0), "training.r_drop_alpha 5.0 compares"),
    "pieces": (settings(corpus__vocabulary_size=-1), "corpus.vocabulary_size: must be from 1 to"),
    "a text": (lambda place: (place.folder / "train.source").unlink(), "train.source is missing; put it there"),
    "a data set": (settings(corpus__train=[{"dataset": "a/b", "split": "c"}]), "data set a/b comes from the Hugging F"),
    "a line less": (text(lambda whole: whole.split(b"\n", 1)[1]), "299 lines, but"),
    "no UTF-8": (text(lambda whole: b"H\xe4user" + whole[5:]), "train.target:1: invalid UTF-8; "),
    "another text": (text(lambda whole: whole[:-2] + b"\n", is_prepared=True), "train.target has changed"),
    "many pieces": (settings(corpus__vocabulary_size=3000), "3000 pieces are more than the training text allows; the"),
    "no such tokenizer": (tokenized("none"), "corpus.tokenizer: …/none: no such file; name a run, a bundle or a se"),
    "no tokenizer": (tokenized("config.yaml"), "corpus.tokenizer: …/config.yaml: not a tokenizer: no sentencepi"),
    "as many pieces": (tokenized(corpus__vocabulary_size=61), "corpus.vocabulary_size: 61, but … has 60 pieces; se"),
    "a symbol that it lacks": (tokenized(corpus__user_symbols=["<b>"]), "corpus.user_symbols: <b>: not in …, and a t"),
    "capitals": (tokenized(corpus__lowercase=True), "corpus.lowercase: … does not lower-case; set it to false, or na"),
    "no bytes": (tokenized(corpus__byte_fallback=True), "corpus.byte_fallback: … has no byte pieces; leave it out, o"),
    "numbers": (tokenized(corpus__split_digits=True), "corpus.split_digits: … has pieces of several digits; leave it"),
    "whole words": (
        tokenized(corpus__model_type="word"),
        "corpus.model_type: … is of type bpe; set it to bpe, or name",
    ),
    "words and bytes": (
        settings(corpus__model_type="word", corpus__byte_fallback=True),
        "corpus.byte_fallback: is not for corpus.model_type word; remove it, or choose another model_type",
    ),
    "more words": (
        settings(corpus__model_type="word", corpus__vocabulary_size=60),
        "60 pieces are more than the training text allows; the largest that works is 22",
    ),
    "no rate": (settings(training__schedule="linear"), "training.schedule linear needs training.peak_learning_rate"),
    "another corpus": (prepared(corpus__lowercase=True), "inputs or settings: corpus.lowercase was false, now true"),
    "no corpus": (photos("corpus__folder"), "is not a corpus; name another corpus.folder"),
    "no run": (photos("run__folder"), "is not empty and not a run folder; give another run.folder"),
    "a file": (
        lambda place: place.give(run__folder=str(place.folder / "train.source" / "run")),
        "cannot be written (Not a directory); give another run.folder",
    ),
    "a link": (a_link, "metrics.jsonl: is a link, which fit does not follow; remove it"),
    "another recipe": (resumed(network__d_ff=64), "contains a run of another recipe: network.d_ff was 32, now 64; "),
    # Neither the run nor the corpus has it: the way out does not lead into a second refusal.
    "another size": (resumed(corpus__vocabulary_size=50), "was 60, now 50; change it back to resume that run (its "),
    "another format": (another_format, "has format 99, and this version reads format 2"),
    "a damaged checkpoint": (a_damaged_checkpoint, "cannot be resumed from (optimizer_states is missing or wrong)"),
    "another vocabulary": (another_vocabulary, "has another vocabulary than the run in"),
    "no checkpoint": (nothing_to_start_from, "there is no such checkpoint"),
    "another network": (begun_from_run(network__d_ff=80), "has another network: network.d_ff 32 there, 80 here; give"),
    "another case": (begun_from_run(corpus__lowercase=True), "lowercase: the tokenizer of the run to start from does"),
    "micro-batches": (prepared(batches__max_tokens_per_device=5), "batches.max_tokens_per_device 5 is less than the"),
    "positions": (
        prepared(network__learned_positions=True, network__max_positions=5),
        "network.max_positions 5 is less than the longest sentence trained or validated on",
    ),
    "positions of the validation": (a_long_validation_sentence, "network.max_positions 60 is less than the longest se"),
    "no translation": (
        prepared(monitoring__attention_sentences=[13, 14], run__validation_translations=3),
        "monitoring.attention_sentences: 14 is none of the sentences that run.validation_translations 3 translates",
    ),
    "a picture": (prepared(monitoring__attention_sentences=[40]), "monitoring.attention_sentences: 40 does not exist"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_fit_and_doctor_refuse_the_same(place: Place, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(OPTIMIZERS, "own", lambda _, settings: muon([nn.Parameter(torch.ones(2))], settings))
    damage, words = MISTAKES[name]
    damage(place)
    before = place.files()
    with pytest.raises(InputError) as refused:
        fit_recipe(load_recipe([place.recipe], place.options), place.init_from)
    line = str(refused.value)
    assert re.search(re.escape(words).replace("…", ".*"), line)
    assert "\n" not in line
    asked = Namespace(config=[place.recipe], overrides=place.options, fresh=False, init_from=place.init_from)
    recipe, loaded = load(asked)
    results = [loaded, *(check_fit(recipe, None, asked) if recipe is not None else ())]
    assert [one.message for one in results if not one.ok][:1] == [line]
    assert place.files() == before


def test_a_recipe_without_mistakes_is_refused_by_neither(place: Place) -> None:
    asked = Namespace(config=[place.recipe], overrides=[], fresh=False, init_from=None)
    recipe, _ = load(asked)
    assert recipe is not None
    assert [one.message for one in check_fit(recipe, None, asked) if not one.ok] == []
