"""Mount points, full disks and shared memory: what cannot end well is refused first, and what is full is named."""

import json
import os
import subprocess
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

from data_module.system.files import is_mount_point
from data_module.system.outputs import output_file
from pipeline.checkpointing.run_folder import read_metrics, step_checkpoints, step_of, step_path
from pipeline.config.recipe import load_recipe
from pipeline.doctor.doctor import check_fit
from tests.conftest import program, refusal, run_here

Mount = Callable[..., None]


@pytest.fixture
def mount() -> Iterator[Mount]:
    """Mounts at a place until the test ends."""
    places: list[Path] = []

    def mount(place: Path, *arguments: object) -> None:
        command = ["mount", *map(str, arguments), str(place)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs root, to mount")
        places.append(place)

    yield mount
    for place in reversed(places):
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_what_is_mounted_cannot_be_replaced(mount: Mount, recipe_file: Path, trained_run: Path, tmp_path: Path) -> None:
    """A file system of its own, and folders and a file of the same one."""
    corpus, bundle, output = tmp_path / "a corpus", tmp_path / "bundle", tmp_path / "average.ckpt"
    corpus.mkdir()
    bundle.mkdir()
    output.touch()
    mount(corpus, "-t", "tmpfs", "none")
    for place in (bundle, output):
        mount(place, "--bind", place)
    assert [is_mount_point(path) for path in (corpus, bundle, output, tmp_path)] == [True, True, True, False]
    reason = "a mount point cannot be replaced; a folder inside it can"
    expected = f"{corpus}: cannot be written: {reason}; name another corpus.folder"
    words = [recipe_file, "--corpus.folder", corpus]
    for command in ("prepare", "fit"):
        assert refusal(command, *words) == f"error: {expected}"
    recipe = load_recipe([recipe_file], ["--corpus.folder", str(corpus)])
    results = check_fit(recipe, None, Namespace(config=[], overrides=[], fresh=False, init_from=None))
    assert expected in [result.message for result in results if not result.ok]
    line = refusal("export", trained_run, bundle, "--format", "torchscript")
    assert line == f"error: {bundle}: cannot be written ({reason}); give another folder"
    line = refusal("average", trained_run, "--last", 2, "--output", output)
    assert line == f"error: {output}: cannot be written ({reason}); give another file as --output"
    with output_file(output) as file:  # of `evaluate`, which may write it in place
        file.write(b"translations")
    assert output.read_bytes() == b"translations"
    # Inside it, everything works.
    run_here("prepare", recipe_file, "--corpus.folder", corpus / "mine")


def test_a_full_disk_is_named(mount: Mount, trained_run: Path, tmp_path: Path) -> None:
    disk, full = tmp_path / "disk", "No space left on device"
    disk.mkdir()
    mount(disk, "-t", "tmpfs", "-o", "size=64k", "none")
    bundle, average, recipe = disk / "bundle", disk / "average.ckpt", disk / "demo.yaml"
    line = refusal("export", trained_run, bundle, "--format", "torchscript")
    assert line == f"error: {bundle}: {full}; make room, then run the same command again"
    assert not list(disk.iterdir())
    space = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(space.f_bavail * space.f_frsize))
    for name, *arguments in (
        (average, "average", trained_run, "--last", 2, "--output"),
        (recipe, "recipe", "copy", "demo"),
    ):
        assert refusal(*arguments, name) == f"error: {name}: {full}; make room, then run the same command again"
    assert [path.name for path in disk.iterdir()] == ["filler"]


def test_a_disk_that_is_full_while_a_run_saves(mount: Mount, recipe_file: Path, tmp_path: Path) -> None:
    """It has room for one checkpoint, and the last one is kept until its successor is whole."""
    run = tmp_path / "run"
    run.mkdir()
    mount(run, "-t", "tmpfs", "-o", "size=40m", "none")
    command = ["fit", recipe_file, "--run.folder", run, "--run.keep_last", 1, "--trainer.val_check_interval", 12]
    command += ["--network.learned_positions", "true", "--network.max_positions", 130_000]
    line = run_here(*command, code=2)[1].splitlines()[-1]
    assert line.startswith(f"error: {step_path(run, 8)}: ")
    assert line.endswith("; make room, then run the same command again")
    [kept] = (run / "checkpoints").iterdir()
    assert (kept, torch.load(kept, weights_only=True)["global_step"]) == (step_path(run, 4), 4)
    subprocess.run(["mount", "-o", "remount,size=200m", str(run)], check=True)
    assert f"resuming from {kept}" in run_here(*command)[1]
    assert [step_of(path) for path in step_checkpoints(run)] == [12]


def test_a_log_folder_that_is_read_only(tmp_path: Path, recipe_file: Path) -> None:
    """test_run_log.py has a disk that is full while a run logs."""
    run = tmp_path / "run"
    run.mkdir()
    # Nothing can be created below a file, even by root.
    (run / "tensorboard").touch()
    (run / "config.yaml").write_text(yaml.safe_dump(load_recipe([recipe_file]).as_dict()))
    _, said = run_here("fit", recipe_file, "--run.folder", run)
    [warning] = [line for line in said.splitlines() if line.startswith("warning: ")]
    assert warning.startswith(f"warning: {run}/tensorboard")
    assert [line["step"] for line in read_metrics(run) if "train/loss" in line] == [2, 4, 6, 8, 10, 12]
    assert json.loads((run / "summary.json").read_text())["step"] == 12


LOADER = """
import ctypes, subprocess, sys
from pathlib import Path
from data_module.batch import SpecialIds
from data_module.errors import InputError
from data_module.settings import BatchSettings
from data_module.translation_data_module import TranslationDataModule
from data_module.system.worker_processes import require_shared_memory
if ctypes.CDLL(None).unshare(0x0002_0000):  # CLONE_NEWNS: mounts of its own
    sys.exit("unshare")
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
data = TranslationDataModule(Path(sys.argv[1]), BatchSettings(batch_tokens=20_000, workers=1), SpecialIds(0, 1, 2), 1)
for options, num_bytes in (("size=64k", 0), ("size=64k", 64 << 10), ("size=0,ro", 0)):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", "/dev/shm"], check=True)
    if num_bytes:
        Path("/dev/shm/filler").write_bytes(bytes(num_bytes))
    try:
        require_shared_memory()
        print(next(iter(data.train_dataloader())).flat.nbytes > 64 << 10)
    except InputError as error:
        print(error)
"""


def test_shared_memory_that_cannot_be_written_is_named(tiny_corpus: Path) -> None:
    """A batch that is larger than the shared memory passes; the loader's locks must have room in it."""
    done = program(LOADER, tiny_corpus)
    if b"unshare" in done.stderr or b"mount" in done.stderr:
        pytest.skip("needs root, to mount")
    large, full, read_only = done.stdout.decode().splitlines()
    assert (large, done.stderr) == ("True", b"")
    for line, problem in ((full, "No space left on device"), (read_only, "Read-only file system")):
        assert line.startswith(f"/dev/shm: {problem}; ")
        assert "batches.workers 0, or make it larger or writable" in line
