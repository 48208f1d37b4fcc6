"""Copies of a run's checkpoints in another directory, made in the background, and brought back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from paceline.core.errors import CheckpointError
from paceline.runs.checkpoint_manifest import CheckpointInfo
from paceline.runs.checkpoint_store import (
    copy,
    find_version,
    holds_version,
    newest_verified,
    prune,
    remove_stale,
)


class Backup:
    """Copies each checkpoint given to :meth:`take`, and the best one, in a thread of its own.

    The thread has the lowest priority, and training does not wait for it. If checkpoints come faster than it can copy
    them, it copies only the newest. A failed copy is retried with the next checkpoint.

    Args:
        directory: the backup directory; created with the first copy.
        keep: number of last copies to keep, besides the best.
        copied: the thread calls it with each copy.
        failed: the thread calls it with the error of each failed try.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        copied: Callable[[Path, CheckpointInfo], None],
        failed: Callable[[CheckpointError, CheckpointInfo], None],
    ) -> None:
        self.directory = directory
        self._keep = keep
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
            self._changed.notify_all()

    def finish(self, timeout_s: float) -> bool:
        """Wait until the last checkpoint is copied or has failed, and end the thread.

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
        while True:
            with self._changed:
                while self._next is None:
                    if self._closing:
                        return
                    self._changed.wait()
                (checkpoint, info), self._next = self._next, None
            try:
                path = self._copy(checkpoint, info)
            except (CheckpointError, OSError) as error:
                if checkpoint.exists():  # otherwise retention deleted it, and a newer one is next
                    self._failed(CheckpointError(str(error)), info)
            else:
                self._copied(path, info)

    def _copy(self, checkpoint: Path, info: CheckpointInfo) -> Path:
        remove_stale(self.directory)
        best = info.best_version
        if best is not None and best != info.state_version and not holds_version(self.directory, best):
            copy(find_version(checkpoint.parent, best), self.directory)
        path = copy(checkpoint, self.directory)
        prune(self.directory, self._keep, path)
        return path


def restore(backup: Path, directory: Path) -> tuple[Path | None, tuple[str, ...]]:
    """Copy the newest backup that verifies back into ``directory``, and the best one with it.

    Returns:
        The copy, or None if no backup verifies; and the reasons why newer ones cannot be used.

    Raises:
        CheckpointWriteError: the disk cannot take it.
    """
    found = newest_verified(backup)
    if found.path is None or found.manifest is None:
        return None, found.skipped
    best = found.manifest.info.best_version
    if best is not None and best != found.manifest.info.state_version and holds_version(backup, best):
        copy(find_version(backup, best), directory)
    return copy(found.path, directory), found.skipped
