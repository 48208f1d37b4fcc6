"""``paceline jobs``, ``paceline status JOB`` and ``paceline cancel JOB``, for all launchers."""

from __future__ import annotations

import dataclasses
import json as json_module
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from paceline.core.errors import ConfigError, PacelineError
from paceline.core.output import Console, ListTable
from paceline.launch.job_records import JobRecord, add_record, find_record, read_records
from paceline.launch.launcher import JobStatus

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
        rows = [
            ("job", Text(record.id)),
            ("name", Text(record.name)),
            ("state", Text.assemble(_format_state(current), f"  {current.detail}" if current.detail else "")),
            ("command", Text(" ".join(record.command))),
            ("directory", Text(record.directory)),
        ]
        if record.run is not None:
            rows.append(("run", Text(record.run)))
        if current.restarts:
            rows.append(("restarts", Text(str(current.restarts))))
        for row in rows:
            table.add_row(*row)
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
