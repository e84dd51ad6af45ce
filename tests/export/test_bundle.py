"""A bundle used without this project: by the programs of its README, in C++ and in a fresh environment."""

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from data_module.tokenization.tokenizer import Tokenizer
from pipeline.export import exported_program
from pipeline.export.bundle_folder import FILES
from tests.conftest import pipeline, run_here

HERE = Path(__file__).resolve().parent
SENTENCES = ["the dog sees a cat", "a red house has a tree", "near the old tree", "blue"]
PROGRAMS = ["model.ts", "model.pt2", "onnx/", "ctranslate2/", "huggingface/", "cpp/"]
"""Sections of a bundle's README that have a program in Python."""

pytestmark = pytest.mark.slow


def blocks(bundle: Path, section: str, language: str) -> list[str]:
    """The programs in a section of a bundle's README."""
    parts = (bundle / "README.md").read_text(encoding="utf-8").split("\n## ")
    [found] = [part for part in parts if part.startswith(section)]
    return re.findall(rf"```{language}\n(.*?)```", found, re.DOTALL)


def python_program(bundle: Path, name: str) -> str:
    return blocks(bundle, name, "python")[0]


def outputs(program: str, sentences: list[str], folder: Path) -> list[str]:
    """What a program prints in the folder for each sentence in place of its own, without this project."""
    example = json.dumps(json.loads((folder / "card.json").read_text())["examples"][0], ensure_ascii=False)
    assert example in program
    repeated = f"""import sys
for sentence in sys.argv[1:]:
    exec({program!r}.replace({example!r}, repr(sentence)), {{}})
assert not {{"model", "pipeline", "data_module", "lightning"}} & {{name for name in sys.modules if sys.modules[name]}}
"""
    command = [sys.executable, "-I", "-X", "utf8", "-W", "ignore", "-c", repeated, *sentences]
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().removesuffix("\n").split("\n")


@pytest.fixture(scope="module")
def bundle(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "bundle"
    formats = [word for name in FILES for word in ("--format", name)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exported_program, "STAGES", (2,))  # test_init_from_marian.py writes all stages, which takes long.
        run_here("export", trained_run, folder, *formats, "--quantize", "int8", "--data-licence", "CC0 (made up)")
    assert [path.name for path in folder.parent.iterdir()] == ["bundle"]
    return folder


@pytest.fixture(scope="module")
def beam(trained_run: Path) -> list[str]:
    return pipeline("translate", trained_run, text="\n".join(SENTENCES)).stdout.decode().splitlines()


@pytest.fixture(scope="module")
def greedy(trained_run: Path) -> list[str]:
    return pipeline("translate", trained_run, "--beam", 1, text="\n".join(SENTENCES)).stdout.decode().splitlines()


def test_files_of_a_bundle(bundle: Path, tiny_corpus: Path) -> None:
    names = {
        *(name.removesuffix("/") for name in PROGRAMS),
        "ctranslate2-int8",
        "README.md",
        "card.json",
        "parity.json",
    }
    assert {path.name for path in bundle.iterdir()} == names | {"tokenizer.model", "tokenizer.seen"}
    assert sorted(path.name for path in (bundle / "cpp").iterdir()) == ["search.cpp", "weights.bin"]
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
    for name in (program.removesuffix("/") for program in PROGRAMS):
        exact = parity[name]["float32"]
        kind = "" if name == "model.pt2" else "greedy_"
        assert exact[f"{kind}equal"] + exact[f"{kind}tied"] == parity["sentences"] == 40
        assert exact["target_tokens_per_second"] > 0
        assert parity[name]["size_bytes"] > 1000
    for name in ("model.ts", "cpp"):
        assert parity[name]["float32"]["equal"] + parity[name]["float32"]["tied"] == 40
    assert parity["model.ts"]["bfloat16"]["sentences"] == 40
    assert "share_equal" in parity["ctranslate2-int8"]["int8"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_python_programs_of_the_readme(bundle: Path, beam: list[str], greedy: list[str], name: str) -> None:
    program = python_program(bundle, name)
    if name == "cpp/":
        compile_in(bundle, "search.so")
    if name in ("onnx/", "cpp/"):
        program += "assert 'torch' not in __import__('sys').modules\n"
    # The length penalties of CTranslate2 and Transformers, and the end of their beam searches, are others.
    program = program.replace('{"beam_size": card["beam_size"]', '{"beam_size": 1')
    program = program.replace("**batch, ", "**batch, num_beams=1, ")
    expected = beam if name in ("model.ts", "model.pt2", "cpp/") else greedy
    assert outputs(program, SENTENCES, bundle) == expected


def compile_in(bundle: Path, output: str) -> None:
    """Run the compiler as the README says, which has each command once."""
    [command] = re.findall(rf"`(g\+\+ [^`]* -o {output})`", (bundle / "README.md").read_text())
    done = subprocess.run(command.split(), cwd=bundle / "cpp", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_program_in_cpp_without_a_library(bundle: Path, beam: list[str]) -> None:
    folder = bundle / "cpp"
    [program] = blocks(bundle, "cpp/", "cpp")
    (folder / "translate.cpp").write_text(program)
    compile_in(bundle, "translate")
    card = json.loads((bundle / "card.json").read_text())
    tokenizer = Tokenizer((bundle / "tokenizer.model").read_bytes())
    lines = [" ".join(map(str, [*ids.tolist(), card["eos_id"]])) for ids in tokenizer.encode(SENTENCES)]

    def run(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(folder / "translate", cwd=folder, input=text, capture_output=True, text=True, check=False)

    done = run("".join(line + "\n" for line in lines))
    assert done.returncode == 0, done.stderr
    answers = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert all(answer[-1] == card["eos_id"] for answer in answers)
    assert tokenizer.decode([answer[:-1] for answer in answers]) == beam
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


def build_with_libtorch(folder: Path, program: str) -> Path:
    """Build a README's program, with tests/export/cpp, in a folder. Returns the executable."""
    assert shutil.which("cmake"), "no cmake here: apt-get install cmake g++"
    (folder / "readme.cpp").write_text(program)
    build = folder / "build"
    torch_folder = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    with_readme = f"-DREADME_PROGRAM={folder / 'readme.cpp'}"
    for command in (
        ["cmake", "-S", HERE / "cpp", "-B", build, "-DCMAKE_BUILD_TYPE=Release", torch_folder, with_readme],
        ["cmake", "--build", build],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "readme"


def test_the_compiled_search_in_python_and_cpp(bundle: Path, beam: list[str], tmp_path: Path) -> None:
    _, program = blocks(bundle, "model.pt2", "python")
    shutil.copy(bundle / "model.pt2", tmp_path)
    done = subprocess.run([sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    search = torch._inductor.aoti_load_package(str(tmp_path / "compiled.pt2"))
    card = json.loads((bundle / "card.json").read_text())
    tokenizer = Tokenizer((bundle / "tokenizer.model").read_bytes())
    sources = [[*ids.tolist(), card["eos_id"]] for ids in tokenizer.encode(SENTENCES)]
    longest = max(map(len, sources))
    source = torch.tensor([row + [0] * (longest - len(row)) for row in sources])
    tokens, lengths, _, _ = search(source, source > 0)
    found = [row[: length - 1] for row, length in zip(tokens[:, 0].tolist(), lengths[:, 0].tolist(), strict=True)]
    assert tokenizer.decode(found) == beam
    for wrong, mask in ((source + 60, source > 0), (source - 60, source > 0), (source, source < 0)):
        with pytest.raises(RuntimeError):
            search(wrong, mask)
    [program] = blocks(bundle, "model.pt2", "cpp")
    text = "".join(" ".join(map(str, row)) + "\n" for row in sources)
    ran = subprocess.run(
        build_with_libtorch(tmp_path, program), cwd=tmp_path, input=text, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [" ".join(map(str, [*row, card["eos_id"]])) for row in found]


def test_the_program_in_cpp_with_libtorch(bundle: Path, tmp_path: Path) -> None:
    """It prints the tokens that Python finds for the ids in it."""
    [program] = blocks(bundle, "model.ts", "cpp")
    done = subprocess.run(build_with_libtorch(tmp_path, program), cwd=bundle, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "CPULongType" in done.stdout
    [ids] = re.findall(r"torch::tensor\(\{(.*?)\}", program)
    card = json.loads((bundle / "card.json").read_text())
    settings = card["beam_size"], card["length_penalty"], card["max_extra_tokens"], 1, card["stop_rule"]
    source = torch.tensor([[int(one) for one in ids.split(",")]])
    tokens = torch.jit.load(bundle / "model.ts").beam(source, None, *settings)[0].flatten().tolist()
    assert [int(one) for line in re.findall(r"^[ \d]+$", done.stdout, re.MULTILINE) for one in line.split()] == tokens


def alone_with(*distributions: str) -> set[str]:
    """The importable names of all other distributions than these, and than those that they need."""
    needed, todo = set(), list(distributions)
    while todo:
        if (name := canonicalize_name(todo.pop())) not in needed:
            needed.add(name)
            asked = map(Requirement, requires(name) or ())
            todo += [one.name for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    owners = packages_distributions().items()
    return {name for name, of in owners if not needed & set(map(canonicalize_name, of))}


def test_a_consumer_in_a_fresh_environment(bundle: Path, beam: list[str]) -> None:
    """Only torch and sentencepiece are needed: what they do not need cannot be imported."""
    missing = alone_with("torch", "sentencepiece")
    assert {"lightning", "numpy", "yaml"} <= missing
    program = f"import sys\nsys.modules |= dict.fromkeys({missing})\n{python_program(bundle, 'model.ts')}"
    assert outputs(program, SENTENCES, bundle) == beam
