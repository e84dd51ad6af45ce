"""Every fast path of a CPU against the plain function that it stands for; see `fast_paths.py`."""

from collections.abc import Callable

import pytest

from model.fast.packed_linear import can_pack
from tests.model.fast_paths import cases
from tests.model.search_truth import make_network


@pytest.mark.parametrize(("check", "case"), cases())
def test_equals_the_plain_function(check: Callable[..., None], case: tuple[object, ...]) -> None:
    check(*case)


def test_what_cannot_be_packed() -> None:
    assert not can_pack(make_network(0).bfloat16())
    assert not can_pack(make_network(0).to("meta"))
