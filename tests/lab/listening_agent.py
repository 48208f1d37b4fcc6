"""What others see of an agent that they may not know yet: a listener that answers connections."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.core.access import create_token, read_token
from paceline.elastic.consensus.transport import Listener


@contextmanager
def listening_agent(run: Path, name: str) -> Iterator[tuple[str, int]]:
    """Answer as the listener of a run's agent does; yield its address."""
    file = run / "agents.token"
    token = read_token(file) if file.exists() else create_token(file)
    listener = Listener("127.0.0.1", 0, token, {"name": name})
    ended = threading.Event()

    def answer() -> None:
        while not ended.wait(0.02):
            for link in listener.accept()[0]:
                link.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield listener.host, listener.port
    finally:
        ended.set()
        thread.join()
        listener.close()
