"""The pages are true: commands parse, links lead somewhere, Python runs, generated parts are up to date."""

import contextlib
import copy
import io
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml

from pipeline.metrics import metrics
from tests.conftest import ROOT
from tests.docs import command_lines, generate, pages

PAGES = dict(zip(pages.NAMES, map(pages.read, pages.PAGES), strict=True))
README_LINES = 130
PYTHON_PAGES = [
    name
    for name, text in PAGES.items()
    if "```python" in text and name not in ("docs/extending.md", "docs/one_step.md")
]


def unparsed(text: str) -> list[str]:
    """Commands of the page's sh blocks, and of code spans that begin with `python`, that are wrong."""
    shell = [block.text for block in pages.blocks(text) if block.language == "sh"]
    spans = re.findall(r"`((?:\.venv/bin/)?(?:python3?|pip|make|sbatch|srun) [^`…<]+)`", pages.prose(text))
    # A span is part of a sentence: upper-case words stand for what the reader fills in.
    whole = [span for span in spans if not re.search(r" \.\.\.|\b[A-Z]{4,}\b$", span)]
    commands = [command for one in (*shell, *whole) for command in command_lines.commands(one)]
    found = [(command, command_lines.mistake(command)) for command in commands]
    return [f"{' '.join(command)}: {wrong}" for command, wrong in found if wrong]


def dead_links(page: Path, text: str) -> list[str]:
    """Targets of links that are not there, or that have no such heading."""
    dead = []
    for target in pages.links(text):
        name, _, fragment = target.partition("#")
        place = (page.parent / name).resolve() if name else page
        if not place.exists() or (fragment and fragment not in pages.anchors(pages.read(place))):
            dead.append(target)
    return dead


def missing_files(text: str) -> list[str]:
    """Paths of the project in code spans that are not there."""
    spans = re.findall(r"`((?:data_module|model|pipeline|tests|slurm|configs|docs)/[\w./-]*)`", pages.prose(text))
    return [span for span in spans if not (ROOT / span).exists() and not re.search(r"/(mine|a|b|NAME)\.", span)]


def unknown_messages(text: str, sources: str) -> list[str]:
    """Messages in the first column of the page's tables, of which a part stands in no source."""
    missing = []
    for message in re.findall(r"^\| `([^`]+)`", text, re.MULTILINE):
        # An f-string is in pieces between its names and numbers; the way out may be a piece of its own.
        parts = [part.strip(" ;:?") for part in re.split("…|; ", message)]
        missing += [f"{message}: '{part}'" for part in parts if part.strip(".,()'") and part not in sources]
    return missing


@pytest.mark.parametrize("name", PAGES)
def test_commands_parse_and_links_and_files_are_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert not unparsed(PAGES[name])
    assert not dead_links(ROOT / name, PAGES[name])
    assert not missing_files(PAGES[name])


@pytest.mark.parametrize(
    "path", [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "slurm").iterdir()], ids=lambda path: path.name
)
def test_commands_in_comments_parse(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of recipes and job scripts, without their optional parts."""
    monkeypatch.chdir(ROOT)
    lines = re.findall(r"^#   (.*\n)", path.read_text(encoding="utf-8"), re.MULTILINE)
    text = re.sub(r" \[.*?\]", "", "".join(lines)).replace("RECIPE", "configs/your_text.yaml")
    assert not unparsed(f"```sh\n{text}```\n")


@pytest.mark.parametrize("name", PAGES)
def test_blocks_have_a_language(name: str) -> None:
    """So that no command stands in a block that is not looked at."""
    for block in pages.blocks(PAGES[name]):
        assert block.language in pages.LANGUAGES, f"{name}:{block.line}"
        if block.language == "yaml":
            yaml.safe_load(block.text)
    assert not re.search(r"\n\n {4,}\S", pages.prose(PAGES[name])), "a block without a fence"


@pytest.mark.parametrize("name", PYTHON_PAGES)
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # from Lightning, with a Trainer of the user's own
def test_python_runs(name: str, trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run one after another, as one program, in a folder with a trained run."""
    shutil.copytree(trained_run, tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    program = "\n".join(block.text for block in pages.blocks(PAGES[name]) if block.language == "python")
    if "from rdkit import" in program:  # no dependency: the program's own parts are defined and registered without it
        monkeypatch.setitem(sys.modules, "rdkit", mock.Mock(__version__="2026.9.1"))
    with mock.patch.dict(metrics.METRICS):
        exec(compile(program, name, "exec"), {"__name__": "page"})


EXTENSIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGES["docs/extending.md"], re.MULTILINE | re.DOTALL))
REGISTRIES = ["pipeline.metrics.metrics.METRICS", "data_module.corpus.readers.READERS"]
REGISTRIES += [f"model.optimization.{name}" for name in ("SCHEDULES", "OPTIMIZERS")]
REGISTRIES += [f"model.layers.{name}" for name in ("NORMS", "ACTIVATIONS", "SELF_ATTENTIONS")]


@pytest.mark.parametrize("section", EXTENSIONS)
def test_an_extension_runs(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a section of docs/extending.md run as one program, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metrics, "METRICS", copy.copy(metrics.METRICS))
    found = [block.text for block in pages.blocks(EXTENSIONS[section]) if block.language == "python"]
    assert found, "a section without an example"
    with contextlib.ExitStack() as stack:
        for registry in REGISTRIES:  # What an example registers is gone after it.
            stack.enter_context(mock.patch.dict(registry))
        exec(compile("\n".join(found), section, "exec"), {"__name__": "example"})


@pytest.mark.filterwarnings("ignore:.*LeafSpec")
def test_one_step_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of docs/one_step.md are one program, and after each stands what it prints."""
    monkeypatch.chdir(tmp_path)
    code, shown = (
        [block.text for block in pages.blocks(PAGES["docs/one_step.md"]) if block.language == language]
        for language in ("python", "text")
    )
    names: dict[str, object] = {"__name__": "page"}
    for program, output in zip(code, shown, strict=True):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program, "docs/one_step.md", "exec"), names)
        assert printed.getvalue() == output


@pytest.mark.parametrize("name", [name for name, text in PAGES.items() if "<!-- generated: " in text])
def test_generated_parts_are_up_to_date(name: str) -> None:
    assert generate.updated(PAGES[name]) == PAGES[name], f"{name} is out of date: run python -m tests.docs.generate"


def test_the_messages_are_those_of_the_sources() -> None:
    assert not unknown_messages(PAGES["docs/troubleshooting.md"], command_lines.quoted_strings())


def unknown_tags(text: str, sources: str) -> list[str]:
    """First parts of TensorBoard tags, such as `train/`, with which no logged tag begins."""
    return [tag for tag in re.findall(r"`([a-z_]+/)`", pages.prose(text)) if not re.search(f"^{tag}", sources, re.M)]


def test_tags_are_those_that_are_logged() -> None:
    found = unknown_tags(PAGES["docs/monitoring.md"], command_lines.quoted_strings(("model", "pipeline")))
    assert set(found) <= {"tensorboard/"}


def test_readme_is_short_and_names_every_page() -> None:
    assert len(PAGES["README.md"].splitlines()) <= README_LINES
    for page in (ROOT / "docs").glob("*.md"):
        assert f"](docs/{page.name})" in PAGES["README.md"], page.name


def test_the_table_of_results_has_four_columns_and_no_sentence() -> None:
    section = PAGES["README.md"].split("## Results\n")[1].split("\n## ")[0]
    rows = [row.strip("|").split("|") for row in re.findall(r"^\|.*\|$", section, re.MULTILINE)]
    assert [name.strip() for name in rows[0]] == ["task", "ours", "published or peer", "command"]
    assert {len(row) for row in rows} == {4}
    assert not [cell for row in rows for cell in row if re.search(r"\.( [A-Z]|\s*$)", cell)]


def test_pages_begin_with_what_they_answer() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        heading, blank, answer = pages.read(page).splitlines()[:3]
        assert (heading[:2], blank) == ("# ", ""), page.name
        assert re.match(r"(How|What|Which|Where) ", answer), page.name


BROKEN_COMMANDS = {
    ".venv/bin/python -m pipeline fit --confg configs/demo.yaml": "--config",
    ".venv/bin/python -m pipeline fit --config configs/demo.yaml --training.warmup 5": "warmup_steps",
    "echo a | python -m pipeline transalte runs/mine": "not a command",
    "python -m tests.gpu.harvest --outptu x": "--outptu",
    "python -m data_module.demo_corpus data/demo": "no module",
    "env/bin/attention-pipeline recipe cpy your_text": "cpy",
    "sbatch --node 4 slurm/train.sbatch configs/demo.yaml": "--node",
    "sbatch slurm/trian.sbatch configs/demo.yaml": "trian",
    "sbatch slurm/evaluate.sbatch runs/mine a b --papr": "--papr",
    "srun --nodes 2 python -m pipeline doctor --confg x": "--confg",
    "slurm/submit.sh configs/demo.yaml --network.depth 3": "depth",
    "make dmo": "dmo",
    "pip install -e '.[dataset]'": "dataset",
    "pytest tests/modl": "tests/modl",
    "tensorbord --logdir runs": "no such program",
    "cd x && LAST=2 make \\\n  tset": "tset",
}


@pytest.mark.parametrize("command", BROKEN_COMMANDS)
def test_a_broken_command_is_found(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    [found] = unparsed(f"# A page\n\n```sh\n{command}\n```\n")
    assert BROKEN_COMMANDS[command] in found


def test_a_broken_page_is_found() -> None:
    page = ROOT / "docs" / "data.md"
    assert dead_links(page, "[one](dta.md) [two](#no-such) [three](data.md#batches) ![four](none.png)") == [
        "dta.md",
        "#no-such",
        "none.png",
    ]
    assert missing_files("`model/noam.py` and `model/loss.py`") == ["model/noam.py"]
    assert unknown_messages("| `…: no such fille; …` | x |", command_lines.quoted_strings())
    assert unknown_tags("`trian/`: loss", command_lines.quoted_strings()) == ["trian/"]
    recipes = PAGES["docs/recipes.md"]
    for row in (r"\| `training.warmup_steps` ", r"\| \[`configs/demo.yaml`\]"):
        broken, found = re.subn(f"(?m)^{row}.*\n", "", recipes)
        assert found == 1
        assert generate.updated(broken) == recipes
