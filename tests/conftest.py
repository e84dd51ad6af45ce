"""A tiny parallel text, corpus and recipe, and a way to run commands as a user does."""

import os
import random
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.fork_server import ForkServer

with suppress(ModuleNotFoundError):  # a machine lent with a GPU may lack it
    import hypothesis

    # Few examples, the same ones each time.
    hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, max_examples=25, database=None)
    hypothesis.settings.load_profile("suite")

ROOT = Path(__file__).resolve().parent.parent
OURS = {"data_module", "model", "pipeline", "tests"}
WORDS = [
    "the",
    "a",
    "red",
    "blue",
    "old",
    "new",
    "house",
    "tree",
    "dog",
    "cat",
    "sees",
    "likes",
    "has",
    "and",
    "near",
    "under",
    "big",
    "small",
]


def sentences(count: int, seed: int) -> list[str]:
    chooser = random.Random(seed)
    return [" ".join(chooser.choices(WORDS, k=chooser.randint(2, 14))) for _ in range(count)]


def write_text(folder: Path) -> None:
    """300 training and 40 validation pairs: the target is the source backwards."""
    for split, count in (("train", 300), ("validation", 40)):
        lines = sentences(count, seed=count)
        (folder / f"{split}.source").write_text("".join(line + "\n" for line in lines))
        (folder / f"{split}.target").write_text("".join(" ".join(reversed(s.split())) + "\n" for s in lines))


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus of `write_text`; the texts lie in its parent folder."""
    from data_module.corpus.preparation import prepare
    from data_module.settings import CorpusSettings, TextSource

    folder = tmp_path_factory.mktemp("tiny")
    write_text(folder)
    settings = CorpusSettings(
        folder=str(folder / "corpus"),
        train=[TextSource(str(folder / "train.source"), str(folder / "train.target"))],
        validation=[TextSource(str(folder / "validation.source"), str(folder / "validation.target"))],
        vocabulary_size=60,
    )
    prepare(settings, progress=False)
    return folder / "corpus"


def tiny_recipe(texts: Path) -> dict[str, Any]:
    """A recipe over the tiny corpus that takes a second a dozen steps; dropout off, float32."""
    text = {
        split: {"source": str(texts / f"{split}.source"), "target": str(texts / f"{split}.target")}
        for split in ("train", "validation")
    }
    return {
        "corpus": {"folder": str(texts / "corpus"), **text, "vocabulary_size": 60},
        "batches": {"batch_tokens": 400, "group_tokens": 100, "workers": 0},
        "network": {"num_layers": 1, "d_model": 16, "d_ff": 32, "num_heads": 2, "dropout": 0.0},
        "training": {"warmup_steps": 10},
        "run": {"checkpoint_every_steps": 4, "keep_last": 3, "log_every_steps": 2},
        "trainer": {
            "max_steps": 12,
            "val_check_interval": 6,
            "accelerator": "cpu",
            "devices": 1,
            "precision": "32-true",
        },
    }


@pytest.fixture
def recipe_file(tiny_corpus: Path, tmp_path: Path) -> Path:
    """The tiny recipe as a file."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_recipe(tiny_corpus.parent)))
    return path


def pipeline(*arguments: object, text: str | bytes | None = None, **options: Any) -> subprocess.CompletedProcess:
    """`python -m pipeline ...` as a user runs it; output as bytes.

    In a fork of a process that has imported PyTorch, or in a new interpreter if an `environment` is given which may be
    read as PyTorch, Lightning or other packages are imported.
    """
    added = options.pop("environment", {})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **added}
    given = text if isinstance(text, bytes) or text is None else text.encode()
    words = list(map(str, arguments))
    if not all(name.startswith(("SLURM_MEM_", "SLURM_CPUS_")) for name in added):
        return subprocess.run(
            [sys.executable, "-m", "pipeline", *words],
            capture_output=True,
            input=given,
            env=environment,
            check=False,
            timeout=300,
            **options,
        )
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        stdin.write(given or b"")
        stdin.seek(0)
        process = ForkServer.shared().start(
            "pipeline", words, environment=environment, stdin=stdin, stdout=stdout, stderr=stderr, **options
        )
        try:
            process.wait(300)
        finally:
            process.kill()
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(process.args, process.wait(), stdout.read(), stderr.read())


@pytest.fixture(scope="session")
def trained_run(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of 240 steps, made by the command: enough to say something."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = folder / "tiny.yaml"
    values = tiny_recipe(tiny_corpus.parent)
    values["trainer"] |= {"max_steps": 240, "val_check_interval": 120}
    values["training"] |= {"warmup_steps": 100}
    values["run"] |= {"checkpoint_every_steps": 80, "log_every_steps": 40}
    recipe.write_text(yaml.safe_dump(values))
    done = pipeline("fit", "--config", recipe, "--run.folder", folder / "run")
    assert done.returncode == 0, done.stderr.decode()
    return folder / "run"


class _Module(pytest.Module):
    """A test module that is skipped where a package it imports is not installed. In CI that is an error."""

    def collect(self) -> Any:
        try:
            return super().collect()
        except self.CollectError as error:
            missing = error.__cause__
            name = missing.name if isinstance(missing, ModuleNotFoundError) else None
            if name is None or name.partition(".")[0] in OURS or os.environ.get("CI") == "true":
                raise
            pytest.skip(f"needs the package {name}", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """Let tests that can run do so on a machine without all packages, such as one lent with a GPU."""
    return _Module.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, and begin with the demo, the longest test."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    items.sort(key=lambda item: item.path.name != "test_demo.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadgroup`: the cluster's tests one after another in one worker, beginning at once.

    pytest-xdist's own groups (3.8) are not seen by pytest 9.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ClusterApart(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            """One scope for the cluster's tests, which is the largest and so the first; another for each other test."""
            return "slurm" if nodeid.startswith("tests/slurm/") else nodeid

    return ClusterApart(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """In CI a skipped test is a failed one, unless it needs a GPU."""
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "gpu" not in getattr(r, "keywords", ())]
    if skipped and os.environ.get("CI") == "true":
        terminalreporter.stats.setdefault("failed", []).extend(skipped)
        terminalreporter._session.exitstatus = 1
        terminalreporter.write_line(f"{len(skipped)} tests skipped in CI, where all must run", red=True)
