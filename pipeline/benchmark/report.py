"""Figures and table of a comparison."""

from typing import TYPE_CHECKING, Any

import numpy as np

from model.settings import NetworkSettings
from pipeline.profiling.flops import training_flops

if TYPE_CHECKING:
    from pipeline.benchmark.side_by_side import Round, SideBySide

PHASES = ("data_wait", "forward", "loss", "backward", "optimizer", "rest")


def figures_of(comparison: "SideBySide", network: NetworkSettings, vocabulary_size: int) -> dict[str, Any]:
    """Return our figures, the ratios and, under `baselines`, each baseline's figures.

    `train` documents the figures. Units are seconds, bytes and FLOP/s.
    """
    rounds = comparison.rounds
    source, target = (np.concatenate([vars(one)[side] for one in rounds]) for side in ("source", "target"))
    flops = training_flops(network, vocabulary_size, source, target) / float(target.sum())
    product_rate = float(np.median([one.product_rate for one in rounds]))
    figures = {
        **_of_network(comparison, "ours", flops, product_rate),
        "padding_share": 1.0 - float(source.sum() + target.sum()) / sum(one.padded_tokens for one in rounds),
        "flops_per_target_token": flops,
        "ceiling_flops_per_second": product_rate,
        "warm_up_steps": comparison.warm_up_steps,
        "compiled_graphs": comparison.num_graphs,
        "steps_taken_again": comparison.steps_taken_again,
    }
    for name in comparison.others:
        ratios = [_rate(one, "ours") / _rate(one, name) for one in rounds]
        figures |= _spread(f"ratio_to_{name}", ratios)
    baselines = {name: _of_network(comparison, name, flops, product_rate) for name in comparison.others}
    return figures | {"baselines": baselines}


def _of_network(comparison: "SideBySide", name: str, flops: float, product_rate: float) -> dict[str, Any]:
    rounds = comparison.rounds
    rates = [_rate(one, name) for one in rounds]
    phases = {f"{p}_seconds": float(np.median([one.seconds[name].get(p, 0.0) for one in rounds])) for p in PHASES}
    mfu = float(np.median(rates)) * flops / product_rate
    return {
        **_spread("target_tokens_per_second", rates),
        **_spread("step_seconds", [_total(one, name) for one in rounds]),
        **phases,
        "peak_memory_bytes": comparison.peak_memory[name],
        "parameters": comparison.num_parameters[name],
        "mfu": mfu,
    }


def loop_seconds(comparison: "SideBySide") -> float:
    """Return how many seconds longer a step takes in Lightning's Trainer than in a bare loop."""
    return float(np.median([_total(one, "ours") - _total(one, "bare") for one in comparison.rounds]))


def rounded(value: Any) -> Any:
    """Round to five significant digits, more than the clock's precision."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def table(figures: dict[str, Any]) -> str:
    """Return a table with a line for each network; times are in milliseconds a step."""
    lines = [f"{'':8}{'tokens/s':>10}{'ms/step':>10}" + "".join(f"{p:>10}" for p in PHASES) + f"{'MB':>8}{'ratio':>7}"]
    for name, one in {"ours": figures, **figures["baselines"]}.items():
        seconds = [one["step_seconds"], *(one[f"{phase}_seconds"] for phase in PHASES)]
        ratio = f"{figures[f'ratio_to_{name}']:7.2f}" if name != "ours" else ""
        lines.append(
            f"{name:8}{one['target_tokens_per_second']:10,.0f}"
            + "".join(f"{1000 * s:10.1f}" for s in seconds)
            + f"{one['peak_memory_bytes'] / 1e6:8,.0f}{ratio}"
        )
    lines.append(
        f"MFU {figures['mfu']:.1%} of {figures['ceiling_flops_per_second'] / 1e9:,.0f} GFLOP/s "
        f"({figures['precision']}, {figures['threads']} threads), {figures['padding_share']:.1%} padding, "
        f"{figures['flops_per_target_token'] / 1e6:.1f} MFLOP a target token, "
        f"the loop {1000 * figures['loop_seconds_per_step']:.2f} ms a step"
    )
    return "\n".join(lines)


def _spread(name: str, values: list[float]) -> dict[str, Any]:
    """Return median and quartiles."""
    low, middle, high = (float(q) for q in np.percentile(values, (25, 50, 75)))
    return {name: middle, f"{name}_quartiles": [low, high]}


def _total(one: "Round", name: str) -> float:
    """Return how many seconds a step of the network takes."""
    return sum(one.seconds[name].values())


def _rate(one: "Round", name: str) -> float:
    """Return the network's target tokens a second."""
    return one.tokens[name] / _total(one, name)
