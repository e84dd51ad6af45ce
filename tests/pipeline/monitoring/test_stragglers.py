"""The rules that name ranks that are slow, with numbers worked by hand."""

import pytest

from pipeline.monitoring.performance import Stragglers, slowest_rank

NODES = ["alpha", "beta", "gamma", "delta"]


def lines(*intervals: tuple[list[float], int]) -> list[list[str]]:
    """What is reported after each interval, of (own seconds per step of each rank, number of steps)."""
    stragglers = Stragglers(NODES)
    return [stragglers.add(seconds, steps) for seconds, steps in intervals]


def test_a_slow_rank_is_named_once_after_a_hundred_steps() -> None:
    one, two = [0.25, 0.5, 0.25, 0.125], [0.25, 0.5, 0.25, 0.375]
    found = lines((one, 25), (one, 25), (one, 49), (one, 1), *[(one, 50)] * 5, *[(two, 50)] * 5)
    named = "rank {} has been slow for 100 steps, and the others wait for it: its own part of a step takes {} s, {} % "
    named += "more than the median rank's"
    assert {place: line for place, line in enumerate(found) if line} == {
        3: [named.format("1 on beta", 0.5, 100)],
        10: [named.format("3 on delta", 0.375, 50)],
    }


@pytest.mark.parametrize(("seconds", "is_slow"), [(5.984375, False), (6.0, True)])
def test_twenty_percent(seconds: float, is_slow: bool) -> None:
    """Of a median of 5 s, 6 s are slow, and 5.984375 s are not."""
    assert any(lines(*[([5.0, 5.0, 5.0, seconds], 64)] * 2)) == is_slow


def test_intervals_add_up_by_their_steps() -> None:
    """Rank 0: 10 steps of 4 s and 40 of 1 s, together 80 s; the others 50 s, so 60 % more."""
    window = (([4.0, 1.0, 1.0, 1.0], 10), ([1.0, 1.0, 1.0, 1.0], 40))
    [*_, [line]] = lines(*window, *window)
    assert line.startswith("rank 0 on alpha has been slow for 100 steps")
    assert line.endswith(" takes 1.6 s, 60 % more than the median rank's")


def test_a_single_stall_is_not_slow() -> None:
    """However long it is and however many steps an interval has; nor one now and one later."""
    stall, usual = ([1.0, 1.0, 9.0, 1.0], 500), ([1.0] * 4, 500)
    assert not any(lines(stall, usual, stall, usual))
    assert any(lines(stall, stall))


def test_all_slow_ranks_are_named() -> None:
    """The median of four is the faster one in the middle: half of the ranks can be slow."""
    [_, found] = lines(([2.0, 3.0, 2.0, 4.0], 60), ([2.0, 3.0, 2.0, 4.0], 70))
    assert [line.split(" has")[0] for line in found] == ["rank 1 on beta", "rank 3 on delta"]
    assert [line.split(" for ")[1].split(" steps")[0] for line in found] == ["130", "130"]
    # All equally slow: no rank is.
    assert not any(lines(*[([9.0] * 4, 60)] * 3))


def test_the_curves() -> None:
    assert slowest_rank([2.0, 3.0]) == (1, 1.5)
    assert slowest_rank([4.0, 1.0, 2.0]) == (0, 2.0)
    assert slowest_rank([2.0, 8.0, 4.0, 6.0]) == (1, 2.0)
