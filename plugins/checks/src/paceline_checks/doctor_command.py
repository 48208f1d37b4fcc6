"""``paceline doctor``: check a job's nodes before the job runs."""

from __future__ import annotations

import dataclasses
import json as json_module
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from paceline.cli.options import launchers_options, read_defaults
from paceline.core.built_in import PARTS
from paceline.core.errors import ConfigError, LaunchError
from paceline.core.options import parse_duration_s, parse_nodes, parse_nproc, parse_walltime_s
from paceline.core.plugins import import_object
from paceline.core.task_loading import check_spec
from paceline.launch.launcher import LOCAL_LAUNCHERS, Launcher, LaunchSpec, get_launcher, make_options, parse_env
from paceline.launch.submit import choose_rank_launcher, finish, job_directory, submit
from paceline_checks.collectives import parse_size
from paceline_checks.preflight.job import REPORT, check_locally, local_ranks, read_report
from paceline_checks.preflight.spec import PreflightReport, PreflightSpec

LauncherOptions: Any = launchers_options()
Flag = Annotated[bool, Parameter(negative="")]
_WALLTIME = "15min"
_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}
_LAST_LINES = 20


def doctor(
    task: Annotated[str, Parameter(show_default=False)] = "",
    *,
    on: str = "inprocess",
    nodes: str = "1",
    nproc: str = "1",
    threads: int | None = None,
    gpus_per_node: int | None = None,
    cpus_per_task: int | None = None,
    interface: str | None = None,
    master_port: int | None = None,
    run_dir: Path = Path("runs"),
    keep_checkpoints: int = 3,
    checkpoint_size: str | None = None,
    timeout: str = "2min",
    walltime: str | None = None,
    env: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    python: str | None = None,
    launcher_options: Annotated[LauncherOptions | None, Parameter(name="*")] = None,
    horovod: Flag = False,
    dry_run: Flag = False,
    json: Flag = False,
) -> int:
    """Check every node of a job, and the network and storage between them, before the job runs.

    The job's own launcher starts the checks, in an allocation like the job's. The exit code is 0 unless a
    check fails.

    Args:
        task: Also try to import this task on every node. Its model's size gives the size of a checkpoint.
        on: The launcher. Default: check this machine.
        nodes: Number of nodes.
        nproc: Processes per node of the job: one number, or a list such as 8,4.
        threads: CPU threads per process of the job.
        gpus_per_node: GPUs per node, to request and to find.
        cpus_per_task: CPUs to request for each process of the job.
        interface: Network interface to the other nodes, e.g. eth0.
        master_port: Port on which the job's rank 0 will listen.
        run_dir: The run's directory.
        keep_checkpoints: Number of checkpoints that must fit on the disk.
        checkpoint_size: Size of one checkpoint, such as 2GiB. Default: as in the run, else about 3 times the task's
            model.
        timeout: How long to wait for all ranks, which first import torch and the task.
        walltime: Time limit of the checks' job. Default: 15min, on systems with a queue.
        env: K=V, for every process; may be repeated.
        python: Python interpreter on the nodes. Default: this one.
        horovod: Only print what Horovod was built with, as horovodrun --check-build does.
        dry_run: Print the whole job and start nothing; does not need the cluster.
        json: Print the report as one line of JSON.
    """
    if horovod:
        build = import_object(PARTS["doctor --horovod"])(python or sys.executable)
        print(json_module.dumps(dataclasses.asdict(build)) if json else build.text)
        return 0
    if task:
        check_spec(task)
    launcher = get_launcher(on if on not in LOCAL_LAUNCHERS else "spawn")
    defaults, is_local = read_defaults(task), on in LOCAL_LAUNCHERS
    own = defaults.launcher_options(launcher.name, launcher_options)
    options = make_options(launcher, own)
    of_run = defaults.values("run")
    threads = of_run.get("threads") if threads is None else threads
    interface, python = interface or of_run.get("interface"), python or sys.executable
    if not is_local:
        of_job = defaults.job_options(None)
        cpus_per_task = of_job.cpus_per_task if cpus_per_task is None else cpus_per_task
        env = env or of_job.env
    checkpoint_bytes = None if checkpoint_size is None else parse_size(checkpoint_size)
    if checkpoint_size is not None and checkpoint_bytes is None:
        raise ConfigError(f"--checkpoint-size must be such as 500MB or 2GiB, but is {checkpoint_size!r}.")
    if keep_checkpoints < 1 or (gpus_per_node or 0) < 0:
        raise ConfigError("--keep-checkpoints and --gpus-per-node must be positive numbers.")
    (least, most), counts = launcher.resolve_sizes(parse_nodes(nodes), parse_nproc(nproc), options)
    if counts is None:
        raise ConfigError("--nproc auto is not supported by paceline doctor: give the number of processes per node.")
    if least != most:
        raise ConfigError(f"--nodes {nodes}: must be one number, the nodes to check.")
    if len(counts) > 1 and len(counts) != least:
        raise ConfigError(f"--nproc {nproc} lists {len(counts)} nodes, but --nodes is {least}.")
    if launcher.files != "shared":
        raise ConfigError(
            f"the nodes of --on {on} do not share this machine's files, so the report cannot be read here. "
            "Give --preflight to the job itself."
        )
    preflight = PreflightSpec(
        run=str(run_dir.absolute()),
        task=task,
        nproc=counts,
        threads=threads,
        gpus_per_node=gpus_per_node,
        interface=interface,
        keep=keep_checkpoints,
        checkpoint_bytes=checkpoint_bytes,
        timeout_s=parse_duration_s(timeout, "timeout"),
    )
    if is_local and least > 1 and "node_rank" not in own:
        raise ConfigError(
            "--nodes above 1 without a cluster: run the same command on each node, with --rdzv-endpoint "
            "HOST:PORT and --node-rank N."
        )
    limit = walltime if walltime is not None or launcher.attached else _WALLTIME
    rank_launcher = choose_rank_launcher(
        launcher, "spawn" if "spawn" in launcher.rank_launchers else None, "torch", is_task=False
    )
    command, directory = preflight.command(python), job_directory("doctor", attached=False)
    spec = LaunchSpec(
        command=(*command, str(directory / REPORT)),
        name="doctor",
        directory=directory,
        nodes=(least, most),
        nproc=counts,
        threads=threads,
        # Where the launcher cannot request GPUs, the checks alone look for them.
        gpus_per_node=None if launcher.preallocated else gpus_per_node,
        cpus_per_task=cpus_per_task,
        walltime_s=None if limit is None else parse_walltime_s(limit),
        env=parse_env(env),
        rank_launcher=rank_launcher,
        env_style="torch" if "torch" in launcher.env_styles else launcher.env_styles[0],
        interface=interface,
        master_port=master_port,
        python=python,
    )
    if is_local:
        spec, launcher, options = local_ranks(spec, command, options), get_launcher("spawn"), None
    if dry_run:
        print(launcher.render(spec, options).text, end="")
        return 0
    if not is_local:
        return _show(_check_with_launcher(launcher, spec, options), json=json)
    code, report = check_locally(spec)
    if report is None and not code:
        raise LaunchError(f"the checks left no report. Check that {python} is a Python that can import paceline.")
    return code or 1 if report is None else _show(report, json=json)


def _check_with_launcher(launcher: Launcher, spec: LaunchSpec, options: Any) -> PreflightReport:
    """Run the checks on the job's nodes, wait, and read the report from the job's directory."""
    file = spec.directory / REPORT
    file.unlink(missing_ok=True)
    record, handle = submit(launcher, launcher.render(spec, options))
    if not launcher.attached:
        print(f"paceline: submitted {record.id}; Ctrl-C cancels it.", file=sys.stderr)
    try:
        code = finish(record, handle)
    except KeyboardInterrupt:
        handle.cancel()
        raise
    try:
        return read_report(file)
    except (OSError, ValueError) as error:
        lines = [line for line in islice(handle.logs(), 10_000) if line.strip()][-_LAST_LINES:]
        output = "".join(f"\n  {line}" for line in lines) + ("\n" if lines else "")
        raise LaunchError(
            f"the preflight check ended with exit code {code} and left no report in {spec.directory}.{output} "
            f"Check that {spec.python} can import paceline on the nodes, and that they share that directory."
        ) from error


def _show(report: PreflightReport, *, json: bool) -> int:
    """Print a row per check, with advice if it did not pass; return the exit code."""
    if json:
        print(json_module.dumps(report.to_json()))
        return int(report.status == "fail")
    from rich.text import Text

    from paceline.core.output import Console, ListTable

    console = Console(highlight=False)
    table = ListTable("check", "", "where", "found", "advice", folds=("where", "found", "advice"))
    for check in report.checks:
        status = Text(check.status, _STYLES[check.status])
        table.add(check.id, status, check.where, check.found, f"{check.advice}." if check.advice else "")
    console.print(table)
    counts: Counter[str] = Counter(check.status for check in report.checks)
    machines = f"{len(report.machines)} node{'s' if len(report.machines) > 1 else ''}"
    parts = [f"{counts[status]} {status}ed" for status in _STYLES if counts[status] or status == "pass"]
    console.print(f"{machines}: {', '.join(parts)}.", style=_STYLES[report.status])
    return int(report.status == "fail")
