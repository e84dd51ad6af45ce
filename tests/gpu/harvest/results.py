"""Results as JSON lines. Each is on disk before the next one is measured."""

import json
import os
from pathlib import Path
from typing import Any


class Results:
    """A file of JSON lines that several processes append to in turn."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, stage: str, name: str, **values: Any) -> None:
        """Write one result and wait until it is on disk."""
        with self.path.open("a") as file:
            file.write(json.dumps({"stage": stage, "name": name, **_rounded(values)}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Return all results so far, without a truncated last line."""
        if not self.path.exists():
            return []
        results = []
        for line in self.path.read_text().splitlines():
            try:
                results.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return results


def _rounded(value: Any) -> Any:
    """Round all floats to five significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
