"""The folder `cpp/` of a bundle used without this project and without PyTorch: the programs of the bundle's README."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from data_module.tokenization.tokenizer import Tokenizer
from tests.conftest import pipeline

SENTENCES = ["the dog sees a cat", "a red house has a tree", "near the old tree", "blue"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bundle(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "bundle"
    done = pipeline("export", trained_run, folder, "--format", "cpp")
    assert done.returncode == 0, done.stderr.decode()
    assert [path.name for path in folder.parent.iterdir()] == ["bundle"]
    return folder


@pytest.fixture(scope="module")
def expected(trained_run: Path) -> list[str]:
    """What PyTorch's operators find, by the file that TorchScript runs."""
    folder = trained_run.parent / "torchscript"
    done = pipeline("export", trained_run, folder, "--format", "torchscript")
    assert done.returncode == 0, done.stderr.decode()
    consumer = Path(__file__).parent / "consumer.py"
    done = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", consumer, folder / "model.ts"],
        input="".join(sentence + "\n" for sentence in SENTENCES).encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


def program(bundle: Path, language: str) -> str:
    [found] = re.findall(rf"```{language}\n(.*?)```", (bundle / "README.md").read_text(), re.DOTALL)
    return found


def compile_in(folder: Path, command: str) -> None:
    """Run the compiler as the README says, which has each command once."""
    done = subprocess.run(command.split(), cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def compile_command(bundle: Path, output: str) -> str:
    [found] = re.findall(rf"`(g\+\+ [^`]* -o {output})`", (bundle / "README.md").read_text())
    return found


def test_files_of_the_bundle(bundle: Path) -> None:
    names = ["README.md", "card.json", "cpp", "parity.json", "tokenizer.model"]
    assert sorted(path.name for path in bundle.iterdir()) == names
    assert sorted(path.name for path in (bundle / "cpp").iterdir()) == ["search.cpp", "weights.bin"]
    parity = json.loads((bundle / "parity.json").read_text())
    exact = parity["cpp"]["float32"]
    assert exact["broken"] == []
    assert exact["equal"] + exact["tied"] == exact["greedy_equal"] + exact["greedy_tied"] == parity["sentences"] == 40
    assert parity["cpp"]["size_bytes"] > 4 * 1024 * 16  # the positions alone


def test_the_program_in_cpp(bundle: Path, expected: list[str]) -> None:
    folder = bundle / "cpp"
    (folder / "translate.cpp").write_text(program(bundle, "cpp"))
    compile_in(folder, compile_command(bundle, "translate"))
    card = json.loads((bundle / "card.json").read_text())
    tokenizer = Tokenizer((bundle / "tokenizer.model").read_bytes())
    lines = [" ".join(map(str, [*ids.tolist(), card["eos_id"]])) for ids in tokenizer.encode(SENTENCES)]

    def run(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(folder / "translate", cwd=folder, input=text, capture_output=True, text=True, check=False)

    done = run("".join(line + "\n" for line in lines))
    assert done.returncode == 0, done.stderr
    answers = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert all(answer[-1] == card["eos_id"] for answer in answers)
    assert tokenizer.decode([answer[:-1] for answer in answers]) == expected
    # The longest sentence that it takes, and what it refuses.
    rows = 1024 + card["max_extra_tokens"]
    assert run("5 " * (rows - 1) + "3\n").returncode == 0
    for text in ("5 " * rows + "3\n", "5 60 3\n", "5 -1 3\n", lines[0] + "\n\n" + lines[1] + "\n"):
        done = run(text)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "a sentence is empty or too long, or an id is not in the vocabulary\n"
    weights = folder / "weights.bin"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    done = run(lines[0])
    weights.write_bytes(whole)
    assert (done.returncode, done.stderr) == (1, "weights.bin is not a whole file of weights\n")


def test_the_program_in_python(bundle: Path, expected: list[str]) -> None:
    compile_in(bundle / "cpp", compile_command(bundle, "search.so"))
    code = program(bundle, "python").replace('"A sentence."', "__import__('sys').argv[1]")
    code += '\nimport sys\nassert not {"torch", "numpy", "model", "pipeline", "data_module"} & sys.modules.keys()\n'
    for sentence, answer in zip(SENTENCES, expected, strict=True):
        command = [sys.executable, "-I", "-c", code, sentence]
        done = subprocess.run(command, cwd=bundle, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == answer
