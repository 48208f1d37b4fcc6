"""Ranks that a script starts itself: its process becomes the agent, and each worker of the agent runs the script."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from paceline.core.errors import ConfigError, StopRequested, TaskError
from paceline.core.job import WorkerConfig
from paceline.launch.local_run import available_processes, launch
from paceline.runs.directory import RunDirectory
from paceline.training.run_context import RunRequest
from paceline.training.session import ElasticGroups

# --- The process that the user has started ---


def starts_ranks(worker_config: WorkerConfig) -> bool:
    """Return whether a run has several ranks, and needs them: a finished one does not."""
    config = worker_config.config
    nproc = config.processes.nproc or (available_processes(config),)
    assert config.records.run_dir is not None
    return nproc != (1,) and not RunDirectory(Path(config.records.run_dir)).has_result()


def start_ranks(worker_config: WorkerConfig) -> NoReturn:
    """Run the script in each of the run's ranks, and end this process as they end.

    Raises:
        ConfigError: there is no script, or nothing could replace a rank that dies.
        SystemExit: they have ended.
    """
    if worker_config.config.recovery.recover == "none":
        raise ConfigError(
            "Run(nproc=...) replaces ranks that die, so recover='none' does not go with it. Leave out nproc, and start "
            "the ranks by torchrun or paceline launch."
        )
    code, _ = launch(replace(worker_config, script=(*_program(), *sys.argv[1:])))
    raise SystemExit(code)


def _program() -> tuple[str, ...]:
    """Return this process's script, as Python takes it."""
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return ("-m", spec.name)
    if (file := getattr(main, "__file__", None)) is None:
        raise ConfigError(
            "Run(nproc=...) starts each rank with the script's file, and a notebook or an interactive session has "
            "none. Write the loop into a file; or leave out nproc, for one process."
        )
    return (os.path.abspath(file),)


# --- A worker of its agent ---


@dataclass
class StartedRank:
    """What an agent's worker has for the run of its script.

    Attributes:
        request: the run's options, as the starting process had them.
        close: leaves the group.
    """

    request: RunRequest
    groups: ElasticGroups
    directory: RunDirectory
    close: Callable[[], None] = lambda: None


_started: StartedRank | None = None


def started_rank(directory: str) -> StartedRank | None:
    """Return what this process has for its run if it is a worker of the run's agent.

    Raises:
        ConfigError: the run that the script goes through here is another one.
    """
    if _started is None or Path(directory).resolve() == _started.directory.path.resolve():
        return _started
    raise ConfigError(
        f"the script has a run in {directory} before the one in {_started.directory.path} that started its ranks. With "
        "Run(nproc=...) a script has one run: put the other into a script of its own, or start the ranks by torchrun."
    )


def run_script(request: RunRequest, groups: ElasticGroups, directory: RunDirectory) -> None:
    """Run the script in this worker.

    Raises:
        TaskError: it has ended itself with an exit code.
    """
    global _started
    _started = StartedRank(request, groups, directory)
    program, *arguments = request.worker_config.script
    try:
        if program == "-m":
            module, *arguments = arguments
            sys.argv = [module, *arguments]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            sys.argv = [program, *arguments]
            sys.path.insert(0, os.path.dirname(os.path.realpath(program)))
            runpy.run_path(program, run_name="__main__")
    except StopRequested:
        raise
    except SystemExit as error:
        if error.code:
            raise TaskError(f"the script has ended itself, by sys.exit({error.code!r}).") from error
    finally:
        _started.close()
