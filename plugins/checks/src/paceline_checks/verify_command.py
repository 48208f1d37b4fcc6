"""``paceline verify TASK``: compare a task under every strategy with one process."""

from __future__ import annotations

import json as json_module
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from paceline.cli.options import explicit_options, group, run_options

if TYPE_CHECKING:
    from paceline_checks.verify.verify import CaseResult, VerificationReport

Options: Any = run_options()
RunOptions = Annotated[Options | None, Parameter(name="*")]

_STYLES = {"equal": "green", "within": "green", "not applicable": "dim"}
_VERDICTS = {
    ("within", "rounding"): "within rounding",
    ("within", "tolerance"): "within tolerance",
    ("within", "convergence"): "converges",
}


def verify(
    task: str,
    *,
    strategies: Annotated[str | None, Parameter(group=group("Comparison"))] = None,
    worlds: Annotated[str, Parameter(group=group("Comparison"))] = "1,2,4",
    steps: Annotated[int, Parameter(group=group("Comparison"))] = 4,
    options: RunOptions = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Train TASK some steps under every strategy, and compare losses, gradients and weights with one process.

    Each strategy is compared by its guarantee: the same bits; a distance from float64 that is about that of
    one process in float32; or the bits of a simulation of its own schedule. A difference is reported with its
    first step, module and tensor. The task's arithmetic is checked as well, with warnings about probable
    mistakes. Runs use the CPU with one thread per process, unless --device and --threads say otherwise. The
    exit code is 0 only if every strategy meets its guarantee, or cannot be used with the task.

    Args:
        task: file.py:Name, package.module:Name, hf:MODEL, or a built-in task such as fashion-mnist.
        strategies: Comma-separated names, as in the table's first column. Default: all.
        worlds: Comma-separated numbers of processes.
        steps: Optimizer steps of each run.
        json: Print the report as one line of JSON.
    """
    from paceline.core.signals import handle_signals
    from paceline_checks.verify.cases import VerificationRequest, parse_worlds, select_cases
    from paceline_checks.verify.verify import verify as run_verification

    explicit = explicit_options(options)
    request = VerificationRequest(
        task=task,
        options=explicit,
        cases=[case.with_options(explicit) for case in select_cases(strategies)],
        worlds=parse_worlds(worlds),
        steps=steps,
    )
    with handle_signals((signal.SIGTERM,), signal.default_int_handler):
        report = run_verification(request, lambda line: print(f"verify: {line}", file=sys.stderr, flush=True))
    if json:
        print(json_module.dumps(report.to_json()))
    else:
        _print(report)
    return 0 if report.ok else 1


def _print(report: VerificationReport) -> None:
    from paceline.core.output import ListTable, wide_console

    table = ListTable("strategy", ">processes", "guarantee", "result", "measured", folds=("measured",))
    for row in report.rows:
        verdict = _VERDICTS.get((row.verdict, row.guarantee), row.verdict)
        guarantee = "own reference" if row.guarantee == "reference" else row.guarantee
        style = _STYLES.get(row.verdict, "red")
        table.add(row.method, str(row.world_size), guarantee, verdict, _detail(row), style=style)
    console = wide_console()
    console.print(table)
    console.print(
        f"{report.steps} steps, {report.microbatches} micro-batches, batch {report.global_batch_size}, "
        f"seed {report.seed}; each tolerance is {report.factor:g} times one process's own distance from "
        "float64. plain-pytorch is a loop without Paceline, both in float64.",
        soft_wrap=True,
    )
    if report.no_double:
        console.print(f"No float64 reference run: {report.no_double}", style="red", soft_wrap=True, markup=False)
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True, markup=False)
    if report.ok:
        console.print("Every strategy meets its guarantee.", style="green")
    else:
        wrong = ", ".join(f"{row.method} on {row.world_size}" for row in report.rows if not row.ok)
        console.print(f"These strategies do not meet their guarantee: {wrong}.", style="bold red", soft_wrap=True)


def _detail(row: CaseResult) -> str:
    words = [row.detail] if row.detail else []
    if row.divergence is not None:
        words.append(str(row.divergence))
    elif row.distance is not None:
        words.append(f"{row.distance:.1e} of {row.tolerance:.1e}")
    return "; ".join(words)
