"""One process: this one."""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from paceline.errors import ConfigError
from paceline.launchers.base import JobSpec, Launcher, Rendered, RenderedProcess


class InProcessLauncher(Launcher):
    """Runs the worker in this process."""

    def render(self, spec: JobSpec) -> Rendered:
        """Render the plain command."""
        if spec.nproc > 1 or spec.nodes > 1:
            raise ConfigError(
                f"--on inprocess runs one process, but {spec.nproc * spec.nodes} were asked for. "
                "Use --on spawn."
            )
        process = RenderedProcess(
            title="in this process",
            argv=(spec.python, *spec.command),
            env={**spec.env, **spec.thread_variables()},
            rank=0,
        )
        return Rendered(spec=spec, processes=(process,))

    def submit(self, rendered: Rendered) -> InProcessJob:
        """Return a job that runs when it is waited for."""
        return InProcessJob(rendered)


class InProcessJob:
    """Runs in :meth:`wait`; signals reach the worker's own handlers."""

    def __init__(self, rendered: Rendered) -> None:
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
                with _arguments(command[1:]), _variables(self._process.env), warnings.catch_warnings():
                    # A script that calls fit() has imported the worker; to run it once more is meant.
                    warnings.filterwarnings(
                        "ignore", ".* found in sys.modules after import of package", RuntimeWarning
                    )
                    runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                with _arguments(command), _variables(self._process.env):
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
def _arguments(arguments: tuple[str, ...]) -> Iterator[None]:
    before = sys.argv
    sys.argv = list(arguments)
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
