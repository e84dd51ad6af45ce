"""Which prefixes a model knows, and which sentences lack one."""

import pytest

from data_module.errors import InputError
from data_module.files import PlainValues
from pipeline.export.card import example_sentence, readme
from pipeline.inference.options import Prefixes, with_prefix


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


def test_a_prefix_that_is_not_known() -> None:
    for prefixes, known in (
        (Prefixes.of_corpus(corpus("<a>", None)), "its prefixes are <a>"),
        (Prefixes.of_corpus(corpus(None)), "its prefixes are <a> <b> <c>"),
        (Prefixes(), "it was trained without prefixes, omit the option"),
    ):
        with pytest.raises(InputError) as caught:
            prefixes.check("<d>")
        assert str(caught.value) == f"--prefix <d>: is no prefix of this model; {known}"
        prefixes.check(None)
    Prefixes.of_corpus(corpus("<a>")).check("<c>")


def test_the_readme_of_a_bundle_names_prefixes() -> None:
    """Its examples translate a sentence with the first one, which may contain quotation marks."""

    def text(recipe: PlainValues) -> str:
        card = {"name": "n", "source_language": "en", "target_language": "x", "recipe": recipe, "pad_id": 0}
        card |= {"beam_size": 1, "length_penalty": 1, "max_extra_tokens": 5, "max_source_tokens": None}
        card |= {"stop_rule": "exact", "n_best": 1}
        card |= {"bos_id": 2, "eos_id": 3}
        return readme(["model.ts", "model.pt2", "ctranslate2", "cpp"], card, [5, 3])

    plain = text({"corpus": corpus(None)})
    assert "A source sentence" not in plain
    assert plain.count('encode("A sentence."') == 4
    several = text({"corpus": corpus('<to="de">', "<b>")})
    assert "A source sentence begins with a prefix, which" in several
    assert ': `<to="de">`, `<b>`.' in several
    assert several.count(r'encode("<to=\"de\"> A sentence."') == 4
    assert '"A sentence."' not in several
    assert "may begin with a prefix" in text({"corpus": corpus("<a>", None)})
    assert example_sentence({"corpus": corpus("<a>", None)}) == "<a> A sentence."
    assert example_sentence({"corpus": corpus(None)}) == "A sentence."
