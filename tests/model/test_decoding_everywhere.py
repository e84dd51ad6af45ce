"""The search in TorchScript, without the project, on a GPU, and with invalid arguments."""

import itertools
import math
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from model.decoding import BeamResult, BeamSearch
from tests.model.search_truth import (
    BOS,
    EOS,
    LENGTHS,
    PAD,
    SEARCHES,
    assert_finds,
    make_network,
    make_sources,
    plain_beam,
    trained_network,
)
from tests.model.test_decoding import observed

SOURCE = torch.tensor([[4, 5, EOS]])
MASK = torch.ones(1, 3, dtype=torch.bool)


def with_prefix(prefix: Sequence[object]) -> tuple[object, ...]:
    return SOURCE, None, 4, 0.6, 5, 1, "exact", torch.tensor(prefix)


BAD_ARGUMENTS = {
    "one or more of each": (SOURCE[:0], None, 4, 0.6, 5, 1),
    r"not .*\[1, 0\]": (SOURCE[:, :0], None, 4, 0.6, 5, 1),
    r"not .*\[1, 1, 3\]": (SOURCE[None], None, 4, 0.6, 5, 1),
    "must be int64": (SOURCE.float(), None, 4, 0.6, 5, 1),
    "ids must be 0 .. 23": (SOURCE + 19, None, 4, 0.6, 5, 1),
    "must be 0 .. 23": (-SOURCE, None, 4, 0.6, 5, 1),
    "must be bool of shape": (SOURCE, MASK[:, :2], 4, 0.6, 5, 1),
    "must be bool": (SOURCE, MASK.int(), 4, 0.6, 5, 1),
    "without any token": (SOURCE.repeat(2, 1), torch.cat([MASK, ~MASK]), 4, 0.6, 5, 1),
    "beam_size 0 must be": (SOURCE, None, 0, 0.6, 5, 1),
    "n_best 5 must be 1 .. beam_size 4": (SOURCE, None, 4, 0.6, 5, 5),
    "n_best 0 must be": (SOURCE, None, 4, 0.6, 5, 0),
    "length_penalty -0.5 must be": (SOURCE, None, 4, -0.5, 5, 1),
    "length_penalty inf must be": (SOURCE, None, 4, math.inf, 5, 1),
    "length_penalty nan must be": (SOURCE, None, 4, math.nan, 5, 1),
    "max_extra_tokens -1 must be": (SOURCE, None, 4, 0.6, -1, 1),
    "stop_rule last must be exact or first": (SOURCE, None, 4, 0.6, 5, 1, "last"),
    r"target_prefix must be int64 of shape \[1, tokens\], not .*\[2, 1\]": with_prefix([[4], [4]]),
    "target_prefix must be int64 of shape": with_prefix([[4.0]]),
    "target_prefix must be int64": with_prefix([4]),
    "target_prefix must be ids of pieces, 0 .. 23": with_prefix([[24]]),
    "must be ids of pieces, .* behind them": with_prefix([[-1]]),
    "must be ids of pieces, .* padding": with_prefix([[4, PAD, 4]]),
    "ids of pieces, .* padding": with_prefix([[BOS]]),
    "of pieces, .* padding": with_prefix([[4, EOS]]),
    "target_prefix is as long as an answer may be": with_prefix([[4] * 8]),
}


def test_wrong_arguments_are_refused_in_python_torchscript_and_the_compiled_search() -> None:
    searches = [make(make_network(0)) for make in SEARCHES.values()]
    scripted = torch.jit.script(searches[0])
    for message, arguments in BAD_ARGUMENTS.items():
        for search in searches:
            with pytest.raises(ValueError, match=message):
                search.beam(*arguments)
        with pytest.raises(torch.jit.Error, match=message):
            scripted.beam(*arguments)
    for one in (*searches, scripted):  # the smallest valid arguments
        assert one.beam(SOURCE, None, 1, 0.0, 0, 1).lengths.item() <= 3


@pytest.mark.parametrize(("bos_id", "eos_id", "pad_id"), [(2, 2, 0), (2, 3, 24), (-1, 3, 0)])
def test_wrong_special_ids_are_refused(bos_id: int, eos_id: int, pad_id: int) -> None:
    with pytest.raises(ValueError, match="three different ids"):
        BeamSearch(make_network(0), bos_id, eos_id, pad_id)


CONSUMER = """
import sys
sys.modules["model"] = None
import torch
folder = sys.argv[1]
source, mask = torch.load(folder + "/source.pt")
for variant in sys.argv[2:]:
    search = torch.jit.load(f"{folder}/of {variant}.ts")
    found = [
        tuple(search.beam(source, mask, 4, 0.6, 10, 4)),
        tuple(search.greedy(source, mask, 10)),
        tuple(search.beam(source, mask, 4, 0.6, 10, 4, "first")),
    ]
    torch.save(found, f"{folder}/of {variant}.pt")
"""


def test_scripted_equals_eager_also_where_the_project_is_not(tmp_path: Path) -> None:
    source, mask = make_sources(LENGTHS)
    torch.save((source, mask), tmp_path / "source.pt")
    expected = {}
    for variant in ("", "pre-norm", "learned"):
        search = BeamSearch(trained_network(variant), BOS, EOS, PAD).eval()
        expected[variant] = [
            search.beam(source, mask, 4, 0.6, 10, 4),
            search.greedy(source, mask, 10),
            search.beam(source, mask, 4, 0.6, 10, 4, "first"),
        ]
        torch.jit.script(search).save(str(tmp_path / f"of {variant}.ts"))
    command = [sys.executable, "-I", "-W", "ignore", "-c", CONSUMER, str(tmp_path), *expected]
    subprocess.run(command, check=True, cwd=tmp_path)
    for variant, results in expected.items():
        found = torch.load(tmp_path / f"of {variant}.pt")
        for one, other in zip(itertools.chain(*found), itertools.chain(*results), strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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
