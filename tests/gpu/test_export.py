"""An exported search on a GPU, in float32 and bfloat16."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from model.decoding import BeamSearch
from pipeline.export.formats import write_torchscript
from pipeline.inference.loading import load_torchscript
from tests.model.search_truth import (
    BOS,
    EOS,
    LENGTHS,
    PAD,
    assert_finds,
    make_sources,
    references,
    trained_network,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_bundle_on_a_gpu(tmp_path: Path) -> None:
    # The file contains the tokenizer's bytes, which nothing reads here, so sentencepiece need not be installed.
    tokenizer = SimpleNamespace(model=b"tokenizer", pad_id=PAD, bos_id=BOS, eos_id=EOS)
    network = trained_network()
    source, mask = make_sources(LENGTHS)
    expected = BeamSearch(network, BOS, EOS, PAD).eval().beam(source, mask, 4, 0.6, 10, 4)
    write_torchscript(network, tokenizer, '{"format_version": 2}', tmp_path / "model.ts")
    model = load_torchscript(tmp_path / "model.ts", "cuda")
    found = type(expected)(*(one.cpu() for one in model.beam(source.cuda(), mask.cuda(), 4, 0.6, 10, 4)))
    assert_finds(network, found, references(network, 4, 0.6, 10))
    halves = model.to(torch.bfloat16).beam(source.cuda(), mask.cuda(), 4, 0.6, 10, 4)
    assert bool((halves.lengths[:, 0] > 0).all())
    assert (halves.scores[:, 0].cpu() - expected.scores[:, 0]).abs().max() < 0.5
