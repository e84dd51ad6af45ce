"""TensorBoard of a run: what its server answers."""

import html
import json
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
from tests.integration.runs import accumulator, scalars

pytestmark = pytest.mark.slow

GROUPS = ["train", "train_perf", "validation", "validation_attention"]
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
    "validation/translations",
    *(f"run/{name}" for name in ("code", "data", "parameters", "recipe")),
}
PICTURES = {f"validation_attention/{kind}_{n}" for kind in ("encoder", "decoder", "cross") for n in (1, 2)}


@pytest.fixture(scope="module")
def address(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "run").symlink_to(trained_run)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    yield next(line.split(" at ")[1].split()[0] for line in process.stderr if " at http" in line)
    process.kill()
    process.wait()
    process.stderr.close()


def answer(address: str, route: str, **query: str) -> Any:
    local = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with local.open(f"{address}data/{route}?{urllib.parse.urlencode(query)}", timeout=60) as page:
        return json.load(page)


def texts(events: EventAccumulator, tag: str) -> list[tuple[int, str]]:
    found = events.Tensors(f"{tag}/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found]


def has_read(address: str, name: str, events: EventAccumulator) -> bool:
    """Return whether the server has as many points, pictures and texts of a run as its files."""
    found = {}
    for plugin, kind in (("scalars", "scalars"), ("images", "images"), ("text", "tensors")):
        tags = answer(address, f"plugin/{plugin}/tags").get(name, ())
        found[kind] = {tag: len(answer(address, f"plugin/{plugin}/{plugin}", run=name, tag=tag)) for tag in tags}
    read = {"scalars": events.Scalars, "images": events.Images, "tensors": events.Tensors}
    return found == {kind: {tag: len(of(tag)) for tag in events.Tags()[kind]} for kind, of in read.items()}


def test_the_server_has_curves_pages_pictures_and_points(address: str, trained_run: Path) -> None:
    """What the pages of TensorBoard's tabs ask it for. test_run_log.py and test_kills.py have files of killed runs."""
    name, events = "run/tensorboard", accumulator(trained_run)
    deadline = time.monotonic() + 120
    while not has_read(address, name, events) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert set(answer(address, "plugin/images/tags")[name]) == PICTURES
    tags = set(answer(address, "plugin/scalars/tags")[name])
    assert {tag.partition("/")[0] for tag in tags} == set(GROUPS) - {"validation_attention"}
    lines = list(read_metrics(trained_run))
    for tag in SCALARS:
        points = [(step, value) for _, step, value in answer(address, "plugin/scalars/scalars", run=name, tag=tag)]
        assert points == [(line["step"], pytest.approx(line[tag], rel=1e-6)) for line in lines if tag in line], tag
    assert [step for step, _ in scalars(trained_run, "train/loss")] == list(range(40, 241, 40))
    assert {tag.removesuffix("/text_summary") for tag in answer(address, "plugin/text/tags")[name]} >= PAGES
    made = texts(events, "validation/translations")
    page = answer(address, "plugin/text/text", run=name, tag="validation/translations/text_summary")[-1]["text"]
    row = made[-1][1].splitlines()[4]
    assert all(f"<td>{html.escape(cell.strip())}</td>" in page for cell in row.strip("| ").split(" | "))
    sources = []
    for step, text in made:
        assert f"BLEU {dict(scalars(trained_run, 'validation/bleu'))[step]:.2f}" in text
        assert "tok:13a" in text
        assert text.count("\n| ") == 2 + 12
        sources.append([row.split(" | ")[1] for row in text.splitlines() if row.startswith("| ")])
    assert sources == [sources[0]] * 2
    [points] = answer(address, "plugin/projector/info", run=name)["embeddings"]
    assert points["tensorShape"] == [56, 16]
    sweep = answer(address, "plugin/hparams/experiment", request="{}")
    assert "network.d_model" in {one["name"] for one in sweep["hparamInfos"]}
    assert "validation/best_bleu" in {one["name"]["tag"] for one in sweep["metricInfos"]}
