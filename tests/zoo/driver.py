"""Trains one task after another in this process, as a rank where the environment says so.

``python driver.py JOBS.json``, where a job is ``{"task", "run_dir", "kill_at"}`` and the task is ``file:Name``. A rank
whose job has ``kill_at`` kills itself in the midst of that step, once there is a checkpoint. Prints one JSON line a
job: the ``result.json``.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import paceline
from paceline.core.task import BatchInfo


def kill_in_step(kind: type[paceline.Task], step: int, checkpoints: Path) -> None:
    """Let a task's second micro-batch of a step, on each rank, be its last."""
    on_batch_begin, begun = kind.on_batch_begin, []

    def on_batch_begin_or_die(self: paceline.Task, info: BatchInfo) -> None:
        begun.append(info.step)
        if begun.count(step) > 1:
            while not any(checkpoints.glob("step-*")):
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGKILL)
        on_batch_begin(self, info)

    kind.on_batch_begin = on_batch_begin_or_die  # type: ignore[method-assign]


def train(job: dict[str, Any]) -> dict[str, Any]:
    file, _, name = job["task"].partition(":")
    kind: type[paceline.Task] = getattr(importlib.import_module(file), name)
    if job.get("kill_at"):
        kill_in_step(kind, job["kill_at"], Path(job["run_dir"], "checkpoints"))
    # A data worker imports torch first, which takes seconds; other tests use them.
    result = paceline.fit(
        kind(), quiet=True, threads=1, num_workers=0, checkpoint_every="2steps", run_dir=job["run_dir"]
    )
    return dict(result.record)


if __name__ == "__main__":
    for each in json.loads(Path(sys.argv[1]).read_text()):
        trained = train(each)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(trained), flush=True)
