"""``--on submitit``: a short program that hands the job's command to submitit."""

from __future__ import annotations

import importlib.util
import os
import pprint
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, LaunchError
from paceline.launchers.base import Command, JobHandle, JobSpec, Launcher, Rendered
from paceline.launchers.node import node_command
from paceline.launchers.rank import rank_command
from paceline.launchers.slurm.commands import refusal
from paceline.launchers.submitit.folder import make_private
from paceline.launchers.submitit.job import SubmititJob
from paceline.launchers.submitit.parameters import (
    SubmititOptions,
    executor_arguments,
    executor_parameters,
)
from paceline.launchers.submitit.running import PREEMPT_SIGNAL

SUBMIT = "submit.py"
"""A file in a job's directory: the program that submits it."""

FOLDER = "submitit"
"""In a job's directory: what submitit keeps."""

_PROGRAM = '''\
"""Submits the job with submitit, and prints its number."""

import submitit
from paceline.launchers.submitit.running import StartCommand

executor = submitit.AutoExecutor(
{arguments}
)
executor.update_parameters(
{parameters}
)
command = {command}
print(executor.submit(StartCommand(command, each={each!r})).job_id)
'''


class Submitit(Launcher):
    """Jobs through submitit."""

    name = "submitit"
    inners = ("torchrun", "agent", "spawn", "srun")
    extra = "submitit"

    def render(self, spec: JobSpec, options: SubmititOptions | None = None) -> Rendered:
        """Render the program that submits it."""
        options = options or SubmititOptions()
        if spec.nodes[0] != spec.nodes[1]:
            raise ConfigError(
                "--on submitit takes a fixed number of machines, but --nodes is "
                f"{spec.nodes[0]}:{spec.nodes[1]}."
            )
        if spec.starts_each_rank:
            if len(spec.nproc) > 1:
                raise ConfigError("--inner srun starts as many processes on each machine: --nproc is a list.")
            if options.executor == "local":
                raise ConfigError("--inner srun needs Slurm, but --executor is local. Leave it out.")
        tasks = spec.nproc[0] if spec.starts_each_rank else 1
        each = spec.cpus_per_task or 1
        parameters = executor_parameters(
            options,
            name=spec.name,
            nodes=spec.nodes[0],
            tasks_per_node=tasks,
            cpus_per_task=each if spec.starts_each_rank else each * max(spec.nproc),
            gpus_per_node=spec.gpus_per_node,
            walltime_s=spec.walltime_s,
            signal_name=PREEMPT_SIGNAL,
        )
        command = rank_command(spec) if spec.starts_each_rank else node_command(spec)
        program = _PROGRAM.format(
            arguments=_keywords(
                {"folder": str(spec.directory / FOLDER), **executor_arguments(options, spec.python)}
            ),
            parameters=_keywords({**parameters, "stderr_to_stdout": True}),
            each="rank" if spec.starts_each_rank else "machine",
            command=pprint.pformat(list(command), width=100, compact=True),
        )
        env = {"SUBMITIT_PREEMPT_SIGNAL": PREEMPT_SIGNAL, **spec.env}
        submit = Command(title="submit", argv=(sys.executable, str(spec.directory / SUBMIT)), env=env)
        return Rendered(spec=spec, options=options, files={SUBMIT: program}, commands=(submit,))

    def submit(self, rendered: Rendered) -> JobHandle:
        """Run the program."""
        spec, options = rendered.spec, rendered.options
        require_submitit()
        folder = make_private(spec.directory / FOLDER)
        [command] = rendered.commands
        number = _run(command, rendered, folder)
        tasks = spec.nodes[0] * (spec.nproc[0] if spec.starts_each_rank else 1)
        return SubmititJob.submitted(number, options.executor, folder, tasks=tasks, is_command=True)

    def reopen(self, reference: Mapping[str, Any]) -> JobHandle:
        """Find the job by its folder and number."""
        return SubmititJob(reference)


def _keywords(values: Mapping[str, Any]) -> str:
    return "\n".join(f"    {name}={value!r}," for name, value in values.items())


def require_submitit() -> None:
    """Raise :class:`ConfigError` with the command that installs it, where it is missing."""
    if importlib.util.find_spec("submitit") is None:
        raise ConfigError("submitit is not installed. Install it: pip install 'paceline[submitit]'")


def _run(command: Command, rendered: Rendered, folder: Path) -> str:
    """Run the program; return the number that it prints.

    What it starts on this machine outlives it, so its output is no pipe: nobody would see that one's end.
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


def submission_error(text: str, spec: JobSpec, options: SubmititOptions) -> LaunchError:
    """What sbatch said of the job, where it has; else the last line of what submitit said."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = dict.fromkeys(line for line in lines if line.startswith("sbatch:"))
    if own:
        return refusal("\n".join(own), spec, options)
    return LaunchError(f"submitit could not submit the job: {lines[-1] if lines else 'it said nothing'}")
