"""`model.ts`: network, greedy and beam search, tokenizer and card in one TorchScript file.

It contains `packed.ts`, the same search without weights, for CPUs: see `model/fast/packed_linear.py`.
"""

import io
import warnings
from pathlib import Path
from typing import Any

import torch

from data_module.tokenization.tokenizer import Tokenizer
from model.decoding import BeamSearch
from model.fast.packed_linear import can_pack, strip_weights
from model.transformer import Transformer
from pipeline.export.card import parse_card


def write_torchscript(network: Transformer, tokenizer: Tokenizer, card: str, path: Path) -> None:
    """Write the file. `card` is the text of `card.json`, which the file contains."""
    extra = {"card.json": card, "tokenizer.model": tokenizer.model}
    if can_pack(network):
        extra["packed.ts"] = _saved(strip_weights(network), tokenizer, {})
    path.write_bytes(_saved(network, tokenizer, extra))


def _saved(network: Transformer, tokenizer: Tokenizer, extra: dict[str, Any]) -> bytes:
    search = BeamSearch(network, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id).eval()
    with warnings.catch_warnings():
        # PyTorch deprecates TorchScript.
        warnings.simplefilter("ignore", DeprecationWarning)
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.script(search), buffer, _extra_files=extra)
    return buffer.getvalue()


def load_torchscript(path: Path, device: str = "cpu", *, packed: bool = True) -> Any:
    """Load the search from a file, as the bundle's README describes.

    Args:
        path: the file.
        device: device to load to.
        packed: on a CPU, pack weights for oneDNN if the file and this PyTorch support it.

    Raises:
        InputError: its card has another format, or it has none.
    """
    extra: dict[str, Any] = {"card.json": "", "packed.ts": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.load(path, map_location=device, _extra_files=extra)
        parse_card(path, extra["card.json"])
        if not (packed and extra["packed.ts"] and device == "cpu" and torch.backends.mkldnn.is_available()):
            return model
        fast = torch.jit.load(io.BytesIO(extra["packed.ts"]))
    weights = model.state_dict()
    for name, parameter in fast.named_parameters():
        parameter.data = weights[name]
    return fast
