"""A rank's own state, as a few floats that travel with the gradients to every other rank."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import psutil

from paceline.monitoring.phases import PhaseTimer


class RankStatus(NamedTuple):
    """One rank's state over the steps since its last sample; the order is the row's.

    Attributes:
        step_s: mean seconds a training step (without evaluations).
        busy_fraction: the part of ``step_s`` not spent waiting for the reduction, 0 to 1.
        memory_bytes: resident memory; on a GPU the peak of torch's allocator.
        utilisation: CPU seconds a second of this process (1.0 is one core); on a GPU the part of
            the time it was busy, NaN where the driver's library is not installed.
    """

    step_s: float
    busy_fraction: float
    memory_bytes: float
    utilisation: float


ROW_WIDTH = len(RankStatus._fields)
"""Numbers (float64) in a rank's row."""


class Telemetry:
    """Samples this process; nothing is asked of the system between two samples.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:N`` (a ``torch.device`` is accepted too).
        timer: the rank's phase timer, which tells work from waiting.
        first_step: steps done before this process started.
    """

    def __init__(self, device: object, timer: PhaseTimer, first_step: int = 0) -> None:
        self._cuda_device = str(device) if str(device).startswith("cuda") else None
        self._timer = timer
        self._process = psutil.Process()
        self._step = first_step
        self._training_s = timer.training_s()
        self._waiting_s = timer.seconds["reduction"]
        self._wall_s = time.perf_counter()
        self._cpu_s = time.process_time()

    def sample(self, step: int) -> RankStatus:
        """The state since the last sample; ``step`` is the step now under way, counted from 1."""
        training_s, waiting_s = self._timer.training_s(), self._timer.seconds["reduction"]
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        spent_s = training_s - self._training_s
        status = RankStatus(
            step_s=spent_s / max(step - self._step, 1),
            busy_fraction=1.0 - (waiting_s - self._waiting_s) / spent_s if spent_s > 0 else math.nan,
            memory_bytes=self._memory_bytes(),
            utilisation=self._utilisation(cpu_s - self._cpu_s, wall_s - self._wall_s),
        )
        self._step, self._training_s, self._waiting_s = step, training_s, waiting_s
        self._wall_s, self._cpu_s = wall_s, cpu_s
        return status

    def _memory_bytes(self) -> float:
        if self._cuda_device is None:
            return float(self._process.memory_info().rss)
        import torch

        return float(torch.cuda.max_memory_allocated(self._cuda_device))

    def _utilisation(self, cpu_s: float, wall_s: float) -> float:
        if self._cuda_device is None:
            return cpu_s / wall_s if wall_s > 0 else math.nan
        import torch

        try:
            return torch.cuda.utilization(torch.device(self._cuda_device)) / 100
        except (ImportError, RuntimeError):
            # It needs nvidia-ml-py and a driver that allows the query; a missing number stops nothing.
            return math.nan


class Imbalance(NamedTuple):
    """How much longer the slowest rank works on a step than the mean rank.

    Attributes:
        ratio: busy time of the slowest rank over the mean of all; 1.0 is balanced.
        rank: the slowest rank.
    """

    ratio: float
    rank: int


def imbalance(rows: Sequence[Sequence[float]]) -> Imbalance | None:
    """The imbalance of the ranks' rows; None for one rank or where times are missing.

    Busy time is what counts: the step time itself is the same on all ranks, since the fast ones wait.
    """
    busy_s = [status.step_s * status.busy_fraction for status in map(RankStatus._make, rows)]
    if len(busy_s) < 2 or not all(math.isfinite(s) for s in busy_s) or sum(busy_s) <= 0:
        return None
    slowest = max(range(len(busy_s)), key=busy_s.__getitem__)
    return Imbalance(busy_s[slowest] * len(busy_s) / sum(busy_s), slowest)
