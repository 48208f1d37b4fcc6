"""Copies of verified checkpoints in another place, made in the background."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from paceline.checkpoint.manifest import CheckpointInfo
from paceline.checkpoint.storage import (
    copy,
    find_version,
    holds_version,
    newest_verified,
    remove_stale,
    retain,
)
from paceline.errors import CheckpointError


class Backup:
    """Copies each checkpoint that :meth:`take` is told of, and the best one, in a thread of its own.

    The thread has the lowest priority, and nobody waits for it: where checkpoints come faster than they
    can be copied, only the newest one is. A copy that failed is made up for with the next one.

    Args:
        directory: where the copies go; made with the first.
        keep: the last so many copies stay, and the best.
        copied: called by the thread with each copy.
        failed: called by the thread with the error of each try that failed.
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
        self._news = threading.Condition()
        self._next: tuple[Path, CheckpointInfo] | None = None
        self._closing = False
        # A daemon: a process that must end does not wait for a slow disk elsewhere.
        self._thread = threading.Thread(target=self._serve, name="paceline-backup", daemon=True)
        self._thread.start()

    def take(self, checkpoint: Path, info: CheckpointInfo) -> None:
        """Have a committed checkpoint copied soon; returns at once."""
        with self._news:
            # A best model that was owed to the disk comes after a newer state, and is copied with that.
            if self._next is None or info.state_version > self._next[1].state_version:
                self._next = checkpoint, info
            self._news.notify_all()

    def finish(self, timeout_s: float) -> bool:
        """Wait until the last checkpoint is copied, or could not be, and end the thread.

        Returns:
            Whether it has ended in time.
        """
        with self._news:
            self._closing = True
            self._news.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while True:
            with self._news:
                while self._next is None:
                    if self._closing:
                        return
                    self._news.wait()
                (checkpoint, info), self._next = self._next, None
            try:
                path = self._copy(checkpoint, info)
            except (CheckpointError, OSError) as error:
                if checkpoint.exists():  # else retention was faster, and a newer one is next
                    self._failed(CheckpointError(str(error)), info)
            else:
                self._copied(path, info)

    def _copy(self, checkpoint: Path, info: CheckpointInfo) -> Path:
        remove_stale(self.directory)
        best = info.best_version
        if best not in (None, info.state_version) and not holds_version(self.directory, best or 0):
            copy(find_version(checkpoint.parent, best or 0), self.directory)
        path = copy(checkpoint, self.directory)
        retain(self.directory, self._keep, path)
        return path


def restore(backup: Path, directory: Path) -> tuple[Path | None, tuple[str, ...]]:
    """Copy the newest backup that verifies back into ``directory``, and the best one with it.

    Returns:
        The copy, None where no backup verifies; and why newer ones cannot be used.

    Raises:
        NotSavedError: the disk does not take it.
    """
    found = newest_verified(backup)
    if found.path is None or found.manifest is None:
        return None, found.skipped
    best = found.manifest.info.best_version
    if best not in (None, found.manifest.info.state_version) and holds_version(backup, best or 0):
        copy(find_version(backup, best or 0), directory)
    return copy(found.path, directory), found.skipped
