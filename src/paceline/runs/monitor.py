"""The trainer's reporting: metrics, progress and each rank's telemetry."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from paceline.core.config import configuration
from paceline.runs.directory import EpochSteps, RunDirectory
from paceline.runs.metric_writers import (
    JsonlWriter,
    Media,
    RankStatus,
    Telemetry,
    TensorBoardWriter,
    Writer,
    has_tensorboard,
    imbalance,
    keep_until,
)
from paceline.runs.rank_progress import Heartbeat

if TYPE_CHECKING:
    from rich.console import RenderableType


# --- The time of a step by phases, at the cost of one clock reading per mark ---


PHASES = ("data", "forward", "backward", "reduction", "optimizer", "checkpoint", "evaluation", "other")
"""``reduction`` is only the part of the gradient reduction that does not overlap with backward."""

OUTSIDE_STEPS = ("evaluation", "other")
"""Phases outside training steps, which rates and step times exclude."""


class PhaseTime(NamedTuple):
    """One phase's row of the table.

    Attributes:
        share: of the time in all phases, from 0 to 1.
    """

    seconds: float
    share: float


class PhaseTimer:
    """Attributes time to phases by marks at their ends.

    The times are the host's: asynchronous GPU work counts in the phase in which the host waits for it,
    usually the reduction or the reading of the loss.
    """

    __slots__ = ("_last", "seconds")

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._last = perf_counter()

    def mark(self, phase: str) -> None:
        """Add the time since the last mark to ``phase``.

        Raises:
            KeyError: there is no such phase.
        """
        now = perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    def training_s(self) -> float:
        """Return the seconds spent in training steps: all phases but :data:`OUTSIDE_STEPS`."""
        return sum(self.seconds.values()) - sum(self.seconds[phase] for phase in OUTSIDE_STEPS)

    def table(self, since: Mapping[str, float] | None = None) -> dict[str, PhaseTime]:
        """Return seconds and share of every phase, since an earlier copy of ``seconds`` or since the start."""
        spent = {phase: s - (since[phase] if since else 0.0) for phase, s in self.seconds.items()}
        total = sum(spent.values())
        return {phase: PhaseTime(s, s / total if total > 0 else 0.0) for phase, s in spent.items()}


Rows = Sequence[Sequence[float]]


class Monitor:
    """Reports a run. Every rank has one and calls it alike; only rank 0 writes and shows anything.

    Records in ``metrics.jsonl``, one JSON object per line::

        {"kind": "train", "time", "step", "epoch", "loss", "lr", "samples_per_s", "seconds",
         "imbalance", "ranks": [{"rank", "step_ms", "busy", "memory_mib", "utilisation"}, ...]}
        {"kind": "eval", "time", "step", "epoch", "split", "metrics": {name: value}}

    ``time`` is Unix time; ``seconds`` counts the run's time over all restarts; ``epoch`` counts
    from 0 and ``step`` from 1; ``lr`` is that with which the first parameter group took the step, and
    ``learning_rates`` has those of all groups if there are several. ``samples_per_s`` excludes evaluations.
    ``imbalance`` is the slowest rank's busy time over the mean's. ``logged`` has values that the task logs. NaN,
    infinite and unknown numbers are ``null``.

    Args:
        directory: the run's directory, which exists.
        computing: number of computing ranks; later ones are spares, whose idleness is not an imbalance. None: no spare.
        total_steps: of the whole run; None if unknown.
        epochs: where they begin; None if they have no fixed length.
        first_step: steps done before this process started. Records of later steps, from a killed run, are dropped, so
            that no curve has two points for a step.
        log_every: steps between two records.
        log_format: of lines where there is no terminal.
        device: the model's device, whose memory and utilisation are reported.
        trackers: builds experiment trackers from the earlier records; called on rank 0 only.

    Attributes:
        current: the monitor of the run that this process trains.
        per_sample: what a sample has of each unit whose rate is logged, by the rate's name.

    Raises:
        RunDirectoryError: a file in the run directory cannot be written.
    """

    current: ClassVar[Monitor | None] = None

    def __init__(
        self,
        directory: RunDirectory,
        *,
        rank: int,
        world_size: int,
        computing: int | None = None,
        total_steps: int | None,
        epochs: EpochSteps | None,
        first_step: int,
        log_every: int,
        quiet: bool,
        log_format: Literal["text", "json"] = "text",
        device: object,
        tokens_per_sample: float | None = None,
        trackers: Callable[[Sequence[Mapping[str, Any]]], Sequence[Writer]] = lambda earlier: (),
    ) -> None:
        self.rank = rank
        self._world_size = world_size
        self._computing = world_size if computing is None else computing
        self.device = str(device)
        self.timer = PhaseTimer()
        self._telemetry = Telemetry(device, self.timer, first_step)
        self.directory = directory
        self._log_every = log_every
        self.per_sample: dict[str, float] = {} if tokens_per_sample is None else {"tokens_per_s": tokens_per_sample}
        self._total_steps = total_steps
        self._samples = 0
        self._started = perf_counter()
        self._heartbeat = Heartbeat(directory, rank=rank, world_size=world_size, step=first_step)
        self._writers: list[Writer] = []
        Monitor.current = self
        if rank != 0:
            return
        # Imported here, because rich takes 0.1 s and only rank 0 needs it.
        from paceline.runs.console import Terminal

        self._terminal = Terminal(total_steps=total_steps, epochs=epochs, quiet=quiet, log_format=log_format)
        kept = keep_until(directory.metrics, first_step)
        self._on_record = {(r.get("split"), r["step"]) for r in kept if r.get("kind") == "eval"}
        self._earlier_s = next((r["seconds"] for r in reversed(kept) if r.get("kind") == "train"), 0.0)
        self._writers.append(JsonlWriter(directory.metrics))
        hparams = configuration(directory.read_manifest()) if directory.exists() else {}
        if has_tensorboard():
            self._writers.append(TensorBoardWriter(directory.tensorboard, first_step + 1, hparams))
        self._writers.extend(trackers(kept))
        self._logged: Mapping[str, float] = {}
        self._recorded_samples = 0
        self._recorded_s = 0.0
        # Between records, a step is reported only to the terminal, when it is time or an epoch ends.
        self._refresh_s = perf_counter() + self._terminal.interval_s
        self._epochs = epochs

    @property
    def step(self) -> int:
        """Return the number of steps done."""
        return self._heartbeat.step

    def is_due(self, step: int) -> bool:
        """Return whether ``step`` has a record; a pure function of the step, so equal on all ranks."""
        return step % self._log_every == 0 or step == self._total_steps

    def status(self, step: int) -> RankStatus:
        """Return this rank's telemetry for the reduction of ``step``; call it only if a record is due."""
        return self._telemetry.sample(step)

    def on_step_end(
        self,
        step: int,
        epoch: int,
        samples: int,
        loss: float,
        learning_rates: Callable[[], Sequence[float]],
        rows: Callable[[], Rows] = tuple,
        logged: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Report a step; every rank calls it after each step.

        Args:
            step: steps done, including this one.
            epoch: the step's epoch, counted from 0.
            samples: the step's samples over all ranks.
            loss: the step's mean loss.
            learning_rates: returns one per parameter group; called only if the step is shown or recorded.
            rows: returns every rank's :class:`RankStatus`, by rank; called only if a record is due. Empty if unknown.
            logged: values that the task logs; used when a record is due.
        """
        self._heartbeat.step = step
        if self.rank != 0:
            return
        self._samples += samples
        due = self.is_due(step)
        ends_epoch = self._epochs is not None and self._epochs.position(step)[1] == 0
        if not (due or ends_epoch or perf_counter() >= self._refresh_s):
            return
        from paceline.runs.console import ProgressSnapshot

        training_s, rates = self.timer.training_s(), learning_rates()
        if due:
            self._logged = self._record(step, epoch, loss, rates, rows(), training_s, logged)
        rate = rates[0] if rates else None
        self._terminal.progress(ProgressSnapshot(step, epoch, loss, rate, self._samples, training_s, self._logged))
        self._refresh_s = perf_counter() + self._terminal.interval_s

    def _record(
        self,
        step: int,
        epoch: int,
        loss: float,
        rates: Sequence[float],
        rows: Rows,
        training_s: float,
        logged: Mapping[str, float],
    ) -> Mapping[str, float]:
        assert len(rows) in (0, self._world_size), f"{len(rows)} rows for {self._world_size} ranks"
        samples, seconds = self._samples - self._recorded_samples, training_s - self._recorded_s
        self._recorded_samples = self._samples
        self._recorded_s = training_s
        if seconds > 0:
            speeds = {name: float(f"{samples * units / seconds:.5g}") for name, units in self.per_sample.items()}
            logged = {**logged, **speeds}
        slowest = imbalance(rows[: self._computing])
        self._terminal.imbalance(slowest)
        record: dict[str, Any] = {
            "kind": "train",
            "time": round(time.time(), 3),
            "step": step,
            "epoch": epoch,
            "loss": loss,
            "lr": rates[0] if rates else None,
            "samples_per_s": round(samples / seconds, 1) if seconds > 0 else None,
            "seconds": round(self._earlier_s + perf_counter() - self._started, 3),
            "imbalance": round(slowest.ratio, 3) if slowest else None,
            "ranks": [_rank_record(rank, RankStatus._make(row)) for rank, row in enumerate(rows)],
        }
        if len(rates) > 1:
            record["learning_rates"] = list(rates)
        if logged:
            record["logged"] = dict(logged)
        self._write(record)
        return logged

    def set_status(self, text: str) -> None:
        """Show the current activity ("evaluating val") on the terminal until the next step."""
        if self.rank == 0:
            self._terminal.set_status(text)

    def on_eval_end(self, split: str, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Report an evaluation of ``split`` after ``step`` steps.

        An evaluation that is already on record, because the run resumed just before it, is not written again.
        """
        if self.rank != 0:
            return
        self._terminal.on_eval_end(split, step, epoch, metrics)
        if (split, step) in self._on_record:
            return
        self._on_record.add((split, step))
        values = {name: float(value) for name, value in metrics.items()}
        record = {"kind": "eval", "time": round(time.time(), 3), "step": step, "epoch": epoch}
        self._write({**record, "split": split, "metrics": values})

    def note(self, content: RenderableType) -> None:
        """Print a line (or a rich table) above the progress bar and into rank 0's log."""
        if self.rank == 0:
            self._terminal.print(content)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Show the run's summary; ``result`` is the content of ``result.json``."""
        if self.rank == 0:
            for writer in self._writers:
                writer.finish(result)
            self._terminal.close()
            self._terminal.finish(result, self.directory)

    def close(self) -> None:
        """Close the progress bar, the files and the heartbeat; a second call does nothing."""
        self._heartbeat.close()
        if Monitor.current is self:
            Monitor.current = None
        if self.rank == 0:
            self._terminal.close()
        while self._writers:
            self._writers.pop().close()

    def write_media(self, media: Media) -> None:
        """Write an image, a text or a histogram; called on rank 0 only."""
        for writer in self._writers:
            writer.write_media(media)

    def _write(self, record: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.write(record)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _rank_record(rank: int, status: RankStatus) -> dict[str, float]:
    return {
        "rank": rank,
        "step_ms": round(status.step_s * 1e3, 3),
        "busy": round(status.busy_fraction, 3),
        "memory_mib": round(status.memory_bytes / 2**20, 1),
        "utilisation": round(status.utilisation, 3),
    }
