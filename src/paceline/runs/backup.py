"""The interface of a run's copies, in another directory or an object store, and the reader of one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from paceline.core.built_in import PARTS
from paceline.core.files import check_location, is_address
from paceline.core.ownership import own_prefix
from paceline.core.plugins import import_object
from paceline.runs.checkpoint_manifest import CheckpointInfo
from paceline.runs.directory import RunDirectory


class RunBackup(Protocol):
    """The copies of ``--backup-to``, which a thread of their own makes; rank 0 uses it."""

    def claim(self, run_id: str) -> None:
        """Check, before the training, that this run can be copied, and that no other process copies one there.

        Raises:
            ConfigError: it cannot be; the message says why.
        """

    def take(self, checkpoint: Path, info: CheckpointInfo) -> None:
        """Queue a committed checkpoint for copying; returns at once."""

    def restore(self, run_id: str) -> tuple[Path | None, tuple[str, ...]]:
        """Copy the newest checkpoint that verifies back into the run, and the best one with it.

        Returns:
            The copy, or None if none verifies; and the reasons why newer ones cannot be used.

        Raises:
            CheckpointWriteError: the disk cannot take it.
        """

    def close(self, patience_s: float) -> None:
        """Wait so long for the last copy; warn if it is missing. 0: do not wait, and say nothing."""


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
        import_object(PARTS["runs at addresses"])(run, directory).fetch(which)
        yield directory
