"""Checkpoints: whole or refused, chosen as documented, averaged exactly."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from data_module.errors import InputError
from pipeline.__main__ import main
from pipeline.checkpoint import average, choose, load_model, read_checkpoint, step_checkpoints, write_whole
from tests.conftest import pipeline


def test_a_checkpoint_moved_alone_loads(trained_run: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copy(trained_run / "checkpoints" / "step=00000240.ckpt", tmp_path / "moved.ckpt"))
    model = load_model(alone)
    assert model.step == 240
    assert not model.network.training
    assert model.tokenizer.vocabulary_size == model.network.vocabulary_size == 60
    weight = torch.load(alone, weights_only=True)["state_dict"]["network.embedding.weight"]
    torch.testing.assert_close(model.network.embedding.weight, weight, rtol=0, atol=0)
    assert model.network.positions(0, 3).abs().sum() > 0


def test_average_is_the_mean(trained_run: Path, tmp_path: Path) -> None:
    done = pipeline("average", trained_run, "--last", 3, "--output", tmp_path / "mean.ckpt")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().strip() == str(tmp_path / "mean.ckpt")
    contents = [torch.load(path, weights_only=True)["state_dict"] for path in step_checkpoints(trained_run)]
    mean = read_checkpoint(tmp_path / "mean.ckpt")["state_dict"]
    for name, tensor in mean.items():
        expected = sum(state[name].double() for state in contents) / 3
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-9)
        assert tensor.dtype == torch.float32
    assert any((mean[name] - contents[-1][name]).abs().max() > 1e-4 for name in mean)
    assert load_model(tmp_path / "mean.ckpt").step == 240


@pytest.mark.parametrize("other", ["network", "shape", "name", "vocabulary"])
def test_average_refuses_what_does_not_fit(trained_run: Path, tmp_path: Path, other: str) -> None:
    paths = step_checkpoints(trained_run)[:2]
    contents = torch.load(paths[0], weights_only=True)
    part, weights = contents["translation"], contents["state_dict"]
    if other == "network":
        part["network"]["d_ff"] = 99
    elif other == "shape":
        # One row would be broadcast over all.
        weights["network.embedding.weight"] = weights["network.embedding.weight"][:1]
    elif other == "name":
        del weights["network.embedding.weight"]
    else:
        part["tokenizer"] = part["tokenizer"].flip(0)
    write_whole(contents, tmp_path / "other.ckpt")
    with pytest.raises(InputError, match="another network or vocabulary"):
        average([tmp_path / "other.ckpt", paths[1]])


def test_average_of_more_than_there_are_is_refused(trained_run: Path) -> None:
    done = pipeline("average", trained_run, "--last", 9)
    assert done.returncode == 2
    assert b"has 3 whole checkpoints, --last is 9; give --last 3 or less" in done.stderr
    none = pipeline("average", trained_run / "checkpoints", "--last", 3)
    assert none.returncode == 2
    assert b"holds no checkpoint; give a run folder" in none.stderr
    nowhere = pipeline("average", trained_run / "none", "--last", 3)
    assert b"there is no such run folder" in nowhere.stderr
    nothing = pipeline("average", trained_run, "--last", 0)
    assert nothing.stderr == b"error: --last 0 is not 1 or more\n"


def test_average_leaves_out_what_is_not_whole(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    newest = step_checkpoints(run)[-1]
    newest.write_bytes(newest.read_bytes()[:-1000])
    assert main(["average", str(run), "--last", "2"]) == 0
    assert "averaged step=00000080.ckpt, step=00000160.ckpt\n" in capsys.readouterr().err
    assert read_checkpoint(run / "average-last-2.ckpt")["global_step"] == 160


def test_average_is_summed_in_float64(trained_run: Path, tmp_path: Path) -> None:
    contents = torch.load(step_checkpoints(trained_run)[0], weights_only=True)
    paths = []
    # The newest is taken first; in float32 it swallows the small one.
    for number, value in enumerate((1.0, 1e8, -1e8)):
        contents["state_dict"] = {"network.x": torch.tensor([value])}
        write_whole(contents, tmp_path / f"{number}.ckpt")
        paths.append(tmp_path / f"{number}.ckpt")
    assert average(paths)["state_dict"]["network.x"].item() == pytest.approx(1 / 3)


def test_which_checkpoint_a_run_folder_means(trained_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    assert choose(run).name == "best.ckpt"
    (run / "checkpoints" / "best.ckpt").unlink()
    assert choose(run).name == "step=00000240.ckpt"
    shutil.copy(choose(run), run / "average-last-3.ckpt")
    assert choose(run).name == "average-last-3.ckpt"
    shutil.copy(choose(run), run / "average-last-2.ckpt")
    for name, changed in (("average-last-2.ckpt", 2), ("average-last-3.ckpt", 1)):
        os.utime(run / name, (changed, changed))
    assert choose(run).name == "average-last-2.ckpt"  # the newest
    os.utime(run / "average-last-3.ckpt", (3, 3))
    assert choose(run).name == "average-last-3.ckpt"
    shutil.copy(choose(run), run / "checkpoints" / "step=00000300.ckpt")
    assert choose(run).name == "step=00000300.ckpt"  # the average is of what was before
    with pytest.raises(InputError, match="holds no checkpoint"):
        choose(tmp_path)
    with pytest.raises(InputError, match="no such checkpoint"):
        choose(tmp_path / "nowhere")


def broken_checkpoints(run: Path, folder: Path) -> dict[str, tuple[Path, str]]:
    whole = run / "checkpoints" / "step=00000240.ckpt"
    contents = torch.load(whole, weights_only=True)
    made = {}

    def put(name: str, changed: object, message: str) -> None:
        torch.save(changed, folder / name)
        made[name] = (folder / name, message)

    truncated = folder / "truncated.ckpt"
    truncated.write_bytes(whole.read_bytes()[:-1000])
    made["truncated"] = (truncated, "cut short")
    text = folder / "text.ckpt"
    text.write_text("hello")
    made["text"] = (text, "no checkpoint")
    put("foreign.ckpt", {"state_dict": {}}, "not one of this program")
    put("list.ckpt", [1, 2], "not one of this program")
    put("newer.ckpt", {**contents, "translation": {**contents["translation"], "format_version": 99}}, "format 99")
    smaller = {**contents["state_dict"], "network.embedding.weight": torch.zeros(50, 16)}
    put("vocabulary.ckpt", {**contents, "state_dict": smaller}, "vocabulary of 60")
    return made


@pytest.mark.parametrize("kind", ["truncated", "text", "foreign.ckpt", "list.ckpt", "newer.ckpt", "vocabulary.ckpt"])
def test_what_is_no_checkpoint_is_refused_in_one_line(trained_run: Path, tmp_path: Path, kind: str) -> None:
    path, message = broken_checkpoints(trained_run, tmp_path)[kind]
    with pytest.raises(InputError, match=message) as caught:
        load_model(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "sprung")


def test_a_checkpoint_executes_nothing(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "translation": Trap(tmp_path / "sprung")}, tmp_path / "trap.ckpt")
    with pytest.raises(InputError, match="cannot be read"):
        load_model(tmp_path / "trap.ckpt")
    assert not (tmp_path / "sprung").exists()


def test_a_failed_write_leaves_the_old_one(tmp_path: Path) -> None:
    write_whole({"a": torch.ones(2)}, tmp_path / "x.ckpt")
    with pytest.raises(AttributeError):
        write_whole({"a": lambda: None}, tmp_path / "x.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["a"].sum() == 2
