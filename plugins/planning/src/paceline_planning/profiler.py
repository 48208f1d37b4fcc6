"""``--profile N``: torch's profiler over N steps, and the time of these steps by phases."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Group, RenderableType
from rich.text import Text
from torch.profiler import ProfilerActivity, profile, schedule

from paceline.core.files import write_atomically
from paceline.core.output import ListTable
from paceline.runs.directory import RunDirectory
from paceline.runs.monitor import Monitor, PhaseTime
from paceline.training.group_context import GroupContext
from paceline.training.hooks import RunHook, StepHook
from paceline.training.state_manager import StateManager
from paceline_planning.options import ProfileOptions

WARM_UP_STEPS = 5
"""Excluded steps, which allocate, choose kernels and fill caches; the last starts the profiler."""

_TOP_OPERATORS = 25


class Profiling(RunHook):
    """Profiles the run in each group of ranks."""

    def step_hook(self, group: GroupContext, states: StateManager) -> StepProfiler:
        """Return the profiler of the group's first steps."""
        steps, first = self.run.config[ProfileOptions].profile, states.state.progress.step
        return StepProfiler(self.run.directory, steps=steps, first=first, monitor=group.monitor)


class StepProfiler(StepHook):
    """Profiles ``steps`` steps of this rank, after :data:`WARM_UP_STEPS` more, once ``first`` are done.

    Each rank writes into ``profile/``: ``rank-N.trace.json.gz`` (for chrome://tracing or
    ui.perfetto.dev), ``rank-N.operators.txt`` (the operators that took longest) and
    ``rank-N.phases.json``; rank 0 also prints the phases. The times include the profiler's own
    cost, a few microseconds per operator, which matters for small models.
    """

    def __init__(self, directory: RunDirectory, *, steps: int, first: int, monitor: Monitor) -> None:
        self._folder = directory.profile
        self._monitor = monitor
        self._timer = monitor.timer
        self._begin = first + WARM_UP_STEPS
        self._end = self._begin + steps
        self._step = first
        self._on_cuda = monitor.device.startswith("cuda")
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._on_cuda else [])
        window = schedule(wait=WARM_UP_STEPS - 1, warmup=1, active=steps, repeat=1)
        self._profiler: profile | None = profile(activities=activities, schedule=window, acc_events=True)
        with _silence_kineto():
            self._profiler.start()
        self._seconds_before: dict[str, float] = {}

    def on_step_end(self, step: int) -> None:
        """Count a step, whose phases are marked up to here."""
        if self._profiler is None:
            return
        self._step = step
        with _silence_kineto():
            self._profiler.step()
        if step == self._begin:
            self._seconds_before = dict(self._timer.seconds)
        elif step == self._end:
            self._finish(self._profiler)

    def close(self) -> None:
        """Stop; if the run was too short, write the available steps or a note."""
        if self._profiler is None:
            return
        if self._step > self._begin:
            self._finish(self._profiler)
            return
        self._profiler.stop()
        self._profiler = None
        self._monitor.note(
            f"--profile: the run ended at step {self._step}, but profiling begins after step {self._begin}. "
            "Train longer."
        )

    def _finish(self, profiler: profile) -> None:
        self._profiler = None
        profiler.stop()
        steps = self._step - self._begin
        phases = self._timer.table(since=self._seconds_before)
        prefix = self._folder / f"rank-{self._monitor.rank}"
        self._folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(f"{prefix}.trace.json.gz")
        order = "self_device_time_total" if self._on_cuda else "self_cpu_time_total"
        operators = profiler.key_averages().table(sort_by=order, row_limit=_TOP_OPERATORS)
        write_atomically(prefix.with_name(prefix.name + ".operators.txt"), operators.encode())
        document = {
            "rank": self._monitor.rank,
            "first_step": self._begin + 1,
            "steps": steps,
            "torch": torch.__version__,
            "phases": {name: {"seconds": p.seconds, "share": p.share} for name, p in phases.items()},
        }
        write_atomically(prefix.with_name(prefix.name + ".phases.json"), json.dumps(document, indent=2).encode())
        self._monitor.note(_render(phases, steps, f"{prefix}.trace.json.gz"))


@contextmanager
def _silence_kineto() -> Iterator[None]:
    """Set the variable that keeps libkineto from printing through the progress bar."""
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = "6"
    try:
        yield
    finally:
        del os.environ["KINETO_LOG_LEVEL"]


def _render(phases: dict[str, PhaseTime], steps: int, trace: str) -> RenderableType:
    table = ListTable("phase", ">ms a step", ">share", "")
    for name, (seconds, share) in sorted(phases.items(), key=lambda item: -item[1].seconds):
        if seconds > 0:
            table.add(name, f"{seconds / steps * 1e3:.3f}", f"{share:.1%}", Text("━" * round(24 * share), "cyan"))
    title = Text(f"Where a step's time went (mean of {steps} steps on rank 0)", "bold")
    return Group(title, table, Text.assemble("Trace for ui.perfetto.dev: ", (trace, "cyan")))
