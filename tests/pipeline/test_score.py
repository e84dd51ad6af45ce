"""`score`: log-probabilities by teacher forcing, dual cross-entropy, sorted n-best lists and word alignments."""

import math
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer
from model.settings import DecodingSettings, NetworkSettings
from model.transformer import Transformer
from pipeline.checkpointing.checkpoint import (
    TrainedModel,
    load_model,
    read_checkpoint,
    resolve_checkpoint,
    write_atomic,
)
from pipeline.export.marian_import import load_marian
from pipeline.inference import scoring, text_scoring
from pipeline.inference.options import Prefixes
from pipeline.inference.pieces import encode_sources
from pipeline.inference.scoring import Scorer, align_words
from pipeline.inference.text_io import Pair, SentenceWarnings
from pipeline.inference.text_scoring import ScoredPair
from pipeline.inference.translator import EMPTY, Hypothesis, Translator
from tests.conftest import refusal, run_here, sentences, train_tokenizer
from tests.model.search_truth import forced_log_probability, make_network, tolerance

SOURCES = [*sentences(12, seed=5), "", "the dog", "\xa0 \u200b", "a ☃"]
TARGETS = [*sentences(12, seed=6), "the cat", "\ufeff", "\u3000", "the dog"]
UNKNOWN = "characters or words that the model has never seen, and cannot read; the first is"
MARK = "U+2581 (▁), by which sentencepiece marks spaces, was read as a space"
ROUNDED = 0.5e-4
"""Numbers are printed with four decimals."""


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    return write(tmp_path / "source", SOURCES), write(tmp_path / "target", TARGETS)


@pytest.fixture(scope="module")
def trained(trained_run: Path) -> TrainedModel:
    return load_model(resolve_checkpoint(trained_run))


@pytest.fixture(scope="module")
def reverse(trained: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same network, of the other direction: its text has the words of both."""
    return with_languages(trained, tmp_path_factory.mktemp("reverse") / "reverse.ckpt", "target", "source")


def with_languages(trained: TrainedModel, path: Path, source: str, target: str) -> Path:
    contents = dict(read_checkpoint(trained.path).contents)
    corpus = {**trained.recipe["corpus"], "source_language": source, "target_language": target}
    contents["translation"] = {**contents["translation"], "recipe": {**trained.recipe, "corpus": corpus}}
    write_atomic(contents, path)
    return path


def run(*words: object) -> list[list[str]]:
    return [line.split("\t") for line in run_here("score", *words)[0].splitlines()]


def truths(model: TrainedModel, sources: list[str], targets: list[str]) -> list[tuple[float, int]]:
    """Return log-probability in float64 and number of tokens of each pair, scored alone."""
    source_ids, target_ids = (encode_sources(model.tokenizer, lines, None)[0] for lines in (sources, targets))
    return [
        (forced_log_probability(model.network, torch.tensor(source), target), len(target))
        for source, target in zip(source_ids, target_ids, strict=True)
    ]


@pytest.mark.parametrize("kind", ["checkpoint", "bundle"])
def test_scores_are_those_of_teacher_forcing(
    kind: str, bundle: Path, trained: TrainedModel, texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, over windows and batches of several lengths; a pair of empty lines has no tokens.

    The score of a piece is what it adds to the log-probability of the beginning of the target.
    """
    monkeypatch.setattr(text_scoring, "CHUNK", 7)
    words = [{"checkpoint": trained.path, "bundle": bundle}[kind], "--source", texts[0], "--target", texts[1]]
    rows = run(*words, "--pieces")
    assert run(*words) == [row[:2] for row in rows]
    expected = truths(trained, SOURCES, TARGETS)
    expected[14] = (0.0, 0)
    assert [int(row[1]) for row in rows] == [count for _, count in expected]
    allowed = ROUNDED + tolerance(trained.network)
    assert [float(row[0]) for row in rows] == pytest.approx([total for total, _ in expected], abs=allowed)
    assert rows.pop(14) == ["0.0000", "0", "", ""]
    tokenizer, vocabulary = trained.tokenizer, trained.tokenizer.pieces()
    for number, (total, count, pieces, scores) in enumerate(rows):
        place = number + (number >= 14)
        ids = encode_sources(tokenizer, [TARGETS[place]])[0][0]
        assert pieces.split(" ") == [vocabulary[one] for one in ids]
        values = list(map(float, scores.split(" ")))
        assert len(values) == int(count)
        assert sum(values) == pytest.approx(float(total), abs=ROUNDED * (len(values) + 1))
        if number < 3:
            source = torch.tensor(encode_sources(tokenizer, [SOURCES[number]])[0][0])
            truth = [forced_log_probability(trained.network, source, ids[:end]) for end in range(1, len(ids) + 1)]
            steps = [after - before for after, before in zip(truth, [0.0, *truth], strict=False)]
            assert values == pytest.approx(steps, abs=ROUNDED + 2 * tolerance(trained.network))


def test_a_bundle_cuts_what_its_checkpoint_cuts(trained_run: Path, bundle: Path, tmp_path: Path) -> None:
    texts = write(tmp_path / "source", ["a cat " * 700]), write(tmp_path / "target", ["the dog"])
    found = [run_here("score", model, "--source", texts[0], "--target", texts[1]) for model in (trained_run, bundle)]
    first, second = (float(printed.split("\t")[0]) for printed, _ in found)
    assert second == pytest.approx(first, abs=ROUNDED * 2)
    warnings = [said.splitlines()[-1].partition(": ")[2] for _, said in found]
    assert warnings == ["line 1: longer than the 1024 tokens that the network reads; cut"] * 2


def test_each_side_has_its_tokenizer(marian: Path) -> None:
    """Where a model has two."""
    model = load_marian(marian)
    tokenizer, target = model.tokenizer, "THÖ DOG"
    network = Transformer(tokenizer.vocabulary_size, NetworkSettings(**model.network))
    network.load_state_dict(model.weights)
    translator = Translator(network, tokenizer, DecodingSettings())
    [scored], *_ = Scorer(translator).score([1], ["the dog"], [target])
    source = torch.tensor([*tokenizer.encode(["the dog"])[0].tolist(), tokenizer.eos_id])
    ids = [*tokenizer.target.encode([target])[0].tolist(), tokenizer.eos_id]
    assert scored.num_tokens == len(ids)
    # A Marian model begins with its padding symbol.
    assert scored.log_probability == pytest.approx(forced_log_probability(network.eval(), source, ids), abs=1e-3)


def test_warnings_name_lines(trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_scoring, "CHUNK", 2)
    source = write(tmp_path / "source", ["the dog", "a cat", "a ☃", "the▁dog"])
    target = write(tmp_path / "target", ["the dog", "a cat " * 700, "a cat", "☃"])
    source.write_bytes(source.read_bytes() + b"\xff\n")
    target.write_bytes(target.read_bytes() + b"a dog\n")
    command = ["score", trained_run, "--source", source, "--target", target]
    printed, said = run_here(*command)
    assert printed.splitlines()[1].split("\t")[1] == "1024"
    assert [line.partition(": ")[2] for line in said.splitlines()[1:]] == [
        "line 5: not valid UTF-8; invalid bytes were replaced",
        "line 2: longer than the 1024 tokens that the network reads; cut",
        f"3 lines, 3, 4, 5: {UNKNOWN} '☃'",
        f"line 4: {MARK}",
    ]
    # Of an n-best list, lines of the source, each once.
    write(source, ["the dog", "a ☃", "a▁dog"])
    write(target, ["1\ta dog", "1\tthe dog", "2\ta", "2\tb", "2\tc", "3\td", "3\t☃"])
    said = run_here(*command, "--n-best", 1)[1]
    assert [line.partition(": ")[2] for line in said.splitlines()[1:]] == [
        f"2 lines, 2, 3: {UNKNOWN} '☃'",
        f"line 3: {MARK}",
    ]


def test_dual_cross_entropy(trained_run: Path, reverse: Path, trained: TrainedModel, texts: tuple[Path, Path]) -> None:
    rows = run(trained_run, "--source", texts[0], "--target", texts[1], "--reverse", reverse)
    forward, backward = truths(trained, SOURCES, TARGETS), truths(trained, TARGETS, SOURCES)
    for number, (row, one, other) in enumerate(zip(rows, forward, backward, strict=True)):
        if number == 14:
            assert row == ["0.0000", "0", "0.0000", "0", "inf"]
            continue
        assert (int(row[1]), int(row[3])) == (one[1], other[1])
        first, second = -one[0] / one[1], -other[0] / other[1]
        allowed = ROUNDED + 3 * tolerance(trained.network)
        assert float(row[2]) == pytest.approx(other[0], abs=allowed)
        assert float(row[4]) == pytest.approx(abs(first - second) + (first + second) / 2, abs=allowed)


def test_a_list_is_sorted_again(trained_run: Path, reverse: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "source", [*sentences(5, seed=1), "", "the dog"])
    words = ["translate", trained_run, "--source", source, "--beam", 3, "--n-best", 3, "--scores"]
    expected = [line.split("\t") for line in run_here(*words)[0].splitlines()]
    plain = [f"{number}\t{text}" for number, _, text in expected]
    shuffled = random.Random(0).sample(plain, len(plain))
    target = write(tmp_path / "list", sorted(shuffled, key=lambda line: int(line.split("\t")[0])))
    assert target.read_text().splitlines() != plain
    rows = run(trained_run, "--source", source, "--target", target, "--n-best", 3)
    assert [(row[0], row[2]) for row in rows] == [(row[0], row[2]) for row in expected]
    assert [float(row[1]) for row in rows] == pytest.approx([float(row[1]) for row in expected], abs=3e-4)
    best = run(trained_run, "--source", source, "--target", target, "--n-best", 1)
    assert best == [rows[0], *(row for row, before in zip(rows[1:], rows, strict=False) if row[0] != before[0])]
    # With a second model, the sum of both scores.
    other = write(tmp_path / "other", [row[2] for row in rows])
    repeated = write(tmp_path / "repeated", [source.read_text().splitlines()[int(row[0]) - 1] for row in rows])
    numbered = write(tmp_path / "numbered", [f"{place}\t0.0\t{row[2]}" for place, row in enumerate(rows, 1)])
    both = run(trained_run, "--source", repeated, "--target", numbered, "--n-best", 1, "--reverse", reverse)
    back = write(tmp_path / "back", [f"{n}\t{line}" for n, line in enumerate(repeated.read_text().splitlines(), 1)])
    alone = run(reverse, "--source", other, "--target", back, "--n-best", 1)
    sums = [float(one[1]) + float(two[1]) for one, two in zip(rows, alone, strict=True)]
    assert [float(row[1]) for row in both] == pytest.approx(sums, abs=3e-4)


def test_alignments_follow_the_attention(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of the upper layers, summed over the pieces of words; the end symbol aligns with nothing."""
    sources, targets = (encode_sources(tokenizer, [text], None)[0] for text in ("abc cab f", "f abc g"))
    texts = ["abc cab f"], ["f abc g"]
    columns, rows = (
        scoring._words(len(ids[0]) - 1, text, tokenizer) for ids, [text] in zip((sources, targets), texts, strict=True)
    )
    assert (set(columns), set(rows)) == ({0, 1, 2}, {0, 1, 2})
    upper, lower = torch.zeros(len(rows) + 1, len(columns) + 1), torch.zeros(len(rows) + 1, len(columns) + 1)
    for row, word in enumerate(rows):
        lower[row, 0] = 1.0
        upper[row, -1] = 1.0 if word == 2 else 0.3
        chosen = {0: 2, 1: 0}.get(word)
        for column, source_word in enumerate(columns):
            upper[row, column] = 0.7 / columns.count(source_word) if source_word == chosen else 0.0
    upper[-1, 0] = 5.0  # where the end symbol is predicted
    maps = {"cross": [10 * layer.expand(1, 2, -1, -1) for layer in (lower, lower)]}
    maps["cross"] += [layer.expand(1, 2, -1, -1) for layer in (upper, upper)]
    monkeypatch.setattr(scoring, "attention_maps", lambda *_: maps)
    assert align_words(None, tokenizer, sources, targets, texts) == [[(2, 0), (0, 1)]]  # type: ignore[arg-type]


def test_only_spaces_end_the_words_of_an_alignment(tokenizer: Tokenizer) -> None:
    """Also where the tokenizer reads other characters as spaces, or a character between spaces as nothing."""
    network, plain = make_network(3).double(), ("abc cab ab", "ab abc cab")
    for form, number in (
        ("  {}   {}  {} ", [0, 1, 2]),
        ("{}\t{} {}", [0, 0, 1]),
        ("{}\u2028{}\u2581{}", [0, 0, 0]),
        ("\t {} \0 {} {} \x85", [1, 3, 4]),
    ):
        source, target = (form.format(*side.split()) for side in plain)
        ids = [encode_sources(tokenizer, [side], None)[0] for side in (source, target)]
        for row, text, side in zip(ids, (source, target), plain, strict=True):
            assert row == encode_sources(tokenizer, [side], None)[0]
            words = scoring._words(len(row[0]) - 1, text, tokenizer)
            assert list(dict.fromkeys(words)) == list(dict.fromkeys(number))
        [found] = align_words(network, tokenizer, *ids, ([source], [target]))
        assert found
        assert {i for i, _ in found} | {j for _, j in found} <= set(number)
    # White space that is text to the tokenizer is no end either.
    spaced = encode_sources(tokenizer, ["abc\xa0cab ab"], None)[0][0][:-1]
    assert max(scoring._words(len(spaced), "abc\xa0cab ab", tokenizer)) == 1
    # Neighbouring unknown words are one piece, which is their first one's.
    words = train_tokenizer(["a b"], 6, model_type="word")
    assert scoring._words(9, " zz a yy xx b zz", words) == [0, 1, 2, 4, 5]
    assert scoring._words(4, " zz a yy xx b zz", words) == [0, 1, 2, 4]


def test_alignments_do_not_depend_on_padding(tokenizer: Tokenizer) -> None:
    network = make_network(3).double()
    lines = [["abc cab", "a", "", "gfedcba ab", "ab"], ["f", "abc ab cab", "a", "", "cab"]]
    ids = [encode_sources(tokenizer, side, None)[0] for side in lines]
    together = align_words(network, tokenizer, *ids, lines)
    alone = zip(*ids, *lines, strict=True)
    assert together == [align_words(network, tokenizer, [s], [t], ([one], [other]))[0] for s, t, one, other in alone]
    assert any(together)
    assert (together[2], together[3]) == ([], [])


def test_the_alignments_file(trained_run: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    given = ["--source", texts[0], "--target", texts[1]]
    with_file = run(trained_run, *given, "--alignments", tmp_path / "words")
    assert with_file == run(trained_run, *given)
    lines = (tmp_path / "words").read_text().split("\n")
    assert len(lines) == len(SOURCES) + 1
    for line, source, target in zip(lines, SOURCES, TARGETS, strict=False):
        places = [tuple(map(int, pair.split("-"))) for pair in line.split()]
        assert [j for _, j in places] == sorted({j for _, j in places})
        assert all(i < len(source.split()) and j < len(target.split()) for i, j in places)
    assert any(lines)
    # Links and pipes are written to, not replaced.
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    run(trained_run, *given, "--alignments", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    read_end, write_end = os.pipe()
    run(trained_run, *given, "--alignments", f"/dev/fd/{write_end}")
    os.close(write_end)
    with os.fdopen(read_end, encoding="utf-8") as pipe:
        assert pipe.read() == (tmp_path / "linked").read_text() == "\n".join(lines)


def test_alignments_do_not_count_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    class Fake:
        warnings = SentenceWarnings(Prefixes(), None)

        def __init__(self, translator: object) -> None: ...

        def score(self, numbers: list[int], sources: list[str], targets: list[str], aligned: bool) -> object:
            read.extend(sources)
            return [EMPTY], [[(0, 0), (2, 1)]], [[]]

    monkeypatch.setattr(text_scoring, "Scorer", Fake)
    models = [None]
    [found] = text_scoring.score_windows(iter([Pair(1, "a b", "c d")]), models, "<x>", True, 1)
    assert (read, found.alignment) == (["<x> a b"], [(1, 1)])


def test_mistakes(
    bundle: Path, trained: TrainedModel, texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = texts
    short, empty, words = write(tmp_path / "short", TARGETS[:-1]), write(tmp_path / "empty", []), tmp_path / "words"
    same = with_languages(trained, tmp_path / "same.ckpt", "en", "de")
    monkeypatch.setattr(text_scoring, "CHUNK", 2)  # something would have been printed before the texts' ends
    given = [trained.path, "--source", source, "--target"]
    trained_on = trained.recipe["corpus"]["train"][0]["target"]
    both = ["--kept-source", words, "--kept-target", tmp_path / "kept"]
    for changed, expected in (
        ([*given, short], f"{short} ends after {len(SOURCES) - 1} lines and the other goes on"),
        ([trained.path, "--source", short, "--target", target], f"{short} ends after {len(SOURCES) - 1} lines"),
        ([*given, short, "--alignments", words], "pair up"),
        ([trained.path, "--source", empty, "--target", empty], f"{empty}: is empty"),
        ([*given, tmp_path / "none"], "none: no such file; correct the path"),
        ([*given, target, "--n-best", 0], "--n-best 0: must be 1 or more"),
        ([*given, target, "--n-best", 1], f"{target}: line 1 is not of an n-best list"),
        ([*given, write(tmp_path / "gap", ["1\ta", "3\tb"]), "--n-best", 1], "gap: line 2 is not of an n-best list"),
        ([*given, write(tmp_path / "few", ["1\ta", "2\tb"]), "--n-best", 1], "few ends after 2 lines"),
        ([*given, target, "--n-best", 1, "--alignments", words], "--alignments: cannot be given with --n-best"),
        ([*given, target, "--n-best", 1, "--pieces"], "--pieces: cannot be given with --n-best"),
        ([*given, target, "--alignments", target], f"{target}: is read by this command"),
        ([*given, target, "--keep", 0.5], "--keep: goes with --kept-source and --kept-target; give all three"),
        ([*given, target, "--kept-source", words, "--kept-target", words], "--keep: goes with"),
        ([*given, target, "--keep", 2, *both], "--keep 2: must be above 0 and at most 1"),
        ([*given, target, "--keep", 0.5, *both, "--n-best", 1], "--keep: needs two texts that can be read again"),
        ([*given, target, "--keep", 0.5, *both[:3], source], f"{source}: is read by this command"),
        ([*given, target, "--alignments", words, "--keep", 0.5, *both], f"{words}: is --alignments too; give another"),
        ([*given, target, "--reverse", same, "--alignments", same], f"{same}: is read by this command"),
        ([*given, target, "--alignments", trained_on], f"{trained_on}: is read by this command, and would be"),
        ([bundle, *given[1:], target, "--alignments", words], "--alignments: a bundle does not give"),
        ([*given, target, "--prefix", "<x>"], "--prefix <x>: is no prefix of this model"),
        (
            [same, *given[1:], target, "--reverse", same],
            "translates from en to de; give a model that translates from de to en",
        ),
    ):
        assert expected in refusal("score", *changed), changed
    assert not words.exists()


@pytest.mark.parametrize("column", [0, 4])
def test_the_best_pairs_are_kept(
    column: int, trained_run: Path, reverse: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    """In order, and as they are written; of one direction by log-probability for each token, of two by both."""
    words = [trained_run, "--source", texts[0], "--target", texts[1], *(["--reverse", reverse] if column else [])]
    kept = [tmp_path / side for side in ("source.kept", "target.kept")]
    rows = run(*words, "--keep", 0.5, "--kept-source", kept[0], "--kept-target", kept[1])
    assert rows == run(*words)
    full = [i for i in range(len(SOURCES)) if i not in (12, 13, 14)]  # those have an empty side
    cost = {i: float(rows[i][4]) if column else -float(rows[i][0]) / int(rows[i][1]) for i in full}
    best = sorted(sorted(full, key=cost.__getitem__)[: (len(full) + 1) // 2])
    assert 0 < len(best) < len(full)
    for path, lines in zip(kept, (SOURCES, TARGETS), strict=True):
        assert path.read_text(encoding="utf-8").split("\n") == [*(lines[i] for i in best), ""]


def test_a_symbol_that_training_never_had_spoils_a_pair() -> None:
    """On the side where neither model could learn it: a source of the one is a target of the other."""
    learned = train_tokenizer(["ab ba"], 12, user_symbols=["<x>", "<y>"])

    def model(source_lacks: str, target_lacks: str) -> SimpleNamespace:
        seen = [(piece != source_lacks) + 2 * (piece != target_lacks) for piece in learned.pieces()]
        return SimpleNamespace(tokenizer=Tokenizer(learned.model, seen=bytes(seen)))

    forward = model(source_lacks="<x>", target_lacks="")
    assert text_scoring.unknown_symbols([forward]) == [{"<x>"}, set()]
    assert text_scoring.unknown_symbols([forward, model(source_lacks="<x>", target_lacks="<y>")]) == [
        {"<x>", "<y>"},
        {"<x>"},
    ]
    unknown = SimpleNamespace(tokenizer=learned)  # one of 1.0.0
    assert text_scoring.unknown_symbols([unknown, unknown]) == [set(), set()]  # type: ignore[list-item]
    learned = train_tokenizer(["ab ba"], 7, user_symbols=["<x>"], model_type="word")
    assert text_scoring.unknown_symbols([model(source_lacks="▁<x>", target_lacks="")]) == [{"<x>"}, set()]
    scored = ScoredPair(Pair(1, "ab a<x>", "ba"), Hypothesis("ba", -1.0, -1.0, 2), None, [], [])
    costs = [text_scoring._cost(scored, [{"<x>"}, set()], kind) for kind in ("bpe", "word")]
    assert costs == [math.inf, 0.5]


def test_another_vocabulary_matters_only_where_tokens_are_compared(trained: TrainedModel, tokenizer: Tokenizer) -> None:
    one, other = (
        SimpleNamespace(name="model", recipe=trained.recipe, tokenizer=used) for used in (trained.tokenizer, tokenizer)
    )
    with pytest.raises(InputError, match="has another vocabulary"):
        text_scoring.check_reverse(one, other, compares_tokens=True)  # type: ignore[arg-type]
    text_scoring.check_reverse(one, other, compares_tokens=False)  # type: ignore[arg-type]
    text_scoring.check_reverse(one, one, compares_tokens=True)  # type: ignore[arg-type]
