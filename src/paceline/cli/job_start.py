"""How ``paceline launch`` and ``paceline train --on SYSTEM`` start a job: print it, or submit and follow."""

from __future__ import annotations

import dataclasses
import json as json_module
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.job_options import HERE, JobOptions
from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.core.options import flag, parse_duration_s, parse_nodes, parse_nproc
from paceline.launch.launcher import Launcher, LaunchSpec
from paceline.launch.local_run import check_task
from paceline.launch.preflight.spec import run_before
from paceline.launch.submit import (
    JobRecord,
    finish,
    make_directory,
    nodes_python,
    read_records,
    submit,
    task_job,
)

if TYPE_CHECKING:
    from paceline.launch.preflight.spec import PreflightSpec

_ANYWHERE = Path("/tmp")
"""Of a machine that has none of this one's directories: it may not let a script write where that is."""


def task_spec(launcher: Launcher, config: RunConfig, own: Any, options: JobOptions) -> LaunchSpec:
    """The job of a task, on as many machines as the launcher's own options and ``--nodes`` say.

    Args:
        launcher: where it is to run.
        config: the run's options.
        own: the launcher's options.
        options: those that are for all launchers.

    Raises:
        ConfigError: it could not run, wherever it would be.
        TaskError: there is no such task.
    """
    for name in ("env_style", "roles"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"{flag(name)} is for scripts: a task finds its place by itself. Leave it out; or start a "
                "script with paceline launch."
            )
    nodes, counts = launcher.resolve_sizes(parse_nodes(config.nodes), parse_nproc(config.nproc), own)
    if launcher.files == "shared":
        check_task(config)
    if counts is None:
        raise ConfigError(f"--nproc auto does not work with --on {config.on}: give the processes a machine.")
    fields = {
        **options.spec_fields(None),
        "nodes": nodes,
        "nproc": counts,
        "max_restarts": config.max_restarts if config.recover == "restart" else 0,
        "walltime_s": None if config.walltime is None else parse_duration_s(config.walltime, "walltime"),
    }
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
        launcher: where it runs.
        spec: the job.
        own: the launcher's options.
        options: those that are for all launchers.
        dry_run: only print it.
        json: print the job as JSON, after what its processes print.
        task: for ``--preflight``: whose import is tried.
        keep: for ``--preflight``: checkpoints that must find room.
        init_timeout_s: for ``--preflight``: how long to wait for all machines to appear.
    """
    first = None
    if options.preflight:
        from paceline.launch.preflight.job import preflight_command, preflight_spec

        examination = dataclasses.replace(
            _examination(launcher, spec, own), task=task, keep=keep, timeout_s=init_timeout_s
        )
        if launcher.name in HERE:
            from paceline.launch.options import MeetingOptions

            meeting = own or MeetingOptions()
            first = preflight_command(examination, spec.nodes[1], meeting.node_rank, meeting.rdzv_endpoint)
        else:
            spec = preflight_spec(spec, examination)
        if launcher.preallocated:
            spec = dataclasses.replace(spec, gpus_per_node=None)  # they have been looked for
    rendered = launcher.render(spec, own)
    if dry_run and json:
        commands = rendered.commands if first is None else (first, *rendered.commands)
        described = {"files": dict(rendered.files), "commands": [command.to_json() for command in commands]}
        print(json_module.dumps(described))
        return 0
    if dry_run:
        print(f"{first.text}\n" if first is not None else "", rendered.text, sep="", end="")
        return 0
    if options.detach and launcher.attached:
        _detach(spec)
    if first is not None:
        code, interface = run_before(first.argv)
        if code:
            return code
        if spec.interface is None and interface is not None:
            rendered = launcher.render(dataclasses.replace(spec, interface=interface), own)
    record, handle = submit(launcher, rendered)
    if launcher.attached:
        code = finish(record, handle)
        if json:
            print(json_module.dumps({**_described(record), "exit_code": code}), flush=True)
        return code
    if json and not options.wait:
        print(json_module.dumps(_described(record)), flush=True)
        return 0
    print(f"paceline: submitted {record.id}. Follow it: paceline logs -f {record.id}", file=sys.stderr)
    if not options.wait:
        return 0
    try:
        for line in handle.logs(follow=True):
            print(line, flush=True)
        code = finish(record, handle)
    except KeyboardInterrupt:
        print(f"paceline: {record.id} keeps running. End it: paceline cancel {record.id}", file=sys.stderr)
        return 130
    if json:
        print(json_module.dumps({**_described(record), "exit_code": code}), flush=True)
    return code


def _examination(launcher: Launcher, spec: LaunchSpec, own: Any) -> PreflightSpec:
    """What a job needs of its machines, which meet where all of them can write."""
    run = spec.run or spec.workdir
    if launcher.name in HERE:
        directory = Path.cwd() / "jobs" / f"preflight-{spec.name}"
    else:
        common = launcher.common_directory(spec, own)
        directory = (common or _ANYWHERE) / "preflight"
        if spec.run is None and launcher.files != "shared":
            run = common or _ANYWHERE
    from paceline.launch.preflight.spec import PreflightSpec

    return PreflightSpec(
        directory=directory,
        run=run,
        nproc=spec.nproc,
        threads=spec.threads,
        gpus_per_node=spec.gpus_per_node,
        interface=spec.interface,
    )


def _described(record: JobRecord) -> Mapping[str, Any]:
    return dataclasses.asdict(record)


def _detach(spec: LaunchSpec) -> None:
    """Go on in a process of its own, which prints into a file of the job's directory.

    Returns in that process. The one that the user waits for ends here, as soon as the job is known.

    Raises:
        SystemExit: there: 0, or the exit code of the other if that has ended without a job.
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
    print(f"paceline: started as process {pid}. Follow it: paceline logs -f {pid}", file=sys.stderr)
    raise SystemExit(0)


def _is_recorded(spec: LaunchSpec, pid: int) -> bool:
    return any(
        record.directory == str(spec.directory) and record.reference.get("pid") == pid for record in read_records()
    )
