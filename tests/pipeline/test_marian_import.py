"""Marian models as a starting point: what is read, and what is refused."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_module.corpus.preparation import prepare
from data_module.corpus.store import open_variants
from data_module.errors import InputError
from data_module.settings import CorpusSettings, NoiseSettings, TextSource
from data_module.tokenization.encoders import WordEncoder
from data_module.tokenization.tokenizer import Tokenizer
from model.decoding import BeamSearch
from model.settings import DecodingSettings, NetworkSettings
from model.transformer import Transformer
from pipeline.export.huggingface_model import write_huggingface
from pipeline.export.marian_import import is_marian, load_marian
from tests.conftest import sentences, train_tokenizer
from tests.pipeline.marian_folder import load, target_text
from tests.pipeline.test_export import make_model

LINES = [
    "the dog sees",
    "Ä the house",
    ">>de<< the dog",
    ">>fr<<the",
    "½ the\u00a0dog ☃☃ x",
    "",
    "a<b",
    *sentences(20, 7),
]


def loaded_network(folder: Path) -> tuple[Transformer, Tokenizer]:
    model = load_marian(folder)
    network = Transformer(model.tokenizer.vocabulary_size, NetworkSettings(**model.network))
    network.load_state_dict(model.weights)
    return network.eval(), model.tokenizer


def test_greedy_answers_and_their_probabilities_are_the_same(marian: Path) -> None:
    network, tokenizer = loaded_network(marian)
    theirs, marian_tokenizer = load(marian)
    pieces = tokenizer.pieces()
    search = BeamSearch(network, *tokenizer.search_ids)
    lengths = set()
    for line in LINES:
        source = [*tokenizer.encode([line])[0].tolist(), tokenizer.eos_id]
        batch = marian_tokenizer(line, return_tensors="pt")
        assert [pieces[piece] for piece in source] == marian_tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
        answer = search.greedy(torch.tensor([source]), None, 20)
        options = {"max_length": len(source) + 20 + 1, "forced_eos_token_id": None}
        output = theirs.generate(**batch, **options, return_dict_in_generate=True, output_logits=True)
        found = marian_tokenizer.convert_ids_to_tokens(output.sequences[0, 1:])
        size = int(answer.lengths)
        if size == len(source) + 20:  # ours ends at its limit
            continue
        lengths.add(size)
        assert [pieces[piece] for piece in answer.tokens[0].tolist()] == found
        log_probabilities = torch.stack(output.logits, 1).log_softmax(-1)
        total = log_probabilities.gather(2, output.sequences[:, 1:, None]).sum()
        torch.testing.assert_close(answer.log_probabilities[0], total, rtol=1e-4, atol=1e-4)
    assert len(lengths) > 5


def test_both_tokenizers_are_the_same(marian: Path) -> None:
    tokenizer = load_marian(marian).tokenizer
    _, theirs = load(marian)
    pieces = tokenizer.pieces()
    for lines, ours, texts in ((LINES, tokenizer, {}), (target_text(LINES), tokenizer.target, {"text_target": 1})):
        for line, ids in zip(lines, ours.encode(lines, num_threads=2), strict=True):
            expected = theirs(**({"text_target": line} if texts else {"text": line}))["input_ids"]
            assert [pieces[piece] for piece in ids] == theirs.convert_ids_to_tokens(expected)[:-1]
            assert ids.dtype == np.int32
            assert ours.decode([ids.tolist()]) == [theirs.decode(expected, skip_special_tokens=True)]
    assert tokenizer.user_symbols == [">>de<<"]
    # A copy in another process encodes the same side.
    copy = pickle.loads(pickle.dumps(tokenizer.target))  # noqa: S301
    assert copy.encode(["THÖ DOG"])[0].tolist() == tokenizer.target.encode(["THÖ DOG"])[0].tolist()
    assert copy.encode(["THÖ DOG"])[0].tolist() != tokenizer.encode(["THÖ DOG"])[0].tolist()
    # Word by word, as a corpus is encoded. A code inside a sentence is text.
    lines = [*(line for line in LINES if "  " not in line), "the dog >>the<< dog", ">>de<< the >>de<< dog >>x"]
    for ours in (tokenizer, tokenizer.target):
        rows, lengths = WordEncoder(ours, np.dtype(np.int32)).encode(lines)
        expected = [x.tolist() for x in ours.encode(lines)]
        assert [np.frombuffer(row, dtype=np.int32).tolist() for row in rows] == expected
        assert lengths.tolist() == list(map(len, expected))


def test_training_text_with_noise(marian: Path, tmp_path: Path) -> None:
    """Each side by its own model, and the code of a language as it is."""
    tokenizer = load_marian(marian).tokenizer
    sources = sentences(20, 7)
    pairs = list(zip(sources, target_text(sources), strict=True))
    (tmp_path / "text.tsv").write_text("".join(f"{source.title()}\t{target}\n" for source, target in pairs))
    text = TextSource(tsv=str(tmp_path / "text.tsv"), prefix=">>de<<")
    settings = CorpusSettings(
        str(tmp_path / "corpus"),
        *([text], [text]),
        user_symbols=[">>de<<"],
        variants=2,
        noise=NoiseSettings(lower_case=1.0),
    )
    prepare(settings, tokenizer, progress=False)
    code = tokenizer.pieces().index(">>de<<")
    for corpus in open_variants(tmp_path / "corpus"):
        for i, (source, target) in enumerate(pairs):
            assert corpus.source[i].tolist() == [code, *tokenizer.encode([source])[0]]
            assert corpus.target[i].tolist() == tokenizer.target.encode([target.lower()])[0].tolist()


@pytest.mark.parametrize("kind", ["bin", "half", "positions", "no bias", "shards", "shards of bin"])
def test_other_ways_to_store_the_weights(marian: Path, tmp_path: Path, kind: str) -> None:
    folder = shutil.copytree(marian, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    expected = load_marian(marian).weights
    if kind == "bin":
        (folder / "model.safetensors").unlink()
        for name in ("model.encoder.embed_tokens.weight", "lm_head.weight"):
            weights[name] = weights["model.shared.weight"]
        torch.save(weights, folder / "pytorch_model.bin")
    elif kind.startswith("shards"):
        split(folder, kind.endswith("bin"))
    elif kind == "half":
        save_file({name: one.half() for name, one in weights.items()}, folder / "model.safetensors")
        expected = {name: one if name == "projection.bias" else one.half().float() for name, one in expected.items()}
        expected["projection.bias"] = expected["projection.bias"].half().float()
    elif kind == "positions":
        table = load(marian)[0].model.encoder.embed_positions.weight.detach()
        weights |= {f"model.{side}.embed_positions.weight": table.clone() for side in ("encoder", "decoder")}
        save_file(weights, folder / "model.safetensors")
    else:
        del weights["final_logits_bias"]
        save_file(weights, folder / "model.safetensors")
        expected["projection.bias"] = torch.zeros_like(expected["projection.bias"])
        expected["projection.bias"][2] = -100.0
    found = load_marian(folder).weights
    assert found.keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) for name, one in found.items())


def test_an_export_of_this_project_comes_back_as_it_was(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(sentences(300, 1), 90)
    network = make_model(tokenizer, num_encoder_layers=3).network
    write_huggingface(network, tokenizer, DecodingSettings(), 0.4, ("en", "de"), tmp_path / "model")
    model = load_marian(tmp_path / "model")
    expected = network.state_dict()
    assert model.weights.keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) for name, one in model.weights.items())
    assert not model.network["output_bias"]
    assert model.network["activation"] == "relu"
    assert model.tokenizer.pair is None
    assert model.tokenizer.pieces() == tokenizer.pieces()


def change_json(name: str, **changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({key: one for key, one in values.items() if one != "(none)"}))

    return change


def change_weights(**changes: Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        for name, one in changes.items():
            name = name.replace("__", ".")
            weights[name] = one
        save_file({name: one for name, one in weights.items() if one is not None}, folder / "model.safetensors")

    return change


def overwrite(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def split(folder: Path, is_pickled: bool = False) -> None:
    """Divide the weights among three files, as `save_pretrained(max_shard_size=...)` does."""
    name, suffix = ("pytorch_model", "bin") if is_pickled else ("model", "safetensors")
    weights = load_file(folder / "model.safetensors")
    places = {tensor: f"{name}-{place % 3 + 1:05}-of-00003.{suffix}" for place, tensor in enumerate(sorted(weights))}
    for file in set(places.values()):
        part = {tensor: weights[tensor] for tensor in weights if places[tensor] == file}
        torch.save(part, folder / file) if is_pickled else save_file(part, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / f"{name}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def in_shards(change: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: split(folder) or change(folder)


def copy_shard(folder: Path) -> None:
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "model-00002-of-00003.safetensors")


def twice(folder: Path) -> None:
    first, last = (folder / f"model-0000{number}-of-00003.safetensors" for number in (1, 3))
    save_file(load_file(last) | load_file(first), last)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def be_a_pipe(folder: Path) -> None:
    shard = folder / "model-00002-of-00003.safetensors"
    shard.unlink()
    os.mkfifo(shard)


class Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("executed",)


def write_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"model.shared.weight": Harmful()}, folder / "pytorch_model.bin")


INDEX = "model.safetensors.index.json"
FC1 = "model__decoder__layers__0__fc1__weight"
WRONG: list[tuple[Callable[[Path], None], str]] = [
    (change_json("config.json", model_type="bart"), r'config\.json: model_type is "bart", not "marian"'),
    (
        change_json("config.json", normalize_before=True, static_position_embeddings=False, scale_embedding="(none)"),
        "scale_embedding is false, not true; static_position_embeddings is false, not true; normalize_before is true",
    ),
    (change_json("config.json", activation_function="gelu"), 'activation_function is "gelu", not relu or swish'),
    (change_json("config.json", tie_word_embeddings=False), "tie_word_embeddings is false"),
    (change_json("config.json", share_encoder_decoder_embeddings=False), "share_encoder_decoder_embeddings is false"),
    (change_json("config.json", decoder_ffn_dim=64), "decoder_ffn_dim is 64, not encoder_ffn_dim, 32"),
    (change_json("config.json", decoder_attention_heads=4), "decoder_attention_heads is 4, not encoder_attention"),
    (change_json("config.json", decoder_vocab_size=7), "decoder_vocab_size is 7, not vocab_size"),
    (change_json("config.json", d_model="(none)"), "d_model is null, not a whole number from 1 on"),
    (
        change_json("config.json", encoder_attention_heads=3, decoder_attention_heads=3),
        "d_model 16 is not a multiple of encoder_attention_heads",
    ),
    (change_json("config.json", eos_token_id=1), "eos_token_id 1, .* must differ"),
    (change_json("config.json", decoder_start_token_id=10_000), "decoder_start_token_id 10000"),
    (change_json("config.json", encoder_layers=3), r"model\.encoder\.layers\.2\.\S+ is missing; .*; and 13 more"),
    (
        change_json("config.json", encoder_layers=1),
        r"does not match config\.json: model\.encoder\.layers\.1\.\S+ is unk",
    ),
    (
        change_weights(**{FC1: torch.zeros(32, 15)}),
        r"model\.decoder\.layers\.0\.fc1\.weight is \[32, 15\], not \[32, 16\]",
    ),
    (change_weights(**{FC1: None}), r"model\.decoder\.layers\.0\.fc1\.weight is missing"),
    (change_weights(extra=torch.zeros(1)), "extra is unknown"),
    (change_json("config.json", vocab_size=10**12, decoder_vocab_size=10**12), "and not the ids 0 to 999999999999"),
    (change_json("vocab.json", extra=500), r"vocab\.json: has \d+ pieces, and not the ids 0 to \d+ of vocab_size"),
    (change_json("vocab.json", **{"<unk>": "(none)", "<UNK>": 1}), r"vocab\.json: lacks the piece <unk>"),
    (overwrite("target_vocab.json", b"{}"), r"target_vocab\.json: this network has one vocabulary"),
    (overwrite("config.json", b"[1]"), r"config\.json: is no JSON object"),
    (overwrite("source.spm", b"text"), r"source\.spm: is no sentencepiece model"),
    (overwrite("target.spm", b""), r"target\.spm: is no sentencepiece model"),
    (overwrite("model.safetensors", b"text"), r"model\.safetensors: cannot be read as weights"),
    (remove("vocab.json"), r"vocab\.json: cannot be read \(No such file or directory\)"),
    (remove("target.spm"), r"target\.spm: cannot be read"),
    (remove("model.safetensors"), r"model\.safetensors: is missing, and so is pytorch_model\.bin"),
    (in_shards(remove("model-00002-of-00003.safetensors")), r"model-00002-of-00003\.safetensors: is missing; copy"),
    (in_shards(overwrite("model-00002-of-00003.safetensors", b"text")), "model-00002.* cannot be read as weights"),
    (in_shards(copy_shard), r"index\.json: does not match its files: model\.\S+ is not in model-00002.*; and \d+ more"),
    (in_shards(change_json(INDEX, weight_map={"a": "/etc/passwd"})), "weight_map must name files of this folder"),
    (in_shards(change_json(INDEX, weight_map={"a": "../model/config.json"})), "weight_map must name files of this"),
    (in_shards(change_json(INDEX, weight_map={"a": ".."})), r"/\.\.: cannot be read as weights"),
    (in_shards(change_json(INDEX, weight_map=["a"])), "weight_map must name files of this folder"),
    (in_shards(twice), "model-00003-of-00003.safetensors and in a file before it"),
    (in_shards(be_a_pipe), "model-00002-of-00003.safetensors: cannot be read as weights"),
    (write_pickle, r"pytorch_model\.bin: cannot be read as weights"),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=[words[:40] for _, words in WRONG])
def test_what_is_refused(
    marian: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Path], None], words: str
) -> None:
    folder = shutil.copytree(marian, tmp_path / "model")
    change(folder)
    assert is_marian(folder)
    with pytest.raises(InputError, match=words) as raised:
        load_marian(folder)
    message = str(raised.value)
    assert message.startswith(str(folder))
    assert "\n" not in message
    assert "; " in message  # a way out
    assert "executed" not in capsys.readouterr().out
