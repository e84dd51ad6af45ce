"""Compare `benchmark scaling` with two gloo processes: `python -m tests.integration.scaling_check RECIPE`.

The recipe is trained on the CPU with DDP and one thread per process: by one process, by two processes that share a
batch, and by two processes with one batch each, with and without all-reduce. Every turn measures each of these and
gloo's all-reduce once, so that drift affects all of them alike. Two processes also share memory and cores of the
machine, which the model does not consider. `asleep` therefore holds measurements of DDP backward passes that reduce the
same gradients but sleep instead of computing, as if a GPU did the work; only the overlap matters there.

The last line of the output is a JSON object with times in seconds and the predicted and measured efficiencies. Each
time is the minimum over all turns. Run this on an otherwise idle machine.
"""

import json
import socket
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from data_module.batching.batch import PackedBatch, RankBatch, SpecialIds, collate
from data_module.batching.batch_plan import plan_epoch
from data_module.batching.rank_rows import rank_rows
from data_module.corpus.store import lengths_with_eos
from data_module.tokenization.tokenizer import Tokenizer
from data_module.translation_data_module import TranslationDataModule
from model.loss import label_smoothed_loss
from model.segment_attention import packed_segments
from model.transformer import Transformer
from pipeline.benchmark.report import rounded
from pipeline.benchmark.scaling_model import (
    Cluster,
    Link,
    Step,
    ddp_buckets,
    exposed_seconds,
    strong_scaling,
    weak_scaling,
)
from pipeline.config.recipe import Recipe, load_recipe
from pipeline.training.precision import best_precision

TURNS, WARM_UP_TURNS = 30, 2
SMALLER = 16
LATENCY_BYTES, BUCKET_BYTES = 4096, 25 << 20


class Losses(nn.Module):
    """The network with its loss, for DDP to wrap."""

    def __init__(self, network: Transformer, smoothing: float, pad: int) -> None:
        super().__init__()
        self.network, self.smoothing, self.pad = network, smoothing, pad

    def forward(self, batch: PackedBatch) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        states = self.network.packed(
            (batch.source, batch.source_positions),
            (batch.target_input, batch.target_positions),
            packed_segments(batch, dtype),
        )
        weight = self.network.embedding.weight
        return label_smoothed_loss(states, weight, batch.target_output, self.smoothing, self.pad).smoothed


class SleepInBackward(torch.autograd.Function):
    """The identity; its backward pass sleeps and gives the weight a zero gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = torch.zeros(()).expand_as(weight), seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(ctx.seconds)
        return gradients[0], ctx.gradient, None


class SleepingModule(nn.Module):
    """A module with the network's parameter sizes whose backward pass sleeps in proportion to each parameter's size."""

    def __init__(self, parameter_bytes: list[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(size // 4) for size in parameter_bytes])

    def forward(self, seconds: float) -> Tensor:
        num_timed_elements = sum(weight.numel() for weight in list(self.weights)[1:])
        x = torch.zeros(1, requires_grad=True)
        for number, weight in enumerate(self.weights):
            x = SleepInBackward.apply(x, weight, seconds * weight.numel() / num_timed_elements if number else 0.0)
        return x.sum()


def asleep(parameter_bytes: list[int]) -> dict[str, Any]:
    """Measure the exposed all-reduce time next to backward passes of 0, 0.5, 1 and 2 times an all-reduce."""
    module = SleepingModule(parameter_bytes)
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=True, broadcast_buffers=False)
    buckets = ddp_buckets(parameter_bytes)
    full_all_reduce = all_reduce_seconds(sum(parameter_bytes))
    results: dict[str, list[float]] = {"backward": [], "exposed_predicted": [], "exposed_measured": []}
    for ratio in (0.0, 0.5, 1.0, 2.0):
        backward: dict[bool, list[float]] = {False: [], True: []}
        all_reduces = []
        for turn in range(20):
            for synchronize in (False, True):
                with nullcontext() if synchronize else ddp.no_sync():
                    loss = ddp(ratio * full_all_reduce)
                    dist.barrier()
                    began = time.perf_counter()
                    loss.backward()
                    # DDP builds its final buckets after the first synchronized backward pass.
                    if turn > 1:
                        backward[synchronize].append(time.perf_counter() - began)
                ddp.zero_grad()
            all_reduces.append(all_reduce_seconds(BUCKET_BYTES))
        alone = min(backward[False])
        small = all_reduce_seconds(LATENCY_BYTES)
        link = Link(BUCKET_BYTES / (min(all_reduces) - small), small / 2)
        results["backward"].append(alone)
        results["exposed_predicted"].append(exposed_seconds(buckets, alone, 2, link))
        results["exposed_measured"].append(min(backward[True]) - alone)
    return results


class TrainingProcess:
    """The training state of one of the two processes."""

    def __init__(self, rank: int, recipe: Recipe) -> None:
        self.rank = rank
        tokenizer = Tokenizer.load(Path(recipe.corpus.folder) / "tokenizer.model")
        self.special = SpecialIds(tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id)
        self.data = TranslationDataModule(Path(recipe.corpus.folder), recipe.batches, self.special, recipe.run.seed)
        corpus = self.data.train_corpus
        self.plan = plan_epoch(
            lengths_with_eos(corpus.source),
            lengths_with_eos(corpus.target),
            batch_tokens=recipe.batches.batch_tokens,
            seed=0,
            epoch=0,
        )
        network = Transformer(tokenizer.vocabulary_size, recipe.network)
        self.parameter_bytes = [4 * parameter.numel() for parameter in network.parameters()]
        losses = Losses(network, recipe.training.label_smoothing, self.special.pad)
        # One process may train while the other waits, so buffers must not be broadcast.
        self.ddp = DistributedDataParallel(losses, gradient_as_bucket_view=True, broadcast_buffers=False)
        # The learning rate is 0, so that the weights of both processes stay equal.
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), lr=0.0, fused=True)
        self.bf16 = best_precision("cpu") == "bf16-mixed"
        self.backward_seconds = 0.0

    def part_of(self, batch: int, part: int, parts: int) -> RankBatch:
        """Return one part of a global batch that is split into `parts`."""
        corpus, pairs, shape = self.data.train_corpus, self.plan[batch], self.data.row_shape(parts)
        source, target = (lengths_with_eos(side)[pairs] for side in (corpus.source, corpus.target))
        rows = [pairs[row] for row in rank_rows(source, target, shape, parts)[part]]
        return collate(corpus, rows, self.special, shape, num_target_tokens=self.plan.target_tokens(batch))

    def step(self, batch: RankBatch | None, synchronize: bool) -> float:
        """Train on a batch, or only wait if it is None; return the seconds until both processes have finished."""
        dist.barrier()
        began = time.perf_counter()
        self.backward_seconds = 0.0
        if batch is not None:
            micro_batches = batch.micro_batches
            for number, micro_batch in enumerate(micro_batches):
                is_last = number == len(micro_batches) - 1
                with nullcontext() if synchronize and is_last else self.ddp.no_sync():
                    with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                        loss = self.ddp(micro_batch) / batch.num_target_tokens
                    backward_began = time.perf_counter()
                    loss.backward()
                    self.backward_seconds += time.perf_counter() - backward_began
            torch.nn.utils.get_total_norm([p.grad for p in self.ddp.parameters() if p.grad is not None])
            self.optimizer.step()
            self.optimizer.zero_grad()
        dist.barrier()
        return time.perf_counter() - began


def all_reduce_seconds(num_bytes: int) -> float:
    gradients, times = torch.zeros(num_bytes // 4), []
    for _ in range(5):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(gradients)
        times.append(time.perf_counter() - began)
    return min(times)


def train(rank: int, port: int, recipe: Recipe, results_file: Path) -> None:
    """Run one process; rank 0 writes the results to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    process, seconds = TrainingProcess(rank, recipe), defaultdict(list)
    # Use the same batch throughout. Otherwise, the minimum time would be that of the smallest batch.
    part, halves, wholes = process.part_of(0, 0, SMALLER), process.part_of(0, rank, 2), process.part_of(0, 0, 1)
    for turn in range(WARM_UP_TURNS + TURNS):
        measured = {
            # The other process waits at the barrier, which uses no CPU time.
            "part": process.step(part if rank == 0 else None, False),
            "alone": process.step(wholes if rank == 0 else None, False),
            "alone_backward": process.backward_seconds,
            "halves_apart": process.step(halves, False),
            "halves": process.step(halves, True),
            "wholes_apart": process.step(wholes, False),
            "wholes": process.step(wholes, True),
            "small_all_reduce": all_reduce_seconds(LATENCY_BYTES),
            "large_all_reduce": all_reduce_seconds(BUCKET_BYTES),
        }
        if turn >= WARM_UP_TURNS:
            for name, value in measured.items():
                seconds[name].append(value)
    overlap = asleep(process.parameter_bytes)
    if rank == 0:
        results = compare(seconds, process.parameter_bytes, len(wholes.shapes))
        results_file.write_text(json.dumps({**results, "asleep": overlap}))
    # If one process left first, the other would wait forever.
    dist.barrier()
    dist.destroy_process_group()


def compare(seconds: dict[str, list[float]], parameter_bytes: list[int], micro_batches: int) -> dict[str, Any]:
    """Return the measurements and what the model predicts from the step of one process and from gloo's link."""
    minimum = {name: min(values) for name, values in seconds.items()}
    fixed = max(0.0, minimum["part"] - (minimum["alone"] - minimum["part"]) / (SMALLER - 1))
    step = Step(minimum["alone"], minimum["alone_backward"], fixed, micro_batches)
    # A ring of two processes sends all bytes once, in two hops.
    small = minimum["small_all_reduce"]
    link = Link(BUCKET_BYTES / (minimum["large_all_reduce"] - small), small / 2)
    buckets = ddp_buckets(parameter_bytes)
    results: dict[str, Any] = {"gradient_bytes": sum(parameter_bytes), "micro_batches": micro_batches}
    results |= {"gloo_gb_s": link.bytes_per_second / 1e9, "gloo_latency_us": link.latency_seconds * 1e6}
    results |= {**minimum, "fixed": fixed}
    for name, scaling in (("halves", strong_scaling), ("wholes", weak_scaling)):
        two = scaling(step, buckets, Cluster(link), 2)
        results[name + "_predicted"] = two.step_seconds
        results[name + "_exposed_predicted"] = two.exposed_seconds
        results[name + "_exposed_measured"] = minimum[name] - minimum[f"{name}_apart"]
        results[name + "_efficiency_predicted"] = two.efficiency
        results[name + "_efficiency_measured"] = minimum["alone"] / (minimum[name] * (2 if name == "halves" else 1))
    return results


def main(path: str) -> None:
    recipe = load_recipe([Path(path)])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        results_file = Path(folder) / "results.json"
        mp.spawn(train, (port, recipe, results_file), nprocs=2)
        print(json.dumps(rounded(json.loads(results_file.read_text()))))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.integration.scaling_check RECIPE")
    main(sys.argv[1])
