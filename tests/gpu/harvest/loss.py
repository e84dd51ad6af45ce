"""Stage `loss`: the fused loss of the base model, for several numbers of logits per chunk."""

from typing import Any

import pytest
import torch

import model.loss
from model.loss import label_smoothed_loss
from pipeline.profiling.stopwatch import PeakMemory
from tests.gpu.harvest.job import Job, per_second

CHUNKS = [2**power for power in range(26, 31)]


def run(job: Job) -> None:
    """Run the stage."""
    rows, d_model, pieces = (50, 16, 300) if job.tiny else (25_000, 512, 37_000)
    chunks = [2**12, 2**14] if job.tiny else CHUNKS
    weight = torch.randn(pieces, d_model, device=job.device, requires_grad=True)
    states = torch.randn(rows, d_model, device=job.device, requires_grad=True)
    targets = torch.randint(1, pieces, (rows,), device=job.device)
    for compiled in (False, True):
        for chunk in chunks:
            job.attempt(
                "loss",
                lambda c=compiled, n=chunk: _measured(job, states, weight, targets, c, n),
                chunk_logits=chunk,
                compiled=compiled,
            )


def _measured(
    job: Job, states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, compiled: bool, chunk: int
) -> dict[str, Any]:
    def step() -> None:
        with torch.autocast(job.device.type, torch.bfloat16):
            smoothed = label_smoothed_loss(states, weight, targets, 0.1, 0, compiled).smoothed
        smoothed.backward()
        states.grad = weight.grad = None

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(model.loss._CHUNK_LOGITS, job.device.type, chunk)
        step()  # compiles
        memory = PeakMemory(job.device)
        step()
        peak = memory.read()
        milliseconds = job.milliseconds(step, repeats=10, warm_up=1, head_start=30.0)
    flops = 6 * states.numel() * weight.size(0)
    return {
        "milliseconds": milliseconds,
        "peak_memory_bytes": peak,
        "flops_per_second": per_second(flops, milliseconds),
    }
