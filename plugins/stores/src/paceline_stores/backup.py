"""``--backup-to``: a thread that copies a run's checkpoints into another directory or an object store."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from paceline.core.errors import PacelineError
from paceline.core.files import is_address
from paceline.runs.checkpoint_manifest import CheckpointInfo
from paceline.runs.checkpoint_store import copy, find_version, holds_version, newest_verified, prune, remove_stale
from paceline.runs.directory import RunDirectory, backup_path
from paceline_stores.run_store import ObjectRunStore

_log = logging.getLogger(__name__)
_LONGEST_WAIT_S = 60.0
_TRIES_AT_END = 4


class BackupStore(Protocol):
    """Where copies of a run's checkpoints are. One thread at a time uses it."""

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


class Backup:
    """Copies each checkpoint given to :meth:`take`, and the best one, in a thread of its own; a ``RunBackup``.

    The thread has the lowest priority, and training does not wait for it. If checkpoints come faster than it can copy
    them, it copies only the newest. A failed copy is repeated after 1, 2, 4, ... seconds, at most a minute; an event
    and a warning report the first failure of each. Nothing is touched before the first call.

    Args:
        location: a directory or an address.
        run: the run's directory.
        keep: number of last checkpoints to keep, besides the best.
        store: where the copies go; by default as the location says.
    """

    def __init__(self, location: str, run: RunDirectory, keep: int, store: BackupStore | None = None) -> None:
        self._location = location
        self._run = run
        by_place = ObjectRunStore if is_address(location) else DirectoryBackup
        self._store: BackupStore = store or by_place(location, run, keep)
        self._changed = threading.Condition()
        self._next: tuple[Path, CheckpointInfo] | None = None
        self._missing: CheckpointInfo | None = None  # the newest that was given and not copied
        self._closing = False
        self._reports = False
        self._thread: threading.Thread | None = None

    def claim(self, run_id: str) -> None:
        self._store.claim(run_id)

    def restore(self, run_id: str) -> tuple[Path | None, tuple[str, ...]]:
        return self._store.restore(run_id)

    def take(self, checkpoint: Path, info: CheckpointInfo) -> None:
        if self._thread is None:
            # A daemon, so that the process can end without waiting for a slow remote disk.
            self._thread = threading.Thread(target=self._serve, name="paceline-backup", daemon=True)
            self._thread.start()
        with self._changed:
            # A deferred best model can come after a newer state, and is copied with that one.
            if self._next is None or info.state_version > self._next[1].state_version:
                self._next = checkpoint, info
                self._missing = info
            self._changed.notify_all()

    def close(self, patience_s: float) -> None:
        """End the thread once the last checkpoint is copied, or has failed for ten seconds."""
        if self._thread is None:
            return self._store.close()
        self._reports = patience_s > 0
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(patience_s)
        if self._reports and (missing := self._missing) is not None:
            why = f"was not complete after {patience_s:g} s" if self._thread.is_alive() else "failed"
            _log.warning("%s lacks the checkpoint of step %d: its copy %s.", self._location, missing.step, why)

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
                    self._run.append_event("backup failed", step=info.step, error=str(error))
                    what = "no backup of step %d yet: %s Training continues, and the copy is repeated."
                    _log.warning(what, info.step, error)
                if not self._wait_to_retry(due, tries):
                    break
            else:
                tries = 0
                with self._changed:
                    if self._missing is info:
                        self._missing = None
                self._run.append_event("backup", step=info.step, version=info.state_version)
                if self._reports:
                    _log.info("%s has the checkpoint of step %d.", self._location, info.step)
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
