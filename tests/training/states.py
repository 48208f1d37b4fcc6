"""What a run has saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.runs.checkpoint_store import newest_verified
from paceline.runs.checkpointer import load


def newest(run: Path) -> dict[str, Any]:
    """The state in a run's newest checkpoint."""
    path = newest_verified(run / "checkpoints").path
    assert path is not None
    return load(path).state
