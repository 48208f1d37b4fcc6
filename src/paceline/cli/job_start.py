"""Start a job for ``paceline launch`` and ``paceline train --on CLUSTER``: print it, or submit and follow it."""

from __future__ import annotations

import dataclasses
import json as json_module
import os
import signal
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paceline.cli.job_options import LOCAL_LAUNCHERS, JobOptions
from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.core.options import flag
from paceline.launch.launcher import Launcher, LaunchSpec, get_launcher, refuse_gpu_type, refuse_torchrun_options
from paceline.launch.local_run import check_task
from paceline.launch.preflight import find_preflight
from paceline.launch.registry import make_options
from paceline.launch.submit import (
    JobRecord,
    finish,
    make_directory,
    nodes_python,
    read_records,
    remote_task,
    submit,
    task_job,
)


def start_task(
    config: RunConfig, options: JobOptions, own: Mapping[str, Any], *, dry_run: bool, json: bool, quiet: bool
) -> int:
    """Have a launcher start ``paceline train`` on its nodes; ``own`` are the launcher's own options."""
    launcher = get_launcher(config.processes.on)
    launcher_options = make_options(launcher, own)
    if launcher.files == "uploaded":
        task = remote_task(config.processes.task, partial(launcher.remote_path, options=launcher_options))
        config = config.replace(task=task)
    spec = task_spec(launcher, config, launcher_options, options)
    if quiet:
        spec = dataclasses.replace(spec, command=(*spec.command, "--quiet"))
    return start(
        launcher,
        spec,
        launcher_options,
        options,
        dry_run=dry_run,
        json=json,
        task=config.processes.task,
        keep=config.records.keep_checkpoints,
        init_timeout_s=config.processes.init_timeout,
    )


def task_spec(launcher: Launcher, config: RunConfig, own: Any, options: JobOptions) -> LaunchSpec:
    """Build the job of a task, on the nodes that the launcher's own options and ``--nodes`` name.

    Raises:
        ConfigError: the options fit no job.
        TaskError: the task does not exist.
    """
    for name in ("env_style", "roles"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"{flag(name)} is for scripts, but a task finds its rank itself. Leave it out, or start a "
                "script with paceline launch."
            )
    nodes, counts = launcher.resolve_sizes(config.processes.nodes, config.processes.nproc, own)
    if launcher.files == "shared":
        check_task(config)
    if counts is None:
        raise ConfigError(
            f"--nproc auto is not supported by --on {config.processes.on}: give the number of processes per node."
        )
    fields = {**options.spec_fields(None), "nodes": nodes, "nproc": counts}
    return task_job(config, fields, launcher, nodes_python(launcher, None))


def start(
    launcher: Launcher,
    spec: LaunchSpec,
    own: Any,
    options: JobOptions,
    *,
    dry_run: bool,
    json: bool,
    task: str = "",
    keep: int = 3,
    init_timeout_s: float = 300.0,
) -> int:
    """Print the job, or submit it and say how to follow it.

    Args:
        own: the launcher's options.
        dry_run: only print the job.
        json: print the job as JSON, after the output of its processes.
        task: the task that ``--preflight`` imports.
        keep: the number of checkpoints for which ``--preflight`` requires space.
        init_timeout_s: how long ``--preflight`` waits for all nodes.
    """
    first = None
    if options.preflight:
        # Nodes that do not have this machine's files have no directory for a script's, and several no common one.
        has_own_files = launcher.files == "uploaded" and spec.nodes[1] > 1
        run = spec.workdir if launcher.files == "shared" else None
        run = None if has_own_files else spec.run or run
        is_local = launcher.name in LOCAL_LAUNCHERS
        first, spec = find_preflight().prepare(
            spec, own, is_local=is_local, run=run, task=task, keep=keep, timeout_s=init_timeout_s
        )
        if launcher.preallocated:
            spec = dataclasses.replace(spec, gpus_per_node=None)  # the preflight has checked them
    refuse_gpu_type(spec, launcher.name)
    refuse_torchrun_options(spec)
    rendered = launcher.render(spec, own)
    before = () if first is None else get_launcher("spawn").render(first).commands
    if dry_run and json:
        commands = (*before, *rendered.commands)
        document = {"files": dict(rendered.files), "commands": [command.to_json() for command in commands]}
        print(json_module.dumps(document))
        return 0
    if dry_run:
        print(*(f"{command.text}\n" for command in before), rendered.text, sep="", end="")
        return 0
    if options.detach and launcher.attached:
        _detach(spec)
    if first is not None:
        code, interface = find_preflight().run_before(first)
        if code:
            return code
        if spec.interface is None and interface is not None:
            rendered = launcher.render(dataclasses.replace(spec, interface=interface), own)
    record, handle = submit(launcher, rendered)
    if launcher.attached:
        code = finish(record, handle)
        if json:
            print(json_module.dumps({**_as_json(record), "exit_code": code}), flush=True)
        return code
    if json and not options.wait:
        print(json_module.dumps(_as_json(record)), flush=True)
        return 0
    print(f"paceline: submitted {record.id}. Follow its output with: paceline logs -f {record.id}", file=sys.stderr)
    if not options.wait:
        return 0
    try:
        for line in handle.logs(follow=True):
            print(line, flush=True)
        code = finish(record, handle)
    except KeyboardInterrupt:
        print(f"paceline: {record.id} keeps running. Cancel it with: paceline cancel {record.id}", file=sys.stderr)
        return 130
    if json:
        print(json_module.dumps({**_as_json(record), "exit_code": code}), flush=True)
    return code


def _as_json(record: JobRecord) -> Mapping[str, Any]:
    return dataclasses.asdict(record)


def _detach(spec: LaunchSpec) -> None:
    """Continue in a process of its own, which prints into a file of the job's directory.

    Returns in that process. The process that the user waits for exits here as soon as the job is recorded.

    Raises:
        SystemExit: in the waiting process: 0, or the other process's exit code if it ended without a job.
    """
    from paceline.launch.supervisor import OUTPUT

    log = spec.directory / OUTPUT
    with make_directory(spec.directory):
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            with log.open("ab") as output, Path(os.devnull).open("rb") as nothing:
                os.dup2(nothing.fileno(), 0)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            return
        code = None
        try:
            while code is None and not _is_recorded(spec, pid):
                time.sleep(0.1)
                ended, status = os.waitpid(pid, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if ended else None
        except KeyboardInterrupt:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
            raise
        if code and not _is_recorded(spec, pid):
            sys.stderr.write(log.read_text(errors="replace"))
            raise SystemExit(code if code > 0 else 1)
    print(f"paceline: started as process {pid}. Follow its output with: paceline logs -f {pid}", file=sys.stderr)
    raise SystemExit(0)


def _is_recorded(spec: LaunchSpec, pid: int) -> bool:
    return any(
        record.directory == str(spec.directory) and record.reference.get("pid") == pid for record in read_records()
    )
