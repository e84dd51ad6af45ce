"""A bundle on disk: its folder, the program in it and its card. `pipeline/export` writes bundles."""

import os
import re
from pathlib import Path

PROGRAM_FILE = "model.ts"
"""The file that translates, a program in TorchScript."""
CARD_FILE = "card.json"
BUNDLE_NAMES = re.compile(
    r"""(README\.md|card\.json|parity\.json|tokenizer\.(model|seen)|source\.spm|model\.ts|model\.pt2|compiled\.pt2
    |ctranslate2(-int8)?(/(model\.bin|config\.json|(source|target|shared)_vocabulary\.(json|txt)))?
    |huggingface(/(README\.md|((tokenizer|generation)_)?config\.json|(target_)?vocab\.json|(source|target)\.spm
        |(special_tokens_map|added_tokens|tokenizer|model\.safetensors\.index)\.json
        |model(-\d+-of-\d+)?\.safetensors|pytorch_model\.bin))?
    |onnx(/(encode|step)\.onnx(\.data)?)?
    |cpp(/(search\.cpp|weights\.bin|translate(\.cpp)?|search\.so))?)""",
    re.VERBOSE,
)
"""Paths in a bundle, of version 1.0.0 too, and of what its README says to compile there."""
START_OVER = "export it again"
"""The way out in messages about a bundle that this version cannot read."""


def bundle_of(path: Path) -> Path | None:
    """Return the folder of the bundle that a path names by its folder or its `model.ts`; None if it names none.

    A run folder is no bundle, whatever it holds: `model.ts` is a program, and using a run must not execute files.
    """
    folder = path.parent if path.name == PROGRAM_FILE else path
    is_run = any(map(os.path.lexists, (folder / "config.yaml", folder / "checkpoints")))
    return folder if not is_run and (folder / CARD_FILE).is_file() else None
