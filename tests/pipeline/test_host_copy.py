"""Copies of a checkpoint in host memory: files written from them are those of the contents themselves."""

import gc
import io
import resource
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from data_module.system.files import PlainValues
from pipeline.checkpointing.checkpoint_io import HostCopy
from pipeline.runtime.memory import private_memory, release_freed_memory

MEGABYTE = 1 << 20


def contents(device: str) -> PlainValues:
    """What checkpoints hold: tied weights, views of one storage, moments, empty tensors, plain values."""
    torch.manual_seed(5)
    network = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Linear(30, 30)).to(device)
    network[1].weight = network[0].weight
    optimizer = torch.optim.Adam(network.parameters(), fused=True)
    network(torch.ones(3, 30, device=device)).square().sum().backward()
    optimizer.step()
    rows = torch.arange(40.0, device=device).view(8, 5)
    return {
        "state_dict": network.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "views": (rows[2:4], rows.t(), rows[:, 1]),
        "others": OrderedDict(empty=torch.empty(0), half=torch.ones(3).bfloat16(), bytes=torch.ones(5).byte()),
        "loops": {"position": [1, 2], "name": "text", "none": None},
    }


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def planned(size: int = MEGABYTE) -> HostCopy:
    copy = HostCopy()
    copy.plan(size, processes=1)
    assert copy.size == size
    return copy


def used_memory() -> int:
    """Return the memory of this process without what earlier tests have freed, which `HostCopy.plan` gives back."""
    gc.collect()
    release_freed_memory()
    return private_memory()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_copy_stays_as_it_is_whatever_changes_later(device: str) -> None:
    original, copy = contents(device), planned()
    expected = saved(torch.load(io.BytesIO(saved(original)), map_location="cpu"))
    copied = copy.take(original)
    for tensor in (*original["state_dict"].values(), *original["views"]):
        tensor.zero_()
    original["loops"]["position"].append(3)
    assert saved(copied) == expected
    again = copy.take(original)
    assert saved(again) != expected
    for name, tensor in again["state_dict"].items():  # in the same memory
        assert tensor.data_ptr() == copied["state_dict"][name].data_ptr()
    assert saved(copy.take({"a": torch.ones(7), **original})) == saved({"a": torch.ones(7), **original})


def test_contents_that_are_larger_get_more_memory() -> None:
    copy, original = planned(1000), {"a": torch.ones(500), "b": torch.zeros(500)}
    assert saved(copy.take(original)) == saved(original)
    assert copy.size == 4000


def test_memory_is_taken_once_with_the_first_copy_and_given_back() -> None:
    original = {"a": torch.ones(200 * MEGABYTE, dtype=torch.uint8)}
    before = used_memory()
    copy = planned(200 * MEGABYTE)
    assert private_memory() - before < 10 * MEGABYTE
    for _ in range(3):
        copy.take(original)
        assert private_memory() - before == pytest.approx(200 * MEGABYTE, rel=0.05)
    copy.release()
    assert private_memory() - before < 10 * MEGABYTE
    assert copy.take(original) is None


def test_no_copy_where_the_host_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds for what the process has and the copy together, and for each process of the node."""
    limit = (used_memory() >> 20) + 100
    monkeypatch.setenv("SLURM_MEM_PER_NODE", str(limit))
    copy = HostCopy()
    copy.plan(150 * MEGABYTE, processes=1)
    assert copy.size == 0
    copy.plan(20 * MEGABYTE, processes=2)
    assert copy.size == 0
    copy.plan(20 * MEGABYTE, processes=1)
    assert copy.size
    assert copy.take({"a": torch.zeros(40 * MEGABYTE)}) is None
    assert copy.size == 0
    monkeypatch.delenv("SLURM_MEM_PER_NODE")
    copy.plan(1000 * MEGABYTE, processes=1)
    # So large that the C library finds no such block among those that were freed before. Its pages are never touched.
    original = {"a": torch.empty(1000 * MEGABYTE, dtype=torch.uint8)}
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 30 * MEGABYTE, hard))
    try:
        assert copy.take(original) is None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert copy.size == 0
