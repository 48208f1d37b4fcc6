"""``paceline scale RUN`` and ``paceline scale JOB``."""

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
from paceline.launch.submit import JobRecord, find_record, read_records
from paceline.runs.directory import RunDirectory

if TYPE_CHECKING:
    from paceline.elastic.control import AgentConnection, RunStatus

_LOOK_S = 0.1


def scale(
    run: str,
    *,
    nproc: int | None = None,
    nodes: int | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Change the number of processes of a running run, or of a job's machines; the weights stay the same.

    Processes leave after a step, in good order; new ones copy the state from a peer and join after a
    step. The command returns once the run continues with that number. It needs a run with --recover inplace.
    A job on Kubernetes is given other machines, up to the --nodes MIN:MAX that it was submitted with.

    Parameters
    ----------
    run
        The run's directory, or a job of paceline jobs.
    nproc
        Processes on this machine: at least 1, at most the run's micro-batches.
    nodes
        Machines, for a run on several.
    json
        Print the new state as one line of JSON.
    """
    from paceline.elastic.control import AgentConnection

    if (nproc is None) == (nodes is None):
        raise ConfigError("say how many: --nproc N or --nodes N.")
    directory = RunDirectory(Path(run))
    if not directory.exists() and os.sep not in run and read_records():
        return _scale_job(find_record(run), nodes, json=json)
    wanted = {name: n for name, n in (("nproc", nproc), ("nodes", nodes)) if n is not None}
    with AgentConnection(directory) as agent:
        before = len(agent.status().members)
        status = agent.scale(**wanted)
        print(f"paceline: from {before} to {status.target} processes, after a step ...", file=sys.stderr)
        status = _when_done(agent, status)
    if json:
        print(json_module.dumps(dataclasses.asdict(status)))
    else:
        print(f"{run} continues with {len(status.members)} processes, at step {status.step}.")
    return 0


def _scale_job(record: JobRecord, nodes: int | None, *, json: bool) -> int:
    """Have a job's system change its machines."""
    if nodes is None:
        raise ConfigError(f"{record.id} is a job: its machines can be changed. Give --nodes N.")
    if record.status().ended:
        raise ConfigError(f"{record.id} has ended: {record.status().state}.")
    record.handle().scale(nodes)
    if json:
        print(json_module.dumps({"id": record.id, "nodes": nodes}))
    else:
        print(f"Asked for {nodes} machine(s) for {record.id}. See paceline status {record.id}")
    return 0


def _when_done(agent: AgentConnection, status: RunStatus) -> RunStatus:
    """Where the job stands once as many train as are wanted now."""
    target = status.target
    while not (status.whole and len(status.members) == target):
        if status.target != target:
            raise PacelineError(f"meanwhile somebody else asked for {status.target} processes.")
        if status.stopping:
            raise PacelineError("the run ended before all had joined or left.")
        time.sleep(_LOOK_S)
        status = agent.status()
    return status
