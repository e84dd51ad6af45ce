"""The generated parts of docs/roofline.md: assumptions, terms and predictions of the paper's models."""

from pipeline.benchmark.roofline import (
    ENDS,
    GPUS,
    OPERATIONS,
    Assumptions,
    Batch,
    Gpu,
    Work,
    attention,
    batch_of,
    copies,
    loss,
    optimizer,
    pointwise,
    predict,
    products,
    terms,
)
from pipeline.config.recipe import load_recipe
from tests.conftest import ROOT
from tests.docs.recipe_schema import meanings

_COLUMNS = " | ".join(gpu.name for gpu in GPUS.values())


def _batches() -> dict[str, Batch]:
    return {name: batch_of(load_recipe([ROOT / "configs" / f"wmt14_en_de_{name}.yaml"])) for name in ("base", "big")}


def assumptions() -> str:
    """Return a table of the data sheets, and one of what is assumed."""
    rows = [f"| data sheet, links in one direction | {_COLUMNS} |", "| --- " * (1 + len(GPUS)) + "|"]
    for field, unit, meaning in (
        ("flops_per_second", 1e12, "TFLOP/s in dense 16-bit products"),
        ("bytes_per_second", 1e9, "GB/s of memory"),
        ("link_bytes_per_second", 1e9, "GB/s of NVLink"),
        ("adapter_bytes_per_second", 1e9, "GB/s of the network adapter of each GPU"),
    ):
        values = " | ".join(f"{getattr(gpu, field) / unit:,.0f}" for gpu in GPUS.values())
        rows.append(f"| {meaning} | {values} |")
    rows += ["", f"| assumption | {' | '.join(ENDS)} |", "| --- " * (1 + len(ENDS)) + "|"]
    for name, text in meanings(Assumptions).items():
        values = " | ".join(f"{getattr(assumed, name):g}" for assumed in ENDS.values())
        rows.append(f"| {text.removesuffix('.')} | {values} |")
    return "\n".join(rows)


def amounts_and_times() -> str:
    """Return a table of each model's terms: what one GPU computes and moves in a step, and milliseconds on each GPU."""
    rows = [f"| model, term | amount | {_COLUMNS} |", "| --- " * (2 + len(GPUS)) + "|"]
    for model, batch in _batches().items():
        works = {term.__name__: term(batch) for term in (products, attention, loss, pointwise)}
        works |= {"optimizer": [optimizer(batch)], "copies": [copies(batch)]}
        amounts = {name: _amount(work) for name, work in works.items()}
        amounts["gaps"] = amounts["host"] = f"{OPERATIONS + copies(batch).kernels:,} operations"
        seconds = [[terms(batch, gpu, assumed, gpus=8) for assumed in ENDS.values()] for gpu in GPUS.values()]
        for term, amount in amounts.items():
            times = " | ".join(_both(1000 * fast[term], 1000 * slow[term]) for fast, slow in seconds)
            rows.append(f"| {model}, {term} | {amount} | {times} |")
    return "\n".join(rows)


def _amount(works: list[Work]) -> str:
    flops = sum(work.kernels * work.flops for work in works) / 1e12
    gigabytes = sum(work.kernels * work.num_bytes for work in works) / 1e9
    return f"{flops:.2f} TFLOP, {gigabytes:.1f} GB" if flops else f"{gigabytes:.1f} GB"


def predictions() -> str:
    """Return a table of steps on 1 to 512 GPUs."""
    rows = [f"| model | GPUs | tokens a side | {_COLUMNS} |", "| --- " * (3 + len(GPUS)) + "|"]
    for model, batch in _batches().items():
        for is_shared, said in ((False, "a GPU"), (True, "shared")):
            for gpus in (8, 64, 512) if is_shared else (1, 8, 64, 512):
                cells = " | ".join(_cell(batch, gpu, gpus, is_shared) for gpu in GPUS.values())
                rows.append(f"| {model} | {gpus} | {batch.tokens:,} {said} | {cells} |")
    return "\n".join(rows)


def _cell(batch: Batch, gpu: Gpu, gpus: int, is_shared: bool) -> str:
    fast, slow = (predict(batch, gpu, gpus, is_shared, assumed) for assumed in ENDS.values())
    step = _both(1000 * fast.step_seconds, 1000 * slow.step_seconds)
    exposed = _both(1000 * fast.exposed_seconds, 1000 * slow.exposed_seconds)
    rate = _both(slow.target_tokens_per_second / 1e6, fast.target_tokens_per_second / 1e6, ".3g")
    return f"{step} ({exposed}); {rate}; {_both(100 * slow.mfu, 100 * fast.mfu, '.0f')} %"


def _both(first: float, second: float, form: str = ".1f") -> str:
    """Return both ends, or one number where they are the same."""
    return " to ".join(dict.fromkeys([f"{first:{form}}", f"{second:{form}}"]))
