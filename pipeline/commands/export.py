"""Export a checkpoint to a bundle that needs none of this code.

Formats: TorchScript with search and tokenizer inside, torch.export, CTranslate2, Hugging Face's Transformers, and on
request ONNX and C++ without a library. Each format's translations of real sentences are compared with the checkpoint's.
The folder appears only when it is complete and all formats agree.
"""

import argparse
from dataclasses import replace

from data_module.errors import InputError
from data_module.system.files import user_path
from pipeline.export.bundle_folder import FILES, ON_REQUEST, PARITY_SENTENCES, check_bundle_folder
from pipeline.inference.file_options import check_files
from pipeline.inference.options import SearchOptions, add_search_arguments


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
    add_search_arguments(parser)
    parser.add_argument(
        "--n-best",
        type=int,
        default=1,
        metavar="N",
        help="number of translations that model.pt2 returns for a sentence (default: 1)",
    )
    parser.add_argument("--quantize", choices=["int8"], help="add CTranslate2's model in int8, for CPUs")
    parser.add_argument(
        "--parity-source",
        type=user_path,
        metavar="FILE",
        help=f"sentences to compare formats on (default: {PARITY_SENTENCES} of the validation text)",
    )
    parser.add_argument(
        "--parity-reference", type=user_path, metavar="FILE", help="reference translations of --parity-source, for BLEU"
    )
    parser.add_argument(
        "--data-licence", action="append", default=[], metavar="TEXT", help="licence of the training data, for the card"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the bundle and print its path."""
    options = replace(SearchOptions.given(arguments), n_best=arguments.n_best)
    check_files(arguments)
    check_bundle_folder(arguments.folder, arguments.force)
    if arguments.parity_reference and not arguments.parity_source:
        raise InputError("--parity-reference: give --parity-source, the sentences that it translates")
    from pipeline.export.bundle_writer import export  # imports torch

    text = arguments.parity_source, arguments.parity_reference
    formats, licences = arguments.format, arguments.data_licence
    export(arguments.checkpoint, arguments.folder, formats, arguments.quantize, text, licences, options)
    print(arguments.folder)
    return 0
