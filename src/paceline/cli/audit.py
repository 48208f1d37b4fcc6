"""``paceline audit RUN``."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.runs.directory import RunDirectory

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.data.audit import AuditReport, Ranges
    from paceline.runs.purity import PuritySummary


def audit(run: Path, *, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Prove from a run's ledger that every sample was seen exactly once per epoch.

    Recomputes the sample indices of every step from the seed and compares them with the indices that the
    ranks fetched. The run may be finished, crashed or still active. The exit code is 0 only if no error was
    found.

    Args:
        run: The run's directory.
        json: Print the report as one line of JSON.
    """
    # Imported here so that --help does not wait for numpy.
    from paceline.data.audit import audit as audit_run
    from paceline.runs.purity import read_purity

    report = audit_run(RunDirectory(run))
    purity = read_purity(RunDirectory(run))
    if json:
        print(json_module.dumps({**report.to_json(), "purity": purity.to_json()}))
    else:
        _print_report(report, purity)
    return 0 if report.clean else 1


def _print_report(report: AuditReport, purity: PuritySummary) -> None:
    from paceline.core.output import Console

    console = Console(highlight=False)
    if report.epochs:
        console.print(_table(report))
    if report.recomputed_steps:
        plural = "s" if report.recomputed_steps > 1 else ""
        console.print(
            f"Not counted above: {report.recomputed_steps:,} step{plural} ({report.recomputed_samples:,} "
            f"samples) undone by {'a restart' if report.generations == 2 else 'restarts'} and recomputed."
        )
    style = "green" if report.clean else "bold red"
    console.print(report.verdict, style=style, markup=False, soft_wrap=True)
    console.print(str(purity), style="bold red" if purity.found else None, markup=False, soft_wrap=True)


def _table(report: AuditReport) -> Table:
    from rich.table import Table

    table = Table("epoch", "steps", "seen once", "twice or more", "never", "not yet", "wrong steps", "ranks")
    for column in table.columns[:-1]:
        column.justify = "right"
    for epoch in report.epochs:
        wrong = (
            epoch.missing_steps,
            epoch.repeated_steps,
            epoch.misplaced_steps,
            epoch.checksum_mismatches,
        )
        table.add_row(
            str(epoch.epoch),
            f"{epoch.steps:,}",
            f"{epoch.once:,}",
            f"{epoch.repeated:,}",
            f"{epoch.never:,}",
            f"{epoch.not_yet:,}",
            f"{sum(map(_length, wrong)):,}",
            ", ".join(map(str, epoch.world_sizes)),
            style="red" if epoch.findings else None,
        )
    return table


def _length(ranges: Ranges) -> int:
    return sum(last - first + 1 for first, last in ranges)
