"""TensorBoard of a run and of a killed and resumed run: what is in the files, and what its server answers."""

import html
import json
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.checkpointing.run_folder import read_metrics
from tests.conftest import pipeline
from tests.integration.runs import accumulator, checkpoints, kill, scalars, start

pytestmark = pytest.mark.slow

GROUPS = ["train", "train_perf", "validation", "validation_attention", "validation_bleu_by_length"]
SCALARS = {
    *("train/loss", "train/negative_log_likelihood", "train/perplexity", "train/accuracy", "train/learning_rate"),
    *("train/gradient_norm", "train/skipped_steps"),
    *("validation/loss", "validation/negative_log_likelihood", "validation/perplexity", "validation/accuracy"),
    *("validation/bleu", "validation/best_bleu", "validation/chrf", "validation/exact_match"),
    *("validation/length_ratio", "validation/repetition"),
    *("train_perf/target_tokens_per_second", "train_perf/step_seconds", "train_perf/step_seconds_data_wait"),
    *("train_perf/step_seconds_compute", "train_perf/mfu", "train_perf/memory_gigabytes", "train_perf/padding_share"),
    *("train_perf/goodput", "train_perf/epoch"),
}
PAGES = {
    *("validation/translations", "validation/translations_worst", "validation/translations_longest"),
    *(f"run/{name}" for name in ("code", "data", "parameters", "recipe", "starts")),
}
PICTURES = {f"validation_attention/{kind}_{n}" for kind in ("encoder", "decoder", "cross") for n in (1, 2)}


@pytest.fixture(scope="module")
def runs(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, and a run of the same recipe on two ranks that was killed and resumed."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(trained_run, folder / "whole")
    recipe = trained_run.parent / "tiny.yaml"
    command = ["fit", "--config", recipe, "--run.folder", folder / "killed", "--run.log_every_steps", 5]
    command += ["--run.checkpoint_every_steps", 20, "--trainer.val_check_interval", 15, "--trainer.devices", 2]
    process = start(*command)
    while process.poll() is None and not checkpoints(folder / "killed"):
        time.sleep(0.05)
    while process.poll() is None and scalars(folder / "killed", "train/loss")[-1][0] <= 25:
        time.sleep(0.05)
    assert kill(process)
    done = pipeline(*command, "--trainer.max_steps", 60)
    assert done.returncode == 0, done.stderr.decode()
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs), "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    yield next(line.split(" at ")[1].split()[0] for line in process.stderr if " at http" in line)
    process.terminate()
    process.wait(30)
    process.stderr.close()


def answer(address: str, route: str, **query: str) -> Any:
    local = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with local.open(f"{address}data/{route}?{urllib.parse.urlencode(query)}", timeout=60) as page:
        return json.load(page)


def test_events_hold_what_the_run_computed(runs: Path) -> None:
    for name, last in (("whole", 240), ("killed", 60)):
        events = accumulator(runs / name)
        tags = events.Tags()
        assert set(tags["scalars"]) >= SCALARS
        assert {tag.removesuffix("/text_summary") for tag in tags["tensors"]} >= PAGES
        assert set(tags["images"]) == PICTURES | {"validation_attention/positions"}
        lines = list(read_metrics(runs / name))
        for tag in SCALARS:
            points = [(event.step, event.value) for event in events.Scalars(tag)]
            assert points == [(line["step"], pytest.approx(line[tag], rel=1e-6)) for line in lines if tag in line], tag
        interval = 40 if name == "whole" else 5
        assert [step for step, _ in scalars(runs / name, "train/loss")] == list(range(interval, last + 1, interval))
    assert "train_perf/step_seconds_communication_wait" in accumulator(runs / "killed").Tags()["scalars"]
    [begun, went_on] = texts(accumulator(runs / "killed"), "run/starts")
    assert begun[0] == 1
    assert went_on[0] % 20 == 1  # after a checkpoint
    assert went_on[1].count("\n| ") == 3  # below the header, two starts
    for step, page in texts(accumulator(runs / "whole"), "validation/translations"):
        assert f"BLEU {dict(scalars(runs / 'whole', 'validation/bleu'))[step]:.2f}" in page
        assert "tok:13a" in page
        assert page.count("\n| ") == 2 + 12
    sources = [
        [row.split(" | ")[1] for row in page.splitlines() if row.startswith("| ")]
        for _, page in texts(accumulator(runs / "killed"), "validation/translations")
    ]
    assert len(sources) == 4
    assert all(source == sources[0] for source in sources)


def texts(events: EventAccumulator, tag: str) -> list[tuple[int, str]]:
    found = events.Tensors(f"{tag}/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found]


def test_the_server_has_curves_charts_pages_pictures_and_points(address: str, runs: Path) -> None:
    """What the pages of TensorBoard's tabs ask it for, of both runs."""
    names = [f"{name}/tensorboard" for name in ("killed", "whole")]
    complete = dict.fromkeys(names, PICTURES | {"validation_attention/positions"})
    deadline = time.monotonic() + 120
    while {name: set(tags) for name, tags in answer(address, "plugin/images/tags").items()} != complete:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    time.sleep(2)  # It reads the rest of the files.
    layout = answer(address, "plugin/custom_scalars/layout")
    learning = layout["category"][0]
    assert (learning["title"], len(learning["chart"])) == ("Learning", 6)
    for name, run in zip(names, (runs / "killed", runs / "whole"), strict=True):
        tags = set(answer(address, "plugin/scalars/tags")[name])
        assert {tag.partition("/")[0] for tag in tags} == set(GROUPS) - {"validation_attention"}
        _, step, loss = answer(address, "plugin/scalars/scalars", run=name, tag="train/loss")[-1]
        assert (step, loss) == scalars(run, "train/loss")[-1]
        for tag in (tag for chart in learning["chart"] for tag in chart["multiline"]["tag"]):
            found = answer(address, "plugin/custom_scalars/scalars", run=name, tag=tag)
            assert found["regex_valid"], tag
            assert found["tag_to_events"], tag
        page = answer(address, "plugin/text/text", run=name, tag="validation/translations/text_summary")[-1]["text"]
        row = texts(accumulator(run), "validation/translations")[-1][1].splitlines()[4]
        assert all(f"<td>{html.escape(cell.strip())}</td>" in page for cell in row.strip("| ").split(" | "))
        [points] = answer(address, "plugin/projector/info", run=name)["embeddings"]
        assert points["tensorShape"] == [56, 16]
    sweep = answer(address, "plugin/hparams/experiment", request="{}")
    assert "network.d_model" in {one["name"] for one in sweep["hparamInfos"]}
    assert "validation/best_bleu" in {one["name"]["tag"] for one in sweep["metricInfos"]}
