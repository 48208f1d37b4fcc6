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
from paceline.launchers.base import JobSpec, Launcher
from paceline.launchers.preflight import run_before
from paceline.launchers.registry import JobRecord, read_records
from paceline.launchers.submission import finish, made_directory, submit

if TYPE_CHECKING:
    from paceline.doctor.examination import Examination


def start(
    launcher: Launcher,
    spec: JobSpec,
    own: Any,
    options: JobOptions,
    *,
    dry_run: bool,
    json: bool,
    task: str = "",
    keep: int = 3,
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
    """
    first = None
    if options.preflight:
        from paceline.doctor.job import preflight_command, preflight_spec

        examination = _examination(launcher, spec, task, keep)
        if launcher.name in HERE:
            from paceline.launchers.local.options import MeetingOptions

            meeting = own or MeetingOptions()
            first = preflight_command(examination, spec.nodes[1], meeting.node_rank, meeting.rdzv_endpoint)
        else:
            spec = preflight_spec(spec, examination)
        if launcher.machines_given:
            spec = dataclasses.replace(spec, gpus_per_node=None)  # they have been looked for
    rendered = launcher.render(spec, own)
    if dry_run and json:
        commands = rendered.commands if first is None else (first, *rendered.commands)
        described = {"files": dict(rendered.files), "commands": list(map(dataclasses.asdict, commands))}
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
        print(f"paceline: {record.id} goes on. End it: paceline cancel {record.id}", file=sys.stderr)
        return 130
    if json:
        print(json_module.dumps({**_described(record), "exit_code": code}), flush=True)
    return code


def _examination(launcher: Launcher, spec: JobSpec, task: str, keep: int) -> Examination:
    """What a job needs of its machines, which meet where all of them can write."""
    if launcher.name in HERE:
        directory = Path.cwd() / "jobs" / f"preflight-{spec.name}"
    elif launcher.files == "shared" or spec.run is None:
        directory = spec.directory / "preflight"
    else:
        directory = spec.run / "preflight"
    from paceline.doctor.examination import Examination

    return Examination(
        directory=directory,
        run=spec.run or spec.workdir,
        task=task,
        nproc=spec.nproc,
        threads=spec.threads,
        gpus_per_node=spec.gpus_per_node,
        interface=spec.interface,
        keep=keep,
    )


def _described(record: JobRecord) -> Mapping[str, Any]:
    return dataclasses.asdict(record)


def _detach(spec: JobSpec) -> None:
    """Go on in a process of its own, which prints into a file of the job's directory.

    Returns in that process. The one that the user waits for ends here, as soon as the job is known.

    Raises:
        SystemExit: there: 0, or the exit code of the other if that has ended without a job.
    """
    from paceline.launchers.attached import OUTPUT

    log = spec.directory / OUTPUT
    with made_directory(spec.directory):
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


def _is_recorded(spec: JobSpec, pid: int) -> bool:
    return any(
        record.directory == str(spec.directory) and record.reference.get("pid") == pid
        for record in read_records()
    )
