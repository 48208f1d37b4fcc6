"""An examination as a job: through the launcher that the job itself is going to use."""

from __future__ import annotations

import dataclasses
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.core.environment import parse_endpoint
from paceline.core.errors import ConfigError, LaunchError
from paceline.core.sockets import LOOPBACK
from paceline.launch.launcher import Command, JobHandle, Launcher, LaunchSpec
from paceline.launch.preflight.node import REPORT, lead_alone, stoppable
from paceline.launch.preflight.spec import NodePlace, PreflightReport, PreflightSpec
from paceline.launch.rank import expand_placeholders
from paceline.launch.submit import finish, submit

_LAST_LINES = 20


def examine_here(examination: PreflightSpec, port: int | None = None) -> PreflightReport:
    """Examine this machine alone, in this process; the examination's directory is not used.

    Args:
        examination: what the job needs.
        port: where the job's rank 0 is going to listen; default: any.
    """
    place = NodePlace(node_rank=0, nodes=1, master_addr=LOOPBACK, master_port=port or 0)
    with stoppable():
        return lead_alone(examination, place)


def examine_by(launcher: Launcher, spec: LaunchSpec, options: Any, directory: Path) -> PreflightReport:
    """Start the program on the job's machines, wait, and read what machine 0 has left.

    Args:
        launcher: the job's own.
        spec: a job whose command is the examination's.
        options: the launcher's.
        directory: the examination's.

    Raises:
        LaunchError: the system refused the job, or it left no report; the message says what it printed.
    """
    (directory / REPORT).unlink(missing_ok=True)
    record, handle = submit(launcher, launcher.render(spec, options))
    if not launcher.attached:
        print(f"paceline: {record.id} is submitted; Ctrl-C ends it.", file=sys.stderr)
    try:
        with stoppable():
            code = finish(record, handle)
    except KeyboardInterrupt:
        handle.cancel()
        raise
    try:
        return PreflightReport.from_json(json.loads((directory / REPORT).read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(
            f"the examination ended with exit code {code} and left no report in {directory}."
            f"{_printed(handle)} Can {spec.python} import paceline there, and do the machines share that "
            "directory?"
        ) from error


def preflight_spec(spec: LaunchSpec, examination: PreflightSpec) -> LaunchSpec:
    """The job, on whose machines the examination runs first.

    Raises:
        ConfigError: its ranks are started one by one, so that nothing of ours runs once on a machine.
    """
    if spec.starts_each_rank:
        raise ConfigError(
            f"--preflight needs a command that is started once on each machine, and --rank-launcher "
            f"{spec.rank_launcher} starts each rank. Use another --rank-launcher, or paceline doctor before the job."
        )
    examination = dataclasses.replace(examination, agents=spec.rank_launcher == "agent", preflight=True)
    return dataclasses.replace(spec, preflight=examination.command(spec.python))


def preflight_command(examination: PreflightSpec, nodes: int, node_rank: int | None, endpoint: str | None) -> Command:
    """What examines, before processes are started here.

    Args:
        examination: what they need.
        nodes: machines, on each of which the same is done.
        node_rank: this machine's number.
        endpoint: HOST:PORT of machine 0, where there are several.

    Raises:
        ConfigError: nothing says where the machines meet.
    """
    if nodes > 1 and (node_rank is None or endpoint is None):
        raise ConfigError("--preflight with --nodes above 1 needs --node-rank and --rdzv-endpoint.")
    host, port = parse_endpoint(endpoint, "--rdzv-endpoint") if endpoint else (LOOPBACK, 0)
    words = expand_placeholders(
        dataclasses.replace(examination, preflight=True).command(sys.executable),
        master_addr=host,
        master_port=port,
        node_rank=node_rank or 0,
        nodes=nodes,
    )
    return Command(title="first, on each machine", argv=words)


def _printed(handle: JobHandle) -> str:
    lines = [line for line in islice(handle.logs(), 10_000) if line.strip()][-_LAST_LINES:]
    return "".join(f"\n  {line}" for line in lines) + ("\n" if lines else "")
