"""`--init-from` with a Marian model: the same translations, then a run like any other, and back to Transformers."""

import json
import re
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
import torch
import yaml

from tests.conftest import refusal, run_here, sentences
from tests.export.test_bundle import outputs
from tests.pipeline.marian_folder import NETWORK, load, target_text

LINES = [">>de<< the dog", "the\u00a0dog Ä ☃", *sentences(30, seed=7)]


def run(*arguments: object, text: list[str] | None = None) -> tuple[list[str], str]:
    with NamedTemporaryFile("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in text or ())
        file.flush()
        printed, said = run_here(*arguments, *(["--source", file.name] if text else []))
    return printed.splitlines(), said


def generated(folder: Path, **options: object) -> list[str]:
    model, tokenizer = load(folder)
    found = []
    for line in LINES:
        batch = tokenizer(line, return_tensors="pt")
        limit = batch["input_ids"].size(1) + 50 + 1
        answer = model.generate(**batch, **{"max_length": limit, "num_beams": 1, **options})[0]
        found.append(tokenizer.decode(answer, skip_special_tokens=True))
    return found


@pytest.fixture
def recipe(recipe_file: Path, tmp_path: Path) -> list[object]:
    """Options of `fit`: the tiny recipe with a target text that the model can translate to."""
    values = yaml.safe_load(recipe_file.read_text())
    for split in ("train", "validation"):
        lines = Path(values["corpus"][split]["source"]).read_text().splitlines()
        values["corpus"][split]["target"] = str(tmp_path / f"{split}.target")
        (tmp_path / f"{split}.target").write_text("".join(line + "\n" for line in target_text(lines)))
    values["corpus"]["folder"] = str(tmp_path / "corpus")
    del values["decoding"]  # for the limit that `generated` has
    recipe_file.write_text(yaml.safe_dump(values))
    return ["--config", recipe_file, "--run.folder", tmp_path / "run", *NETWORK]


@pytest.mark.slow
def test_a_run_from_a_marian_model(marian: Path, recipe: list[object], tmp_path: Path) -> None:
    # With a learning rate of 0, a step does not change the weights.
    once = ["--trainer.max_steps", 1, "--training.learning_rate_factor", 0]
    report, _ = run("doctor", *recipe, "--init-from", marian)
    assert any(f"starts from the weights of {marian}" in line for line in report)
    _, said = run("fit", *recipe, *once, "--init-from", marian)
    assert f"starting from the weights and the tokenizer of {marian}" in said
    expected = generated(marian)
    assert len(set(expected)) > 20
    assert run("translate", tmp_path / "run", "--beam", 1, text=LINES)[0] == expected
    beam = ["--beam", 4, "--length-penalty", 0, "--stop-rule", "first"]
    options = {"num_beams": 4, "length_penalty": 0.0, "early_stopping": True, "forced_eos_token_id": None}
    ours, theirs = run("translate", tmp_path / "run", *beam, text=LINES)[0], generated(marian, **options)
    # An answer at the limit ends here, with the end symbol's probability, and is cut there.
    ended = [pair for pair in zip(ours, theirs, strict=True) if len(pair[0].split()) < 45]
    assert len(ended) > 20
    assert all(one == other for one, other in ended)

    # The recipe names neither activation nor bias: they belong to the run, also when it resumes.
    trained = tmp_path / "trained"
    train = [*recipe, "--run.folder", trained, "--training.learning_rate_factor", 0.1, "--training.ema_decay", 0.9]
    run("fit", *train, "--trainer.max_steps", 4, "--init-from", marian)
    _, said = run("fit", *train, "--trainer.max_steps", 8)
    assert "resuming from" in said
    assert "network." not in said
    network = yaml.safe_load((trained / "config.yaml").read_text())["network"]
    assert (network["activation"], network["output_bias"]) == ("swish", True)
    contents = torch.load(trained / "checkpoints" / "step=00000008.ckpt", weights_only=True)
    first = torch.load(trained / "checkpoints" / "step=00000004.ckpt", weights_only=True)
    name = "network.projection.bias"
    assert (contents["state_dict"][name] != first["state_dict"][name]).all()
    run("average", trained, "--last", 2)
    source, reference = tmp_path / "test.source", tmp_path / "test.target"
    source.write_text("".join(line + "\n" for line in LINES))
    reference.write_text("".join(line + "\n" for line in target_text(LINES)))
    scores = json.loads(run("evaluate", trained, "--source", source, "--reference", reference)[0][-1])
    assert scores["bleu"] > 1

    # And back: the folder that `export` writes translates as the run does.
    texts = ["--parity-source", source, "--parity-reference", reference]
    run("export", trained, tmp_path / "bundle", *texts)
    parity = json.loads((tmp_path / "bundle" / "parity.json").read_text())
    assert parity.keys() >= {"model.ts", "model.pt2", "ctranslate2", "huggingface"}
    folder = tmp_path / "bundle" / "huggingface"
    for name in ("source.spm", "target.spm"):
        assert (folder / name).read_bytes() == (marian / name).read_bytes()
    assert generated(folder) == run("translate", trained, "--beam", 1, text=LINES)[0] != expected

    # The programs of the bundle's README, without this project. The search of model.pt2 is fixed; others are greedy.
    page = (tmp_path / "bundle" / "README.md").read_text()
    programs, example = re.findall(r"```python\n(.*?)```", page, re.DOTALL), re.search(r"```text\n(.*)\n", page)
    line = "the old dog sees a"
    greedy = run("translate", trained, "--beam", 1, text=[line])[0]
    expected_of = {
        "torch.jit.load": greedy,
        "model.pt2": run("translate", trained, text=[line])[0],
        "ctranslate2": greedy,
        "huggingface": greedy,
    }
    whole = [program for program in programs if f'"{example[1]}"' in program]
    for program, (name, answer) in zip(whole, expected_of.items(), strict=True):
        assert name in program
        program = program.replace('card["beam_size"]', "1").replace(
            "generate(**batch,", "generate(**batch, num_beams=1,"
        )
        assert outputs(program, [line], tmp_path / "bundle") == answer, name


def test_other_networks_are_refused(marian: Path, recipe: list[object], tmp_path: Path) -> None:
    wide = ["--network.d_ff", 80, "--network.num_heads", 4, "--network.pre_norm", "true"]
    said = refusal("fit", *recipe, *wide, "--init-from", marian)
    for words in ("network.d_ff 32 there, 80 here", "network.num_heads 2 there, 4 here", "network.pre_norm False"):
        assert words in said
    assert "activation" not in said
    said = refusal("fit", *recipe, "--corpus.bpe_dropout.source", 0.1, "--init-from", marian)
    assert "corpus.bpe_dropout: the tokenizer of the run to start from is no byte-pair encoding" in said
    assert not (tmp_path / "run").exists()
