"""One model for two target languages, from preparation to evaluation: each source has its prefix and its scores."""

import json
import random
import shutil
from pathlib import Path

import pytest
import yaml

from tests.conftest import pipeline, run_here, tiny_recipe
from tests.integration.runs import accumulator, checkpoints, scalars

pytestmark = pytest.mark.slow
ENGLISH = ["dog", "cat", "house", "tree", "sees", "likes", "red", "small"]
GERMAN = dict(zip(ENGLISH, ["Hund", "Katze", "Haus", "Baum", "sieht", "mag", "rot", "klein"], strict=True))
FRENCH = dict(zip(ENGLISH, ["chien", "chat", "maison", "arbre", "voit", "aime", "rouge", "petit"], strict=True))
LANGUAGES = {"de": GERMAN, "fr": FRENCH}
STEPS = 160


def write_texts(folder: Path) -> dict[str, list[dict[str, object]]]:
    """Write texts of each language, and return the recipe's text sources. French has fewer pairs."""
    sources: dict[str, list[dict[str, object]]] = {}
    draws = random.Random(3)
    for split, counts in (("train", (300, 150)), ("validation", (24, 16)), ("test", (12, 12))):
        for (language, words), count in zip(LANGUAGES.items(), counts, strict=True):
            lines = [draws.choices(list(words), k=draws.randint(2, 6)) for _ in range(count)]
            names = [folder / f"{split}-{language}.{side}" for side in ("en", language)]
            names[0].write_text("".join(" ".join(line) + "\n" for line in lines))
            names[1].write_text("".join(" ".join(words[word] for word in line) + "\n" for line in lines))
            text = {"source": str(names[0]), "target": str(names[1]), "prefix": f">>{language}<<"}
            sources.setdefault(split, []).append(text)
    return sources


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("languages")
    values = tiny_recipe(folder)
    values["corpus"] |= {**write_texts(folder), "user_symbols": [">>de<<", ">>fr<<"], "vocabulary_size": 90}
    values["training"] |= {"warmup_steps": 60, "learning_rate_factor": 2}
    values["run"] |= {"folder": str(folder / "run"), "checkpoint_every_steps": STEPS // 2, "keep_last": 2}
    values["trainer"] |= {"max_steps": STEPS, "val_check_interval": STEPS // 2}
    path = folder / "languages.yaml"
    path.write_text(yaml.safe_dump(values))
    done = pipeline("fit", "--config", path)
    assert done.returncode == 0, done.stderr.decode()
    return path


def run_of(recipe: Path) -> Path:
    return recipe.parent / "run"


def share_of_words(lines: list[str], vocabulary: dict[str, str]) -> float:
    words = " ".join(lines).split()
    return sum(word in vocabulary.values() for word in words) / len(words)


def test_the_prefix_chooses_the_language(recipe: Path) -> None:
    """Written by the user or given as an option, and the same for both."""
    lines = (recipe.parent / "test-de.en").read_text().splitlines()
    for language, vocabulary in LANGUAGES.items():
        prefix = f">>{language}<<"
        written = "".join(f"{prefix} {line}\n" for line in lines)
        done = pipeline("translate", run_of(recipe), text=written)
        assert done.returncode == 0, done.stderr.decode()
        assert b"prefix" not in done.stderr
        assert share_of_words(done.stdout.decode().splitlines(), vocabulary) > 0.9
        option = pipeline("translate", run_of(recipe), "--prefix", prefix, text="".join(f"{line}\n" for line in lines))
        assert option.stdout == done.stdout


def test_validation_and_evaluate_agree_by_source(recipe: Path) -> None:
    """`evaluate` scores the validation text, named as test text in the checkpoint's copy of the recipe."""
    run = run_of(recipe)
    logged = {tag: scalars(run, tag)[-1][1] for tag in accumulator(run).Tags()["scalars"] if "validation/" in tag}
    apart = [tag for tag in logged if tag.count("/") == 2]
    names = "loss", "negative_log_likelihood", "bleu", "chrf", "exact_match"
    assert sorted(apart) == sorted(f"validation/{name}/{key}" for name in names for key in LANGUAGES)
    newest = checkpoints(run)[-1]
    for language in LANGUAGES:
        files = [recipe.parent / f"validation-{language}.{side}" for side in ("en", language)]
        options = ["--source", files[0], "--reference", files[1], "--prefix", f">>{language}<<", "--beam", 1]
        done = pipeline("evaluate", newest, *options)
        assert done.returncode == 0, done.stderr.decode()
        scores = json.loads(done.stdout.decode().splitlines()[-1])
        for name in names[2:]:
            assert scores[name] == pytest.approx(logged[f"validation/{name}/{language}"], abs=1e-3)
    assert logged["validation/bleu/de"] != pytest.approx(logged["validation/bleu/fr"], abs=1e-3)
    between = sorted(logged[f"validation/loss/{language}"] for language in LANGUAGES)
    assert between[0] < logged["validation/loss"] < between[1]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["validation/bleu/fr"] == pytest.approx(logged["validation/bleu/fr"], rel=1e-6)


def test_two_ranks_have_the_scores_of_one(recipe: Path, tmp_path: Path) -> None:
    """Their counts are summed; test_validation_scores.py shows that each pair is decoded on one rank only."""
    one, two = (Path(shutil.copytree(run_of(recipe), tmp_path / name)) for name in ("one", "two"))
    tags = [tag for tag in accumulator(one).Tags()["scalars"] if tag.startswith("validation/")]
    assert sum(tag.count("/") == 2 for tag in tags) == 10  # five scores of two languages
    more = ["--trainer.max_steps", STEPS + 1, "--trainer.val_check_interval", 1]
    run_here("fit", recipe, "--run.folder", one, *more)
    done = pipeline("fit", recipe, "--run.folder", two, *more, "--trainer.devices", 2)
    assert done.returncode == 0, done.stderr.decode()
    for tag in tags:
        step, score = scalars(one, tag)[-1]
        assert scalars(two, tag)[-1] == (step, pytest.approx(score, rel=1e-3, abs=1e-3))
