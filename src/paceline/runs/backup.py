"""Copies of a run's checkpoints in another directory or an object store, made in the background, and brought back."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, cast

from paceline.core.built_in import PARTS
from paceline.core.errors import CheckpointError, PacelineError
from paceline.core.files import check_location, is_address
from paceline.core.ownership import own_prefix
from paceline.core.plugins import import_object
from paceline.runs.checkpoint_manifest import CheckpointInfo
from paceline.runs.checkpoint_store import copy, find_version, holds_version, newest_verified, prune, remove_stale
from paceline.runs.directory import RunDirectory, backup_path


class BackupStore(Protocol):
    """Where copies of a run's checkpoints are. Rank 0 uses it, one thread at a time."""

    def claim(self, run_id: str) -> None:
        """Check, before the training, that this run can be copied here, and that no other process copies one here.

        Raises:
            ConfigError: it cannot be; the message says why.
        """

    def save(self, checkpoint: Path, info: CheckpointInfo) -> None:
        """Copy a committed checkpoint, and the best one if it is not here; then delete old ones.

        Raises:
            CheckpointError, OSError: it was not copied. Earlier copies are as they were.
        """

    def restore(self, run_id: str) -> tuple[Path | None, tuple[str, ...]]:
        """Copy the newest checkpoint that verifies back into the run, and the best one with it.

        Returns:
            The copy, or None if none verifies; and the reasons why newer ones cannot be used.

        Raises:
            CheckpointWriteError: the disk cannot take it.
        """

    def close(self) -> None:
        """Copy the files that the run wrote after its last checkpoint; another process may then copy it here.

        Raises:
            CheckpointError: it cannot be copied.
        """


class DirectoryBackup(BackupStore):
    """A directory, in which each run has a folder."""

    def __init__(self, location: str, run: RunDirectory, keep: int) -> None:
        self._location = location
        self._run = run
        self._keep = keep

    def claim(self, run_id: str) -> None:
        pass  # the run's lock keeps others away

    def save(self, checkpoint: Path, info: CheckpointInfo) -> None:
        directory = backup_path(self._location, info.run)
        remove_stale(directory)
        best = info.best_version
        if best is not None and best != info.state_version and not holds_version(directory, best):
            copy(find_version(checkpoint.parent, best), directory)
        prune(directory, self._keep, copy(checkpoint, directory))

    def restore(self, run_id: str) -> tuple[Path | None, tuple[str, ...]]:
        backup, directory = backup_path(self._location, run_id), self._run.checkpoints
        found = newest_verified(backup)
        if found.path is None or found.manifest is None:
            return None, found.skipped
        best = found.manifest.info.best_version
        if best is not None and best != found.manifest.info.state_version and holds_version(backup, best):
            copy(find_version(backup, best), directory)
        return copy(found.path, directory), found.skipped

    def close(self) -> None:
        pass


def open_backup(location: str, run: RunDirectory, keep: int) -> BackupStore:
    """Return the store of ``--backup-to`` without touching it."""
    kind = import_object(PARTS["--backup-to"]) if is_address(location) else DirectoryBackup
    return cast(BackupStore, kind(location, run, keep))


@contextmanager
def open_run(run: str | Path, which: str | None = None) -> Iterator[RunDirectory]:
    """Yield the directory of a run, or a copy of the run at an address, which is removed afterwards.

    Args:
        run: the directory or the address.
        which: the checkpoint that is read, if it is the one after a number of steps.

    Raises:
        ConfigError: the store cannot be read, or holds no run there.
        CheckpointError: no checkpoint there verifies.
    """
    if not is_address(run):
        yield RunDirectory(Path(run))
        return
    check_location(str(run), "the run")
    with tempfile.TemporaryDirectory(prefix=own_prefix("run")) as folder:
        directory = RunDirectory(Path(folder) / "run")
        import_object(PARTS["--backup-to"])(run, directory).fetch(which)
        yield directory


class Backup:
    """Copies each checkpoint given to :meth:`take`, and the best one, in a thread of its own.

    The thread has the lowest priority, and training does not wait for it. If checkpoints come faster than it can copy
    them, it copies only the newest. A failed copy is repeated after 1, 2, 4, ... seconds, at most a minute.

    Attributes:
        missing: the newest checkpoint that was given and not copied.

    Args:
        store: where the copies go; the thread closes it.
        copied: the thread calls it with each copied checkpoint.
        failed: the thread calls it with the error of the first failed try of each.
    """

    def __init__(
        self,
        store: BackupStore,
        copied: Callable[[CheckpointInfo], None],
        failed: Callable[[PacelineError, CheckpointInfo], None],
    ) -> None:
        self.missing: CheckpointInfo | None = None
        self._store = store
        self._copied = copied
        self._failed = failed
        self._changed = threading.Condition()
        self._next: tuple[Path, CheckpointInfo] | None = None
        self._closing = False
        # A daemon, so that the process can end without waiting for a slow remote disk.
        self._thread = threading.Thread(target=self._serve, name="paceline-backup", daemon=True)
        self._thread.start()

    def take(self, checkpoint: Path, info: CheckpointInfo) -> None:
        """Queue a committed checkpoint for copying; returns at once."""
        with self._changed:
            # A deferred best model can come after a newer state, and is copied with that one.
            if self._next is None or info.state_version > self._next[1].state_version:
                self._next = checkpoint, info
                self.missing = info
            self._changed.notify_all()

    def finish(self, timeout_s: float) -> bool:
        """Wait until the last checkpoint is copied or has failed for ten seconds, and end the thread.

        Returns:
            Whether it ended in time.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        tries = 0
        while (due := self._wait_for_next()) is not None:
            checkpoint, info = due
            try:
                self._store.save(checkpoint, info)
            except (PacelineError, OSError) as error:
                if not checkpoint.exists():  # retention deleted it, and a newer one is next
                    continue
                tries += 1
                if tries == 1:
                    self._failed(CheckpointError(str(error)), info)
                if not self._wait_to_retry(due, tries):
                    break
            else:
                tries = 0
                with self._changed:
                    if self.missing is info:
                        self.missing = None
                self._copied(info)
        with suppress(PacelineError, OSError):
            self._store.close()

    def _wait_for_next(self) -> tuple[Path, CheckpointInfo] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._closing)
            due, self._next = self._next, None
            return due

    def _wait_to_retry(self, due: tuple[Path, CheckpointInfo], tries: int) -> bool:
        """Queue a failed copy again, unless there is a newer one, and wait; return False to give up at the end."""
        with self._changed:
            if self._closing and tries > _TRIES_AT_END:
                return False
            self._next = self._next or due
            self._changed.wait_for(lambda: self._closing, min(2.0 ** (tries - 1), _LONGEST_WAIT_S))
            if self._closing:
                self._changed.wait(min(1.0, _LONGEST_WAIT_S))
            return True


_LONGEST_WAIT_S = 60.0
_TRIES_AT_END = 4
