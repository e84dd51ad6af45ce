"""A network exported to Transformers has the same probabilities, greedy translations and tokens there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from data_module.errors import InputError
from data_module.registry import Registry
from data_module.tokenization.tokenizer import Tokenizer
from model.decoding import BeamSearch
from model.layers import ACTIVATIONS, NORMS
from model.padded_transformer import PaddedTransformer
from model.settings import DecodingSettings
from model.transformer import Transformer
from pipeline.export import formats
from pipeline.export.bundle import obstacles, write_bundle
from pipeline.export.card import model_card
from pipeline.export.huggingface_model import generation_settings, write_huggingface
from pipeline.inference.translator import LONGEST
from tests.conftest import sentences, train_tokenizer
from tests.model.search_truth import VOCABULARY_SIZE, trained_network
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


def load(folder: Path) -> tuple[Any, Any]:
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def write(network: Transformer, tokenizer: Tokenizer, folder: Path) -> tuple[Any, Any]:
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
    search = BeamSearch(network, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id).eval()
    expected = search.greedy(source[:1], None, 6).tokens
    found = theirs.generate(source[:1], num_beams=1, max_length=9 + 6 + 1)
    assert found[:, 1:].tolist() == expected.tolist()


def test_beam_search_by_equal_rules_gives_equal_answers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    network = trained_network("")
    theirs, _ = write(network, tokenizer, tmp_path)
    search = BeamSearch(network, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id).eval()
    lengths = []
    for number in range(25):
        length = 3 + number % 7
        source = torch.randint(4, VOCABULARY_SIZE, (1, length), generator=torch.Generator().manual_seed(number))
        answers = search.beam(source, None, 4, 0.0, 20, 4, "first")
        options = {"length_penalty": 0.0, "early_stopping": True, "forced_eos_token_id": None}
        found = theirs.generate(source, max_length=length + 20 + 1, num_return_sequences=4, **options)[:, 1:].tolist()
        for expected, size, one in zip(answers.tokens[0].tolist(), answers.lengths[0].tolist(), found, strict=True):
            if size < length + 20:
                lengths.append(size)
                assert one[:size] == expected[:size]
    assert len(lengths) >= 40
    assert len(set(lengths)) > 2


@pytest.mark.parametrize(
    "options",
    [{}, {"lowercase": True}, {"byte_fallback": True, "vocabulary_size": 340}],
    ids=["plain", "lower case", "bytes"],
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
    def settings(**changes: Any) -> dict[str, Any]:
        found = generation_settings(tokenizer, DecodingSettings(**changes), 0.4)
        transformers.GenerationConfig(**found).validate(strict=True)
        return found

    usual = settings()
    assert (usual["num_beams"], usual["length_penalty"], usual["early_stopping"]) == (4, 0.4, "never")
    assert usual["suppress_tokens"] == [tokenizer.pad_id, tokenizer.bos_id]
    assert usual["max_length"] == 1024 + 50 + 1
    assert settings(stop_rule="first")["early_stopping"] is True
    assert "length_penalty" not in settings(beam_size=1)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (
            {"pre_norm": True, "learned_positions": True, "d_k": 6, "d_v": 10},
            ["pre_norm is true", "learned_positions is true", "d_k is 6, not d_model / num_heads, 16", "d_v is 10"],
        ),
        (
            {"norm": "rms", "activation": "tanh"},
            ["norm is RMSNorm, not LayerNorm", "activation is Tanh, not ReLU or SiLU"],
        ),
    ],
)
def test_unsupported_networks_are_refused(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], words: list[str]
) -> None:
    """By all their settings at once."""
    monkeypatch.setattr("model.layers.NORMS", Registry("network.norm", **NORMS, rms=torch.nn.RMSNorm))
    activations = Registry("network.activation", **ACTIVATIONS, tanh=torch.nn.Tanh)
    monkeypatch.setattr("model.layers.ACTIVATIONS", activations)
    model = make_model(tokenizer, **shape)
    [reason] = obstacles(model, ["torchscript", "huggingface"]).values()
    assert all(f"network.{one}" in reason for one in words)
    assert "\n" not in reason
    with pytest.raises(InputError, match="cannot hold this model"):
        write(model.network, tokenizer, tmp_path)


def test_symbols_that_marian_takes_for_language_codes_are_refused(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(sentences(300, 1), 90, user_symbols=[">>de<<", "<2de>"])
    with pytest.raises(InputError, match=r"corpus\.user_symbols has >>de<<, which"):
        write(make_model(tokenizer).network, tokenizer, tmp_path)


def test_a_folder_of_other_weights_is_no_bundle(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed weight, or a tokenizer with other ids, ends the export."""

    def write_other(network: Transformer, tokenizer: Tokenizer, *arguments: Any) -> None:
        other = make_model(tokenizer).network
        other.encoder[1].feed_forward.outer.bias.data[3] += 5.0  # type: ignore[union-attr, index]
        write_huggingface(other, tokenizer, *arguments)
        vocabulary = arguments[-1] / "vocab.json"
        pieces = json.loads(vocabulary.read_text())
        special, others = list(pieces)[:4], list(pieces)[4:]
        pieces = {piece: number for number, piece in enumerate([*special, *others[::-1]])}
        vocabulary.write_text(json.dumps(pieces))

    monkeypatch.setattr(formats, "write_huggingface", write_other)
    with pytest.raises(InputError, match="greedy largest score difference") as raised:
        write_bundle(make_model(tokenizer), tmp_path, ["huggingface"], TEXT, [])
    assert "its tokenizer encodes" in str(raised.value)
    assert "its tokenizer decodes" in str(raised.value)


def test_greedy_answers_of_one_length_come_in_batches(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text may have thousands of sentences of one length."""
    model = make_model(tokenizer)
    write(model.network, tokenizer, tmp_path)
    runner = formats.HuggingFaceRunner(tmp_path, model)
    source = [*tokenizer.encode(["abc cab"])[0].tolist(), tokenizer.eos_id]
    expected, sizes, generate = runner.greedy([source])[0].tokens, [], runner.model.generate

    def counted(ids: torch.Tensor, **options: Any) -> Any:
        sizes.append(len(ids))
        return generate(ids, **options)

    monkeypatch.setattr(runner.model, "generate", counted)
    monkeypatch.setattr(formats, "BATCH_TOKENS", 64)
    assert [answer.tokens for answer in runner.greedy([source] * 10)] == [expected] * 10
    assert sizes == [4, 4, 2]


def test_the_model_card(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = TEXT._replace(references=TEXT.sources)
    write_bundle(make_model(tokenizer), tmp_path, ["huggingface"], text, ["CC0 (made up)", "CC BY 4.0"])
    card = json.loads((tmp_path / "card.json").read_text())
    page = (tmp_path / "huggingface" / "README.md").read_text()
    assert page == model_card(card)
    assert yaml.safe_load(page.split("---")[1])["language"] == ["xx", "yy"]
    assert f"| letters | 12 | {card['scores']['bleu']:.2f} | `{card['scores']['bleu_signature']}` |" in page
    assert "- licence: CC0 (made up); CC BY 4.0" in page
    assert "- the corpus was not available" in page
    files = [{"file": "train.xx", "bytes": 7, "sha256": "abc"}]
    data = {"train_pairs": 29000, "validation_pairs": 1014, "source_files": files, "hub_revisions": {"wmt": "f00"}}
    page = model_card({**card, "data": data, "scores": {}})
    assert "- pairs: 29,000 for training, 1,014 for validation\n- train.xx, SHA-256 abc\n- wmt, revision f00" in page
    assert "Not measured" in page
