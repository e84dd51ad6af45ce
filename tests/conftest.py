"""Fixtures: a tiny parallel text, its corpus, a recipe and a trained run; and a way to run commands as a user does."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.fork_server import ForkServer

if TYPE_CHECKING:
    from data_module.system.files import PlainValues
    from data_module.tokenization.tokenizer import Tokenizer
    from pipeline.config.recipe import Recipe

with suppress(ModuleNotFoundError):  # some GPU machines lack it
    import hypothesis

    # A few examples, the same in every run.
    hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, max_examples=25, database=None)
    hypothesis.settings.load_profile("suite")

_BEFORE = pytest.StashKey[set[str]]()
ROOT = Path(__file__).resolve().parent.parent
OURS = {"data_module", "model", "pipeline", "tests"}
WORDS = ["the", "a", "red", "blue", "old", "new", "house", "tree", "dog", "cat"]
WORDS += ["sees", "likes", "has", "and", "near", "under", "big", "small"]

INVISIBLE = r"[\p{White_Space}\p{Cc}\p{Default_Ignorable_Code_Point}\u2800\u2581]*"
"""A regular expression, of the package `regex`, for a line without a visible character; U+2581 is read as a space."""

ALONE = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
ALONE["use_distributed_sampler"] = False
"""Options of a Trainer that trains and does nothing else."""


def sentences(count: int, seed: int, lengths: Sequence[int] = range(2, 15)) -> list[str]:
    """Return random sentences of as many words as one of `lengths`."""
    chooser = random.Random(seed)
    return [" ".join(chooser.choices(WORDS, k=chooser.choice(lengths))) for _ in range(count)]


def write_text(folder: Path) -> None:
    """Write 300 training and 40 validation pairs, whose targets are the sources with reversed word order.

    The validation's have few lengths, so that it has few batches.
    """
    for split, count, lengths in (("train", 300, range(2, 15)), ("validation", 40, (2, 6, 10, 14))):
        lines = sentences(count, count, lengths)
        (folder / f"{split}.source").write_text("".join(line + "\n" for line in lines))
        (folder / f"{split}.target").write_text("".join(" ".join(reversed(s.split())) + "\n" for s in lines))


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the corpus that `write_text` makes; the texts are in its parent folder."""
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


def train_tokenizer(text: Iterable[str], vocabulary_size: int, **options: object) -> "Tokenizer":
    """Return a tokenizer that is trained on sentences as `prepare` trains it; the options are keys of `corpus:`."""
    from data_module.settings import CorpusSettings
    from data_module.tokenization.tokenizer import Tokenizer, normalize_white_space
    from data_module.tokenization.training import WordCounts, train_on_words

    words = WordCounts()
    for sentence in text:
        line = normalize_white_space(sentence)
        words.add(line)
        words.add_characters(line)
    settings = CorpusSettings("", [], [], vocabulary_size=vocabulary_size, **options)
    return Tokenizer(train_on_words(words, settings))


@pytest.fixture(scope="session")
def tokenizer() -> "Tokenizer":
    """A tokenizer of letters, with as many pieces as the networks of `tests.model.search_truth` have ids."""
    return train_tokenizer(["abcdefg gfedcba abc cab ab"], 24)


@contextmanager
def another_user() -> Iterator[Path]:
    """Run as a user who is not root, and yield a folder that all users may write to."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        user = os.geteuid()
        os.seteuid(user or 65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(user)


def tiny_recipe(texts: Path) -> "PlainValues":
    """Return a recipe for the tiny corpus, without dropout, in float32; twelve steps take about a second."""
    text = {
        split: {"source": str(texts / f"{split}.source"), "target": str(texts / f"{split}.target")}
        for split in ("train", "validation")
    }
    return {
        "corpus": {"folder": str(texts / "corpus"), **text, "vocabulary_size": 60},
        "batches": {"batch_tokens": 400, "workers": 0},
        "network": {"num_layers": 1, "d_model": 16, "d_ff": 32, "num_heads": 2, "dropout": 0.0},
        "training": {"warmup_steps": 10},
        # An untrained network would go on to each limit, and pictures have tests of their own.
        "decoding": {"max_extra_tokens": 4},
        "monitoring": {"attention_sentences": []},
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
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_recipe(tiny_corpus.parent)))
    return path


def pipeline(
    *arguments: object,
    text: str | bytes | None = None,
    environment: Mapping[str, str] = {},
    cwd: Path | None = None,
) -> subprocess.CompletedProcess:
    """Run `python -m pipeline ...`; the output is bytes.

    The process and those that it starts are forks of one that has imported PyTorch; with an `environment` that packages
    may read when they are imported, it is a new interpreter.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    given = text if isinstance(text, bytes) or text is None else text.encode()
    words = list(map(str, arguments))
    if not all(name.startswith(("SLURM", "MASTER_", "TMPDIR")) for name in environment):
        return subprocess.run(
            [sys.executable, "-m", "pipeline", *words],
            capture_output=True,
            input=given,
            env=variables,
            cwd=cwd,
            check=False,
        )
    return _forked("pipeline", words, given, variables | ForkServer.shared().for_children, cwd)


def program(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
    """Run Python code in a fork of a process that has imported PyTorch and Lightning; the output is bytes."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    return _forked("tests.run_code", [code, *map(str, arguments)], None, variables)


def _forked(
    module: str, words: list[str], given: bytes | None, environment: dict[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess:
    process = ForkServer.shared().start(module, words, environment=environment, cwd=cwd, given=given or b"")
    try:
        output = process.communicate()
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.wait(), *output)


def run_here(*arguments: object, code: int = 0) -> tuple[str, str]:
    """Run a command in this process. It must end with this exit code; return its output and its messages."""
    from pipeline.__main__ import main

    stdout, stderr = StringIO(), StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        found = main(list(map(str, arguments)))
    assert found == code, stderr.getvalue()
    assert "Traceback" not in stderr.getvalue()
    return stdout.getvalue(), stderr.getvalue()


def fit_recipe(recipe: "Recipe", init_from: Path | None = None) -> None:
    """Start or resume the recipe's run in this process, as the command does."""
    from pipeline.doctor.recipe_checks import checked_folder
    from pipeline.fit import fit

    with checked_folder(recipe, fresh=False) as folder:
        fit(recipe, folder, fresh=False, init_from=init_from)


def refusal(*arguments: object) -> str:
    """Run a command in this process. It must end with exit code 2, one line of error and no output; return the line."""
    stdout, stderr = run_here(*arguments, code=2)
    assert stdout == ""
    assert "usage" not in stderr
    [line] = [line for line in stderr.splitlines() if line.startswith("error: ")]
    return line


@pytest.fixture(scope="session")
def trained_run(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of 240 steps, enough for translations that are not empty."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = folder / "tiny.yaml"
    values = tiny_recipe(tiny_corpus.parent)
    del values["monitoring"], values["decoding"]  # for pictures and usual limits
    values["trainer"] |= {"max_steps": 240, "val_check_interval": 120}
    values["training"] |= {"warmup_steps": 100}
    values["run"] |= {"checkpoint_every_steps": 80, "log_every_steps": 40}
    recipe.write_text(yaml.safe_dump(values))
    done = pipeline("fit", "--config", recipe, "--run.folder", folder / "run")
    assert done.returncode == 0, done.stderr.decode()
    return folder / "run"


@pytest.fixture(scope="session")
def bundle(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained run's export as TorchScript."""
    folder = tmp_path_factory.mktemp("export") / "bundle"
    run_here("export", trained_run, folder, "--format", "torchscript")
    return folder


@pytest.fixture(scope="session")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Marian in Transformers' files."""
    from tests.pipeline.marian_folder import write_marian

    return write_marian(tmp_path_factory.mktemp("marian") / "model")


class _Module(pytest.Module):
    """A test module that is skipped if a package that it imports is not installed; in CI, that is an error."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            missing = error.__cause__
            name = missing.name if isinstance(missing, ModuleNotFoundError) else None
            if name is None or name.partition(".")[0] in OURS or os.environ.get("CI") == "true":
                raise
            pytest.skip(f"needs the package {name}", allow_module_level=True)


def pytest_configure() -> None:
    """Let Ctrl-C reach programs under test. They inherit that it is ignored, as in what a script runs in background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def no_progress_bars() -> None:
    """Show none in this process: where the machine is slow, they would be among the lines that tests compare."""
    from data_module.system import text_files

    text_files.SHOWN_AFTER_SECONDS = 1e6


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """Restore the handlers of stop signals, which programs of later tests would inherit, and leave no process."""
    stopping = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before, children = {signum: signal.getsignal(signum) for signum in stopping}, multiprocessing.active_children()
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)
    raise_for_loaders = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's, where one of a loader is killed
    for process in set(multiprocessing.active_children()) - set(children):
        process.kill()
        process.join()
    signal.signal(signal.SIGCHLD, raise_for_loaders)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """Run the tests that can run on a machine without all packages."""
    return _Module.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU or two processors if there are none; run those first that take longest."""
    import torch  # not in the process that only starts workers

    from data_module.system.worker_processes import num_processors

    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if item.get_closest_marker("two_processors") and num_processors() < 2:
            item.add_marker(pytest.mark.skip(reason="needs two processors"))
    items.sort(key=lambda item: (item.path.parent.name != "slurm", item.path.name != "test_demo.py"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With `--dist loadgroup`, run the cluster's tests in one worker, and each other file in one, in their order.

    The groups of pytest-xdist 3.8 do not work with pytest 9.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ClusterApart(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "slurm" if nodeid.startswith("tests/slurm/") else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return ClusterApart(config, log)


CACHES = {".pytest_cache", ".hypothesis", ".ruff_cache", ".mypy_cache"}
"""What pytest and its plugins may leave in the project's folder."""


def _left_over() -> set[str]:
    """Return the names in the project's folder, and the paths below it that git neither has nor ignores."""
    command = ["git", "-C", str(ROOT), "ls-files", "--others", "--exclude-standard"]
    untracked = ""
    with suppress(OSError):  # git is not installed
        untracked = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return {path.name for path in ROOT.iterdir()} - CACHES | set(untracked.splitlines())


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_BEFORE] = _left_over()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Fail for files that tests left in the project's folder; in CI, for skipped tests that need no GPU."""
    if left := sorted(_left_over() - terminalreporter.config.stash[_BEFORE]):
        terminalreporter._session.exitstatus = 1
        terminalreporter.write_line(f"tests have left {', '.join(left)} in {ROOT}", red=True)
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "gpu" not in getattr(r, "keywords", ())]
    if skipped and os.environ.get("CI") == "true":
        terminalreporter.stats.setdefault("failed", []).extend(skipped)
        terminalreporter._session.exitstatus = 1
        terminalreporter.write_line(f"{len(skipped)} tests skipped in CI, where all must run", red=True)
