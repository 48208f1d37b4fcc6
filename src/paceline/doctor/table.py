"""A report for people."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.doctor.checks import Report, Status

_STYLES: dict[Status, str] = {"pass": "green", "warn": "yellow", "fail": "bold red"}


def print_report(report: Report, console: Console) -> None:
    """A row for each check; where it did not pass, with what to do."""
    table = Table("check", "", "where", "found", "what to do")
    for check in report.checks:
        table.add_row(
            check.id,
            f"[{_STYLES[check.status]}]{check.status}[/]",
            escape(check.where),
            escape(check.found),
            escape(f"{check.advice}." if check.advice else ""),
        )
    console.print(table)
    counts: Counter[str] = Counter(check.status for check in report.checks)
    machines = f"{len(report.machines)} machine{'s' if len(report.machines) > 1 else ''}"
    parts = [f"{counts['pass']} passed"]
    parts += [
        f"{counts[status]} {word}"
        for status, word in (("warn", "to look at"), ("fail", "failed"))
        if counts[status]
    ]
    console.print(f"{machines}: {', '.join(parts)}.", style=_STYLES[report.status])
