"""Prefixes of sources: which a model knows, and which sentences lack one; and texts that translations begin with."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pipeline as pipeline_api
from data_module.errors import InputError
from data_module.system.files import PlainValues
from data_module.tokenization.tokenizer import Tokenizer
from model.beyond.sampling import Sampling
from pipeline.export.card import readme
from pipeline.inference import shards
from pipeline.inference.options import Prefixes, SearchOptions, with_prefix
from pipeline.inference.text_io import CHUNK
from pipeline.inference.translator import EMPTY, Translator
from tests.conftest import refusal, run_here, train_tokenizer
from tests.pipeline.test_translator import SETTINGS, make_network, make_sentences


def corpus(*prefixes: str | None) -> PlainValues:
    return {"train": [{"tsv": "a.tsv", "prefix": prefix} for prefix in prefixes], "user_symbols": ["<a>", "<b>", "<c>"]}


def test_the_prefixes_of_a_recipe() -> None:
    assert Prefixes.of_corpus(corpus("<b>", "<a>", "<b>")) == Prefixes(("<b>", "<a>"), ("<a>", "<b>", "<c>"), True)
    assert Prefixes.of_corpus(corpus("<b>", None)) == Prefixes(("<b>",), ("<a>", "<b>", "<c>"), False)
    assert Prefixes.of_corpus(corpus(None)) == Prefixes((), ("<a>", "<b>", "<c>"), False)
    assert Prefixes.of_corpus({"train": [], "user_symbols": []}) == Prefixes()


def test_sentences_without_a_prefix() -> None:
    prefixes = Prefixes.of_corpus(corpus("<a>", "<b>"))
    sentences = ["<a> x", "<b>", "  <b> x", "x <a>", "<c> x", "x", "<a>x", "", "  ", "\u200b"]
    assert [prefixes.is_missing(line) for line in sentences] == [False] * 3 + [True] * 4 + [False] * 3
    for other in (Prefixes(), Prefixes.of_corpus(corpus("<a>", None))):
        assert not any(other.is_missing(line) for line in sentences)


def test_sentences_with_a_prefix() -> None:
    assert [with_prefix("<a>", one) for one in ("x y", "", " \xa0", "<b> x")] == ["<a> x y", "", " \xa0", "<a> <b> x"]
    assert [with_prefix(None, one) for one in ("x y", "")] == ["x y", ""]


def test_the_option_is_as_if_each_line_had_the_prefix(trained_run: Path, tmp_path: Path) -> None:
    contents = torch.load(trained_run / "checkpoints" / "best.ckpt", weights_only=True)
    contents["translation"]["recipe"]["corpus"] |= {"user_symbols": ["old"]}
    torch.save(contents, tmp_path / "model.ckpt")
    plain, written = tmp_path / "plain", tmp_path / "written"
    plain.write_text("dog sees a cat\n\nred house\n")
    written.write_text("old dog sees a cat\n\nold red house\n")
    command = ["translate", tmp_path / "model.ckpt", "--source"]
    assert run_here(*command, plain, "--prefix", "old")[0] == run_here(*command, written)[0]


def test_a_prefix_that_is_not_known() -> None:
    for prefixes, known in (
        (Prefixes.of_corpus(corpus("<a>", None)), "its prefixes are <a>"),
        (Prefixes.of_corpus(corpus(None)), "its prefixes are <a> <b> <c>"),
        (Prefixes(), "it was trained without prefixes, omit the option"),
    ):
        with pytest.raises(InputError) as caught:
            prefixes.require("<d>")
        assert str(caught.value) == f"--prefix <d>: is no prefix of this model; {known}"
        prefixes.require(None)
    Prefixes.of_corpus(corpus("<a>")).require("<c>")


def test_the_readme_of_a_bundle_names_prefixes() -> None:
    """Its programs translate a line of the text, which may contain quotation marks."""

    def text(recipe: PlainValues, example: str) -> str:
        card = {"name": "n", "source_language": "en", "target_language": "x", "recipe": recipe, "stop_rule": "exact"}
        card |= {"beam_size": 1, "length_penalty": 1, "max_extra_tokens": 5, "max_source_tokens": None, "n_best": 1}
        card |= {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3, "examples": [example, "Another."]}
        return readme(["model.ts", "model.pt2", "ctranslate2", "cpp"], card, [5, 3])

    plain = text({"corpus": corpus(None)}, "$A {sentence}.")
    assert "A source sentence" not in plain
    assert plain.count('encode("$A {sentence}."') == 4
    assert "```text\n$A {sentence}.\nAnother.\n```" in plain
    several = text({"corpus": corpus('<to="de">', "<b>")}, '<to="de"> A sentence.')
    assert "A source sentence begins with a prefix, which" in several
    assert ': `<to="de">`, `<b>`.' in several
    assert several.count(r'encode("<to=\"de\"> A sentence."') == 4
    assert "may begin with a prefix" in text({"corpus": corpus("<a>", None)}, "A.")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(make_sentences(200), 45)


def test_texts_begin_with_it_and_spaces_are_those_of_text(tokenizer: Tokenizer) -> None:
    """Also inside a word, where the model goes on with it or with another one."""
    translator = Translator(make_network(tokenizer), tokenizer, SETTINGS)
    sentences = ["ein hund bellt", "die straße", "", "laut", "und über"]
    prefixes = ["", " die  straße ", "hund", "läuft", "ein hu"]
    found = translator.translate(sentences, SearchOptions(n_best=3), target_prefixes=prefixes)
    assert found[0].hypotheses == translator.translate(sentences, SearchOptions(n_best=3))[0].hypotheses
    assert found[2].hypotheses == [EMPTY]
    for sentence, prefix, translation in zip(sentences, prefixes, found, strict=True):
        ids = [*tokenizer.encode([sentence])[0].tolist(), tokenizer.eos_id]
        beginning = tokenizer.encode([prefix])[0].tolist()
        for one in translation.hypotheses:
            assert one.text.startswith(" ".join(prefix.split())) or not sentence
            assert "  " not in one.text
        if sentence and beginning:
            given = torch.tensor([ids]), None, 3, 0.6, 4, 3, "exact", torch.tensor([beginning])
            scores = translator.search.beam(*given).scores[0].tolist()
            assert [one.score for one in translation.hypotheses] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("ein ☃", "target prefix of line 8: has '☃', which the model has never seen"),
        ("hund " * 20, r"target prefix of line 8: has \d+ pieces, and a translation of this line at most \d+; shorten"),
    ],
)
def test_what_no_translation_can_begin_with_is_refused(tokenizer: Tokenizer, prefix: str, message: str) -> None:
    translator = Translator(make_network(tokenizer), tokenizer, SETTINGS)
    with pytest.raises(InputError, match=message):
        translator.translate(["ein", "hund"], first=7, target_prefixes=["", prefix])


def test_a_prefix_leaves_room_for_the_end_symbol(tokenizer: Tokenizer) -> None:
    source, prefix = (len(tokenizer.encode([text])[0]) for text in ("ein", "ein hund bellt"))
    for room in (0, 1):
        settings = replace(SETTINGS, max_extra_tokens=prefix - source - 1 + room)
        translator = Translator(make_network(tokenizer), tokenizer, settings)
        with nullcontext() if room else pytest.raises(InputError, match="at most"):
            [found] = translator.translate(["ein"], target_prefixes=["ein hund bellt"])
            assert found.text == "ein hund bellt"


def test_a_bundle_of_an_earlier_version_takes_none(tokenizer: Tokenizer) -> None:
    translator = Translator(make_network(tokenizer), tokenizer, SETTINGS, name="exports/old")
    schema = "beam(Tensor source, str stop_rule) -> Tensor"
    translator.search = SimpleNamespace(beam=SimpleNamespace(schema=schema), max_positions=0)
    with pytest.raises(InputError, match="exports/old: was exported by a version without target prefixes; export it"):
        translator.translate(["ein hund"], target_prefixes=["ein"])


def test_commands_bundles_and_the_api_agree(
    trained_run: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file, for a search and for samples, in order and in shards."""
    model = pipeline_api.load(trained_run)
    text = ["the dog sees a cat", "a red house", ""] * 5
    first, second = "cat a", "house red"
    prefixes = [second, first, first, "", second, "", first, "", ""] + [second] * 6
    source, file, output = tmp_path / "text", tmp_path / "prefixes", tmp_path / "output"
    for path, lines in ((source, text), (file, prefixes)):
        path.write_text("".join(f"{line}\n" for line in lines))
    command = ("translate", trained_run, "--source", source)
    words = (*command, "--target-prefixes", file)
    one = run_here(*words)[0].splitlines()
    assert one == model.translate(text, target_prefix=prefixes)
    for line, prefix, given in zip(one, prefixes, text, strict=True):
        assert line.startswith(prefix) if given else line == ""
    run_here(*words, "--output", output, "--shard-lines", CHUNK)
    assert output.read_text().splitlines() == one
    # A task of an array that begins in the middle has two runs of shards.
    with monkeypatch.context() as patch:
        patch.setattr(shards, "CHUNK", 4)
        for name, value in (("ID", 1), ("MIN", 0), ("COUNT", 2)):
            patch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
        run_here(*words, "--output", tmp_path / "several", "--shard-lines", 4)
    assert (tmp_path / "several").read_text().splitlines() == one
    assert pipeline_api.load(bundle).translate(text, target_prefix=prefixes) == one
    same = run_here(*command, "--target-prefix", second)[0].splitlines()
    assert same == model.translate(text, target_prefix=second)
    sampled = model.translate(text, sample=Sampling(2.0), target_prefix=second)
    assert all(line.startswith(second) for line in sampled if line)
    assert len(set(sampled)) > 3
    # Another file would give other translations.
    output.unlink()
    (tmp_path / "output.shards").mkdir(exist_ok=True)
    file.write_text("\n" * len(text))
    said = refusal(*words, "--output", output, "--shard-lines", CHUNK)
    assert "was begun with another target_prefixes" in said


def test_wrong_files_are_refused(trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, file = tmp_path / "text", tmp_path / "prefixes"
    file.write_text("\n\n")
    words = ("translate", trained_run, "--target-prefixes", file)
    assert refusal(*words, "--target-prefix", "x").startswith("error: --target-prefixes: gives each line its own;")
    for lines, message in ((3, "has fewer lines than the text"), (1, "has 2 lines, and standard input has")):
        source.write_text("a\n" * lines)
        with source.open() as stdin, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", stdin)
            assert message in run_here(*words, code=2)[1]
    source.write_text("a\nb\nc\n")
    message = f"error: --target-prefixes {file}: has 2 lines, and {source} has 3; give each line a prefix, or"
    assert refusal(*words, "--source", source).startswith(message)
    with pytest.raises(InputError, match="2 sentences and 1 target prefixes; give one for each"):
        pipeline_api.load(trained_run).translate(["a", "b"], target_prefix=["x"])
