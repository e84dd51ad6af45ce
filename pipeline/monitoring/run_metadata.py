"""Metadata of a run: recipe, data, code and hosts as text, hyperparameters, its starts, and the summary at its end."""

import json
import statistics
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime
from textwrap import indent

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from data_module.corpus.manifest import Manifest
from data_module.system.files import PlainValues
from pipeline.checkpointing.run_folder import STARTS, SUMMARY, read_metrics
from pipeline.config.recipe import Recipe
from pipeline.config.settings import validation_tag
from pipeline.metrics.metrics import mode_of
from pipeline.monitoring.run_log import RunLog, table
from pipeline.monitoring.training_monitor import TrainingMonitor
from pipeline.monitoring.validation_metrics import best_tag
from pipeline.runtime.launch import JobStep, node_name, versions

COMPARED_METRICS = (
    "validation/bleu",
    "validation/chrf",
    "validation/loss",
    "validation/perplexity",
    "train_perf/target_tokens_per_second",
)
"""Metrics of the HParams tab, after that of `run.best_by`."""
_HYPERPARAMETER_SECTIONS = {"network": (), "training": (), "batches": ("workers", "max_tokens_per_device")}
"""Section of a recipe -> settings that are not hyperparameters, because they do not change the result."""


class RunMetadata(Callback):
    """Writes the metadata of a run to TensorBoard when training starts, and summary.json when it ends."""

    def __init__(self, recipe: Recipe, manifest: Manifest, monitor: TrainingMonitor) -> None:
        self._recipe, self._manifest, self._monitor = recipe, manifest, monitor
        self._parameters: dict[str, int] = {}
        self.starts: list[PlainValues] = []
        """Start records of the run, from `record_start`; the last one is this process."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log recipe, data, code and hosts to TensorBoard."""
        log = trainer.logger
        if not isinstance(log, RunLog) or not log.writes:
            return
        network = pl_module.network
        assert isinstance(network, nn.Module)
        self._parameters = count_parameters(network)
        nodes = self._monitor.nodes
        device = torch.cuda.get_device_name() if pl_module.device.type == "cuda" else "CPU"
        environment = {
            **versions(),
            "ranks": f"{len(nodes)} on {', '.join(sorted(set(nodes)))}",
            "device": device,
            "precision": trainer.precision,
            "threads": torch.get_num_threads(),
        }
        counts = {part: f"{count:,}" for part, count in self._parameters.items()}
        pages = {
            "recipe": _code_block(self._recipe.as_dict()),
            "data": _code_block(self._manifest),
            "parameters": table(["name", "value"], counts.items()),
            "code": table(["name", "value"], environment.items()),
        }
        for name, page in pages.items():
            log.add_text(f"run/{name}", page, trainer.global_step + 1)
        best_by = self._recipe.run.best_by
        compared = list(dict.fromkeys([best_tag(best_by), validation_tag(best_by), *COMPARED_METRICS]))
        # Always at step 0: of several records, TensorBoard shows the first one that it finds.
        log.add_hyperparameters(self._hyperparameters(), compared, 0)

    def _hyperparameters(self) -> dict[str, object]:
        sections = self._recipe.as_dict()
        values = {
            f"{section}.{key}": value
            for section, excluded in _HYPERPARAMETER_SECTIONS.items()
            for key, value in sections[section].items()
            if key not in excluded
        }
        values |= {
            "corpus.vocabulary_size": sections["corpus"]["vocabulary_size"],
            "run.seed": sections["run"]["seed"],
            "parameters": self._parameters["all"],
        }
        return {name: value for name, value in values.items() if value is not None}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write summary.json."""
        log = trainer.logger
        if isinstance(log, RunLog) and log.writes:
            summary = {
                "step": trainer.global_step,
                **final_metrics(log, self._recipe.run.best_by),
                "goodput": self._monitor.goodput(),
                "seconds_since_submission": self._monitor.seconds_since_submission(),
                "starts": len(self.starts),
                "parameters": self._parameters["all"],
            }
            log.write(SUMMARY, (json.dumps(summary, indent=2) + "\n").encode())


def final_metrics(log: RunLog, best_by: str) -> dict[str, object]:
    """Return the last value of each metric, the best validation by a metric, and the median throughput."""
    lines = list(read_metrics(log.run))
    last: PlainValues = {}
    for line in lines:
        last |= line
    tag, best = validation_tag(best_by), max if mode_of(best_by) == "max" else min
    validations = [line for line in lines if line.get(tag) is not None]
    throughput = "train_perf/target_tokens_per_second"
    rates = [line[throughput] for line in lines if throughput in line]
    return {
        "last": {name: value for name, value in last.items() if name not in ("step", "time")},
        "best_validation": best(validations, key=lambda line: line[tag], default=None),
        "target_tokens_per_second": statistics.median(rates) if rates else None,
    }


def count_parameters(network: nn.Module) -> dict[str, int]:
    """Return the number of parameters of each direct submodule that has any, and of the network as "all"."""
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in network.named_children()}
    return {
        **{name: count for name, count in counts.items() if count},
        "all": sum(p.numel() for p in network.parameters()),
    }


def _code_block(values: Mapping[str, object]) -> str:
    return indent(yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True), 4 * " ")


def record_start(log: RunLog, job: JobStep | None, backend: dict[str, str]) -> list[PlainValues]:
    """Add the record of this start, and return all records of the run, the oldest first.

    `submitted` and `began` are seconds since the epoch; `submitted` is when the job was put into the queue. `backend`
    is the summary of the run's backend.
    """
    now = time.time()
    start = {
        "submitted": min(_submit_time(job.job), now) if job else now,
        "began": now,
        "step": log.step,
        "host": node_name(),
        "job": job.job if job else None,
        "restarts": job.restarts if job else 0,
        "backend": backend,
    }
    starts = [*read_metrics(log.run, STARTS), start]
    log.write(STARTS, "".join(json.dumps(one) + "\n" for one in starts).encode())
    return starts


def first_submission(starts: list[PlainValues]) -> float:
    """Return when the run was first submitted, in seconds since the epoch; starts with a clock behind are ignored."""
    return min(start["submitted"] for start in starts if start["began"] >= starts[0]["began"])


def _submit_time(job: str) -> float:
    """Return when a job was last put into the queue; the current time if SLURM does not answer."""
    try:
        command = ["scontrol", "show", "job", "--oneliner", job]
        output = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=20).stdout
        fields = dict(field.partition("=")[::2] for field in output.split())
        return datetime.fromisoformat(fields["SubmitTime"]).timestamp()
    except (OSError, subprocess.SubprocessError, KeyError, ValueError):
        return time.time()
