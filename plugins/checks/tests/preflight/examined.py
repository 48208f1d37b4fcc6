"""``paceline doctor`` on the machines of a lab: the same command on each, as users give it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.lab.machines import Node, NodeProcess

from paceline_checks.preflight.spec import Check, PreflightReport

PORT = 29500


def examine(nodes: Sequence[Node], *options: str | Path, code: int = 1, **how: Any) -> PreflightReport:
    """Examine the machines; each of them prints the report, which is returned, and ends with the code."""
    started = begin(nodes, *options, **how)
    assert [process.wait(240) for process in started] == [code] * len(nodes), [each.text for each in started]
    reports = [report_of(process) for process in started]
    assert all(report == reports[0] for report in reports)
    return reports[0]


def begin(
    nodes: Sequence[Node],
    *options: str | Path,
    own: Mapping[int, Sequence[str]] | None = None,
    env: Mapping[int, Mapping[str, str]] | None = None,
    before: Mapping[int, Sequence[str]] | None = None,
    present: Sequence[int] | None = None,
) -> list[NodeProcess]:
    """Start the doctor.

    Args:
        nodes: the machines.
        options: of all.
        own: options of one machine alone.
        env: variables of one machine.
        before: words before one machine's command.
        present: machines on which it is started; default: all.
    """
    directory = nodes[0].lab.directory
    started = []
    for number in range(len(nodes)) if present is None else present:
        command: list[str | Path] = [
            *(sys.executable, "-P", "-m", "paceline", "doctor", "--json", "--run-dir", directory / "run"),
            *("--nodes", str(len(nodes)), "--rdzv-endpoint", f"node0:{PORT}", "--node-rank", str(number)),
        ]
        if len(nodes) == 1:
            command = command[:8]
        words = [*(before or {}).get(number, ()), *map(str, (*command, *options, *(own or {}).get(number, ())))]
        variables = {"OMP_NUM_THREADS": "1", **(env or {}).get(number, {})}
        started.append(nodes[number].start(words, env=variables))
    return started


def report_of(process: NodeProcess) -> PreflightReport:
    """The report that a machine has printed."""
    [line] = [line for line in process.text.splitlines() if line.startswith('{"status": ')]
    return msgspec.json.decode(line, type=PreflightReport)


def found(report: PreflightReport, id: str, where: str | None = None) -> Check:
    """The check of that name, and place where there are several."""
    matching = [check for check in report.checks if check.id == id and where in (None, check.where)]
    assert len(matching) == 1, (id, where, report.checks)
    return matching[0]


def not_passed(report: PreflightReport) -> set[tuple[str, str]]:
    """What is wrong, and where."""
    return {(check.id, check.where) for check in report.checks if check.status != "pass"}


def sh(node: Node, script: str, *arguments: str | Path) -> None:
    """Run a short shell script on a machine."""
    done: Any = node.run(["sh", "-ec", script, "sh", *arguments])
    assert done.returncode == 0, (script, done.stdout, done.stderr)


def need(*tools: str) -> None:
    """Skip where a fault cannot be planted."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        packages = "on Debian: apt-get install nftables faketime"
        pytest.skip(f"planting this fault needs {', '.join(missing)} ({packages})")
