"""Jobs through submitit."""

from __future__ import annotations

import importlib.util
import math
import os
import pprint
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import psutil

from paceline.core.errors import ConfigError, LaunchError
from paceline.core.options import at_least, flag
from paceline.core.plugins import install_command
from paceline.launch.job_logs import follow_files
from paceline.launch.launcher import Command, JobHandle, JobStatus, LaunchSpec, RenderedJob, fixed_nodes, option
from paceline.launch.local import ended_status, process_reference, process_status, process_to_end
from paceline.launch.node import node_command
from paceline.launch.rank import rank_command
from paceline.launch.slurm import SlurmJob, refusal
from paceline.launch.status_poller import PolledJob
from paceline.launch.submit import ClusterLauncher
from paceline_frameworks.submitit_running import PREEMPT_SIGNAL, exit_code_file, make_private

# --- What a job asks of its cluster, in the names of submitit's ``AutoExecutor`` ---


Executor = Literal["slurm", "local"]

_DEFAULT_WALLTIME_S: dict[str, float] = {"slurm": 3600.0, "local": 30 * 86400.0}
"""submitit's own, 5 and 2 minutes, end most jobs too early."""

_SBATCH = ("partition", "account", "qos", "comment", "constraint", "exclude", "gres", "mem")


@dataclass(frozen=True, kw_only=True)
class SubmititOptions:
    """What only submitit and its Slurm are asked for."""

    executor: str = option("slurm, or local: processes on this machine.", "slurm")
    partition: str | None = option("Slurm's partition.")
    account: str | None = option("Slurm's account.")
    qos: str | None = option("Slurm's quality of service.")
    comment: str | None = option("A comment that Slurm keeps with the job.")
    constraint: str | None = option("Features that nodes must have.")
    exclude: str | None = option("Nodes to leave out.")
    gres: str | None = option("Generic resources of a node, such as gpu:4.")
    mem: str | None = option("Memory of a node, such as 64G.")
    setup: tuple[str, ...] = option("Shell line to run first, such as 'module load cuda'; may be repeated.", ())
    slurm: tuple[str, ...] = option("KEY=VALUE, any other option of sbatch; may be repeated.", ())
    srun_args: tuple[str, ...] = option("An argument of the srun that starts the tasks; may be repeated.", ())
    signal_delay_s: int = option("How long before the time limit Slurm signals. Default: 90.", 90)
    array_parallelism: int | None = option("Of submit_array(): how many of the jobs may run at once.")
    stderr_to_stdout: bool = option("A function's error output in its output file, as a command's is.", False)
    max_requeues: int = option("How often to requeue a job after its time limit.", 100)

    def __post_init__(self) -> None:
        if self.executor not in get_args(Executor):
            raise ConfigError(f"--executor must be slurm or local, but is {self.executor!r}.")
        for name, least in (("max_requeues", 0), ("signal_delay_s", 1), ("array_parallelism", 1)):
            value = getattr(self, name)
            if value is not None:
                at_least(name, value, least)
        for word in self.slurm:
            if not word.partition("=")[1]:
                raise ConfigError(f"--slurm must be KEY=VALUE, such as --slurm nice=100, but is {word!r}.")


def executor_arguments(options: SubmititOptions, python: str) -> dict[str, Any]:
    """Return the arguments of ``AutoExecutor`` other than the folder."""
    name = options.executor
    return {
        "cluster": name,
        f"{name}_max_num_timeout": options.max_requeues,
        f"{name}_python": python,
    }


def executor_parameters(
    spec: LaunchSpec,
    options: SubmititOptions,
    *,
    tasks_per_node: int,
    cpus_per_task: int | None,
    signal_name: str,
) -> dict[str, Any]:
    """Arguments of ``AutoExecutor.update_parameters``.

    Args:
        tasks_per_node: processes that submitit starts on each machine.
        signal_name: the signal before the end of the time limit, such as "USR1".
    """
    limit_s = _DEFAULT_WALLTIME_S[options.executor] if spec.walltime_s is None else spec.walltime_s
    nodes = spec.nodes[0]
    parameters: dict[str, Any] = {
        "name": spec.name,
        "nodes": nodes,
        "tasks_per_node": tasks_per_node,
        "timeout_min": max(1, math.ceil(limit_s / 60)),
        "stderr_to_stdout": options.stderr_to_stdout,
    }
    if spec.gpus_per_node is not None:
        parameters["gpus_per_node"] = spec.gpus_per_node
    if options.executor == "local":
        if nodes > 1:
            raise ConfigError(f"--executor local has one machine, but --nodes is {nodes}. Use --executor slurm.")
        of_slurm = (*_SBATCH, "slurm", "setup", "srun_args", "signal_delay_s", "array_parallelism")
        for field in fields(options):
            if field.name in of_slurm and getattr(options, field.name) != field.default:
                raise ConfigError(f"{flag(field.name)} is for Slurm, but --executor is local. Leave it out.")
        return parameters
    if cpus_per_task is not None:
        parameters["cpus_per_task"] = cpus_per_task
    others = dict(word.lstrip("-").split("=", 1) for word in options.slurm)
    parameters |= {f"slurm_{key}": value for key in _SBATCH if (value := getattr(options, key)) is not None}
    if options.setup:
        parameters["slurm_setup"] = list(options.setup)
    if options.srun_args:
        parameters["slurm_srun_args"] = list(options.srun_args)
    if options.array_parallelism is not None:
        parameters["slurm_array_parallelism"] = options.array_parallelism
    signal_option = {"signal": f"{signal_name}@{options.signal_delay_s}"}
    parameters["slurm_additional_parameters"] = {**signal_option, **others}
    return parameters


# --- A job that submitit has submitted, found again by its folder and number; no pickle is loaded here ---


_POLL_S = 0.2
_SLURM_POLL_S = 2.0


class SubmititJob(PolledJob):
    """A job on Slurm, or one whose controller is a process of this machine.

    Args:
        reference: ``id``, ``executor``, ``folder``, ``tasks``, ``is_command`` and, of a local job, the
            controller's ``pid``, when it was ``created``, and where.
    """

    def __init__(self, reference: Mapping[str, Any]) -> None:
        super().__init__(reference)
        self._folder = Path(reference["folder"])
        self._tasks = int(reference["tasks"])
        interval_s = _SLURM_POLL_S if reference["executor"] == "slurm" else _POLL_S
        self.intervals_s = (interval_s, interval_s)

    @classmethod
    def submitted(cls, number: str, executor: str, folder: Path, *, tasks: int, is_command: bool) -> SubmititJob:
        """Return the job that has just got this number.

        Args:
            number: Slurm's, or the controller's process id.
            executor: "slurm" or "local".
            is_command: the job runs a command, which ends when it gets a stop signal.
        """
        reference: dict[str, Any] = {
            "id": number,
            "executor": executor,
            "folder": str(folder),
            "tasks": tasks,
            "is_command": is_command,
        }
        if executor == "local":
            with suppress(psutil.NoSuchProcess):
                reference |= process_reference(int(number))
        return cls(reference)

    @property
    def id(self) -> str:
        """Slurm's number, or the controller's process id."""
        return str(self._reference["id"])

    def status(self) -> JobStatus:
        """Return the status from the files of its tasks, else from Slurm or the process table."""
        # In this order: a job that ends in between has left its codes.
        system = self._system_status()
        codes = self._exit_codes()
        if len(codes) == self._tasks and (not any(codes) or not self._cancelled.exists()):
            return ended_status(max(codes, key=abs), system.restarts)
        if not system.ended:
            return system
        if self._cancelled.exists():
            return JobStatus(state="cancelled", restarts=system.restarts)
        if codes:
            return ended_status(max(codes, key=abs) or 1, system.restarts)
        return system

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        paths = [self._folder / f"{self.id}_{task}_log.{kind}" for task in range(self._tasks) for kind in self._kinds]
        # A controller on another machine is unknown here, and its tasks leave their codes all the same.
        ended = self.poller().ended if self._reference["executor"] == "slurm" else lambda: self.status().ended
        yield from follow_files(lambda: paths, ended=ended if follow else None)

    def cancel(self) -> None:
        """End it; a command is asked first, and killed by a second call.

        Raises:
            LaunchError: Slurm refused it, or the controller is not one of this machine's processes.
        """
        asked = self._cancelled.exists()
        if self._reference["executor"] == "slurm":
            self._cancelled.touch()
            self._slurm.cancel()
            return
        process = process_to_end(self._reference, self.status())
        self._cancelled.touch()
        if process is not None:
            with suppress(psutil.NoSuchProcess):
                # submitit's controller passes SIGTERM on; at SIGINT it kills its tasks after a second.
                process.send_signal(signal.SIGTERM if self._reference["is_command"] and not asked else signal.SIGINT)

    @property
    def log_location(self) -> str:
        return str(self._folder)

    @property
    def _slurm(self) -> SlurmJob:
        return SlurmJob({"id": self.id, "directory": str(self._folder)})

    @property
    def _kinds(self) -> tuple[str, ...]:
        return ("out",) if self._reference["is_command"] else ("out", "err")

    @property
    def _cancelled(self) -> Path:
        return self._folder / f"{self.id}_cancelled"

    def _exit_codes(self) -> list[int]:
        codes = []
        for task in range(self._tasks):
            with suppress(OSError, ValueError):
                codes.append(int(exit_code_file(self._folder, self.id, task).read_text()))
        return codes

    def _system_status(self) -> JobStatus:
        if self._reference["executor"] == "slurm":
            return self._slurm.status()
        if "pid" in self._reference:
            return process_status(self._reference)
        return JobStatus(state="failed", detail="its process is gone, and left no exit code")


# --- ``--on submitit``: a short program that hands the job's command to submitit ---


SUBMIT = "submit.py"
"""A file in a job's directory: the program that submits it."""

FOLDER = "submitit"
"""In a job's directory: submitit's files."""

_PROGRAM = '''\
"""Submits the job with submitit, and prints its number."""

import submitit
from paceline_frameworks.submitit_running import StartCommand

executor = submitit.AutoExecutor(
{arguments}
)
executor.update_parameters(
{parameters}
)
command = {command}
print(executor.submit(StartCommand(command, each={each!r})).job_id)
'''


class Submitit(ClusterLauncher):
    """Jobs through submitit."""

    name = "submitit"
    rank_launchers = ("torchrun", "agent", "spawn", "srun")
    extra = "submitit"

    def render(self, spec: LaunchSpec, options: SubmititOptions | None = None) -> RenderedJob:
        options = replace(options or SubmititOptions(), stderr_to_stdout=True)
        if options.array_parallelism is not None:
            raise ConfigError("--array-parallelism is for paceline.submit_array(); a command is one job. Leave it out.")
        fixed_nodes(spec, "--on submitit")
        if spec.starts_each_rank:
            if len(spec.nproc) > 1:
                raise ConfigError("--rank-launcher srun starts as many processes on each machine: --nproc is a list.")
            if options.executor == "local":
                raise ConfigError("--rank-launcher srun needs Slurm, but --executor is local. Leave it out.")
        tasks = spec.nproc[0] if spec.starts_each_rank else 1
        processes = 1 if spec.starts_each_rank else max(spec.nproc)
        cpus = None if spec.cpus_per_task is None and processes == 1 else (spec.cpus_per_task or 1) * processes
        parameters = executor_parameters(
            spec, options, tasks_per_node=tasks, cpus_per_task=cpus, signal_name=PREEMPT_SIGNAL
        )
        command = rank_command(spec) if spec.starts_each_rank else node_command(spec)
        program = _PROGRAM.format(
            arguments=_keywords({"folder": str(spec.directory / FOLDER), **executor_arguments(options, spec.python)}),
            parameters=_keywords(parameters),
            each="rank" if spec.starts_each_rank else "machine",
            command=pprint.pformat(list(command), width=100, compact=True),
        )
        env = {"SUBMITIT_PREEMPT_SIGNAL": PREEMPT_SIGNAL, **spec.env}
        submit = Command(title="submit", argv=(sys.executable, str(spec.directory / SUBMIT)), env=env)
        return RenderedJob(spec=spec, options=options, files={SUBMIT: program}, commands=(submit,))

    def submit(self, rendered: RenderedJob) -> JobHandle:
        spec, options = rendered.spec, rendered.options
        require_submitit()
        folder = make_private(spec.directory / FOLDER)
        [command] = rendered.commands
        number = _run(command, rendered, folder)
        tasks = spec.nodes[0] * (spec.nproc[0] if spec.starts_each_rank else 1)
        return SubmititJob.submitted(number, options.executor, folder, tasks=tasks, is_command=True)

    def reopen(self, reference: Mapping[str, Any]) -> JobHandle:
        return SubmititJob(reference)


def _keywords(values: Mapping[str, Any]) -> str:
    return "\n".join(f"    {name}={value!r}," for name, value in values.items())


def require_submitit() -> None:
    """Raise :class:`ConfigError` with the command that installs it, where it is missing."""
    if importlib.util.find_spec("submitit") is None:
        raise ConfigError(f"submitit is not installed. Install it: {install_command('submitit')}")


def _run(command: Command, rendered: RenderedJob, folder: Path) -> str:
    """Run the program; return the number that it prints.

    Its processes on this machine outlive it, so its output is a file: a pipe would never reach its end.
    """
    printed = folder / "submit.log"
    with printed.open("wb") as output:
        done = subprocess.run(
            command.argv,
            cwd=rendered.spec.workdir,
            env={**os.environ, **command.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            check=False,
        )
    text = printed.read_text(errors="replace").strip()
    if done.returncode != 0:
        raise submission_error(text, rendered.spec, rendered.options)
    return text.splitlines()[-1]


def submission_error(text: str, spec: LaunchSpec, options: SubmititOptions) -> LaunchError:
    """Return sbatch's message about the job, if there is one; else the last line of submitit's output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = dict.fromkeys(line for line in lines if line.startswith("sbatch:"))
    if own:
        return refusal("\n".join(own), spec, options)
    return LaunchError(f"submitit could not submit the job: {lines[-1] if lines else 'it said nothing'}")
