"""Run `python -m pipeline` with changes, which the environment variable CHANGE names.

`start(..., module="tests.integration.changed_program", CHANGE="record_batches hold")`. Other variables of the
environment say more about a change; they are named where they are read.
"""

import json
import os
import pkgutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, partialmethod, wraps
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import profile

from data_module.batch import PackedBatch, PaddedBatch, RankBatch
from model import packed_attention
from model.backend import Backend
from model.fast.compilation import CompiledForward
from model.loss import LossSums
from model.training_module import StepOutputs, TranslationModule
from pipeline.__main__ import main
from pipeline.checkpointing import checkpoint
from pipeline.runtime import backend_choice, signals, step_clock
from pipeline.runtime.launch import process_rank
from pipeline.runtime.lightning_private import SingleStreamDDP, call_as_step
from pipeline.runtime.step_clock import StepClock
from pipeline.training import memory_probe
from tests.compilations import Compilations
from tests.model.sentence_batches import masked_attention, packed, sentence_by_sentence

training_step = TranslationModule.training_step
losses = TranslationModule.losses
all_reduce = dist.all_reduce
choose_backend = backend_choice.choose_backend


def nan_loss() -> None:
    """The last rank has a NaN loss from step FIRST_STEP to step LAST_STEP."""
    first, last = int(os.environ["FIRST_STEP"]), int(os.environ["LAST_STEP"])

    def changed(
        module: TranslationModule, batch: PackedBatch | PaddedBatch, scale: Tensor | float | None = None
    ) -> LossSums:
        is_last = module.global_rank == module.trainer.world_size - 1
        if module.training and is_last and first <= module.global_step + 1 <= last:
            scale = float("nan")
        return losses(module, batch, scale)

    TranslationModule.losses = changed  # type: ignore[method-assign]


def record_batches() -> None:
    """Each process writes a line of JSON per step, which has its pairs, to a file of its own in the folder RECORDS."""

    def recorded(module: TranslationModule, batch: RankBatch, batch_idx: int) -> StepOutputs:
        record = {"step": module.global_step + 1, "ranks": module.trainer.world_size, "rank": module.global_rank}
        record |= {"epoch": batch.epoch, "index": batch.index, "pairs": batch.pairs.tolist()}
        with (Path(os.environ["RECORDS"]) / f"{os.getpid()}").open("a") as file:
            print(json.dumps(record), file=file)
        return training_step(module, batch, batch_idx)

    TranslationModule.training_step = recorded  # type: ignore[method-assign]


def hold() -> None:
    """HOLD has items FUNCTION CALLS PATH, joined by semicolons: after so many calls, the next waits for the file.

    Or for a signal: a test that kills the process, or tells it to stop, finds it at work, however late that is.
    """
    for item in os.environ["HOLD"].split(";"):
        function, calls, path = item.split()
        place, _, name = function.rpartition(".")
        owner = pkgutil.resolve_name(place)
        setattr(owner, name, _held(getattr(owner, name), int(calls), Path(path)))


def _held(function: Callable[..., object], left: int, path: Path) -> Callable[..., object]:
    @wraps(function)
    def held(*arguments: object, **named: object) -> object:
        nonlocal left
        left -= 1
        while left < 0 and not path.exists() and signals.first_signal() is None:
            time.sleep(0.1)
        return function(*arguments, **named)

    return held


def partial_write() -> None:
    """Only the first BYTES of a checkpoint are written, unless it is the run's first one."""
    whole, left = checkpoint.atomic_file, int(os.environ["BYTES"])

    @contextmanager
    def partly(path: Path) -> Iterator[object]:
        def write(data: memoryview) -> None:
            nonlocal left
            part = bytes(data)[:left]
            file.write(part)
            left -= len(part)
            while not left:
                file.flush()
                time.sleep(1)

        with whole(path) as file:
            yield SimpleNamespace(write=write) if any(path.parent.glob("step=*.ckpt")) else file

    checkpoint.atomic_file = partly


def kill_rank_0_once() -> None:
    """Rank 0 is killed in step 6, unless the file MARKER says that it was."""

    def killed(module: TranslationModule, batch: RankBatch, batch_idx: int) -> StepOutputs:
        marker = Path(os.environ["MARKER"])
        if (module.global_rank, module.global_step) == (0, 5) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return training_step(module, batch, batch_idx)

    TranslationModule.training_step = killed  # type: ignore[method-assign]


ALL_SECONDS, SLOW_SECONDS = 0.05, 0.1


def slow_rank() -> None:
    """Each step takes ALL_SECONDS on every rank, by a clock that nothing else moves.

    SLOW_RANK takes SLOW_SECONDS more before its forward pass, and again in the loop after the step: before and after it
    communicates with the other ranks. Who has waited for another rank has the same time as that one.
    """
    now, begin = 0.0, StepClock.begin

    def take(module: TranslationModule, seconds: float) -> None:
        nonlocal now
        now += seconds + SLOW_SECONDS * (module.global_rank == int(os.environ["SLOW_RANK"]))

    def begin_and_wait(clock: StepClock, phase: str) -> None:
        nonlocal now
        if clock._marks and clock._marks[-1][0] == "communication_wait":
            latest = torch.tensor(now, dtype=torch.float64)
            all_reduce(latest, op=dist.ReduceOp.MAX)
            now = latest.item()
        begin(clock, phase)

    def take_first(module: TranslationModule, batch: RankBatch, batch_idx: int) -> StepOutputs:
        take(module, ALL_SECONDS)
        return training_step(module, batch, batch_idx)

    step_clock.time = SimpleNamespace(perf_counter=lambda: now)  # type: ignore[assignment]
    StepClock.begin = begin_and_wait  # type: ignore[method-assign]
    TranslationModule.training_step = take_first  # type: ignore[method-assign]
    TranslationModule.on_train_batch_end = lambda module, *_: take(module, 0.0)  # type: ignore[method-assign]


def other_backend() -> None:
    """Rank 1 has flash attention."""

    def changed(*arguments: object) -> Backend:
        chosen = choose_backend(*arguments)
        if process_rank() == 0:
            return chosen
        return replace(chosen, attention=packed_attention.FLASH_ATTENTION, notes=("no compiler",))

    backend_choice.choose_backend = changed

    # PyTorch's kernel runs on GPUs only.
    def computed(*arguments: object) -> Tensor:
        print("computed by the other backend", file=sys.stderr)
        return sentence_by_sentence(*arguments)

    packed_attention._flash = computed


COUNTED_FROM, NUM_COUNTED = 3, 6
"""DDP has built its final buckets by the first of these steps; none of them is logged."""


def count_collectives() -> None:
    """Each rank writes RANK.json to the folder COUNTS: the collectives that ran during NUM_COUNTED steps, by name.

    And the all-reduces called from Python, by data type, and the addresses at which the rank listens. DDP reduces
    gradients without calling Python. Ranks exchange no pickled objects, at any time.
    """
    profiler = profile(activities=[torch.profiler.ProfilerActivity.CPU])
    called: Counter[str] = Counter()
    pending: list[dist.Work] = []

    def count_and_train(module: TranslationModule, batch: RankBatch, batch_idx: int) -> StepOutputs:
        if module.global_step in (COUNTED_FROM, COUNTED_FROM + NUM_COUNTED):
            pending[-1].wait()  # nothing else waits for it, and it is counted when it ends
        if module.global_step == COUNTED_FROM:
            profiler.start()
            called.clear()
        if module.global_step == COUNTED_FROM + NUM_COUNTED:
            profiler.stop()
            ran = Counter(event.name for event in profiler.events() if event.name.startswith(("gloo:", "nccl:")))
            counts = {"ran": ran, "called": called, "listens": listens()}
            (Path(os.environ["COUNTS"]) / f"{module.global_rank}.json").write_text(json.dumps(counts))
        return training_step(module, batch, batch_idx)

    def count_and_reduce(tensor: Tensor, *arguments: object, **options: object) -> dist.Work | None:
        called[str(tensor.dtype)] += 1
        work = all_reduce(tensor, *arguments, **options)
        if work is not None:
            pending.append(work)
        return work

    def unpickle(*arguments: object) -> None:
        raise AssertionError("a pickled object")

    TranslationModule.training_step = count_and_train  # type: ignore[method-assign]
    dist.all_reduce = count_and_reduce
    dist.distributed_c10d._tensor_to_object = unpickle


def listens() -> list[str]:
    """Return the addresses at which this process listens, as Linux has them: in hexadecimal, last byte first."""
    own = {os.path.realpath(link).rpartition("/")[2] for link in Path("/proc/self/fd").iterdir()}
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    sockets = [line.split() for table in tables for line in table]
    return [fields[1].partition(":")[0] for fields in sockets if fields[3] == "0A" and f"socket:[{fields[9]}]" in own]


def compile_network() -> None:
    """Ranks compile their network, and call `warm_up` before the first step, as the memory probe does on a GPU.

    Another attention stands in for flash attention. Each rank writes RANK.json to the folder COUNTS: numbers of
    compilations, of graphs and of the parts that DDP splits them into, before the first step and at the end; and sums
    of the gradients of `warm_up`, which differ between ranks unless they are reduced, and of the trained weights.
    """
    compilations, parts = Compilations(), 0
    counts: list[tuple[int, int, int]] = []
    gradients: list[float] = []

    def compile_part(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        # Inductor would take minutes, and what is compiled, when and for which buckets does not depend on it.
        nonlocal parts
        parts += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def changed(*arguments: object) -> Backend:
        compiled = partial(CompiledForward, backend=compile_part)  # type: ignore[arg-type]
        return replace(choose_backend(*arguments), attention=packed_attention.FLASH_ATTENTION, compiled=compiled)

    def sums(tensors: Iterable[Tensor | None]) -> list[float]:
        return [tensor.double().sum().item() for tensor in tensors if tensor is not None]

    def count() -> None:
        counts.append((compilations.count, compilations.num_graphs, parts))

    def rehearse(module: TranslationModule) -> None:
        compilations.__enter__()
        lengths = [[(9, 7), (20, 11)] * (5 + module.global_rank)]
        batch = packed(lengths, shape=module.trainer.datamodule.row_shape(2))
        call_as_step(module.trainer, "warm_up", batch)
        count()
        gradients.extend(sums(parameter.grad for parameter in module.parameters()))
        module.trainer.optimizers[0].zero_grad()

    def write(module: TranslationModule) -> None:
        count()
        result = {"counts": counts, "gradients": gradients, "weights": sums(module.parameters())}
        (Path(os.environ["COUNTS"]) / f"{module.global_rank}.json").write_text(json.dumps(result))

    memory_probe.can_measure_peak = lambda: False  # on a CPU it would try, and compile, parts of a micro-batch
    backend_choice.choose_backend = changed
    packed_attention._flash = masked_attention
    SingleStreamDDP.__init__ = partialmethod(SingleStreamDDP.__init__, bucket_cap_mb=1)  # type: ignore[assignment]
    TranslationModule.on_train_start = rehearse  # type: ignore[method-assign]
    TranslationModule.on_train_end = write  # type: ignore[method-assign]


if __name__ == "__main__":
    for change in os.environ["CHANGE"].split():
        globals()[change]()
    sys.exit(main())
