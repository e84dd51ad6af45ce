"""Byte fallback and user symbols, from a recipe to translations."""

import re
from pathlib import Path

import torch

from data_module.tokenization.tokenizer import Tokenizer
from tests.conftest import pipeline

SYMBOLS = ["--corpus.byte_fallback", "true", "--corpus.user_symbols", '["<b>", ">>de<<"]']


def test_a_run_with_bytes_and_symbols(recipe_file: Path, tiny_corpus: Path, tmp_path: Path) -> None:
    run, corpus = tmp_path / "run", tmp_path / "corpus"
    options = ["--config", recipe_file, "--run.folder", run, "--corpus.folder", corpus, *SYMBOLS]
    done = pipeline("fit", *options)
    assert done.returncode == 2
    message = r":\d+: corpus\.vocabulary_size: 60 has no room for 256 bytes and 2 user symbols beside characters"
    assert re.match(f"error: {recipe_file}{message}", done.stderr.decode())
    options += ["--corpus.vocabulary_size", 320]
    done = pipeline("doctor", *options)
    assert done.returncode == 0, done.stdout.decode()
    assert "corpus.user_symbols: the training text has no '<b>', '>>de<<'" in done.stdout.decode()
    done = pipeline("fit", *options)
    assert done.returncode == 0, done.stderr.decode()
    contents = torch.load(run / "checkpoints" / "step=00000012.ckpt", weights_only=True)
    tokenizer = Tokenizer(contents["translation"]["tokenizer"].numpy().tobytes())
    assert tokenizer.byte_fallback
    assert tokenizer.user_symbols == ["<b>", ">>de<<"]
    lines = [">>de<< the 😀 <b>dog", "", "Ꮳ", "a\u2028b"]
    done = pipeline("translate", run, "--n-best", 2, text="".join(line + "\n" for line in lines))
    assert done.returncode == 0, done.stderr.decode()
    answers = done.stdout.decode().removesuffix("\n").split("\n")
    assert [answer.split("\t")[0] for answer in answers] == ["1", "1", "2", "3", "3", "4", "4"]

    # The tiny corpus's tokenizer has neither.
    plain = tmp_path / "plain"
    assert pipeline("fit", "--config", recipe_file, "--run.folder", plain, "--trainer.max_steps", 4).returncode == 0
    start = [*options[:3], tmp_path / "child", *options[4:5], tmp_path / "other", *options[6:], "--init-from", plain]
    for command in ("fit", "doctor"):
        done = pipeline(command, *start)
        text = (done.stderr if command == "fit" else done.stdout).decode()
        assert done.returncode == (2 if command == "fit" else 1), text
        assert "corpus.user_symbols: <b>, >>de<<: not in the tokenizer of the run to start from" in text
    assert not (tmp_path / "child").exists()
