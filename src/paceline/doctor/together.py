"""Several calls at the same time, which an interrupt does not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from paceline.distributed.process import join_all

Key = TypeVar("Key")
Value = TypeVar("Value")


def together(calls: Mapping[Key, Callable[[], Value]]) -> dict[Key, Value | Exception]:
    """Make all calls at once, each in a thread; what each returned or raised."""
    results: dict[Key, Value | Exception] = {}

    def make(key: Key, call: Callable[[], Value]) -> None:
        try:
            results[key] = call()
        except Exception as error:
            results[key] = error

    # As daemons: an interpreter waits for its other threads, and these may wait for a machine that is gone.
    threads = [threading.Thread(target=make, args=item, daemon=True) for item in calls.items()]
    for thread in threads:
        thread.start()
    join_all(threads)
    return {key: results[key] for key in calls}
