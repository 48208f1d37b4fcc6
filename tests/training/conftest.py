"""Runs lists of training jobs, in one process or in several ranks; see ``driver.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

HERE = Path(__file__).parent
TASKS = HERE / "tasks.py"


class Runner(Protocol):
    def free_port(self) -> int: ...

    def start(
        self, argv: list[str | Path], *, env: Mapping[str, str], cwd: Path, shared: bool
    ) -> subprocess.Popen[str]: ...

    def finish(self, popen: subprocess.Popen[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]: ...


class Trainings:
    """A set of ranks that trains a list of jobs, started at once and waited for when asked."""

    def __init__(
        self,
        processes: Runner,
        directory: Path,
        jobs: Mapping[str, Mapping[str, Any]],
        ranks: int,
        env: Mapping[str, str],
    ) -> None:
        directory.mkdir()
        self.directory = directory
        self._names = list(jobs)
        self._processes = processes
        self._results: dict[str, dict[str, Any]] | None = None
        listed = [
            {**job, "options": {"run_dir": name, "threads": 1, **job["options"]}}
            for name, job in _with_runs(jobs).items()
        ]
        (directory / "jobs.json").write_text(json.dumps(listed))
        command = [sys.executable, HERE / "driver.py", directory / "jobs.json"]
        # Several are started at once, and a test may wait for one of them alone.
        self._started = [
            processes.start([*command], env={**of_rank, **env}, cwd=directory, shared=True)
            for of_rank in ([{}] if ranks == 1 else _environments(ranks, processes.free_port()))
        ]

    def results(self) -> dict[str, dict[str, Any]]:
        """What each job ended with, by name."""
        if self._results is None:
            finished = [self._processes.finish(popen, timeout_s=280) for popen in self._started]
            errors = "\n".join(f"--- rank {rank}\n{f.stderr}" for rank, f in enumerate(finished))
            assert [f.returncode for f in finished] == [0] * len(finished), errors
            lines = [json.loads(line) for line in finished[0].stdout.splitlines()]
            assert len(lines) == len(self._names), errors
            self._results = dict(zip(self._names, lines, strict=True))
        return self._results

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.results()[name]

    def run(self, name: str) -> Path:
        """A job's run directory."""
        return self.directory / name

    def records(self, name: str, kind: str) -> list[dict[str, Any]]:
        """The records of one kind in a job's ``metrics.jsonl``."""
        lines = (self.run(name) / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]


def _with_runs(jobs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {"options": {}, **job} for name, job in jobs.items()}


def _environments(ranks: int, port: int) -> list[dict[str, str]]:
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**shared, "RANK": str(rank)} for rank in range(ranks)]


class StartTrainings(Protocol):
    def __call__(
        self, jobs: Mapping[str, Mapping[str, Any]], *, ranks: int = 1, env: Mapping[str, str] | None = None
    ) -> Trainings: ...


@pytest.fixture(scope="module")
def start_trainings(module_processes: Runner, tmp_path_factory: pytest.TempPathFactory) -> StartTrainings:
    """Start ``{name: {"task", "fields", "options", "stop_at"}}``; a job's run is called as it is."""

    def start(
        jobs: Mapping[str, Mapping[str, Any]], *, ranks: int = 1, env: Mapping[str, str] | None = None
    ) -> Trainings:
        directory = tmp_path_factory.mktemp("trainings") / f"on-{ranks}"
        return Trainings(module_processes, directory, jobs, ranks, env or {})

    return start


@pytest.fixture(scope="session")
def tasks_file() -> Path:
    """The file with the tasks."""
    return TASKS


@pytest.fixture(scope="session")
def tests_importable() -> dict[str, str]:
    """The variables of a process that imports tasks as ``tests.training.…``."""
    return {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])}
