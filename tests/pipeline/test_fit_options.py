"""What fit decides by itself: precision, strategy, which keys of Lightning's Trainer a recipe may hold."""

from pathlib import Path

import torch
from lightning.pytorch.strategies import DDPStrategy

from pipeline.trainer_options import OWNED, best_precision, strategy, trainer_signature


def test_bf16_wherever_the_processor_has_it() -> None:
    has_bf16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    for accelerator in ("cpu",) if torch.cuda.is_available() else ("auto", "cpu"):
        assert best_precision(accelerator) == ("bf16-mixed" if has_bf16 else "32-true")


def test_ddp_where_there_is_more_than_one_process() -> None:
    assert strategy({"accelerator": "cpu", "devices": 1}) == "auto"
    assert strategy({"accelerator": "cpu", "devices": 2, "strategy": "fsdp"}) == "fsdp"
    for options in ({"devices": 2}, {"devices": 1, "num_nodes": 3}, {"devices": [0, 1], "strategy": "ddp"}):
        chosen = strategy({"accelerator": "cpu", **options})
        assert isinstance(chosen, DDPStrategy)
        assert chosen._ddp_kwargs == {"gradient_as_bucket_view": True}


def test_keys_that_are_not_the_recipes() -> None:
    signature = trainer_signature()
    assert {"max_steps", "val_check_interval", "precision", "devices", "num_nodes", "max_time"} <= signature.keys()
    assert not signature.keys() & OWNED.keys()
