"""The folder of a bundle: its files, and whether it may be replaced. Nothing here imports torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_module.errors import InputError
from data_module.system.files import (
    locked_to_replace,
    naming_full_disk,
    replace_error,
    replaced_folder,
    write_error,
)
from data_module.system.outputs import followed, require_own
from pipeline.inference.bundle_layout import BUNDLE_NAMES, PROGRAM_FILE, bundle_of

FILES = {
    "torchscript": PROGRAM_FILE,
    "pt2": "model.pt2",
    "ctranslate2": "ctranslate2",
    "huggingface": "huggingface",
    "onnx": "onnx",
    "cpp": "cpp",
}
"""File or folder of each format."""

ON_REQUEST = {"onnx", "cpp"}
"""Formats that are written only if they are asked for by name."""

PARITY_SENTENCES = 100
"""Number of sentences of the validation text to compare formats on."""


def check_bundle_folder(folder: Path, force: bool) -> None:
    """Raise InputError if the folder cannot be replaced, is no bundle, or is a bundle and `force` is False."""
    if folder.resolve() == Path.cwd():
        raise InputError(f"{folder}: is the working folder, which cannot be replaced; give another folder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if bundle_of(folder) is None or not any((folder / name).exists() for name in FILES.values()):
            raise InputError(f"{folder}: is not empty and not a bundle; give another folder")
        if not force:
            raise InputError(f"{folder}: holds a bundle already; use --force to replace it")
        require_own(folder, BUNDLE_NAMES, "give another folder")
    if error := replace_error(followed(folder)) or (folder.exists() and write_error(folder)):
        raise InputError(f"{folder}: cannot be written ({error}); give another folder")


@contextmanager
def replaced_bundle(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `folder` at the end; if the block raises, `folder` stays as it is.

    If `folder` is a link, the folder that it leads to is replaced. All files get the rights that the umask gives.

    Raises OSError if the folder cannot be created, and InputError if it holds what is not of a bundle.
    """
    folder = followed(folder)
    with naming_full_disk(folder), locked_to_replace(folder), replaced_folder(folder) as new:
        yield new
        for path in filter(Path.is_file, new.rglob("*")):
            path.chmod(new.stat().st_mode & 0o666)  # safetensors makes files that only their owner can read.
        require_own(folder, BUNDLE_NAMES, "give another folder")  # Exporting takes minutes.
