"""What a search has found: ``result.json``, and the command that trains the best configuration."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from paceline.config import config_from_mapping, flag
from paceline.launchers.submission import task_command
from paceline.run_directory import write_atomically
from paceline.tuning.journal import Trial, Trials
from paceline.tuning.search import Search, SearchDirectory
from paceline.tuning.space import assignments

_OF_THE_PLACE = ("nproc", "threads")


def command_of(search: Search, number: int) -> str:
    """The ``paceline train`` that trains a trial's configuration to its end, with the trial's own bits."""
    options = {**search.options}
    options["set"] = [*options.get("set", ()), *assignments(search.parsed_space.parameters(number))]
    config = config_from_mapping(options, "tune.json")
    words = ["paceline", *task_command(config, Path("runs/best"), "python")[3:]]
    for name in _OF_THE_PLACE:
        if name in options:
            words += [flag(name), str(options[name])]
    return shlex.join(words)


def write_result(
    search: Search, directory: SearchDirectory, journal: Trials, *, done: bool
) -> dict[str, Any]:
    """Write ``result.json``, and return its content.

    Args:
        search: what was searched.
        directory: its directory.
        journal: what is known of its trials.
        done: whether all trials that were to run have ended.
    """
    trials = [journal.trials[number] for number in sorted(journal.trials)]
    best = journal.best(search.metric_name, search.mode)
    clock_s = journal.clock_s
    cost = journal.cost(clock_s, search.gpus)
    steps = sum(trial.step for trial in trials)
    whole = None if search.total_steps is None else search.total_steps * search.planned
    result = {
        "search": str(directory.path),
        "task": search.options["task"],
        "metric": search.metric,
        "done": done,
        "planned": search.planned,
        "states": dict(Counter(trial.state for trial in trials)),
        "best": None if best is None else _trial(search, best) | {"command": command_of(search, best.number)},
        "steps": steps,
        "steps_without_early_stops": whole,
        "seconds": round(clock_s, 3),
        "gpu_hours": round(cost.gpu_hours, 4),
        "budget": None if search.limit is None else search.limit.show(cost),
        "trials": [_trial(search, trial) for trial in trials],
    }
    write_atomically(directory.result, (json.dumps(result, indent=2) + "\n").encode())
    return result


def _trial(search: Search, trial: Trial) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "state": trial.state,
        "parameters": search.parsed_space.parameters(trial.number),
        search.metric_name: trial.best(search.metric_name, search.mode),
        "iterations": trial.iteration,
        "steps": trial.step,
        "seconds": round(trial.seconds, 3),
        "run": f"trials/{trial.number:05d}",
        **({"message": message} if (message := _message(trial)) else {}),
    }


def _message(trial: Trial) -> str:
    return trial.results[-1].message if trial.results else ""
