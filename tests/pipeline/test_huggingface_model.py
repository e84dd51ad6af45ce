"""A network exported to Transformers has the same probabilities, greedy translations and tokens there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from data_module.errors import InputError
from data_module.system.files import PlainValues
from data_module.tokenization.tokenizer import Tokenizer
from model.decoding import BeamSearch
from model.settings import DecodingSettings
from model.transformer import PaddedTransformer, Transformer
from pipeline.export.bundle_writer import write_bundle
from pipeline.export.card import model_card
from pipeline.export.formats import tokenizer_differences
from pipeline.export.huggingface_model import generation_settings, require_marian, write_huggingface
from pipeline.inference.translator import LONGEST
from tests.conftest import sentences, train_tokenizer
from tests.model.search_truth import VOCABULARY_SIZE
from tests.pipeline.marian_folder import Loaded, load
from tests.pipeline.test_export import LEFT_OUT, TEXT, make_model
from tests.pipeline.test_export import SHAPES as EVERY_SHAPE

SETTINGS = DecodingSettings(max_extra_tokens=6)
SHAPES = {name: shape for name, shape in EVERY_SHAPE.items() if "huggingface" not in LEFT_OUT.get(name, [])}
SHAPES["one head, odd width"] = {"num_heads": 1, "d_model": 33}
TEXTS = [
    "the dog sees a cat",
    "  the   dog ",
    "the\tdog\nsees\u2028a \u2581cat\u2581",
    "THE Dog É é",
    "☃ the ☂☂ cat",
    "a </s> b <pad> <unk> <s>",
    "<2de> the dog<2de>x",
    "",
    "no-break\u00a0space",
]


def write(network: Transformer, tokenizer: Tokenizer, folder: Path) -> Loaded:
    write_huggingface(network, tokenizer, SETTINGS, 0.4, ("en", "de"), folder)
    return load(folder)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_logits_and_greedy_answers_are_the_same(tokenizer: Tokenizer, tmp_path: Path, shape: str) -> None:
    network = make_model(tokenizer, **SHAPES[shape]).network
    theirs, _ = write(network, tokenizer, tmp_path)
    assert type(theirs).__name__ == "MarianMTModel"
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(4, VOCABULARY_SIZE, (5, 9), generator=generator)
    target = torch.randint(4, VOCABULARY_SIZE, (5, 7), generator=generator)
    mask = torch.arange(9) < torch.tensor([[9], [7], [3], [9], [1]])
    source[~mask] = tokenizer.pad_id
    with torch.no_grad():
        ours = network.logits(PaddedTransformer(network)(source, target, mask))
        logits = theirs(input_ids=source, attention_mask=mask.long(), decoder_input_ids=target).logits
    torch.testing.assert_close(logits, ours, rtol=1e-4, atol=1e-4)
    search = BeamSearch(network, *tokenizer.search_ids).eval()
    expected = search.greedy(source[:1], None, 6).tokens
    found = theirs.generate(source[:1], num_beams=1, max_length=9 + 6 + 1)
    assert found[:, 1:].tolist() == expected.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lowercase": True},
        {"byte_fallback": True, "vocabulary_size": 340},
        {"model_type": "word", "vocabulary_size": 15},
        {"model_type": "char", "vocabulary_size": 31},
        {"model_type": "unigram", "vocabulary_size": 40},
    ],
    ids=["plain", "lower case", "bytes", "words", "characters", "unigram"],
)
def test_the_tokenizer_is_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    size = options.pop("vocabulary_size", 90)
    lines = [*sentences(300, 1), "x é É ☃ no-break\u00a0space"]
    tokenizer = train_tokenizer(lines, size, user_symbols=["<2de>"], **options)
    _, theirs = write(make_model(tokenizer).network, tokenizer, tmp_path)
    ids = [[*one.tolist(), tokenizer.eos_id] for one in tokenizer.encode(TEXTS)]
    assert theirs(TEXTS)["input_ids"] == ids
    assert theirs.batch_decode(ids, skip_special_tokens=True) == [text.strip() for text in tokenizer.decode(ids)]
    assert len(theirs) == size
    assert theirs.model_max_length == LONGEST  # so that `truncation=True` cuts as this program does


def test_generation_settings(tokenizer: Tokenizer) -> None:
    def settings(**changes: object) -> PlainValues:
        found = generation_settings(tokenizer, DecodingSettings(**changes), 0.4)
        transformers.GenerationConfig(**found).validate(strict=True)
        return found

    usual = settings()
    assert (usual["num_beams"], usual["length_penalty"], usual["early_stopping"]) == (4, 0.4, "never")
    assert usual["suppress_tokens"] == [tokenizer.pad_id, tokenizer.bos_id, tokenizer.unk_id]
    assert usual["max_length"] == 1024 + 50 + 1
    assert settings(stop_rule="first")["early_stopping"] is True
    assert "length_penalty" not in settings(beam_size=1)


def test_symbols_that_marian_takes_for_language_codes_are_refused() -> None:
    tokenizer = train_tokenizer(sentences(300, 1), 90, user_symbols=[">>de<<", "<2de>"])
    with pytest.raises(InputError, match=r"Marian lacks corpus\.user_symbols >>de<< as other symbols than"):
        require_marian(make_model(tokenizer).network, tokenizer)


def test_a_tokenizer_with_other_ids_is_found(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_model(tokenizer)
    write(model.network, tokenizer, tmp_path)
    ids = [tuple(ids.tolist()) for ids in tokenizer.encode(TEXT.sources)]
    compared = tmp_path, tokenizer, TEXT.sources, [(*row, tokenizer.eos_id) for row in ids], ids
    assert tokenizer_differences(*compared) == []
    vocabulary = tmp_path / "vocab.json"
    pieces = list(json.loads(vocabulary.read_text()))
    vocabulary.write_text(json.dumps({piece: number for number, piece in enumerate(pieces[:4] + pieces[:3:-1])}))
    encodes, decodes = tokenizer_differences(*compared)
    assert encodes == "its tokenizer encodes 12 of 12 texts differently"
    assert decodes == "its tokenizer decodes 12 of 12 texts differently"


def test_the_model_card(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = TEXT._replace(references=TEXT.sources)
    write_bundle(make_model(tokenizer), tmp_path, ["huggingface"], text, ["CC0 (made up)", "CC BY 4.0"])
    card = json.loads((tmp_path / "card.json").read_text())
    page = (tmp_path / "huggingface" / "README.md").read_text()
    assert page == model_card(card)
    assert yaml.safe_load(page.split("---")[1])["language"] == ["xx", "yy"]
    assert f"| letters | 12 | {card['scores']['bleu']:.2f} | `{card['scores']['bleu_signature']}` |" in page
    assert json.loads(page.split("```json")[1].split("```")[0]) == {
        "data": "the corpus was not available",
        "licences": ["CC0 (made up)", "CC BY 4.0"],
        "code": card["code"],
    }
    assert "Not measured" in model_card({**card, "scores": {}})
