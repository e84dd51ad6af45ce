"""Checkpoints: reading and writing them, which one a run folder means, and averages."""

import os
import resource
import shutil
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from data_module.errors import InputError
from data_module.system.files import PlainValues
from data_module.tokenization.tokenizer import Tokenizer
from model.transformer import Transformer
from pipeline.checkpointing.checkpoint import (
    NO_IDENTITY,
    average,
    check_members,
    load_model,
    metadata,
    read_checkpoint,
    resolve_checkpoint,
    write_atomic,
)
from pipeline.checkpointing.run_folder import (
    RUN_ID,
    all_checkpoints,
    around_best_path,
    checkpoint_bytes,
    latest_valid,
    step_checkpoints,
    step_path,
)
from pipeline.config.recipe import recipe_from_dict
from pipeline.runtime.console import user_message
from tests.conftest import refusal, run_here, tiny_recipe, train_tokenizer


def untrained_contents(corpus: Path, step: int) -> PlainValues:
    """Return what a checkpoint of `tiny_recipe` holds, of a network that is not trained."""
    recipe = recipe_from_dict({"name": "tiny", **tiny_recipe(corpus.parent)})
    tokenizer = Tokenizer.load(corpus / "tokenizer.model")
    torch.manual_seed(step)
    weights = Transformer(tokenizer.vocabulary_size, recipe.network).state_dict()
    return {
        "state_dict": {f"network.{name}": tensor for name, tensor in weights.items()},
        "translation": metadata(recipe, tokenizer, NO_IDENTITY),
        "global_step": step,
    }


def averaged(paths: list[Path]) -> PlainValues:
    return average([*map(read_checkpoint, paths)])


@pytest.fixture(scope="module")
def finished_run(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with three checkpoints and best.ckpt."""
    run = tmp_path_factory.mktemp("finished")
    for step in (80, 160, 240):
        write_atomic(untrained_contents(tiny_corpus, step), step_path(run, step))
    shutil.copy(step_path(run, 160), run / "checkpoints" / "best.ckpt")
    return run


def test_depths_may_be_written_in_two_ways_within_a_run(finished_run: Path, tmp_path: Path) -> None:
    paths = step_checkpoints(finished_run)[:2]
    contents = torch.load(paths[0], weights_only=True)
    network = contents["translation"]["network"]
    assert network["num_layers"] == 1
    network |= {"num_layers": 5, "num_encoder_layers": 1, "num_decoder_layers": 1}
    write_atomic(contents, tmp_path / "other.ckpt")
    loaded = load_model(tmp_path / "other.ckpt").network
    assert (len(loaded.decoder), loaded.training) == (1, False)
    assert averaged([tmp_path / "other.ckpt", paths[1]])["averaged"] == ["other.ckpt", paths[1].name]


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


def other_vocabulary(contents: PlainValues) -> None:
    model = train_tokenizer(["ab cd"], 15).model
    contents["translation"]["tokenizer"] = torch.frombuffer(bytearray(model), dtype=torch.uint8)
    del contents["translation"]["seen_pieces"]


EMBEDDING = "network.embedding.weight"


@pytest.mark.parametrize(
    "change",
    [
        lambda contents: contents["translation"]["network"].update(d_ff=99),
        # A single row could be broadcast.
        lambda contents: contents["state_dict"].update({EMBEDDING: contents["state_dict"][EMBEDDING][:1]}),
        lambda contents: contents["state_dict"].pop(EMBEDDING),
        other_vocabulary,
    ],
    ids=["network", "shape", "name", "vocabulary"],
)
def test_average_refuses_incompatible_checkpoints(
    finished_run: Path, tmp_path: Path, change: Callable[[PlainValues], object]
) -> None:
    paths = step_checkpoints(finished_run)[:2]
    contents = torch.load(paths[0], weights_only=True)
    change(contents)
    write_atomic(contents, tmp_path / "other.ckpt")
    with pytest.raises(InputError, match=f"other.ckpt: has another network or vocabulary than {paths[1]}; "):
        averaged([tmp_path / "other.ckpt", *paths])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("RUN", "one of the arguments --last --best is required"),
        ("RUN --last 2 --best 2", "argument --best: not allowed with argument --last"),
        ("RUN --last 0", "--last 0 is not 1 or more"),
        ("RUN --last 4", "has 3 valid checkpoints, --last is 4; give --last 3 or less"),
        ("RUN/checkpoints/best.ckpt --last 1", "is no run folder; give the folder that fit wrote"),
        ("RUN/checkpoints --last 1", "holds no checkpoint; give a run folder"),
        ("RUN/checkpoints --best 1", "holds no checkpoint; give a run folder"),
        ("RUN --last 1 --output RUN", "is a folder or a device; give a file as --output"),
        ("RUN --last 1 --output PIPE", "is a folder or a device; give a file as --output"),
        ("RUN --last 1 --output RUN/checkpoints/step=00000080.ckpt", "is there, and is no average; give another file"),
        ("RUN --last 1 --output RUN/checkpoints/best.ckpt", "best.ckpt: is there, and is no average"),
        ("RUN --last 1 --output TEXT", "text: is there, and is no average"),
    ],
)
def test_what_average_refuses(finished_run: Path, tmp_path: Path, words: str, said: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").touch()
    given = words.replace("RUN", str(finished_run))
    for name in ("pipe", "text"):
        given = given.replace(name.upper(), str(tmp_path / name))
    assert said in refusal("average", *given.split())


def test_what_average_replaces(finished_run: Path, tmp_path: Path) -> None:
    """An average, which a link may lead to; in the run folder, a link is replaced."""
    run, link, disk = Path(shutil.copytree(finished_run, tmp_path / "run")), tmp_path / "link", tmp_path / "disk"
    disk.mkdir()
    link.symlink_to("disk/average")
    for last in (1, 2):
        assert run_here("average", run, "--last", last, "--output", link)[0] == f"{link}\n"
        assert link.readlink() == Path("disk/average")
        assert len(read_checkpoint(disk / "average").contents["averaged"]) == last
    own = run / "average-last-2.ckpt"
    own.symlink_to(disk / "notes")
    (disk / "notes").write_text("mine")
    for _ in range(2):
        run_here("average", run, "--last", 2)
        assert not own.is_symlink()
    assert (disk / "notes").read_text() == "mine"
    shutil.copy(run / "checkpoints" / "best.ckpt", own)
    assert f"{own}: is there, and is no average; give another file as --output" in refusal("average", run, "--last", 2)


def test_average_skips_incomplete_checkpoints(finished_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    newest = step_checkpoints(run)[-1]
    newest.write_bytes(newest.read_bytes()[:-1000])
    assert latest_valid(run) == (step_checkpoints(run)[1], [newest])
    assert "averaged step=00000080.ckpt, step=00000160.ckpt\n" in run_here("average", run, "--last", 2)[1]
    assert read_checkpoint(run / "average-last-2.ckpt").step == 160


def test_which_checkpoint_a_run_folder_means(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    best = run / "checkpoints" / "best.ckpt"

    def chosen() -> tuple[str, str]:
        return resolve_checkpoint(run).name, capsys.readouterr().err

    assert chosen() == ("best.ckpt", "")
    best.rename(tmp_path / "best.ckpt")
    assert chosen() == ("step=00000240.ckpt", "")
    shutil.copy(tmp_path / "best.ckpt", best)
    for last in (2, 3):
        write_atomic(averaged(step_checkpoints(run)[-last:]), run / f"average-last-{last}.ckpt")
    for newer, older in ((2, 3), (3, 2)):
        os.utime(run / f"average-last-{newer}.ckpt", (2, 2))
        os.utime(run / f"average-last-{older}.ckpt", (1, 1))
        assert chosen() == (f"average-last-{newer}.ckpt", "")
    shutil.copy(best, step_path(run, 250))
    warning = (
        "average-last-3.ckpt is of step 240 and the run is at step 250, so best.ckpt is used; "
        "to use an average, run python -m pipeline average again\n"
    )
    assert chosen() == ("best.ckpt", warning)
    # Nothing is reported if one average of several is up to date.
    write_atomic(averaged(step_checkpoints(run)) | {"global_step": 250}, run / "average-last-4.ckpt")
    os.utime(run / "average-last-4.ckpt", (1, 1))
    assert chosen() == ("average-last-4.ckpt", "")
    shutil.rmtree(run / "checkpoints")
    assert chosen() == ("average-last-4.ckpt", "")  # of a later step, although its clock was behind
    for path, said in ((tmp_path, "holds no checkpoint"), (tmp_path / "nowhere", "no such checkpoint")):
        with pytest.raises(InputError, match=said):
            resolve_checkpoint(path)


OWN, OTHER = "0" * 32, "1" * 32
MEMBERS = ["step=00000240.ckpt", "step=00000160.ckpt", "best.ckpt", "around-best/step=00000040.ckpt"]
MEMBERS = [*(f"checkpoints/{name}" for name in MEMBERS), "average-last-2.ckpt"]


def rewrite(path: Path, **changes: object) -> None:
    """Change what a checkpoint says of its run; a change of `recipe` is of its section `run`."""
    contents = torch.load(path, weights_only=True)
    contents["translation"]["recipe"]["run"] |= changes.pop("recipe", {})
    contents["translation"] |= changes
    write_atomic(contents, path)


@pytest.fixture
def members(finished_run: Path, tmp_path: Path) -> Path:
    """A run folder with a recipe, whose checkpoints have all names; version 1.0 or 1.1 could have written it."""
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    around_best_path(run, 40).parent.mkdir()
    shutil.copy(step_path(run, 80), around_best_path(run, 40))
    write_atomic(averaged(step_checkpoints(run)[-2:]), run / "average-last-2.ckpt")
    recipe = read_checkpoint(step_path(run, 80)).recipe.as_dict()
    (run / "config.yaml").write_text(yaml.safe_dump(recipe))
    return run


@pytest.mark.parametrize("name", MEMBERS)
def test_a_checkpoint_of_another_run_is_refused(members: Path, name: str) -> None:
    for path in all_checkpoints(members):
        rewrite(path, run_id=OWN)
    (members / RUN_ID).write_text(OWN)
    assert check_members(members, all_checkpoints(members)) == OWN
    rewrite(members / name, run_id=OTHER)
    line = refusal("average", members, "--last", 1)
    assert line.startswith(f"error: {members / name}: is of another run than {members}; move it out of that folder")
    assert not (members / "average-last-1.ckpt").exists()
    assert refusal("average", members, "--best", 1) == line
    if name in (MEMBERS[0], *MEMBERS[2::2]):  # what commands choose from
        text = ["--source", Path(__file__)]
        commands = [["translate", members, *text], ["score", members, *text, "--target", Path(__file__)]]
        for command in (*commands, ["evaluate", members], ["export", members, members.parent / "bundle"]):
            assert refusal(*command) == line
    assert resolve_checkpoint(members / name) == members / name
    # Without a file, the newest checkpoint's identity counts, so that another one is named if the newest is foreign.
    (members / RUN_ID).unlink()
    with pytest.raises(InputError, match=": is of another run than ") as raised:
        check_members(members, all_checkpoints(members))
    assert str(raised.value).startswith(str(members / (MEMBERS[1] if name == MEMBERS[0] else name))), raised.value


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        *((name, {}) for name in MEMBERS),
        *((name, {"stored": OWN}) for name in MEMBERS[::4]),
        *((name, {"newest": OWN}) for name in MEMBERS[1::3]),
    ],
)
def test_recipes_are_compared_where_an_identity_is_missing(members: Path, name: str, ids: dict[str, str]) -> None:
    if "stored" in ids:
        (members / RUN_ID).write_text(ids["stored"])
    if "newest" in ids:
        rewrite(members / MEMBERS[0], run_id=ids["newest"])
    own_id = next(iter(ids.values()), None)
    rewrite(members / name, recipe={"keep_last": 9})
    assert check_members(members, all_checkpoints(members)) == own_id
    rewrite(members / name, recipe={"seed": 7})
    with pytest.raises(InputError) as raised:
        check_members(members, all_checkpoints(members))
    assert f"{members / name}: is of another run than {members} (run.seed was 1, now 7); " in str(raised.value)
    # Alone, it is used as it is; and so is a file that no recipe in the folder contradicts.
    assert resolve_checkpoint(members / name) == members / name
    (members / "config.yaml").unlink()
    assert check_members(members, all_checkpoints(members)) == own_id


def test_a_damaged_checkpoint_is_left_to_what_uses_it(members: Path) -> None:
    rewrite(members / MEMBERS[0], tokenizer=None)
    assert check_members(members, all_checkpoints(members)) is None
    with pytest.raises(InputError, match=r"is damaged: translation\.tokenizer"):
        read_checkpoint(members / MEMBERS[0])


def test_an_imported_network_is_that_of_the_run(members: Path) -> None:
    """The recipe of a Marian model's run need not name the bias and the activation, which its checkpoints have."""
    recipe = read_checkpoint(step_path(members, 80)).recipe
    network = {"output_bias": True, "activation": "swish"}
    paths = all_checkpoints(members)
    for path in paths:
        contents = torch.load(path, weights_only=True)
        contents["translation"]["network"] |= network
        write_atomic(contents, path)
    assert check_members(members, paths, recipe) is None
    with pytest.raises(InputError, match=r"network\.activation was"):
        check_members(
            members, all_checkpoints(members), replace(recipe, network=replace(recipe.network, activation="gelu"))
        )


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


def test_files_that_are_no_checkpoint_are_refused(finished_run: Path, tmp_path: Path) -> None:
    """test_crafted_files.py has checkpoints with a damage."""
    truncated, text, plain = (tmp_path / name for name in ("truncated.ckpt", "text.ckpt", "list.ckpt"))
    truncated.write_bytes(step_path(finished_run, 240).read_bytes()[:-1000])
    text.write_text("hello")
    torch.save([1, 2], plain)
    for path, said in ((truncated, "is truncated or"), (text, "not a checkpoint"), (plain, "is not a checkpoint of")):
        with pytest.raises(InputError, match=f"^{path}: .*{said}"):
            load_model(path)
