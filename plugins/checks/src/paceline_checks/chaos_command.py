"""``paceline chaos TASK``: train under injected faults."""

from __future__ import annotations

import json as json_module
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from cyclopts import Parameter

from paceline.cli.options import explicit_options, group, run_options
from paceline.core.errors import ConfigError
from paceline_checks.fault_injection import IN_WORDS, KINDS, Kind

if TYPE_CHECKING:
    from paceline_checks.chaos import ChaosReport

_DEFAULT_KINDS = "kill,stop,leave,join"

Options: Any = run_options()
RunOptions = Annotated[Options | None, Parameter(name="*")]


def chaos(
    task: str,
    *,
    faults: Annotated[int, Parameter(group=group("Faults"))] = 20,
    kinds: Annotated[str, Parameter(group=group("Faults"))] = _DEFAULT_KINDS,
    run_dir: Path | None = None,
    options: RunOptions = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Train TASK without and with injected faults; prove that nothing is lost.

    Faults are spread evenly over the steps. --seed, the runs' seed, also decides the order and targets of the
    faults. The report shows the recoveries and recovery times per kind of fault, the ledger's audit and the
    final weights. The exit code is 0 only if every fault was injected and recovered from, no sample was lost
    or seen twice, and the final weights equal those of the run without faults.

    Args:
        task: file.py:Name, package.module:Name, hf:MODEL, or a built-in task such as fashion-mnist.
        faults: Number of faults.
        kinds: Comma-separated: kill, stop, slow, leave, join, enospc, eio, bitflip, truncate.
        run_dir: Folder for both runs. Default: runs/chaos-TASK-TIME.
        json: Print the report as one line of JSON.
    """
    from paceline.core.job import default_run_path
    from paceline.core.signals import handle_signals
    from paceline_checks.chaos import run_chaos

    with handle_signals((signal.SIGTERM,), signal.default_int_handler):
        report = run_chaos(
            {**explicit_options(options), "task": task},
            run_dir or Path(default_run_path(f"chaos-{task.rpartition(':')[2] or task}")),
            faults=faults,
            kinds=_parse_kinds(kinds),
            tell=lambda line: print(f"chaos: {line}", file=sys.stderr, flush=True),
        )
    if json:
        print(json_module.dumps(report.to_json()))
    else:
        _print(report)
    return 0 if report.ok else 1


def _parse_kinds(text: str) -> tuple[Kind, ...]:
    kinds = [word.strip() for word in text.split(",") if word.strip()]
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"--kinds contains an unknown kind {kind!r}. Choose from {', '.join(KINDS)}.")
    return cast("tuple[Kind, ...]", tuple(kinds))


def _print(report: ChaosReport) -> None:
    from paceline.core.output import Console, ListTable

    table = ListTable("kind", ">faults", ">recovered", ">p50", ">p99", "description", folds=("description",))
    for row in report.kinds:
        injected = f"{row.injected}" if row.injected == row.planned else f"{row.injected} of {row.planned}"
        times = _seconds(row.p50_s), _seconds(row.p99_s)
        style = None if row.planned == row.injected == row.recovered else "red"
        table.add(row.kind, injected, str(row.recovered), *times, IN_WORDS[row.kind], style=style)
    console = Console(highlight=False)
    console.print(table)
    for name, value in _facts(report).items():
        console.print(f"{name:16}  {value}", soft_wrap=True, markup=False)
    if report.ok:
        console.print("Nothing was lost.", style="green")
    else:
        problems = f"Problems: {'; '.join(report.problems)}."
        console.print(problems, style="bold red", markup=False, soft_wrap=True)


def _facts(report: ChaosReport) -> dict[str, str]:
    facts = {
        "steps": f"{report.steps:,}, {report.repeated_steps:,} of them recomputed",
        "samples": f"{report.samples_lost:,} lost, {report.samples_duplicated:,} seen more than once",
        "audit": report.audit,
    }
    if report.capacity is not None and report.capacity.goodput is not None:
        lost = report.capacity.lost_s_per_fault or 0.0
        facts["goodput"] = (
            f"{report.capacity.goodput:.0%} of the surviving workers' capacity; {lost:.2f} s lost per fault"
        )
    same = "equal" if report.same_model else f"DIFFERENT: {report.chaos_sha256 or 'not finished'}"
    facts["model sha256"] = f"{report.clean_sha256} without faults; with faults: {same}"
    facts["history"] = f"paceline runs show {report.chaos_run}"
    return facts


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
