"""The wheel, built from the sources and installed in an environment of its own, outside the clone."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from data_module.demo.corpus import main as write_demo_text
from tests.conftest import ROOT
from tests.pipeline.test_configs import CONFIGS, TRACKED

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, which finds the other packages in that of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "mine*")
    for name in ("data_module", "model", "pipeline", "configs"):
        shutil.copytree(ROOT / name, folder / "sources" / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "sources")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, folder / "sources"]
    subprocess.run(wheel, check=True, cwd=folder)
    shutil.rmtree(folder / "sources")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    [built] = folder.glob("attention_pipeline-*.whl")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", built], check=True, cwd=folder)
    [site] = (folder / "env").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "env"


def run(environment: Path, *words: object, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run `attention-pipeline ...` outside the clone."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [environment / "bin" / "attention-pipeline", *map(str, words)],
        cwd=cwd,
        env={**variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


CODE = """
import data_module.errors, pipeline
names = [getattr(pipeline, name) for name in pipeline.__all__]
print(pipeline.__file__)
print(data_module.errors.install("languages"))
try:
    pipeline.load("nowhere")
except pipeline.InputError as error:
    print(error)
"""


def test_the_packages_are_those_of_the_wheel(environment: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [environment / "bin" / "python", "-c", CODE], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    place, hint, said = done.stdout.splitlines()
    packed = Path(place).parents[1]
    assert packed.is_relative_to(environment)
    assert (packed / "pipeline" / "py.typed").is_file()
    assert hint.startswith(f"{environment}/bin/python -m pip install 'mecab-python3")
    assert "ipadic" in hint
    assert "sacremoses" not in hint
    assert said.startswith("nowhere: there is no such checkpoint or run folder")
    sources = [*(ROOT / "model").rglob("*.cpp"), *(ROOT / "model").rglob("*.h")]
    templates = [*(ROOT / "pipeline" / "export" / "templates").iterdir()]
    assert (len(sources), len(templates)) == (3, 2)
    for path in (*sources, *templates):
        assert (packed / path.relative_to(ROOT)).is_file()


def test_recipes_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    listed = run(environment, "recipe", "list", cwd=tmp_path).stdout.splitlines()
    names = {line.split()[0] for line in listed}
    assert names >= {"demo", *(name.removesuffix(".yaml") for name in TRACKED if name.endswith(".yaml"))}
    done = run(environment, "recipe", "copy", "demo", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "demo.yaml\nrecipe.schema.json\n")
    assert (tmp_path / "demo.yaml").read_bytes() == (CONFIGS / "demo.yaml").read_bytes()


def test_doctor_and_prepare_from_the_wheel(environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["corpus", str(tmp_path / "data" / "demo")])
    write_demo_text()
    run(environment, "recipe", "copy", "demo", "my.yaml", cwd=tmp_path)
    # Fewer sentences than the demo's: the test is about the wheel.
    for side in ("en", "de"):
        path = tmp_path / "data" / "demo" / f"train.{side}"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:2000]))
    overrides = ["--config", "my.yaml", "--corpus.vocabulary_size", 400]
    checked = run(environment, "doctor", *overrides, "--trainer.accelerator", "cpu", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    prepared = run(environment, "prepare", *overrides, cwd=tmp_path)
    assert prepared.returncode == 0, prepared.stderr
    assert json.loads(prepared.stdout)["folder"] == "data/demo/corpus"
    assert (tmp_path / "data" / "demo" / "corpus" / "manifest.json").is_file()


def test_usage_and_hints_name_the_program(environment: Path, tmp_path: Path) -> None:
    assert run(environment, cwd=tmp_path).stdout.startswith("usage: attention-pipeline <command>")
    assert run(environment, "fit", "--help", cwd=tmp_path).stdout.startswith("usage: attention-pipeline fit ")
    missing = run(environment, "fit", "--config", "no.yaml", cwd=tmp_path)
    assert (missing.returncode, missing.stderr) == (
        2,
        "error: no.yaml: there is no such recipe; `attention-pipeline recipe list` lists the shipped ones\n",
    )
