"""What doctor has looked at."""

from typing import NamedTuple


class CheckResult(NamedTuple):
    """One thing looked at: ok, or what is wrong and what to do."""

    well: bool
    what: str
    where: str = ""
    """Node and rank, if it is theirs alone."""
