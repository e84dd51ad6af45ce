"""Counts what torch.compile compiles, by private functions of PyTorch 2.11 to 2.13."""

from types import TracebackType

from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters


class Compilations:
    """Context manager that counts compilations: of new graphs, and of backward passes that are compiled later."""

    def __init__(self) -> None:
        self.count = 0
        """Number of compilations so far."""
        self._graphs_before = 0
        self._graphs_after: int | None = None

    @property
    def num_graphs(self) -> int:
        graphs = counters["stats"]["unique_graphs"] if self._graphs_after is None else self._graphs_after
        return graphs - self._graphs_before

    def __enter__(self) -> "Compilations":
        self._graphs_before, self._graphs_after = counters["stats"]["unique_graphs"], None
        callback_handler.register_start_callback(self._count_one)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._graphs_after = counters["stats"]["unique_graphs"]
        if self._count_one in callback_handler.start_callbacks:  # `torch.compiler.reset` removes it.
            callback_handler.remove_start_callback(self._count_one)

    def _count_one(self, _: object) -> None:
        self.count += 1
