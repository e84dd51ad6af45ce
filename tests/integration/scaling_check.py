"""The model behind `benchmark scaling` against two real gloo processes: `python -m tests.integration.scaling_check C`.

The recipe C is trained on the CPU, a thread a process, by DDP: by one process alone, by two that share a batch, and by
two with a batch each, with and without all-reducing. All take turns of the same few steps, and what gloo's all-reduce
takes is measured in every turn, so that drift hits all alike. The last line is one JSON object of seconds (medians
over turns) and of the efficiencies that were predicted and measured.
"""

import json
import socket
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from data_module.batch import Batch, SpecialIds, StepShare, collate
from data_module.batch_plan import plan_epoch, share_of_rank
from data_module.tokenizer import Tokenizer
from data_module.translation_data_module import TranslationDataModule, with_end_symbol
from model.loss import label_smoothed_loss
from model.transformer import Transformer
from pipeline.benchmark.report import rounded
from pipeline.benchmark.scaling_model import Cluster, Link, Step, ddp_buckets, strong_scaling, weak_scaling
from pipeline.recipe import Recipe, load_recipe
from pipeline.trainer_options import best_precision

TURNS, TURN_STEPS, WARM_UP_TURNS = 12, 1, 2
SMALLER = 16
LATENCY_BYTES, BUCKET_BYTES = 4096, 25 << 20


class Losses(nn.Module):
    """What DDP wraps."""

    def __init__(self, network: Transformer, smoothing: float, pad: int) -> None:
        super().__init__()
        self.network, self.smoothing, self.pad = network, smoothing, pad

    def forward(self, batch: Batch) -> Tensor:
        states = self.network(batch.source, batch.target_input, batch.source_mask)
        weight = self.network.embedding.weight
        return label_smoothed_loss(states, weight, batch.target_output, self.smoothing, self.pad).smoothed


class Trainee:
    """One of two processes."""

    def __init__(self, rank: int, recipe: Recipe) -> None:
        self.rank = rank
        tokenizer = Tokenizer.load(Path(recipe.corpus.folder) / "tokenizer.model")
        self.special = SpecialIds(tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id)
        self.data = TranslationDataModule(Path(recipe.corpus.folder), recipe.batches, self.special, recipe.run.seed)
        corpus = self.data.train_corpus
        self.plan = plan_epoch(
            with_end_symbol(corpus.source),
            with_end_symbol(corpus.target),
            batch_tokens=recipe.batches.batch_tokens,
            group_tokens=self.data.group_tokens,
            seed=0,
            epoch=0,
        )
        network = Transformer(tokenizer.vocabulary_size, recipe.network)
        self.parameter_bytes = [4 * parameter.numel() for parameter in network.parameters()]
        self.ddp = DistributedDataParallel(
            Losses(network, recipe.training.label_smoothing, self.special.pad), gradient_as_bucket_view=True
        )
        # The rate is 0: weights stay what they are, whoever takes a step alone.
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), lr=0.0, fused=True)
        self.bf16 = best_precision("cpu") == "bf16-mixed"
        self.backward_seconds = 0.0

    def share(self, batch: int, part: int, parts: int) -> StepShare:
        """One of so many parts of a global batch."""
        groups = share_of_rank(self.plan[batch], part, parts, self.data.micro_batch_tokens)
        return collate(self.data.train_corpus, groups, self.special, num_target_tokens=self.plan.target_tokens(batch))

    def steps(self, shares: list[StepShare], synchronise: bool) -> float:
        """Train; returns seconds a step, the other process's last one waited for."""
        dist.barrier()
        began = time.perf_counter()
        self.backward_seconds = 0.0
        for share in shares:
            for left, batch in reversed(list(enumerate(reversed(share.micro_batches)))):
                with nullcontext() if synchronise and left == 0 else self.ddp.no_sync():
                    with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                        loss = self.ddp(batch) / share.num_target_tokens
                    backward_began = time.perf_counter()
                    loss.backward()
                    self.backward_seconds += (time.perf_counter() - backward_began) / len(shares)
            torch.nn.utils.get_total_norm([p.grad for p in self.ddp.parameters() if p.grad is not None])
            self.optimizer.step()
            self.optimizer.zero_grad()
        dist.barrier()
        return (time.perf_counter() - began) / max(len(shares), 1)


def all_reduce_seconds(num_bytes: int) -> float:
    gradients, times = torch.zeros(num_bytes // 4), []
    for _ in range(5):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(gradients)
        times.append(time.perf_counter() - began)
    return median(times)


def train(rank: int, port: int, recipe: Recipe, answer: Path) -> None:
    """One process's life; the first one writes the answer."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    one, seconds = Trainee(rank, recipe), defaultdict(list)
    for turn in range(WARM_UP_TURNS + TURNS):
        batches = range(turn * TURN_STEPS, (turn + 1) * TURN_STEPS)
        others = [len(one.plan) - 1 - batch if rank else batch for batch in batches]
        halves = [one.share(batch, rank, 2) for batch in batches]
        wholes = [one.share(batch, 0, 1) for batch in others]
        measured = {
            # The other one stands at the barrier, which takes no time of a core.
            "part": one.steps([one.share(batch, 0, SMALLER) for batch in batches] if rank == 0 else [], False),
            "alone": one.steps(wholes if rank == 0 else [], False),
            "alone_backward": one.backward_seconds,
            "halves_apart": one.steps(halves, False),
            "halves": one.steps(halves, True),
            "wholes_apart": one.steps(wholes, False),
            "wholes": one.steps(wholes, True),
            "small_all_reduce": all_reduce_seconds(LATENCY_BYTES),
            "large_all_reduce": all_reduce_seconds(BUCKET_BYTES),
        }
        if turn >= WARM_UP_TURNS:
            for name, value in measured.items():
                seconds[name].append(value)
    if rank == 0:
        micro_batches = len(one.share(0, 0, 1).shapes)
        answer.write_text(json.dumps(compared(dict(seconds), one.parameter_bytes, micro_batches)))
    dist.destroy_process_group()


def compared(seconds: dict[str, list[float]], parameter_bytes: list[int], micro_batches: int) -> dict[str, Any]:
    """What was measured beside what the model makes of a step alone and of gloo's link."""
    of = {name: median(values) for name, values in seconds.items()}
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
        turns = zip(*(seconds[key] for key in ("alone", name, f"{name}_apart")), strict=True)
        efficiency, waiting = zip(*((alone / both, both - apart) for alone, both, apart in turns), strict=True)
        figures[name + "_predicted"] = two.step_seconds
        figures[name + "_exposed_predicted"] = two.exposed_seconds
        figures[name + "_exposed_measured"] = median(waiting)
        figures[name + "_efficiency_predicted"] = two.efficiency
        figures[name + "_efficiency_measured"] = median(efficiency) / (2 if name == "halves" else 1)
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
    main(sys.argv[1])
