"""``paceline jobs``, ``status``, ``cancel`` and ``scale``, for all launchers."""

from __future__ import annotations

import dataclasses
import json as json_module
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from paceline.core.errors import ConfigError, PacelineError
from paceline.core.output import Console, ListTable
from paceline.launch.job_records import JobRecord, add_record, find_record, read_records
from paceline.launch.launcher import JobStatus
from paceline.runs.directory import RunDirectory

if TYPE_CHECKING:
    from paceline.elastic.agent import AgentConnection, RunStatus


Flag = Annotated[bool, Parameter(negative="")]
_COMMAND_LENGTH = 60
_COLOURS = {"running": "green", "pending": "yellow", "failed": "red", "cancelled": "magenta"}


def jobs(*, all: Flag = False, json: Flag = False) -> int:
    """List the jobs submitted from this machine, newest last.

    Args:
        all: Include jobs that ended more than a day ago.
        json: Print a JSON list.
    """
    entries = list(known_jobs(all=all))
    if json:
        print(json_module.dumps([_as_json(record, status) for record, status in entries]))
        return 0
    if not entries:
        print("No jobs. Start one: paceline launch --on NAME -- COMMAND")
        return 0
    headings = ("job", "name", "state", "detail", "submitted", "command")
    table = ListTable(*headings, folds=("name", "detail", "command"))
    for record, status in entries:
        when = time.strftime("%m-%d %H:%M", time.localtime(record.submitted))
        program, *arguments = record.command
        text = shorten(" ".join([Path(program).name, *arguments]), _COMMAND_LENGTH, placeholder=" …")
        table.add(record.id, record.name, _format_state(status), status.detail, when, text)
    Console().print(table)
    return 0


def status(job: str, *, json: Flag = False) -> int:
    """Print the state of a job; exit code 0 unless it failed.

    Args:
        job: The job's id, the cluster's number of it, or its name.
        json: Print JSON.
    """
    record = find_record(job)
    current = record.status()
    if json:
        print(json_module.dumps(_as_json(record, current)))
    else:
        table = Table(show_header=False, box=None)
        state = Text.assemble(_format_state(current), f"  {current.detail}" if current.detail else "")
        rows: dict[str, str | Text | None] = {"job": record.id, "name": record.name, "state": state}
        rows |= {"command": " ".join(record.command), "directory": record.directory, "run": record.run}
        rows["restarts"] = str(current.restarts or "")
        for name, value in rows.items():
            if value:
                table.add_row(name, value if isinstance(value, Text) else Text(value))
        Console().print(table)
    return 1 if current.state == "failed" else 0


def cancel(job: str, *, json: Flag = False) -> int:
    """Cancel a job and everything that it started; repeat to kill local processes that do not end.

    Args:
        job: The job's id, the cluster's number of it, or its name.
        json: Print JSON, with the job's state before.
    """
    record = find_record(job)
    previous = _ask_anew(record)
    if not previous.ended:
        record.handle().cancel()
    if json:
        print(json_module.dumps(_as_json(record, previous)))
    elif previous.ended:
        print(f"{record.id} has already ended: {previous.state}.")
    else:
        print(f"{record.id} is being cancelled.")
    return 0


def known_jobs(*, all: bool = False) -> Iterator[tuple[JobRecord, JobStatus]]:
    """Yield the jobs with their states, oldest first; those that ended more than a day ago only with ``all``.

    The state is "unknown", with the reason, if its cluster does not answer.
    """
    for record in read_records():
        try:
            status = record.status()
        except (PacelineError, OSError) as error:
            status = JobStatus(state="unknown", detail=str(error).partition(". ")[0])
        if all or not status.ended or time.time() - record.submitted < 86400:
            yield record, status


def _ask_anew(record: JobRecord) -> JobStatus:
    """Return the job's status; an end without an exit code is unknown, as the system may not see the job."""
    if record.ended is None or record.ended["exit_code"] is not None:
        return record.status()
    now = record.handle().status()
    if now.ended or now.state == "unknown":
        return record.status()
    with suppress(ConfigError):
        add_record(dataclasses.replace(record, ended=None))
    return now


def _format_state(status: JobStatus) -> Text:
    return Text(status.state, style=_COLOURS.get(status.state, ""))


def _as_json(record: JobRecord, status: JobStatus) -> dict[str, Any]:
    return {**dataclasses.asdict(record), "status": dataclasses.asdict(status)}


# --- ``paceline scale RUN`` and ``paceline scale JOB``: change the number of processes or nodes ---


_POLL_S = 0.1


def scale(
    run: str,
    *,
    nproc: int | None = None,
    nodes: int | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Change the number of processes of an active run, or the number of a job's nodes.

    Processes leave after a step; new ones copy the state from a peer and join after a step. The weights stay
    the same. The command returns once the run continues with the new number. The run needs --recover inplace.
    A Kubernetes job can be scaled within the --nodes MIN:MAX of its submission.

    Args:
        run: The run's directory, or a job of paceline jobs.
        nproc: Processes on this machine: 1 to the run's number of micro-batches.
        nodes: Nodes, for a run on several or a job.
        json: Print the new state as one line of JSON.
    """
    from paceline.elastic.agent import AgentConnection

    if (nproc is None) == (nodes is None):
        raise ConfigError("give exactly one of --nproc N and --nodes N.")
    directory = RunDirectory(Path(run))
    if not directory.exists() and os.sep not in run and read_records():
        return _scale_job(find_record(run), nodes, json=json)
    wanted = {name: n for name, n in (("nproc", nproc), ("nodes", nodes)) if n is not None}
    with AgentConnection(directory) as agent:
        before = len(agent.status().ranks)
        status = agent.scale(**wanted)
        print(f"paceline: scaling from {before} to {status.target} processes, after a step ...", file=sys.stderr)
        status = _wait_for_scaling(agent, status)
    if json:
        print(json_module.dumps(dataclasses.asdict(status)))
    else:
        print(f"{run} continues with {len(status.ranks)} processes, at step {status.step}.")
    return 0


def _scale_job(record: JobRecord, nodes: int | None, *, json: bool) -> int:
    if nodes is None:
        raise ConfigError(f"{record.id} is a job, of which only the number of nodes can change. Give --nodes N.")
    if record.status().ended:
        raise ConfigError(f"{record.id} has ended: {record.status().state}.")
    record.handle().scale(nodes)
    if json:
        print(json_module.dumps({"id": record.id, "nodes": nodes}))
    else:
        print(f"Requested {nodes} node(s) for {record.id}. See: paceline status {record.id}")
    return 0


def _wait_for_scaling(agent: AgentConnection, status: RunStatus) -> RunStatus:
    """Return the job's status once as many processes train as requested."""
    target = status.target
    while not (status.whole and len(status.ranks) == target):
        if status.target != target:
            raise PacelineError(f"another command requested {status.target} processes meanwhile.")
        if status.stopping:
            raise PacelineError("the run ended before all processes had joined or left.")
        time.sleep(_POLL_S)
        status = agent.status()
    return status
