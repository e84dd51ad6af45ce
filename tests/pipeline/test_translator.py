import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer
from model.beyond.sampling import Sampling
from model.decoding import BeamSearch
from model.settings import DecodingSettings, NetworkSettings
from model.transformer import PaddedTransformer, Transformer
from pipeline.inference import translator as module
from pipeline.inference.options import SearchOptions
from pipeline.inference.pieces import encode_sources
from pipeline.inference.scoring import score_targets
from pipeline.inference.text_io import Defects
from pipeline.inference.translator import Translator
from tests.conftest import train_tokenizer

WORDS = ["ein", "hund", "läuft", "über", "die", "straße", "und", "bellt", "laut"]


def make_sentences(count: int) -> list[str]:
    draws = random.Random(1)
    return [" ".join(draws.choices(WORDS, k=draws.randint(1, 9))) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(make_sentences(200), 45)


def make_network(tokenizer: Tokenizer, learned_positions: bool = False) -> Transformer:
    torch.manual_seed(1)
    settings = NetworkSettings(
        num_layers=1, d_model=16, d_ff=16, num_heads=2, learned_positions=learned_positions, max_positions=12
    )
    network = Transformer(tokenizer.vocabulary_size, settings)
    with torch.no_grad():
        network.embedding.weight *= 3
    return network


SETTINGS = DecodingSettings(beam_size=3, max_extra_tokens=4)


def test_translations_have_the_order_of_the_sentences_for_any_batch_size(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentences = make_sentences(40)
    network = make_network(tokenizer)
    search = BeamSearch(network, *tokenizer.search_ids).eval()
    expected = []
    for ids in tokenizer.encode(sentences):
        source = torch.tensor([[*ids.tolist(), tokenizer.eos_id]])
        tokens, lengths, scores, _ = search.beam(source, None, 3, 0.6, 4, 2)
        rows = [row[:length] for row, length in zip(tokens[0].tolist(), lengths[0], strict=True)]
        expected.append((tokenizer.decode(rows), scores[0].tolist(), lengths[0].tolist()))
    assert len({texts[0] for texts, _, _ in expected}) > 20
    for batch_tokens in (1, 60, 4096):
        monkeypatch.setattr(module, "BATCH_TOKENS", batch_tokens)
        translations = Translator(network, tokenizer, SETTINGS).translate(sentences, SearchOptions(n_best=2))
        for translation, (texts, scores, lengths) in zip(translations, expected, strict=True):
            assert [one.text for one in translation.hypotheses] == texts
            assert [one.score for one in translation.hypotheses] == pytest.approx(scores, abs=1e-4)
            assert [one.num_tokens for one in translation.hypotheses] == lengths
            assert translation.text == texts[0]
            assert translation.defects == Defects()


def test_a_sentence_longer_than_the_positions_is_cut_and_marked(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    translator = Translator(make_network(tokenizer, learned_positions=True), tokenizer, SETTINGS)
    longest = " ".join(["hund"] * 30)
    short, cut = translator.translate(["ein", longest])
    assert (short.defects, cut.defects) == (Defects(), Defects(is_cut=True))
    ids, end = tokenizer.encode([longest])[0].tolist(), tokenizer.eos_id
    assert encode_sources(tokenizer, [longest], len(ids) + 1) == ([[*ids, end]], [Defects()])
    assert encode_sources(tokenizer, [longest], len(ids)) == ([[*ids[:-1], end]], [Defects(is_cut=True)])
    # Eleven pieces and the end symbol.
    source = torch.tensor([[*tokenizer.encode([longest])[0][:11].tolist(), tokenizer.eos_id]])
    answers = translator.search.beam(source, None, 3, 0.6, 4, 1)
    assert cut.hypotheses[0].score == pytest.approx(float(answers.scores[0, 0]), abs=1e-4)
    monkeypatch.setattr(module, "LONGEST", 5)
    assert Translator(make_network(tokenizer), tokenizer, SETTINGS).translate([longest])[0].defects.is_cut


def test_weights_that_are_not_finite_are_refused(tokenizer: Tokenizer) -> None:
    network = make_network(tokenizer)
    with torch.no_grad():
        network.embedding.weight[5:] = float("nan")
    for beam in (1, 3):
        translator = Translator(network, tokenizer, replace(SETTINGS, beam_size=beam), name="runs/nan")
        with pytest.raises(InputError, match="runs/nan: its scores are not finite; choose a checkpoint"):
            translator.translate(make_sentences(3))
    with pytest.raises(InputError, match="its scores are not finite"):
        translator.translate(make_sentences(3), SearchOptions(sampling=Sampling()))
    lines = make_sentences(3)
    ids, _ = encode_sources(tokenizer, lines, None)
    with pytest.raises(InputError, match="runs/nan: its scores are not finite"):
        score_targets(translator, PaddedTransformer(network), ids, ids, lines, 0.6)


def test_translations_have_no_line_breaks(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    translator = Translator(make_network(tokenizer), tokenizer, SETTINGS)
    broken = "a\nb\r\nc\u2028d\x85e\x0bf\x1cg"
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: [broken for _ in ids])
    assert translator.translate(["ein hund"])[0].text == "a b c d e f g"


@pytest.mark.parametrize(
    ("gigabytes", "beam_size", "sizes"), [(141, 4, [1024, 976]), (141, 8, [512] * 3 + [464]), (4, 4, [256] * 7 + [208])]
)
def test_a_gpu_searches_large_batches(
    gigabytes: int, beam_size: int, sizes: list[int], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2,000 sentences of 10 tokens, which count as 16, if its memory holds their beams."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    search: Any = SimpleNamespace(max_positions=0)
    translator = Translator(search, tokenizer, SETTINGS, device="cuda")
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # cuDNN would plan for every length
    properties = SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert [len(batch) for batch in translator._batches([10] * 2000, beam_size)] == sizes


def test_a_translation_may_be_any_bytes_and_a_source_cut_within_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST", 5)
    text = [*make_sentences(200), "<b>ein</b> hund"]
    tokenizer = train_tokenizer(text, 305, byte_fallback=True, user_symbols=["<b>", "</b>"])
    # With random weights, most pieces of the translations are bytes.
    translator = Translator(make_network(tokenizer), tokenizer, SETTINGS)
    sentences = ["😀" * length for length in range(1, 4)] + ["<b>läuft</b> 👩🏽‍💻", "", "ΑΒΓ\u2028"]
    translations = translator.translate(sentences, SearchOptions(n_best=3))
    assert [len(one.hypotheses) for one in translations] == [3, 3, 3, 3, 1, 3]
    texts = [hypothesis.text for one in translations for hypothesis in one.hypotheses]
    assert any("\ufffd" in text for text in texts)
    for text in texts:
        assert len(text.splitlines()) <= 1
        assert "\t" not in text
        text.encode()
