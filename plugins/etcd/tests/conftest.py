"""The runs on several machines of ``tests/elastic/recovery_nodes``."""

from __future__ import annotations

from tests.elastic.recovery_nodes.conftest import coordinator, run, undisturbed

__all__ = ["coordinator", "run", "undisturbed"]
