from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.small_disk import small_disk as mounted_at

from paceline.runs.checkpoint_manifest import CheckpointInfo
from paceline.runs.checkpoint_store import commit


@pytest.fixture
def make_info() -> Callable[..., CheckpointInfo]:
    """Describe the checkpoint of a step; its state_version is one more unless it is given."""

    def make(step: int, **changes: Any) -> CheckpointInfo:
        values: dict[str, Any] = {
            "task": "tasks:Demo",
            "step": step,
            "state_version": step + 1,
            "epoch": 0,
            "generation": 0,
            "microbatches": 4,
            "pins": {"torch": "2.13.0", "threads": 1},
        }
        return CheckpointInfo(**(values | changes))

    return make


@pytest.fixture
def commit_step(make_info: Callable[..., CheckpointInfo]) -> Callable[..., Path]:
    """Commit a checkpoint of two small files, whose content follows from the step."""

    def commit_one(directory: Path, step: int, **changes: Any) -> Path:
        contents = [("model.safetensors", [b"head", b"%d" % step]), ("state.json", [b"{}"])]
        return commit(directory, make_info(step, **changes), contents)

    return commit_one


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 256 KiB."""
    with mounted_at(tmp_path / "disk", "256k"):
        yield tmp_path / "disk"
