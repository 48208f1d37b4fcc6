"""Two runs that take turns: while one trains for a second, the other is stopped; no torch is imported.

A machine whose speed changes from minute to minute makes runs that follow one another differ by more than an option
costs. Runs in turns meet the same minutes.
"""

from __future__ import annotations

import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks.rounds import BenchCommand, Sample, Variant, end_processes, family, log_tails, started
from paceline.core.errors import LaunchError
from paceline.core.signals import interrupt_on_sigterm

STAMPS = "stamps"
"""The file in a run's directory with the moments when steps began: CLOCK_MONOTONIC seconds, doubles of 8 bytes."""

_WARMUP_TIMEOUT_S = 300.0
_POLL_S = 0.1

Turn = tuple[float, float]
"""When a turn began and ended, in seconds of CLOCK_MONOTONIC."""


class _StoppableRun:
    """A run that is stopped and continued as a whole."""

    def __init__(self, contender: Variant, directory: Path, commands: Sequence[BenchCommand]) -> None:
        self.contender, self.directory = contender, directory
        self.processes = [started(command, directory, index) for index, command in enumerate(commands)]
        self._members: Sequence[psutil.Process] = []

    def stop(self) -> None:
        """Stop all of its processes."""
        self.check()
        self._members = family({process.pid for process in self.processes})
        for member in self._members:
            with suppress(psutil.NoSuchProcess):
                member.suspend()

    def resume(self) -> None:
        """Let its processes continue."""
        self.check()
        for member in self._members:
            with suppress(psutil.NoSuchProcess):
                member.resume()

    def check(self) -> None:
        """Raise if a process has ended."""
        for process in self.processes:
            if (code := process.poll()) is not None:
                raise LaunchError(
                    f"bench: {self.contender.title} ended with exit code {code} while it was measured."
                    f"{log_tails(self.directory)}"
                )

    def stamps(self) -> Sequence[float]:
        """Return the moments when steps began, in seconds."""
        path = self.directory / STAMPS
        data = path.read_bytes() if path.exists() else b""
        return [moment for (moment,) in struct.iter_unpack("d", data[: len(data) // 8 * 8])]


def take_turns(
    contenders: Sequence[Variant],
    *,
    warmup: int,
    rounds: int,
    turns: int,
    turn_s: float,
    on_sample: Callable[[int, Variant, Sample], None],
) -> dict[str, list[Sample]]:
    """Let contenders train for a turn each, the first one last in every second turn.

    Args:
        contenders: each writes :data:`STAMPS` into its directory, and trains until it is ended.
        warmup: steps of each before the first turn.
        rounds: samples to take of each.
        turns: of a round.
        turn_s: seconds of a turn.
        on_sample: called with the round's number, from 1, and what was measured.

    Returns:
        Contender's name -> one sample a round: milliseconds a step, over the steps that lie wholly within its turns.

    Raises:
        LaunchError: a process failed or hung; all of them have been ended.
    """
    with interrupt_on_sigterm(), _all_started(contenders) as runs:
        for run in runs:
            _await_warmup(run, warmup)
            run.stop()
        samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
        for number in range(rounds):
            taken: list[list[Turn]] = [[] for _ in runs]
            for turn in range(turns):
                order = list(zip(runs, taken, strict=True))
                for run, own in reversed(order) if turn % 2 else order:
                    own.append(_let_run(run, turn_s))
            for run, own in zip(runs, taken, strict=True):
                sample = _measure(run, own)
                samples[run.contender.name].append(sample)
                on_sample(number + 1, run.contender, sample)
        return samples


def _let_run(run: _StoppableRun, turn_s: float) -> Turn:
    run.resume()
    began = time.monotonic()
    time.sleep(turn_s)
    ended = time.monotonic()
    run.stop()
    return began, ended


def _measure(run: _StoppableRun, turns: Sequence[Turn]) -> Sample:
    stamps = run.stamps()
    steps, seconds = 0, 0.0
    for began, ended in turns:
        inside = [moment for moment in stamps if began <= moment <= ended]
        if len(inside) > 1:
            steps += len(inside) - 1
            seconds += inside[-1] - inside[0]
    if not steps:
        raise LaunchError(f"bench: {run.contender.title} finished no step within its turns.{log_tails(run.directory)}")
    return {"steps": steps, "seconds": seconds, "ms_per_step": 1000 * seconds / steps}


def _await_warmup(run: _StoppableRun, steps: int) -> None:
    deadline_s = time.monotonic() + _WARMUP_TIMEOUT_S
    while len(run.stamps()) < steps:
        run.check()
        if time.monotonic() > deadline_s:
            raise LaunchError(
                f"bench: {run.contender.title} did not train {steps} steps within {_WARMUP_TIMEOUT_S / 60:.0f} minutes."
                f"{log_tails(run.directory)}"
            )
        time.sleep(_POLL_S)


@contextmanager
def _all_started(contenders: Sequence[Variant]) -> Iterator[Sequence[_StoppableRun]]:
    runs: list[_StoppableRun] = []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        try:
            for contender in contenders:
                directory = Path(name, contender.name)
                os.mkdir(directory)
                runs.append(_StoppableRun(contender, directory, contender.commands(directory)))
            yield runs
        finally:
            processes = [process for run in runs for process in run.processes]
            for member in family({process.pid for process in processes}):
                with suppress(psutil.NoSuchProcess):
                    member.kill()  # a stopped process does not end politely
            end_processes(processes)
