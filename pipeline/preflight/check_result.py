"""The result of one check, and how results are printed."""

from typing import NamedTuple


class CheckResult(NamedTuple):
    """What one check found."""

    ok: bool
    message: str
    """What was checked if `ok`; otherwise what is wrong and what to do."""
    where: str = ""
    """Node and rank, if the result holds for that rank only."""
    is_warning: bool = False
    """Whether the message names a likely mistake, which does not fail the check."""


def print_results(results: list[CheckResult]) -> int:
    """Print a line per result and return the exit code: 0, or 1 if a check failed.

    Results that several ranks have in common are printed once, with all their nodes and ranks.
    """
    places: dict[tuple[str, str], list[str]] = {}
    for result in results:
        label = "WRONG" if not result.ok else "note " if result.is_warning else "ok   "
        places.setdefault((label, result.message), []).append(result.where)
    for (label, message), where in places.items():
        ranks = "; ".join(dict.fromkeys(filter(None, where)))
        print(f"{label} {message}" + (f" [{ranks}]" if ranks else ""), flush=True)
    return 0 if all(result.ok for result in results) else 1
