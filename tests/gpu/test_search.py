"""The search on a GPU: what it waits for, and an exported one in float32 and bfloat16."""

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from model.decoding import BeamResult, BeamSearch
from pipeline.export.formats import write_torchscript
from pipeline.inference.loading import load_torchscript
from tests.model.search_truth import (
    BOS,
    EOS,
    LENGTHS,
    PAD,
    assert_finds,
    make_network,
    make_sources,
    plain_beam,
    references,
    trained_network,
)
from tests.model.test_decoding import observed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_bundle_on_a_gpu(tmp_path: Path) -> None:
    # The file contains the tokenizer's bytes, which nothing reads here, so sentencepiece need not be installed.
    tokenizer = SimpleNamespace(model=b"tokenizer", search_ids=(BOS, EOS, PAD))
    network = trained_network()
    source, mask = make_sources(LENGTHS)
    expected = BeamSearch(network, BOS, EOS, PAD).eval().beam(source, mask, 4, 0.6, 10, 4)
    write_torchscript(network, tokenizer, '{"format_version": 2}', tmp_path / "model.ts")
    model = load_torchscript(tmp_path / "model.ts", "cuda")
    found = type(expected)(*(one.cpu() for one in model.beam(source.cuda(), mask.cuda(), 4, 0.6, 10, 4)))
    assert_finds(network, found, references(network, 4, 0.6, 10))
    torch.backends.cuda.enable_cudnn_sdp(False)  # as the bundle's README says
    halves = model.to(torch.bfloat16).beam(source.cuda(), mask.cuda(), 4, 0.6, 10, 4)
    assert bool((halves.lengths[:, 0] > 0).all())
    assert (halves.scores[:, 0].cpu() - expected.scores[:, 0]).abs().max() < 0.5


def test_a_gpu_finds_the_same_and_waits_for_the_host_every_eighth_step_only() -> None:
    source, mask = make_sources(LENGTHS)
    search, _ = observed(make_network(0), endless=True)
    expected = search.beam(source, mask, 4, 0.6, 60, 4)
    search.cuda()
    sources = source.cuda(), mask.cuda()
    search.beam(*sources, 4, 0.6, 60, 4)  # initializes libraries
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            found = search.beam(*sources, 4, 0.6, 60, 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Synchronizing at each step would give as many warnings as an answer has tokens.
    num_waits = sum("synchronizing" in str(one.message) for one in waits)
    assert 0 < num_waits < expected.tokens.size(-1) * 2 // 3
    network = search.network.cpu()
    expected_answers = [plain_beam(network, row[:n], 4, 0.6, n + 60) for row, n in zip(source, LENGTHS, strict=True)]
    assert_finds(network, BeamResult(*(one.cpu() for one in found)), expected_answers)
