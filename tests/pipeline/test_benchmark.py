"""`benchmark train` and `benchmark decode` of this machine: figures and refusals. `tests.benchmark` tests the rest."""

import json
from pathlib import Path

import pytest
import torch

from pipeline.__main__ import main
from tests.conftest import refusal


def test_train_prints_figures(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "train", str(recipe_file), "--steps", "2", "--network.dropout", "0.1"]) == 0
    printed = capsys.readouterr()
    figures = json.loads(printed.out)
    for key in ("target_tokens_per_second", "step_seconds", "peak_memory_bytes", "flops_per_target_token"):
        assert figures[key] > 0
    assert 0 < figures["mfu"] < 1
    assert 0 < figures["padding_share"] < 1
    assert figures["ceiling_flops_per_second"] > 1e9
    assert (figures["precision"], figures["device"]) == ("32-true", "cpu")
    assert (figures["threads"], figures["torch_version"]) == (torch.get_num_threads(), torch.__version__)
    assert "tokens/s" in printed.err


def test_decode_prints_figures(
    trained_run: Path, tiny_corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    lines = (tiny_corpus.parent / "validation.source").read_text().split("\n")[:5]
    text.write_text("\n".join([*lines, "", ""]))
    assert main(["benchmark", "decode", str(trained_run), "--source", str(text), "--beam", "1"]) == 0
    printed = capsys.readouterr()
    figures = json.loads(printed.out)
    assert figures["sentences"] == 5  # empty lines are not translated
    assert (figures["beam_size"], figures["length_penalty"], figures["threads"]) == (1, 0.6, torch.get_num_threads())
    assert figures["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert figures["sentences_per_second"] == pytest.approx(5 / figures["seconds"], rel=1e-3)
    assert 0 < figures["latency_median_seconds"] <= figures["latency_p95_seconds"]
    assert figures["target_tokens_per_second"] > 0
    assert figures["peak_memory_bytes"] > 1e7
    assert "round 3 of 3: pipeline" in printed.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train RECIPE --steps 0", "--steps 0: must be 1 or more"),
        ("train RECIPE --training.r_drop_alpha 5", "training.r_drop_alpha 5"),
        ("train RECIPE --trainer.precision bf16-true", "trainer.precision must be one of"),
        ("decode RUN --source EMPTY", "empty: has no sentences"),
        ("decode RUN --source none", "none: no such file; correct the path"),
        ("decode none.ckpt --source RECIPE", "no such checkpoint"),
        ("decode RUN --source RECIPE --beam 0", "--beam 0: must be 1 to 1,000,000"),
        ("learn RECIPE", "invalid choice: 'learn'"),
    ],
)
def test_mistakes(words: str, said: str, recipe_file: Path, trained_run: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n\n")
    given = {"RECIPE": recipe_file, "RUN": trained_run, "EMPTY": empty}
    assert said in refusal("benchmark", *(given.get(word, word) for word in words.split()))
