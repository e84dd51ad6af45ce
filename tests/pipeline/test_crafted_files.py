"""Files that say what is not so: each is refused in one line, before memory or time is spent on what they say.

A crafted checkpoint is a whole one with one damage; likewise a corpus, a card and a recipe.
"""

import json
import os
import pickle
import resource
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import FileIO
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from data_module.batch import SpecialIds
from data_module.corpus.manifest import read_manifest
from data_module.errors import InputError
from data_module.settings import BatchSettings
from data_module.system.files import PlainValues, read_json, read_whole
from data_module.tokenization.tokenizer import Tokenizer
from data_module.translation_data_module import TranslationDataModule
from model.settings import NetworkSettings
from pipeline.checkpointing.checkpoint import load_model, read_checkpoint
from pipeline.checkpointing.resume_point import read_resume_point
from pipeline.checkpointing.run_folder import changes_of_run, is_run, latest_valid, read_metrics
from pipeline.checkpointing.weights_only import load_weights_only
from pipeline.config.recipe import load_recipe
from pipeline.config.recipe_files import MOST_BYTES, compose
from pipeline.export.marian_import import load_marian
from pipeline.training.start import finished_reason
from tests.conftest import refusal, run_here
from tests.pipeline.test_checkpoint import untrained_contents

SPACE = 4 << 30
"""Bytes that a process may take beside what it has."""


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let what takes `SPACE` more memory inside fail, also memory that is reserved only."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPACE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


Damage = Callable[[PlainValues], None]


def put(*keys: str | int, value: object) -> Damage:
    """Return a damage: the value at a key of a key ... is another one."""

    def damage(contents: PlainValues) -> None:
        for key in keys[:-1]:
            contents = contents[key]
        contents[keys[-1]] = value

    return damage


def without(key: str) -> Damage:
    def damage(contents: PlainValues) -> None:
        del contents[key]

    return damage


def network(**settings: object) -> Damage:
    def damage(contents: PlainValues) -> None:
        contents["translation"]["network"].update(settings)

    return damage


WEIGHT, TRANSLATION = ("state_dict", "network.embedding.weight"), "translation"
UNREADABLE = "cannot be read as a checkpoint"
CHECKPOINTS: dict[str, tuple[Damage, str]] = {
    "10 ** 7 layers": (network(num_layers=10**7), "network.num_layers 10000000 is not 10,000 or less"),
    "a wide network": (network(d_model=10**6), "do not match its own settings"),
    "many positions": (network(learned_positions=True, max_positions=10**12), "do not match its own settings"),
    "another size": (network(d_ff=8), "its weights do not match its own settings"),
    "a size beyond 64 bits": (network(d_ff=1 << 70), "network.d_ff 1180591620717411303424 is not 1,000,000 or less"),
    "a setting of another type": (network(num_heads="four"), "network.num_heads must be a whole number, not 'four'"),
    "a setting of no range": (network(dropout=2.0), "network.dropout 2.0 is not in [0, 1)"),
    "an unknown setting": (network(num_head=4), "network.num_head is not a key; did you mean network.num_heads?"),
    "an unknown norm": (network(norm="rms"), "network.norm 'rms' is not registered"),
    "no network": (put(TRANSLATION, "network", value=[1]), "network must be a mapping, not [1]"),
    "a recipe that is a list": (put(TRANSLATION, "recipe", value=["x"]), "the recipe must be a mapping, not ['x']"),
    "a recipe in part": (put(TRANSLATION, "recipe", "corpus", value={}), "corpus.folder is missing"),
    "no text source": (put(TRANSLATION, "recipe", "corpus", "train", value=[3]), "corpus.train must be a mapping"),
    "a beam of text": (put(TRANSLATION, "recipe", "decoding", "beam_size", value="wide"), "decoding.beam_size must be"),
    "a tokenizer that is text": (
        put(TRANSLATION, "tokenizer", value="text"),
        "translation.tokenizer is missing or wrong",
    ),
    "a tokenizer of noise": (put(TRANSLATION, "tokenizer", value=torch.ones(9, dtype=torch.uint8)), "not a tokenizer"),
    "weights that are a list": (put("state_dict", value=[1]), "state_dict is missing or wrong"),
    "a weight that is text": (put(*WEIGHT, value="text"), "state_dict.network.embedding.weight is missing or wrong"),
    "a step that is text": (put("global_step", value="9"), "global_step is missing or wrong"),
    "no step": (without("global_step"), "not a checkpoint of this program"),
    "of another program": (without("translation"), "not a checkpoint of this program"),
    "too few pieces": (put(*WEIGHT, value=torch.zeros(50, 16)), "and vocabulary of 60"),
}


@pytest.fixture(scope="module")
def whole(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, without a damage, of a network that is not trained."""
    path = tmp_path_factory.mktemp("crafted") / "whole.ckpt"
    torch.save(untrained_contents(tiny_corpus, 3), path)
    load_model(path)
    return path


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_crafted_checkpoint(whole: Path, tmp_path: Path, name: str) -> None:
    damage, words = CHECKPOINTS[name]
    contents = torch.load(whole, weights_only=True)
    damage(contents)
    crafted = tmp_path / "crafted.ckpt"
    torch.save(contents, crafted)
    assert crafted.stat().st_size < 1e6
    with limited_memory(), pytest.raises(InputError) as error:
        load_model(crafted)
    line = str(error.value)
    assert line.startswith(f"{crafted}: ")
    assert words in line
    assert len(line.splitlines()) == 1


FIT_LOOP, PLACE = ("loops", "fit_loop"), ("loops", "fit_loop", "state_dict", "combined_loader")
OPTIMIZER = ("optimizer_states", 0)
STEPS = "epoch_loop.manual_optimization.optim_step_progress"
RESUMED: dict[str, tuple[Damage, str]] = {
    "callbacks that are a list": (put("callbacks", value=[1]), "callbacks is missing"),
    "a state that is text": (put("callbacks", "GracefulStop", value="x"), "callbacks.GracefulStop is missing"),
    "no state of a callback": (put("callbacks", "TrainingMonitor", value=None), "callbacks.TrainingMonitor is missing"),
    "a score that is text": (put("callbacks", "CheckpointCallback", "best_score", value="x"), ".best_score is missing"),
    "an unknown BLEU": (put("callbacks", "ValidationSamples", "bleu_tokenizer", value="x"), ".bleu_tokenizer is"),
    "no loops": (put("loops", value=None), "loops is missing"),
    "no progress": (put(*FIT_LOOP, "epoch_loop.scheduler_progress", value=None), "scheduler_progress is missing"),
    "no schedulers": (put("lr_schedulers", value=None), "lr_schedulers is missing"),
    "a weight too many": (put("state_dict", "network.x", value=torch.ones(1)), "its weights are not those of the"),
    "a weight of nobody's": (put("state_dict", 5, value=torch.ones(1)), "its weights are not those of the recipe's"),
    "no position": (put(*PLACE, value=[]), "the position in the corpus is missing or wrong"),
    "an epoch that is text": (put(*PLACE, 0, "epoch", value="x"), "combined_loader.epoch is missing"),
    "a batch below 0": (put(*PLACE, 0, "next_batch", value=-1), "combined_loader.next_batch is missing"),
    "a position out of range": (put(*PLACE, 0, "next_batch", value=10**9), "the position in the corpus is"),
    "steps that are not counted": (put(*FIT_LOOP, STEPS, "total", "completed", value=0), "the number of steps is"),
    "another step than its name's": (put("global_step", value=8), "the number of steps is missing or wrong"),
    "no optimizer": (put("optimizer_states", value=[]), "optimizer_states is missing"),
    "no states of the optimizer": (put(*OPTIMIZER, "state", value={}), "state of embedding.weight is missing"),
    "no state of a parameter": (put(*OPTIMIZER, "state", 1, value={}), "query_key_value.weight is missing"),
    "no groups": (put(*OPTIMIZER, "param_groups", value=[]), "different number of parameter groups"),
    "other betas": (put(*OPTIMIZER, "param_groups", 0, "betas", value=(0.5, 0.5)), "the optimizer has other settings"),
    "weights of another shape": (put(*WEIGHT, value=torch.ones(3)), "its weights are not those of the recipe's"),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_crafted_checkpoint_to_resume_from(trained_run: Path, tmp_path: Path, name: str) -> None:
    damage, words = RESUMED[name]
    whole = trained_run / "checkpoints" / "step=00000240.ckpt"
    recipe = load_recipe([trained_run / "config.yaml"])
    assert read_resume_point(whole, recipe).step == 240
    contents = torch.load(whole, weights_only=True)
    damage(contents)
    crafted = tmp_path / whole.name
    torch.save(contents, crafted)
    with pytest.raises(InputError) as error:
        read_resume_point(crafted, recipe)
    line = str(error.value)
    assert line.startswith(f"{crafted}: cannot be resumed from (")
    assert words in line
    assert line.endswith("); remove it, or use --fresh")


def test_a_compressed_checkpoint(whole: Path, tmp_path: Path) -> None:
    """Its compressed bytes would be mapped as weights."""
    crafted = tmp_path / "crafted.ckpt"
    with zipfile.ZipFile(whole) as given, zipfile.ZipFile(crafted, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in given.infolist():
            archive.writestr(entry.filename, given.read(entry))
    assert UNREADABLE in refusal("export", crafted, tmp_path / "bundle")


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def storage(size: int, key: bytes = text("0"), more: bytes = b"") -> bytes:
    """A storage of `size` numbers; `more` is what only files of PyTorch before 1.6 have."""
    number = b"J" + size.to_bytes(4, "little", signed=True)
    return b"(" + text("storage") + b"ctorch\nFloatStorage\n" + key + text("cpu") + number + more + b"tQ"


def tensor(stored: bytes, shape: bytes, strides: bytes) -> bytes:
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + stored + b"K\0" + shape + strides + b"\x89" + EMPTY + b"tR"


EMPTY = b"ccollections\nOrderedDict\n)R"
TWICE = b")q\0" + 60 * b"h\0\x86q\0"
"""A tuple of a tuple twice, 60 deep: its hash takes 2 ** 60 steps."""
PAIRS = b"]" + TWICE + b"K\1\x86a"
LARGE = b"J\0\0\0\x08"
PICKLES: dict[str, bytes] = {
    "a call that doubles text": b"c_codecs\nencode\n" + text("a") + text("hex") + b"\x86R",
    "a call that reserves memory": b"c__builtin__\nbytearray\n" + LARGE + b"\x85R",
    "a name that is not called": b"ctorch\nSize\n",
    "a name with an escape": b"c__builtin__\nbyte\\x61rray\n" + LARGE + b"\x85R",
    "a name by another operation": text("builtins") + text("bytearray") + b"\x93" + LARGE + b"\x85R",
    "a name in a module": b"i__builtin__\nbytearray\n",
    "a new object": b"ccollections\nOrderedDict\n)\x81",
    "a set": b"\x8f",
    "a tuple as a key": b"})K\1s",
    "nothing as a key": b"}NK\1s",
    "a nested key": b"}" + TWICE + b"K\1s",
    "a nested key, later": b"}(K\1K\1" + TWICE + b"K\1u",
    "a nested key inside": b"}" + text("a") + b"}" + TWICE + b"K\1ss",
    "nested keys of a call": b"ccollections\nOrderedDict\n" + PAIRS + b"\x85R",
    "nested keys of attributes": EMPTY + PAIRS + b"b",
    "a nested key of a storage": tensor(storage(1, key=TWICE), b"K\1\x85", b"K\1\x85"),
    "attributes in place of methods": EMPTY + b"}" + text("items") + b"ccollections\nOrderedDict\nsb",
    "attributes of a tensor": tensor(storage(1), b"K\1\x85", b"K\1\x85") + b"}b",
    "a call of what a call returned": EMPTY + b")R",
    "text longer than the file": b"X\xff\xff\xff\xff",
}
"""Pickles, without their first and last bytes."""


def pickled(body: bytes) -> bytes:
    return b"\x80\2" + body + b"."


def write_archive(path: Path, body: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, contents in (("data.pkl", pickled(body)), ("version", b"3\n"), ("data/0", bytes(4))):
            archive.writestr(f"archive/{name}", contents)


def write_legacy(path: Path, body: bytes, keys: bytes = b"]") -> None:
    """As PyTorch before 1.6: a number, a version, sizes of types, the values, keys of storages, and the storages."""
    first = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2)
    path.write_bytes(first + pickled(body) + pickled(keys) + (1).to_bytes(8, "little") + bytes(4))


@pytest.fixture(scope="module")
def no_weights(marian: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Marian model's folder without its weights."""
    folder = Path(shutil.copytree(marian, tmp_path_factory.mktemp("crafted") / "marian"))
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize("name", PICKLES)
def test_a_crafted_pickle(no_weights: Path, tmp_path: Path, name: str) -> None:
    """It is refused in a checkpoint, and in both kinds of a Marian model's file."""
    body = PICKLES[name].replace(b"tQ", b"NtQ")
    write_archive(tmp_path / "a.ckpt", PICKLES[name])
    with limited_memory(), pytest.raises(InputError, match=rf"^{tmp_path}/a.ckpt: {UNREADABLE}"):
        read_checkpoint(tmp_path / "a.ckpt")
    weights = no_weights / "pytorch_model.bin"
    for write, contents in ((write_archive, PICKLES[name]), (write_legacy, body)):
        write(weights, b"}" + text("a") + contents + b"s")
        with limited_memory(), pytest.raises(InputError, match=rf"^{weights}: cannot be read as weights"):
            load_marian(no_weights)


def test_a_crafted_file_of_an_old_version(no_weights: Path) -> None:
    """PyTorch hashes keys of storages, and what is in the place of one."""
    weights, one = no_weights / "pytorch_model.bin", b"K\1\x85"
    whole = tensor(storage(1, more=b"N"), one, one)
    write_legacy(weights, whole, b"]" + text("0") + b"a")
    assert load_weights_only(weights).tolist() == [0.0]
    for body, keys in ((whole, b"]" + TWICE + b"a"), (tensor(storage(1, more=TWICE), one, one), b"]")):
        write_legacy(weights, body, keys)
        with limited_memory(), pytest.raises(InputError, match=rf"^{weights}: cannot be read as weights"):
            load_marian(no_weights)


TIED = torch.arange(12.0).reshape(3, 4)
SAVED: dict[str, PlainValues] = {
    "a state dict": torch.nn.Linear(2, 3).state_dict(),
    "parameters": dict(torch.nn.Linear(2, 3).named_parameters()),
    "tied weights": {
        "a": TIED,
        "b": TIED,
        "c": TIED.t(),
        "d": TIED[1:, 2:],
        "e": TIED[:0],
        "f": TIED[1, 1],
        "g": torch.zeros(5, 0),
    },
    "types": {f"{kind}": torch.ones(2, dtype=kind) for kind in (torch.bfloat16, torch.uint8, torch.bool, torch.cfloat)},
    "values": {1: 0.5, 2.5: [(True, None)], False: 10**30, "a": 2 * [[1, 2]], "b": {"é": ()}},
}


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("is_archive", [True, False])
def test_what_torch_save_writes_is_read(tmp_path: Path, name: str, protocol: int, is_archive: bool) -> None:
    """By PyTorch 1.6 and later, and by earlier versions. `weights_only` does not read protocols 4 and 5."""
    path = tmp_path / "saved"
    torch.save(SAVED[name], path, pickle_protocol=protocol, _use_new_zipfile_serialization=is_archive)
    read = load_weights_only(path)
    assert str(read) == str(SAVED[name])
    assert type(read) is type(SAVED[name])


def test_settings_of_other_versions_are_completed_or_left_out(whole: Path, tmp_path: Path) -> None:
    contents = torch.load(whole, weights_only=True)
    del contents["translation"]["network"]["self_attention"], contents["translation"]["recipe"]["run"]["kernels"]
    contents["translation"]["recipe"]["run"]["of_another_version"] = True
    torch.save(contents, tmp_path / "older.ckpt")
    read = read_checkpoint(tmp_path / "older.ckpt").recipe
    assert read.network.self_attention == NetworkSettings.self_attention
    assert read == read_checkpoint(whole).recipe


MANIFESTS: dict[str, tuple[Damage, str]] = {
    "no files": (put("files", value=[]), "files"),
    "a size that is text": (put("files", "tokenizer.model", value="9"), "files.tokenizer.model"),
    "no tokenizer": (put("tokenizer", value=None), "tokenizer"),
    "no variant": (put("train", "variants", value=[]), "train.variants"),
    "a variant that is text": (put("train", "variants", value=["x"]), "train.variants"),
    "a length below 0": (put("train", "variants", 0, "longest_source", value=-1), "train.variants.longest_source"),
    "a split that is a list": (put("validation", value=[]), "validation"),
    "10 ** 12 pairs": (put("train", "sources", 0, "repeat", value=10**12), "train.sources"),
    "a text that is text": (put("settings", "train", value="x"), "settings.train"),
}


@pytest.fixture
def corpus(tiny_corpus: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(tiny_corpus, tmp_path / "corpus"))


def change_manifest(corpus: Path, damage: Damage) -> None:
    manifest = json.loads((corpus / "manifest.json").read_text())
    damage(manifest)
    (corpus / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_crafted_manifest(corpus: Path, name: str) -> None:
    damage, key = MANIFESTS[name]
    change_manifest(corpus, damage)
    with pytest.raises(InputError) as error:
        open_data(corpus)
    assert f"{corpus / 'manifest.json'}: {key} is missing or damaged; run " in str(error.value)


ARRAYS: dict[str, tuple[str, Callable[[NDArray], NDArray]]] = {
    "lengths of 65,535": ("lengths", lambda lengths: np.full_like(lengths, 65_535)),
    "lengths that offsets have not": ("lengths", lambda lengths: np.roll(lengths, 1)),
    "lengths of 64 bits": ("lengths", lambda lengths: lengths.astype(np.int64)),
    "offsets of floats": ("offsets", lambda offsets: offsets.astype(np.float64)),
    "offsets beyond the tokens": ("offsets", lambda offsets: offsets + 1),
    "offsets that go back": ("offsets", lambda offsets: offsets[::-1].copy()),
    "too few offsets": ("offsets", lambda offsets: offsets[:-1]),
    "tokens in two dimensions": ("tokens", lambda tokens: tokens[:, None]),
    "no lengths": ("lengths", lambda lengths: lengths[:0]),
}


def open_data(corpus: Path) -> TranslationDataModule:
    return TranslationDataModule(corpus, BatchSettings(batch_tokens=400, workers=0), SpecialIds(0, 2, 3), seed=1)


@pytest.mark.parametrize("name", ARRAYS)
def test_crafted_arrays_of_a_corpus(corpus: Path, name: str) -> None:
    array, change = ARRAYS[name]
    open_data(corpus)
    path = corpus / f"train.target.{array}.npy"
    np.save(path, change(np.load(path)))
    change_manifest(corpus, put("files", path.name, value=path.stat().st_size))
    with pytest.raises(InputError, match=r"train\.target\.offsets\.npy: does not match the corpus; run prepare with"):
        open_data(corpus)


@pytest.mark.parametrize("side", ["source", "target"])
def test_ids_beyond_the_vocabulary(corpus: Path, side: str) -> None:
    """The highest id of the vocabulary of 60 pieces passes, wherever it is."""
    path = corpus / f"train.{side}.tokens.npy"
    tokens = np.load(path, mmap_mode="r+")
    tokens[-1] = 59
    open_data(corpus)
    tokens[-1] = 60
    with pytest.raises(InputError, match=rf"^{path}: has the id 60, and the tokenizer has 60 pieces; run prepare with"):
        open_data(corpus)


def test_validation_text_that_is_not_that_of_the_corpus(corpus: Path) -> None:
    data, path = open_data(corpus), corpus / "validation.target.txt"
    text = path.read_bytes()
    assert [len(side) for side in data.validation_text()] == [40, 40]
    for other in (text + b"one more\n", text.partition(b"\n")[2], b"\xff" + text[1:]):
        path.write_bytes(other)
        with pytest.raises(InputError, match=rf"^{path}: does not match the corpus; run prepare with --force"):
            data.validation_text()


def be_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def be_a_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def unlisted(corpus: Path, name: str) -> None:
    """Remove a file from the manifest, which compares the sizes of those that it has."""
    change_manifest(corpus, lambda manifest: manifest["files"].pop(name, None))


READ: dict[str, Callable[[Path], object]] = {
    "corpus/manifest.json": read_manifest,
    "corpus/tokenizer.model": open_data,
    "corpus/train.source.tokens.npy": open_data,
    "corpus/validation.source.offsets.npy": open_data,
    "corpus/validation.source.txt": lambda corpus: open_data(corpus).validation_text(),
    "run/config.yaml": is_run,
    "run/versions.json": lambda run: changes_of_run(run, load_recipe([run / "config.yaml"])),
    "run/stopped-early.json": lambda run: finished_reason(load_recipe([run / "config.yaml"]), run, 5),
    "run/metrics.jsonl": lambda run: list(read_metrics(run)),
    "run/recipe.yaml": lambda run: load_recipe([run / "recipe.yaml"]),
    "marian/config.json": load_marian,
    "marian/vocab.json": load_marian,
    "marian/source.spm": load_marian,
    "marian/model.safetensors": load_marian,
    "bundle/tokenizer.seen": lambda folder: Tokenizer.load(folder / "tokenizer.model"),
}
"""Files of a stranger's folder, and what reads them."""


@pytest.mark.parametrize("damage", [be_a_pipe, be_a_device])
@pytest.mark.parametrize("name", READ)
def test_what_is_no_file(
    tiny_corpus: Path, trained_run: Path, marian: Path, tmp_path: Path, name: str, damage: Damage
) -> None:
    """It is refused by name, before anyone waits for a writer or reads without an end."""
    path = tmp_path / name
    folders = {"corpus": tiny_corpus, "run": trained_run, "marian": marian, "bundle": tiny_corpus}
    shutil.copytree(folders[path.parent.name], path.parent)
    if not path.exists():
        shutil.copy(path.parent / ("config.yaml" if name.startswith("run") else "tokenizer.model"), path)
    if name.startswith("corpus"):
        unlisted(path.parent, path.name)
    damage(path)
    with limited_memory(), pytest.raises(InputError) as error:
        READ[name](path.parent)
    assert str(error.value).startswith(f"{path}: ")


def test_a_command_refuses_a_run_whose_recipe_is_a_pipe(recipe_file: Path, tmp_path: Path) -> None:
    """A pipe in place of a checkpoint counts as a damaged one."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    os.mkfifo(tmp_path / "run" / "config.yaml")
    os.mkfifo(tmp_path / "run" / "checkpoints" / "step=00000002.ckpt")
    said = f"{tmp_path / 'run' / 'config.yaml'}: a pipe or a device, not a file; "
    assert said in refusal("fit", recipe_file, "--run.folder", tmp_path / "run")
    assert f"WRONG {said}" in run_here("doctor", recipe_file, "--run.folder", tmp_path / "run", code=1)[0]
    assert latest_valid(tmp_path / "run") == (None, [tmp_path / "run" / "checkpoints" / "step=00000002.ckpt"])


def test_what_is_read_as_a_whole_has_a_largest_size(tmp_path: Path) -> None:
    """A sparse file takes no room on the disk of a stranger."""
    path = tmp_path / "config.yaml"
    path.write_bytes(b" " * MOST_BYTES)
    assert read_whole(path, MOST_BYTES) == b" " * MOST_BYTES
    os.truncate(path, 1 << 40)
    with limited_memory():
        for read in (is_run, read_json):
            with pytest.raises(InputError, match=rf"^{path}: has more than (4|64) MB, too many for a file of its kind"):
                read(path.parent if read is is_run else path)
    os.truncate(path, MOST_BYTES + 1)
    with pytest.raises(InputError, match="has more than 4 MB"):
        load_recipe([path])


def test_a_recipe_from_a_pipe_that_is_open(recipe_file: Path) -> None:
    """As `--config <(command)` and `--config /dev/stdin` give it; and an overlay may be /dev/null."""
    reading, writing = os.pipe()
    with FileIO(reading), FileIO(writing, "w") as writer:
        writer.write(recipe_file.read_bytes())
        writer.close()
        recipe = load_recipe([Path(f"/dev/fd/{reading}"), Path("/dev/null")])
    assert replace(recipe, name="tiny") == load_recipe([recipe_file])


@pytest.mark.parametrize("number", ["1" + 500 * ":1", "1" + 500 * ":1" + ".5", "0x" + 999 * "f", 1001 * "9"])
def test_a_number_of_a_recipe_has_a_largest_length(tmp_path: Path, number: str) -> None:
    """The time of reading `1:1:...` grows with the square of its length."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"a: 1\nb: {number}\n")
    assert f"{recipe}:2: not valid YAML: a number has more than 1,000 characters" in refusal("fit", recipe)
    (tmp_path / "config.yaml").write_text(recipe.read_text())
    assert not is_run(tmp_path)
    assert compose(f"b: {number[:999]}\nc: '{number}'\n") is not None


@pytest.mark.parametrize(
    "value", ['!!int ""', "1" + 200 * ":1" + ".5", "!!bool maybe", "!!timestamp soon", "2001-99-99"]
)
def test_a_value_that_its_tag_does_not_fit(tmp_path: Path, value: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"corpus: {{folder: {value}}}\n")
    assert not is_run(tmp_path)
    if value != "2001-99-99":  # A recipe may hold what looks like a date.
        assert f"{path}:1: not valid YAML: '" in refusal("fit", path)


MANY_ALIASES = "a0: &a0 [x]\n" + "".join(
    f"a{number}: &a{number} [{', '.join(9 * [f'*a{number - 1}'])}]\n" for number in range(1, 10)
)
MERGES = "a0: &a0 {k: v}\n" + "".join(
    f"a{number}: &a{number} {{<<: [{', '.join(9 * [f'*a{number - 1}'])}]}}\n" for number in range(1, 10)
)


@pytest.mark.parametrize("text", [MANY_ALIASES, MERGES])
def test_a_recipe_of_aliases(tmp_path: Path, text: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    assert f"{recipe}:1: not valid YAML: with its aliases it has more than" in refusal("fit", recipe)
    recipe.write_text("corpus: &c {folder: [*c]}\n")
    assert f"{recipe}: values are nested too deeply, or one contains itself" in refusal("fit", recipe)
