"""What others see of an agent that they may not know yet: a listener that answers connections."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.elastic.consensus.transport import Listener


@contextmanager
def listening_agent() -> Iterator[tuple[str, int]]:
    """Answer as an agent's listener does; yield its address."""
    listener = Listener("127.0.0.1", 0, bytes(32), {})
    ended = threading.Event()

    def answer() -> None:
        while not ended.wait(0.02):
            listener.accept()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield listener.host, listener.port
    finally:
        ended.set()
        thread.join()
        listener.close()
