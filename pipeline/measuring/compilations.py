"""How often torch.compile has compiled: a step in which it did is not a step to time."""

from types import TracebackType
from typing import Any

from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters


class Compilations:
    """Counts compilations from `with` on: of new graphs, and of backward passes that were put off."""

    def __init__(self) -> None:
        self.count = 0
        """Compilations so far."""
        self._graphs_before = 0

    @property
    def num_graphs(self) -> int:
        """New graphs so far."""
        return counters["stats"]["unique_graphs"] - self._graphs_before

    def __enter__(self) -> "Compilations":
        self._graphs_before = counters["stats"]["unique_graphs"]
        callback_handler.register_start_callback(self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # `torch.compiler.reset` forgets all callbacks.
        if self._note in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._note)

    def _note(self, _: Any) -> None:
        self.count += 1
