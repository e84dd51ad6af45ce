"""Bytes, user symbols and tokens of each type survive translation with a checkpoint and every format of a bundle."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from model.settings import DecodingSettings, NetworkSettings
from model.transformer import PaddedTransformer, Transformer
from pipeline.checkpointing.checkpoint import TrainedModel
from pipeline.export import exported_program
from pipeline.export.bundle_folder import FILES
from pipeline.export.bundle_writer import bundle_files, write_bundle
from pipeline.export.parity import Text
from pipeline.inference.translator import Translator, padded
from tests.conftest import train_tokenizer
from tests.export.test_bundle import PROGRAMS, outputs, python_program

SENTENCES = [
    "A sentence.",
    "<2de> <b>Anna</b> likes 😀 and 👍🏽.",
    "pre__NAME__post «__NAME__» __NAME__",
    "Ꮳꮃꭹ 語 <i></i><b>é</b>",
    "𝕏 ▅ <0x41> </s>",
]
SYMBOLS = ["<b>", "</b>", "<i>", "</i>", "__NAME__", "<2de>", 'a,"b']


TOKENS = ["A sentence.", "<2de> [C@@H] Cl aː q͡χ __NAME__", "q͡χ Cl 12 Cl", "[C@@H] </i> __NAME__"]
TYPES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "bpe": (SENTENCES, {"vocabulary_size": 300, "byte_fallback": True}),
    "word": (TOKENS, {"vocabulary_size": 18}),
    "char": (TOKENS, {"vocabulary_size": 41}),
    "unigram": (TOKENS, {"vocabulary_size": 42}),
}
"""Sentences of each type of vocabulary, and settings."""


@pytest.fixture(scope="module", params=TYPES)
def model(request: pytest.FixtureRequest) -> TrainedModel:
    """A network that has learned by heart to repeat the sentences.

    But for BPE, the unknown piece is about as probable, and the search is greedy: with few pieces, the beam search of
    CTranslate2 has ended before the best answer does.
    """
    sentences, options = TYPES[request.param]
    text = ["A sentence.", "Anna likes and pre post"] * 30 if request.param == "bpe" else TOKENS
    tokenizer = train_tokenizer(text, user_symbols=SYMBOLS, model_type=request.param, **options)
    torch.manual_seed(1)
    settings = NetworkSettings(num_layers=1, d_model=64, d_ff=128, num_heads=2, dropout=0.0, output_bias=True)
    network = Transformer(tokenizer.vocabulary_size, settings)
    rows = [[*ids.tolist(), tokenizer.eos_id] for ids in tokenizer.encode(sentences)]
    source, mask = padded(rows, tokenizer.pad_id)
    target = functional.pad(source, [1, 0], value=tokenizer.bos_id)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(1000):  # about 200 are enough
        logits = network.logits(PaddedTransformer(network)(source, target[:, :-1], mask))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), source.flatten(), ignore_index=tokenizer.pad_id)
        if loss < 0.005:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.005
    decoding = DecodingSettings()
    if request.param != "bpe":
        missing = logits.amax(-1) - logits[:, :, tokenizer.unk_id]
        network.projection.bias.data[tokenizer.unk_id] += missing[mask].mean().item()
        decoding = DecodingSettings(beam_size=1)
    corpus = {"folder": "nowhere", "source_language": "xx", "target_language": "yy", "train": []}
    recipe = {"name": request.param, "corpus": {**corpus, "user_symbols": SYMBOLS}}
    return TrainedModel(network.eval(), tokenizer, decoding, recipe, Path("symbols.ckpt"), 200)


def test_translations_hold_each_symbol_and_character_once(model: TrainedModel) -> None:
    translator, [sentences, _] = Translator(model.network, model.tokenizer, model.decoding), TYPES[model.recipe["name"]]
    assert [translation.text for translation in translator.translate(sentences)] == sentences


@pytest.mark.slow
def test_every_format_of_a_bundle_repeats_symbols_and_bytes(
    model: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the programs of the bundle's README, which use sentencepiece and none of this project."""
    monkeypatch.setattr(exported_program, "STAGES", (2,))  # test_init_from_marian.py writes all stages.
    names = bundle_files(model, [name for name in FILES if name != "cpp"], None)
    sentences, _ = TYPES[model.recipe["name"]]
    write_bundle(model, tmp_path, names, Text("symbols", sentences, sentences), [])
    for name in PROGRAMS[:-1]:  # but that of `cpp`, which has to be compiled first
        assert outputs(python_program(tmp_path, name), sentences, tmp_path) == sentences, name
