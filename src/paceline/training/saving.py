"""When a state is saved, and what must be on disk before it counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.manifest import CheckpointInfo
from paceline.config import Interval, parse_interval
from paceline.data.ledger import LedgerWriter
from paceline.distributed.reducer import StepSums
from paceline.training.pins import current_pins
from paceline.training.run import Run
from paceline.training.state import Progress


def is_due(every: Interval, progress: Progress) -> bool:
    """Whether something that happens ``every`` so many steps or epochs is due now."""
    if every.steps is not None:
        return progress.step % every.steps == 0
    return every.epochs is not None and progress.step_in_epoch == 0 and progress.epoch % every.epochs == 0


class Saver:
    """Writes the run's checkpoints and ledger, on rank 0; the others only keep time with it.

    Args:
        run: the run.
        resumed_version: the state version that is continued from; None for a new run.
    """

    def __init__(self, run: Run, resumed_version: int | None) -> None:
        self._run = run
        self._every = [parse_interval(text, "checkpoint_every") for text in run.config.checkpoint_every]
        self._pins = current_pins(run.config, run.world.device)
        self._saved_version = resumed_version
        self._saved_at = time.monotonic()
        self._checkpointer: Checkpointer | None = None
        self._ledger: LedgerWriter | None = None
        if run.world.rank == 0:
            self._ledger = LedgerWriter(
                run.directory.ledger,
                run.data.order,
                generation=run.generation,
                parent_version=resumed_version,
            )
            self._checkpointer = Checkpointer(run.directory.checkpoints, run.config.keep)

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

    @property
    def stall_s(self) -> float:
        """Seconds for which saving held the training up so far."""
        return 0.0 if self._checkpointer is None else self._checkpointer.stall_s

    def record_step(self, progress: Progress, epoch: int, step_in_epoch: int, sums: StepSums) -> None:
        """Enter a committed step into the ledger."""
        if self._ledger is None:
            return
        order = self._run.data.order
        # A stream's positions are counted from the start of the run.
        start, stop = (
            (progress.samples - sums.samples, progress.samples)
            if order is None
            else order.batch_range(step_in_epoch)
        )
        self._ledger.append(
            version=progress.version,
            epoch=epoch,
            step=step_in_epoch,
            start=start,
            stop=stop,
            ranks=self._run.world.world_size,
            checksum=sums.checksum,
        )

    def flush_ledger(self) -> None:
        """Hand the ledger's entries to the operating system."""
        if self._ledger is not None:
            self._ledger.flush(sync=False)

    def is_due(self, progress: Progress) -> bool:
        """Whether a save is due by steps or epochs."""
        return any(is_due(every, progress) for every in self._every)

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

        def flush() -> None:
            ledger.flush(sync=True)
            directory.append_event("checkpoint", step=step, version=version)

        return flush

    def _info(self, progress: Progress) -> CheckpointInfo:
        return CheckpointInfo(
            task=self._run.task_name,
            run=self._run.run_id,
            step=progress.step,
            state_version=progress.version,
            epoch=progress.epoch,
            generation=self._run.generation,
            shards=self._run.num_shards,
            pins=self._pins,
            best_version=progress.best_version,
        )
