"""Bundles used without this project: in C++, in a fresh environment and with the programs of their README."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data_module.tokenization.tokenizer import Tokenizer
from pipeline.export.bundle import FILES
from tests.conftest import ROOT, pipeline

HERE = Path(__file__).resolve().parent
SENTENCES = ["the dog sees a cat", "a red house has a tree", "near the old tree", "blue"]
N_BEST = 3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bundle(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "bundle"
    # test_cpp.py has a bundle of its own.
    formats = [word for name in FILES if name != "cpp" for word in ("--format", name)]
    done = pipeline("export", trained_run, folder, *formats, "--quantize", "int8", "--data-licence", "CC0 (made up)")
    assert done.returncode == 0, done.stderr.decode()
    assert [path.name for path in folder.parent.iterdir()] == ["bundle"]
    return folder


@pytest.fixture(scope="module")
def expected(trained_run: Path) -> list[str]:
    done = pipeline("translate", trained_run, text="".join(sentence + "\n" for sentence in SENTENCES))
    return done.stdout.decode().splitlines()


def test_files_of_a_bundle(bundle: Path, tiny_corpus: Path) -> None:
    names = ["README.md", "card.json", "ctranslate2", "ctranslate2-int8", "huggingface", "model.pt2", "model.ts"]
    names += ["onnx"]
    assert sorted(path.name for path in bundle.iterdir()) == [*names, "parity.json", "tokenizer.model"]
    card = json.loads((bundle / "card.json").read_text())
    assert card["data_licences"] == ["CC0 (made up)"]
    manifest = json.loads((tiny_corpus / "manifest.json").read_text())
    assert card["data"]["source_files"] == manifest["source_files"]
    assert card["recipe"]["network"]["d_model"] == 16
    assert card["code"]["trained"]["torch"] == card["code"]["exported"]["torch"] == torch.__version__
    assert card["scores"]["bleu_signature"].startswith("nrefs:1|")
    extra = {"card.json": "", "tokenizer.model": ""}
    torch.jit.load(bundle / "model.ts", _extra_files=extra)
    assert json.loads(extra["card.json"]) == card
    parity = json.loads((bundle / "parity.json").read_text())
    for name in ("model.ts", "model.pt2", "onnx", "ctranslate2", "huggingface"):
        exact = parity[name]["float32"]
        assert exact["broken"] == []
        assert exact["greedy_equal"] + exact["greedy_tied"] == parity["sentences"] == 40
        assert exact["target_tokens_per_second"] > 0
        assert parity[name]["size_bytes"] > 1000
    assert "share_equal" in parity["model.ts"]["bfloat16"]
    assert "share_equal" in parity["ctranslate2-int8"]["int8"]


def output_of(program: str, sentence: str, folder: Path) -> str:
    """Return the output of an isolated Python program that runs in the folder with the sentence as its argument."""
    done = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", program, sentence],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5])
def test_python_programs_of_the_readme(bundle: Path, trained_run: Path, expected: list[str], number: int) -> None:
    programs = re.findall(r"```python\n(.*?)```", (bundle / "README.md").read_text(), re.DOTALL)
    assert len(programs) == 6
    program = programs[number]
    if "packed.ts" in program:
        # Continues after the first program has loaded the model.
        head, tail = programs[0].split("source = ")
        program = head + program + "source = " + tail
    program = program.replace('"A sentence."', "__import__('sys').argv[1]")
    answers = [output_of(program, sentence, bundle) for sentence in SENTENCES[:2]]
    if "ctranslate2" in program or "transformers" in program:
        # Their length penalties, and the end of CTranslate2's beam search, are others.
        assert all(answers)
        program = program.replace('card["beam_size"]', "1").replace("**batch, ", "**batch, num_beams=1, ")
        answers = [output_of(program, line, bundle) for line in SENTENCES[:2]]
        done = pipeline("translate", trained_run, "--beam", 1, text="".join(line + "\n" for line in SENTENCES))
        expected = done.stdout.decode().splitlines()
    if "onnxruntime" in program:  # greedy, as those of model.pt2
        program += "assert 'torch' not in __import__('sys').modules"
        assert answers == [
            output_of(programs[2].replace('"A sentence."', repr(line)), line, bundle) for line in SENTENCES[:2]
        ]
    elif "load_pt2" in program:  # greedy
        assert all(answers)
    else:
        assert answers == expected[:2]


def test_cpp_finds_what_python_finds(bundle: Path, tmp_path: Path) -> None:
    assert shutil.which("cmake"), "no cmake here: apt-get install cmake g++"
    readme = re.search(r"```cpp\n(.*?)```", (bundle / "README.md").read_text(), re.DOTALL)
    assert readme
    (tmp_path / "readme.cpp").write_text(readme[1])
    build = tmp_path / "build"
    torch_folder = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    program = f"-DREADME_PROGRAM={tmp_path / 'readme.cpp'}"
    for command in (
        ["cmake", "-S", HERE / "cpp", "-B", build, "-DCMAKE_BUILD_TYPE=Release", torch_folder, program],
        ["cmake", "--build", build, "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    extra = {"card.json": "", "tokenizer.model": ""}
    model = torch.jit.load(bundle / "model.ts", _extra_files=extra)
    card = json.loads(extra["card.json"])
    encoded = Tokenizer((bundle / "tokenizer.model").read_bytes()).encode(SENTENCES)
    sources = [[*ids.tolist(), card["eos_id"]] for ids in encoded]
    (tmp_path / "ids.txt").write_text("".join(" ".join(map(str, row)) + "\n" for row in sources))
    longest = max(map(len, sources))
    source = torch.tensor([row + [0] * (longest - len(row)) for row in sources])
    mask = torch.arange(longest) < torch.tensor([len(row) for row in sources]).unsqueeze(1)
    settings = (card["beam_size"], card["length_penalty"], card["max_extra_tokens"], N_BEST)
    tokens, lengths, scores = model.beam(source, mask, *settings)[:3]
    rows = [
        (score, row[:length])
        for score, row, length in zip(
            scores.flatten().tolist(), tokens.flatten(0, 1).tolist(), lengths.flatten().tolist(), strict=True
        )
    ]
    for packed in ([], ["packed"]):
        arguments = [build / "translate_ids", bundle / "model.ts", tmp_path / "ids.txt", *map(str, settings), *packed]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = [line.split() for line in done.stdout.splitlines()]
        assert [[int(word) for word in words[1:]] for words in found] == [row for _, row in rows]
        assert [float(words[0]) for words in found] == pytest.approx([score for score, _ in rows], abs=1e-5)
    done = subprocess.run([build / "readme"], cwd=bundle, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "CPULongType" in done.stdout
    # C++ programs catch the errors that the Python code raises.
    (tmp_path / "ids.txt").write_text("5 6 60 3\n")
    arguments = [build / "translate_ids", bundle / "model.ts", tmp_path / "ids.txt", *map(str, settings)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "source ids must be 0 .. 59" in done.stderr


def test_a_consumer_in_a_fresh_environment(bundle: Path, expected: list[str], tmp_path: Path) -> None:
    """Only torch and sentencepiece are needed."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    install = [python, "-m", "pip", "install", "--disable-pip-version-check", "-q", "-c", ROOT / "constraints.txt"]
    done = subprocess.run([*install, "torch", "sentencepiece"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    )
    assert not {"lightning", "attention-pipeline", "numpy"} & {line.split("==")[0] for line in listed.stdout.split()}
    for options in ([], ["packed"]):
        done = subprocess.run(
            [python, "-I", "-W", "ignore", HERE / "consumer.py", bundle / "model.ts", *options],
            input="".join(sentence + "\n" for sentence in SENTENCES),
            capture_output=True,
            text=True,
            check=False,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == expected
