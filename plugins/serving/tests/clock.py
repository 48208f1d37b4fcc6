"""Time that passes when a test says so."""

from __future__ import annotations

import asyncio


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time is ``now``."""

    now = 0.0

    def time(self) -> float:
        return self.now
