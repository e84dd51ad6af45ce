"""A task other than translation with the same commands: sort digits, scored by exact match."""

import json
import random
from pathlib import Path

import pytest
import yaml

from tests.conftest import pipeline


def write_digits(folder: Path, split: str, count: int, seed: int) -> dict[str, str]:
    """Write a file with two to five digits per line, and one with the digits of each line sorted."""
    rng = random.Random(seed)
    lines = [rng.choices("0123456789", k=rng.randint(2, 5)) for _ in range(count)]
    (folder / f"{split}.shuffled").write_text("".join(" ".join(line) + "\n" for line in lines))
    (folder / f"{split}.sorted").write_text("".join(" ".join(sorted(line)) + "\n" for line in lines))
    return {"source": str(folder / f"{split}.shuffled"), "target": str(folder / f"{split}.sorted")}


@pytest.mark.slow
def test_learns_to_sort(tmp_path: Path) -> None:
    train, validation, test = (
        write_digits(tmp_path, split, count, seed)
        for seed, (split, count) in enumerate([("train", 8000), ("validation", 200), ("test", 500)])
    )
    recipe = {
        "corpus": {"folder": str(tmp_path / "corpus"), "train": train, "validation": validation, "vocabulary_size": 16},
        "batches": {"batch_tokens": 1000, "workers": 0},
        "network": {"num_layers": 1, "d_model": 64, "d_ff": 128, "num_heads": 4, "dropout": 0.0},
        "training": {"warmup_steps": 200, "learning_rate_factor": 0.5},
        "run": {"folder": str(tmp_path / "run")},
        "trainer": {"max_steps": 600, "val_check_interval": 300, "accelerator": "cpu", "precision": "32-true"},
    }
    (tmp_path / "sort.yaml").write_text(yaml.safe_dump(recipe))
    done = pipeline("fit", "--config", tmp_path / "sort.yaml")
    assert done.returncode == 0, done.stderr.decode()
    evaluated = pipeline(
        "evaluate", tmp_path / "run", "--source", test["source"], "--reference", test["target"],
        "--output", tmp_path / "answers",
    )  # fmt: skip
    assert evaluated.returncode == 0, evaluated.stderr.decode()
    scores = json.loads(evaluated.stdout.decode().splitlines()[-1])
    answers, references = (tmp_path / "answers").read_text().splitlines(), Path(test["target"]).read_text().splitlines()
    exact_match = 100.0 * sum(map(str.__eq__, answers, references)) / len(references)
    assert scores["exact_match"] == pytest.approx(exact_match)
    assert exact_match > 90.0
