"""A preflight check as a job: its ranks are started as those of the job that it checks the nodes for."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from paceline.core.errors import ConfigError
from paceline.core.job import Placement
from paceline.core.ownership import own_prefix
from paceline.core.sockets import require_loopback
from paceline.launch.launcher import LaunchSpec, RendezvousOptions, get_launcher
from paceline_checks.preflight.spec import PreflightReport, PreflightSpec

REPORT = "report.json"


def prepare(
    spec: LaunchSpec,
    own: Any = None,
    *,
    is_local: bool,
    run: Path | None,
    task: str,
    keep: int,
    timeout_s: float,
    agents: bool = False,
) -> tuple[LaunchSpec | None, LaunchSpec]:
    """See :meth:`paceline.launch.launcher.Preflight.prepare`."""
    if spec.starts_each_rank:
        raise ConfigError(
            f"--preflight needs a command that is started once on each node, but --rank-launcher "
            f"{spec.rank_launcher} starts each rank. Use another --rank-launcher, or paceline doctor before the job."
        )
    preflight = PreflightSpec(
        run=None if run is None else str(run),
        task=task,
        nproc=spec.nproc,
        threads=spec.threads,
        gpus_per_node=spec.gpus_per_node,
        interface=spec.interface,
        keep=keep,
        timeout_s=timeout_s,
        agents=agents or spec.rank_launcher == "agent",
        before_job=True,
    )
    if is_local:
        return local_ranks(spec, preflight.command(sys.executable), own), spec
    return None, replace(spec, preflight=preflight.command(spec.python))


def local_ranks(spec: LaunchSpec, command: tuple[str, ...], options: RendezvousOptions | None = None) -> LaunchSpec:
    """Return a job that checks this node, and all nodes of the same job, by as many ranks as it has.

    Args:
        options: have the place of this node; default: the job has.
    """
    placement = options or spec.placement
    if spec.nodes[1] > 1 and (placement.node_rank is None or placement.rdzv_endpoint is None):
        raise ConfigError("--preflight with --nodes above 1 needs --node-rank and --rdzv-endpoint.")
    return LaunchSpec(
        command=command,
        nodes=(spec.nodes[0], spec.nodes[0]),
        nproc=spec.nproc,
        threads=spec.threads,
        interface=spec.interface,
        master_port=spec.master_port if spec.nodes[1] == 1 else None,
        env=spec.env,
        placement=Placement(
            node_rank=placement.node_rank, rdzv_endpoint=placement.rdzv_endpoint, rdzv_id=placement.rdzv_id
        ),
    )


def check_locally(spec: LaunchSpec) -> tuple[int, PreflightReport | None]:
    """Run the ranks of :func:`local_ranks`; return their exit code and the report, if there is one."""
    if spec.local_world_size > 1:
        require_loopback()
    with tempfile.TemporaryDirectory(prefix=own_prefix("preflight")) as directory:
        file, spawn = Path(directory) / REPORT, get_launcher("spawn")
        code = spawn.submit(spawn.render(replace(spec, command=(*spec.command, str(file))))).wait()
        return code, read_report(file) if file.exists() else None


def run_before(spec: LaunchSpec) -> tuple[int, str | None]:
    """See :meth:`paceline.launch.launcher.Preflight.run_before`."""
    code, report = check_locally(spec)
    if report is None:
        return code or 1, None
    failed = report.status == "fail"
    if not spec.placement.node_rank:
        for check in report.checks:
            if check.status != "pass":
                text = f"preflight {check.status}: {check.where}: {check.found}. {check.advice}"
                print(f"paceline: {text.rstrip('. ')}.", file=sys.stderr)
        if failed:
            print("paceline: the job was not started.", file=sys.stderr)
        elif report.interface is not None:
            print(f"paceline: preflight: the job uses --interface {report.interface}.", file=sys.stderr)
    return code or int(failed), report.interface


def read_report(file: Path) -> PreflightReport:
    """Return the report that rank 0 has left."""
    return msgspec.json.decode(file.read_bytes(), type=PreflightReport)
