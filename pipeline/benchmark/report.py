"""What a contest comes to: figures, and a table for a person."""

from typing import TYPE_CHECKING, Any

import numpy as np

from model.settings import NetworkSettings
from pipeline.profiling.flops import training_flops

if TYPE_CHECKING:
    from pipeline.benchmark.side_by_side import SideBySide, Turn

PARTS = ("data_wait", "forward", "loss", "backward", "optimizer", "rest")


def figures_of(contest: "SideBySide", network: NetworkSettings, vocabulary_size: int) -> dict[str, Any]:
    """Our figures, then the ratios, then under `baselines` each baseline's own; seconds, bytes and FLOP/s.

    See `train` for what they mean.
    """
    turns = contest.turns
    source, target = (np.concatenate([vars(turn)[side] for turn in turns]) for side in ("source", "target"))
    flops = training_flops(network, vocabulary_size, source, target) / float(target.sum())
    ceiling = float(np.median([turn.ceiling for turn in turns]))
    figures = {
        **_of_network(contest, "ours", flops, ceiling),
        "padding_share": 1.0 - float(source.sum() + target.sum()) / sum(turn.cells for turn in turns),
        "flops_per_target_token": flops,
        "ceiling_flops_per_second": ceiling,
        "warm_up_steps": contest.warm_up_steps,
        "compiled_graphs": contest.num_graphs,
        "steps_taken_again": contest.steps_taken_again,
    }
    for name in contest.others:
        ratios = [_total(turn, name) / _total(turn, "ours") for turn in turns]
        figures |= _spread(f"ratio_to_{name}", ratios)
    return figures | {"baselines": {name: _of_network(contest, name, flops, ceiling) for name in contest.others}}


def _of_network(contest: "SideBySide", name: str, flops: float, ceiling: float) -> dict[str, Any]:
    turns = contest.turns
    rates = [turn.tokens / _total(turn, name) for turn in turns]
    parts = {f"{p}_seconds": float(np.median([turn.seconds[name].get(p, 0.0) for turn in turns])) for p in PARTS}
    return {
        **_spread("target_tokens_per_second", rates),
        **_spread("step_seconds", [_total(turn, name) for turn in turns]),
        **parts,
        "peak_memory_bytes": contest.peak_memory[name],
        "parameters": contest.num_parameters[name],
        "share_of_ceiling": float(np.median(rates)) * flops / ceiling,
    }


def loop_seconds(contest: "SideBySide") -> float:
    """What a step takes in Lightning's Trainer beyond the same step in a bare loop."""
    return float(np.median([_total(turn, "ours") - _total(turn, "bare") for turn in contest.turns]))


def rounded(value: Any) -> Any:
    """Five significant digits: more than a clock has."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def table(figures: dict[str, Any]) -> str:
    """A line a network, milliseconds a step."""
    lines = [f"{'':8}{'tokens/s':>10}{'ms/step':>10}" + "".join(f"{p:>10}" for p in PARTS) + f"{'MB':>8}{'ratio':>7}"]
    for name, one in {"ours": figures, **figures["baselines"]}.items():
        seconds = [one["step_seconds"], *(one[f"{part}_seconds"] for part in PARTS)]
        ratio = f"{figures[f'ratio_to_{name}']:7.2f}" if name != "ours" else ""
        lines.append(
            f"{name:8}{one['target_tokens_per_second']:10,.0f}"
            + "".join(f"{1000 * s:10.1f}" for s in seconds)
            + f"{one['peak_memory_bytes'] / 1e6:8,.0f}{ratio}"
        )
    lines.append(
        f"{figures['share_of_ceiling']:.1%} of {figures['ceiling_flops_per_second'] / 1e9:,.0f} GFLOP/s "
        f"({figures['precision']}, {figures['threads']} threads), {figures['padding_share']:.1%} padding, "
        f"{figures['flops_per_target_token'] / 1e6:.1f} MFLOP a target token, "
        f"the loop {1000 * figures['loop_seconds_per_step']:.2f} ms a step"
    )
    return "\n".join(lines)


def _spread(name: str, values: list[float]) -> dict[str, Any]:
    """Median and quartiles."""
    low, middle, high = (float(q) for q in np.percentile(values, (25, 50, 75)))
    return {name: middle, f"{name}_quartiles": [low, high]}


def _total(turn: "Turn", name: str) -> float:
    return sum(turn.seconds[name].values())
