"""What a run is, for those who look at it later; and what it has come to."""

import json
import statistics
import time
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from pipeline.checkpointing.run_folder import SUMMARY
from pipeline.config.recipe import Recipe
from pipeline.monitoring.log_files import read_metrics
from pipeline.monitoring.monitor import Monitor
from pipeline.monitoring.run_log import RunLog
from pipeline.monitoring.starts import first_submission
from pipeline.monitoring.tables import code, facts, table
from pipeline.runtime.slurm import node_name
from pipeline.runtime.versions import versions

SCORES = (
    "validation/best_bleu",
    "validation/bleu",
    "validation/chrf",
    "validation/loss",
    "validation/perplexity",
    "perf/target_tokens_per_second",
)
"""What a sweep's runs are compared by."""
_CHOSEN = {"network": (), "training": (), "batches": ("workers", "max_tokens_per_device")}
"""Sections that are a run's hyper-parameters, but for settings that change no result."""
LAYOUT = {
    "Is it learning?": {
        "loss": ["Multiline", ["^train/loss$", "^validation/loss$"]],
        "negative log-likelihood": [
            "Multiline",
            ["^train/negative_log_likelihood$", "^validation/negative_log_likelihood$"],
        ],
        "accuracy": ["Multiline", ["^train/accuracy$", "^validation/accuracy$"]],
        "BLEU and chrF": ["Multiline", ["^validation/bleu$", "^validation/chrf$"]],
        "BLEU by source length": ["Multiline", ["^validation_bleu_by_length/"]],
        "length ratio and repetition": ["Multiline", ["^validation/length_ratio$", "^validation/repetition$"]],
    },
    "Is it fast?": {
        "target tokens a second": ["Multiline", ["^perf/target_tokens_per_second$"]],
        "seconds a step": ["Multiline", ["^perf/step_seconds"]],
        "shares": ["Multiline", ["^perf/goodput$", "^perf/mfu$", "^perf/padding_share$"]],
    },
}


class RunMetadata(Callback):
    """Says in the text tab what runs and where, in HPARAMS what was chosen, and at the end writes the summary."""

    def __init__(self, recipe: Recipe, manifest: dict[str, Any], monitor: Monitor) -> None:
        self._recipe, self._manifest, self._monitor = recipe, manifest, monitor
        self._parameters: dict[str, int] = {}
        self.starts: list[dict[str, Any]] = []
        """As `record_start` gave them; the last one is this process."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Describe."""
        hosts: list[Any] = [node_name()]
        if dist.is_initialized():
            hosts = [""] * dist.get_world_size()
            dist.all_gather_object(hosts, node_name())
        log = trainer.logger
        if not isinstance(log, RunLog) or not log.writes:
            return
        network = pl_module.network
        assert isinstance(network, nn.Module)
        self._parameters = parameters_by_part(network)
        step = trainer.global_step + 1
        log.add_text("run/recipe", code(yaml.safe_dump(self._recipe.as_dict(), sort_keys=False)), step)
        log.add_text("run/data", code(yaml.safe_dump(self._manifest, sort_keys=False, allow_unicode=True)), step)
        counts = {part: f"{count:,}" for part, count in self._parameters.items()}
        log.add_text("run/parameters", facts(counts), step)
        device = torch.cuda.get_device_name() if pl_module.device.type == "cuda" else "CPU"
        where = {
            "ranks": f"{len(hosts)} on {', '.join(sorted(set(hosts)))}",
            "device": device,
            "precision": trainer.precision,
            "threads": torch.get_num_threads(),
        }
        log.add_text("run/code", facts({**versions(), **where}), step)
        log.add_text("run/starts", _starts(self.starts), step)
        values = self._recipe.as_dict()
        chosen = {
            f"{name}.{key}": value
            for name, without in _CHOSEN.items()
            for key, value in values[name].items()
            if key not in without
        }
        chosen |= {
            "corpus.vocabulary_size": values["corpus"]["vocabulary_size"],
            "run.seed": values["run"]["seed"],
            "parameters": self._parameters["all"],
        }
        # They stay the same over a run's starts, and TensorBoard takes the first it finds.
        log.add_hyperparameters({name: value for name, value in chosen.items() if value is not None}, list(SCORES), 0)
        log.add_layout(LAYOUT, 0)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what the run has come to."""
        log = trainer.logger
        if isinstance(log, RunLog) and log.writes:
            summary = {
                "step": trainer.global_step,
                **results(log),
                "goodput": self._monitor.goodput(),
                "seconds_since_submission": time.time() - first_submission(self.starts),
                "starts": len(self.starts),
                "parameters": self._parameters["all"],
            }
            log.write(SUMMARY, (json.dumps(summary, indent=2) + "\n").encode())


def results(log: RunLog) -> dict[str, Any]:
    """The last value of each curve, the validation with the best BLEU, and the median speed."""
    try:
        lines = list(read_metrics(log.run))
    except OSError:
        return {}
    last: dict[str, Any] = {}
    for line in lines:
        last |= line
    validations = [line for line in lines if "validation/bleu" in line]
    speeds = [line["perf/target_tokens_per_second"] for line in lines if "perf/target_tokens_per_second" in line]
    return {
        "last": {name: value for name, value in last.items() if name not in ("step", "time")},
        "best_validation": max(validations, key=lambda line: line["validation/bleu"], default=None),
        "target_tokens_per_second": statistics.median(speeds) if speeds else None,
    }


def parameters_by_part(network: nn.Module) -> dict[str, int]:
    """How many numbers are learned in each of the network's parts, and in all."""
    parts = {name: sum(p.numel() for p in part.parameters()) for name, part in network.named_children()}
    learned = {name: count for name, count in parts.items() if count}
    return {**learned, "all": sum(p.numel() for p in network.parameters())}


def _starts(starts: list[dict[str, Any]]) -> str:
    rows = (
        (
            number + 1,
            _clock(start["submitted"]),
            _clock(start["began"]),
            f"{start['step']:,}",
            start["host"],
            start["job"] or "",
            start["restarts"] if start["job"] else "",
        )
        for number, start in enumerate(starts)
    )
    return table(["start", "submitted", "began", "from step", "host", "SLURM job", "requeued"], rows)


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
