"""``paceline join RUN``: add this machine to a running job."""

from __future__ import annotations

import dataclasses
import json as json_module
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.core.config import all_options, select
from paceline.core.errors import ConfigError
from paceline.core.files import wait_to_see
from paceline.core.job import WorkerConfig
from paceline.core.standard_streams import print_status
from paceline.elastic.consensus.discovery import read_agents
from paceline.launch.local_run import launch
from paceline.runs.directory import RunDirectory

_SHARED = ("run_dir", "resume", "rdzv_id")
_PER_NODE = [name for name in select(lambda its: its.scope == "place") if name not in _SHARED]
"""Options whose values differ between the nodes of a job."""


def join(
    run: Path,
    *,
    nproc: int | str | None = None,
    interface: str | None = None,
    token_file: Path | None = None,
    quiet: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Add this machine to a running job, until the job ends or this machine leaves.

    All nodes must share the run's directory. The new processes copy the state from a peer and start at the
    next step; the final weights stay the same. Ctrl-C leaves after a step.

    Args:
        run: The run's directory.
        nproc: Processes on this machine. Default: as on the first node.
        interface: Network interface to the other nodes, e.g. eth0.
        token_file: File with the token that the run's nodes share. Default: the one in the run's directory.
        quiet: Show no progress.
        json: Print the run's result as JSON, as the last line.
    """
    directory = RunDirectory(run)
    if directory.path.is_dir() and not directory.has_result():
        wait_to_see(directory.agents, print_status)
    _, file = read_agents(directory)
    try:
        worker_config = WorkerConfig.from_toml(file)
    except OSError as error:
        raise ConfigError(f"{file}, the run's job file, cannot be read: {error.strerror}.") from error
    overrides = {name: all_options()[name].default for name in (*_PER_NODE, "on")}
    overrides |= {
        "run_dir": str(run),
        "nproc": worker_config.config.values["nproc"] if nproc is None else nproc,
        "interface": interface,
    }
    overrides["token_file"] = None if token_file is None else str(token_file)
    config = worker_config.config.replace(**overrides)
    code, directory = launch(dataclasses.replace(worker_config, config=config, quiet=quiet), joins=True)
    if code == 0 and json:
        print(json_module.dumps(directory.read_result()), flush=True)
    return code
