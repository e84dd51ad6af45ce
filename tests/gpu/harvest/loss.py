"""Stage `loss`: the fused loss of the base model, by both kernels and with chunks of several shares of memory.

With the share of training also that of R-Drop, which has two passes.
"""

from typing import Any

import pytest
import torch

import model.loss
from model.loss import label_smoothed_loss
from pipeline.profiling.stopwatch import PeakMemory
from tests.gpu.harvest.job import Job, per_second

SHARES = [1 / 64, 1 / 512, 1 / 256, 1 / 128, 1 / 32, 1 / 16]
"""The first one is that of training."""
KERNELS = ("triton", "pytorch")


def run(job: Job) -> None:
    """Run the stage."""
    rows, d_model, pieces = (50, 16, 300) if job.tiny else (25_000, 512, 37_000)
    weight = torch.randn(pieces, d_model, device=job.device, requires_grad=True)
    # As the network returns them.
    states = torch.randn(rows, d_model, device=job.device).bfloat16().requires_grad_()
    targets = torch.randint(1, pieces, (rows,), device=job.device)
    two_passes = torch.stack([states.detach(), 0.9 * states.detach()]).requires_grad_()
    for share in SHARES[:2] if job.tiny else SHARES:
        for kernels in KERNELS:
            for given in (states, two_passes) if share == SHARES[0] else (states,):
                job.attempt(
                    "loss",
                    lambda k=kernels, n=share, s=given: _measured(job, s, weight, targets, k, n),
                    memory_share=share,
                    kernels=kernels,
                    passes=given.dim() - 1,
                )


def _measured(
    job: Job, states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, kernels: str, share: float
) -> dict[str, Any]:
    passes = states.dim() - 1
    alpha = 5.0 if passes == 2 else 0.0

    def step() -> None:
        with torch.autocast(job.device.type, torch.bfloat16):
            sums = label_smoothed_loss(states, weight, targets, 0.1, 0, 1 / len(targets), kernels, alpha)
        sums.smoothed.backward()
        states.grad = weight.grad = None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.loss, "_CHUNK_SHARE", share)
        rows = passes * len(targets)
        chunk = model.loss._chunk_rows(rows, len(weight), job.device, torch.bfloat16, kernels, passes)
        step()  # compiles
        memory = PeakMemory(job.device)
        step()
        peak = memory.read()
        milliseconds = job.milliseconds(step, repeats=10, warm_up=1, head_start=30.0)
    flops = 6 * states.numel() * weight.size(0)
    return {
        "chunk_rows": chunk,
        "milliseconds": milliseconds,
        "peak_memory_bytes": peak,
        "flops_per_second": per_second(flops, milliseconds),
    }
