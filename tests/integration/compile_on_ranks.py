"""Train a compiled network on two ranks: `python -m tests.integration.compile_on_ranks CORPUS RESULTS`.

`TranslationModule.warm_up` is called before the first step, as the memory probe does on a GPU. Another attention
stands in for flash attention. Each rank writes `RANK.json` to RESULTS: numbers of compilations, of graphs and of the
parts that DDP splits them into, before the first step and at the end; and sums of the gradients of the rehearsal, which
differ between ranks unless they are reduced, and of the trained weights.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from data_module.batching.batch import RankBatch, SpecialIds
from data_module.settings import BatchSettings
from data_module.tokenization.tokenizer import Tokenizer
from data_module.translation_data_module import TranslationDataModule
from model import packed_attention
from model.backend import Backend
from model.fast.compilation import CompiledForward
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from model.training_module import TranslationModule
from pipeline.compat.lightning import SingleStreamDDP, call_as_step
from pipeline.runtime.console import quiet_lightning
from tests.compilations import Compilations
from tests.model.sentence_batches import masked_attention, packed

NUM_STEPS = 6


class Graphs:
    """A compiler that runs graphs as they are traced, and counts them after DDP has split them."""

    count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        self.count += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


class Rehearsal(Callback):
    """Calls `warm_up` at the start, and records what the program writes."""

    def __init__(self, batch: RankBatch, graphs: Graphs, results: Path) -> None:
        self.batch, self.graphs, self.results = batch, graphs, results
        self.counts: list[tuple[int, int, int]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.compilations = Compilations().__enter__()
        call_as_step(trainer, "warm_up", self.batch)
        self.count()
        self.gradients = sums([p.grad for p in pl_module.parameters() if p.grad is not None])
        trainer.optimizers[0].zero_grad()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.count()
        result = {"counts": self.counts, "gradients": self.gradients, "weights": sums(pl_module.parameters())}
        (self.results / f"{trainer.global_rank}.json").write_text(json.dumps(result))

    def count(self) -> None:
        self.counts.append((self.compilations.count, self.compilations.num_graphs, self.graphs.count))


def sums(tensors: Iterable[Tensor]) -> list[float]:
    return [tensor.double().sum().item() for tensor in tensors]


if __name__ == "__main__":
    corpus, results = Path(sys.argv[1]), Path(sys.argv[2])
    quiet_lightning()
    tokenizer = Tokenizer.load(corpus / "tokenizer.model")
    special = SpecialIds(pad=tokenizer.pad_id, bos=tokenizer.bos_id, eos=tokenizer.eos_id)
    network = NetworkSettings(num_layers=2, d_model=128, d_ff=512, num_heads=4, dropout=0.1)
    training = TrainingSettings(warmup_steps=10)
    torch.manual_seed(1)
    packed_attention._flash = masked_attention
    backend = Backend(attention=packed_attention.FLASH_ATTENTION)
    module = TranslationModule(tokenizer.vocabulary_size, special, network, training, DecodingSettings(), 1, backend)
    # Inductor would take minutes, and what is compiled, when and for which buckets does not depend on it.
    graphs = Graphs()
    module.compiled_forward = CompiledForward(module.network, backend=graphs)  # type: ignore[arg-type]
    data = TranslationDataModule(corpus, BatchSettings(batch_tokens=800, max_tokens_per_device=300), special, seed=1)
    lengths = [[(9, 7), (20, 11)] * (5 + int(os.environ.get("LOCAL_RANK", 0)))]
    batch = packed(lengths, shape=data.row_shape(2))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SingleStreamDDP(gradient_as_bucket_view=True, bucket_cap_mb=1),
        precision="bf16-mixed",
        max_steps=NUM_STEPS,
        limit_val_batches=0,
        logger=False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Rehearsal(batch, graphs, results)],
    )
    trainer.fit(module, datamodule=data)
    dist.destroy_process_group()
