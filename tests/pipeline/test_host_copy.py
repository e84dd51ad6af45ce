"""Copies of a checkpoint's file in host memory, compared byte by byte with files of the contents themselves."""

import io
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpointing.checkpoint_io import HostCopy
from pipeline.runtime.memory import private_memory

MEGABYTE = 1 << 20
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def contents(device: str = "cpu") -> dict[str, Any]:
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


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def reserved(size: int = MEGABYTE) -> HostCopy:
    copy = HostCopy()
    assert copy.reserve(size, processes=1)
    return copy


def taken(copy: HostCopy, value: dict[str, Any]) -> memoryview:
    view = copy.take(value)
    assert view is not None
    return view


@pytest.mark.parametrize("device", DEVICES)
def test_the_copy_is_the_file_of_the_contents_whatever_changes_later(device: str) -> None:
    original, copy = contents(device), reserved()
    expected, copied = saved(original), taken(copy, original)
    for tensor in (*original["state_dict"].values(), *original["views"]):
        tensor.zero_()
    original["loops"]["position"].append(3)
    assert copied == expected
    # The next copy takes its place.
    assert taken(copy, original) == saved(original) != expected


def test_contents_that_are_larger_get_a_larger_block() -> None:
    copy, original = reserved(1000), {"a": torch.ones(500), "b": torch.zeros(500)}
    assert taken(copy, original) == saved(original)
    assert copy.size == len(saved(original))


def test_the_block_is_in_memory_from_the_start_and_is_given_back() -> None:
    before = private_memory()
    copy = reserved(200 * MEGABYTE)
    assert private_memory() - before == pytest.approx(200 * MEGABYTE, rel=0.05)
    copy.release()
    assert private_memory() - before < 10 * MEGABYTE
    assert copy.take({"a": torch.ones(1)}) is None


def test_no_block_where_the_host_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds for what the process has and the block together, and for each process of the node."""
    limit = (private_memory() >> 20) + 100
    monkeypatch.setenv("SLURM_MEM_PER_NODE", str(limit))
    copy = HostCopy()
    assert not copy.reserve(150 * MEGABYTE, processes=1)
    assert copy.refusal == f"a copy of 157 MB does not fit, this job has {limit * MEGABYTE / 1e6:,.0f} MB"
    assert not copy.reserve(20 * MEGABYTE, processes=2)
    assert copy.size == 0
    assert copy.reserve(20 * MEGABYTE, processes=1)
    # A block that would have to grow beyond the limit is given up.
    assert copy.take({"a": torch.zeros(40 * MEGABYTE)}) is None
    assert copy.size == 0


def test_forked_processes_do_not_have_the_block(tmp_path: Path) -> None:
    """A loader worker would otherwise keep its pages in memory when they are written to."""
    copy = reserved(100 * MEGABYTE)
    child = os.fork()
    if child == 0:
        (tmp_path / "pages").write_text(Path("/proc/self/statm").read_text())
        os._exit(0)
    os.waitpid(child, 0)
    page = os.sysconf("SC_PAGE_SIZE")
    theirs, ours = (
        int(text.split()[0]) * page for text in ((tmp_path / "pages").read_text(), Path("/proc/self/statm").read_text())
    )
    assert ours - theirs >= 90 * MEGABYTE
    copy.release()
