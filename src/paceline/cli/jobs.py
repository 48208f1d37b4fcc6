"""``paceline jobs``, ``paceline status JOB`` and ``paceline cancel JOB``: over all launchers."""

from __future__ import annotations

import dataclasses
import json as json_module
import time
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from paceline.core.errors import PacelineError
from paceline.launch.launcher import JobStatus
from paceline.launch.submit import JobRecord, find_record, read_records

Flag = Annotated[bool, Parameter(negative="")]
_COMMAND_LENGTH = 60
_COLOURS = {"running": "green", "pending": "yellow", "failed": "red", "cancelled": "magenta"}


def jobs(*, all: Flag = False, json: Flag = False) -> int:
    """List the jobs that were submitted from here, the newest last.

    Parameters
    ----------
    all
        Include jobs that ended more than a day ago.
    json
        Print a JSON list.
    """
    listed = []
    for record in read_records():
        status = _status(record)
        if all or not status.ended or time.time() - record.submitted < 86400:
            listed.append((record, status))
    if json:
        print(json_module.dumps([_described(record, status) for record, status in listed]))
        return 0
    if not listed:
        print("No jobs. Start one: paceline launch --on NAME -- COMMAND")
        return 0
    whole = {name: Column(name, no_wrap=True) for name in ("job", "state", "submitted")}
    table = Table(whole["job"], "name", whole["state"], "detail", whole["submitted"], "command")
    for record, status in listed:
        when = time.strftime("%m-%d %H:%M", time.localtime(record.submitted))
        program, *arguments = record.command
        text = shorten(" ".join([Path(program).name, *arguments]), _COMMAND_LENGTH, placeholder=" …")
        # In a Text nothing is markup.
        job, name, detail, command = map(Text, (record.id, record.name, status.detail, text))
        table.add_row(job, name, _coloured(status), detail, when, command)
    Console().print(table)
    return 0


def status(job: str, *, json: Flag = False) -> int:
    """Say where a job stands; exit code 0 unless it failed.

    Parameters
    ----------
    job
        Its id, the system's own number, or its name.
    json
        Print JSON.
    """
    record = find_record(job)
    stands = record.status()
    if json:
        print(json_module.dumps(_described(record, stands)))
    else:
        table = Table(show_header=False, box=None)
        rows = [
            ("job", Text(record.id)),
            ("name", Text(record.name)),
            ("state", Text.assemble(_coloured(stands), f"  {stands.detail}" if stands.detail else "")),
            ("command", Text(" ".join(record.command))),
            ("directory", Text(record.directory)),
        ]
        if record.run is not None:
            rows.append(("run", Text(record.run)))
        if stands.restarts:
            rows.append(("restarts", Text(str(stands.restarts))))
        for row in rows:
            table.add_row(*row)
        Console().print(table)
    return 1 if stands.state == "failed" else 0


def cancel(job: str, *, json: Flag = False) -> int:
    """End a job, and all that it started; a second time kills what this machine's does not end.

    Parameters
    ----------
    job
        Its id, the system's own number, or its name.
    json
        Print JSON: where the job stood.
    """
    record = find_record(job)
    stood = record.status_asked_anew()
    if not stood.ended:
        record.handle().cancel()
    if json:
        print(json_module.dumps(_described(record, stood)))
    elif stood.ended:
        print(f"{record.id} has ended already: {stood.state}.")
    else:
        print(f"{record.id} is asked to end.")
    return 0


def _status(record: JobRecord) -> JobStatus:
    """Where it stands; "unknown" with the reason where its system cannot be asked."""
    try:
        return record.status()
    except PacelineError as error:
        return JobStatus(state="unknown", detail=str(error).partition(". ")[0])


def _coloured(status: JobStatus) -> Text:
    return Text(status.state, style=_COLOURS.get(status.state, ""))


def _described(record: JobRecord, status: JobStatus) -> dict[str, Any]:
    return {**dataclasses.asdict(record), "status": dataclasses.asdict(status)}
