"""Run directories as training writes them, made by hand: for states that would take long to reach."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.core.config import configuration
from paceline.runs.directory import RunDirectory
from paceline.runs.metric_writers import TensorBoardWriter


def make_run(
    path: Path,
    events: Sequence[Mapping[str, Any]] = (),
    *,
    steps: int = 0,
    world_size: int = 2,
    task: str = "task.py:Task",
    spikes: Sequence[int] = (),
    age_s: float = 100.0,
    run_id: str = "0" * 16,
    fields: Mapping[str, Any] = MappingProxyType({}),
    config: Mapping[str, Any] = MappingProxyType({"epochs": 4}),
    accuracy: float | None = None,
) -> RunDirectory:
    """A run with a record every step, that began ``age_s`` ago.

    Args:
        path: its directory.
        events: what happened after it was started.
        steps: how many it has done; the loss falls, but for ``spikes``.
        world_size: its ranks.
        task: its task.
        spikes: steps whose loss is NaN.
        age_s: the age of the run in seconds.
        run_id: its id.
        fields: the task's.
        config: its options.
        accuracy: in its result; None: it has none.
    """
    directory = RunDirectory(path)
    directory.create()
    began = time.time() - age_s
    directory.write_manifest(
        {"id": run_id, "task": {"spec": task, "name": "Task", "fields": dict(fields)}, "config": dict(config)}
    )
    if accuracy is not None:
        directory.write_result({"steps": steps, "metrics": {"val": {"accuracy": accuracy}}})
        events = [*events, {"event": "finished"}]
    started = {"event": "started", "generation": 0, "world_size": world_size, "microbatches": 4, "step": 0}
    told = [{"event": "created", "task": task}, {**started, "total_steps": 100}, *events]
    with directory.events.open("w") as file:
        file.writelines(json.dumps({"time": began + n, **event}) + "\n" for n, event in enumerate(told))
    with directory.metrics.open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(record(step, began + step, world_size, step in spikes)) + "\n")
    return directory


def record(step: int, at: float, world_size: int = 2, spike: bool = False) -> dict[str, Any]:
    rows = [
        {"rank": rank, "step_ms": 10.0, "busy": 0.9, "memory_mib": 100.0, "utilisation": 1.0}
        for rank in range(world_size)
    ]
    loss = None if spike else 1 / math.sqrt(step)
    return {
        "kind": "train",
        "time": at,
        "step": step,
        "epoch": 0,
        "loss": loss,
        "lr": 0.1,
        "samples_per_s": 1000.0,
        "seconds": float(step),
        "imbalance": 1.0,
        "ranks": rows,
    }


def beat(directory: RunDirectory, rank: int, *, ago_s: float = 0.0, world_size: int = 2, step: int = 1) -> None:
    """A rank's last sign of life."""
    at = time.time() - ago_s
    directory.heartbeats.mkdir(exist_ok=True)
    told = {
        "time": at,
        "rank": rank,
        "world_size": world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    told |= {"step": step, "stepped": at, "steps_per_s": 2.5, "left": False}
    (directory.heartbeats / f"rank-{rank}.json").write_text(json.dumps(told))


def make_search(root: Path, trials: int) -> Path:
    """A search whose trials have rising learning rates and accuracies."""
    for number in range(trials):
        directory = make_run(
            root / "search" / "trials" / f"{number:05d}",
            steps=3,
            run_id=f"{number:016x}",
            fields={"lr": 0.1 * (number + 1), "act": "relu" if number % 2 else "tanh"},
            accuracy=number / trials,
        )
        writer = TensorBoardWriter(directory.tensorboard, 1, configuration(directory.read_manifest()))
        for step in (1, 2, 3):
            writer.write(record(step, float(step)))
        writer.close()
    settings = {"options": {"task": "task.py:Task"}, "metric": "accuracy:max", "space": ["lr=log:0.01:1"]}
    (root / "search" / "tune.json").write_text(json.dumps(settings))
    best = {"trial": trials - 1, "accuracy": (trials - 1) / trials}
    (root / "search" / "result.json").write_text(json.dumps({"metric": "accuracy:max", "best": best}))
    return root / "search"
