"""The generated parts of docs/roofline.md: assumptions, and predictions of the paper's models."""

from pipeline.benchmark.roofline import ENDS, GPUS, Assumptions, batch_of, predict_all, table
from pipeline.config.recipe import load_recipe
from tests.conftest import ROOT
from tests.docs.recipe_schema import meanings


def assumptions() -> str:
    """Return a table of the data sheets, and one of what is assumed."""
    names = [gpu.name for gpu in GPUS.values()]
    rows = [f"| data sheet, links in one direction | {' | '.join(names)} |", "| --- " * (1 + len(names)) + "|"]
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


def predictions() -> str:
    lines = ["```text"]
    for model, gpu in (("base", GPUS["a100"]), ("big", GPUS["a100"])):
        batch = batch_of(load_recipe([ROOT / "configs" / f"wmt14_en_de_{model}.yaml"]))
        lines += [f"{model}: {gpu.name}, {batch.tokens:,} tokens a side", table(predict_all(batch, gpu))]
    return "\n".join([*lines, "```"])
