"""``paceline join RUN``."""

from __future__ import annotations

import dataclasses
import json as json_module
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.agent.meeting import recorded_agents
from paceline.errors import ConfigError
from paceline.job import Job
from paceline.launchers.training import launch
from paceline.run_directory import RunDirectory


def join(
    run: Path,
    *,
    nproc: int | str | None = None,
    interface: str | None = None,
    token_file: Path | None = None,
    quiet: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Join a run that other machines are at, and stay until it ends or this machine leaves.

    The run's directory is the one that all its machines share. The processes that are started here copy the
    state from a peer and take part after a step; the final weights stay the same. Ctrl-C leaves after a step.

    Parameters
    ----------
    run
        The run's directory.
    nproc
        Processes here. Default: as many as the first machine has.
    interface
        Network interface to the other machines, e.g. eth0.
    token_file
        Holds the secret by which the machines know each other. Default: in the run's directory.
    quiet
        Show no progress.
    json
        Print the run's result as JSON, as the last line.
    """
    directory = RunDirectory(run)
    _, file = recorded_agents(directory)
    try:
        job = Job.from_toml(file)
    except OSError as error:
        raise ConfigError(f"{file}, the run's job, cannot be read: {error.strerror}.") from error
    config = dataclasses.replace(
        job.config,
        run=str(run),
        nproc=job.config.nproc if nproc is None else nproc,
        interface=interface,
        token_file=None if token_file is None else str(token_file),
        node_rank=None,
        rdzv_endpoint=None,
        on="auto",
    )
    code, directory = launch(dataclasses.replace(job, config=config, quiet=quiet), joins=True)
    if code == 0 and json:
        print(json_module.dumps(directory.read_result()), flush=True)
    return code
