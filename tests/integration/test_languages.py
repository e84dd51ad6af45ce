"""A run with Japanese as its target: the same BLEU in validation, evaluate and export."""

import json
import random
from pathlib import Path

import ipadic  # noqa: F401
import MeCab  # noqa: F401
import pytest
import yaml

from tests.conftest import ROOT, pipeline, tiny_recipe
from tests.integration.runs import accumulator, checkpoints

pytestmark = pytest.mark.slow
ENGLISH = ["dog", "cat", "man", "sees", "house", "snow", "red", "runs"]
WORDS = dict(zip(ENGLISH, ["犬", "猫", "男性", "見る", "家", "雪", "赤い", "走る"], strict=True))
STEPS = 120


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("japanese")
    draws = random.Random(5)
    for split, count in (("train", 300), ("validation", 40)):
        lines = [draws.choices(list(WORDS), k=draws.randint(3, 8)) for _ in range(count)]
        (folder / f"{split}.source").write_text("".join(" ".join(line) + "\n" for line in lines))
        translated = ("".join(WORDS[word] for word in line) + "。\n" for line in lines)
        (folder / f"{split}.target").write_text("".join(translated), encoding="utf-8")
    values = tiny_recipe(folder)
    del values["monitoring"]  # so that pictures are drawn
    values["corpus"] |= {"target_language": "ja", "vocabulary_size": 70}
    values["training"]["warmup_steps"] = 60
    values["run"] |= {"folder": str(folder / "run"), "checkpoint_every_steps": STEPS}
    values["trainer"] |= {"max_steps": STEPS, "val_check_interval": STEPS}
    (folder / "japanese.yaml").write_text(yaml.safe_dump(values))
    done = pipeline("fit", "--config", folder / "japanese.yaml")
    assert done.returncode == 0, done.stderr.decode()
    assert b"no spaces between words" not in done.stderr
    return folder / "japanese.yaml"


def validation_page(run: Path) -> str:
    """What TensorBoard shows above the last table of translations."""
    return accumulator(run).Tensors("validation/translations/text_summary")[-1].tensor_proto.string_val[0].decode()


def test_validation_evaluate_and_export_agree(recipe: Path, tmp_path: Path) -> None:
    run = recipe.parent / "run"
    logged = accumulator(run).Scalars("validation/bleu")[-1].value
    assert logged > 1
    assert "|tok:ja-mecab-" in validation_page(run)
    newest = checkpoints(run)[-1]
    text = ["--source", recipe.parent / "validation.source", "--reference", recipe.parent / "validation.target"]
    done = pipeline("evaluate", newest, *text, "--beam", 1)
    scores = json.loads(done.stdout.decode().splitlines()[-1])
    assert scores["bleu"] == pytest.approx(logged, abs=1e-3)
    assert scores["chrf"] > 0
    assert "|tok:ja-mecab-" in scores["bleu_signature"]
    assert pipeline("export", newest, tmp_path / "bundle", "--format", "ctranslate2").returncode == 0
    card = json.loads((tmp_path / "bundle" / "card.json").read_text())
    assert "|tok:ja-mecab-" in card["scores"]["bleu_signature"]


def test_images_number_the_pieces_that_the_font_cannot_write(recipe: Path) -> None:
    events = accumulator(recipe.parent / "run")
    tags = [tag for tag in events.Tags()["tensors"] if tag.startswith("validation_attention/pieces_")]
    assert tags == [f"validation_attention/pieces_{pair}/text_summary" for pair in (1, 2)]
    for tag in tags:
        note, _, rows = events.Tensors(tag)[-1].tensor_proto.string_val[0].decode().partition("\n\n")
        assert note.startswith("target pieces are numbered: DejaVu Sans has no glyphs for U+")
        header, _, first, *_ = rows.splitlines()
        assert header == "| number | source | target |"
        assert first.startswith("| 1 | ▁")


def test_ranks_with_other_packages_are_refused(recipe: Path, tmp_path: Path) -> None:
    """Rank 1 lacks MeCab."""
    hidden = "import os, sys\nif os.environ.get('LOCAL_RANK') == '1':\n    sys.modules['MeCab'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    options = ["--run.folder", tmp_path / "run", "--trainer.devices", 2, "--run.timeout_seconds", 200]
    done = pipeline("fit", "--config", recipe, *options, environment={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert done.returncode == 2, done.stderr.decode()
    assert b" was started otherwise than rank 0: BLEU's tokenizer char, not ja-mecab; start all ranks" in done.stderr
    assert not checkpoints(tmp_path / "run")


def test_a_new_run_whose_language_has_no_name_is_warned(recipe: Path, tmp_path: Path) -> None:
    options = ["--run.folder", tmp_path / "run", "--corpus.folder", tmp_path / "corpus", "--trainer.max_steps", 2]
    done = pipeline("fit", "--config", recipe, *options, "--corpus.target_language", "target")
    assert done.returncode == 0, done.stderr.decode()
    warning = b"the validation text's references have no spaces between words: BLEU on 13a tokens says little"
    assert done.stderr.count(warning) == 1
