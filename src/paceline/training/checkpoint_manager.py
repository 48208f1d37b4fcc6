"""When checkpoints are saved, and what must be on disk before they count."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from paceline.core.errors import (
    CheckpointError,
    CheckpointWriteError,
    RunDirectoryWriteError,
    StopRequested,
)
from paceline.data.ledger import LedgerEntry, LedgerWriter, last_recorded_version, superseded_at
from paceline.parallel.reducer import StepSums
from paceline.parallel.reduction_tree import equal_work_split
from paceline.parallel.world import World
from paceline.runs.checkpoint_manifest import CheckpointInfo
from paceline.runs.checkpoint_shards import Writers
from paceline.runs.checkpoint_store import holds_version, newest_verified
from paceline.runs.checkpointer import Checkpointer
from paceline.runs.failures import SupersededError
from paceline.training.control import is_due
from paceline.training.reproducibility import numerics_fingerprint
from paceline.training.run_context import RunContext
from paceline.training.state import TrainProgress

_log = logging.getLogger(__name__)

# --- Each process's checkpointer and backup, for all groups of the process ---


_BACKUP_END_S = 60.0  # how long the run's end waits for its last backup
_BACKUP_STOP_S = 5.0  # how long a stop does: launchers kill after 10 s, and the checkpoint was written before


@contextmanager
def open_checkpointer(run: RunContext) -> Iterator[Checkpointer]:
    """Open a checkpointer for ``run``; each commit writes an event and, with ``--backup-to``, is copied."""

    def committed(path: Path, info: CheckpointInfo) -> None:
        run.directory.append_event("checkpoint", step=info.step, version=info.state_version)
        if run.backup is not None:
            run.backup.take(path, info)

    checkpointer = Checkpointer(run.directory.checkpoints, run.config.records.keep_checkpoints, committed)
    patience_s = 0.0
    try:
        yield checkpointer
        patience_s = _BACKUP_END_S  # an error does not wait for another disk
    except StopRequested:
        patience_s = _BACKUP_STOP_S
        raise
    finally:
        try:
            checkpointer.close()
        except CheckpointError as error:
            # The callers that needed it have waited for it; this process ends for another reason.
            _log.warning("%s", error)
        if run.backup is not None:
            run.backup.close(patience_s)


# --- When a state is saved, and the files that must be on disk before it counts ---


LAST_TRIES_S = (1.0, 2.0, 4.0, 8.0)
"""Seconds between the tries to write a file without which the run cannot end."""

_MOST_UNSURE_BYTES = 2**20  # of the ledger, which a run that never saves would keep in memory
_FLUSH_EVERY = 64
_LONG_WAIT_S = 1.0
RECENT_STEPS = 4 * _FLUSH_EVERY
"""Number of steps whose ledger entries each rank keeps: more than a dead rank 0 can have buffered."""


def retry(write: Callable[[], None]) -> None:
    """Write a file without which the run cannot end; retry for a while if the disk fails.

    Raises:
        CheckpointWriteError, RunDirectoryWriteError, OSError: the last try failed too.
    """
    for delay_s in LAST_TRIES_S:
        try:
            return write()
        except (CheckpointWriteError, RunDirectoryWriteError, OSError) as error:
            _log.warning("%s Trying again in %g s.", error, delay_s)
            time.sleep(delay_s)
    return write()


class CheckpointManager:
    """Writes the run's checkpoints and ledger on rank 0; on other ranks it only keeps the same schedule.

    A disk that is full or fails does not end the training: a warning says so, earlier checkpoints stay, and the next
    due save retries.

    Args:
        progress: the position of the initial state.
        recent: the last steps' ledger entries that this rank has; kept up to date. A new rank 0 writes those that an
            earlier one did not write.
        checkpointer: this process's; it continues to write after this rank left the group.
        copies: whether the last rank keeps a copy of the best model in memory, in case rank 0 dies before it has
            written it.
        writer: this rank's number among those that save a shard, and their number; number -1 saves none. None: rank 0
            saves the whole state.

    Attributes:
        save_s: the longest time from the beginning of a save to its commit so far.
    """

    def __init__(
        self,
        run: RunContext,
        world: World,
        progress: TrainProgress,
        recent: deque[LedgerEntry],
        checkpointer: Checkpointer,
        *,
        copies: bool,
        writer: tuple[int, int] | None,
    ) -> None:
        self._run = run
        self._world = world
        self._recent = recent
        self._checkpointer = checkpointer
        self._copies = copies and 0 < world.rank == world.world_size - 1
        self._writer = writer
        self._parted = threading.Event()
        self._every = run.config.records.checkpoint_every
        self._numerics = numerics_fingerprint(run.config, run.device)
        self._saved_version: int | None = None
        self._saved_at = time.monotonic()
        self._told_of_wait = False
        self.save_s = 0.0
        self._ledger: LedgerWriter | None = None
        self._ledger_fails = False
        if world.rank == 0:
            self._ledger = self._open_ledger(progress.version)
            if holds_version(run.directory.checkpoints, progress.version):
                self._saved_version = progress.version

    def close(self) -> None:
        """Close the ledger."""
        self._parted.set()
        if self._ledger is not None:
            # The steps that it failed to write are in `recent`, on every rank.
            self._write_with_retry(self._ledger.close)

    def _open_ledger(self, version: int) -> LedgerWriter:
        """Open this group's file, which records the steps from the state on disk to ``version``."""
        directory = self._run.directory.ledger
        recorded = last_recorded_version(directory)
        missing = [entry for entry in self._recent if (recorded or 0) < entry.version <= version]
        ledger = LedgerWriter(
            directory,
            self._run.data.order,
            generation=self._world.generation,
            parent_version=recorded if missing else version or None,
        )
        self._write_with_retry(partial(ledger.flush, sync=True))
        for entry in missing:
            ledger.append(**entry._asdict())
        self._write_with_retry(partial(ledger.flush, sync=False))
        return ledger

    def _write_with_retry(self, write: Callable[[], None]) -> None:
        """Write to the ledger; report once that the disk fails, and once that it works again."""
        try:
            write()
        except RunDirectoryWriteError as error:
            if not self._ledger_fails:
                _log.warning("%s Training continues; the ledger's entries wait in memory.", error)
            self._ledger_fails = True
        else:
            if self._ledger_fails:
                _log.warning("the ledger is written again, and complete.")
            self._ledger_fails = False

    @property
    def stall_s(self) -> float:
        """Seconds for which saving has blocked the training so far."""
        return self._checkpointer.stall_s

    def record_step(
        self, progress: TrainProgress, epoch: int, step_in_epoch: int, sums: StepSums, work_split: Sequence[int]
    ) -> None:
        """Record a committed step in the ledger; ``work_split`` are each rank's numbers of micro-batches."""
        order = self._run.data.order
        # A stream's positions are counted from the start of the run.
        start, stop = (
            (progress.samples - sums.samples, progress.samples) if order is None else order.batch_range(step_in_epoch)
        )
        entry = LedgerEntry(
            progress.version, epoch, step_in_epoch, start, stop, _ranks(tuple(work_split)), sums.checksum
        )
        self._recent.append(entry)
        if self._ledger is not None:
            self._ledger.append(**entry._asdict())
            if progress.step % _FLUSH_EVERY == 0:
                sync = self._ledger.unsure > _MOST_UNSURE_BYTES
                self._write_with_retry(partial(self._ledger.flush, sync=sync))
            self._warn_on_failure(self._checkpointer.poll, progress)

    def flush_ledger(self) -> None:
        """Hand the ledger's entries to the operating system."""
        if self._ledger is not None:
            self._write_with_retry(partial(self._ledger.flush, sync=False))

    def is_due(self, progress: TrainProgress) -> bool:
        """Return whether a save is due by steps or epochs, or because this is the best model so far."""
        since = self._run.schedule.sync_schedule.interval_start(progress)
        return progress.best_version == progress.version or any(is_due(every, progress, since) for every in self._every)

    def is_due_by_clock(self) -> bool:
        """Return whether a save is due by rank 0's clock; the control flags carry it to the others."""
        return self._ledger is not None and any(
            every.seconds is not None and time.monotonic() - self._saved_at >= every.seconds for every in self._every
        )

    def save(self, state: Mapping[str, Any], progress: TrainProgress, *, last: bool = False) -> None:
        """Save the state in the background, once for each version of it; all ranks call this together.

        Args:
            last: whether it is the run's last save: wait until it is on disk, and retry for a while if the disk fails.

        Raises:
            CheckpointError: the state cannot be saved, or the last one could not be.
        """
        is_best = progress.best_version == progress.version
        if self._writer is None and self._ledger is None:  # rank 0 saves the whole state
            if self._copies and is_best:
                self._checkpointer.keep_in_memory(state, self._info(progress))
        else:
            # No rank keeps a best model's shards for a later try.
            self._try_to_save(state, progress, waits=last or (self._writer is not None and is_best), last=last)
        self._saved_at = time.monotonic()

    def _try_to_save(self, state: Mapping[str, Any], progress: TrainProgress, *, waits: bool, last: bool) -> None:
        """Begin a save; if it ``waits``, end it, and try again for a while if it fails."""
        attempt = self._try_whole if self._writer is None else self._try_shards
        for delay_s in (*LAST_TRIES_S, None) if waits else (None,):
            problem = attempt(state, progress, waits=waits)
            if problem is None:
                return
            if self._world.rank == 0:
                self._fail(problem, progress, delay_s, last=last)
            if delay_s is not None:
                time.sleep(delay_s)
        if last:
            found = newest_verified(self._run.directory.checkpoints)
            kept = "no checkpoint of this run is on disk"
            if found.path is not None and found.manifest is not None:
                kept = f"the newest checkpoint kept is {found.path.name}, after step {found.manifest.info.step}"
            raise CheckpointError(
                f"{problem} This was the last save, tried {len(LAST_TRIES_S) + 1} times; {kept}. "
                f"Then continue with: paceline resume {self._run.directory.path}"
            )

    def _fail(self, problem: str, progress: TrainProgress, delay_s: float | None, *, last: bool) -> None:
        """Report a save that failed; the next one due, or the next try, repeats it."""
        self._saved_version = None
        if delay_s is not None:
            _log.warning("%s Trying again in %g s.", problem, delay_s)
        elif not last:
            _log.warning("%s Training continues; the next try is %s.", problem, self._next_try(progress))
        self._run.directory.append_event("checkpoint failed", step=progress.step, error=problem)

    def _try_whole(self, state: Mapping[str, Any], progress: TrainProgress, *, waits: bool) -> str | None:
        """Begin a save of the whole state, and end it if it ``waits``; return why it failed."""
        self._wait_for_previous(progress)
        try:
            if progress.version != self._saved_version:
                self._saved_version = progress.version  # before the save, because a failure resets it
                before_commit = self._before_commit(progress.version)
                self._checkpointer.save(state, self._info(progress), before_commit=before_commit, copies=not waits)
            if waits:
                self._end_save()
        except (CheckpointWriteError, RunDirectoryWriteError) as error:
            return str(error)
        return None

    def _end_save(self) -> None:
        """Return when the save, the ledger, and a best model whose save failed before, are on disk."""
        self._checkpointer.wait()
        if self._ledger is not None:
            self._ledger.flush(sync=True)
        self._checkpointer.flush_pending()

    def _try_shards(self, state: Mapping[str, Any], progress: TrainProgress, *, waits: bool) -> str | None:
        """Begin a save with the other ranks, and end it if it ``waits``; return why it failed, the same on all."""
        assert self._writer is not None
        number, count = self._writer
        draft, problem = None, None
        if self._world.rank == 0:
            self._wait_for_previous(progress)
            try:
                draft = str(self._checkpointer.open_draft()) if progress.version != self._saved_version else None
            except CheckpointWriteError as error:
                problem = str(error)
        else:
            with suppress(CheckpointWriteError):  # of which rank 0 says what follows
                self._checkpointer.wait()
        draft, problem = self._world.broadcast_object([draft, problem])
        if draft is not None and number >= 0:
            writers = Writers(number, count, self._run.directory.checkpoints / Path(draft).name, self._parted)
            before_commit = None if self._world.rank else self._before_commit(progress.version)
            self._saved_version = progress.version
            self._checkpointer.save(
                *(state, self._info(progress)), before_commit=before_commit, writers=writers, copies=not waits
            )
        if waits and problem is None:
            try:
                self._end_save()
            except (CheckpointWriteError, RunDirectoryWriteError) as error:
                problem = str(error)
            problem = self._world.broadcast_object(problem)
        return None if problem is None else str(problem)

    def _wait_for_previous(self, progress: TrainProgress) -> None:
        """Wait for a save that is still being written: each one that is due is made, with one copy of the state."""
        before, is_another = self.stall_s, progress.version != self._saved_version
        self._warn_on_failure(self._checkpointer.wait, progress)
        if is_another and (waited_s := self.stall_s - before) >= _LONG_WAIT_S and not self._told_of_wait:
            self._told_of_wait = True
            _log.warning(
                "the save after step %d waited %.1f s, until the one before was written: the disk needs longer than "
                "the training from one save to the next. Save less often, by --checkpoint-every.",
                progress.step,
                waited_s,
            )

    def _warn_on_failure(self, call: Callable[[], None], progress: TrainProgress) -> None:
        """Call; if this or an earlier save failed, warn, and let the next due save retry."""
        try:
            call()
        except SupersededError:
            self._saved_version = None
        except CheckpointWriteError as error:
            self._fail(str(error), progress, None, last=False)

    def _next_try(self, progress: TrainProgress) -> str:
        tries = [
            f"after step {-(-progress.step // every.steps) * every.steps}"
            for every in self._every
            if every.steps is not None
        ]
        tries += ["at an epoch's end" for every in self._every if every.epochs is not None]
        tries += [f"in {every.seconds:g} s" for every in self._every if every.seconds is not None]
        return " or ".join(dict.fromkeys(tries)) or "at the end of the run"

    def _before_commit(self, version: int) -> Callable[[], None]:
        """Return what to run before a commit: a checkpoint counts only with the ledger of all its steps on disk."""
        ledger, directory, generation = self._ledger, self._run.directory.ledger, self._world.generation
        assert ledger is not None
        began = time.monotonic()

        def flush() -> None:
            later = superseded_at(directory, generation)
            if later is not None and later < version:
                raise SupersededError(f"the run continued from state version {later}, without {version}.")
            ledger.flush(sync=True)
            self.save_s = max(self.save_s, time.monotonic() - began)

        return flush

    def _info(self, progress: TrainProgress) -> CheckpointInfo:
        return CheckpointInfo(
            task=self._run.task_name,
            run=self._run.run_id,
            step=progress.step,
            state_version=progress.version,
            epoch=progress.epoch,
            generation=self._world.generation,
            microbatches=self._run.num_microbatches,
            pins=self._numerics,
            best_version=progress.best_version,
        )


@lru_cache(maxsize=1)
def _ranks(work_split: tuple[int, ...]) -> int | tuple[int, ...]:
    """Return the ledger's form of the work split: the number of ranks, or each one's first micro-batch."""
    if work_split == equal_work_split(sum(work_split), len(work_split)):
        return len(work_split)
    return (0, *itertools.accumulate(work_split[:-1]))
