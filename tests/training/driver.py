"""Trains one job after another in this process, as a rank where the environment says so.

``python driver.py JOBS.json``, where a job is ``{"task", "fields", "options", "stop_at", "computing",
"arrival", "pipedream", "network"}``. With ``computing``, only so many ranks compute, and they share the
micro-batches anew, at random, after every step. With ``arrival``, parameter servers apply the workers' gradients in
this order. With ``pipedream``, how many blocks each stage has, one process computes what that pipeline does.
With ``network``, gradients go from rank to rank as between machines. Prints one JSON line a job: the
``result.json``, or ``{"error", "message"}``.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import paceline
from paceline.parallel import reducer, world
from paceline.parallel.pipeline.stages import cut, find_blocks
from paceline.training import run_context, session

sys.path.insert(0, str(Path(__file__).parents[2]))  # where the tests are found as they are by pytest
from tests.training import branch_tasks, data_tasks, impure_tasks, model_tasks, optimizer_tasks, order_tasks, tasks

TASKS = (tasks, branch_tasks, data_tasks, optimizer_tasks, model_tasks, impure_tasks, order_tasks)


def task_named(name: str) -> type[paceline.Task]:
    """A task of the files beside this one."""
    found: type[paceline.Task] = next(vars(module)[name] for module in TASKS if name in vars(module))
    return found


@contextmanager
def restless(computing: int) -> Iterator[None]:
    """Worlds in which only so many ranks compute, and in which the micro-batches move all the time."""
    from paceline_more_strategies import load_balancing

    class Restless(load_balancing.WorkSplitter):
        """Divide the work again at each opportunity; every rank does the same."""

        windows = 0

        def observe(self, window: load_balancing.Window) -> bool:
            self.windows += 1
            chosen = random.Random(self.windows)
            cuts = sorted(chosen.sample(range(1, sum(self.work_split)), len(self.work_split) - 1))
            self.work_split = tuple(b - a for a, b in itertools.pairwise([0, *cuts, sum(self.work_split)]))
            return True

    open_world = world.open_world

    @contextmanager
    def with_spares(*arguments: Any, **options: Any) -> Iterator[world.World]:
        with open_world(*arguments, **options) as whole:
            yield dataclasses.replace(whole, active=computing if whole.world_size > 1 else None)

    with (
        mock.patch.object(world, "open_world", with_spares),
        mock.patch.multiple(load_balancing, WorkSplitter=Restless, WINDOW_STEPS=1, WINDOW_S=0.0),
    ):
        yield


@contextmanager
def simulated(task: paceline.Task, sizes: list[int]) -> Iterator[None]:
    """A pipeline without a flush, stage by stage in this process."""
    from paceline_more_strategies.reference import PipeDreamReference

    def build(module: Any, mesh: Any, options: Any) -> PipeDreamReference:
        return PipeDreamReference(module, mesh, options, cut(find_blocks(module, task.pipeline_blocks(module)), sizes))

    with (
        mock.patch.object(run_context, "build_strategy", build),
        mock.patch.object(session, "strategy_class", return_value=PipeDreamReference),
    ):
        yield


def arriving(order: list[int]) -> AbstractContextManager[Any]:
    """Parameter servers that apply the workers' gradients in this order."""
    from paceline_more_strategies.server_engines import AsyncServerEngine

    return mock.patch.object(AsyncServerEngine, "order", iter(order))


def train(job: dict[str, Any]) -> dict[str, Any]:
    tasks.interruption.calls, tasks.interruption.at = 0, job.get("stop_at", 0)
    task = task_named(job["task"])(**job.get("fields", {}))
    try:
        network = mock.patch.object(reducer, "supported", return_value=False)
        with (
            restless(job["computing"]) if "computing" in job else nullcontext(),
            arriving(job["arrival"]) if "arrival" in job else nullcontext(),
            simulated(task, job["pipedream"]) if "pipedream" in job else nullcontext(),
            network if "network" in job else nullcontext(),
        ):
            # The purity guard computes some losses twice, and would be counted.
            options = {**({"purity": "off"} if "stop_at" in job else {}), **job["options"]}
            return dict(paceline.fit(task, quiet=True, **options).record)
    except paceline.PacelineError as error:
        return {"error": type(error).__name__, "message": str(error)}


def gloo_threads() -> list[str]:
    names = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            names.append((thread / "comm").read_text().strip())
    return [name for name in names if "gloo" in name]


def no_group_is_left() -> None:
    """Gloo's threads can abort the interpreter once it finalizes."""
    deadline = time.monotonic() + 10
    # The kernel lists a thread for a moment after it was joined.
    while (left := gloo_threads()) and time.monotonic() < deadline:
        time.sleep(0.001)
    if left:
        print(f"left at exit: {left}", file=sys.stderr, flush=True)
        os._exit(1)


if __name__ == "__main__":
    atexit.register(no_group_is_left)
    for number, job in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        result = train(job)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps({"job": number, **result}), flush=True)
        elif "error" in result:
            print(f"job {number}: {result['error']}: {result['message']}", file=sys.stderr, flush=True)
