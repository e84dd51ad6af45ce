"""A checkpoint -> a bundle that needs none of this code: one TorchScript file with search and tokenizer inside.

The folder appears whole or not at all.
"""

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.checkpoint import TrainedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("checkpoint", type=Path, help="a .ckpt file or a run folder")
    parser.add_argument("folder", type=Path, help="the bundle to make")
    parser.add_argument("--force", action="store_true", help="replace a bundle that is there")


def run(arguments: argparse.Namespace) -> int:
    """Write the bundle and print its path."""
    from data_module.errors import InputError
    from pipeline.checkpoint import choose, load_model

    folder: Path = arguments.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        is_bundle = (folder / "card.json").is_file() and (folder / "model.ts").is_file()
        if not is_bundle:
            raise InputError(f"{folder}: holds something else than a bundle; give another folder")
        if not arguments.force:
            raise InputError(f"{folder}: holds a bundle already; use --force to replace it")
    path = choose(arguments.checkpoint)
    print(f"exporting {path}", file=sys.stderr)
    model = load_model(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        whole = Path(temporary) / "bundle"
        whole.mkdir()
        write_bundle(model, whole)
        if folder.exists():
            # Both renames or none that matters: an old bundle is put aside, and goes with the temporary folder.
            folder.rename(Path(temporary) / "replaced")
        whole.rename(folder)
    print(folder)
    return 0


def card(model: "TrainedModel") -> dict[str, Any]:
    """What one has to know to use the model."""
    tokenizer, decoding = model.tokenizer, model.decoding
    return {
        "checkpoint": model.path.name,
        "step": model.step,
        "vocabulary_size": tokenizer.vocabulary_size,
        "pad_id": tokenizer.pad_id,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "beam_size": decoding.beam_size,
        "length_penalty": decoding.length_penalty,
        "max_extra_tokens": decoding.max_extra_tokens,
        "recipe": model.recipe,
    }


def write_bundle(model: "TrainedModel", folder: Path) -> None:
    """model.ts, card.json and README.md into a folder that is there and empty."""
    import torch

    from model.decoding import Search

    tokenizer = model.tokenizer
    search = Search(model.network, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id).eval()
    about = json.dumps(card(model), indent=2)
    with warnings.catch_warnings():
        # TorchScript is deprecated upstream, and is what this file is made of.
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(search)
        extra = {"card.json": about, "tokenizer.model": tokenizer.model}
        torch.jit.save(scripted, folder / "model.ts", _extra_files=extra)
    (folder / "card.json").write_text(about + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_README, encoding="utf-8")


_README = """# A translation model

`model.ts` holds the network, its beam search and its tokenizer. It needs torch and sentencepiece, nothing else:

```python
import json, sentencepiece, torch

extra = {"card.json": "", "tokenizer.model": ""}
model = torch.jit.load("model.ts", _extra_files=extra)
card = json.loads(extra["card.json"])
tokenizer = sentencepiece.SentencePieceProcessor(model_proto=extra["tokenizer.model"])

source = torch.tensor([tokenizer.encode("A sentence.") + [card["eos_id"]]])
with torch.no_grad():
    answers = model.beam(source, None, card["beam_size"], card["length_penalty"], card["max_extra_tokens"], 1)
print(tokenizer.decode(answers[0][0, 0, : answers[1][0, 0] - 1].tolist()))
```

A TorchScript file is a program: load only files from people you trust.
"""
