"""Checkpoints: reading and writing them, which one a run folder means, and averages."""

import os
import resource
import shutil
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer
from model.transformer import Transformer
from pipeline.checkpointing.checkpoint import (
    average,
    load_model,
    metadata,
    read_checkpoint,
    resolve_checkpoint,
    write_atomic,
)
from pipeline.checkpointing.run_folder import checkpoint_bytes, latest_valid, step_checkpoints, step_path
from pipeline.config.recipe import load_recipe
from pipeline.runtime.console import user_message
from tests.conftest import refusal, run_here, tiny_recipe, train_tokenizer


@pytest.fixture(scope="module")
def finished_run(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with three checkpoints and best.ckpt."""
    run = tmp_path_factory.mktemp("finished")
    (run / "recipe.yaml").write_text(yaml.safe_dump(tiny_recipe(tiny_corpus.parent)))
    recipe = load_recipe([run / "recipe.yaml"])
    tokenizer = Tokenizer.load(tiny_corpus / "tokenizer.model")
    for step in (80, 160, 240):
        torch.manual_seed(step)
        weights = Transformer(tokenizer.vocabulary_size, recipe.network).state_dict()
        contents = {
            "state_dict": {f"network.{name}": tensor for name, tensor in weights.items()},
            "translation": metadata(recipe, tokenizer),
            "global_step": step,
        }
        write_atomic(contents, step_path(run, step))
    shutil.copy(step_path(run, 160), run / "checkpoints" / "best.ckpt")
    return run


def test_a_moved_checkpoint_can_be_loaded(finished_run: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copy(finished_run / "checkpoints" / "step=00000240.ckpt", tmp_path / "moved.ckpt"))
    model = load_model(alone)
    assert model.step == 240
    assert not model.network.training
    assert model.tokenizer.vocabulary_size == model.network.vocabulary_size == 60
    weight = torch.load(alone, weights_only=True)["state_dict"]["network.embedding.weight"]
    torch.testing.assert_close(model.network.embedding.weight, weight, rtol=0, atol=0)
    assert model.network.positions(0, 3).abs().sum() > 0
    assert torch.load(alone, weights_only=True)["translation"]["format_version"] == 2


def test_the_moving_average_is_loaded_and_averaged(finished_run: Path, tmp_path: Path) -> None:
    contents = torch.load(step_path(finished_run, 240), weights_only=True)
    moving_average = contents["state_dict"]
    # The weights that training goes on with.
    contents["current_model_state"] = {name: tensor + 1 for name, tensor in moving_average.items()}
    write_atomic(contents, tmp_path / "ema.ckpt")
    loaded = load_model(tmp_path / "ema.ckpt").network.state_dict()
    mean = average([tmp_path / "ema.ckpt"])["state_dict"]
    for name, tensor in moving_average.items():
        assert torch.equal(loaded[name.removeprefix("network.")], tensor)
        assert torch.equal(mean[name], tensor)


def test_depths_may_be_written_in_two_ways_within_a_run(finished_run: Path, tmp_path: Path) -> None:
    paths = step_checkpoints(finished_run)[:2]
    contents = torch.load(paths[0], weights_only=True)
    network = contents["translation"]["network"]
    assert network["num_layers"] == 1
    network |= {"num_layers": 5, "num_encoder_layers": 1, "num_decoder_layers": 1}
    write_atomic(contents, tmp_path / "other.ckpt")
    assert len(load_model(tmp_path / "other.ckpt").network.decoder) == 1
    assert average([tmp_path / "other.ckpt", paths[1]])["averaged"] == ["other.ckpt", paths[1].name]
    network["num_encoder_layers"] = 2
    write_atomic(contents, tmp_path / "deeper.ckpt")
    with pytest.raises(InputError, match=r"deeper\.ckpt: has another network or vocabulary than "):
        average([tmp_path / "deeper.ckpt", paths[1]])
    with pytest.raises(InputError, match=r"deeper\.ckpt: its weights do not match its own settings "):
        load_model(tmp_path / "deeper.ckpt")


def test_the_size_of_a_checkpoint_is_that_of_weights_and_moments(trained_run: Path) -> None:
    path = step_checkpoints(trained_run)[-1]
    contents = torch.load(path, weights_only=True)
    states = contents["optimizer_states"][0]["state"].values()
    tensors = [*contents["state_dict"].values(), *(one for state in states for one in state.values() if one.dim())]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    num_parameters = sum(one.numel() for one in load_model(path).network.parameters())
    assert checkpoint_bytes(4 * num_parameters, with_average=False) == size
    assert checkpoint_bytes(4 * num_parameters, with_average=True) == size + 4 * num_parameters


def test_average_is_the_mean_summed_in_float64(finished_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    contents = [torch.load(path, weights_only=True) for path in step_checkpoints(run)]
    # The newest is added first; a float32 sum would lose the small value.
    for one, value in zip(contents, (1.0, 1e8, -1e8), strict=True):
        one["state_dict"]["network.embedding.weight"].fill_(value)
        write_atomic(one, step_path(run, one["global_step"]))
    printed, _ = run_here("average", run, "--last", 3, "--output", tmp_path / "mean.ckpt")
    assert printed == f"{tmp_path / 'mean.ckpt'}\n"
    mean = read_checkpoint(tmp_path / "mean.ckpt").weights
    for name, tensor in mean.items():
        assert torch.equal(tensor, (sum(one["state_dict"][f"network.{name}"].double() for one in contents) / 3).float())
    assert load_model(tmp_path / "mean.ckpt").step == 240


@pytest.mark.parametrize("other", ["network", "shape", "name", "vocabulary"])
def test_average_refuses_incompatible_checkpoints(finished_run: Path, tmp_path: Path, other: str) -> None:
    paths = step_checkpoints(finished_run)[:2]
    contents = torch.load(paths[0], weights_only=True)
    part, weights = contents["translation"], contents["state_dict"]
    if other == "network":
        part["network"]["d_ff"] = 99
    elif other == "shape":
        # A single row could be broadcast.
        weights["network.embedding.weight"] = weights["network.embedding.weight"][:1]
    elif other == "name":
        del weights["network.embedding.weight"]
    else:
        other_model = train_tokenizer(["ab cd"], 15).model
        part["tokenizer"] = torch.frombuffer(bytearray(other_model), dtype=torch.uint8)
        del part["seen_pieces"]
    write_atomic(contents, tmp_path / "other.ckpt")
    with pytest.raises(InputError, match=f"other.ckpt: has another network or vocabulary than {paths[1]}; "):
        average([tmp_path / "other.ckpt", *paths])


def test_average_of_more_checkpoints_than_exist_is_refused(finished_run: Path, tmp_path: Path) -> None:
    def refused(run: Path, last: int) -> str:
        return refusal("average", run, "--last", last)

    assert "has 3 valid checkpoints, --last is 9; give --last 3 or less" in refused(finished_run, 9)
    assert "holds no checkpoint; give a run folder" in refused(finished_run / "checkpoints", 3)
    assert "is no run folder" in refused(finished_run / "none", 3)
    assert refused(finished_run, 0) == "error: --last 0 is not 1 or more"
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    for number, word in ((2, "2 valid checkpoints"), (1, "1 valid checkpoint")):
        step_checkpoints(run)[0].unlink()
        assert f"has {word}, --last is 3; give --last {number} or less" in refused(run, 3)
    run_here("average", run, "--last", 1)
    mean, only = (read_checkpoint(path).weights for path in (run / "average-last-1.ckpt", latest_valid(run)[0]))
    assert all(torch.equal(mean[name], only[name]) for name in only)
    assert "one of the arguments --last --best is required" in refusal("average", run)


def test_average_skips_incomplete_checkpoints(finished_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    newest = step_checkpoints(run)[-1]
    newest.write_bytes(newest.read_bytes()[:-1000])
    assert latest_valid(run) == (step_checkpoints(run)[1], [newest])
    assert "averaged step=00000080.ckpt, step=00000160.ckpt\n" in run_here("average", run, "--last", 2)[1]
    assert read_checkpoint(run / "average-last-2.ckpt").step == 160


def test_an_outdated_average_is_reported(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    for last in (2, 3):
        run_here("average", run, "--last", last)
    assert resolve_checkpoint(run).name == "average-last-3.ckpt"
    assert capsys.readouterr().err == ""
    shutil.copy(run / "checkpoints" / "best.ckpt", run / "checkpoints" / "step=00000250.ckpt")
    assert resolve_checkpoint(run).name == "best.ckpt"
    assert capsys.readouterr().err == (
        "average-last-3.ckpt is of step 240 and the run is at step 250, so best.ckpt is used; "
        "to use an average, run python -m pipeline average again\n"
    )
    # Nothing is reported if one average of several is up to date.
    write_atomic(average(step_checkpoints(run)) | {"global_step": 250}, run / "average-last-4.ckpt")
    os.utime(run / "average-last-4.ckpt", (1, 1))
    assert resolve_checkpoint(run).name == "average-last-4.ckpt"
    assert capsys.readouterr().err == ""
    shutil.rmtree(run / "checkpoints")
    assert resolve_checkpoint(run).name == "average-last-4.ckpt"  # of a later step, although its clock was behind


def test_resolution_of_a_run_folder(finished_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    assert resolve_checkpoint(run).name == "best.ckpt"
    (run / "checkpoints" / "best.ckpt").unlink()
    assert resolve_checkpoint(run).name == "step=00000240.ckpt"
    write_atomic(average(step_checkpoints(run)), run / "average-last-3.ckpt")
    assert resolve_checkpoint(run).name == "average-last-3.ckpt"
    shutil.copy(run / "average-last-3.ckpt", run / "average-last-2.ckpt")
    for name, changed in (("average-last-2.ckpt", 2), ("average-last-3.ckpt", 1)):
        os.utime(run / name, (changed, changed))
    assert resolve_checkpoint(run).name == "average-last-2.ckpt"  # the newest
    os.utime(run / "average-last-3.ckpt", (3, 3))
    assert resolve_checkpoint(run).name == "average-last-3.ckpt"
    shutil.copy(step_path(run, 240), step_path(run, 300))
    assert resolve_checkpoint(run).name == "step=00000300.ckpt"  # the average is of earlier steps
    with pytest.raises(InputError, match="holds no checkpoint"):
        resolve_checkpoint(tmp_path)
    with pytest.raises(InputError, match="no such checkpoint"):
        resolve_checkpoint(tmp_path / "nowhere")


def test_a_checkpoint_from_a_gpu_is_read_without_one(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = torch.load(step_checkpoints(finished_run)[0], weights_only=True)
    with monkeypatch.context() as saving:
        saving.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
        write_atomic(contents, tmp_path / "gpu.ckpt")
    read = read_checkpoint(tmp_path / "gpu.ckpt").weights
    assert {str(tensor.device) for tensor in read.values()} == {"cpu"}


def test_a_file_of_another_kind_is_refused_without_warnings(tmp_path: Path) -> None:
    """PyTorch recognizes TorchScript by these file names."""
    path = tmp_path / "export.ckpt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name in ("data.pkl", "constants.pkl", "version"):
            archive.writestr(f"archive/{name}", "3\n")
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        with pytest.raises(InputError, match="may be an export"):
            read_checkpoint(path)
    assert not caught_warnings


def test_a_full_disk_is_one_line_and_leaves_no_file(tmp_path: Path) -> None:
    contents = {"weight": torch.zeros(2_500_000, dtype=torch.uint8)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(RuntimeError) as raised:  # PyTorch raises its own.
            write_atomic(contents, tmp_path / "x.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    line = f"{tmp_path / 'x.ckpt'}: File too large; make room, then run the same command again"
    assert user_message(raised.value) == line
    assert not list(tmp_path.iterdir())


def broken_checkpoints(run: Path, folder: Path) -> dict[Path, str]:
    complete = run / "checkpoints" / "step=00000240.ckpt"
    contents = torch.load(complete, weights_only=True)
    checkpoints: dict[Path, str] = {}

    def add(name: str, changed: object, message: str) -> None:
        torch.save(changed, folder / name)
        checkpoints[folder / name] = message

    truncated = folder / "truncated.ckpt"
    truncated.write_bytes(complete.read_bytes()[:-1000])
    checkpoints[truncated] = "truncated"
    text = folder / "text.ckpt"
    text.write_text("hello")
    checkpoints[text] = "not a checkpoint"
    add("foreign.ckpt", {"state_dict": {}}, "not a checkpoint of this program")
    add("list.ckpt", [1, 2], "not a checkpoint of this program")
    add("newer.ckpt", {**contents, "translation": {**contents["translation"], "format_version": 99}}, "format 99")
    no_step = {key: value for key, value in contents.items() if key != "global_step"}
    add("no_step.ckpt", no_step, "not a checkpoint of this program")
    network = {**contents["translation"]["network"], "norm": "rms"}
    unknown_norm = {**contents["translation"], "network": network}
    add("norm.ckpt", {**contents, "translation": unknown_norm}, "network.norm 'rms' is not registered")
    smaller = {**contents["state_dict"], "network.embedding.weight": torch.zeros(50, 16)}
    add("vocabulary.ckpt", {**contents, "state_dict": smaller}, "vocabulary of 60")
    return checkpoints


def test_invalid_checkpoints_are_refused_in_one_line(finished_run: Path, tmp_path: Path) -> None:
    for path, message in broken_checkpoints(finished_run, tmp_path).items():
        with pytest.raises(InputError, match=message) as caught:
            load_model(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


class WritesFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "written")


def test_reading_a_checkpoint_executes_no_code(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "translation": WritesFile(tmp_path / "written")}, tmp_path / "malicious.ckpt")
    with pytest.raises(InputError, match="cannot be read"):
        load_model(tmp_path / "malicious.ckpt")
    assert not (tmp_path / "written").exists()
