"""An examination on the machines of a lab: the doctor's program, started on each as a launcher does."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.lab.machines import Node, NodeProcess

from paceline.launch.preflight.node import REPORT
from paceline.launch.preflight.spec import Check, PreflightReport

PORT = 29500


def examine(nodes: Sequence[Node], *options: str | Path, codes: Sequence[int] = (), **how: Any) -> PreflightReport:
    """Examine the machines; see :func:`begin` and :func:`end`."""
    return end(nodes, begin(nodes, *options, **how), codes)


def begin(
    nodes: Sequence[Node],
    *options: str | Path,
    own: Mapping[int, Sequence[str]] | None = None,
    env: Mapping[int, Mapping[str, str]] | None = None,
    before: Mapping[int, Sequence[str]] | None = None,
    present: Sequence[int] | None = None,
) -> list[NodeProcess]:
    """Start the doctor's program.

    Args:
        nodes: the machines.
        options: of the program.
        own: options of one machine alone.
        env: variables of one machine.
        before: words before one machine's command.
        present: machines on which it is started; default: all.
    """
    directory = nodes[0].lab.directory
    started = []
    for number in range(len(nodes)) if present is None else present:
        command = [
            *(sys.executable, "-P", "-m", "paceline.launch.preflight.node", "--directory", directory / "meeting"),
            *("--run-dir", directory / "run", "--nodes", str(len(nodes)), "--node-rank", str(number)),
            *("--master-addr", "node0", "--master-port", str(PORT), *options, *(own or {}).get(number, ())),
        ]
        words = [*(before or {}).get(number, ()), *map(str, command)]
        variables = {"OMP_NUM_THREADS": "1", **(env or {}).get(number, {})}
        started.append(nodes[number].start(words, env=variables))
    return started


def end(nodes: Sequence[Node], started: Sequence[NodeProcess], codes: Sequence[int] = ()) -> PreflightReport:
    """Wait for the programs; the report of machine 0.

    Args:
        nodes: the machines.
        started: the programs.
        codes: the exit codes that they end with; default: 0 everywhere.
    """
    ended = [process.wait(240) for process in started]
    assert ended == list(codes or [0] * len(ended)), [process.text for process in started]
    meeting = nodes[0].lab.directory / "meeting"
    left = sorted(path.name for path in meeting.iterdir())
    assert left == [REPORT], "the token and what else they met by is gone"
    return PreflightReport.from_json(json.loads((meeting / REPORT).read_bytes()))


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
