"""Encoded documents of each test have a cache of their own; S3 is that of the stores' tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugins.stores.tests.conftest import aws, server

__all__ = ["aws", "server"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "paceline" / "tokens"
