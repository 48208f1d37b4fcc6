"""For tests that run the command in their own process."""

from __future__ import annotations

from tests.cli.conftest import numerics

__all__ = ["numerics"]
