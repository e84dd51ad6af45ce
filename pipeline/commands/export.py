"""A checkpoint -> a bundle that needs none of this code: TorchScript with search and tokenizer inside, torch.export,
CTranslate2; each compared with the checkpoint's own search on real sentences before the folder appears.

The folder appears whole or not at all, and not where a format does not give what the checkpoint gives.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from pipeline.export.bundle import (
    DEFAULT_SENTENCES,
    FORMATS,
    bundle_files,
    check_bundle_folder,
    ctranslate2_obstacle,
    parity_text,
    write_bundle,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("checkpoint", type=Path, help="a .ckpt file or a run folder")
    parser.add_argument("folder", type=Path, help="the bundle to make")
    parser.add_argument("--force", action="store_true", help="replace a bundle that is there")
    parser.add_argument(
        "--format", action="append", choices=list(FORMATS), help="may be given several times; all unless given"
    )
    parser.add_argument("--quantize", choices=["int8"], help="add int8 models for CPUs beside those in float32")
    parser.add_argument(
        "--parity-source",
        type=Path,
        metavar="FILE",
        help=f"sentences to compare formats on; {DEFAULT_SENTENCES} of the validation text unless given",
    )
    parser.add_argument("--parity-reference", type=Path, metavar="FILE", help="their translations, for BLEU")
    parser.add_argument(
        "--data-licence", action="append", default=[], metavar="TEXT", help="of the training data, for the card"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the bundle and print its path."""
    from data_module.atomic_folder import replace_folder
    from data_module.errors import InputError
    from pipeline.checkpointing.checkpoint import load_model, resolve_checkpoint

    folder: Path = arguments.folder
    check_bundle_folder(folder, arguments.force)
    names = bundle_files(arguments.format, arguments.quantize)
    if arguments.parity_reference and not arguments.parity_source:
        raise InputError("--parity-reference: give --parity-source, the sentences that it translates")
    path = resolve_checkpoint(arguments.checkpoint)
    print(f"exporting {path}", file=sys.stderr)
    model = load_model(path)
    text = parity_text(model, arguments.parity_source, arguments.parity_reference)
    if "ctranslate2" in names and not arguments.format and (reason := ctranslate2_obstacle(model)):
        print(f"without ctranslate2/: {reason}", file=sys.stderr)
        names = [name for name in names if not name.startswith("ctranslate2")]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        place = tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror}); give another folder") from error
    with place as temporary:
        whole = Path(temporary) / "bundle"
        whole.mkdir()
        write_bundle(model, whole, names, text, arguments.data_licence)
        replace_folder(whole, folder, Path(temporary) / "replaced")
    print(folder)
    return 0
