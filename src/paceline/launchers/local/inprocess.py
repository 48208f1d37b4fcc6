"""One process: this one."""

from __future__ import annotations

import os
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from paceline.distributed.variables import variables_set
from paceline.errors import ConfigError
from paceline.launchers.local.base import LocalLauncher, LocalSpec, RenderedProcess, RenderedProcesses


class InProcessLauncher(LocalLauncher):
    """Runs the worker in this process."""

    def render(self, spec: LocalSpec) -> RenderedProcesses:
        """Render the plain command."""
        if spec.nproc > 1 or spec.nodes > 1:
            raise ConfigError(
                f"--on inprocess runs one process, but {spec.nproc * spec.nodes} were asked for. "
                "Use --on spawn."
            )
        if not spec.python or spec.command == ("-m",):
            raise ConfigError(
                f"--on inprocess runs a script or -m MODULE, not {shlex.join(spec.argv)!r}. Use --on spawn."
            )
        process = RenderedProcess(
            title="in this process",
            argv=spec.argv,
            env={**spec.env, **spec.thread_variables()},
            rank=0,
        )
        return RenderedProcesses(spec=spec, processes=(process,))

    def submit(self, rendered: RenderedProcesses) -> InProcessJob:
        """Return a job that runs when it is waited for."""
        return InProcessJob(rendered)


class InProcessJob:
    """Runs in :meth:`wait`; signals reach the worker's own handlers."""

    def __init__(self, rendered: RenderedProcesses) -> None:
        self._process = rendered.processes[0]
        self._cancelled = False

    @property
    def pids(self) -> tuple[int, ...]:
        """None but this process itself, which is not the job's to end."""
        return ()

    def wait(self) -> int:
        """Run the command to its end; return what it exits with."""
        if self._cancelled:
            return 130
        command = self._process.argv[1:]
        try:
            if command[0] == "-m":
                here = os.getcwd()
                with self._started_with(command[1:], here), warnings.catch_warnings():
                    # A script that calls fit() has imported the worker; to run it once more is meant.
                    warnings.filterwarnings(
                        "ignore", ".* found in sys.modules after import of package", RuntimeWarning
                    )
                    runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                beside = os.path.dirname(os.path.realpath(command[0]))
                with self._started_with(command, beside):
                    runpy.run_path(command[0], run_name="__main__")
        except SystemExit as error:
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
                return 1
            return error.code or 0
        return 0

    def cancel(self) -> None:
        """Keep :meth:`wait` from starting it."""
        self._cancelled = True

    @contextmanager
    def _started_with(self, arguments: tuple[str, ...], imports_from: str) -> Iterator[None]:
        """What Python gives to what it is started with: arguments, and where it imports from first."""
        before = sys.argv
        sys.argv = list(arguments)
        sys.path.insert(0, imports_from)
        try:
            with variables_set(self._process.env):
                yield
        finally:
            sys.argv = before
            with suppress(ValueError):
                sys.path.remove(imports_from)
