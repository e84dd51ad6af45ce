"""Fixtures of several test files."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def uninitialized_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill new memory with NaN, so that a test fails where a result is not written."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)
