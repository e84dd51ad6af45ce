"""Checks the command lines of a page with the project's own parsers, scripts and targets.

`mistake` returns what is wrong with one command, or None.
"""

import argparse
import ast
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from data_module.errors import InputError
from pipeline.__main__ import parse
from pipeline.config.recipe import load_recipe
from pipeline.config.settings import validate_trainer_keys
from tests.benchmark import __main__ as benchmark
from tests.conftest import ROOT

STANDS_FOR = {f"configs/{name}.yaml": "configs/your_text.yaml" for name in ("mine", "a", "b", "c")}
STANDS_FOR["my.yaml"] = "configs/your_text.yaml"
"""Recipes that a page asks the reader to make, and the shipped one to copy."""
SLURM_OPTIONS = {
    "--account", "--array", "--cpus-per-task", "--gpus-per-node", "--mem", "--nodes", "--ntasks", "--ntasks-per-node",
    "--partition", "--time",
}  # fmt: skip
SHELL = {
    "cd", "cp", "cut", "do", "done", "echo", "export", "for", "grep", "gzip", "head", "mkdir", "paste", "perl",
    "sed", "shuf", "sort", "ssh", "tail", "zcat",
}  # fmt: skip
"""Programs whose arguments are not looked at."""


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a block: pipes and lists split, comments, redirections and assignments left out."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|;<>&")
        lexer.whitespace_split = True
        command: list[str] = []
        skip = False
        for word in lexer:
            if word in ("|", ";", "&&", "&"):
                if command:
                    yield command
                command = []
            elif word in ("<", ">", ">>"):
                skip = True
            elif skip:
                skip = False
            elif command or not re.fullmatch(r"[A-Z_]+=.*", word):
                command.append(word)
        if command:
            yield command


def mistake(command: list[str]) -> str | None:
    """What is wrong with a command, or None."""
    program, *words = command
    name = Path(program).name
    check = _CHECKS.get(program) or _CHECKS.get(name)
    if check is None:
        return None if program in SHELL else f"{program}: no such program is known to the tests"
    try:
        return check(words)
    except SystemExit as ended:  # --help
        return None if not ended.code else f"{program} ends with {ended.code}"
    except InputError as error:
        return str(error)


def _python(words: list[str]) -> str | None:
    if words[0] == "-m":
        module, *words = words[1:]
        if module in ("venv", "pip", "pytest"):
            return mistake([module, *words]) if module != "venv" else None
        if module == "pipeline":
            return _verb(words)
        if module == "tests.benchmark" and words:
            return _recipe(benchmark.parse(words), training=False)
        return _module(module, words)
    if words[0] == "reactions.py":  # of docs/results.md
        return _verb(words[1:]) if words[1:] != ["align"] else None
    return None if (ROOT / words[0]).is_file() else f"there is no {words[0]}"


def _module(name: str, words: list[str]) -> str | None:
    """A module of the project that is run: each option has to stand in its source."""
    path = ROOT.joinpath(*name.split("."))
    file = next((one for one in (path.with_suffix(".py"), path / "__main__.py") if one.is_file()), None)
    if file is None:
        return f"there is no module {name}"
    source = file.read_text(encoding="utf-8")
    for option in (word.partition("=")[0] for word in words if re.match(r"--[a-z-]+(=|$)", word)):
        if f'"{option}"' not in source:
            return f"{name} has no {option}"
    return None


def _verb(words: list[str]) -> str | None:
    if not words or words[0].startswith("<"):
        return None
    _, arguments = parse(words[0], words[1:])
    return _recipe(arguments, training=words[0] in ("fit", "doctor"))


def _recipe(arguments: argparse.Namespace, training: bool) -> str | None:
    configs = getattr(arguments, "config", None)
    if not configs:
        return f"{arguments.overrides[0]}: unknown without a recipe" if arguments.overrides else None
    paths = [ROOT / STANDS_FOR.get(str(path), str(path)) for path in configs]
    recipe = load_recipe(paths, arguments.overrides)
    if training:
        validate_trainer_keys(recipe.trainer)
    return None


def _slurm(words: list[str]) -> Iterator[str]:
    """Words after the options of sbatch or srun; raises InputError for an option that the pages should not need."""
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            yield word
            yield from rest
            return
        option, equals, _ = word.partition("=")
        if option not in SLURM_OPTIONS:
            raise InputError(f"{option} is not among the options of SLURM that pages use")
        if not equals:
            next(rest)


def _sbatch(words: list[str]) -> str | None:
    script, *rest = _slurm(words)
    if not (ROOT / script).is_file():
        return f"there is no {script}"
    name = Path(script).stem
    if name in ("train", "prepare"):
        return _verb(["fit" if name == "train" else name, "--config", *rest])
    if name == "sweep":
        return next((found for one in rest if "*" not in one and (found := _verb(["fit", "--config", one]))), None)
    if name == "evaluate":
        run, *more = rest
        if more and not more[0].startswith("-"):
            more = ["--source", more[0], "--reference", *more[1:]]
        return _verb(["evaluate", run, *more])
    if name in ("export", "translate", "synthesize"):
        return _verb([name, *rest])
    return None if name == "tensorboard" and rest[1:] in ([], ["--bind_all"]) else f"{script} takes other arguments"


def _pip(words: list[str]) -> str | None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        for extra in re.findall(r"\[([^\]]+)\]", word):
            if unknown := set(extra.split(",")) - set(extras):
                return f"pyproject.toml has no extra {', '.join(unknown)}"
    if "-c" in words and not (ROOT / (file := words[words.index("-c") + 1])).is_file() and file != "other.txt":
        return f"there is no {file}"
    return None


def _make(words: list[str]) -> str | None:
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    unknown = [word for word in words if "=" not in word and word not in targets]
    return f"Makefile has no target {unknown[0]}" if unknown else None


def _files(words: list[str], begin: str = "") -> str | None:
    """Words that are no option, and that begin with `begin`, name a file of the project."""
    paths = [word.partition("::")[0] for word in words if word.startswith(begin) and not word.startswith("-")]
    missing = [path for path in paths if not (ROOT / path).exists()]
    return f"there is no {missing[0]}" if missing else None


def _one_of(*known: str) -> Callable[[list[str]], str | None]:
    return lambda words: None if words and words[0] in known else f"{' '.join(words[:1])}: not one of {known}"


_CHECKS: dict[str, Callable[[list[str]], str | None]] = {
    "python": _python,
    "python3": _python,
    "attention-pipeline": _verb,
    "sbatch": _sbatch,
    "torchrun": lambda words: mistake(["python", *words[words.index("-m") :]]),
    "srun": lambda words: mistake(list(_slurm(words))),
    "slurm/submit.sh": lambda words: _verb(["fit", "--config", *words]),
    "slurm/synthesize.sh": lambda words: _verb(["synthesize", words[0], "--config", words[1], "--text", *words[2:]]),
    "pip": _pip,
    "make": _make,
    "pytest": lambda words: _files(words, "tests/"),
    "bash": _files,
    "tensorboard": _one_of("--logdir"),
    "git": _one_of("clone", "tag", "push", "commit", "checkout", "archive"),
    "docker": _one_of("build", "save"),
    "apptainer": _one_of("build"),
    "pre-commit": _one_of("install", "run"),
    "sacrebleu": _one_of("-t"),
}


def quoted_strings(folders: tuple[str, ...] = ("data_module", "model", "pipeline", "slurm")) -> str:
    """All text constants of the sources, f-strings in their constant parts, one a line."""
    found: list[str] = []
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
        found += [path.read_text(encoding="utf-8") for path in (ROOT / folder).glob("*.s*") if path.is_file()]
    return "\n".join(found)
