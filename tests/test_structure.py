"""The architecture that docs/architecture.md describes: packages, layers, no circles, functions of a readable size."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import yaml

from tests.conftest import ROOT

PACKAGES = {
    "data_module": {"data_module"},
    "model": {"model", "data_module.batch", "data_module.registry"},
    "pipeline": {"pipeline", "model", "data_module"},
}
"""What each package may import of the project."""
LAYERS = {
    "data_module": [
        "translation_data_module",
        "stateful_loader",
        "rank_rows",
        "batch_plan",
        "batch",
        "demo",
        "corpus",
        "tokenization",
        "settings",
        "system",
        "registry",
        "errors",
    ],
    "model": ["fast", "model", "beyond", "torch_private"],
    "pipeline": [
        "__main__",
        "commands",
        "api",
        "fit",
        "doctor",
        "training",
        "export",
        "monitoring",
        "inference",
        "checkpointing",
        "metrics",
        "ranks",
        "config",
        "runtime",
    ],
}
"""A package's layers, from the top down: a layer may import from itself and from those below it.

A layer is a folder, or a file beside the folders. The files of `model` are one layer, except for those listed.
"""
ROOT_FOLDERS = {".ci", ".github", "configs", "data_module", "docs", "model", "pipeline", "slurm", "tests"}
ROOT_FILES = {
    ".editorconfig",
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
    "setup.py",
}
LONGEST_FUNCTION = 60
MOST_PARAMETERS = 8
MOST_LATE_IMPORTS = 45
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).glob("**/*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


def imported(path: Path) -> Iterator[str]:
    """Names of imported modules, those imported inside functions and for type checking included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def layer(module: str) -> str:
    package, *rest = module.split(".")
    if package == "model":
        return rest[0] if rest and rest[0] in LAYERS["model"] else "model"
    return rest[0] if rest else package


def within(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(allowed + ".")


def circle(edges: dict[str, set[str]]) -> list[str]:
    """One circle of the graph, its first member repeated at the end; empty where there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_imports_go_down() -> None:
    for module, name in ((module_name(path), name) for path in FILES for name in imported(path)):
        package = module.split(".")[0]
        if name.split(".")[0] not in PACKAGES:
            continue
        assert any(within(name, allowed) for allowed in PACKAGES[package]), f"{module} imports {name}"
        if within(name, package) and package in (name, module):
            continue
        if within(name, package):
            order = LAYERS[package]
            assert order.index(layer(module)) <= order.index(layer(name)), f"{module} imports {name}, which is above it"


def test_only_the_lightning_module_knows_lightning() -> None:
    for path in FILES:
        if module_name(path).split(".")[0] == "model" and path.name != "training_module.py":
            assert not any(within(name, "lightning") for name in imported(path)), path


def test_only_the_backend_and_what_decodes_name_a_fast_path() -> None:
    """Others get it as a function."""
    may_name = ("model.fast", "pipeline.runtime.backend_choice", "pipeline.inference", "pipeline.export")
    for path in FILES:
        module = module_name(path)
        named = {name for name in imported(path) if within(name, "model.fast")}
        assert not named or any(within(module, place) for place in may_name), f"{module} imports {named}"


def test_no_circles() -> None:
    edges = {module: {name for name in imported(path) if name in MODULES} for module, path in MODULES.items()}
    assert not circle(edges)


def test_a_circle_inside_a_function_is_found(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("from pipeline.config import recipe\n")
    other.write_text("def load():\n    from pipeline.training.start import fit\n    return fit\n")
    edges = {"pipeline.training.start": set(imported(one)), "pipeline.config.recipe": set(imported(other))}
    assert len(circle(edges)) == 3


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods but for those of autograd functions, whose signatures are given."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            given = any("autograd.Function" in ast.unparse(base) for base in node.bases)
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and not given:
                    yield f"{node.name}.{member.name}", member
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node


def test_functions_have_a_readable_size() -> None:
    for name, function in ((f"{path}: {name}", found) for path in FILES for name, found in functions(path)):
        lines = (function.end_lineno or 0) - function.lineno + 1
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        parameters = [one for one in arguments if one.arg not in ("self", "cls")]
        assert lines <= LONGEST_FUNCTION, f"{name} has {lines} lines"
        assert len(parameters) <= MOST_PARAMETERS, f"{name} has {len(parameters)} parameters"


def late_imports(path: Path) -> dict[int, bool]:
    """Lines of imports inside functions; whether a comment on the line or above its block gives the reason."""
    text = path.read_text(encoding="utf-8")
    lines, found, explained = text.splitlines(), {}, set()
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    above, own = lines[node.lineno - 2], lines[node.lineno - 1 : node.end_lineno]
                    is_explained = above.lstrip().startswith("#") or "#" in "".join(own)
                    is_explained |= node.lineno - 1 in explained
                    explained |= {node.end_lineno} if is_explained else set()
                    found[node.lineno] = is_explained
    return found


def test_imports_inside_functions_are_few_and_have_a_reason(tmp_path: Path) -> None:
    """A command's first half refuses mistakes before torch is there; then it imports a module that imports the rest."""
    found = {path: late_imports(path) for path in FILES}
    assert sum(map(len, found.values())) <= MOST_LATE_IMPORTS
    without = [
        f"{path}:{line}" for path, lines in found.items() for line, has_reason in lines.items() if not has_reason
    ]
    assert without == []
    example = tmp_path / "example.py"
    example.write_text("def f():\n    import a\n\n    # why\n    from b import (\n        c,\n    )\n    import d\n")
    assert late_imports(example) == {2: False, 5: True, 8: True}


def test_git_has_the_project_and_nothing_that_runs_leave() -> None:
    def listed(*options: str) -> list[str]:
        command = ["git", "-C", str(ROOT), "ls-files", *options]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    files = listed()
    assert {name.partition("/")[0] for name in files if "/" in name} == ROOT_FOLDERS
    assert {name for name in files if "/" not in name} == ROOT_FILES
    assert not listed("--cached", "--ignored", "--exclude-standard")


def test_the_workflow_runs_actions_by_commit_and_with_few_rights() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yaml").read_text(encoding="utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(re.fullmatch(r"\S+@[0-9a-f]{40}", step["uses"]) for step in steps if "uses" in step)
    assert workflow["permissions"] == {"contents": "read"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert all("==" in package for package in project["build-system"]["requires"])


def without_encoding(path: Path) -> Iterator[str]:
    """Calls that open a text file or a text pipe in the encoding of the locale."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        function = ast.unparse(node.func)
        modes = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
        # Path.open has nothing but a mode; os.open and others have a path.
        opens = function == "open" or (function.endswith(".open") and len(modes) == len(node.args))
        texts = function.startswith("subprocess.") and any(keyword.arg == "text" for keyword in node.keywords)
        if function.endswith((".read_text", ".write_text")) or texts or (opens and "b" not in "".join(modes)):
            yield f"{path}:{node.lineno}: {function}"


def test_text_files_and_pipes_have_an_encoding(tmp_path: Path) -> None:
    assert [call for path in FILES for call in without_encoding(path)] == []
    calls = ["p.open()", 'p.open("w")', "open(p)", "p.read_text()", "p.write_text(p)", "subprocess.run(p, text=True)"]
    binary = ['p.open("rb")', 'open(p, "wb")', "os.open(p, 0)", "gzip.open(p)", 'p.open("w", encoding="utf-8")']
    found = tmp_path / "found.py"
    found.write_text("\n".join(calls + binary), encoding="utf-8")
    assert len(list(without_encoding(found))) == len(calls)


def test_messages_go_through_the_functions_that_escape_control_characters() -> None:
    """Of the exceptions, the console prints them; what Lightning's launcher prints are numbers."""
    exceptions = {"pipeline/runtime/console.py", "pipeline/runtime/lightning_private.py"}
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        if path.is_relative_to(ROOT / "pipeline") and str(path.relative_to(ROOT)) not in exceptions
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stderr.write")
        if "sys.stderr" in ast.unparse(node)
    ]
    assert calls == []


READS_OWN_FILES = {
    "data_module": {"demo/corpus.py", "system/files.py"},
    "pipeline": {
        *(f"commands/{name}.py" for name in ("demo", "synthesis")),
        "config/recipe_files.py",
        *(f"export/{name}.py" for name in ("card", "cpp_program")),
        "inference/shards.py",
        *(f"runtime/{name}.py" for name in ("compiled_code", "launch", "memory")),
    },
}
"""Files that read whole files of the program or the system; what a user or a stranger gives goes through `read_whole`,
which refuses pipes, devices and files without an end."""


def test_files_of_users_are_read_by_the_one_function() -> None:
    found = {
        package: {
            str(path.relative_to(ROOT / package))
            for path in FILES
            if path.is_relative_to(ROOT / package)
            and re.search(r"\.read_(text|bytes)\(", path.read_text(encoding="utf-8"))
        }
        for package in READS_OWN_FILES
    }
    assert found == READS_OWN_FILES
