"""Which checkpoint all ranks continue from."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from paceline.checkpoint.backup import restore
from paceline.checkpoint.checkpointer import load
from paceline.checkpoint.identity import differences, require_same_run
from paceline.checkpoint.manifest import CheckpointInfo
from paceline.checkpoint.storage import newest_verified
from paceline.distributed.world import World
from paceline.errors import CheckpointError
from paceline.training.pins import current_pins
from paceline.training.run import Run

_log = logging.getLogger(__name__)


def newest_checkpoint(run: Run, world: World, run_id: str) -> dict[str, Any] | None:
    """The state of the newest checkpoint that verifies on every rank, or None where there is none.

    Raises:
        CheckpointError: there are some, and none can be used: nothing is lost without being asked for.
    """
    directory = run.directory
    failed: list[str] = []
    passed_over = 0
    may_restore = True
    while True:
        choice: dict[str, Any] = {"path": None, "skipped": []}
        if world.rank == 0:
            found = newest_verified(directory.checkpoints, excluding=failed)
            path, skipped = found.path, list(found.skipped)
            if path is None and may_restore:
                may_restore = False
                path, reasons = _restored(run)
                skipped += reasons
            choice = {"path": path and path.name, "skipped": skipped}
        choice = world.broadcast_json(choice)
        if world.rank == 0:
            for reason in choice["skipped"]:
                _log.warning("passed over a checkpoint: %s", reason)
                directory.append_event("fallback", reason=reason)
        passed_over += len(choice["skipped"])
        if choice["path"] is None:
            if passed_over:
                raise CheckpointError(
                    f"no checkpoint in {directory.checkpoints} can be used, for the reasons above. Restore "
                    "one from a copy, or remove that folder to train from the start."
                )
            return None
        path = directory.checkpoints / choice["path"]
        try:
            checkpoint, problem = load(path), ""
        except CheckpointError as error:
            checkpoint, problem = None, str(error)
        problems = [p for p in world.all_gather_json(problem) if p]
        if checkpoint is not None and not problems:
            _compare(run, world, run_id, path, checkpoint.manifest.info)
            if passed_over and world.rank == 0:
                _log.warning(
                    "continuing from %s instead, after step %d", path.name, checkpoint.manifest.info.step
                )
            return checkpoint.state
        _log.warning(
            "passed over checkpoint %s, which does not verify on every rank: %s", path.name, problems[0]
        )
        if world.rank == 0:
            directory.append_event("fallback", reason=problems[0])
        failed.append(path.name)
        passed_over += 1


def _restored(run: Run) -> tuple[Path | None, list[str]]:
    """A backup, copied back into the run; None where there is none that verifies. And why others do not."""
    if not run.directory.exists() or run.backup is None:
        return None, []
    path, reasons = restore(run.backup, run.directory.checkpoints)
    if path is not None:
        _log.warning(
            "no checkpoint of the run's own can be used: %s comes back from %s", path.name, run.backup
        )
    return path, list(reasons)


def _compare(run: Run, world: World, run_id: str, path: Path, recorded: CheckpointInfo) -> None:
    """Refuse a foreign checkpoint; say where equal bits are no longer promised."""
    # The same task may have another name by now: its file was moved.
    now = dataclasses.replace(
        recorded, run=run_id, shards=run.num_shards, pins=current_pins(run.config, run.device)
    )
    require_same_run(path, recorded, now)
    changed = differences(recorded.pins, now.pins)
    if changed and world.rank == 0:
        _log.warning(
            "this process differs from the one that wrote %s, so the model will be equal within rounding, "
            "not bit for bit: %s",
            path.name,
            "; ".join(changed),
        )
