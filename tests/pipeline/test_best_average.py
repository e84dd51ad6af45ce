"""`average --best` on a real run, against averages, scores and a greedy search computed by plain loops."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
import yaml

from data_module.corpus.store import open_corpus
from data_module.errors import InputError
from model.decoding import BeamSearch
from pipeline.__main__ import main
from pipeline.checkpointing.checkpoint import (
    WeightMean,
    average,
    load_model,
    network_weights,
    read_checkpoint,
    resolve_checkpoint,
    write_atomic,
)
from pipeline.checkpointing.checkpoint_files import (
    around_best_checkpoints,
    around_best_path,
    nearest_steps,
    step_checkpoints,
    step_of,
    step_path,
)
from pipeline.inference.best_average import BestAverage, greedy_search, saved_checkpoints
from pipeline.inference.validation_scorer import ValidationScorer
from pipeline.monitoring.log_files import read_metrics
from tests.conftest import pipeline, tiny_recipe

EVERY = 20


@pytest.fixture(scope="module")
def run(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with ten checkpoints, each of them validated."""
    folder = tmp_path_factory.mktemp("best-average")
    values = tiny_recipe(tiny_corpus.parent)
    values["trainer"] |= {"max_steps": 10 * EVERY, "val_check_interval": EVERY}
    values["training"] |= {"warmup_steps": 50}
    values["run"] |= {"checkpoint_every_steps": EVERY, "keep_last": 10}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values))
    done = pipeline("fit", "--config", folder / "tiny.yaml", "--run.folder", folder / "run")
    assert done.returncode == 0, done.stderr.decode()
    return folder / "run"


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


class Plain:
    """Scores of averages of a run's checkpoints, one pair at a time and without padding."""

    def __init__(self, run: Path) -> None:
        model = load_model(step_checkpoints(run)[-1])
        self.network, self.tokenizer, self.decoding = model.network, model.tokenizer, model.decoding
        folder = Path(model.recipe["corpus"]["folder"])
        corpus = open_corpus(folder, "validation")
        self.references = (folder / "validation.target.txt").read_text().splitlines()
        self.pairs = []
        for pair in range(len(corpus)):
            ids = [
                torch.from_numpy(side.tokens[side.offsets[pair] : side.offsets[pair + 1]].astype("int64"))
                for side in (corpus.source, corpus.target)
            ]
            self.pairs.append([torch.cat([one, torch.tensor([self.tokenizer.eos_id])]) for one in ids])
        paths = (*around_best_checkpoints(run), *step_checkpoints(run))
        self.weights = {step_of(path): network_weights(torch.load(path, weights_only=True)) for path in paths}

    def load(self, steps: list[int]) -> None:
        states = [self.weights[step] for step in steps]
        self.network.load_state_dict(
            {name: sum(one[name].double() for one in states) / len(steps) for name in states[0]}
        )

    @torch.no_grad()
    def likelihood(self, steps: list[int]) -> float:
        """The mean negative log-likelihood of a target token."""
        self.load(steps)
        total, tokens = 0.0, 0
        for source, target in self.pairs:
            given = torch.cat([torch.tensor([self.tokenizer.bos_id]), target[:-1]])
            states = self.network(source[None], given[None], None)[0]
            probabilities = (states @ self.network.embedding.weight.T).double().log_softmax(-1)
            total -= float(probabilities[torch.arange(len(target)), target].sum())
            tokens += len(target)
        return total / tokens

    @torch.no_grad()
    def bleu(self, steps: list[int]) -> float:
        self.load(steps)
        search = BeamSearch(self.network, self.tokenizer.bos_id, self.tokenizer.eos_id, self.tokenizer.pad_id)
        found = [search.greedy(source[None], None, self.decoding.max_extra_tokens) for source, _ in self.pairs]
        texts = [self.tokenizer.decode([one.tokens[0, : int(one.lengths[0]) - 1].tolist()])[0] for one in found]
        return sacrebleu.corpus_bleu(texts, [self.references]).score

    def greedy(self, limit: int) -> list[int]:
        """The steps of a greedy search by likelihood, in the order in which they are added."""
        chosen: list[int] = []
        lowest = float("inf")
        while len(chosen) < limit:
            scores = {step: self.likelihood([*chosen, step]) for step in self.weights if step not in chosen}
            step = min(scores, key=lambda one: scores[one])
            if scores[step] >= lowest:
                break
            chosen.append(step)
            lowest = scores[step]
        return chosen


def best(run: Path, count: int) -> dict[str, Any]:
    """Run the command and return its record."""
    assert main(["average", str(run), "--best", str(count)]) == 0
    return json.loads((run / f"average-best-{count}.json").read_text())


def spoil(path: Path, noise: float) -> None:
    """Make a checkpoint worse."""
    contents = torch.load(path, weights_only=True)
    generator = torch.Generator().manual_seed(1)
    for tensor in contents["state_dict"].values():
        tensor += noise * torch.randn(tensor.shape, generator=generator)
    write_atomic(contents, path)


def rewrite_scores(run: Path, bleu: dict[int, float]) -> None:
    """Replace the logged validation scores."""
    lines = [{"step": step, "time": 0.0, "validation/bleu": score} for step, score in bleu.items()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("better", [None, 4])
def test_both_averages_are_those_of_plain_loops(
    copied: Path, better: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the run's own scores, and with scores that have their best in the middle of the run."""
    if better is not None:
        rewrite_scores(copied, {EVERY * step: 9.0 - abs(step - better) for step in range(1, 11)})
    scores = {line["step"]: line["validation/bleu"] for line in read_metrics(copied) if "validation/bleu" in line}
    best_step = max(scores, key=lambda step: (scores[step], -step))
    plain = Plain(copied)
    record = best(copied, 3)
    output = capsys.readouterr()
    assert record["option"] == "--best 3"
    assert record["run_step"] == 10 * EVERY
    assert record["best_validation"] == {"step": best_step, "bleu": scores[best_step]}
    nearest = sorted(plain.weights, key=lambda step: (abs(step - best_step), -step))[:3]
    assert record["window"]["steps"] == sorted(nearest)
    added = plain.greedy(3)
    assert [one["added"] for one in record["greedy"]["search"]] == added
    assert record["greedy"]["steps"] == sorted(added)
    for number, one in enumerate(record["greedy"]["search"], 1):
        assert one["negative_log_likelihood"] == pytest.approx(plain.likelihood(added[:number]), rel=1e-5)
    for one in record["checkpoints"]:
        assert one["negative_log_likelihood"] == pytest.approx(plain.likelihood([one["step"]]), rel=1e-5)
        assert one["checkpoint"] == f"step={one['step']:08d}.ckpt"
    for name in ("window", "greedy"):
        steps = record[name]["steps"]
        assert record[name]["negative_log_likelihood"] == pytest.approx(plain.likelihood(steps), rel=1e-5)
        assert record[name]["bleu"] == pytest.approx(plain.bleu(steps), abs=1e-4)
    assert record["chosen"] == max(
        ("window", "greedy"), key=lambda name: (record[name]["bleu"], -record[name]["negative_log_likelihood"])
    )
    if better is not None:
        assert record["window"]["steps"] != record["greedy"]["steps"]
    chosen = record[record["chosen"]]["steps"]
    plain.load(chosen)
    written = read_checkpoint(copied / "average-best-3.ckpt")
    for name, tensor in plain.network.state_dict().items():
        torch.testing.assert_close(network_weights(written)[name], tensor, rtol=1e-6, atol=1e-9)
    assert written["selection"] == record
    assert written["averaged"] == [f"step={step:08d}.ckpt" for step in chosen]
    assert output.out == f"{copied / 'average-best-3.ckpt'}\n"
    assert f"averaged {', '.join(written['averaged'])}\n" in output.err


def test_scores_are_those_of_the_run_s_validations(run: Path, tmp_path: Path) -> None:
    logged = {line["step"]: line for line in read_metrics(run) if "validation/bleu" in line}
    search = BestAverage(run, saved_checkpoints(run))
    for step in (4 * EVERY, 10 * EVERY):
        scores = search._scores([step], "one")
        assert scores["bleu"] == pytest.approx(logged[step]["validation/bleu"], abs=1e-3)
        likelihood = logged[step]["validation/negative_log_likelihood"]
        assert scores["negative_log_likelihood"] == pytest.approx(likelihood, rel=1e-5)


def test_checkpoints_that_became_worse_are_left_out(copied: Path) -> None:
    """The last three are worse than the rest: no average has them, though they are the newest."""
    worse = step_checkpoints(copied)[-3:]
    for path in worse:
        spoil(path, 0.3)
    rewrite_scores(copied, {2 * EVERY: 5.0, 5 * EVERY: 30.0, 10 * EVERY: 1.0})
    record = best(copied, 4)
    spoiled = {step_of(path) for path in worse}
    assert not spoiled & {*record["window"]["steps"], *record["greedy"]["steps"]}
    assert record["window"]["steps"] == [step * EVERY for step in (4, 5, 6, 7)]
    assert not {path.name for path in worse} & set(read_checkpoint(copied / "average-best-4.ckpt")["averaged"])
    assert main(["average", str(copied), "--last", "4"]) == 0
    plain = Plain(copied)
    last = [step * EVERY for step in (7, 8, 9, 10)]
    assert record[record["chosen"]]["negative_log_likelihood"] < plain.likelihood(last)


def test_bleu_decides_for_either_average(copied: Path) -> None:
    # The logged scores name the worst checkpoints as the best ones: the window is of these.
    rewrite_scores(copied, {EVERY: 99.0})
    record = best(copied, 2)
    assert record["window"]["steps"] == [EVERY, 2 * EVERY]
    assert record["chosen"] == "greedy"
    assert record["greedy"]["bleu"] > record["window"]["bleu"]
    # A search that cannot add the better ones loses against the window.
    for path in step_checkpoints(copied)[:-1]:
        path.unlink()
    (copied / "checkpoints" / "best.ckpt").unlink()
    record = best(copied, 1)
    assert record["window"]["steps"] == record["greedy"]["steps"] == [10 * EVERY]
    assert record["chosen"] == "window"


def test_the_window_wins_if_it_translates_better(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = BestAverage(copied, saved_checkpoints(copied))
    # The search finds the worst checkpoint.
    monkeypatch.setattr(
        search, "_search", lambda count, alone: alone.update(dict.fromkeys(search._saved, 0.0)) or [(EVERY, 0.0)]
    )
    record = search.choose(10 * EVERY, 2)
    assert record["greedy"]["steps"] == [EVERY]
    assert record["window"]["bleu"] > record["greedy"]["bleu"]
    assert record["chosen"] == "window"


def test_the_best_checkpoint_counts_if_its_step_was_not_saved(copied: Path) -> None:
    contents = torch.load(step_checkpoints(copied)[7], weights_only=True)
    write_atomic({**contents, "global_step": 77}, copied / "checkpoints" / "best.ckpt")
    rewrite_scores(copied, {77: 50.0})
    record = best(copied, 3)
    assert record["window"]["steps"] == [3 * EVERY, 77, 4 * EVERY]
    assert {"step": 77, "checkpoint": "best.ckpt"}.items() <= record["checkpoints"][3].items()


def test_checkpoints_around_the_best_are_used(copied: Path) -> None:
    for path in step_checkpoints(copied)[:6]:
        target = around_best_path(copied, step_of(path))
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    rewrite_scores(copied, {2 * EVERY: 49.0, 3 * EVERY: 50.0, 8 * EVERY: 50.0})
    record = best(copied, 3)
    assert record["best_validation"] == {"step": 3 * EVERY, "bleu": 50.0}  # the first of equal ones
    assert record["window"]["steps"] == [2 * EVERY, 3 * EVERY, 4 * EVERY]
    assert [one["step"] for one in record["checkpoints"]] == [step * EVERY for step in range(1, 11)]
    # They are no newest checkpoints.
    assert main(["average", str(copied), "--last", "5"]) == 2


def test_files_that_fit_moves_or_removes_during_the_search(copied: Path) -> None:
    expected = average(step_checkpoints(copied)[:3])["state_dict"]
    search = BestAverage(copied, saved_checkpoints(copied))
    for path in step_checkpoints(copied)[:3]:
        target = around_best_path(copied, step_of(path))
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    record = search.choose(2 * EVERY, 3)
    assert record["window"]["steps"] == [EVERY, 2 * EVERY, 3 * EVERY]
    mean = search.average(record["window"]["steps"])["state_dict"]
    assert all(torch.equal(mean[name], tensor) for name, tensor in expected.items())
    around_best_path(copied, EVERY).unlink()
    with pytest.raises(
        InputError, match=r"step=00000020\.ckpt: fit has removed it during the comparison; run the same"
    ):
        search.choose(2 * EVERY, 3)


def test_a_best_checkpoint_that_is_replaced_during_the_search(copied: Path) -> None:
    best_path = copied / "checkpoints" / "best.ckpt"
    contents = torch.load(best_path, weights_only=True)
    write_atomic({**contents, "global_step": 77}, best_path)
    saved = saved_checkpoints(copied)
    assert saved[77].read()["global_step"] == 77
    write_atomic({**contents, "global_step": 201}, best_path)
    with pytest.raises(InputError, match=r"best\.ckpt: fit has removed it"):
        saved[77].read()


def test_the_average_is_used_until_the_run_goes_on(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite_scores(copied, {3 * EVERY: 50.0})
    for path in step_checkpoints(copied)[-3:]:
        spoil(path, 0.3)
    record = best(copied, 2)
    assert max(record[record["chosen"]]["steps"]) < record["run_step"]
    capsys.readouterr()
    assert resolve_checkpoint(copied).name == "average-best-2.ckpt"
    assert capsys.readouterr().err == ""
    shutil.copy(step_path(copied, 10 * EVERY), step_path(copied, 10 * EVERY + 1))
    assert resolve_checkpoint(copied).name == "best.ckpt"
    assert capsys.readouterr().err == (
        f"average-best-2.ckpt is of step {10 * EVERY} and the run is at step {10 * EVERY + 1}, so best.ckpt is used; "
        f"to average again, run: python -m pipeline average {copied} --best 2\n"
    )


def test_one_checkpoint_is_mapped_at_a_time(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[set[str]] = []
    score = ValidationScorer.negative_log_likelihood

    def recorded(scorer: ValidationScorer, progress: Any) -> float:
        lines = Path("/proc/self/maps").read_text().splitlines()
        mapped.append({line.split()[-1] for line in lines if str(copied) in line})
        return score(scorer, progress)

    monkeypatch.setattr(ValidationScorer, "negative_log_likelihood", recorded)
    contents = read_checkpoint(step_checkpoints(copied)[0])
    search = BestAverage(copied, saved_checkpoints(copied))
    search.choose(4 * EVERY, 3)
    own = contents["state_dict"] and str(step_checkpoints(copied)[0])
    assert len(mapped) >= 10
    assert all(own in files for files in mapped)  # A checkpoint that is held is seen.
    assert max(len(files - {own}) for files in mapped) <= 2


def test_the_record_lies_beside_the_output(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "elsewhere" / "mean.ckpt"
    before = sorted(path.name for path in copied.iterdir())
    assert main(["average", str(copied), "--best", "1", "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert sorted(path.name for path in output.parent.iterdir()) == ["mean.ckpt", "mean.json"]
    assert json.loads(output.with_suffix(".json").read_text()) == read_checkpoint(output)["selection"]
    assert sorted(path.name for path in copied.iterdir()) == before


def test_nothing_is_written_if_the_search_is_interrupted(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = sorted(path.name for path in copied.iterdir())
    monkeypatch.setattr(BestAverage, "_scores", interrupted)
    assert main(["average", str(copied), "--best", "2"]) == 130
    assert sorted(path.name for path in copied.iterdir()) == before


def test_mistakes_are_reported_in_one_line(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: object) -> str:
        assert main(["average", str(copied), *map(str, arguments)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        return line

    assert refused("--best", 0) == "error: --best 0 is not 1 or more"
    assert "is a folder; give a file as --output" in refused("--last", 1, "--output", copied)
    assert "mean.json: is the name of a record" in refused("--best", 1, "--output", copied / "mean.json")
    assert refused("--best", -3) == "error: --best -3 is not 1 or more"
    assert "has 10 valid checkpoints, --best is 11; give --best 10 or less" in refused("--best", 11)
    assert "argument --last: not allowed with argument --best" in refused("--best", 2, "--last", 2)
    config = step_checkpoints(copied)[-1]
    contents = torch.load(config, weights_only=True)
    corpus = Path(contents["translation"]["recipe"]["corpus"]["folder"])
    moved = copied.parent / "corpus"
    contents["translation"]["recipe"]["corpus"]["folder"] = str(moved)
    write_atomic(contents, config)
    gone = refused("--best", 2)
    assert f"its validation text is needed to choose checkpoints, and {moved}: no such corpus; prepare it" in gone
    assert f"prepare --config {copied / 'config.yaml'}, or give --last N" in gone
    shutil.copytree(corpus, moved)
    (moved / "validation.target.txt").unlink()
    assert "validation.target.txt: the corpus is incomplete" in refused("--best", 2)
    (copied / "metrics.jsonl").write_text('{"step": 1, "time": 0.0, "train/loss": 1.0}\n')
    assert "metrics.jsonl has no validation scores to choose checkpoints by; give --last N" in refused("--best", 2)
    (copied / "metrics.jsonl").unlink()
    assert "has no validation scores" in refused("--best", 2)
    part = contents["translation"]
    part["tokenizer"] = part["tokenizer"].flip(0)
    write_atomic(contents, config)
    assert "has another network or vocabulary than" in refused("--best", 2)
    shutil.rmtree(copied / "checkpoints")
    assert "holds no checkpoint; give a run folder" in refused("--best", 1)


def test_a_corpus_of_another_vocabulary_is_refused(copied: Path, recipe_file: Path, tmp_path: Path) -> None:
    other = ["--corpus.folder", tmp_path / "other", "--corpus.vocabulary_size", 50]
    assert pipeline("prepare", "--config", recipe_file, *other).returncode == 0
    newest = step_checkpoints(copied)[-1]
    contents = torch.load(newest, weights_only=True)
    contents["translation"]["recipe"]["corpus"]["folder"] = str(tmp_path / "other")
    write_atomic(contents, newest)
    with pytest.raises(
        InputError, match=f"{tmp_path / 'other'}: has another vocabulary than the run; prepare it again"
    ):
        BestAverage(copied, saved_checkpoints(copied))


Score = Callable[[int], float]


def test_weights_that_are_not_finite_are_not_chosen(copied: Path) -> None:
    newest = step_checkpoints(copied)[-1]
    contents = torch.load(newest, weights_only=True)
    for weights in contents["state_dict"].values():
        weights.view(-1)[0] = float("nan")
    write_atomic(contents, newest)
    # A killed run may leave a part of a line.
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "validat')
    assert main(["average", str(copied), "--best", "10"]) == 0
    selection = read_checkpoint(copied / "average-best-10.ckpt")["selection"]
    assert selection["chosen"] == "greedy"
    assert step_of(newest) not in selection["greedy"]["steps"]
    assert step_of(newest) in selection["window"]["steps"]


def test_a_greedy_search_stops_when_nothing_improves() -> None:
    """The score is the distance of the mean from 6."""

    def search(values: list[int], limit: int) -> list[tuple[int, float]]:
        added: list[int] = []
        score: Score = lambda value: abs((sum(added) + value) / (len(added) + 1) - 6.0)  # noqa: E731
        return greedy_search(values, limit, score, added.append)

    assert search([1, 4, 9], 3) == [(4, 2.0), (9, 0.5)]
    assert search([1, 4, 9], 1) == [(4, 2.0)]
    assert search([1, 5, 12], 3) == [(5, 1.0)]
    assert search([6, 6], 2) == [(6, 0.0)]  # an equal one is not added
    assert search([], 2) == []


def test_nearest_steps() -> None:
    assert nearest_steps([10, 20, 30, 40], 30, 1) == [30]
    assert nearest_steps([10, 20, 30, 40], 30, 2) == [30, 40]
    assert nearest_steps([40, 30, 20, 10], 24, 3) == [10, 20, 30]
    assert nearest_steps([10], 99, 3) == [10]


def test_a_mean_leaves_checkpoints_as_they_are() -> None:
    ones, threes = ({"state_dict": {"x": torch.full([2], value, dtype=torch.float64)}} for value in (1.0, 3.0))
    mean = WeightMean()
    assert dict(mean.items(threes))["x"].tolist() == [3.0, 3.0]
    mean.add(ones)
    assert dict(mean.items(threes))["x"].tolist() == [2.0, 2.0]
    assert dict(mean.items())["x"].tolist() == [1.0, 1.0]
    mean.add(threes)
    assert dict(mean.items())["x"].tolist() == [2.0, 2.0]
    assert ones["state_dict"]["x"].tolist() == [1.0, 1.0]
