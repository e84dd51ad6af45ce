"""Bytes and user symbols survive translation with a checkpoint and with every format of a bundle."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from model.settings import DecodingSettings, NetworkSettings
from model.transformer import PaddedTransformer, Transformer
from pipeline.checkpointing.checkpoint import TrainedModel
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


@pytest.fixture(scope="module")
def model() -> TrainedModel:
    """A network that has learned by heart to repeat the sentences."""
    text = ["A sentence.", "Anna likes and pre post"] * 30
    tokenizer = train_tokenizer(text, 300, byte_fallback=True, user_symbols=SYMBOLS)
    torch.manual_seed(1)
    settings = NetworkSettings(num_layers=1, d_model=64, d_ff=128, num_heads=2, dropout=0.0)
    network = Transformer(tokenizer.vocabulary_size, settings)
    rows = [[*ids.tolist(), tokenizer.eos_id] for ids in tokenizer.encode(SENTENCES)]
    source, mask = padded(rows, tokenizer.pad_id)
    target = functional.pad(source, [1, 0], value=tokenizer.bos_id)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(200):
        logits = network.logits(PaddedTransformer(network)(source, target[:, :-1], mask))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), source.flatten(), ignore_index=tokenizer.pad_id)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.01
    corpus = {"folder": "nowhere", "source_language": "xx", "target_language": "yy", "train": []}
    recipe = {"name": "symbols", "corpus": {**corpus, "user_symbols": SYMBOLS}}
    return TrainedModel(network.eval(), tokenizer, DecodingSettings(), recipe, Path("symbols.ckpt"), 200)


def test_translations_hold_each_symbol_and_character_once(model: TrainedModel) -> None:
    translator = Translator(model.network, model.tokenizer, model.decoding)
    assert [translation.text for translation in translator.translate(SENTENCES)] == SENTENCES


@pytest.mark.slow
def test_every_format_of_a_bundle_repeats_symbols_and_bytes(model: TrainedModel, tmp_path: Path) -> None:
    """By the programs of the bundle's README, which use sentencepiece and none of this project."""
    names = bundle_files(model, [name for name in FILES if name != "cpp"], None)
    write_bundle(model, tmp_path, names, Text("symbols", SENTENCES, SENTENCES), [])
    for name in PROGRAMS[:-1]:  # but that of `cpp`, which has to be compiled first
        assert outputs(python_program(tmp_path, name), SENTENCES, tmp_path) == SENTENCES, name
