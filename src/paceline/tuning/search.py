"""A search: what was asked for, and its directory.

::

    tune.json         everything resolved: the task, its options, the space, the scheduler, the budget
    journal.jsonl     one record for each result, in the order in which they were compared; what was spent
    trials/00003/     trial 3: a run's directory, which paceline resume, runs and audit take
    tensorboard/      each trial's hyperparameters with its results
    parallel.svg  curves.svg
    result.json       the best trial, and how every one ended
"""

from __future__ import annotations

import fcntl
import json
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from paceline.config import RunConfig, config_from_mapping, parse_best
from paceline.errors import ConfigError, RunDirectoryError, RunInUseError
from paceline.run_directory import write_atomically
from paceline.tuning.budget import Budget, parse_budget
from paceline.tuning.space import Space, assignments, parse_space

SchedulerName = Literal["asha", "none"]

_PATIENCE_S = 30.0
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched, and how; the content of ``tune.json``.

    Attributes:
        options: of each trial's run, as ``paceline train`` knows them: task, seed, epochs, nproc, ...
        space: what ``--search`` said.
        trials: how many, at most.
        scheduler: what ends trials early.
        grace: evaluations that every trial has.
        reduction_factor: one in so many trials passes a rung.
        metric: ``NAME:min`` or ``NAME:max``, of the validation split.
        stop: values at which a trial has done enough, by metric.
        cpus: CPUs that each trial holds.
        gpus: GPUs that each trial holds.
        budget: what ``--budget`` said.
        price_per_hour: dollars for an hour of the machines.
        evaluations: of a whole trial; None where nobody knows.
        total_steps: of a whole trial; None where nobody knows.
        seconds_per_evaluation: with the steps before it, as measured here before the search.
        workdir: where the task's file is looked for.
    """

    options: Mapping[str, Any]
    space: tuple[str, ...]
    trials: int
    metric: str
    scheduler: SchedulerName = "asha"
    grace: int = 1
    reduction_factor: float = 4.0
    stop: Mapping[str, float] = field(default_factory=dict)
    cpus: float = 1.0
    gpus: float = 0.0
    budget: str | None = None
    price_per_hour: float | None = None
    evaluations: int | None = None
    total_steps: int | None = None
    seconds_per_evaluation: float | None = None
    workdir: str = ""

    @property
    def config(self) -> RunConfig:
        """The options that all trials have."""
        return config_from_mapping(dict(self.options), "tune.json")

    @cached_property
    def parsed_space(self) -> Space:
        """What is searched."""
        return parse_space(self.space, int(self.options.get("seed", 0)))

    @property
    def metric_name(self) -> str:
        """The metric that decides."""
        return parse_best(self.metric)[0]

    @property
    def mode(self) -> Literal["min", "max"]:
        """Whether it is to be small or large."""
        return parse_best(self.metric)[1]

    @property
    def limit(self) -> Budget | None:
        """The budget."""
        return None if self.budget is None else parse_budget(self.budget, self.price_per_hour, self.gpus)

    @property
    def planned(self) -> int:
        """How many trials there will be: as asked for, as the budget and the space allow."""
        limit, size = self.limit, self.parsed_space.size
        most = [self.trials]
        if limit is not None and limit.unit == "trials":
            most.append(int(limit.amount))
        return min([*most, *([] if size is None else [size])])

    @property
    def rungs(self) -> tuple[int, ...]:
        """After which evaluations trials are compared, the first one first."""
        if self.scheduler == "none" or self.evaluations is None:
            return ()
        left = [float(self.grace)]
        while left[-1] < self.evaluations:
            left.append(self.grace * self.reduction_factor ** len(left))
        found = []
        for evaluation in range(self.grace, self.evaluations):
            # ASHA compares once an evaluation, at the highest rung not compared at yet.
            if reached := bisect_right(left, evaluation):
                left.pop(reached - 1)
                found.append(evaluation)
        return tuple(found)

    def trial_options(self, number: int, directory: SearchDirectory) -> dict[str, Any]:
        """The options of a trial's run."""
        chosen = assignments(self.parsed_space.parameters(number))
        return {
            **self.options,
            "set": [*self.options.get("set", ()), *chosen],
            "run": str(directory.trial(number)),
        }


@dataclass(frozen=True)
class SearchDirectory:
    """The paths inside a search's directory; making one touches nothing."""

    path: Path

    @property
    def settings(self) -> Path:
        """``tune.json``."""
        return self.path / "tune.json"

    @property
    def journal(self) -> Path:
        """``journal.jsonl``."""
        return self.path / "journal.jsonl"

    @property
    def lock(self) -> Path:
        """``tune.lock``, held by the process that searches."""
        return self.path / "tune.lock"

    @property
    def stop(self) -> Path:
        """``stop``: while it is there, trials save and end."""
        return self.path / "stop"

    @property
    def result(self) -> Path:
        """``result.json``."""
        return self.path / "result.json"

    @property
    def tensorboard(self) -> Path:
        """``tensorboard/``."""
        return self.path / "tensorboard"

    def trial(self, number: int) -> Path:
        """A trial's run."""
        return self.path / "trials" / f"{number:05d}"

    def write(self, search: Search, *, new: bool = False) -> None:
        """Write ``tune.json``.

        Args:
            search: its content.
            new: nothing of a search is to be there.

        Raises:
            RunDirectoryError: the directory cannot be written, or holds a search already.
            RunInUseError: somebody searches there.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self.locked():
                if new:
                    self.require_none()
                write_atomically(self.settings, (json.dumps(asdict(search), indent=2) + "\n").encode())
        except OSError as error:
            raise RunDirectoryError(
                f"cannot write to {self.path}: {error.strerror}. Choose another directory with --run DIR."
            ) from error

    def require_none(self) -> None:
        """Refuse a directory in which there is a search.

        Raises:
            RunDirectoryError: there is one.
        """
        if self.settings.exists():
            raise RunDirectoryError(
                f"{self.path} holds a search already. Go on with it: paceline tune --resume --run "
                f"{self.path}; or choose another --run DIR."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the search's lock; one whose command was killed has a while to save its trials and end.

        Raises:
            RunInUseError: somebody else searches there.
        """
        deadline = time.monotonic() + _PATIENCE_S
        with self.lock.open("a+b") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise RunInUseError(
                            f"{self.path} is in use by another process. Wait for it to end, or choose "
                            "another --run DIR."
                        ) from None
                    time.sleep(_POLL_S)
            yield

    def read(self) -> Search:
        """The search that is here.

        Raises:
            RunDirectoryError: there is none, or it is damaged.
        """
        try:
            document = json.loads(self.settings.read_bytes())
            known = {f.name for f in fields(Search)}
            if not isinstance(document, dict) or document.keys() - known:
                raise ValueError("it holds something else")
            search = Search(**{**document, "space": tuple(document["space"])})
            _ = search.config, search.parsed_space, search.mode, search.limit
        except FileNotFoundError:
            raise RunDirectoryError(
                f"{self.path} holds no search (no tune.json). Check --run DIR, or leave --resume out."
            ) from None
        except (OSError, ValueError, TypeError, KeyError, ConfigError) as error:
            raise RunDirectoryError(
                f"{self.settings} cannot be used: {error}. Restore it from a copy, or begin another search."
            ) from error
        return search
