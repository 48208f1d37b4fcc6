"""Clients that ask without a pause, and remember how each request ended."""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter
from urllib.parse import urlsplit

from plugins.serving.tests.conftest import json_request

PATH = "/v2/models/fashion-mnist/infer"


class Load:
    """Closed loops over connections; a context manager.

    A client that is told to close its connection by a server that drains goes elsewhere: here, it ends.

    Attributes:
        statuses: how often each was answered.
        versions: of the model, likewise.
        broken: requests that got no answer.
    """

    def __init__(self, url: str, connections: int = 8) -> None:
        self._host = urlsplit(url).netloc
        self._body = json.dumps(json_request()).encode()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(connections)]
        self.statuses: Counter[int] = Counter()
        self.versions: Counter[str] = Counter()
        self.broken: list[str] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self.join()

    def join(self) -> None:
        """Wait for all clients."""
        for thread in self._threads:
            thread.join(60)

    def _ask(self) -> None:
        connection = http.client.HTTPConnection(self._host, timeout=60)
        try:
            while not self._stop.is_set():
                try:
                    connection.request("POST", PATH, self._body)
                    response = connection.getresponse()
                    content = response.read()
                except (OSError, http.client.HTTPException) as error:
                    self.broken.append(repr(error))
                    return
                self.statuses[response.status] += 1
                if response.status == 200:
                    self.versions[json.loads(content)["model_version"]] += 1
                if response.getheader("connection") == "close":
                    return
        finally:
            connection.close()
