"""Tries a task for some steps before a search: ``python -m paceline.tuning.probe FILE``.

It says, as a line of JSON, what the task's metrics are, how long a trial goes on, and what its steps and
evaluations take here; or what is wrong. It is a run like any other, in a directory that goes away again,
with the first trial's parameters; it is stopped at its first evaluation.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.config import Interval, flag, parse_interval
from paceline.distributed.tether import tethered
from paceline.errors import ConfigError, PacelineError, TaskError
from paceline.run_directory import RunDirectory, read_json_lines
from paceline.task import Task, build_task, load_task_class, parse_assignments
from paceline.tuning.search import Search, SearchDirectory
from paceline.tuning.space import Dimension

_STEPS = 4
_TRIES = 4


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was found out.

    Attributes:
        metrics: of the validation split, by name, after some steps.
        best: the metric that the task itself recommends.
        total_steps: of a trial; None for a stream trained by epochs.
        evaluations: of a trial; None where nobody knows.
        step_s: seconds of a step.
        evaluation_s: seconds of an evaluation.
        seconds_per_evaluation: with the steps before it.
    """

    metrics: Mapping[str, float | None]
    best: str | None
    total_steps: int | None
    evaluations: int | None
    step_s: float
    evaluation_s: float
    seconds_per_evaluation: float


def probe(search: Search) -> Facts:
    """Try the search's task, in a process of its own.

    Raises:
        ConfigError: something is wrong with the task, its fields or the options.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-probe-", dir="/tmp") as name:
        directory = SearchDirectory(Path(name))
        directory.write(search)
        done = subprocess.run(
            tethered([sys.executable, "-m", "paceline.tuning.probe", name]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    said = done.stdout.strip().splitlines()
    try:
        document = json.loads(said[-1]) if said else {}
    except ValueError:
        document = {}
    if "error" in document:
        raise ConfigError(document["error"])
    if done.returncode or not document:
        raise ConfigError(
            f"the task could not be tried: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        )
    return Facts(**document)


def main(argv: Sequence[str]) -> int:
    """Print what was found out."""
    directory = SearchDirectory(Path(argv[0]))
    try:
        facts = _probe(directory.read(), directory)
    except PacelineError as error:
        print(json.dumps({"error": str(error)}))
        return error.exit_code
    print(json.dumps(asdict(facts)))
    return 0


def _probe(search: Search, directory: SearchDirectory) -> Facts:
    from paceline.tuning.running_trial import Order, RunningTrial, TrialServer

    task_class = load_task_class(str(search.options["task"]))
    task = check_fields(task_class, search)
    with closing(TrialServer()) as server:
        # One that diverges at once is a trial like any other; if several do, something is wrong.
        for number in range(min(_TRIES, search.planned)):
            run = RunDirectory(directory.path / f"probe-{number}")
            options = {
                **search.trial_options(number, directory),
                "run": str(run.path),
                "eval_every": f"{_STEPS}steps",
                "checkpoint_every": ["never"],
                "log_every": 1,
            }
            trial = RunningTrial(
                server, Order(options=options, iteration=0, step=0, stop_file=directory.stop)
            )
            try:
                told = trial.next()
            finally:
                asked = time.time()
                trial.end()
            if told.state != "diverged":
                break
    if told.state in ("failed", "diverged", "waiting"):
        raise TaskError(f"{told.message or 'the task was stopped'} (tried with {', '.join(options['set'])})")
    if not told.metrics:
        raise ConfigError(
            f"{task_class.__name__} has no validation split, so trials cannot be compared. Carve one out of "
            "the training data with --val-fraction 0.1."
        )
    steps = [r for r in read_json_lines(run.metrics) if r["kind"] == "train"]
    step_s = statistics.median(max(rank["step_ms"] for rank in r["ranks"]) for r in steps[1:] or steps) / 1000
    evaluation_s = max(0.0, asked - steps[-1]["time"])
    data = run.read_complete_manifest()["data"]
    config = run.read_complete_manifest()["config"]
    total = data.get("total_steps")
    every = parse_interval(search.config.eval_every, "eval_every", allow_time=False)
    spacing = _steps_between(every, data.get("steps_per_epoch"), total)
    evaluations = _evaluations(every, config.get("epochs"), total, spacing)
    return Facts(
        metrics=told.metrics,
        best=config.get("best") or task.defaults.best,
        total_steps=total,
        evaluations=evaluations,
        step_s=step_s,
        evaluation_s=evaluation_s,
        seconds_per_evaluation=step_s * (spacing or 0) + evaluation_s,
    )


def _steps_between(every: Interval, steps_per_epoch: int | None, total: int | None) -> int | None:
    """Steps from one evaluation to the next."""
    if every == Interval():
        raise ConfigError("--eval-every never: trials are compared by evaluations. Leave it out.")
    steps = every.steps
    if steps is None and steps_per_epoch is not None:
        steps = (every.epochs or 1) * steps_per_epoch
    return min(steps, total) if steps is not None and total is not None else steps


def _evaluations(every: Interval, epochs: int | None, total: int | None, spacing: int | None) -> int | None:
    """Of a whole run; there is one at its end, too."""
    if total is not None and spacing is not None:
        return -(-total // spacing)
    return -(-epochs // every.epochs) if epochs is not None and every.epochs is not None else None


def check_fields(task_class: type[Task], search: Search) -> Task:
    """Hold the space against the task's fields; return the first trial's task.

    Raises:
        TaskError: a field is unknown, or cannot have such values.
        ConfigError: a field is both set and searched.
    """
    fixed = parse_assignments(search.config.set)
    hints = typing.get_type_hints(task_class)
    known = {f.name for f in dataclasses.fields(task_class) if f.init}
    for dimension in search.parsed_space.dimensions:
        name = dimension.field
        if name in fixed:
            raise ConfigError(f"{name} is both given by --set and searched. Leave one of them out.")
        if name in known:
            _check_kind(task_class, dimension, hints[name])
        for value in dimension.values:
            build_task(task_class, {**fixed, name: str(value)})
    return build_task(task_class, {**fixed, **search.parsed_space.parameters(0)})


def _check_kind(task_class: type[Task], dimension: Dimension, hint: Any) -> None:
    """A range is for a number, and one of fractions not for a whole number."""
    kinds = {hint, *typing.get_args(hint)}
    if dimension.kind == "choice" or Any in kinds or (float in kinds):
        return
    if dimension.kind == "int" and int in kinds:
        return
    name = getattr(hint, "__name__", str(hint))
    instead = "int or choice" if int in kinds else "choice"
    raise TaskError(
        f"{flag('search')} {dimension.field}={dimension.kind}: {task_class.__name__}.{dimension.field} is "
        f"{name}. Search it with {instead}."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
