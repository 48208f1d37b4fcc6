from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.manifest import CheckpointInfo
from paceline.checkpoint.storage import commit


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
            "shards": 4,
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
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a small file system is not allowed here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
