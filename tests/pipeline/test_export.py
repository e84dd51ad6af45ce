"""Bundles of networks of every supported shape, in miniature, and what `export` refuses."""

import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from data_module.errors import InputError
from data_module.system import text_files
from data_module.tokenization.tokenizer import Tokenizer
from model.layers import ACTIVATIONS, NORMS
from model.settings import DecodingSettings, NetworkSettings
from model.transformer import Transformer
from pipeline.checkpointing.checkpoint import TrainedModel
from pipeline.export import exported_program, onnx_model
from pipeline.export.bundle_folder import FILES, ON_REQUEST, replaced_bundle
from pipeline.export.bundle_writer import bundle_files, write_bundle
from pipeline.export.card import readme
from pipeline.export.exported_program import ExportedSearch
from pipeline.export.formats import FORMATS, Bundle
from pipeline.export.parity import Text
from pipeline.inference.bundle_layout import bundle_of
from pipeline.inference.loading import load_torchscript, load_translator
from pipeline.inference.translator import Translator
from tests.conftest import refusal, run_here
from tests.model.search_truth import VOCABULARY_SIZE, random_network

LETTERS = "abcdefg"
LEARNED = {"learned_positions": True, "max_positions": 24}
SHAPES: dict[str, dict[str, object]] = {
    "deep encoder": {"d_model": 48, "d_ff": 96, "num_heads": 8, "num_encoder_layers": 3, "num_decoder_layers": 1},
    "learned": {"num_heads": 4, "num_encoder_layers": 1, "num_decoder_layers": 3, "pre_norm": True, **LEARNED},
    "d_k": {"d_k": 6, "d_v": 10, "dropout": 0.3},
    "as Marian": {"activation": "swish", "output_bias": True},
}
LEFT_OUT = {"learned": ["huggingface"], "d_k": ["ctranslate2", "huggingface"]}
"""The formats that do not support a shape."""
TEXT = Text("letters", [" ".join(LETTERS[: 2 + i % 6][i % 2 :]) for i in range(12)], None)


def make_model(tokenizer: Tokenizer, **shape: object) -> TrainedModel:
    torch.manual_seed(3)
    settings = NetworkSettings(**{"num_layers": 2, "d_model": 32, "d_ff": 48, "num_heads": 2, **shape})
    network = Transformer(tokenizer.vocabulary_size, settings).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            # Biases and norms as well, so that a missing one is detected; large enough that answers differ.
            parameter.copy_(parameter * 2.0 if parameter.dim() == 2 else parameter + 0.3 * torch.randn_like(parameter))
    corpus = {"folder": "nowhere", "source_language": "xx", "target_language": "yy", "train": [], "user_symbols": []}
    recipe = {"name": "letters", "corpus": corpus}
    return TrainedModel(network, tokenizer, DecodingSettings(max_extra_tokens=6), recipe, Path("letters.ckpt"), 7)


def stops_at_first(tokenizer: Tokenizer) -> TrainedModel:
    """A model whose recipe stops its search at the first answers, which are not the best ones of some of TEXT."""
    decoding = DecodingSettings(beam_size=2, length_penalty=0.0, max_extra_tokens=4, stop_rule="first")
    return replace(make_model(tokenizer), network=random_network(), decoding=decoding)


@pytest.mark.slow
@pytest.mark.parametrize("shape", list(SHAPES))
def test_every_format_agrees_for_each_shape(
    tokenizer: Tokenizer, tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exported_program, "STAGES", (2,))  # Writing each takes long.
    model = make_model(tokenizer, **SHAPES[shape])
    if model.network.projection.bias is not None:  # A search would often choose the unknown symbol if it could.
        model.network.projection.bias.data[tokenizer.unk_id] = 5.0
    names = [*bundle_files(model, None, None), *bundle_files(model, sorted(ON_REQUEST), None)]
    assert set(FILES.values()) - set(names) == set(LEFT_OUT.get(shape, []))
    write_bundle(model, tmp_path, names, TEXT, [])
    parity = json.loads((tmp_path / "parity.json").read_text())
    assert [*parity["model.ts"]] == ["size_bytes", "float32", "bfloat16"]
    assert parity["model.ts"]["float32"]["equal"] == len(TEXT.sources)
    search = load_torchscript(tmp_path / "model.ts")
    source = torch.randint(4, VOCABULARY_SIZE, (1, 1100))
    if shape != "learned":
        # Positions beyond those in training: sinusoids have no limit.
        assert search.greedy(source, None, 0).lengths.item() > 0
        return
    with pytest.raises(torch.jit.Error, match="longer than the network's 24 positions"):
        search.greedy(source, None, 1)
    with pytest.raises(Exception, match="24"):
        onnx_model.load_onnx(tmp_path / "onnx")["encode"](source, torch.ones_like(source, dtype=torch.bool))
    with pytest.raises(Exception, match="24"):
        ExportedSearch(tmp_path / "model.pt2").beam(source, None)


@pytest.mark.parametrize("name", ["model.ts", "model.pt2", "ctranslate2", "huggingface"])
def test_a_format_that_differs_from_the_checkpoint_is_refused(
    tokenizer: Tokenizer, exported_search: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """ONNX is compared as model.pt2 is; C++ has a test of its own."""
    model, another = (make_model(tokenizer, num_layers=1, d_ff=size) for size in (48, 40))
    right = FORMATS[name]

    def write(bundle: Bundle, path: Path) -> None:
        if name == "model.pt2":
            shutil.copy(exported_search, path)
        else:
            right.write(bundle._replace(model=another), path)

    monkeypatch.setitem(FORMATS, name, right._replace(write=write))
    refusal = rf"{re.escape(name)} \(float32\): \d+ of 12 (greedy )?answers differ.* nothing was written"
    with pytest.raises(InputError, match=refusal):
        write_bundle(model, tmp_path, [name], TEXT, [])
    assert not (tmp_path / "README.md").exists()


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("ctranslate2", {"norm": "rms"}, "CTranslate2 lacks network.norm rms, which this model has; export other"),
        ("ctranslate2", {"d_k": 6}, "lacks network.d_k 6 (it has d_model / num_heads, 16), which"),
        ("huggingface", {"activation": "tanh"}, "Transformers' Marian lacks network.activation tanh, which"),
        ("huggingface", {"pre_norm": True, "d_v": 10}, "lacks network.pre_norm true, network.d_v 10 (it has"),
        ("huggingface", {"learned_positions": True}, "lacks network.learned_positions true, which"),
        ("cpp", {"norm": "rms"}, "the C++ program lacks network.norm rms, which"),
    ],
)
def test_a_network_that_a_program_lacks_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str, shape: dict[str, object], said: str
) -> None:
    monkeypatch.setitem(NORMS, "rms", nn.RMSNorm)
    monkeypatch.setitem(ACTIVATIONS, "tanh", nn.Tanh)
    with pytest.raises(InputError, match=re.escape(said)):
        bundle_files(make_model(tokenizer, **shape), [name], None)


@pytest.mark.parametrize(
    ("name", "missing", "said"),
    [
        ("ctranslate2", "ctranslate2", r"ctranslate2 is not installed; run: .*\.\[ctranslate2\]"),
        ("huggingface", "transformers", r"transformers is not installed; run: .*\.\[huggingface\]"),
        ("onnx", "onnxruntime", r"onnxruntime is not installed; run: .*\.\[onnx\]"),
        ("onnx", "onnxscript", r"onnxscript is not installed; run: .*\.\[onnx\]"),
        ("pt2", None, r"PyTorch .* cannot export a search; install 2\.12 or 2\.13 to write model\.pt2$"),
    ],
)
def test_a_format_whose_package_is_missing_or_old_is_refused_or_left_out(
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    missing: str | None,
    said: str,
) -> None:
    model = make_model(tokenizer, num_layers=1)
    if missing is None:
        monkeypatch.setattr(exported_program, "has_while_loop", lambda: False)
    else:
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=f"^{said}"):
        bundle_files(model, [name], None)
    assert set(bundle_files(model, None, None)) == {FILES[one] for one in FILES.keys() - ON_REQUEST - {name}}
    left_out = re.search(f"^without {re.escape(FILES[name])}: {said}", capsys.readouterr().err, re.MULTILINE)
    assert (left_out is not None) == (name not in ON_REQUEST)


def test_the_programs_of_the_readme_stop_as_the_recipe_says(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text_files, "SHOWN_AFTER_SECONDS", 0.0)
    model, sources = stops_at_first(tokenizer), TEXT.sources[:4]
    write_bundle(model, tmp_path, ["model.ts"], TEXT, [])
    said = capsys.readouterr().err
    assert all(f"{work}: 00:" in said for work in ("searching with the checkpoint", "comparing model.ts"))
    page = (tmp_path / "README.md").read_text()
    assert "```text\n" + "\n".join(TEXT.sources[:2]) + "\n```" in page
    program, faster = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for number, sentence in enumerate(sources):
        whole = program if number else program.replace("source = ", faster + "source = ")
        exec(whole.replace(f'"{TEXT.sources[0]}"', f'"{sentence}"'), {})
    first, exact = (
        [found.text for found in Translator(model.network, tokenizer, decoding).translate(sources)]
        for decoding in (model.decoding, replace(model.decoding, stop_rule="exact"))
    )
    # sentencepiece writes U+2047 for an unknown piece, `translate` nothing.
    assert [line.replace("\u2047", "").strip() for line in capsys.readouterr().out.splitlines()] == first != exact
    card = json.loads((tmp_path / "card.json").read_text())
    for rule, flag in (("first", 1), ("exact", 0)):
        page = readme(["cpp", "model.ts"], card | {"stop_rule": rule}, [5, 3])
        assert f"request.stops_at_first = {flag};" in page
        assert f'int64_t(1),\n         "{rule}"' in page


def test_what_export_refuses(
    trained_run: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bundle"

    def refused(checkpoint: Path, *options: object) -> str:
        line = refusal("export", checkpoint, folder, *options)
        assert not folder.exists() or [path.name for path in folder.iterdir()] == ["letter.txt"]
        assert not list(tmp_path.glob(".bundle*"))
        return line

    best = trained_run / "checkpoints" / "best.ckpt"
    contents = torch.load(best, weights_only=True)
    changed = tmp_path / "changed.ckpt"
    other = torch.frombuffer(bytearray(tokenizer.model), dtype=torch.uint8)
    part = {name: value for name, value in contents["translation"].items() if name != "seen_pieces"}
    torch.save({**contents, "translation": {**part, "tokenizer": other}}, changed)
    assert f"vocabulary of {VOCABULARY_SIZE} pieces" in refused(changed)
    recipe = json.loads(json.dumps(contents["translation"]["recipe"]))
    recipe["corpus"]["folder"] = "nowhere"
    torch.save({**contents, "translation": {**contents["translation"], "recipe": recipe}}, changed)
    assert "give --parity-source" in refused(changed)
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    assert "has no sentences" in refused(best, "--parity-source", empty)
    empty.write_text("\u2581\n", encoding="utf-8")
    assert f"{empty}: has no sentences" in refused(best, "--parity-source", empty)
    assert "give --parity-source" in refused(best, "--parity-reference", empty)
    assert "--quantize int8: is for ctranslate2" in refused(best, "--format", "pt2", "--quantize", "int8")
    assert "--n-best 2: is for model.pt2" in refused(best, "--format", "torchscript", "--n-best", 2)
    assert "--n-best 9: is more than the beam, 2" in refused(best, "--format", "pt2", "--n-best", 9, "--beam", 2)
    folder.mkdir()
    (folder / "letter.txt").write_text("mine")
    assert "not empty and not a bundle" in refused(best, "--force")
    monkeypatch.chdir(folder)
    assert "is the working folder" in refused(best)


def test_a_bundle_is_replaced_only_with_force(trained_run: Path, bundle: Path, tmp_path: Path) -> None:
    command = ["export", trained_run, shutil.copytree(bundle, tmp_path / "bundle"), "--format", "torchscript"]
    mark = tmp_path / "bundle" / "compiled.pt2"  # which its README says to make
    mark.touch()
    assert "--force" in refusal(*command)
    assert mark.exists()
    (tmp_path / "bundle" / "cpp").mkdir()
    for name in ("translate.cpp", "translate", "search.so"):
        (tmp_path / "bundle" / "cpp" / name).touch()
    notes = tmp_path / "bundle" / "cpp" / "notes.txt"
    notes.write_text("mine")
    said = refusal(*command, "--force")
    assert (
        said == f"error: {notes}: was not made by this program, and {notes.parent.parent} would be replaced with all"
        " that it holds; move it away, or give another folder"
    )
    notes.unlink()
    text = tmp_path / "bundle" / "README.md"
    assert f"{text}: is read by this command, and" in refusal(*command, "--force", "--parity-source", text)
    link = tmp_path / "link"
    link.symlink_to("bundle")
    command[2] = link
    run_here(*command, "--force")
    assert not mark.exists()
    assert link.readlink() == Path("bundle")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "link"]


@pytest.mark.parametrize("mask", [0o002, 0o027, 0o077])
def test_all_files_of_a_bundle_have_the_rights_that_the_umask_gives(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        with replaced_bundle(tmp_path / "bundle") as new:
            (new / "huggingface").mkdir()
            for name, mode in (("card.json", 0o666), ("huggingface/model.safetensors", 0o600)):
                (new / name).touch(mode)
    finally:
        os.umask(before)
    found = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    file, folder = 0o666 & ~mask, 0o777 & ~mask
    assert found == {"bundle": folder, "huggingface": folder, "card.json": file, "model.safetensors": file}


def test_what_a_killed_export_has_left_is_removed(tmp_path: Path) -> None:
    """And what it had moved away is put back, where the next one fails too."""
    for name in (".bundle.partial", ".bundle.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "card.json").write_text(name)
    with pytest.raises(ArithmeticError), replaced_bundle(tmp_path / "bundle"):
        raise ArithmeticError
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert (tmp_path / "bundle" / "card.json").read_text() == ".bundle.replaced"


def test_what_was_put_into_a_bundle_meanwhile_is_kept(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    with (
        pytest.raises(InputError, match=r"notes\.txt: was not made by this program"),
        replaced_bundle(tmp_path / "bundle"),
    ):
        (tmp_path / "bundle" / "notes.txt").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["bundle", "notes.txt"]


def test_a_run_is_no_bundle_whatever_is_planted_in_it(trained_run: Path, bundle: Path, tmp_path: Path) -> None:
    """`model.ts` is a program, and a run executes nothing."""
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    for name in ("card.json", "model.ts"):
        shutil.copy(bundle / name, run)
    assert bundle_of(bundle) == bundle_of(bundle / "model.ts") == bundle
    assert bundle_of(run) is None
    with pytest.raises(InputError, match=r"model\.ts: cannot be read as a checkpoint"):
        load_translator(run / "model.ts")
    assert refusal("export", trained_run, run, "--force").endswith("is not empty and not a bundle; give another folder")
    # A link to nothing is an entry, too.
    for name in ("config.yaml", "checkpoints"):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("card.json", "model.ts", "tokenizer.model"):
            shutil.copy(bundle / file, folder)
        (folder / name).symlink_to("nothing")
        with pytest.raises(InputError, match="holds no checkpoint"):
            load_translator(folder)
