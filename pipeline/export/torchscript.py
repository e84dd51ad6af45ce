"""`model.ts`: network, greedy and beam search, tokenizer and card in one TorchScript file."""

import io
import warnings
from pathlib import Path

import torch

from data_module.tokenization.tokenizer import Tokenizer
from model.decoding import BeamSearch
from model.transformer import Transformer


def write_torchscript(network: Transformer, tokenizer: Tokenizer, card: str, path: Path) -> None:
    """Write the file. `card` is the text of `card.json`, which the file contains."""
    search = BeamSearch(network, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id).eval()
    extra = {"card.json": card, "tokenizer.model": tokenizer.model}
    with warnings.catch_warnings():
        # PyTorch deprecates TorchScript.
        warnings.simplefilter("ignore", DeprecationWarning)
        buffer = io.BytesIO()  # On a full disk, `torch.jit.save` to a file would end the process.
        torch.jit.save(torch.jit.script(search), buffer, _extra_files=extra)
    path.write_bytes(buffer.getbuffer())
