"""Export a checkpoint to a bundle that needs none of this code.

Formats: TorchScript with search and tokenizer inside, torch.export, CTranslate2, Hugging Face's Transformers, and on
request ONNX and C++ without a library. Each format's translations of real sentences are compared with the checkpoint's.
The folder appears only when it is complete and all formats agree.
"""

import argparse
import sys
from pathlib import Path

from data_module.files import user_path
from pipeline.export.bundle import (
    FILES,
    ON_REQUEST,
    PARITY_SENTENCES,
    bundle_files,
    check_bundle_folder,
    replaced_folder,
    write_bundle,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", type=user_path, help="a .ckpt file or a run folder")
    parser.add_argument("folder", type=user_path, help="the bundle to write")
    parser.add_argument("--force", action="store_true", help="replace an existing bundle")
    parser.add_argument(
        "--format",
        action="append",
        choices=list(FILES),
        help=f"may be given several times (default: all formats but {', '.join(sorted(ON_REQUEST))})",
    )
    parser.add_argument("--quantize", choices=["int8"], help="add CTranslate2's model in int8, for CPUs")
    parser.add_argument(
        "--parity-source",
        type=user_path,
        metavar="FILE",
        help=f"sentences to compare formats on (default: {PARITY_SENTENCES} of the validation text)",
    )
    parser.add_argument(
        "--parity-reference", type=user_path, metavar="FILE", help="their reference translations, for BLEU"
    )
    parser.add_argument(
        "--data-licence", action="append", default=[], metavar="TEXT", help="licence of the training data, for the card"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the bundle and print its path."""
    from data_module.errors import InputError
    from pipeline.checkpointing.checkpoint import load_model, resolve_checkpoint
    from pipeline.export.parity import parity_text

    folder: Path = arguments.folder
    check_bundle_folder(folder, arguments.force)
    if arguments.parity_reference and not arguments.parity_source:
        raise InputError("--parity-reference: give --parity-source, the sentences that it translates")
    path = resolve_checkpoint(arguments.checkpoint)
    print(f"exporting {path}", file=sys.stderr)
    model = load_model(path)
    names = bundle_files(model, arguments.format, arguments.quantize)
    text = parity_text(model, arguments.parity_source, arguments.parity_reference, PARITY_SENTENCES)
    with replaced_folder(folder) as new:
        write_bundle(model, new, names, text, arguments.data_licence)
    print(folder)
    return 0
