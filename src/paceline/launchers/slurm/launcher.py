"""``--on slurm``: a batch script for sbatch; inside of an allocation, the same steps at once."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from paceline.distributed.slurm import allocation_nodes
from paceline.errors import ConfigError
from paceline.launchers.attached import AttachedJob, DetachedJob, start_commands
from paceline.launchers.base import Command, Inner, JobHandle, JobSpec, Launcher, Rendered
from paceline.launchers.local.supervision import Starter
from paceline.launchers.refusals import refuse_restarts
from paceline.launchers.slurm.commands import submit_script
from paceline.launchers.slurm.directives import log_pattern
from paceline.launchers.slurm.job import SlurmJob
from paceline.launchers.slurm.options import SlurmOptions
from paceline.launchers.slurm.script import ARRAY_INDEX, BODIES, SCRIPT, allocation_script, batch_files


class Slurm(Launcher):
    """Slurm. Where this runs in an allocation (``salloc``), a job ends with its command."""

    name = "slurm"
    inners: ClassVar[tuple[Inner, ...]] = tuple(BODIES)
    contracts = ("torch", "tensorflow", "none", "mpi", "horovod")

    def __init__(self) -> None:
        self.allocated = allocation_nodes()
        self.attached = self.allocated is not None

    def render(self, spec: JobSpec, options: SlurmOptions | None = None) -> Rendered:
        """Write the script, and the command that submits it; in an allocation, that runs it."""
        options = options or SlurmOptions()
        _check(spec, options)
        if options.conda is not None or options.venv is not None:
            spec = _with_its_python(spec)
        script = spec.directory / SCRIPT
        if self.allocated is None:
            files = batch_files(spec, options)
            command = Command(title="submit it", argv=("sbatch", "--parsable", str(script)), env=spec.env)
        else:
            if spec.nodes[1] > self.allocated:
                raise ConfigError(
                    f"--nodes {spec.nodes[1]}, but this allocation of Slurm's has {self.allocated}. Ask "
                    "salloc for more; or, for a job of its own, begin with: env -u SLURM_JOB_ID paceline"
                )
            files = {SCRIPT: allocation_script(spec, options)}
            command = Command(title="in this allocation", argv=("bash", str(script)), env=spec.env)
        return Rendered(spec=spec, options=options, files=files, commands=(command,))

    def common_directory(self, spec: JobSpec, options: SlurmOptions | None) -> Path:
        """The job's; of an array, one for each of its jobs, which may begin at once."""
        array = options is not None and options.array is not None
        return spec.directory / ARRAY_INDEX if array else spec.directory

    def submit(self, rendered: Rendered) -> JobHandle:
        """Have sbatch take the script; in an allocation, start it."""
        spec, options = rendered.spec, rendered.options
        if self.allocated is not None:
            starter = Starter(name=SCRIPT, says_why=True)  # srun and what it starts have
            return AttachedJob(start_commands(rendered, starter), spec.directory)
        logs = tuple(
            str(spec.workdir / pattern)
            for pattern in (log_pattern(spec, options), options.error)
            if pattern is not None
        )
        for pattern in logs:
            _check_writable(Path(pattern).parent)
        job = submit_script(spec, options, rendered.commands[0])
        return SlurmJob(
            {
                "id": job,
                "name": spec.name,
                "directory": str(spec.directory),
                "logs": logs,
                "array": options.array,
            }
        )

    def reopen(self, reference: Mapping[str, Any]) -> JobHandle:
        """Find a job by its number, or the process that has started one in an allocation."""
        return DetachedJob(reference) if "pid" in reference else SlurmJob(reference)


def _check(spec: JobSpec, options: SlurmOptions) -> None:
    """Refuse before the queue what would fail after it."""
    refuse_restarts(spec, "slurm")
    if spec.starts_each_rank and len(spec.nproc) > 1:
        raise ConfigError(
            f"--nproc {','.join(map(str, spec.nproc))}: under --inner {spec.inner} Slurm starts as many "
            "tasks on every machine. Give one number, or use --inner torchrun."
        )
    if spec.inner == "ray" and options.signal_before is not None:
        raise ConfigError(
            "--signal-before: Slurm sends its warning to all of a job's processes, and Ray's own would end "
            "of it. Leave it out with --inner ray."
        )
    words = (*spec.command, str(spec.run or ""))
    indexed = any(ARRAY_INDEX in word for word in words)
    if indexed and options.array is None:
        raise ConfigError(f"{ARRAY_INDEX} needs --array, which says which numbers it stands for.")
    if options.array is not None:
        if not re.fullmatch(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", options.array):
            raise ConfigError(f"--array must be such as 0-9, 1,3,7 or 0-99%4, but is {options.array!r}.")
        if spec.is_task and ARRAY_INDEX not in str(spec.run):
            raise ConfigError(
                f"--array: the jobs of an array need a run each. Give --run such as runs/sweep-{ARRAY_INDEX}."
            )


def _check_writable(folder: Path) -> None:
    if "%" not in str(folder) and not (folder.is_dir() and os.access(folder, os.W_OK)):
        problem = "cannot be written" if folder.is_dir() else "does not exist"
        raise ConfigError(
            f"--output: the folder {folder} {problem}, and Slurm would end the job without a word."
        )


def _with_its_python(spec: JobSpec) -> JobSpec:
    """The environment that is activated has a python, unless --python has named another."""
    if spec.python != sys.executable:
        return spec

    def changed(command: tuple[str, ...]) -> tuple[str, ...]:
        return ("python", *command[1:]) if command[:1] == (spec.python,) else command

    return dataclasses.replace(
        spec, python="python", command=changed(spec.command), preflight=changed(spec.preflight)
    )
