"""From a command or a task to a submitted job."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

from paceline.config import RunConfig, flag, non_defaults, parse_interval
from paceline.errors import ConfigError, LaunchError
from paceline.job import default_run_path
from paceline.launchers.base import (
    Contract,
    Inner,
    JobHandle,
    JobSpec,
    Launcher,
    Rendered,
    RenderedOnlyError,
    job_name,
)
from paceline.launchers.registry import (
    JobRecord,
    add_record,
    jobs_directory,
    make_jobs_directory,
    record_id,
    room_for_record,
)
from paceline.run_directory import write_atomically
from paceline.task import split_spec

# What the node's own command line says, or the cluster.
_NOT_PASSED_ON = (
    "task",
    "on",
    "run",
    "nproc",
    "nodes",
    "node_rank",
    "rdzv_endpoint",
    "rdzv_id",
    "threads",
    "interface",
)


def normal_command(words: Sequence[str], python: str, place_of: Callable[[str], str]) -> tuple[str, ...]:
    """A script or ``-m module`` with its interpreter before it; anything else as it is.

    Args:
        words: the command.
        python: the interpreter on the machines.
        place_of: where the machines find a script or a program; see :meth:`Launcher.place_of`.

    Raises:
        ConfigError: there is no such script or program, or the machines do not get it.
    """
    if not words:
        raise ConfigError("there is no command to launch. Give it after --, such as: -- python train.py")
    first, *others = words
    if first.endswith(".py"):
        return (python, place_of(first), *others)
    if first == "-m":
        return (python, *words)
    if os.sep in first:
        program = place_of(first)
        first = program if os.sep in program else f"{os.curdir}{os.sep}{program}"
    if others and others[0].endswith(".py"):
        others[0] = place_of(others[0])
    return (first, *others)


def placed_task(spec: str, place_of: Callable[[str], str]) -> str:
    """A task as the machines find it.

    Args:
        spec: the task's file or module and its class, or a recipe.
        place_of: where the machines find a file; see :meth:`Launcher.place_of`.

    Raises:
        TaskError: the spec has another form.
        ConfigError: there is no such file, or the machines do not get it.
    """
    place, name = split_spec(spec)
    return f"{place_of(place)}:{name}" if place.endswith(".py") else spec


def machines_python(launcher: Launcher, asked: str | None) -> str:
    """The interpreter on the machines: this one where they share its files, else their image's."""
    return asked or (sys.executable if launcher.files == "shared" else "python")


def task_command(config: RunConfig, run: Path, python: str) -> tuple[str, ...]:
    """``paceline train`` with the options of ``config``, but for those that say where it runs."""
    words = [python, "-m", "paceline", "train"]
    if config.task:
        words.append(config.task)
    words += ["--run-dir", str(run)]
    for name, value in non_defaults(config).items():
        if name in _NOT_PASSED_ON:
            continue
        if isinstance(value, bool):
            words.append(flag(name))
        elif isinstance(value, tuple):
            for each in value:
                words += [flag(name), str(each)]
        else:
            words += [flag(name), str(value)]
    return tuple(words)


def choose_inner(launcher: Launcher, inner: Inner | None, contract: Contract, is_task: bool) -> Inner:
    """What starts the ranks: as asked for, else Paceline's agent for tasks, else what keeps the contract.

    Raises:
        ConfigError: the launcher cannot have it, or it cannot keep the contract.
    """
    if inner is not None:
        if inner not in launcher.inners:
            raise ConfigError(
                f"--inner {inner} does not work with --on {launcher.name}. Choose one of: "
                f"{', '.join(launcher.inners)}."
            )
        if inner == "ray" and is_task:
            raise ConfigError(
                "--inner ray starts programs that use Ray by themselves. For a task use --inner agent."
            )
        if inner == "agent" and not is_task:
            raise ConfigError("--inner agent starts Paceline's own tasks. For a script use --inner torchrun.")
        if inner == "torchrun" and contract not in ("torch", "none"):
            raise ConfigError(
                f"--inner torchrun keeps the torch contract, not {contract}. Use --inner spawn."
            )
        return inner
    if is_task and "agent" in launcher.inners:
        return "agent"
    usual = next(each for each in launcher.inners if each != "agent")
    if contract == launcher.contracts[0]:
        return usual
    wanted: dict[Contract, Inner] = {
        "torch": "torchrun",
        "tensorflow": "spawn",
        "none": "spawn",
        "mpi": "mpi",
        "horovod": "horovod",
    }
    preferred = wanted.get(contract)
    return preferred if preferred in launcher.inners else usual


def choose_contract(launcher: Launcher, contract: Contract | None, inner: Inner | None) -> Contract:
    """Which variables processes are given: as asked for, else as the inner launcher is used to.

    Raises:
        ConfigError: the launcher cannot keep it.
    """
    if contract is None:
        natural: dict[Inner | None, Contract] = {"mpi": "mpi", "horovod": "horovod", "ray": "none"}
        for_torch = inner in ("torchrun", "spawn") and "torch" in launcher.contracts
        contract = natural.get(inner, "torch" if for_torch else launcher.contracts[0])
    if contract not in get_args(Contract) or contract not in launcher.contracts:
        raise ConfigError(
            f"--contract {contract} does not work with --on {launcher.name}. Choose one of: "
            f"{', '.join(launcher.contracts)}."
        )
    return contract


def job_directory(name: str, *, attached: bool) -> Path:
    """A new place for a script's job: ``jobs/NAME-TIME-ID`` here, which clusters share.

    The ID is random: jobs that begin in the same second, on whatever machines, have a place each. One that is
    attached leaves nothing here; what there is of it is kept beside its record.
    """
    home = jobs_directory() if attached else Path.cwd() / "jobs"
    return home / f"{job_name(name)}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"


@contextmanager
def made_directory(directory: Path) -> Iterator[None]:
    """Make a job's directory; where what follows fails, nothing that was made for it is left.

    Raises:
        ConfigError: it cannot be made.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        if directory.is_relative_to(jobs_directory()):
            make_jobs_directory()
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write the job into {directory}: {error.strerror}.") from error
    try:
        yield
    except RenderedOnlyError:
        raise
    except BaseException:  # Ctrl-C too
        if made:
            shutil.rmtree(directory, ignore_errors=True)
        for parent in made[1:]:
            with suppress(OSError):  # somebody else has begun to use it
                parent.rmdir()
        raise


def task_job(config: RunConfig, options: Mapping[str, Any], launcher: Launcher, python: str) -> JobSpec:
    """The job of a task.

    Args:
        config: the run's options.
        options: fields of :class:`JobSpec` that were given.
        launcher: where it is to run.
        python: the interpreter on the machines.

    Raises:
        ConfigError: it could not run, wherever it would be.
    """
    _refuse_impossible(config, options)
    run, name, directory = _task_place(config, launcher)
    contract: Contract = options.get("contract") or "torch"
    inner = choose_inner(launcher, options.get("inner"), contract, is_task=True)
    by_torchrun = config.recover == "restart" and inner == "torchrun"
    if config.recover in ("inplace", "restart") and inner != "agent" and not by_torchrun:
        raise ConfigError(
            f"--recover {config.recover} needs Paceline's agent, but with --on {launcher.name} {inner} "
            "starts each process. Use --recover none, and give the command again after a fault."
        )
    return JobSpec(
        **{
            **options,
            "command": task_command(config, run, python),
            "name": options.get("name") or name,
            "directory": directory or job_directory(options.get("name") or name, attached=True),
            "run": run,
            "inner": inner,
            "contract": contract,
            "is_task": True,
            "threads": config.threads,
            "interface": config.interface,
            "python": python,
        }
    )


def _task_place(config: RunConfig, launcher: Launcher) -> tuple[Path, str, Path | None]:
    """A task's run directory, the job's name, and its directory where that is in the run's.

    Raises:
        ConfigError: the run's directory is to be on machines that do not share this one's files, and it is
            not said where.
    """
    if launcher.files == "shared":
        run = Path(config.run or default_run_path(config.task)).resolve()
        # The jobs of an array have a run each, and share what is rendered.
        directory = run / "job" if "{" not in run.name else run.with_name(f"{job_name(run.name)}-job")
        return run, job_name(run.name), directory
    there = config.run or launcher.default_run
    if there is None or not Path(there).is_absolute():
        given = "" if config.run is None else f", and not {config.run}"
        raise ConfigError(
            f"--on {launcher.name}: the machines do not see this one's files. Give --run with an absolute "
            f"path there, such as --run /runs/a{given}."
        )
    return Path(there), job_name(config.task.rpartition(":")[2] or config.task or Path(there).name), None


def _refuse_impossible(config: RunConfig, options: Mapping[str, Any]) -> None:
    """Refuse at once what would fail after hours in a queue."""
    counts: tuple[int, ...] = options.get("nproc", (1,))
    least, _ = options.get("nodes", (1, 1))
    processes = sum(counts) if len(counts) > 1 else counts[0] * least
    if isinstance(config.shards, int) and processes > config.shards:
        raise ConfigError(
            f"{processes} processes cannot share --shards {config.shards}: each needs at least one. "
            f"Use fewer, or --shards {processes} or more."
        )
    gpus = options.get("gpus_per_node")
    if gpus and max(counts) > gpus and config.device != "cpu":
        raise ConfigError(
            f"--nproc {max(counts)} processes cannot have a GPU each of --gpus-per-node {gpus}. "
            "Make them equal."
        )
    walltime_s = options.get("walltime_s")
    intervals = [parse_interval(text, "checkpoint_every") for text in config.checkpoint_every]
    by_clock = [interval.seconds for interval in intervals if interval.seconds is not None]
    if walltime_s is not None and len(by_clock) == len(intervals) and min(by_clock, default=0) >= walltime_s:
        raise ConfigError(
            f"--walltime {config.walltime} is over before the first --checkpoint-every "
            f"{' or '.join(config.checkpoint_every)}: a job that is lost would have saved "
            "nothing. Save more often."
        )


def submit(launcher: Launcher, rendered: Rendered) -> tuple[JobRecord, JobHandle]:
    """Write what was rendered, start the job, and remember it.

    Raises:
        LaunchError: the system refused it; nothing of it is left.
        ConfigError: the job's directory, its record, or where its logs are to be, cannot be written.
        RenderedOnlyError: the launcher submits nothing; what it has written stays.
    """
    spec = rendered.spec
    with made_directory(spec.directory), room_for_record():
        try:
            for name, text in rendered.files.items():
                write_atomically(spec.directory / name, text.encode(), private=True)
        except OSError as error:
            raise ConfigError(f"cannot write the job into {spec.directory}: {error.strerror}.") from error
        handle = launcher.submit(rendered)
    record = JobRecord(
        id=record_id(launcher.name, handle.reference),
        launcher=launcher.name,
        name=spec.name,
        command=spec.command,
        directory=str(spec.directory),
        run=None if spec.run is None else str(spec.run),
        reference=handle.reference,
    )
    try:
        remember(record, handle)
    except ConfigError:
        if launcher.attached:
            handle.wait()  # until its processes have ended
        raise
    return record, handle


def remember(record: JobRecord, handle: JobHandle) -> None:
    """Record a job that has just been submitted; where that fails, cancel it.

    Raises:
        ConfigError: it was cancelled.
        LaunchError: it could not be cancelled; the message has its id.
    """
    try:
        add_record(record)
    except ConfigError as error:
        try:
            handle.cancel()
        except LaunchError as refused:
            raise LaunchError(f"{record.id} was submitted, but {error} It goes on: {refused}") from error
        raise ConfigError(f"{record.id} is cancelled: {error}") from error


def finish(record: JobRecord, handle: JobHandle) -> int:
    """Wait for a job, and remember how it ended; return its exit code."""
    code = handle.wait()
    with suppress(LaunchError, ConfigError):  # who asks next may be answered
        add_record(dataclasses.replace(record, ended=dataclasses.asdict(handle.status())))
    return code
