"""A training step in CUDA graphs, which the host launches by a few calls instead of one for each kernel.

A small share of a batch keeps a GPU busy for less time than the host takes to launch its kernels. A graph repeats the
recorded kernels at the recorded addresses, with the recorded numbers, so whatever differs between steps is written to
tensors that stay where they are. Random numbers follow the generator's seed.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from data_module.batching.batch import PackedBatch
from model.optimization import require_recordable
from model.torch_private import copy_all

_FIRST_RECORDED = 3
"""Steps before this one, counted from 0, run kernel by kernel: they compile, allocate the optimizer's state, and let
libraries choose their kernels."""


Recorder = Callable[[Callable[[], object]], Callable[[], object]]


def record_graph(function: Callable[[], object]) -> Callable[[], object]:
    """Record what a function launches, without computing it; return what launches it all."""
    graph = torch.cuda.CUDAGraph()
    # All graphs of a process share memory: they are launched one after another, and none reads what another one leaves
    # there but tensors that are kept. The loader's threads allocate memory meanwhile.
    with torch.cuda.graph(graph, pool=_memory_of_graphs(), capture_error_mode="thread_local"):
        function()
    return graph.replay


@cache
def _memory_of_graphs() -> Any:  # The class of a handle is private.
    return torch.cuda.graph_pool_handle()


class CapturedStep:
    """The passes over micro-batches and the optimizer's step as graphs; all micro-batches have one shape."""

    def __init__(
        self,
        add_gradients: Callable[[PackedBatch], object],
        end_step: Callable[[Optimizer, Callable[[], object]], Tensor],
        optimizer: Optimizer,
        record: Recorder = record_graph,
    ) -> None:
        """Prepare the graphs, which are recorded in a later step.

        Args:
            add_gradients: runs the forward and backward passes of a micro-batch.
            end_step: takes the step of an optimizer, by the function given, and returns its metrics.
            optimizer: its method `step` does all of `end_step` from here on.
            record: what records.

        Raises ValueError as `require_recordable` does.
        """
        require_recordable(optimizer)
        self._record = record
        self._add_gradients, self._end_step, self._optimizer = add_gradients, end_step, optimizer
        self._step = -1
        self._batch: PackedBatch | None = None
        self._replays: dict[str, Callable[[], object]] = {}
        self._metrics = torch.zeros(())
        vars(optimizer)["step"] = lambda closure=None: self._run("end", self._end)

    def add_gradients(self, batch: PackedBatch, is_first: bool) -> None:
        """Add the gradients of a micro-batch; those of the first one of a step replace the gradients before."""
        if self._batch is None:
            fixed: dict[str, Any] = {name: tensor.clone() for name, tensor in _tensors(batch).items()}
            self._batch = replace(batch, **fixed)
        copy_all(list(_tensors(self._batch).values()), list(_tensors(batch).values()))
        if is_first:
            self._step += 1
        self._run("first" if is_first else "further", partial(self._add, is_first))

    @property
    def metrics(self) -> Tensor:
        """What `end_step` returned in the last step."""
        return self._metrics.clone()

    def _run(self, name: str, function: Callable[[], object]) -> None:
        # Gradients get their addresses when "first" is recorded, so nothing may be recorded before it.
        if name not in self._replays and self._step >= _FIRST_RECORDED:
            self._replays[name] = self._record(function)
        self._replays.get(name, function)()

    def _add(self, is_first: bool) -> None:
        assert self._batch is not None
        if is_first:
            self._optimizer.zero_grad()
        self._add_gradients(self._batch)

    def _end(self) -> None:
        groups = self._optimizer.param_groups
        for group in groups:
            # Only while it is recorded: otherwise PyTorch warns, and checkpoints would have it.
            group["capturable"] = self._step >= _FIRST_RECORDED
        self._metrics = self._end_step(self._optimizer, partial(type(self._optimizer).step, self._optimizer))
        for group in groups:
            group["capturable"] = False


def _tensors(batch: PackedBatch) -> dict[str, Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
