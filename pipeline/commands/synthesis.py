"""What `synthesize` does: it checks the text, derives recipes from the given one, and orders the commands to run."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from data_module.corpus.checks import given_tokenizer, tokenizer_file
from data_module.corpus.manifest import MANIFEST_NAME, changes, is_corpus, read_manifest
from data_module.corpus.pairs import fingerprint, open_reader, read_pairs
from data_module.errors import InputError, first_of
from data_module.settings import BpeDropout, CorpusSettings, TextSource
from data_module.system.files import PlainValues, atomic_file, existing_parent, read_json, read_whole, write_error
from data_module.system.text_files import open_file
from data_module.tokenization.tokenizer import TOKENIZER_NAME, clean_lines
from pipeline.commands.stages import Stage, run_stages
from pipeline.config.recipe import Recipe, stored_settings
from pipeline.doctor.recipe_checks import Report, check_recipe
from pipeline.inference.loading import chosen_file, load_file, require_direction
from pipeline.runtime.console import report

TAG = "<bt>"
"""The prefix of synthetic pairs."""
PLAN = "plan.json"
"""Name of the file with the options, recipe and texts that a folder was begun with."""
_MOST_UNKNOWN = 0.1
"""Share of a text's characters that the training text may lack on that side."""
_CHUNK_BYTES = 2**20
_VALIDATION_INTERVAL = 1000
"""Steps between validations, without `trainer.val_check_interval`."""


class SynthesisPlan:
    """Recipes, and the stages in their order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipes: dict[Path, Recipe] = {}
        self.stages: list[Stage] = []
        self.notes: list[str] = []
        """Decisions that the user should know about."""

    def add(
        self,
        name: str,
        words: Sequence[object],
        reads: Sequence[Path],
        writes: Sequence[Path],
        printed: Path | None = None,
    ) -> None:
        """Add a stage; see `Stage`."""
        written = [*writes, *([printed] if printed else [])]
        self.stages.append(Stage(name, tuple(map(str, words)), tuple(reads), tuple(written), printed))

    def train(self, name: str, recipe: Recipe) -> Path:
        """Add the stages that prepare the corpus of a recipe, train on it and average; return the average's path."""
        corpus, run = self.corpus(name), self.folder / "runs" / name
        path = self.folder / "recipes" / f"{name}.yaml"
        own = replace(recipe, name=name, corpus=replace(recipe.corpus, folder=str(corpus)))
        self.recipes[path] = replace(own, run=replace(own.run, folder=str(run)))
        option, count = averaged(recipe)
        average = run / f"average-{option}-{count}.ckpt"
        manifest, config = corpus / MANIFEST_NAME, run / "config.yaml"
        self.add(f"prepare-{name}", ["prepare", "--config", path], [path], [manifest])
        self.add(f"fit-{name}", ["fit", "--config", path], [path, manifest], [config])
        self.add(f"average-{name}", ["average", run, f"--{option}", count], [config], [average])
        return average

    def translate(self, name: str, model: Path, text: str | Path, search: Sequence[object]) -> Path:
        """Add the stage that translates a text; return the path of the translations."""
        output = self.folder / "texts" / name
        words = ["translate", model, "--source", text, *search, "--output", output]
        self.add(f"translate-{name}", words, [model, Path(text)], [output])
        return output

    def evaluate(self, name: str, model: Path, versus: Path, validation: Path | None) -> None:
        """Add the stage that compares two models on `corpus.test`, or on the validation text of a corpus."""
        output = self.folder / "evaluation" / f"{name}.txt"
        words = ["evaluate", model, "--versus", versus]
        if validation is not None:
            source, reference = (validation / f"validation.{side}.txt" for side in ("source", "target"))
            words += ["--source", source, "--reference", reference]
        self.add(f"evaluate-{name}", words, [model, versus], [], output)

    def corpus(self, name: str) -> Path:
        """Return the corpus folder of a recipe."""
        return self.folder / "corpora" / name

    def write(self) -> None:
        """Write `plan.txt` and the missing recipes; a plan with more rounds contains the recipes of one with fewer.

        Raises InputError if an existing recipe differs.
        """
        texts = {
            path: yaml.safe_dump(own_values(recipe), sort_keys=False, allow_unicode=True, width=120)
            for path, recipe in self.recipes.items()
        }
        for path, text in texts.items():
            if path.exists() and read_whole(path) != text.encode():
                raise InputError(f"{path}: has changed since the plan was made; remove {self.folder} to start over")
        for stage in self.stages:
            if stage.printed is not None:  # A user may run its line of plan.txt.
                stage.printed.parent.mkdir(parents=True, exist_ok=True)
        lines = [*(f"# {note}" for note in self.notes), *(stage.line() for stage in self.stages)]
        texts[self.folder / "plan.txt"] = "\n".join([*lines, ""])
        for path, text in texts.items():
            if not path.exists() or read_whole(path) != text.encode():
                with atomic_file(path) as file:
                    file.write(text.encode())

    def print_stages(self) -> None:
        """Print name, command and recipe of each stage, separated by tabs, for people and for slurm/synthesize.sh."""
        for stage in self.stages:
            recipe = stage.words[-1] if stage.words[0] in ("prepare", "fit") else ""
            print(stage.name, stage.words[0], recipe, sep="\t")

    def run(self, only: str | None) -> int:
        """Run all stages, or only the one named `only`; print the evaluations after all; return the exit code."""
        code = run_stages(self.folder, self.stages, only)
        if not code and only is None:
            for stage in self.stages:
                if stage.words[0] == "evaluate" and stage.printed:
                    print(f"{stage.name}:\n{stage.printed.read_text(encoding='utf-8')}", end="")
        return code


def make_plan(arguments: argparse.Namespace, recipe: Recipe, folder: Path) -> SynthesisPlan:
    """Check everything, write the files of the plan to a folder and return it; an existing plan is compared instead.

    Raises InputError if the recipe, the text or the model cannot be used, or the folder has another plan.
    """
    is_back = arguments.kind == "back-translation"
    check_sources(recipe.corpus, arguments)
    model = given_model(arguments, recipe) if arguments.model else None
    names = ("kind", "text", "keep", "beam")
    asked = {**{name: getattr(arguments, name) for name in names}, "model": model, "recipe": recipe.as_dict()}
    files = [open_reader(text, recipe.corpus).files() for text in recipe.corpus.texts()]
    further = (arguments.text, model, tokenizer_file(recipe.corpus))
    files.append({str(path): path for path in further if path is not None})
    prints = [fingerprint(name, path) for found in files for name, path in found.items()]
    begun = {**json.loads(json.dumps(asked, default=str)), "source_files": prints}
    before = plan_before(folder, begun)
    counts = before["counts"] if before else check_text(recipe.corpus, arguments.text, side=int(is_back))
    plan = SynthesisPlan(folder)
    (plan_back_translation if is_back else plan_distillation)(plan, arguments, recipe, model, counts)
    if before is None:
        check_recipe(next(iter(plan.recipes.values())), None, False, Report())
        with atomic_file(folder / PLAN) as file:
            file.write(json.dumps({**begun, "counts": counts}, indent=1, ensure_ascii=False).encode())
    plan.write()
    for note in plan.notes:
        report(note)
    return plan


def plan_before(folder: Path, begun: PlainValues) -> PlainValues | None:
    """Return the plan that a folder was begun with; None if the folder is empty or does not exist.

    Raises InputError if the folder is something else, cannot be written, or was begun with another plan.
    """
    path = folder / PLAN
    if not path.is_file():
        if folder.exists() and (not folder.is_dir() or any(not one.name.startswith(".") for one in folder.iterdir())):
            raise InputError(f"{folder}: exists and is no folder of synthesize; give another --folder")
        if error := write_error(existing_parent(folder)):
            raise InputError(f"{folder}: cannot be written ({error}); give another --folder")
        return None
    before = read_json(path)
    if before is None or not {"recipe", "counts"} <= before.keys():
        raise InputError(f"{path}: is damaged; remove {folder} to start over")
    with suppress(ValueError):  # A recipe that this version cannot read is compared as it is.
        # Settings that are newer than the plan get their defaults.
        complete = stored_settings(before["recipe"], Recipe, "").as_dict()
        before["recipe"] = json.loads(json.dumps(complete, default=str))
    if differences := changes("", {name: value for name, value in before.items() if name != "counts"}, begun):
        raise InputError(
            f"{folder}: was begun with another plan: {first_of(differences)}; repeat that command, give another"
            " --folder, or remove it to start over"
        )
    return before


def check_sources(corpus: CorpusSettings, arguments: argparse.Namespace) -> None:
    """Raise InputError for text of the recipe that cannot be used in this way."""
    is_back = arguments.kind == "back-translation"
    for text in corpus.texts() if is_back else corpus.train:
        if text.tsv or text.reader or not (is_back or text.source):
            raise InputError(
                f"corpus: {text.tsv or text.path or text.dataset}: synthesize needs source and target as two files;"
                " write each side to one (of a tsv: cut -f 1, cut -f 2)"
            )
    for text in corpus.train:
        if text.prefix is not None and arguments.text:
            raise InputError(
                f"corpus.train: has the prefix {text.prefix!r}, and --text belongs to none; give a recipe of one pair"
                " of languages"
            )


def given_model(arguments: argparse.Namespace, recipe: Recipe) -> Path:
    """Return the file of `--reverse-model` or `--teacher`.

    Raises InputError if it cannot be read, translates in the other direction, or has another vocabulary than its
    corpus.
    """
    option = "--teacher" if arguments.kind == "distillation" else "--reverse-model"
    file = chosen_file(arguments.model)
    model = load_file(file, "cpu", searches=False)
    languages = [recipe.corpus.source_language, recipe.corpus.target_language]
    require_direction(option, model, *(languages if option == "--teacher" else languages[::-1]))
    corpus = Path(model.recipe["corpus"]["folder"])
    if is_corpus(corpus) and read_manifest(corpus)["tokenizer"]["sha256"] != model.tokenizer.sha256:
        raise InputError(
            f"{option} {file}: has another vocabulary than {corpus}, which was prepared again after its training; give"
            " a model of that corpus, or move the corpus away"
        )
    return file


def check_text(corpus: CorpusSettings, path: Path | None, side: int) -> dict[str, float]:
    """Read training text, test text and `--text`; return the number of pairs in an epoch, and of sentences in `--text`.

    `path` is the file of `--text`, None without that option; `side` is the side of the training text in the same
    language: 0 for the source, 1 for the target.

    Raises InputError if a text cannot be read; or `--text` is empty, of another language, or has lines of the test
    text.
    """
    known: set[str] = set()
    pairs = 0.0
    for text in corpus.train:
        for chunk in read_pairs(replace(text, prefix=None), corpus):
            pairs += len(chunk.source) * text.repeat * text.weight
            known.update("".join((chunk.source, chunk.target)[side]))
    if path is None:
        return {"pairs": pairs, "sentences": 0}
    tests = (chunk for text in corpus.test for chunk in read_pairs(replace(text, prefix=None), corpus))
    held_out = {line for chunk in tests for line in (chunk.source, chunk.target)[side] if line}
    characters: Counter[str] = Counter()
    overlap: list[int] = []
    num_lines = num_sentences = 0
    with open_file(path) as stream:
        while lines := stream.readlines(_CHUNK_BYTES):
            sentences = clean_lines(b"".join(lines).decode(errors="replace").removesuffix("\n"))
            characters.update("".join(sentences))
            overlap += [number for number, line in enumerate(sentences, num_lines + 1) if line in held_out]
            num_lines, num_sentences = num_lines + len(lines), num_sentences + sum(map(bool, sentences))
    if not num_sentences:
        raise InputError(f"--text {path}: has no sentence; give text, one sentence per line")
    unknown = sum(count for one, count in characters.items() if one not in known and one.lower() not in known)
    if unknown > _MOST_UNKNOWN * characters.total():
        raise InputError(
            f"--text {path}: {unknown / characters.total():.0%} of its characters are not in the"
            f" {('source', 'target')[side]} side of corpus.train; give text in that language"
        )
    if overlap:
        raise InputError(
            f"--text {path}: {len(overlap):,} of its lines are in corpus.test, the first is line {overlap[0]}; remove"
            " them, or the scores mean nothing (grep -vxFf TEST TEXT)"
        )
    return {"pairs": pairs, "sentences": num_sentences}


def plan_back_translation(
    plan: SynthesisPlan, arguments: argparse.Namespace, recipe: Recipe, model: Path | None, counts: dict[str, float]
) -> None:
    """Add the stages of back-translation."""
    corpus = recipe.corpus
    symbols = corpus.user_symbols if TAG in corpus.user_symbols else [*corpus.user_symbols, TAG]
    recipe = replace(recipe, corpus=replace(corpus, user_symbols=symbols))
    if (given := given_tokenizer(corpus)) is not None and TAG not in given.user_symbols:
        raise InputError(
            f"corpus.tokenizer: {corpus.tokenizer} has no {TAG}, which marks synthetic pairs; leave it out, or name one"
            f" that was learned with {TAG} in corpus.user_symbols"
        )
    forward = without = plan.train("forward", recipe)
    tokenizer = corpus.tokenizer or str(plan.corpus("forward") / TOKENIZER_NAME)
    recipe = replace(recipe, corpus=replace(recipe.corpus, tokenizer=tokenizer))
    validation = None if corpus.test else plan.corpus("forward")
    num_synthetic = arguments.keep * counts["sentences"]
    ratio = num_synthetic / counts["pairs"]
    weights = (round(ratio, 2), 1.0) if ratio > 1 else (1.0, max(0.01, round(1 / ratio, 2)))
    plan.notes.append(
        f"an epoch has {counts['pairs']:,.0f} real pairs with weight {weights[0]:g}, and about {num_synthetic:,.0f}"
        f" synthetic ones with weight {weights[1]:g} and the prefix {TAG}"
    )
    mixed = recipe
    for number in range(1, arguments.rounds + 1):
        is_given = number == 1 and model is not None
        reverse = model if is_given and model else plan.train(f"reverse{number}", exchanged(mixed))
        search = ["--sample", "--seed", number] if arguments.beam is None else ["--beam", arguments.beam]
        synthetic = plan.translate(f"round{number}.source", reverse, arguments.text, search)
        kept = [synthetic.with_name(f"round{number}.kept.{side}") for side in ("source", "target")]
        scores = synthetic.with_name(f"round{number}.scores")
        words = ["score", forward, "--source", synthetic, "--target", arguments.text]
        # A given model may have another vocabulary, with which scores cannot be compared.
        words += [] if is_given else ["--reverse", reverse]
        words += ["--keep", arguments.keep, "--kept-source", kept[0], "--kept-target", kept[1]]
        plan.add(f"score-round{number}", words, [forward, reverse, synthetic, arguments.text], kept, scores)
        real = [replace(text, weight=text.weight * weights[0]) for text in corpus.train]
        pairs = TextSource(str(kept[0]), str(kept[1]), prefix=TAG, weight=weights[1])
        mixed = replace(recipe, corpus=replace(recipe.corpus, train=[*real, pairs]))
        forward = plan.train(f"round{number}", mixed)
        plan.evaluate(f"round{number}", forward, without, validation)


def plan_distillation(
    plan: SynthesisPlan, arguments: argparse.Namespace, recipe: Recipe, model: Path | None, counts: dict[str, float]
) -> None:
    """Add the stages of distillation."""
    assert model is not None
    recipe = with_vocabulary_of(model, recipe, plan.notes)
    corpus = recipe.corpus
    direct = plan.train("direct", recipe)
    search = [] if arguments.beam is None else ["--beam", arguments.beam]
    train = []
    for number, text in enumerate(corpus.train, 1):
        prefix = [] if text.prefix is None else ["--prefix", text.prefix]
        translations = plan.translate(f"train{number}.target", model, str(text.source), [*prefix, *search])
        train.append(replace(text, target=str(translations)))
    if arguments.text:
        translations = plan.translate("text.target", model, arguments.text, search)
        train.append(TextSource(str(arguments.text), str(translations)))
    plan.notes.append(
        f"the student trains on the teacher's translations of {counts['pairs']:,.0f} training sentences and"
        f" {counts['sentences']:,} of --text"
    )
    student = plan.train("student", replace(recipe, corpus=replace(corpus, train=train)))
    validation = None if corpus.test else plan.corpus("direct")
    plan.evaluate("student", student, direct, validation)
    plan.evaluate("teacher", student, model, validation)


def with_vocabulary_of(model: Path, recipe: Recipe, notes: list[str]) -> Recipe:
    """Return the recipe with the tokenizer of a model, if the recipe names none and its settings allow this one."""
    folder = next((one for one in (model.parent, model.parent.parent) if (one / TOKENIZER_NAME).is_file()), None)
    if recipe.corpus.tokenizer is not None or folder is None:
        return recipe
    shared = replace(recipe.corpus, tokenizer=str(folder))
    try:
        given_tokenizer(shared)
    except InputError as error:
        notes.append(f"the student learns a vocabulary of its own ({error})")
        return recipe
    return replace(recipe, corpus=shared)


def exchanged(recipe: Recipe) -> Recipe:
    """Return the recipe of the opposite direction."""
    corpus = recipe.corpus
    return replace(
        recipe,
        corpus=replace(
            corpus,
            train=[exchanged_text(text) for text in corpus.train],
            validation=[exchanged_text(text) for text in corpus.validation],
            test=[exchanged_text(text) for text in corpus.test],
            source_language=corpus.target_language,
            target_language=corpus.source_language,
            bpe_dropout=BpeDropout(corpus.bpe_dropout.target, corpus.bpe_dropout.source),
        ),
        run=replace(recipe.run, bleu_tokenizer=None),
    )


def exchanged_text(text: TextSource) -> TextSource:
    """Return a text source of two files or a data set with its sides exchanged."""
    exchanged = replace(text, source=text.target, target=text.source)
    return replace(exchanged, source_language=text.target_language, target_language=text.source_language)


def averaged(recipe: Recipe) -> tuple[str, int]:
    """Return the option of `average`, and a number of checkpoints that every run of the recipe has."""
    interval = recipe.trainer.get("val_check_interval", _VALIDATION_INTERVAL)
    steps, patience = recipe.trainer["max_steps"], recipe.run.patience
    option = "best" if interval <= steps else "last"
    if patience is not None:
        steps = min(steps, interval * (patience + 1))
    every = recipe.run.checkpoint_every_steps or steps
    return option, max(1, min(recipe.run.keep_last, steps // every))


def own_values(settings: object) -> Any:
    """Return settings as plain values, without those that are defaults."""
    if isinstance(settings, list):
        return [own_values(item) for item in settings]
    if not is_dataclass(settings):
        return settings
    values = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if value != default:
            values[field.name] = own_values(value)
    return values
