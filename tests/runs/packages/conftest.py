"""Packages whose weights are a few bytes: what is tested here reads them, and computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.inference import TensorSpec
from paceline.runs.checkpoint_manifest import write_file
from paceline.runs.package_manifest import FormatDifference, PackageManifest, Provenance
from paceline.runs.package_registry import Registry


def manifest_of(**changes: Any) -> PackageManifest:
    """A manifest with every field set, but for its files."""
    values: dict[str, Any] = {
        "name": "demo",
        "created": "2026-01-02T03:04:05+0000",
        "inputs": {
            "x": TensorSpec(dtype="float32", shape=(3,)),
            "a": TensorSpec(dtype="int64", shape=(None,), minimum=-1, maximum=9, max_size=5),
        },
        "outputs": {
            "probabilities": TensorSpec(dtype="float32", shape=(2,)),
            "label": TensorSpec(dtype="int64"),
            "size": TensorSpec(dtype="float32", shape=(2,), columns={"width": "m", "height": "cm"}),
            "price": TensorSpec(dtype="float32", unit="CHF"),
        },
        "labels": ("no", "yes"),
        "probabilities": "probabilities",
        "label": "label",
        "metrics": {"accuracy": 0.5},
        "provenance": Provenance(
            run="0123456789abcdef",
            task="tasks.py:Demo",
            fields={"lr": 0.1},
            step=4,
            state_version=5,
            model_sha256="0" * 64,
            data={"train_samples": 8},
            versions={"paceline": "0.1.0"},
        ),
        "files": {},
        "programs": {"pt2": "program.pt2"},
        "differences": {"pt2": FormatDifference(largest=0.0, equal_labels=1.0, samples=8)},
    }
    return PackageManifest(**(values | changes))


def put_package(registry: Registry, seed: int = 0, size: int = 2000) -> str:
    """Put a package into a registry; its content follows from a seed. Returns its digest."""
    with registry.draft() as draft:
        files = {
            name: write_file(draft / name, [name.encode(), bytes([seed]) * size])
            for name in ("weights.safetensors", "program.pt2", "README.md")
        }
        return registry.commit(draft, manifest_of(files=files))


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """An empty one."""
    return Registry(tmp_path / "registry")
