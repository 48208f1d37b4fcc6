"""Each process's checkpointer and backup, for all the worlds that the process takes part in."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.checkpoint.backup import Backup
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.manifest import CheckpointInfo
from paceline.errors import CheckpointError
from paceline.training.run import Run

_log = logging.getLogger(__name__)

_BACKUP_END_S = 60.0  # how long the run's end waits for its last backup


@contextmanager
def open_checkpointer(run: Run) -> Iterator[Checkpointer]:
    """A checkpointer for ``run``; what it commits is told in an event and, with ``--backup-to``, copied."""
    backup: Backup | None = None

    def committed(path: Path, info: CheckpointInfo) -> None:
        nonlocal backup
        run.directory.append_event("checkpoint", step=info.step, version=info.state_version)
        if backup is None and run.backup is not None:
            backup = Backup(run.backup, run.config.keep, copied, failed)
        if backup is not None:
            backup.take(path, info)

    def copied(path: Path, info: CheckpointInfo) -> None:
        run.directory.append_event("backup", step=info.step, version=info.state_version)

    def failed(error: CheckpointError, info: CheckpointInfo) -> None:
        run.directory.append_event("backup failed", step=info.step, error=str(error))
        _log.warning("no backup of step %d: %s It is made up for with the next checkpoint.", info.step, error)

    checkpointer = Checkpointer(run.directory.checkpoints, run.config.keep, committed)
    try:
        yield checkpointer
    finally:
        try:
            checkpointer.close()
        except CheckpointError as error:
            # Whoever needed it has waited for it; it is not what ends this process.
            _log.warning("%s", error)
    # Reached at the run's end only: a stop or an error waits for no other disk.
    if backup is not None and not backup.finish(_BACKUP_END_S):
        _log.warning("the last backup was not complete after %g s, and is left.", _BACKUP_END_S)
