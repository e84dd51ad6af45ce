"""Figures and table of a comparison."""

from typing import TYPE_CHECKING, Any

import numpy as np

from model.settings import NetworkSettings
from pipeline.profiling.flops import training_flops

if TYPE_CHECKING:
    from pipeline.benchmark.side_by_side import SideBySide


def figures_of(comparison: "SideBySide", network: NetworkSettings, vocabulary_size: int) -> dict[str, Any]:
    """Return our figures, the ratios and, under `baselines`, each baseline's figures.

    `train` documents the figures. Units are seconds, bytes and FLOP/s.
    """
    rounds = comparison.rounds
    source, target = (np.concatenate([vars(one)[side] for one in rounds]) for side in ("source", "target"))
    flops = training_flops(network, vocabulary_size, source, target) / float(target.sum())
    product_rate = float(np.median([one.product_rate for one in rounds]))

    def of_network(name: str) -> dict[str, Any]:
        rates = [one.tokens[name] / one.seconds[name] for one in rounds]
        return {
            **_spread("target_tokens_per_second", rates),
            **_spread("step_seconds", [one.seconds[name] for one in rounds]),
            "peak_memory_bytes": comparison.peak_memory[name],
            "mfu": float(np.median(rates)) * flops / product_rate,
        }

    figures = {
        **of_network("ours"),
        "padding_share": 1.0 - float(source.sum() + target.sum()) / sum(one.row_tokens for one in rounds),
        "flops_per_target_token": flops,
        "ceiling_flops_per_second": product_rate,
        "baselines": {name: of_network(name) for name in comparison.baselines},
    }
    for name in comparison.baselines:
        ratios = [one.tokens["ours"] / one.seconds["ours"] * one.seconds[name] / one.tokens[name] for one in rounds]
        figures |= _spread(f"ratio_to_{name}", ratios)
    return figures


def rounded(value: Any) -> Any:
    """Round to five significant digits, more than the clock's precision."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def table(figures: dict[str, Any]) -> str:
    """Return a table with a line for each network, and a line about ours."""
    lines = [f"{'':8}{'tokens/s':>10}{'ms/step':>10}{'MB':>8}{'ratio':>7}"]
    for name, one in {"ours": figures, **figures["baselines"]}.items():
        ratio = f"{figures[f'ratio_to_{name}']:7.2f}" if name != "ours" else ""
        lines.append(
            f"{name:8}{one['target_tokens_per_second']:10,.0f}{1000 * one['step_seconds']:10.1f}"
            f"{one['peak_memory_bytes'] / 1e6:8,.0f}{ratio}"
        )
    lines.append(
        f"MFU {figures['mfu']:.1%} of {figures['ceiling_flops_per_second'] / 1e9:,.0f} GFLOP/s "
        f"({figures['precision']}, {figures['threads']} threads), {figures['padding_share']:.1%} padding, "
        f"{figures['flops_per_target_token'] / 1e6:.1f} MFLOP a target token"
    )
    return "\n".join(lines)


def _spread(name: str, values: list[float]) -> dict[str, Any]:
    """Return median and quartiles."""
    low, middle, high = (float(q) for q in np.percentile(values, (25, 50, 75)))
    return {name: middle, f"{name}_quartiles": [low, high]}
