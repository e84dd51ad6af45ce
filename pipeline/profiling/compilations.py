"""Counting of compilations by torch.compile, because steps in which something is compiled must not be timed."""

from types import TracebackType
from typing import Any

from pipeline.compat.pytorch import add_compile_callback, num_compiled_graphs, remove_compile_callback


class Compilations:
    """Context manager that counts compilations: of new graphs, and of backward passes that are compiled later."""

    def __init__(self) -> None:
        self.count = 0
        """Number of compilations so far."""
        self._graphs_before = 0
        self._graphs_after: int | None = None

    @property
    def num_graphs(self) -> int:
        """Number of new graphs so far."""
        graphs = num_compiled_graphs() if self._graphs_after is None else self._graphs_after
        return graphs - self._graphs_before

    def __enter__(self) -> "Compilations":
        self._graphs_before, self._graphs_after = num_compiled_graphs(), None
        add_compile_callback(self._count_one)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._graphs_after = num_compiled_graphs()
        remove_compile_callback(self._count_one)

    def _count_one(self, _: Any) -> None:
        self.count += 1
