"""Every fast path of a CPU against the plain function that it stands for; see `fast_paths.py`."""

from collections.abc import Callable

import pytest

from tests.model.fast_paths import cases


@pytest.mark.parametrize(("check", "case"), cases())
def test_equals_the_plain_function(check: Callable[..., None], case: tuple[object, ...]) -> None:
    check(*case)
