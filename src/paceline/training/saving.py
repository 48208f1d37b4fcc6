"""When a state is saved, and what must be on disk before it counts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.manifest import CheckpointInfo
from paceline.checkpoint.storage import holds_version
from paceline.config import parse_interval
from paceline.data.ledger import LedgerEntry, LedgerWriter, recorded_until
from paceline.distributed.reducer import StepSums
from paceline.distributed.world import World
from paceline.training.pins import current_pins
from paceline.training.run import Run
from paceline.training.schedule import is_due
from paceline.training.state import Progress

_FLUSH_EVERY = 64
RECENT_STEPS = 4 * _FLUSH_EVERY
"""How many steps' ledger entries each rank keeps: more than a dead rank 0 can have kept to itself."""


class Saver:
    """Writes the run's checkpoints and ledger, on rank 0; the others only keep time with it.

    Attributes:
        save_s: the longest time from the beginning of a save to its commit so far.

    Args:
        run: the run.
        world: the ranks.
        progress: where the state stands that is continued from.
        recent: the last steps' ledger entries as far as this rank knows them; kept up to date. A new
            rank 0 writes those that an earlier one did not get to disk.
    """

    def __init__(self, run: Run, world: World, progress: Progress, recent: deque[LedgerEntry]) -> None:
        self._run = run
        self._world = world
        self._recent = recent
        self._every = [parse_interval(text, "checkpoint_every") for text in run.config.checkpoint_every]
        self._pins = current_pins(run.config, run.device)
        self._saved_version: int | None = None
        self._saved_at = time.monotonic()
        self.save_s = 0.0
        self._checkpointer: Checkpointer | None = None
        self._ledger: LedgerWriter | None = None
        if world.rank == 0:
            self._ledger = self._open_ledger(progress.version)
            self._checkpointer = Checkpointer(run.directory.checkpoints, run.config.keep)
            if holds_version(run.directory.checkpoints, progress.version):
                self._saved_version = progress.version

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._checkpointer is not None and self._ledger is not None:
            try:
                self._checkpointer.__exit__(kind, error, trace)
            finally:
                self._ledger.close()

    def _open_ledger(self, version: int) -> LedgerWriter:
        """This generation's file, which says how the state got from what is on disk to ``version``."""
        directory = self._run.directory.ledger
        recorded = recorded_until(directory)
        missing = [entry for entry in self._recent if (recorded or 0) < entry.version <= version]
        ledger = LedgerWriter(
            directory,
            self._run.data.order,
            generation=self._world.generation,
            parent_version=recorded if missing else version or None,
        )
        for entry in missing:
            ledger.append(**entry._asdict())
        ledger.flush(sync=False)
        return ledger

    @property
    def stall_s(self) -> float:
        """Seconds for which saving held the training up so far."""
        return 0.0 if self._checkpointer is None else self._checkpointer.stall_s

    def record_step(self, progress: Progress, epoch: int, step_in_epoch: int, sums: StepSums) -> None:
        """Enter a committed step into the ledger."""
        order = self._run.data.order
        # A stream's positions are counted from the start of the run.
        start, stop = (
            (progress.samples - sums.samples, progress.samples)
            if order is None
            else order.batch_range(step_in_epoch)
        )
        entry = LedgerEntry(
            progress.version, epoch, step_in_epoch, start, stop, self._world.world_size, sums.checksum
        )
        self._recent.append(entry)
        if self._ledger is not None:
            self._ledger.append(**entry._asdict())
            if progress.step % _FLUSH_EVERY == 0:
                self._ledger.flush(sync=False)

    def flush_ledger(self) -> None:
        """Hand the ledger's entries to the operating system."""
        if self._ledger is not None:
            self._ledger.flush(sync=False)

    def is_due(self, progress: Progress) -> bool:
        """Whether a save is due by steps or epochs, or because this is the best model so far."""
        return progress.best_version == progress.version or any(
            is_due(every, progress) for every in self._every
        )

    def is_due_by_clock(self) -> bool:
        """Whether a save is due by rank 0's clock; the control word tells the others."""
        return self._checkpointer is not None and any(
            every.seconds is not None and time.monotonic() - self._saved_at >= every.seconds
            for every in self._every
        )

    def save(self, state: Mapping[str, Any], progress: Progress, *, synchronous: bool = False) -> None:
        """Save the state in the background, once for each version of it.

        Raises:
            CheckpointError: this save, or an earlier one in the background, failed.
        """
        if self._checkpointer is not None:
            if progress.version != self._saved_version:
                self._checkpointer.save(
                    state,
                    self._info(progress),
                    before_commit=self._before_commit(progress.step, progress.version),
                )
            if synchronous:
                self._checkpointer.wait()
        self._saved_version = progress.version
        self._saved_at = time.monotonic()

    def _before_commit(self, step: int, version: int) -> Callable[[], None]:
        """A checkpoint counts only with the ledger of all its steps on disk."""
        ledger, directory = self._ledger, self._run.directory
        assert ledger is not None
        began = time.monotonic()

        def flush() -> None:
            ledger.flush(sync=True)
            self.save_s = max(self.save_s, time.monotonic() - began)
            directory.append_event("checkpoint", step=step, version=version)

        return flush

    def _info(self, progress: Progress) -> CheckpointInfo:
        return CheckpointInfo(
            task=self._run.task_name,
            run=self._run.run_id,
            step=progress.step,
            state_version=progress.version,
            epoch=progress.epoch,
            generation=self._world.generation,
            shards=self._run.num_shards,
            pins=self._pins,
            best_version=progress.best_version,
        )
