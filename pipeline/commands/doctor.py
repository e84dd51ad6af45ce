"""What is wrong with this machine, and with a recipe on it, before time is spent.

Each line is a finding: ok, or what is wrong and what to do. Exit code 1 when something is wrong.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.arguments import add_recipe_arguments
from pipeline.preflight.check_result import CheckResult
from pipeline.preflight.machine import machine
from pipeline.preflight.recipe import load, recipe

if TYPE_CHECKING:
    from pipeline.preflight.distributed import RankGroup
    from pipeline.runtime.slurm import JobStep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    add_recipe_arguments(parser, required=False)
    parser.add_argument("--fresh", action="store_true", help="as for fit, whose arguments are taken here as well")
    parser.add_argument("--init-from", type=Path, metavar="CHECKPOINT", help="what fit would begin a new run from")


def run(arguments: argparse.Namespace) -> int:
    """Print all findings; of several ranks, the first one does for all."""
    from pipeline.runtime.slurm import report_mistake_to_script

    if code := examine(arguments):
        report_mistake_to_script()
    return code


def examine(arguments: argparse.Namespace) -> int:
    """Look at everything; returns the exit code."""
    from pipeline.runtime.slurm import current_step, mistakes

    started_wrong = [CheckResult(False, mistake) for mistake in mistakes()]
    step = current_step() if not started_wrong else None
    if step is None or step.num_tasks == 1:
        findings = [*started_wrong, *machine(step), *recipe(arguments, step)]
        return report([*findings, *alone(step, arguments)])
    return together(step, arguments)


def alone(step: "JobStep | None", arguments: argparse.Namespace) -> Iterator[CheckResult]:
    """What a recipe says of devices that the job's only task has not."""
    from pipeline.preflight.distributed import hardware_keys

    loaded = load(arguments.config, arguments.overrides)
    if step is not None and not isinstance(loaded, CheckResult):
        yield from hardware_keys(step, loaded)


def report(findings: list[CheckResult]) -> int:
    """Print findings; what several ranks have found alike, once. Returns the exit code."""
    places: dict[tuple[bool, str], list[str]] = {}
    for finding in findings:
        places.setdefault(finding[:2], []).append(finding.where)
    for (well, what), where in places.items():
        at = "; ".join(dict.fromkeys(filter(None, where)))
        print(f"{'ok   ' if well else 'WRONG'} {what}" + (f" [{at}]" if at else ""), flush=True)
    return 0 if all(finding.well for finding in findings) else 1


def together(step: "JobStep", arguments: argparse.Namespace) -> int:
    """All ranks of a job step."""
    from pipeline.preflight.distributed import WAIT, RankGroup, SilentError

    ranks = RankGroup(step)
    ranks.give_up_after(3 * WAIT)
    if apart := ranks.meet():
        return report(apart)
    try:
        return exchange(ranks, arguments)
    except SilentError as silent:
        return report([CheckResult(False, str(silent), ranks.here)])


def exchange(ranks: "RankGroup", arguments: argparse.Namespace) -> int:
    """What all find, said by the first rank."""
    from pipeline.preflight.distributed import check

    step = ranks.step
    findings = [finding._replace(where=ranks.here) for finding in machine(step) if not finding.well or step.rank == 0]
    loaded = load(arguments.config, arguments.overrides)
    if step.rank == 0:
        findings += recipe(arguments, step)
    findings += check(ranks, None if isinstance(loaded, CheckResult) else loaded)
    everything = [CheckResult(*one) for theirs in ranks.exchange(findings) for one in theirs]
    if step.rank > 0:
        # Whoever ends with an error ends the others: not before the first has spoken, whose store this is.
        ranks.wait_for("said", [0])
        ranks.store.set(f"left/{step.rank}", "")
        return int(not all(finding.well for finding in everything))
    code = report(everything)
    ranks.store.set("said/0", "")
    ranks.wait_for("left", list(range(1, step.num_tasks)))
    return code
