"""Whether a checkpoint is one of this run, and in what this process differs from the one that wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from paceline.checkpoint.manifest import CheckpointInfo, Pin
from paceline.errors import CheckpointError


def differences(recorded: Mapping[str, Pin], current: Mapping[str, Pin]) -> list[str]:
    """One line for each pin that differs: ``threads: 1 in the checkpoint, 2 now``."""
    missing = object()
    lines = []
    for name in sorted(recorded.keys() | current.keys()):
        before, now = recorded.get(name, missing), current.get(name, missing)
        # 1, 1.0 and True are equal in Python, but not the same setting.
        if before is missing or now is missing or json.dumps(before) != json.dumps(now):
            was = "not recorded" if before is missing else f"{before}"
            lines.append(f"{name}: {was} in the checkpoint, {'not set' if now is missing else now} now")
    return lines


def require_same_run(path: Path, recorded: CheckpointInfo, current: CheckpointInfo) -> None:
    """Refuse a checkpoint of another task or run, or with another number of shards.

    Raises:
        CheckpointError: says which of them differs, and what to do.
    """
    if recorded.task != current.task:
        raise CheckpointError(
            f"checkpoint {path} is of the task {recorded.task!r}, not {current.task!r}. "
            "Choose another --run DIR."
        )
    if recorded.shards != current.shards:
        raise CheckpointError(
            f"checkpoint {path} was made with --shards {recorded.shards}, not {current.shards}; a run keeps "
            f"its number of shards. Resume with --shards {recorded.shards}, or choose another --run DIR."
        )
    if recorded.run != current.run:
        raise CheckpointError(
            f"checkpoint {path} was written by another run of {recorded.task!r}. Remove it from this run's "
            "directory, or continue the run that it belongs to."
        )
