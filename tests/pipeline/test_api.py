"""The Python API: the same answers, scores and mistakes as the commands', in a process that is somebody else's."""

import copy
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import pipeline
from data_module.system.files import PlainValues
from data_module.tokenization.tokenizer import Tokenizer
from model.attention_maps import attention_maps
from pipeline import fit
from pipeline.__main__ import main
from pipeline.checkpointing.checkpoint import load_model, resolve_checkpoint
from pipeline.inference.loading import load_translator
from pipeline.inference.options import Prefixes, SearchOptions
from pipeline.inference.translator import Translator
from tests.conftest import ROOT, run_here, sentences, tiny_recipe, train_tokenizer
from tests.conftest import refusal as refusal_of_command
from tests.pipeline.test_export import make_model

TEXTS = [*sentences(40, seed=40), "", "the dog", "\u3000\u200b"]


@pytest.fixture(scope="module")
def model(trained_run: Path) -> pipeline.Model:
    return pipeline.load(trained_run)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(pipeline.InputError) as caught:
        call()
    [line] = str(caught.value).splitlines()
    return line


def test_translations_are_the_commands(model: pipeline.Model, trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(text + "\n" for text in TEXTS))
    printed, _ = run_here("translate", trained_run, "--source", tmp_path / "text")
    expected = printed.removesuffix("\n").split("\n")
    assert model.translate(TEXTS) == expected
    assert model.translate(TEXTS[0]) == expected[0]
    assert (model.translate(""), model.translate([]), model.translate("\xa0")) == ("", [], "")
    best = load_translator(trained_run).translate(TEXTS, SearchOptions(n_best=3))
    assert model.translate(TEXTS, n_best=3) == [one.hypotheses for one in best]
    [hypothesis] = model.translate(TEXTS[0], n_best=1)
    assert isinstance(hypothesis, pipeline.Hypothesis)
    assert hypothesis.text == expected[0]
    assert model.recipe["network"]["d_model"] == 16


def test_settings_and_kinds_of_paths(trained_run: Path, model: pipeline.Model) -> None:
    greedy = pipeline.load(str(trained_run / "checkpoints" / "best.ckpt"), beam_size=1, length_penalty=0.0)
    expected = load_translator(trained_run / "checkpoints" / "best.ckpt").translate(TEXTS, SearchOptions(1, 0.0))
    assert greedy.translate(TEXTS) == [one.text for one in expected]
    hypothesis = greedy.translate(TEXTS[0], n_best=1)[0]
    for found in (hypothesis, greedy.score(TEXTS[0], TEXTS[1])):
        assert found.score == found.log_probability != 0.0
    assert pipeline.load(trained_run, stop_rule="first")._settings.stop_rule == "first"


@pytest.fixture
def operators(trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> pipeline.Model:
    """The model without the compiled search."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    return pipeline.load(trained_run)


@pytest.mark.parametrize("kind", ["compiled", "operators", "bundle"])
def test_threads_share_a_model(kind: str, model: pipeline.Model, operators: pipeline.Model, bundle: Path) -> None:
    used = {"compiled": model, "operators": operators}.get(kind) or pipeline.load(bundle)
    count = 4 if kind == "compiled" else 2

    def calls(number: int) -> list[object]:
        one, several = TEXTS[number], TEXTS[:: number + 1]
        answers = [used.translate(one), used.translate(several), used.translate(several, n_best=3)]
        answers.append(used.score(several, several[::-1]))
        if kind != "bundle":
            found = used.attention(one, TEXTS[number + 1])
            answers += [getattr(found, kind).tolist() for kind in ("encoder", "decoder", "cross")]
        return answers

    for _ in range(3):  # of which TorchScript optimizes while it runs
        expected = [calls(number) for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for found, alone in zip(threads.map(calls, [0, 1, 2, 3] * count), expected * count, strict=True):
            assert found == alone


def test_scores_are_the_commands(model: pipeline.Model, trained_run: Path, tmp_path: Path) -> None:
    sides = TEXTS, TEXTS[::-1]
    for name, lines in zip(("source", "target"), sides, strict=True):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    printed, _ = run_here("score", trained_run, "--source", tmp_path / "source", "--target", tmp_path / "target")
    expected = [line.split("\t") for line in printed.splitlines()]
    for found, text, (total, count) in zip(model.score(*sides), sides[1], expected, strict=True):
        assert (found.text, found.num_tokens) == (text, int(count))
        assert found.log_probability == pytest.approx(float(total), abs=1e-4)
        assert found.score == pytest.approx(found.log_probability / ((5 + found.num_tokens) / 6) ** 0.6, rel=1e-5)
    assert model.score([], []) == []


def test_the_network_is_read_again_where_the_search_has_none(
    model: pipeline.Model, trained_run: Path, tmp_path: Path
) -> None:
    """From the same file only: a run that goes on puts another best checkpoint in its place."""
    copied = tmp_path / "copy.ckpt"
    shutil.copy(resolve_checkpoint(trained_run), copied)
    same, other = pipeline.load(copied), pipeline.load(copied)
    for loaded in (same, other):
        loaded._translator.search = SimpleNamespace(max_positions=0)
    expected = model.score("the dog", "dog the").score
    assert same.score("the dog", "dog the").score == pytest.approx(expected, abs=1e-5)
    shutil.copy(trained_run / "checkpoints" / "step=00000080.ckpt", tmp_path / "next")
    (tmp_path / "next").replace(copied)
    for call in (other.score, other.attention):
        assert "has changed since it was loaded; load it again" in refusal(partial(call, "a", "b"))
    copied.unlink()
    assert str(copied) in refusal(partial(other.score, "a", "b"))


def test_attention_is_the_networks(model: pipeline.Model, trained_run: Path) -> None:
    plain = load_model(resolve_checkpoint(trained_run))
    found = model.attention(TEXTS[0])
    target = model.translate(TEXTS[0])
    tokenizer, pieces = plain.tokenizer, plain.tokenizer.pieces()
    source_ids, target_ids = ([*ids.tolist(), tokenizer.eos_id] for ids in tokenizer.encode([TEXTS[0], target]))
    assert found.source == [pieces[one] for one in source_ids]
    assert found.target == [pieces[one] for one in target_ids]
    maps = attention_maps(
        plain.network, torch.tensor([source_ids]), torch.tensor([[tokenizer.bos_id, *target_ids[:-1]]])
    )
    for kind, rows, columns in (
        ("encoder", found.source, found.source),
        ("decoder", found.target, found.target),
        ("cross", found.target, found.source),
    ):
        weights = getattr(found, kind)
        assert weights.shape == (1, 2, len(rows), len(columns))
        assert weights.dtype == np.float32
        assert np.abs(weights[0] - maps[kind][0][0].numpy()).max() < 1e-5
        assert np.abs(weights.sum(-1) - 1.0).max() < 1e-5
    assert not np.triu(found.decoder[0, 0], 1).any()
    other = model.attention(TEXTS[0], target="the dog")
    assert other.target != found.target
    assert "".join(other.target[:-1]).replace("\u2581", " ").strip() == "the dog"


def test_pieces_of_a_translation_sum_to_its_score(model: pipeline.Model) -> None:
    """Of the model's own, whose search gives the sum, as of a given one."""
    for text in TEXTS[:12]:
        [best] = model.translate(text, 1)
        pieces = model.pieces(text)
        assert len(pieces) == best.num_tokens
        assert "".join(piece for piece, _ in pieces[:-1]).replace("\u2581", " ").strip() == best.text
        assert pieces[-1][0] == "</s>"
        assert sum(score for _, score in pieces) == pytest.approx(best.log_probability, abs=1e-4)
        given = model.pieces(text, "the dog")
        assert sum(score for _, score in given) == pytest.approx(model.score(text, "the dog").log_probability, abs=1e-6)
    assert model.pieces("") == []


def test_pictures_of_attention(model: pipeline.Model, tokenizer: Tokenizer) -> None:
    trained = make_model(tokenizer)
    deep = pipeline.Model(Translator(trained.network, tokenizer, trained.decoding))
    attention = model.attention(TEXTS[0])
    pictures = [attention.picture(), attention.picture("encoder", layer=0), attention.picture("decoder")]
    assert all(isinstance(picture, Image.Image) for picture in pictures)
    assert len({picture.tobytes() for picture in pictures}) == 3
    assert attention.picture("cross", 0).tobytes() == pictures[0].tobytes()
    both = [deep.attention("a b c").picture(layer=layer).tobytes() for layer in (0, 1, -1)]
    assert both[0] != both[1] == both[2]
    assert "kind 'self': must be cross, decoder, encoder" in refusal(lambda: attention.picture("self"))  # type: ignore[arg-type]
    assert "layer 1: there are 1" in refusal(lambda: attention.picture(layer=1))
    assert "layer -2" in refusal(lambda: attention.picture(layer=-2))


def test_a_bundle_is_loaded_as_its_checkpoint(model: pipeline.Model, bundle: Path) -> None:
    for path in (bundle, str(bundle), bundle / "model.ts"):
        loaded = pipeline.load(path)
        assert loaded.translate(TEXTS) == model.translate(TEXTS)
    expected = model.pieces(TEXTS[0])
    for found, piece in zip(loaded.pieces(TEXTS[0]), expected, strict=True):
        assert found == (piece[0], pytest.approx(piece[1], abs=1e-4))
    greedy = pipeline.load(bundle, beam_size=1)
    assert "n_best 2: is more than the beam, 1" in refusal(lambda: greedy.translate("the dog", n_best=2))
    assert "a bundle has no attention weights; load the checkpoint" in refusal(lambda: greedy.attention("the dog"))
    assert greedy.recipe == model.recipe


def test_commands_take_a_bundle(trained_run: Path, bundle: Path, tmp_path: Path) -> None:
    """With the same scores, translations and warnings."""
    text = tmp_path / "text"
    text.write_text("".join(line + "\n" for line in [*TEXTS, "the m"]))
    printed = []
    for path in (trained_run, bundle):
        lines = run_here("evaluate", path, "--source", text, "--reference", text, "--beam", 2)[0].splitlines()
        figures = json.loads(lines[-1])
        assert figures.pop("checkpoint").endswith("best.ckpt" if path == trained_run else "model.ts")
        translations, said = run_here("translate", path, "--source", text, "--beam", 2)
        printed.append((figures, translations, said.splitlines()[1:]))
    assert printed[0] == printed[1]
    assert printed[0][1].count("\n") == len(TEXTS) + 1
    [warning] = printed[0][2]
    assert warning.startswith(f"line {len(TEXTS) + 1}: pieces that no training sentence has on this side")


def test_damaged_bundles(bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    for text, said in (
        ("[]", "is no card of a bundle"),
        ("{", "is no card of a bundle"),
        (100_000 * "[", "is no card of a bundle"),
        ('{"format_version": "2"}', "its format_version is '2', not a number"),
        ('{"format_version": 2}', "is no card of a bundle: the recipe must be a mapping, not nothing"),
        ('{"format_version": 2, "recipe": [1]}', "is no card of a bundle: the recipe must be a mapping, not [1]"),
        ('{"format_version": 2, "recipe": {"decoding": []}}', "is no card of a bundle"),
    ):
        (folder / "card.json").write_text(text)
        assert f"card.json: {said}" in refusal(lambda: pipeline.load(folder))
    shutil.copy(bundle / "card.json", folder)
    (folder / "tokenizer.model").write_bytes(train_tokenizer(["another text"], 15).model)
    assert "do not belong together; export it again" in refusal(lambda: pipeline.load(folder))
    shutil.copy(bundle / "tokenizer.model", folder)
    (folder / "model.ts").write_bytes((bundle / "model.ts").read_bytes()[:5000])
    assert "is damaged or not a TorchScript file" in refusal(lambda: pipeline.load(folder))
    (folder / "model.ts").unlink()
    assert "has no model.ts, which translates; export it again" in refusal(lambda: pipeline.load(folder))
    (folder / "card.json").unlink()
    assert "holds no checkpoint" in refusal(lambda: pipeline.load(folder))


def test_mistakes_have_the_commands_lines(trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    with Path(os.devnull).open() as empty:
        monkeypatch.setattr(sys, "stdin", empty)
        for path in (tmp_path / "none", tmp_path / "text.ckpt", tmp_path):
            line = refusal(lambda path=path: pipeline.load(path))  # type: ignore[misc]
            assert f"error: {line}" == refusal_of_command("translate", path)
        line = refusal(lambda: pipeline.load(trained_run, beam_size=0))
        assert f"error: {line}" == refusal_of_command("translate", trained_run, "--beam", 0)


def test_wrong_arguments_are_refused_in_one_line(model: pipeline.Model) -> None:
    api: Any = model  # which takes any types
    half = json.loads('"a \\ud83d"')
    mistake = "number 2 has half of a surrogate pair, \\ud83d, which is no character; remove it"
    for call, said in (
        (lambda: api.translate("a", n_best=0), "n_best 0: must be 1 or more"),
        (lambda: api.translate(["a", float("nan")]), "sentences: number 2 is nan, not text"),
        (lambda: api.translate("a", 2, sample=pipeline.Sampling()), "n_best 2: sampling draws one"),
        (lambda: api.translate("a", sample=True), "sample True: give a pipeline.Sampling"),
        (lambda: api.attention("a", ["b", "c"]), "give one text each, not ['b', 'c']"),
        (lambda: api.pieces(["a"]), "give one text each, not ['a']"),
        (lambda: api.score(["a", "b"], ["a"]), "2 sources and 1 targets"),
        (lambda: api.score("a", ["a"]), "1 sources and 1 targets"),
        (lambda: api.translate(["a", half]), f"sentences: {mistake}"),
        (lambda: api.score(["a", half], ["a", "a"]), f"sources: {mistake}"),
        (lambda: api.score(["a", "a"], ["a", half]), f"targets: {mistake}"),
        (lambda: api.attention("a", half), "half of a surrogate pair"),
    ):
        assert said in refusal(call)
    for values, said in (
        ({"temperature": "x"}, "temperature 'x' must be a number"),
        ({"top_p": None}, "top_p None must be a number"),
        ({"top_k": 0}, "top_k 0 must be"),
        ({"top_k": 2.5}, "top_k 2.5 must be a whole number"),
        ({"seed": 1.5}, "seed 1.5 must be a whole number"),
        ({"seed": True}, "seed True must be a whole number"),
    ):
        wrong = pipeline.Sampling(**values)  # type: ignore[arg-type]
        assert f"sample: {said}" in refusal(lambda wrong=wrong: api.translate("a", sample=wrong))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("odd", "said"),
    [("the Dog", "characters or words that the model has never"), ("the\u2581dog", r"U\+2581 \(\u2581\), by which")],
)
def test_characters_that_are_not_read_are_warned_of(model: pipeline.Model, odd: str, said: str) -> None:
    for call in (
        lambda: model.translate(["a", odd, "the dog"]),
        lambda: model.score(["a", odd], ["a", "a"]),
        lambda: model.score(["a", "a"], ["a", odd]),
    ):
        with pytest.warns(UserWarning, match=rf"^sentence 2: {said}") as caught:
            call()
        assert [one.filename for one in caught] == [__file__]


def test_long_sentences_and_missing_prefixes_are_warned_of(tokenizer: Tokenizer) -> None:
    trained = make_model(tokenizer, learned_positions=True, max_positions=12)
    translator = Translator(trained.network, tokenizer, trained.decoding)
    translator.max_source_tokens = 6
    model = pipeline.Model(translator)
    with pytest.warns(UserWarning, match="^2 sentences, 2, 3: longer than the 6 tokens"):
        model.translate(["a b", "a b c d e f g", "g f e d c b a", "a"])
    assert [len(ids) for ids in tokenizer.encode(["a b c", "a b cc"])] == [5, 6]
    with pytest.warns(UserWarning, match="^sentence 2: longer than the 6 tokens") as caught:
        model.score(["a b c", "a b cc"], ["a", "a"])
    assert caught[0].filename == __file__
    with pytest.raises(pipeline.InputError, match="target 2: has 13 pieces and the network 12 positions"):
        model.score(["a", "b"], ["a", "a b c d e f g"])
    translator.prefixes = Prefixes((">>x<<",), (">>x<<",), True)
    for call in (
        lambda: model.translate("a b"),
        lambda: model.score("a b", "a"),
        lambda: model.attention("a b"),
        lambda: model.attention("a b", "a"),
    ):
        with pytest.warns(UserWarning, match="^sentence 1: without one of the prefixes") as caught:
            call()
        assert [one.filename for one in caught] == [__file__]


@pytest.fixture
def recipe(tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlainValues:
    monkeypatch.chdir(tmp_path)
    return {**tiny_recipe(tiny_corpus.parent), "name": "tiny"}


def process_state() -> dict[str, object]:
    """What belongs to the caller."""
    names = ["lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero", "data_module", ""]
    return {
        "signals": [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "warnings": list(warnings.filters),
        "levels": [logging.getLogger(name).level for name in names],
        "random": torch.get_rng_state().tolist(),
        "precision": torch.get_float32_matmul_precision(),
    }


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path / "checkpoints" / "step=00000012.ckpt", weights_only=True)["state_dict"]


def test_training_gives_the_commands_weights_and_leaves_the_process_as_it_was(
    recipe: PlainValues, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import lightning.pytorch  # noqa: F401  sets the levels of its loggers

    given, before = copy.deepcopy(recipe), process_state()
    # A recipe with a corpus that is not there yet, as a Path.
    given["corpus"]["folder"] = Path("new")
    kept = copy.deepcopy(given)
    run = pipeline.train(given)
    assert run == Path("runs/tiny")
    assert given == kept
    assert process_state() == before
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe | {"corpus": {**recipe["corpus"], "folder": "new"}}))
    assert main(["fit", "--config", "tiny.yaml", "--run.folder", "other"]) == 0
    ours, theirs = weights(run), weights(Path("other"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    capfd.readouterr()
    assert pipeline.train(given) == run
    assert "finished at step 12" in capfd.readouterr().err
    assert isinstance(pipeline.load(run).translate("the dog"), str)


def test_mistakes_in_a_recipe(recipe: PlainValues, tmp_path: Path) -> None:
    before = process_state()
    recipe["training"] = {"schedule": "nosuch"}
    assert "nosuch" in refusal(lambda: pipeline.train(recipe))
    recipe["training"] = {}
    recipe["corpus"] |= {"folder": "new", "train": {"source": "no.en", "target": "no.de"}}
    assert "no.en" in refusal(lambda: pipeline.train(recipe))
    assert process_state() == before
    assert not (tmp_path / "runs").exists()


def interrupt_after_first_checkpoint(run: Path, has_ended: threading.Event) -> None:
    while not list(run.glob("checkpoints/step=*.ckpt")):
        if has_ended.wait(0.01):
            return
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_saves_and_the_next_call_resumes(recipe: PlainValues, capfd: pytest.CaptureFixture[str]) -> None:
    before = process_state()
    recipe["trainer"] |= {"max_steps": 100_000, "val_check_interval": 50_000}
    recipe["run"] |= {"checkpoint_every_steps": 4}
    has_ended = threading.Event()
    thread = threading.Thread(target=interrupt_after_first_checkpoint, args=(Path("runs/tiny"), has_ended))
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt, match="asked to stop: saved after step"):
            pipeline.train(recipe)
    finally:
        has_ended.set()
    thread.join()
    assert process_state() == before
    newest = max(Path("runs/tiny/checkpoints").glob("step=*.ckpt"))
    step = int(newest.stem.partition("=")[2])
    recipe["trainer"]["max_steps"] = step + 4
    capfd.readouterr()
    pipeline.train(recipe)
    assert f"resuming from {newest}" in capfd.readouterr().err
    assert f"step={step + 4:08d}.ckpt" in {path.name for path in newest.parent.iterdir()}


def test_the_end_of_max_time_is_no_error(recipe: PlainValues, capfd: pytest.CaptureFixture[str]) -> None:
    recipe["trainer"] |= {"max_steps": 100_000, "val_check_interval": 50_000, "max_time": "00:00:00:01"}
    assert pipeline.train(recipe) == Path("runs/tiny")
    assert "trainer.max_time has passed: saved after step" in capfd.readouterr().err


def test_nothing_ends_the_process(recipe: PlainValues, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(*_: object, **__: object) -> None:
        torch.set_float32_matmul_precision("high")  # as on a GPU
        raise SystemExit(1)

    before = process_state()
    monkeypatch.setattr(fit, "fit", leave)
    with pytest.raises(KeyboardInterrupt):
        pipeline.train(recipe)
    assert process_state() == before


def test_training_in_a_thread(recipe: PlainValues) -> None:
    """As in a web application: only the main thread can set signal handlers."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(pipeline.train(recipe)))
    thread.start()
    thread.join()
    assert found == [Path("runs/tiny")]


TYPED = """
from pathlib import Path
from typing import assert_type

import pipeline
from PIL.Image import Image

model = pipeline.load("runs/mine", beam_size=4)
assert_type(model, pipeline.Model)
assert_type(model.translate("a"), str)
assert_type(model.translate(["a"]), list[str])
assert_type(model.translate("a", n_best=2), list[pipeline.Hypothesis])
assert_type(model.translate(["a"], 2), list[list[pipeline.Hypothesis]])
assert_type(model.score("a", "b"), pipeline.Hypothesis)
assert_type(model.score(["a"], ["b"]), list[pipeline.Hypothesis])
assert_type(model.attention("a").picture(), Image)
assert_type(pipeline.train({"name": "a"}), Path)
model.translate(3)
pipeline.load(Path("a"), beam=3)
"""


@pytest.mark.slow
def test_the_types_are_known_to_mypy(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(TYPED)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", os.devnull, "--follow-imports", "silent", "user.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line and line.startswith("user.py")]
    last = TYPED.count("\n")
    assert [int(line.split(":")[1]) for line in errors] == [last - 1, last], done.stdout
