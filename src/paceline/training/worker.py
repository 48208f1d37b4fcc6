"""The program of a worker, ``python -m paceline.training.worker JOB.toml``, and an agent's fork server of workers."""

from __future__ import annotations

import itertools
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.built_in import PARTS
from paceline.core.environment import Environment, default_threads, detect_environment, restart_with_hash_seed
from paceline.core.errors import RunInUseError
from paceline.core.fork_server import Child, redirect_output, restore_stop_signals, run_fork_server
from paceline.core.job import WorkerConfig, default_run_path
from paceline.core.ownership import name_multiprocessing, remove_leftovers
from paceline.core.plugins import import_object
from paceline.core.signals import WORKER_STOP_SIGNALS, die_with_parent, dump_stacks_on_signal, handle_signals
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import exit_code_of, explain_disk_error, print_failure, record_worker_failure

if TYPE_CHECKING:
    from paceline.core.task import Task
    from paceline.elastic.worker_channel import AgentClient
    from paceline.parallel.world import World

_runs = itertools.count()


def main(argv: list[str]) -> int:
    """Run the job that ``argv`` names; return the process's exit code."""
    dump_stacks_on_signal()
    worker_config = WorkerConfig.from_toml(Path(argv[0]))
    environment = detect_environment(rdzv_endpoint=worker_config.config.processes.rdzv_endpoint)
    if environment.source == "torchrun":
        die_with_parent()
    try:
        return run_reported(worker_config, environment)[0]
    except KeyboardInterrupt:  # before signals are handled: nothing has begun
        return 130


def main_under_agent(job_file: Path, channel: int, local_index: int, terminal: tuple[int, int]) -> int:
    """Run a job in a worker that an agent has forked; return the process's exit code.

    Args:
        job_file: the worker's configuration.
        channel: the descriptor of this worker's end of its channel.
        local_index: index of this worker on its node; names its log.
        terminal: descriptors of the agent's stdout and stderr.
    """
    from paceline.elastic.worker_channel import AgentClient, Retired, WorkerChannel

    dump_stacks_on_signal()
    RunDirectory(job_file.parent).wait_for_disk()
    worker_config = WorkerConfig.from_toml(job_file)
    assert worker_config.config.records.run_dir is not None, "an agent names the run"
    directory = RunDirectory(Path(worker_config.config.records.run_dir))
    agent = AgentClient(WorkerChannel.of(channel), worker_config.config.recovery.heartbeat)
    agent.progress_tracker.limit_steps_to(worker_config.config.recovery.hang_timeout)
    code = 1
    existed = not _is_missing(directory.manifest)
    try:
        _run_under_agent(worker_config, agent, directory, local_index, terminal)
        code = 0
    except Retired:
        code = 0
    except Exception as raised:
        error = explain_disk_error(raised, directory)
        agent.beat()  # the agent judges by the step at which it happened
        code = record_worker_failure(directory, local_index, error, existed=existed, tell_agent=agent.fail)
    finally:
        agent.leave(code)
    return code


def _run_under_agent(
    worker_config: WorkerConfig,
    agent: AgentClient,
    directory: RunDirectory,
    local_index: int,
    terminal: tuple[int, int],
) -> None:
    from paceline.parallel.world import choose_device
    from paceline.runs.rank_log import open_rank_log, show_on
    from paceline.training.control import StopSignals
    from paceline.training.run_context import RunRequest
    from paceline.training.session import ElasticGroups, train

    config = worker_config.config
    counts = config.processes.nproc
    assert counts is not None, "an agent counts the processes"
    (processes,) = counts
    environment = Environment(
        rank=local_index, world_size=processes, local_rank=local_index, local_world_size=processes, source="variables"
    )
    shown = local_index == 0
    if shown and worker_config.script:  # the process that started it has printed what comes before the loop
        redirect_output(os.open(directory.log_of(0), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666))
        shown = False
    with ExitStack() as stack:
        streams = stack.enter_context(
            open_rank_log(
                directory, local_index, processes, quiet=worker_config.quiet, log_format=config.records.log_format
            )
        )

        def show_at_rank_0() -> None:
            nonlocal shown
            if not shown:
                shown = True
                show_on(terminal, streams, stack)

        groups = ElasticGroups(
            agent,
            local=choose_device(
                config.processes.device, config.processes.backend, local_rank=local_index, expected=worker_config.device
            ),
            processes=processes,
            world_size=worker_config.world_size or processes,
            comm_debug=config.processes.comm_debug,
            on_rank_0=show_at_rank_0,
        )
        request = RunRequest(worker_config=worker_config, task=None, default_threads=default_threads(environment))
        if worker_config.script:
            import_object(PARTS["scripts"])(request, groups, directory)
        else:
            train(request, groups, directory, stack.enter_context(StopSignals(launched=True)))


def run_reported(
    worker_config: WorkerConfig, environment: Environment, task: Task | None = None
) -> tuple[int, dict[str, Any] | None]:
    """Run a job; on failure record it, tell the user unless a launcher does, and return the exit code."""
    run_dir = worker_config.config.records.run_dir
    directory = RunDirectory(Path(run_dir)) if run_dir else None
    existed = directory is not None and not _is_missing(directory.manifest)
    try:
        return 0, run(worker_config, environment, task)
    except Exception as raised:
        error = explain_disk_error(raised, directory)
        if directory is not None and not _is_missing(directory.path) and not isinstance(error, RunInUseError):
            record_worker_failure(directory, environment.rank, error, existed=existed)
        if not worker_config.supervised:
            print_failure(error, environment.rank, environment.world_size, directory)
        return exit_code_of(error), None


def _is_missing(path: Path) -> bool:
    """Return whether nothing is there; a disk that does not answer may have it, and its error hides no other one."""
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


def run(worker_config: WorkerConfig, environment: Environment, task: Task | None = None) -> dict[str, Any]:
    """Join the world, train, and return the content of ``result.json``.

    Raises:
        PacelineError: as :func:`paceline.training.session.train`.
    """
    from paceline.runs.rank_log import open_rank_log
    from paceline.training.control import StopSignals
    from paceline.training.run_context import RunRequest
    from paceline.training.session import FixedGroup, train

    log_format = worker_config.config.records.log_format
    with (
        StopSignals(launched=environment.source != "single") as signals,
        join_launched_group(worker_config, environment) as (world, directory),
        open_rank_log(directory, world.rank, world.world_size, quiet=worker_config.quiet, log_format=log_format),
    ):
        worker_config = worker_config.with_run_dir(directory.path)
        request = RunRequest(worker_config=worker_config, task=task, default_threads=default_threads(environment))
        return train(request, FixedGroup(world), directory, signals)


@contextmanager
def join_launched_group(worker_config: WorkerConfig, environment: Environment) -> Iterator[tuple[World, RunDirectory]]:
    """Join the ranks that a launcher has started, with the run's directory and its lock.

    Raises:
        PacelineError: the group cannot form, or the directory cannot be used.
    """
    from paceline.training.reproducibility import preserve_numerics

    # A script may train several runs; after a restart it repeats them in the same order.
    key = f"paceline/run/{next(_runs)}"
    name_multiprocessing()
    if environment.local_rank == 0:
        remove_leftovers()
    with ExitStack() as stack:
        stack.enter_context(preserve_numerics())
        world, directory = _open_group(worker_config, environment, key, stack)
        _watch_over(worker_config, world, directory, stack)
        yield world, directory


def _open_group(
    worker_config: WorkerConfig, environment: Environment, key: str, stack: ExitStack
) -> tuple[World, RunDirectory]:
    """Join the launcher's group, and agree on the run directory, which rank 0 locks."""
    from paceline.data.ledger import last_generation
    from paceline.parallel.rendezvous import agree_once
    from paceline.parallel.world import open_world

    config = worker_config.config
    init_timeout_s = config.processes.init_timeout
    agree = partial(agree_once, environment, rdzv_endpoint=config.processes.rdzv_endpoint, timeout_s=init_timeout_s)
    own = RunDirectory(Path(config.records.run_dir or default_run_path(config.processes.task)))
    if environment.rank == 0:
        if config.records.run_dir is None:
            own = RunDirectory(Path(agree(key, lambda: str(own.path))))
        own.create()
        stack.enter_context(own.locked())
    # While ranks wait for each other nothing can be saved, and a handler in Python would not even run.
    with handle_signals(WORKER_STOP_SIGNALS, signal.SIG_DFL):
        world = stack.enter_context(
            open_world(
                environment,
                device=config.processes.device,
                backend=config.processes.backend,
                expected=worker_config.device,
                interface=config.processes.interface,
                init_timeout_s=init_timeout_s,
                comm_debug=config.processes.comm_debug,
                generation=last_generation(own.ledger) + 1 if environment.rank == 0 else 0,
            )
        )
    if environment.rank == 0 and config.records.resume != "auto":

        def checked() -> str:
            own.check_resume(config.records.resume)
            return config.records.resume

        # Once a job: torchrun's restarts find the run that the job itself began.
        agree(f"{key}/resume", checked)
    # Rank 0 names the run; on another machine the same path must lead there, or to a place for logs.
    directory = RunDirectory(Path(world.broadcast_object(str(own.path))))
    if world.rank != 0:
        directory.create()
    return world, directory


def _watch_over(worker_config: WorkerConfig, world: World, directory: RunDirectory, stack: ExitStack) -> None:
    """Watch for hangs while the stack is open; a hang ends the job."""
    from paceline.elastic.hang import Watchdog

    limit_s = worker_config.config.recovery.hang_timeout
    world.progress_tracker.limit_steps_to(limit_s)
    # A single process blocks no other; it may be in a debugger.
    if limit_s == math.inf or (limit_s is None and world.world_size == 1):
        return

    def tell(text: str) -> None:
        if not worker_config.supervised:
            print(f"paceline: {text}", file=sys.stderr)

    stack.enter_context(
        Watchdog(
            world.progress_tracker,
            directory,
            rank=world.rank,
            world_size=world.world_size,
            generation=world.generation,
            one_host=world.one_host,
            tell=tell,
        )
    )


# --- The fork server of an agent: ``python -m paceline.training.worker FD``; see :mod:`paceline.core.fork_server` ---
#
# A worker that died is replaced in milliseconds, by a fork of this process. A request for a worker is
# ``{"fork": number, "local_index": i, "job_file": path}``, with the worker's end of its channel and, above index 0, its
# log; one for the host of the rendezvous stores has the number ``STORE_HOST`` and the host's end of its socket pair.
#
# This process lives as long as its agent: when the agent's end closes, it kills what it has forked. Until the
# workers have saved they need the store host, so only workers are stopped by signals.


def preload() -> None:
    """Import what a worker needs sooner or later: one that is forked from this process has it at once."""
    import paceline.elastic.group_formation
    import paceline.runs.console
    import paceline.training.session  # noqa: F401
    from paceline.runs.metric_writers import preload_tensorboard
    from paceline.torch_internals import preload_deterministic_algorithms

    preload_tensorboard()
    preload_deterministic_algorithms()


def prepare_child(request: Mapping[str, Any], descriptors: Sequence[int]) -> Child:
    """Make a forked process a worker, or the store host."""
    from paceline.elastic.node import STORE_HOST

    if request["fork"] == STORE_HOST:
        return lambda: _serve_stores(descriptors[0])
    restore_stop_signals()
    channel, *log = descriptors
    # A worker that rises to rank 0 later prints to the terminal, wherever it prints now.
    terminal = (os.dup(1), os.dup(2))
    if log:
        redirect_output(log[0])
    return lambda: _run_worker(request["job_file"], channel, request["local_index"], terminal)


def _serve_stores(descriptor: int) -> int:
    from paceline.elastic.group_formation import serve_stores

    return serve_stores(descriptor)


def _run_worker(job_file: str, channel: int, local_index: int, terminal: tuple[int, int]) -> int:
    sys.argv = ["paceline.training.worker", job_file]
    return main_under_agent(Path(job_file), channel, local_index, terminal)


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        sys.exit(run_fork_server(int(sys.argv[1]), preload, prepare_child))
    # With --on inprocess this is not a process of its own: the command line, or a script that calls fit().
    if sys.orig_argv[1:4] == ["-P", "-m", "paceline.training.worker"]:
        restart_with_hash_seed()
    sys.exit(main(sys.argv[1:]))
