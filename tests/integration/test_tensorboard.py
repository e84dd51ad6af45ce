"""TensorBoard of a run and of a killed and resumed run, opened in a browser and read from the page.

The screenshots go to the folder in SCREENSHOTS, or to a temporary one. Two of them are in docs/screenshots/.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.checkpointing.run_folder import read_metrics
from tests.conftest import pipeline
from tests.integration.browser import Browser
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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser") / "profile")
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(os.environ.get("SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))


def show(browser: Browser, address: str, tab: str, words: str) -> None:
    """Open a tab, and wait for the words that appear last."""
    browser.open("about:blank")
    # Screenshots do not contain what is drawn with WebGL.
    browser.open(f"{address}?forceSVG=true#{tab}")
    browser.wait_for_text(words)


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


def test_the_first_screen(browser: Browser, address: str, runs: Path, screenshots: Path) -> None:
    show(browser, address, "timeseries", "\n/perplexity")
    groups = "window.__all().filter(e => e.matches('.group-title')).map(e => e.innerText.trim())"
    assert browser.run(groups) == ["Pinned", *GROUPS]
    card = "window.__all().filter(e => e.tagName === 'SCALAR-CARD' && e.innerText.includes('/loss'))[0].innerText"
    browser.wait(f"({card}).includes('whole/tensorboard') && ({card}).includes('killed/tensorboard')")
    rows = browser.run(card).replace("\n", " ").split("Relative")[1].split()
    for name in ("whole", "killed"):
        step, loss = scalars(runs / name, "train/loss")[-1]
        at = rows.index(f"{name}/tensorboard")
        _smoothed, value, shown_step = rows[at + 1 : at + 4]
        assert float(value) == pytest.approx(loss, abs=1e-4)
        assert int(shown_step) == step
    time.sleep(1)
    browser.screenshot(screenshots / "time_series.png")


def test_curves_by_question(browser: Browser, address: str, screenshots: Path) -> None:
    show(browser, address, "custom_scalars", "Learning")
    # Six charts, each with both runs' curves.
    matches = "window.__text().match(/Matches \\(\\d+\\)/g) || []"
    browser.wait(f"({matches}).length >= 6 && !({matches}).includes('Matches (0)')")
    time.sleep(1)
    browser.screenshot(screenshots / "questions.png")


def test_translations(browser: Browser, address: str, runs: Path, screenshots: Path) -> None:
    show(browser, address, "text", "validation/translations_worst")
    _, page = texts(accumulator(runs / "killed"), "validation/translations")[-1]
    first = [cell.strip() for cell in page.splitlines()[4].strip("| ").split(" | ")]
    cells = "window.__all().filter(e => e.tagName === 'TR').map(e => [...e.children].map(c => c.innerText.trim()))"
    browser.wait(f"({cells}).some(row => JSON.stringify(row) === JSON.stringify({json.dumps(first)}))")
    # The group above, which describes the run, would fill the screenshot.
    browser.click("button.heading", "run")
    time.sleep(1)
    browser.screenshot(screenshots / "translations.png")


def test_attention(browser: Browser, address: str, screenshots: Path) -> None:
    show(browser, address, "images", "validation_attention/cross_1")
    sizes = "window.__all().filter(e => e.tagName === 'IMG' && e.naturalWidth > 200).map(e => e.naturalHeight)"
    browser.wait(f"({sizes}).length >= 6")
    browser.screenshot(screenshots / "pictures.png")
    # Pixels of a heat map: white, and the dark of what is attended to.
    first = "window.__all().filter(e => e.tagName === 'IMG' && e.naturalWidth > 200)[0]"
    browser.run(
        f"(i => {{ const c = document.createElement('canvas'); c.width = i.naturalWidth; c.height = i.naturalHeight;"
        f" const x = c.getContext('2d'); x.drawImage(i, 0, 0);"
        f" window.__pixels = [...x.getImageData(0, 0, c.width, c.height).data]; }})({first})"
    )
    blue = "window.__pixels.filter((v, i) => i % 4 === 2 && v > window.__pixels[i - 2] + 10).length"
    assert browser.run(blue) > 100


def test_embeddings_as_points(browser: Browser, address: str, screenshots: Path) -> None:
    show(browser, address, "projector", "Total variance described")
    browser.wait("/Points:\\s*56/.test(window.__text()) && /Dimension:\\s*16/.test(window.__text())")
    time.sleep(3)
    browser.screenshot(screenshots / "projector.png")


def test_a_sweep_compares_itself(browser: Browser, address: str, runs: Path, screenshots: Path) -> None:
    show(browser, address, "hparams", "killed/tensorboard")
    browser.wait_for_text("validation/best_bleu")
    text = browser.text()
    assert "network.d_model" in text
    browser.screenshot(screenshots / "sweep.png")
