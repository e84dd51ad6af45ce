"""Stages `base` and `big`: the training step of `fit`, eager and compiled, timed and profiled."""

from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer

from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from model.translation_module import StepOptions, TranslationModule
from pipeline.profiling.compilations import Compilations
from pipeline.profiling.flops import training_flops
from pipeline.profiling.machine import MatrixProduct
from pipeline.runtime.console import quiet_lightning
from tests.gpu.harvest.batches import SPECIAL, Shares
from tests.gpu.harvest.job import Job, per_second
from tests.gpu.harvest.measurement import Measurement

NETWORKS = {
    "base": NetworkSettings(),
    "big": NetworkSettings(d_model=1024, d_ff=4096, num_heads=16, dropout=0.3),
}
TINY = NetworkSettings(num_layers=1, d_model=16, d_ff=32, num_heads=2)


class Case(NamedTuple):
    """A way to train."""

    kernels: str = "triton"
    compiled: bool = False
    micro_batches: str = "one of 25,000"


CASES = {
    "base": [
        Case(),
        Case("pytorch"),
        Case(micro_batches="eight of 3,125"),
        Case("pytorch", micro_batches="one of 25,000, in blocks"),
        Case(compiled=True),
        Case("pytorch", compiled=True),
    ],
    "big": [Case(), Case("pytorch"), Case(compiled=True)],
}
"""Eager mode comes first, since compiling takes minutes and may exceed the time limit."""


def run(job: Job) -> None:
    """Run the stage."""
    quiet_lightning()
    network, pieces, tokens = (TINY, 100, 60) if job.tiny else (NETWORKS[job.stage], 37_000, 25_000)
    job.record("network", **asdict(network), pieces=pieces)
    best = _product_rate(job)
    for case in CASES[job.stage]:
        torch.manual_seed(1)
        settings = (TrainingSettings(), DecodingSettings())
        module = TranslationModule(
            pieces, SPECIAL, network, *settings, 1, StepOptions(compiled=case.compiled, kernels=case.kernels)
        )
        shares = Shares(case.micro_batches, pieces, tokens, on_gpu=job.device.type == "cuda")
        about = case._asdict()
        job.attempt("step", lambda m=module, s=shares, a=about: _train(job, m, s, a, best), **about)


def _train(
    job: Job, module: TranslationModule, shares: Shares, about: dict[str, Any], best: float | None
) -> dict[str, Any]:
    with Compilations() as compilations:
        measurement = Measurement(job, compilations, about)
        trainer = Trainer(
            accelerator="gpu" if job.device.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed",
            max_steps=-1,
            max_epochs=-1,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            logger=False,
            callbacks=[measurement],
        )
        trainer.fit(module, train_dataloaders=shares)
    source, target = shares.lengths()
    share = next(iter(shares))
    flops = training_flops(module.network_settings, module.network.vocabulary_size, source, target)
    rate = per_second(flops, measurement.step_milliseconds)
    return {
        **measurement.figures,
        "real_tokens": share.num_tokens,
        "row_tokens": share.num_row_tokens,
        "target_tokens_per_second": per_second(float(target.sum()), measurement.step_milliseconds),
        "flops_per_step": flops,
        "flops_per_second": rate,
        "product_flops_per_second": best,
        "mfu": rate / best if rate and best else None,
    }


def _product_rate(job: Job) -> float | None:
    """Return the rate that the stage `rates` measured, or measure it here if that stage has not run."""
    for result in job.results.read():
        if result["stage"] == "rates" and result["name"] == "square, forward":
            return result["flops_per_second"]
    return MatrixProduct(job.device, torch.bfloat16, 64 if job.tiny else None).rate()
