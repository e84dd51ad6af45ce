"""What `fit` builds from a recipe."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from data_module.corpus.manifest import read_manifest
from data_module.corpus.preparation import prepare
from data_module.tokenization.tokenizer import Tokenizer
from model.backend import Backend
from pipeline.config.recipe import Recipe, load_recipe
from pipeline.doctor.doctor import Findings
from pipeline.doctor.recipe_checks import CheckResult
from pipeline.doctor.start_checks import check_disk_space
from pipeline.metrics.metrics import METRICS, ExactMatch
from pipeline.ranks.rendezvous import other_settings
from pipeline.training.build import build_callbacks, build_data, build_module, build_trainer
from pipeline.training.start import Plan, ResumePoint, Start
from pipeline.training.trainer import trainer_options
from tests.conftest import ALONE, sentences

ORDER = ["MemoryProbe", "RunFolderSetup", "ValidationSamples", "AttentionPlots", "TrainingMonitor", "RunMetadata"]
ORDER += ["ResumableEarlyStopping", "EMA", "CheckpointCallback", "GracefulStop"]
"""`build_callbacks` gives the reasons."""


def make_start(recipe_file: Path, *overrides: object, resume: ResumePoint | None = None) -> Start:
    recipe = load_recipe([recipe_file], map(str, overrides))
    folder = recipe.corpus_folder()
    tokenizer = Tokenizer.load(folder / "tokenizer.model")
    return Start(Plan(recipe, None, False, resume), None, tokenizer, read_manifest(folder))


def callbacks(start: Start) -> dict[str, Any]:
    data = build_data(start.plan.recipe, start.tokenizer, Backend())
    return {type(callback).__name__: callback for callback in build_callbacks(start, data, Backend())}


def test_the_order_of_callbacks(recipe_file: Path) -> None:
    assert list(callbacks(make_start(recipe_file, "--run.patience", 2, "--training.ema_decay", 0.9))) == ORDER


def test_the_seed_is_that_of_initial_weights_dropout_and_the_order_of_pairs(recipe_file: Path) -> None:
    plans, weights = [], []
    for seed in (3, 4, 4):
        start = make_start(recipe_file, "--run.seed", seed)
        module = build_module(start.plan.recipe, start.tokenizer, Backend())
        assert module.seed == seed  # of dropout
        weights.append(torch.cat([weight.flatten() for weight in module.parameters()]))
        data = build_data(start.plan.recipe, start.tokenizer, Backend())
        plans.append(data.epochs().get(0).plan[0].tolist())
    for one, other, again in (plans, [weight.tolist() for weight in weights]):
        assert one != other
        assert other == again


def test_a_tokenizer_in_lower_case_is_scored_on_references_in_lower_case(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most of their letters are of a language without spaces, and the recipe does not name it."""
    recipe = load_recipe([recipe_file])
    lines = [f"{line.title()} {99 * '犬'}" for line in sentences(40, seed=7)]
    for side in ("source", "target"):
        (tmp_path / side).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    text = replace(recipe.corpus.validation[0], source=str(tmp_path / "source"), target=str(tmp_path / "target"))
    corpus = replace(recipe.corpus, folder=str(tmp_path / "corpus"), validation=[text], lowercase=True)
    prepare(corpus, progress=False)
    start = make_start(recipe_file, "--corpus.folder", corpus.folder)
    assert callbacks(start)["ValidationSamples"]._references == [line.lower() for line in lines]
    warning = "the validation text's references have no spaces between words: BLEU on 13a tokens says little"
    assert capsys.readouterr().err.count(warning) == 1


@pytest.mark.parametrize(
    ("best_by", "monitored", "mode"),
    [
        ("bleu", "validation/bleu", "max"),
        ("own", "validation/own", "min"),
        ("likelihood", "validation/negative_log_likelihood", "min"),
    ],
)
def test_a_score_chooses_in_its_direction(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, best_by: str, monitored: str, mode: str
) -> None:
    metric = ExactMatch()
    monkeypatch.setattr(metric, "higher_is_better", False, raising=False)
    monkeypatch.setitem(METRICS, "own", metric)
    built = callbacks(make_start(recipe_file, "--run.best_by", best_by, "--run.patience", 3))
    stopping = built["ResumableEarlyStopping"]
    assert (stopping.monitor, stopping.mode, stopping.check_finite) == (monitored, mode, False)
    assert built["CheckpointCallback"]._sign == (1 if mode == "max" else -1)


class Scored(LightningModule):
    """Takes steps that change nothing, and has these scores."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer, self.scores = torch.nn.Linear(1, 1), iter(scores)

    def training_step(self, batch: torch.Tensor, _: int) -> None:
        self.optimizers().step()

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.log("validation/bleu", next(self.scores))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.filterwarnings("ignore:.*LeafSpec")
def test_a_run_that_improves_before_its_least_number_of_steps_has_patience_again(recipe_file: Path) -> None:
    """At step 3 it would have ended. At step 5, the least number, the score of step 4 is the best one."""
    stopping = callbacks(make_start(recipe_file, "--run.patience", 2))["ResumableEarlyStopping"]
    steps = {"min_steps": 5, "max_steps": 9, "val_check_interval": 1, "check_val_every_n_epoch": None}
    trainer = Trainer(accelerator="cpu", callbacks=[stopping], num_sanity_val_steps=0, **ALONE, **steps)
    trainer.fit(Scored([3, 2, 1, 4, 3, 2, 1, 0, 0]), [torch.zeros(1)] * 9, [torch.zeros(1)])
    assert trainer.global_step == 6


def test_r_drop_counts_as_two_passes(recipe_file: Path) -> None:
    once, twice = (
        callbacks(make_start(recipe_file, "--training.r_drop_alpha", alpha))["TrainingMonitor"]._flops_per_token
        for alpha in (0, 5)
    )
    assert twice == 2 * once > 0


def test_a_resumed_run_keeps_the_tokenizer_of_bleu(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = make_start(recipe_file).tokenizer
    resume = ResumePoint(Path("step=00000004.ckpt"), 4, False, "char", tokenizer, {})
    for began, expected in ((resume, "char"), (None, "intl")):
        samples = callbacks(make_start(recipe_file, "--run.bleu_tokenizer", "intl", resume=began))["ValidationSamples"]
        assert samples.state_dict()["bleu_tokenizer"] == expected
        assert ("validation keeps BLEU on char tokens" in capsys.readouterr().err) == (began is not None)


def test_ranks_have_the_same_text_in_their_corpora(recipe_file: Path, tmp_path: Path) -> None:
    """The folder may be another one on each node."""
    corpus = load_recipe([recipe_file]).corpus
    copy = shutil.copytree(corpus.folder, tmp_path / "copy")
    [train], [validation] = corpus.train, corpus.validation
    other = replace(corpus, folder=str(tmp_path / "other"), tokenizer=str(copy), train=[validation])
    shorter = replace(other, folder=str(tmp_path / "shorter"), train=[train], max_tokens=8)
    for one in (other, shorter):
        prepare(one, progress=False)
    settings = []
    for folder in (corpus.folder, copy, other.folder, shorter.folder):
        start = make_start(recipe_file, "--corpus.folder", folder, "--trainer.devices", 2)
        trainer = build_trainer(start, trainer_options(start.plan.recipe.trainer), [])
        settings.append(trainer.strategy.settings)
    same, *different = (other_settings(one, settings[0]) for one in settings[1:])
    assert same == ""
    assert different[0].startswith("training pairs ")
    assert "validation tokens [" in different[1]


def room(recipe: Recipe) -> list[CheckResult]:
    findings = Findings(recipe, reads_texts=False)
    check_disk_space(recipe, findings)
    return findings.results


def test_room_for_checkpoints(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoints that a run has already take part of the room that it needs."""
    recipe = load_recipe([recipe_file], ["--run.folder", str(tmp_path / "run")])
    large = replace(recipe.network, d_model=512, d_ff=2048)

    def is_enough(free: int) -> bool:
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
        return all(result.ok for result in room(recipe))

    average = replace(recipe, training=replace(recipe.training, ema_decay=0.9))
    asked = [
        float(result.message.split("need ")[1].split()[0])
        for one in (recipe, average)
        for result in room(replace(one, network=large))
    ]
    assert asked[1] / asked[0] == pytest.approx(4 / 3, abs=0.1)
    needed = next(free for free in range(0, 1 << 30, 1 << 20) if is_enough(free))
    saved = tmp_path / "run" / "checkpoints" / "around-best" / "step=00000004.ckpt"
    saved.parent.mkdir(parents=True)
    saved.write_bytes(bytes(1 << 20))
    assert [is_enough(needed - missing) for missing in (0, 1 << 20, 2 << 20)] == [True, True, False]
    [wrong] = room(recipe)
    assert wrong.message.endswith("; lower run.keep_last or set another run.folder")
