"""A checkpoint whose files are made up, to be harmed."""

from __future__ import annotations

from pathlib import Path

from paceline.runs.checkpoint_manifest import CheckpointInfo
from paceline.runs.checkpoint_store import commit


def save(directory: Path, step: int, files: dict[str, bytes]) -> Path:
    """Save the files as the checkpoint of a step."""
    info = CheckpointInfo(
        task="t",
        run="r",
        step=step,
        state_version=step,
        epoch=0,
        generation=0,
        microbatches=1,
        pins={},
        best_version=None,
    )
    return commit(directory, info, [(name, [content]) for name, content in files.items()])
