"""``paceline scale RUN`` and ``paceline scale JOB``: change the number of processes or nodes."""

from __future__ import annotations

import dataclasses
import json as json_module
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.core.errors import ConfigError, PacelineError
from paceline.launch.job_records import JobRecord, find_record, read_records
from paceline.runs.directory import RunDirectory

if TYPE_CHECKING:
    from paceline.elastic.agent import AgentConnection, RunStatus

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
