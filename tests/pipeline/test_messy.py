"""`evaluate --messy`: its texts by hand, and its table against sacreBLEU and against `evaluate` on messy files."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import sacrebleu
from numpy.random import default_rng

from pipeline.__main__ import main
from pipeline.inference import translator
from pipeline.inference.messy import MessyText, is_copied, messy_texts, tag_pairs, with_tags
from pipeline.inference.metrics import METRICS
from pipeline.inference.options import Prefixes
from tests.conftest import train_tokenizer

SOURCES = [
    "The old house (of NASA) burns. Somebody calls them!",
    "A Dog sees 3 cats",
    "Who else came yesterday evening?",
]
REFERENCES = ["Das alte Haus (der NASA) brennt. Jemand ruft sie!", "Ein Hund sieht 3 Katzen.", "Wer kam noch?"]
SYMBOLS = ["<b>", ">>de<<", "</b>", "__NAME__"]
KINDS = [
    *("lower_case", "title_case", "upper_case", "typos", "no_final_punctuation"),
    *("web_address", "email_address", "number", "emoji", "doubled_spaces"),
]
INSERTED = KINDS[5:9]


def texts(symbols: list[str] | None = None, lowercase: bool = False) -> dict[str, MessyText]:
    return dict(messy_texts(SOURCES, REFERENCES, symbols or [], lowercase=lowercase))


def test_texts_by_hand() -> None:
    found = texts()
    assert list(found) == KINDS
    assert found["lower_case"][:2] == ([one.lower() for one in SOURCES], [one.lower() for one in REFERENCES])
    assert found["upper_case"][:2] == ([one.upper() for one in SOURCES], [one.upper() for one in REFERENCES])
    assert found["title_case"].sources[0] == "The Old House (Of NASA) Burns. Somebody Calls Them!"
    assert found["title_case"].references[1] == "Ein Hund Sieht 3 Katzen."
    assert found["no_final_punctuation"].sources == [one.rstrip("!?") for one in SOURCES]
    assert found["doubled_spaces"].sources[1] == "A  Dog  sees  3  cats"
    assert found["typos"].sources != SOURCES
    for kind in ("typos", "no_final_punctuation", "doubled_spaces"):
        assert found[kind].references == REFERENCES
    assert not any(any(found[kind].copied) for kind in KINDS if kind not in INSERTED)


@pytest.mark.parametrize("kind", INSERTED)
def test_both_sides_hold_the_inserted_string(kind: str) -> None:
    text = texts()[kind]
    for sides, clean in ((text.sources, SOURCES), (text.references, REFERENCES)):
        for side, [string], before in zip(sides, text.copied, clean, strict=True):
            assert string in side
            assert re.sub(" ?" + re.escape(string) + " ?", "", side).replace(" ", "") == before.replace(" ", "")


def test_the_noise_of_a_sentence_depends_on_the_sentences_before_it_alone() -> None:
    other = dict(messy_texts(SOURCES[:2] * 2, REFERENCES[:2] * 2))
    for kind, text in texts().items():
        assert text.sources[:2] == other[kind].sources[:2]


def test_a_lower_casing_tokenizer_gets_references_that_it_can_write() -> None:
    found = texts(lowercase=True)
    assert found["upper_case"][:2] == ([one.upper() for one in SOURCES], REFERENCES)
    [address] = found["web_address"].copied[0]
    assert address == address.lower()
    assert address in found["web_address"].references[0]


def test_pairs_of_tags() -> None:
    assert tag_pairs([*SYMBOLS, "[i]", "[/i]", "</u>", "a/b"]) == [("<b>", "</b>"), ("[i]", "[/i]")]
    assert "user_symbols" not in texts(["__NAME__", ">>de<<"])


def test_all_pairs_of_tags_are_used_and_strings_keep_their_case() -> None:
    lines = ["A dog", "__NAME__"] * 50
    found = dict(messy_texts(lines, lines, [*SYMBOLS, "<i>", "</i>"]))
    tags = found["user_symbols"].copied
    assert tags[1::2] == [[]] * 50
    assert {tuple(one) for one in tags[::2]} == {("<b>", "</b>"), ("<i>", "</i>")}
    assert any(string != string.lower() for [string] in found["web_address"].copied)


def test_white_space_is_normalized_first() -> None:
    texts = dict(messy_texts(["The dog  runs. ", "A cat.\t"], ["Der Hund  läuft.", " Eine Katze."]))
    assert texts["no_final_punctuation"].sources == ["The dog runs", "A cat"]
    assert texts["lower_case"].references == ["der hund läuft.", "eine katze."]


def test_tags_are_put_around_one_word() -> None:
    random = default_rng(1)
    pair = ">>de<< A dog, __NAME__!", "Der (Hund) - bellt."
    found = {with_tags(pair, ("<b>", "</b>"), random, frozenset(SYMBOLS)) for _ in range(200)}
    # The first and the second half of the source's words; the first to the fourth quarter of the target's.
    assert found == {
        (">>de<< <b>A</b> dog, __NAME__!", "<b>Der</b> (Hund) - bellt."),
        (">>de<< <b>A</b> dog, __NAME__!", "Der (<b>Hund</b>) - bellt."),
        (">>de<< A <b>dog</b>, __NAME__!", "Der (Hund) <b>-</b> bellt."),
        (">>de<< A <b>dog</b>, __NAME__!", "Der (Hund) - <b>bellt</b>."),
    }
    accents = with_tags(("cafe\u0301!", "हिन्दी।"), ("<b>", "</b>"), random, frozenset(SYMBOLS))
    assert accents == ("<b>cafe\u0301</b>!", "<b>हिन्दी</b>।")
    nothing = "__NAME__", "__NAME__ !"
    assert with_tags(nothing, ("<b>", "</b>"), random, frozenset(SYMBOLS)) == nothing


@pytest.mark.parametrize(
    ("string", "hypothesis", "whole"),
    [
        ("12:30", "Um 12:30.", True),
        ("12:30", "Um 12:30:15", False),
        ("12:30", "Um 112:30.", False),
        ("12:30", "12:30 12:30", False),
        ("www.a.de/b", "见www.a.de/b。", True),
        ("www.a.de/b", "See (www.a.de/b), please", True),
        ("www.a.de/b", "www.a.de/b/c", False),
        ("www.a.de/b", "www.a.de/b.html", False),
        ("www.a.de/b", "www.a.de/b?q", False),
        ("www.a.de/b", "www.a.de /b", False),
        ("www.a.de/b", "www.A.de/b", False),
        ("x@y.de", "max@y.de", False),
        ("€3.50", "€3.50!", True),
        ("€3.50", "€3.505", False),
        ("😂", "Ja😂!", True),
        ("😂", "Ja 😂😂", False),
        ("😂😂", "😂", False),
        ("😂", "", False),
    ],
)
def test_what_is_copied_whole(string: str, hypothesis: str, whole: bool) -> None:
    assert is_copied(string, hypothesis, f"Text {string}.") is whole


@pytest.mark.parametrize("lowercase", [False, True])
def test_a_tokenizer_with_bytes_and_symbols_can_write_every_reference(lowercase: bool) -> None:
    text = [*SOURCES, *REFERENCES]
    tokenizer = train_tokenizer(text, 400, lowercase=lowercase, byte_fallback=True, user_symbols=SYMBOLS)
    found = dict(messy_texts(SOURCES, REFERENCES, tokenizer.user_symbols, lowercase=tokenizer.lowercase))
    assert list(found) == [*KINDS, "user_symbols"]
    for text in found.values():
        written = tokenizer.decode(tokenizer.encode(text.references))
        assert written == (tokenizer.lower(text.references) if lowercase else text.references)
        for line, reference, strings in zip(written, text.references, text.copied, strict=True):
            assert all(is_copied(string, line, reference) or string in SYMBOLS for string in strings)
            assert all(line.count(string) == 1 for string in strings)


class Repeat:
    """Gives each sentence back, but for `@`."""

    name, prefixes = "this", Prefixes()
    recipe: ClassVar[dict[str, Any]] = {"corpus": {"target_language": "en"}, "run": {"bleu_tokenizer": None}}
    settings = SimpleNamespace(beam_size=1, length_penalty=0.6, stop_rule="exact")
    tokenizer = SimpleNamespace(lowercase=False, user_symbols=SYMBOLS)

    def translate(self, sentences: list[str], *, progress: bool) -> list[Any]:
        return [SimpleNamespace(text=line.replace("@", ""), has_unknown=False) for line in sentences]


@pytest.fixture
def repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What `evaluate --messy` prints for a model that copies its input, and the last line's JSON."""
    monkeypatch.setattr(translator, "load_translator", lambda *_: Repeat())
    source, reference = tmp_path / "source", tmp_path / "reference"
    source.write_text("".join(f"{line}\n" for line in SOURCES), encoding="utf-8")
    reference.write_text("".join(f"{line}\n" for line in REFERENCES), encoding="utf-8")

    def evaluate(*options: str) -> tuple[list[str], Any]:
        command = ["evaluate", "this", "--source", str(source), "--reference", str(reference), "--messy", *options]
        assert main(command) == 0
        *lines, figures = capsys.readouterr().out.splitlines()
        return lines, json.loads(figures)

    return evaluate


def test_the_numbers_are_those_of_sacrebleu(repeated: Any) -> None:
    lines, figures = repeated()
    scores = figures["messy"]["scores"]
    assert list(scores) == ["clean", *KINDS, "user_symbols"]
    assert scores["clean"] == {name: figures[name] for name in ("bleu", "chrf", "exact_match")}
    upper = [line.upper() for line in SOURCES], [[line.upper() for line in REFERENCES]]
    unpunctuated = [line.rstrip("!?") for line in SOURCES], [REFERENCES]
    for kind, (hypotheses, references) in {"upper_case": upper, "no_final_punctuation": unpunctuated}.items():
        for name, by_hand in (
            ("bleu", sacrebleu.corpus_bleu(hypotheses, references).score),
            ("chrf", sacrebleu.corpus_chrf(hypotheses, references).score),
        ):
            assert scores[kind][name] == pytest.approx(by_hand, abs=1e-4)
            of_clean = 100 * by_hand / figures[name]
            assert scores[kind][f"{name}_of_clean"] == pytest.approx(of_clean, abs=0.01)
    assert scores["doubled_spaces"]["bleu_of_clean"] == 100
    copied = {kind: scores[kind]["copied"] for kind in scores if "copied" in scores[kind]}
    assert copied == {**dict.fromkeys([*INSERTED, "user_symbols"], 100), "email_address": 0}
    assert figures["messy"]["signatures"]["bleu"] == sacrebleu_signature(sacrebleu.BLEU())
    table = lines[lines.index("") + 1 :]
    assert [line.split()[0] for line in table] == ["text", "clean", *KINDS, "user_symbols", *METRICS]
    upper_row = table[4].split()
    assert upper_row[:3] == [
        "upper_case",
        f"{scores['upper_case']['bleu']:.2f}",
        f"{scores['upper_case']['bleu_of_clean']:.1f}",
    ]


def test_lost_tags_are_counted(repeated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def translate(self: Repeat, sentences: list[str], *, progress: bool) -> list[Any]:
        return [SimpleNamespace(text=line.replace("</b>", ""), has_unknown=False) for line in sentences]

    monkeypatch.setattr(Repeat, "translate", translate)
    scores = repeated()[1]["messy"]["scores"]
    assert (scores["user_symbols"]["copied"], scores["email_address"]["copied"]) == (0, 100)


def test_the_prefix_stays_in_front(repeated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that translates nothing but sentences with a prefix."""
    plain = repeated()[1]["messy"]
    monkeypatch.setattr(Repeat, "prefixes", Prefixes(symbols=tuple(SYMBOLS)))

    def translate(self: Repeat, sentences: list[str], *, progress: bool) -> list[Any]:
        lines = [line.removeprefix(">>de<<").strip() if line.startswith(">>de<< ") else "" for line in sentences]
        return [SimpleNamespace(text=line.replace("@", ""), has_unknown=False) for line in lines]

    monkeypatch.setattr(Repeat, "translate", translate)
    assert repeated("--prefix", ">>de<<")[1]["messy"]["scores"].keys() == plain["scores"].keys()
    for kind, scores in repeated("--prefix", ">>de<<")[1]["messy"]["scores"].items():
        if kind not in ("typos", "user_symbols"):  # Words are counted with the prefix.
            assert scores == plain["scores"][kind], kind


def sacrebleu_signature(metric: Any) -> str:
    metric.corpus_score(["a"], [["a"]])
    return str(metric.get_signature())


def test_a_registered_metric_has_a_column_and_a_clean_score_of_0_no_percentage(
    repeated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Capitals:
        def signature(self) -> str:
            return "capitals"

        def statistics(self, hypothesis: str, reference: str) -> list[int]:
            return [int(hypothesis.isupper())]

        def score(self, statistics: Any) -> float:
            return float(statistics[0])

    monkeypatch.setitem(METRICS, "capitals", Capitals())
    scores = repeated()[1]["messy"]["scores"]
    assert (scores["clean"]["capitals"], scores["upper_case"]["capitals"]) == (0, 3)
    assert scores["upper_case"]["capitals_of_clean"] is None


def test_not_with_another_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "a", "--source", "b", "--reference", "c", "--messy", "--versus", "d"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --messy: cannot be given with --versus; run evaluate --messy for each")
