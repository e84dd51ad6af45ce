"""The generated parts of docs/roofline.md: assumptions, amounts, times and predictions of the paper's models."""

from pipeline.benchmark.scaling_model import (
    Prediction,
    all_reduce_seconds,
    ddp_buckets,
    strong_scaling,
    weak_scaling,
)
from pipeline.benchmark.step_terms import (
    ASSUMPTIONS,
    FLASH_TILE,
    GPUS,
    KERNELS,
    KEY_TILES,
    LOGIT_BYTES,
    OPERATIONS,
    ROW_TILE,
    Gpu,
    Roofline,
    Size,
    Work,
    parameter_sizes,
    roofline,
)
from pipeline.config.recipe import load_recipe
from tests.conftest import ROOT

_RECIPES = {name: ROOT / "configs" / f"wmt14_en_de_{name}.yaml" for name in ("base", "big")}
_SHARE = "amount counted, share assumed"
_DATA_SHEET = (
    "TFLOP/s in dense bfloat16 products, GB/s of memory, GB, GB/s of NVLink and of the server's network, one direction"
)


def assumptions() -> str:
    """Return a table of what the terms are computed with."""
    rows = ["| number | value | mark |", "| --- | --- | --- |"]
    for gpu in GPUS.values():
        rates = gpu.flops_per_second / 1e12, gpu.bytes_per_second / 1e9, gpu.memory_bytes / 1e9
        links = gpu.link_bytes_per_second / 1e9, gpu.network_bytes_per_second / 1e9
        values = ", ".join(f"{value:,.0f}" for value in (*rates, *links))
        rows.append(f"| {gpu.name}: {_DATA_SHEET} | {values} | data sheet |")
    rows += [f"| {one.meaning} | {one.value:g} | assumed |" for one in ASSUMPTIONS]
    counted = {
        "rows and keys of a tile, kernels `pytorch`": FLASH_TILE,
        "rows of a tile, kernels `triton`": ROW_TILE,
        "keys of an iteration, kernels `triton`: forward; backward": "; ".join(map(str, KEY_TILES)),
    }
    counted |= {f"bytes that passes over a logit move, kernels `{one}`": LOGIT_BYTES[one] for one in KERNELS}
    rows += [f"| {meaning} | {number} | counted |" for meaning, number in counted.items()]
    rows += [f"| operations of the device, {mode} | {number:,} | counted |" for mode, number in OPERATIONS.items()]
    return "\n".join(rows)


def terms() -> str:
    """Return a table of each recipe's terms: amounts, and milliseconds on each GPU."""
    return "\n\n".join(f"### {name.capitalize()}\n\n{_table(name)}" for name in _RECIPES)


def _table(name: str) -> str:
    lines = [_roofline(name, gpu) for gpu in GPUS.values()]
    times = " | ".join(f"{one.gpu.name}, ms" for one in lines)
    rows = [f"| term | mark | amount | {times} |", "| --- " * (3 + len(lines)) + "|"]
    for term in lines[0].terms:
        if term not in ("attention", "loss"):
            rows.append(_row(term, [one.terms[term] for one in lines]))
            continue
        for kernels in KERNELS:
            works = [roofline(one.size, one.gpu, kernels).terms[term] for one in lines]
            rows.append(_row(f"{term}, kernels `{kernels}`", works))
    launches = " | ".join(f"{1000 * one.host_seconds():.1f}" for one in lines)
    operations = f"{OPERATIONS['compiled']:,} operations"
    rows.append(f"| launches, beside the device | number counted, time assumed | {operations} | {launches} |")
    return "\n".join([*rows, *(_all_reduce(lines, gpus) for gpus in (8, 64))])


def _row(term: str, works: list[list[Work]]) -> str:
    """Return the row of a term, with its amount on the first GPU; only the loss's chunks differ with the memory."""
    flops = sum(work.kernels * work.flops for work in works[0]) / 1e12
    gigabytes = sum(work.kernels * work.num_bytes for work in works[0]) / 1e9
    amount = f"{flops:.2f} TFLOP, {gigabytes:.1f} GB" if flops else f"{gigabytes:.1f} GB"
    times = " | ".join(
        f"{1000 * sum(work.seconds(gpu) for work in ours):.1f}" for ours, gpu in zip(works, GPUS.values(), strict=True)
    )
    return f"| {term} | {_SHARE} | {amount} | {times} |"


def _all_reduce(lines: list[Roofline], gpus: int) -> str:
    """Return the row of all buckets' all-reduces, with the part of them that is exposed."""
    cells = []
    for one in lines:
        cluster, buckets = one.gpu.cluster(), ddp_buckets(_gradients(one))
        whole = sum(all_reduce_seconds(bucket.num_bytes, gpus, cluster.link(gpus)) for bucket in buckets)
        exposed = weak_scaling(one.step(), buckets, cluster, gpus).exposed_seconds
        cells.append(f"{1000 * whole:.1f}, exposed {1000 * exposed:.1f}")
    amount = f"{sum(_gradients(lines[0])) / 1e9:.2f} GB"
    return f"| all-reduce on {gpus} GPUs | {_SHARE} | {amount} | {' | '.join(cells)} |"


def predictions() -> str:
    """Return a table of steps on 1, 8 and 64 GPUs."""
    titles = " | ".join(gpu.name for gpu in GPUS.values())
    rows = [f"| recipe, kernels | GPUs | tokens a side | {titles} |", "| --- " * (3 + len(GPUS)) + "|"]
    for name in _RECIPES:
        for kernels in KERNELS:
            for gpus, way in ((1, "own"), (8, "own"), (64, "own"), (8, "shared"), (64, "shared")):
                tokens = _size(name).tokens
                said = f"{tokens:,} a GPU" if way == "own" else f"{tokens:,} shared"
                cells = " | ".join(_cell(_roofline(name, gpu, kernels), gpus, way) for gpu in GPUS.values())
                rows.append(f"| {name}, `{kernels}` | {gpus} | {said} | {cells} |")
    return "\n".join(rows)


def _cell(one: Roofline, gpus: int, way: str) -> str:
    buckets = ddp_buckets(_gradients(one))
    scaling, batches = (weak_scaling, gpus) if way == "own" else (strong_scaling, 1)
    predicted: Prediction = scaling(one.step(), buckets, one.gpu.cluster(), gpus)
    seconds = predicted.step_seconds
    rate = batches * one.size.tokens / seconds / 1e6
    return f"{1000 * seconds:.1f}; {rate:.3g}; {100 * one.mfu(seconds / batches, gpus):.0f} %"


def _size(name: str) -> Size:
    recipe = load_recipe([_RECIPES[name]])
    return Size(recipe.network, recipe.corpus.vocabulary_size, recipe.batches.batch_tokens)


def _roofline(name: str, gpu: Gpu, kernels: str = "triton") -> Roofline:
    return roofline(_size(name), gpu, kernels)


def _gradients(one: Roofline) -> list[int]:
    return [4 * size for size in parameter_sizes(one.size.network, one.size.vocabulary_size)]
