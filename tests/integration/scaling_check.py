"""The model behind `benchmark scaling` against two real gloo processes: `python -m tests.integration.scaling_check C`.

The recipe C is trained on the CPU, a thread a process, by DDP: by one process alone, by two that share a batch, and by
two with a batch each, with and without all-reducing. All take turns of the same step, and what gloo's all-reduce takes
is measured in every turn, so that drift hits all alike. Two processes also share a machine's memory and cores, of which
the model knows nothing; so under `asleep` stand backward passes of DDP on the same gradients that sleep instead of
working, as if a GPU did the work: there only the overlap counts.

The last line is one JSON object of seconds and of the efficiencies that were predicted and measured. Every time is the
shortest of all turns, since whatever else the machine does only makes them longer; give it a quiet one.
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

from data_module.batching.batch import MicroBatch, RankBatch, SpecialIds, collate
from data_module.batching.batch_plan import plan_epoch, rank_batch
from data_module.corpus.store import lengths_with_eos
from data_module.tokenization.tokenizer import Tokenizer
from data_module.translation_data_module import TranslationDataModule
from model.loss import label_smoothed_loss
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
    """What DDP wraps."""

    def __init__(self, network: Transformer, smoothing: float, pad: int) -> None:
        super().__init__()
        self.network, self.smoothing, self.pad = network, smoothing, pad

    def forward(self, batch: MicroBatch) -> Tensor:
        states = self.network(batch.source, batch.target_input, batch.source_mask)
        weight = self.network.embedding.weight
        return label_smoothed_loss(states, weight, batch.target_output, self.smoothing, self.pad).smoothed


class Slept(torch.autograd.Function):
    """The identity, whose backward pass takes its time and gives the weight a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = torch.zeros(()).expand_as(weight), seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(ctx.seconds)
        return gradients[0], ctx.gradient, None


class Sleeper(nn.Module):
    """The network's gradients, complete one after another: seconds of sleep for each as its bytes are."""

    def __init__(self, parameter_bytes: list[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(size // 4) for size in parameter_bytes])

    def forward(self, seconds: float) -> Tensor:
        evenly = sum(weight.numel() for weight in list(self.weights)[1:])
        x = torch.zeros(1, requires_grad=True)
        for number, weight in enumerate(self.weights):
            x = Slept.apply(x, weight, seconds * weight.numel() / evenly if number else 0.0)
        return x.sum()


def asleep(parameter_bytes: list[int]) -> dict[str, Any]:
    """Seconds exposed beside backward passes of no time, of half an all-reduce, of one and of two."""
    ddp = DistributedDataParallel(Sleeper(parameter_bytes), gradient_as_bucket_view=True, broadcast_buffers=False)
    buckets = ddp_buckets(parameter_bytes)
    once = all_reduce_seconds(sum(parameter_bytes))
    figures: dict[str, list[float]] = {"backward": [], "exposed_predicted": [], "exposed_measured": []}
    for times in (0.0, 0.5, 1.0, 2.0):
        backward: dict[bool, list[float]] = {False: [], True: []}
        all_reduces = []
        for turn in range(20):
            for synchronise in (False, True):
                with nullcontext() if synchronise else ddp.no_sync():
                    loss = ddp(times * once)
                    dist.barrier()
                    began = time.perf_counter()
                    loss.backward()
                    # DDP makes its final buckets after the first one that synchronises.
                    if turn > 1:
                        backward[synchronise].append(time.perf_counter() - began)
                ddp.zero_grad()
            all_reduces.append(all_reduce_seconds(BUCKET_BYTES))
        alone = min(backward[False])
        small = all_reduce_seconds(LATENCY_BYTES)
        link = Link(BUCKET_BYTES / (min(all_reduces) - small), small / 2)
        figures["backward"].append(alone)
        figures["exposed_predicted"].append(exposed_seconds(buckets, alone, 2, link))
        figures["exposed_measured"].append(min(backward[True]) - alone)
    return figures


class Trainee:
    """One of two processes."""

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
            group_tokens=self.data.group_tokens,
            seed=0,
            epoch=0,
        )
        network = Transformer(tokenizer.vocabulary_size, recipe.network)
        self.parameter_bytes = [4 * parameter.numel() for parameter in network.parameters()]
        losses = Losses(network, recipe.training.label_smoothing, self.special.pad)
        # One process trains while the other stands still, so buffers must not be broadcast.
        self.ddp = DistributedDataParallel(losses, gradient_as_bucket_view=True, broadcast_buffers=False)
        # The rate is 0: weights stay what they are, whoever takes a step alone.
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), lr=0.0, fused=True)
        self.bf16 = best_precision("cpu") == "bf16-mixed"
        self.backward_seconds = 0.0

    def share(self, batch: int, part: int, parts: int) -> RankBatch:
        """One of so many parts of a global batch."""
        groups = rank_batch(self.plan[batch], part, parts, self.data.micro_batch_tokens)
        return collate(self.data.train_corpus, groups, self.special, num_target_tokens=self.plan.target_tokens(batch))

    def step(self, share: RankBatch | None, synchronise: bool) -> float:
        """Train, or stand still; returns seconds until the other process has finished too."""
        dist.barrier()
        began = time.perf_counter()
        self.backward_seconds = 0.0
        if share is not None:
            batches = share.micro_batches
            for number, batch in enumerate(batches):
                last = number == len(batches) - 1
                with nullcontext() if synchronise and last else self.ddp.no_sync():
                    with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                        loss = self.ddp(batch) / share.num_target_tokens
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


def train(rank: int, port: int, recipe: Recipe, answer: Path) -> None:
    """One process's life; the first one writes the answer."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    one, seconds = Trainee(rank, recipe), defaultdict(list)
    # One batch for all: the shortest time must not be that of the smallest batch.
    part, halves, wholes = one.share(0, 0, SMALLER), one.share(0, rank, 2), one.share(0, 0, 1)
    for turn in range(WARM_UP_TURNS + TURNS):
        measured = {
            # The other one stands at the barrier, which takes no time of a core.
            "part": one.step(part if rank == 0 else None, False),
            "alone": one.step(wholes if rank == 0 else None, False),
            "alone_backward": one.backward_seconds,
            "halves_apart": one.step(halves, False),
            "halves": one.step(halves, True),
            "wholes_apart": one.step(wholes, False),
            "wholes": one.step(wholes, True),
            "small_all_reduce": all_reduce_seconds(LATENCY_BYTES),
            "large_all_reduce": all_reduce_seconds(BUCKET_BYTES),
        }
        if turn >= WARM_UP_TURNS:
            for name, value in measured.items():
                seconds[name].append(value)
    overlap = asleep(one.parameter_bytes)
    if rank == 0:
        figures = compared(seconds, one.parameter_bytes, len(wholes.shapes))
        answer.write_text(json.dumps({**figures, "asleep": overlap}))
    # Whoever leaves first would keep the other waiting for ever.
    dist.barrier()
    dist.destroy_process_group()


def compared(seconds: dict[str, list[float]], parameter_bytes: list[int], micro_batches: int) -> dict[str, Any]:
    """What was measured beside what the model makes of a step alone and of gloo's link."""
    of = {name: min(values) for name, values in seconds.items()}
    fixed = max(0.0, of["part"] - (of["alone"] - of["part"]) / (SMALLER - 1))
    step = Step(of["alone"], of["alone_backward"], fixed, micro_batches)
    # A ring of two sends all bytes once, in two hops.
    link = Link(BUCKET_BYTES / (of["large_all_reduce"] - of["small_all_reduce"]), of["small_all_reduce"] / 2)
    buckets = ddp_buckets(parameter_bytes)
    figures: dict[str, Any] = {"gradient_bytes": sum(parameter_bytes), "micro_batches": micro_batches}
    figures |= {"gloo_gb_s": link.bytes_per_second / 1e9, "gloo_latency_us": link.latency_seconds * 1e6}
    figures |= {**of, "fixed": fixed}
    for name, scaling in (("halves", strong_scaling), ("wholes", weak_scaling)):
        two = scaling(step, buckets, Cluster(link), 2)
        figures[name + "_predicted"] = two.step_seconds
        figures[name + "_exposed_predicted"] = two.exposed_seconds
        figures[name + "_exposed_measured"] = of[name] - of[f"{name}_apart"]
        figures[name + "_efficiency_predicted"] = two.efficiency
        figures[name + "_efficiency_measured"] = of["alone"] / (of[name] * (2 if name == "halves" else 1))
    return figures


def main(path: str) -> None:
    recipe = load_recipe([Path(path)])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        mp.spawn(train, (port, recipe, answer), nprocs=2)
        print(json.dumps(rounded(json.loads(answer.read_text()))))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.integration.scaling_check RECIPE")
    main(sys.argv[1])
