"""A preflight check as a job, started by the launcher that the job itself will use."""

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
from paceline.launch.preflight.node import REPORT, coordinate_single_node, stoppable
from paceline.launch.preflight.spec import NodePlace, PreflightReport, PreflightSpec
from paceline.launch.rank import expand_placeholders
from paceline.launch.submit import finish, submit

_LAST_LINES = 20


def check_locally(preflight: PreflightSpec, port: int | None = None) -> PreflightReport:
    """Check this node in this process, without using the spec's directory.

    Args:
        preflight: requirements of the job.
        port: of the job's rank 0; by default any.
    """
    place = NodePlace(node_rank=0, nodes=1, master_addr=LOOPBACK, master_port=port or 0)
    with stoppable():
        return coordinate_single_node(preflight, place)


def check_with_launcher(launcher: Launcher, spec: LaunchSpec, options: Any, directory: Path) -> PreflightReport:
    """Run the checks on the job's nodes, wait, and read node 0's report.

    Args:
        launcher: of the job.
        spec: a job whose command runs the checks.
        options: of the launcher.
        directory: of the checks.

    Raises:
        LaunchError: the cluster refused the job, or it left no report; contains its output.
    """
    (directory / REPORT).unlink(missing_ok=True)
    record, handle = submit(launcher, launcher.render(spec, options))
    if not launcher.attached:
        print(f"paceline: submitted {record.id}; Ctrl-C cancels it.", file=sys.stderr)
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
            f"the preflight check ended with exit code {code} and left no report in {directory}."
            f"{_last_output(handle)} Check that {spec.python} can import paceline on the nodes, and that they share "
            "that directory."
        ) from error


def preflight_spec(spec: LaunchSpec, preflight: PreflightSpec) -> LaunchSpec:
    """Return a job that runs the checks on its nodes first.

    Raises:
        ConfigError: the launcher starts each rank itself, so no program runs once per node.
    """
    if spec.starts_each_rank:
        raise ConfigError(
            f"--preflight needs a command that is started once on each node, but --rank-launcher "
            f"{spec.rank_launcher} starts each rank. Use another --rank-launcher, or paceline doctor before the job."
        )
    preflight = dataclasses.replace(preflight, agents=spec.rank_launcher == "agent", preflight=True)
    return dataclasses.replace(spec, preflight=preflight.command(spec.python))


def preflight_command(preflight: PreflightSpec, nodes: int, node_rank: int | None, endpoint: str | None) -> Command:
    """Return the command that checks this node before processes are started.

    Args:
        preflight: requirements of the processes.
        nodes: number of nodes, on each of which the same command runs.
        node_rank: of this node.
        endpoint: HOST:PORT of node 0, if there are several.

    Raises:
        ConfigError: the rendezvous of several nodes is not given.
    """
    if nodes > 1 and (node_rank is None or endpoint is None):
        raise ConfigError("--preflight with --nodes above 1 needs --node-rank and --rdzv-endpoint.")
    host, port = parse_endpoint(endpoint, "--rdzv-endpoint") if endpoint else (LOOPBACK, 0)
    words = expand_placeholders(
        dataclasses.replace(preflight, preflight=True).command(sys.executable),
        master_addr=host,
        master_port=port,
        node_rank=node_rank or 0,
        nodes=nodes,
    )
    return Command(title="first, on each node", argv=words)


def _last_output(handle: JobHandle) -> str:
    lines = [line for line in islice(handle.logs(), 10_000) if line.strip()][-_LAST_LINES:]
    return "".join(f"\n  {line}" for line in lines) + ("\n" if lines else "")
