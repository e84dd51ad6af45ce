"""Copies of a checkpoint in host memory: files written from them are those of the contents themselves."""

import io
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from data_module.files import PlainValues
from pipeline.checkpointing.checkpoint_io import AtomicCheckpointIO, host_copy
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_copy_stays_as_it_is_whatever_changes_later(device: str) -> None:
    original = contents(device)
    expected = saved(torch.load(io.BytesIO(saved(original)), map_location="cpu"))
    copied = host_copy(original)
    for tensor in (*original["state_dict"].values(), *original["views"]):
        tensor.zero_()
    original["loops"]["position"].append(3)
    assert saved(copied) == expected


def test_the_memory_of_a_copy_is_given_back() -> None:
    original = {"weight": torch.ones(50 * MEGABYTE)}
    before = private_memory()
    copied = host_copy(original)
    assert private_memory() - before == pytest.approx(200 * MEGABYTE, rel=0.05)
    del copied
    release_freed_memory()
    assert private_memory() - before < 10 * MEGABYTE


def test_no_copy_where_the_host_has_no_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit holds for what the process has and the copy together, and for each process of the node."""
    limit = (private_memory() >> 20) + 100
    monkeypatch.setenv("SLURM_MEM_PER_NODE", str(limit))
    writer = AtomicCheckpointIO()
    writer.reserve(150 * MEGABYTE, processes=1)
    refusal = f"a copy of 157 MB does not fit, this job has {limit * MEGABYTE / 1e6:,.0f} MB"
    assert writer.describe() == f"training waits while they are written: {refusal}"
    writer.reserve(20 * MEGABYTE, processes=2)
    assert writer.copy_bytes == 0
    writer.reserve(1000, processes=1)
    small = {"a": torch.zeros(500), "b": torch.ones(500)}
    writer.save_checkpoint(small, tmp_path / "small")  # more than was announced, and there is room
    assert writer.copy_bytes == 4000
    large = {"a": torch.zeros(20 * MEGABYTE)}
    writer.save_checkpoint(large, tmp_path / "large")
    assert (tmp_path / "large").exists()  # at once
    assert writer.copy_bytes == 0
    writer.wait()
    assert [(tmp_path / name).read_bytes() for name in ("small", "large")] == [saved(small), saved(large)]
    assert [line.split(":")[1] for line in capsys.readouterr().err.splitlines()] == [
        " written in the background from a copy in memory of 0 MB",
        " training waits while they are written",
    ]
