"""``--preflight``: a plug-in checks a job's nodes before the job starts."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from paceline.core.built_in import PARTS
from paceline.core.launch_spec import LaunchSpec


class Preflight(Protocol):
    """A module of a plug-in."""

    def prepare(
        self,
        spec: LaunchSpec,
        own: Any = None,
        *,
        is_local: bool,
        run: Path | None,
        task: str,
        keep: int,
        timeout_s: float,
        agents: bool = False,
    ) -> tuple[LaunchSpec | None, LaunchSpec]:
        """Return the ranks to run on this node before the job, if any, and the job, which else checks its own nodes.

        Args:
            spec: the job.
            own: the launcher's options.
            is_local: the launcher starts processes of this node alone.
            run: a directory that all nodes must share; None: there is none.
            task: what all nodes must be able to import; "" for nothing.
            keep: the number of checkpoints that must have space.
            timeout_s: how long the nodes wait for each other.
            agents: Paceline's agents start the ranks.

        Raises:
            ConfigError: the launcher starts each rank itself, or the place of one of several nodes is not given.
        """

    def run_before(self, spec: LaunchSpec) -> tuple[int, str | None]:
        """Check this node before a job; return the exit code, not 0 if the job must not start, and its interface.

        Args:
            spec: the ranks of :meth:`prepare`, or those of a job's preflight on this node.

        Raises:
            LaunchError: the ranks could not be started.
        """


def find_preflight() -> Preflight:
    """Return the plug-in's module."""
    return cast("Preflight", import_module(PARTS["--preflight"]))
