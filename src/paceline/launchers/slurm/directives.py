"""What sbatch is asked for: the ``#SBATCH`` lines of a job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.config import parse_duration_s
from paceline.errors import ConfigError
from paceline.launchers.base import JobSpec

if TYPE_CHECKING:
    from paceline.launchers.slurm.options import SlurmOptions

_OURS = {
    "job-name": "--name",
    "chdir": "the directory that you are in",
    "nodes": "--nodes",
    "ntasks": "--nodes and --nproc",
    "ntasks-per-node": "--nproc",
    "cpus-per-task": "--cpus-per-task",
    "gres": "--gpus-per-node",
    "time": "--walltime",
    "signal": "--signal-before",
    "open-mode": "nothing: logs are appended to",
    "export": "--env, besides the variables that are set",
    **{
        name: f"--{name}"
        for name in (
            *("partition", "account", "qos", "constraint", "exclude", "exclusive", "mem", "comment"),
            *("output", "error", "requeue", "no-requeue", "array"),
        )
    },
}


def requeues(spec: JobSpec, options: SlurmOptions) -> bool:
    """Whether the job goes back into the queue by itself."""
    return options.requeue or (spec.is_task and not options.no_requeue)


def log_pattern(spec: JobSpec, options: SlurmOptions) -> str:
    """Where sbatch writes, with its %."""
    if options.output is not None:
        return str(spec.workdir / options.output)
    name = "slurm-%A_%a.log" if options.array else "slurm-%j.log"
    return f"{str(spec.directory).replace('%', '%%')}/{name}"


def directives(spec: JobSpec, options: SlurmOptions) -> Iterator[tuple[str, str | None]]:
    """Name and value of each; None where it has none.

    Raises:
        ConfigError: an option has a wrong form, or does not go with another.
    """
    least, most = spec.nodes
    yield "job-name", spec.name
    yield "chdir", str(spec.workdir)
    yield "output", log_pattern(spec, options)
    if options.error is not None:
        yield "error", str(spec.workdir / options.error)
    yield "open-mode", "append"
    yield "export", "ALL"
    yield "nodes", str(least) if least == most else f"{least}-{most}"
    yield "ntasks-per-node", str(spec.nproc[0] if spec.starts_each_rank else 1)
    if (cpus := cpus_per_task(spec, options)) is not None:
        yield "cpus-per-task", str(cpus)
    if spec.gpus_per_node:
        yield "gres", f"gpu:{spec.gpus_per_node}"
    if spec.walltime_s is not None:
        yield "time", slurm_time(spec.walltime_s)
    for name in ("partition", "account", "qos", "constraint", "exclude", "mem", "comment", "array"):
        if (value := getattr(options, name)) is not None:
            yield name, value
    if options.exclusive:
        yield "exclusive", None
    if (before_s := _signal_before_s(spec, options)) is not None:
        yield "signal", f"USR1@{before_s}"
    if spec.inner == "agent":
        yield "no-kill", None
    if requeues(spec, options):
        yield "requeue", None
    elif options.no_requeue:
        yield "no-requeue", None
    for text in options.slurm:
        name, equals, value = text.removeprefix("--").partition("=")
        if not re.fullmatch(r"[a-z][a-z-]*", name):
            raise ConfigError(f"--slurm must be KEY=VALUE with a long option of sbatch's, but is {text!r}.")
        if name in _OURS:
            raise ConfigError(f"--slurm {name}: Paceline has an option of its own for it: {_OURS[name]}.")
        yield name, value if equals else None


def cpus_per_task(spec: JobSpec, options: SlurmOptions) -> int | None:
    """CPUs of each of Slurm's tasks; None: all that there are."""
    if options.exclusive and spec.cpus_per_task is None:
        return None
    each = spec.cpus_per_task or 1
    return each if spec.starts_each_rank else each * max(spec.nproc)


def _signal_before_s(spec: JobSpec, options: SlurmOptions) -> int | None:
    if options.signal_before is not None:
        before_s = parse_duration_s(options.signal_before, "signal_before")
        if spec.walltime_s is not None and before_s >= spec.walltime_s:
            raise ConfigError(
                f"--signal-before {options.signal_before} must be shorter than --walltime, which is "
                f"{spec.walltime_s:g} s."
            )
        return max(1, round(before_s))
    if spec.is_task and spec.walltime_s is not None:
        return max(1, round(min(120, spec.walltime_s / 10)))
    return None


def slurm_time(seconds: float) -> str:
    """``D-HH:MM:SS``, rounded up to a second."""
    minutes, second = divmod(-int(-seconds // 1), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hour:02}:{minute:02}:{second:02}"


def directive_value(name: str, value: str) -> str:
    """The value as sbatch reads it from a line.

    Raises:
        ConfigError: it is more than a line.
    """
    if "\n" in value or "\0" in value:
        raise ConfigError(f"--{name} must be one line, but is {value!r}.")
    if re.fullmatch(r"[\w@%+,./:=|&*!()\[\]{}^~-]+", value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
