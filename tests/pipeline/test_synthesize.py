"""`synthesize`: what its plan holds, what it refuses before any stage, and how stages run, end and are not repeated."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from data_module.errors import InputError
from data_module.system.files import PlainValues
from pipeline.__main__ import main
from pipeline.commands import stages, synthesis
from pipeline.commands.stages import Stage, run_stages
from pipeline.commands.synthesis import averaged
from pipeline.config.recipe import Recipe, load_recipe, recipe_from_dict
from tests.conftest import WORDS, refusal, sentences, tiny_recipe
from tests.docs import command_lines


@pytest.fixture
def place(tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with texts, a recipe of them, and sentences of the target side: `mono`."""
    for file in tiny_corpus.parent.glob("*.*"):
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_lines, "ROOT", tmp_path)
    recipe = tiny_recipe(Path())
    recipe["corpus"] |= {"source_language": "en", "target_language": "de", "bpe_dropout": {"source": 0.1}}
    write(tmp_path / "mine.yaml", recipe)
    (tmp_path / "mono").write_text("".join(f"{line}\n" for line in [*sentences(500, 77), ""]))
    return tmp_path


def write(path: Path, recipe: PlainValues) -> None:
    path.write_text(yaml.safe_dump(recipe))


BACK = ["back-translation", "--config", "mine.yaml", "--text", "mono", "--folder", "work"]


def plan(*words: object) -> dict[str, Recipe]:
    """Make a plan, and return its recipes by name."""
    assert main(["synthesize", *map(str, words), "--plan"]) == 0
    return {path.stem: load_recipe([path]) for path in Path("work/recipes").iterdir()}


def planned_commands() -> list[list[str]]:
    """Return the commands of plan.txt, after looking at each as at those of the documentation."""
    lines = list(command_lines.commands(Path("work/plan.txt").read_text()))
    assert not [found for line in lines if (found := command_lines.mistake(line))]
    return [words[3:] for words in lines]


def test_back_translation(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(*BACK)
    one_round = planned_commands()
    capsys.readouterr()
    recipes = plan(*BACK, "--rounds", 2)
    commands = planned_commands()
    assert commands[: len(one_round)] == one_round
    trained = ["prepare", "fit", "average"]
    rest = ["translate", "score", *trained, "evaluate"]
    assert [words[0] for words in commands] == [*trained, *trained, *rest, *trained, *rest]
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows[6:8]] == [["translate-round1.source", "translate"], ["score-round1", "score"]]
    assert rows[1] == ["fit-forward", "fit", "work/recipes/forward.yaml"]

    given, forward, reverse = load_recipe([place / "mine.yaml"]), recipes["forward"], recipes["reverse1"]
    assert forward.network == given.network
    assert forward.trainer == given.trainer
    assert forward.corpus.train == given.corpus.train
    assert (forward.corpus.tokenizer, forward.corpus.user_symbols) == (None, ["<bt>"])
    [text] = reverse.corpus.train
    assert (text.source, text.target) == ("train.target", "train.source")
    assert reverse.corpus.validation[0].source == "validation.target"
    assert (reverse.corpus.source_language, reverse.corpus.target_language) == ("de", "en")
    assert (reverse.corpus.bpe_dropout.source, reverse.corpus.bpe_dropout.target) == (0, 0.1)
    others = [recipe for name, recipe in recipes.items() if name != "forward"]
    assert {recipe.corpus.tokenizer for recipe in others} == {"work/corpora/forward/tokenizer.model"}
    real, synthetic = recipes["round1"].corpus.train
    # Nine tenths of 500 sentences beside 300 real pairs; the empty line is none.
    assert (real.source, real.weight, synthetic.prefix, synthetic.weight) == ("train.source", 1.5, "<bt>", 1)
    _, again = recipes["reverse2"].corpus.train
    assert (again.source, again.target, again.prefix) == (synthetic.target, synthetic.source, "<bt>")

    average = "work/runs/{}/average-best-3.ckpt".format
    output, kept = "work/texts/round2.source", "work/texts/round2.kept"
    assert [
        *words_of(commands, "translate", 1),
        *words_of(commands, "score", 1),
        *words_of(commands, "evaluate", 1),
    ] == [
        *("translate", average("reverse2"), "--source", "mono", "--sample", "--seed", "2", "--output", output),
        *("score", average("round1"), "--source", output, "--target", "mono", "--reverse", average("reverse2")),
        *("--keep", "0.9", "--kept-source", f"{kept}.source", "--kept-target", f"{kept}.target"),
        *("evaluate", average("round2"), "--versus", average("forward")),
        *("--source", "work/corpora/forward/validation.source.txt"),
        *("--reference", "work/corpora/forward/validation.target.txt"),
    ]


def words_of(commands: list[list[str]], verb: str, index: int) -> list[str]:
    return [words for words in commands if words[0] == verb][index]


def test_a_given_reverse_model_and_much_real_text(place: Path, trained_run: Path) -> None:
    """Its vocabulary may be another, so that scores of both directions are not compared."""
    (place / "mono").write_text("".join(f"{line}\n" for line in sentences(50, 77)))
    recipes = plan(*BACK, "--reverse-model", trained_run, "--beam", 2, "--corpus.test", "{source: validation.source,"
                   " target: validation.target}")  # fmt: skip
    commands = planned_commands()
    assert sorted(recipes) == ["forward", "round1"]
    assert "--reverse" not in words_of(commands, "score", 0)
    assert words_of(commands, "translate", 0)[4:6] == ["--beam", "2"]
    assert "--source" not in words_of(commands, "evaluate", 0)
    assert [text.weight for text in recipes["round1"].corpus.train] == [1, 6.67]


def test_distillation(place: Path, trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["distillation", *BACK[1:], "--teacher", trained_run]
    recipes = plan(*words)
    assert {recipe.corpus.tokenizer for recipe in recipes.values()} == {str(trained_run)}
    direct, student = recipes["direct"].corpus.train, recipes["student"].corpus.train
    assert [text.target for text in direct] == ["train.target"]
    assert [(text.source, text.target, text.prefix) for text in student] == [
        ("train.source", "work/texts/train1.target", None),
        ("mono", "work/texts/text.target", None),
    ]
    evaluated = [words[1:4:2] for words in planned_commands() if words[0] == "evaluate"]
    teacher = str(next(trained_run.glob("checkpoints/best.ckpt")))
    average = "work/runs/{}/average-best-3.ckpt".format
    assert evaluated == [[average("student"), average("direct")], [average("student"), teacher]]

    shutil.rmtree("work")
    capsys.readouterr()
    assert plan(*words, "--corpus.vocabulary_size", 70)["student"].corpus.tokenizer is None
    assert "learns a vocabulary of its own (corpus.vocabulary_size: 70, but" in capsys.readouterr().err


def test_weights_of_the_recipe_are_kept(place: Path) -> None:
    """500 sentences, of which nine tenths are kept, beside 300 pairs with weight 0.5, and with weight 3."""
    for weight, expected in ((0.5, [1.5, 1]), (3, [3, 2])):
        text = f"{{source: train.source, target: train.target, weight: {weight}}}"
        recipes = plan(*BACK, "--corpus.train", text)
        assert [text.weight for text in recipes["round1"].corpus.train] == expected
        for name in ("forward", "reverse1"):
            assert [text.weight for text in recipes[name].corpus.train] == [weight]
        shutil.rmtree("work")


def test_the_teacher_translates_a_source_with_its_prefix(place: Path, trained_run: Path) -> None:
    texts = [{"source": "train.source", "target": "train.target", "prefix": prefix} for prefix in ("<x>", "<y>")]
    texts.append({"source": "validation.source", "target": "validation.target"})
    given = ["--corpus.user_symbols", "[<x>, <y>]", "--corpus.train", json.dumps(texts)]
    words = ["distillation", "--config", "mine.yaml", "--folder", "work", "--teacher", trained_run, *given]
    recipes = plan(*words, "--beam", 2)
    translate = [words for words in planned_commands() if words[0] == "translate"]
    search = ["--beam", "2"]
    assert [words[2:-2] for words in translate] == [
        ["--source", "train.source", "--prefix", "<x>", *search],
        ["--source", "train.source", "--prefix", "<y>", *search],
        ["--source", "validation.source", *search],
    ]
    assert [(text.target, text.prefix) for text in recipes["student"].corpus.train] == [
        ("work/texts/train1.target", "<x>"),
        ("work/texts/train2.target", "<y>"),
        ("work/texts/train3.target", None),
    ]


@pytest.mark.parametrize(
    ("trainer", "run", "expected"),
    [
        ({"max_steps": 100, "val_check_interval": 10}, {"checkpoint_every_steps": 10}, ("best", 5)),
        ({"max_steps": 100, "val_check_interval": 10}, {"checkpoint_every_steps": 40}, ("best", 2)),
        ({"max_steps": 100, "val_check_interval": 10}, {"checkpoint_every_steps": 10, "patience": 2}, ("best", 3)),
        ({"max_steps": 100}, {"checkpoint_every_steps": 200}, ("last", 1)),
        ({"max_steps": 9000}, {"checkpoint_every_steps": None, "checkpoint_every_minutes": 5}, ("best", 1)),
    ],
)
def test_no_more_checkpoints_are_averaged_than_there_will_be(
    trainer: dict[str, int], run: dict[str, int], expected: tuple[str, int]
) -> None:
    recipe = {**tiny_recipe(Path()), "name": "tiny", "run": run, "trainer": trainer}
    assert averaged(recipe_from_dict(recipe)) == expected


def test_mistakes(place: Path, trained_run: Path) -> None:
    """One line each, and nothing is written."""
    (place / "empty").write_text("\n \n")
    (place / "other").write_text("собака видит дом the\n" * 3)
    (place / "pairs.tsv").write_text("the dog\tdog the\n" * 9)
    held_out = (place / "validation.target").read_text().splitlines()[7]
    (place / "leak").write_text(f"{WORDS[0]}\n{held_out}\n")
    other = shutil.copytree(trained_run, place / "other_run")
    corpus = Path(yaml.safe_load((trained_run / "config.yaml").read_text())["corpus"]["folder"])
    manifest = json.loads((corpus / "manifest.json").read_text())
    test = ["--corpus.test", "{source: validation.source, target: validation.target}"]
    prefix = ["--corpus.user_symbols", "[<x>]", "--corpus.train"]
    prefix += ["{source: train.source, target: train.target, prefix: <x>}"]
    distil = ["distillation", *BACK[1:], "--teacher"]
    for words, expected in (
        ([*BACK, "--keep", "0"], "--keep 0: must be above 0 and at most 1"),
        ([*BACK, "--keep", "nan"], "--keep nan: must be"),
        ([*BACK, "--rounds", "0"], "--rounds 0: must be 1 or more"),
        ([*BACK, "--beam", "0"], "--beam 0: must be"),
        ([*BACK, "--text", "none"], "none: no such file"),
        ([*BACK, "--text", "empty"], "--text empty: has no sentence"),
        ([*BACK, "--text", "other"], "--text other: 70% of its characters are not in the target side of corpus.train"),
        ([*BACK, "--text", "leak", *test], "--text leak: 1 of its lines are in corpus.test, the first is line 2"),
        ([*BACK, "--corpus.train", "{tsv: pairs.tsv}"], "corpus: pairs.tsv: synthesize needs source and target as two"),
        ([*BACK, *prefix], "corpus.train: has the prefix '<x>', and --text belongs to none"),
        ([*BACK, "--corpus.tokenizer", str(trained_run)], "has no <bt>, which marks synthetic pairs"),
        ([*BACK, "--folder", str(trained_run)], f"{trained_run}: exists and is no folder of synthesize"),
        ([*BACK, "--trainer.max_steps", "0"], "trainer.max_steps 0 is not a number of steps"),
        ([*distil, "nothing"], "nothing: there is no such checkpoint or run folder"),
    ):
        assert expected in refusal("synthesize", *words, "--plan"), words
        assert not Path("work").exists()
    Path("new").mkdir()
    Path("new/.mono").symlink_to("../new/.text")
    Path("new/.text").write_text("the dog\n")
    said = "new/.mono: is read by this command, and new would be replaced; give another folder"
    assert said in refusal("synthesize", *BACK, "--text", "new/.mono", "--folder", "new", "--plan")
    manifest["tokenizer"]["sha256"] = "0"
    kept = (corpus / "manifest.json").read_bytes()
    try:
        (corpus / "manifest.json").write_text(json.dumps(manifest))
        assert f"has another vocabulary than {corpus}" in refusal("synthesize", *distil, str(other))
    finally:
        (corpus / "manifest.json").write_bytes(kept)


def test_a_model_of_the_opposite_direction_is_refused(
    place: Path, trained_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe translates from English to German."""
    for words, source, target in (
        (["distillation", *BACK[1:], "--teacher"], "de", "en"),
        ([*BACK, "--reverse-model"], "en", "de"),
    ):
        corpus = {"source_language": source, "target_language": target, "folder": "gone"}
        model = SimpleNamespace(name="this", recipe={"corpus": corpus})
        monkeypatch.setattr(synthesis, "load_file", lambda *_, model=model, **__: model)
        assert (
            f"{words[-1]} this: translates from {source} to {target}; give a model that translates from {target} to"
            f" {source}"
        ) in refusal("synthesize", *words, trained_run, "--plan")
        assert not Path("work").exists()
        corpus |= {"source_language": target, "target_language": source}
        assert main(["synthesize", *words, str(trained_run), "--plan"]) == 0
        shutil.rmtree("work")


def test_what_has_changed_is_named(place: Path, trained_run: Path) -> None:
    plan(*BACK)
    begun = "error: work: was begun with another plan: "
    assert begun + "keep was 0.9, now 0.5;" in refusal("synthesize", *BACK, "--keep", "0.5")
    assert begun + "recipe.run.seed was 1, now 2;" in refusal("synthesize", *BACK, "--run.seed", "2")
    given = ["--reverse-model", str(trained_run)]
    assert begun + "model was null, now" in refusal("synthesize", *BACK, *given)
    with Path("mono").open("a") as file:
        file.write("the dog\n")
    assert begun + "mono has changed;" in refusal("synthesize", *BACK)
    shutil.rmtree("work")
    plan(*BACK)
    assert (
        "score-round1: work/runs/forward/average-best-3.ckpt does not exist; run the stages before it first"
        in refusal("synthesize", *BACK, "--stage", "score-round1")
    )
    begun_with = json.loads(Path("work/plan.json").read_text())
    del begun_with["recipe"]["corpus"]["byte_fallback"]  # as of an earlier version
    Path("work/plan.json").write_text(json.dumps(begun_with))
    Path("work/plan.txt").write_text("attention-pipeline prepare")  # as another program writes it
    plan(*BACK)
    recipe = Path("work/recipes/round1.yaml")
    recipe.write_text(recipe.read_text() + "# mine\n")
    assert f"{recipe}: has changed since the plan was made" in refusal("synthesize", *BACK)


COPY = "import sys, pathlib; pathlib.Path(sys.argv[2]).write_bytes(pathlib.Path(sys.argv[1]).read_bytes() + b'.')"
PRINT = "import sys; print('whole'); sys.exit(int(sys.argv[1]))"
WAIT = """
import pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets stages run a program in place of this one."""

    def use(program: str) -> None:
        monkeypatch.setattr(stages, "_program", lambda: [sys.executable, "-I", "-c", program])

    return use


def test_a_stage_runs_once(tmp_path: Path, runs: Callable[[str], None], capfd: pytest.CaptureFixture[str]) -> None:
    runs(COPY)
    files = [tmp_path / name for name in "abc"]
    files[0].write_bytes(b"x")
    two = [
        Stage(f"to-{target.name}", (str(source), str(target)), (source,), (target,))
        for source, target in pairwise(files)
    ]
    assert run_stages(tmp_path, two, "to-b") == 0
    assert not files[2].exists()
    assert run_stages(tmp_path, two, None) == 0
    assert files[2].read_bytes() == b"x.."
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("stage")]
    assert [line.partition(":")[0] for line in said] == ["stage 1 of 2, to-b (2 left)", "stage 2 of 2, to-c (1 left)"]
    files[2].unlink()
    assert run_stages(tmp_path, two, None) == 0
    assert files[2].exists()
    # Marks of version 1.1 hold hashes. A stage without its mark or an output runs, whatever else is there.
    marks = [tmp_path / "done" / f"{stage.name}.json" for stage in two]
    assert [mark.read_bytes() for mark in marks] == [b"", b""]
    marks[0].write_text('{"a": "hash"}')
    marks[1].unlink()
    files[1].write_bytes(b"y")
    assert run_stages(tmp_path, two, None) == 0
    assert files[2].read_bytes() == b"y."
    files[1].unlink()
    assert run_stages(tmp_path, two, None) == 0
    assert [file.read_bytes() for file in files] == [b"x", b"x.", b"y."]


@pytest.mark.parametrize(
    ("one", "other", "is_refused"),
    [(None, None, True), (None, "stage", True), ("stage", None, True), ("stage", "stage", False)],
)
def test_a_whole_sequence_runs_alone_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: str | None, other: str | None, is_refused: bool
) -> None:
    """Tasks of a job array run the same stage at the same time."""
    stage, running = Stage("stage", (), (), ()), []

    def run(*_: object) -> None:
        running.append(stage)
        if len(running) == 1:  # Another one is started while the first runs.
            with (
                pytest.raises(InputError, match="another synthesize writes to it; wait")
                if is_refused
                else nullcontext()
            ):
                run_stages(tmp_path, [stage], other)

    monkeypatch.setattr(stages, "_run", run)
    assert run_stages(tmp_path, [stage], one) == 0
    assert len(running) == (1 if is_refused else 2)


@pytest.mark.parametrize("code", [2, 75])
def test_a_stage_that_fails_leaves_no_half_file(tmp_path: Path, runs: Callable[[str], None], code: int) -> None:
    runs(PRINT)
    printed = tmp_path / "printed"
    assert run_stages(tmp_path, [Stage("one", (str(code),), (), (printed,), printed)], None) == code
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert run_stages(tmp_path, [Stage("one", ("0",), (), (printed,), printed)], None) == 0
    assert printed.read_text() == "whole\n"


@pytest.mark.parametrize("killed", [False, True])
def test_signals_reach_the_stage(tmp_path: Path, runs: Callable[[str], None], killed: bool) -> None:
    runs(WAIT)
    ready = tmp_path / "ready"

    def signal_when_ready() -> None:
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM if killed else signal.SIGUSR1)

    thread = threading.Thread(target=signal_when_ready)
    thread.start()
    handler = signal.getsignal(signal.SIGTERM)
    one, other = (Stage(name, (str(ready),), (), (tmp_path / name,)) for name in ("one", "other"))
    assert run_stages(tmp_path, [one, other], None) == (143 if killed else 75)
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == handler
    assert not (tmp_path / "done").exists()
