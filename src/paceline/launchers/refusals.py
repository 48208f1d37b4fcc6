"""Options that a launcher could only pass over in silence: refused, with what to do instead."""

from __future__ import annotations

from paceline.config import flag
from paceline.errors import ConfigError
from paceline.launchers.base import JobSpec


def refuse_what_is_for_clusters(spec: JobSpec, name: str) -> None:
    """Refuse what a launcher has nobody to ask for.

    Raises:
        ConfigError: GPUs or CPUs are asked for.
    """
    for field in ("gpus_per_node", "cpus_per_task"):
        if getattr(spec, field) is not None:
            raise ConfigError(
                f"{flag(field)} asks a cluster, but --on {name} starts processes on machines that you have. "
                "Leave it out."
            )


def refuse_walltime(spec: JobSpec, name: str) -> None:
    """Refuse a limit that nobody would keep; a task keeps its own.

    Raises:
        ConfigError: a script is given one.
    """
    if spec.walltime_s is not None and not spec.is_task:
        raise ConfigError(
            f"--walltime does not work with --on {name}, which ends no job by itself. Leave it out; "
            f"to end it, begin with: timeout {spec.walltime_s:g} paceline"
        )


def refuse_restarts(spec: JobSpec, name: str) -> None:
    """Refuse restarts where nothing starts a script's ranks again.

    Raises:
        ConfigError: they are asked for.
    """
    if spec.max_restarts and spec.inner != "torchrun" and not spec.is_task:
        by = f"--on {name}" if name == spec.inner else f"--on {name} --inner {spec.inner}"
        raise ConfigError(
            f"--max-restarts does not work with {by}, which ends the job when a rank dies. Leave it out, and "
            "give the command again; or let torchrun start the ranks (--inner torchrun, here --on torchrun)."
        )
