"""Run folders: the lock, the differences to another recipe, removing runs, and counting the starts of a job."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from data_module.corpus import preparation
from data_module.corpus.builder import write_corpus
from data_module.corpus.manifest import Manifest
from data_module.corpus.preparation import in_use
from data_module.errors import InputError
from data_module.settings import TextSource
from data_module.system.files import FileLock, replaced_folder
from pipeline.__main__ import main
from pipeline.checkpointing.run_folder import (
    METRICS,
    RUN_ID,
    RunFolder,
    changes_of_run,
    check_same_run,
    check_writable,
    is_run,
    read_metrics,
    reset_marker,
    should_reset,
    stored_run_id,
)
from pipeline.config.recipe import Recipe, load_recipe
from pipeline.doctor import recipe_checks
from pipeline.runtime import launch, signals
from pipeline.runtime.launch import JobStep, versions
from pipeline.runtime.signals import Stopped
from tests.conftest import ROOT, another_user, refusal

HOLD_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""
IDENTITY = "0123456789abcdef" * 2
STEP = JobStep("7", rank=0, local_rank=0, num_tasks=1, num_nodes=1, tasks_per_node=1, restarts=0)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    options = ["--run.folder", str(tmp_path / "run"), "--training.schedule", "paper"]
    return load_recipe([ROOT / "configs" / "demo.yaml"], [*options, "--training.peak_learning_rate", "null"])


def write_run(recipe: Recipe) -> Path:
    """Write the recipe's run folder as `fit` does, and return it."""
    with closing(RunFolder(recipe.run_folder())) as folder:
        folder.write_config(recipe, b"", IDENTITY)
    return folder.path


def test_differences_to_another_recipe(recipe: Recipe) -> None:
    assert changes_of_run(recipe.run_folder(), recipe) == ([], [])
    run = write_run(recipe)
    assert changes_of_run(run, recipe) == ([], [])
    run_versions = {**json.loads((run / "versions.json").read_text()), "torch": "2.10.0", "host": "another"}
    (run / "versions.json").write_text(json.dumps(run_versions))
    assert changes_of_run(run, recipe) == ([], [f'torch was "2.10.0", now "{version("torch")}"'])
    # Sections are in the order of the recipe files.
    assert list(yaml.safe_load((run / "config.yaml").read_text())) == list(recipe.as_dict())


def test_a_setting_newer_than_the_run_has_its_default(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    """And one without effect any more is no difference, and no concern of the user's."""
    run = write_run(recipe)
    config_values = yaml.safe_load((run / "config.yaml").read_text())
    del config_values["training"]["adam_epsilon"]
    config_values["run"] |= {"kernels": "triton", "cuda_graphs": True}
    (run / "config.yaml").write_text(yaml.safe_dump(config_values))
    assert (changes_of_run(run, recipe), capsys.readouterr().err) == (([], []), "")
    other = replace(recipe, training=replace(recipe.training, adam_epsilon=1e-6))
    assert changes_of_run(run, other)[0] == [f"training.adam_epsilon was {recipe.training.adam_epsilon}, now 1e-06"]
    # A setting that this version does not have is a difference.
    config_values["training"]["momentum"] = 0.5
    (run / "config.yaml").write_text(yaml.safe_dump(config_values))
    assert "training.momentum was 0.5, now null" in changes_of_run(run, recipe)[0]


def test_a_folder_that_holds_only_the_lock_is_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    RunFolder(run).close()
    assert list(tmp_path.iterdir()) == []
    folder = RunFolder(run)
    (run / "notes").touch()
    folder.close()
    assert {path.name for path in run.iterdir()} == {".lock", "notes"}


def test_a_refusal_names_a_few_differences(recipe: Recipe) -> None:
    run = write_run(recipe)
    texts = [TextSource(f"{i}.en", f"{i}.de") for i in range(2)]
    corpus = replace(recipe.corpus, train=texts, folder="other", lowercase=True, seed=2)
    other = replace(recipe, corpus=corpus, network=replace(recipe.network, d_ff=7))
    with pytest.raises(InputError) as raised:
        check_same_run(run, other)
    [text] = recipe.corpus.train
    assert str(raised.value) == (
        f"{run}: contains a run of another recipe: corpus.lowercase was false, now true; corpus.seed was 1, "
        f"now 2; corpus.train: no longer {text.source} {text.target}, now 0.en 0.de, 1.en 1.de; and 1 more; change it"
        f" back to resume that run (its recipe is {run / 'config.yaml'}), or give another run.folder, or --fresh to"
        " remove that run"
    )


def test_where_the_schedule_ends_may_not_change(recipe: Recipe) -> None:
    recipe = replace(recipe, training=replace(recipe.training, schedule="cosine", peak_learning_rate=1e-3))
    longer = replace(recipe, trainer={**recipe.trainer, "max_steps": 77777})
    [change], allowed = changes_of_run(write_run(recipe), longer)
    assert change.endswith(", now 77777, where training.schedule cosine ends")
    assert allowed == []


class Clock:
    """A clock that advances only in `sleep`; the second sleep calls `during_second_sleep`."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, during_second_sleep: Callable[[], object] = lambda: None
    ) -> None:
        self.slept: list[float] = []
        self._num_calls = 0
        self._during_second_sleep = during_second_sleep
        monkeypatch.setattr(time, "monotonic", self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def now(self) -> float:
        self._num_calls += 1
        assert self._num_calls < 100
        return 1000.0 + sum(self.slept)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if len(self.slept) == 2:
            self._during_second_sleep()


def test_a_folder_in_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    command = [sys.executable, "-S", "-c", HOLD_LOCK, str(run / ".lock")]
    waiting_message = f"{run}: another fit is writing to it; waiting "
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"locked\n"
        with pytest.raises(InputError, match=f"{run}: another fit is writing to it") as raised:
            RunFolder(run)
        assert capsys.readouterr().err == ""
        # Waiting fails if the other process keeps the lock.
        clock = Clock(monkeypatch)
        with pytest.raises(InputError) as raised_later:
            RunFolder(run, patience_seconds=1.0)
        assert str(raised_later.value) == str(raised.value)
        assert clock.slept == [0.5, 0.5]
        assert capsys.readouterr().err == waiting_message + "1 s\n"
        with monkeypatch.context() as context:
            context.setattr(signals, "_received", [signal.SIGUSR1])
            with pytest.raises(Stopped, match="asked to stop while another fit was writing"):
                RunFolder(run, patience_seconds=60.0)
        capsys.readouterr()
        Clock(monkeypatch, during_second_sleep=writer.communicate)
        RunFolder(run, patience_seconds=60.0).close()
        assert capsys.readouterr().err == waiting_message + "60 s\n"
    RunFolder(run).close()


@pytest.mark.parametrize(("job", "slept"), [(None, []), (STEP, [0.5, 0.5])])
def test_a_job_waits_for_its_predecessor(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: JobStep | None, slept: list[float]
) -> None:
    monkeypatch.setattr(recipe_checks, "current_job_step", lambda: job)
    monkeypatch.setattr(recipe_checks, "LOCK_PATIENCE_SECONDS", 1)
    with closing(RunFolder(tmp_path / "run")):
        clock = Clock(monkeypatch)
        assert "another fit is writing to it" in refusal("fit", recipe_file, "--run.folder", tmp_path / "run")
    assert clock.slept == slept


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", raise_no_locks)
    with pytest.raises(InputError, match=r"its file system cannot lock files \(No locks available\)"):
        RunFolder(tmp_path / "run")


def test_a_run_of_another_user_is_refused() -> None:
    with another_user() as folder:
        lock = folder / "run" / ".lock"
        lock.parent.mkdir()
        lock.touch(0o400)
        with pytest.raises(InputError) as caught:
            check_writable(lock.parent)
        assert str(caught.value) == (f"{lock}: cannot be written, so another user has the run; give another run.folder")


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    kept = [tmp_path / "checkpoints" / "step=00000004.ckpt", tmp_path / ".notes.txt.99.tmp"]
    (tmp_path / "config.yaml").write_text("{corpus: {}, batches: {}, network: {}, training: {}, run: {}}")
    leftovers = [tmp_path / "checkpoints" / ".step=00000008.ckpt.99.tmp"]
    leftovers += [tmp_path / f".{name}.99.tmp" for name in ("config.yaml", "tokenizer.model", "versions.json")]
    for path in (*kept, *leftovers):
        path.touch()
    RunFolder(tmp_path).close()
    assert [path.exists() for path in (*kept, *leftovers)] == [True] * 2 + [False] * 4


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (b"{corpus: {}, batches: {}, network: {}, training: {}, run: {}}", True),
        (b"{corpus: {}, batches: {}, network: {}, training: {}}", False),
        (b"[corpus, batches, network, training, run]", False),
        (b"corpus: [", False),
        (b"corpus: \xff", False),
        (b"corpus: !!int ''", False),
        (b"corpus: 2001-99-99", False),
        (None, False),
    ],
)
def test_which_folders_are_runs(tmp_path: Path, config: bytes | None, expected: bool) -> None:
    if config is not None:
        (tmp_path / "config.yaml").write_bytes(config)
    assert is_run(tmp_path) is expected


def test_the_revision_is_the_commit_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.setattr(launch, "__file__", str(tmp_path / "pipeline" / "versions.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "pipeline").mkdir()
    assert versions()["revision"] is None
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "Begin")
    assert versions()["revision"] == git("rev-parse", "--short", "HEAD")
    monkeypatch.setattr(launch, "IN_CLONE", False)
    assert versions()["revision"] is None


MAY_CHANGE = {
    "name": "another",
    "decoding.beam_size": 1,
    "run.keep_last": 9,
    "monitoring.embedding_pieces": 7,
    "trainer.max_steps": 77,
    "batches.max_tokens_per_device": 50000,
    "batches.workers": 7,
    "corpus.folder": "elsewhere",
}
MAY_NOT_CHANGE = {
    "run.seed": 9,
    "run.best_by": "chrf",
    "run.validation_translations": 9,
    "batches.batch_tokens": 50000,
    "corpus.max_tokens": 9,
    "network.dropout": 0.5,
    "network.num_encoder_layers": 9,
    "network.num_decoder_layers": 9,
    "training.warmup_steps": 9,
}


def test_which_settings_a_run_may_change(recipe: Recipe) -> None:
    run, changed = write_run(recipe), recipe.as_dict()
    for key, value in {**MAY_CHANGE, **MAY_NOT_CHANGE}.items():
        section, _, name = key.rpartition(".")
        (changed[section] if section else changed)[name] = value
    path = run.with_name("changed.yaml")
    path.write_text(yaml.safe_dump(changed))
    forbidden, allowed = changes_of_run(run, load_recipe([path]))
    for lines, expected in ((forbidden, MAY_NOT_CHANGE), (allowed, MAY_CHANGE)):
        assert [line.split(" ")[0] for line in lines] == sorted(expected)
        assert all(line.endswith(f", now {json.dumps(expected[line.split(' ')[0]])}") for line in lines)


def test_texts_may_have_other_names_where_their_pairs_are_compared(recipe: Recipe) -> None:
    """Weights belong to files, so weighted files keep their names."""
    names = {split: [TextSource(f"{split}.en", f"{split}.de")] for split in ("train", "validation", "test")}
    renamed = replace(recipe, corpus=replace(recipe.corpus, **names))
    keys = [f"corpus.{split}" for split in sorted(names)]
    forbidden, allowed = changes_of_run(write_run(recipe), renamed, texts_may_change=True)
    assert (forbidden, [line.split(":")[0] for line in allowed]) == ([], keys)
    weighted = replace(renamed, corpus=replace(renamed.corpus, train=[replace(names["train"][0], weight=2.0)]))
    for stored, now in ((recipe, weighted), (weighted, recipe)):
        forbidden, _ = changes_of_run(write_run(stored), now, texts_may_change=True)
        assert [line.split(":")[0] for line in forbidden] == keys


def test_a_run_keeps_its_identity(recipe: Recipe) -> None:
    run = write_run(recipe)
    before = (run / RUN_ID).stat().st_ino
    assert stored_run_id(write_run(recipe)) == IDENTITY
    assert (run / RUN_ID).stat().st_ino == before
    for damaged in (b"", IDENTITY[1:].encode(), b"\xff" * 32, 99 * IDENTITY.encode()):
        (run / RUN_ID).write_bytes(damaged)
        assert stored_run_id(run) is None
    (run / RUN_ID).unlink()
    os.mkfifo(run / RUN_ID)
    assert stored_run_id(run) is None


def test_depths_may_be_written_in_two_ways(recipe: Recipe) -> None:
    run, depth = write_run(recipe), recipe.network.num_layers

    def forbidden(**depths: int) -> list[str]:
        return changes_of_run(run, replace(recipe, network=replace(recipe.network, **depths)))[0]

    assert forbidden(num_encoder_layers=depth) == []
    assert forbidden(num_layers=9, num_encoder_layers=depth, num_decoder_layers=depth) == []
    assert forbidden(num_decoder_layers=1) == ["network.num_decoder_layers was null, now 1"]


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(InputError, match="is not empty and not a run folder"):
        RunFolder(tmp_path)
    (tmp_path / "photo.jpg").unlink()
    # The leftovers of a fit that was killed before it had written its recipe.
    for name in (".lock", ".starts-7.json", "..starts-7.json.99.tmp", ".fresh-7", ".config.yaml.99.tmp"):
        (tmp_path / name).touch()
    RunFolder(tmp_path).close()
    with pytest.raises(InputError, match="is a file"):
        RunFolder(tmp_path / ".lock")


def test_removing_a_run_keeps_other_files(recipe: Recipe) -> None:
    folder = RunFolder(recipe.run_folder())
    folder.write_config(recipe, b"", IDENTITY)
    run = folder.path
    (run / "checkpoints" / "around-best").mkdir(parents=True)
    (run / "tensorboard").mkdir()
    other_files = ["notes.txt", "average.txt", "results.jsonl"]
    copies = ["checkpoints/step=00000004-good.ckpt", "checkpoints/step=.ckpt", "checkpoints/keep-this.ckpt"]
    removed = ["stopped-early.json", "metrics.jsonl", "summary.json", "starts.jsonl", "average-last-5.ckpt", ".fresh-6"]
    removed += [RUN_ID, "average-best-5.ckpt", ".average-best-2.ckpt.9.tmp", "checkpoints/step=00000004.ckpt"]
    removed += ["checkpoints/best.ckpt", "checkpoints/.best.ckpt.9.tmp", "checkpoints/around-best/step=00000002.ckpt"]
    removed += ["tensorboard/events.out.tfevents.1", "tensorboard/embeddings.tsv", "tensorboard/projector_config.pbtxt"]
    for name in (*other_files, *copies, *removed):
        (run / name).touch()
    kept = {".lock", "config.yaml", "tokenizer.model", "versions.json", "checkpoints", *other_files}
    folder.remove_run(STEP)
    assert {path.name for path in run.iterdir()} == {*kept, reset_marker(run, STEP).name}
    assert {f"checkpoints/{path.name}" for path in (run / "checkpoints").iterdir()} == {*copies}
    # The same job, requeued, resumes.
    jobs = STEP, replace(STEP, job="8"), None
    assert [should_reset(True, run, job) for job in jobs] == [False, True, True]
    folder.remove_run(None)
    assert {path.name for path in run.iterdir()} == kept
    folder.close()


def test_removing_a_run_empties_linked_folders_and_keeps_the_links(recipe: Recipe, tmp_path: Path) -> None:
    run, scratch, kept = write_run(recipe), tmp_path / "scratch", {"notes.txt", ".important.tmp"}
    for name in ("checkpoints", "tensorboard"):
        (scratch / name).mkdir(parents=True)
        (run / name).symlink_to(scratch / name)
        for file in ("step=00000004.ckpt", "best.ckpt", ".step=00000008.ckpt.9.tmp", "events.out.tfevents.1", *kept):
            (scratch / name / file).touch()
    check_writable(run, fresh=True)
    with closing(RunFolder(run)) as folder:
        assert (scratch / "checkpoints" / ".important.tmp").exists()
        folder.remove_run(STEP)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"events.out.tfevents.1", *kept}
    assert (run / "checkpoints").readlink() == scratch / "checkpoints"
    assert not (run / "tensorboard" / "events.out.tfevents.1").exists()


def test_an_average_that_the_user_named_is_kept(recipe: Recipe) -> None:
    run = write_run(recipe)
    (run / "average-last-5.ckpt").touch()
    check_writable(run, fresh=True)
    (run / "average-of-mine.ckpt").touch()
    check_writable(run)
    with pytest.raises(InputError, match=r"average-of-mine\.ckpt: has a name that you gave it.* move it out"):
        check_writable(run, fresh=True)


def test_what_cannot_be_removed_is_named(recipe: Recipe) -> None:
    run = write_run(recipe)
    stuck = run / "checkpoints" / "step=00000008.ckpt"
    stuck.mkdir(parents=True)  # Not even root can remove it as a file.
    stuck.with_name("step=00000004.ckpt").touch()
    before = (run / "config.yaml").read_bytes()
    with closing(RunFolder(run)) as folder, pytest.raises(InputError) as raised:
        folder.remove_run(STEP)
    assert str(raised.value).startswith(f"{stuck}: cannot be removed (Is a directory), so no new run has begun; remove")
    assert (run / "config.yaml").read_bytes() == before
    assert not reset_marker(run, STEP).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs files of two users")
def test_files_of_another_user_that_cannot_be_removed_are_named_first(recipe: Recipe) -> None:
    with another_user() as folder:
        run = write_run(replace(recipe, run=replace(recipe.run, folder=str(folder / "run"))))
        (run / "checkpoints").mkdir()
        os.seteuid(0)
        (run / "checkpoints" / "best.ckpt").touch()
        (run / "checkpoints").chmod(0o1777)
        os.chown(run / "checkpoints", 0, 0)
        os.seteuid(65534)
        check_writable(run)
        with pytest.raises(InputError, match=r"best\.ckpt: cannot be removed \(it belongs to another user\)"):
            check_writable(run, fresh=True)
        os.seteuid(0)
        (run / "checkpoints").chmod(0o733)
        os.seteuid(65534)
        with pytest.raises(InputError, match=r"checkpoints: cannot be used \(Permission denied\)"):
            check_writable(run)


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "tensorboard/events.out.tfevents.1"])
def test_a_link_where_fit_writes_in_place_is_refused(recipe_file: Path, tmp_path: Path, name: str) -> None:
    victim, link = tmp_path / "victim", tmp_path / "run" / name
    victim.write_text("precious")
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(load_recipe([recipe_file]).as_dict()))
    line = refusal("fit", recipe_file, "--run.folder", tmp_path / "run")
    assert line == f"error: {link}: is a link, which fit does not follow; remove it"
    assert victim.read_text() == "precious"


def test_what_is_in_the_way_of_a_corpus(recipe_file: Path, tmp_path: Path) -> None:
    """A link there is not followed, and what cannot be removed is named before the work."""
    command = ["prepare", str(recipe_file), "--corpus.folder", str(tmp_path / "corpus")]
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").touch()
    for name in (".corpus.partial", ".corpus.replaced"):
        (tmp_path / name).symlink_to(tmp_path / "victim")
    assert main(command) == 0
    assert not (tmp_path / "corpus").is_symlink()
    assert [path.name for path in (tmp_path / "victim").iterdir()] == ["file"]
    (tmp_path / ".corpus.replaced").touch()
    before = (tmp_path / "corpus" / "manifest.json").stat().st_ino
    line = refusal(*command, "--force")
    assert f"cannot be written: Not a directory ({tmp_path / '.corpus.replaced'})" in line
    assert (tmp_path / "corpus" / "manifest.json").stat().st_ino == before


def test_checkpoints_behind_a_link_to_nothing_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    run = write_run(recipe)
    (run / "checkpoints").symlink_to(tmp_path / "purged")
    with pytest.raises(InputError) as raised:
        check_writable(run)
    assert f"checkpoints (a link to {tmp_path / 'purged'}): cannot be used (No such file" in str(raised.value)


def test_a_corpus_is_not_replaced_while_a_run_trains_on_it(
    recipe_file: Path, tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = Path(shutil.copytree(tiny_corpus, tmp_path / "corpus"))
    options = ["--corpus.folder", str(corpus)]
    command = ["prepare", str(recipe_file), "--force", *options]
    before, said = (corpus / "manifest.json").stat().st_ino, []

    def write_while_a_run_begins(*arguments: object) -> Manifest:
        began.enter_context(in_use(corpus))
        return write_corpus(*arguments)

    with ExitStack() as began, monkeypatch.context() as patch:
        patch.setattr(preparation, "write_corpus", write_while_a_run_begins)
        said.append(refusal(*command))
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.fit.train", lambda *_: said.append(refusal(*command)))
        assert main(["fit", str(recipe_file), *options, "--run.folder", str(tmp_path / "run")]) == 0
    assert all(f"{corpus}: a run is training on it; wait for its end" in line for line in said)
    assert len(said) == 2
    assert (corpus / "manifest.json").stat().st_ino == before

    @contextmanager
    def replaced_while_no_run_can_begin(folder: Path) -> Iterator[Path]:
        with replaced_folder(folder) as new:
            yield new
            with FileLock(corpus / "manifest.json", os.O_RDONLY) as lock:
                assert not lock.take(shared=True)

    monkeypatch.setattr(preparation, "replaced_folder", replaced_while_no_run_can_begin)
    assert main(command) == 0
    assert (corpus / "manifest.json").stat().st_ino != before


def test_metrics_are_read_from_a_file_only(tmp_path: Path) -> None:
    """Whoever opens a named pipe would wait for a writer."""
    assert list(read_metrics(tmp_path)) == []
    (tmp_path / METRICS).write_text('{"step": 2}\n[4]\n{"step": 6}\n')
    assert list(read_metrics(tmp_path)) == [{"step": 2}]
    (tmp_path / METRICS).unlink()
    os.mkfifo(tmp_path / METRICS)
    with pytest.raises(InputError, match=r"metrics\.jsonl: a pipe or a device, not a file"):
        list(read_metrics(tmp_path))
