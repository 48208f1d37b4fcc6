"""Whoever compares several runs: asked after each evaluation whether this one goes on.

The run waits for the answer, so that it stops at the very step whose evaluation was judged. One line of JSON
each way, over a Unix socket::

    {"step", "epoch", "metrics": {name: value}, "finished"}  ->  {"go_on": true}
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path

from paceline.monitoring.writers import finite

_CONNECT_S = 10.0


class Referee:
    """Rank 0's end of the connection; it is made when something is to be asked.

    Args:
        address: the path of the socket.
    """

    def __init__(self, address: Path) -> None:
        self._address = address
        self._socket: socket.socket | None = None

    def goes_on(self, *, step: int, epoch: int, metrics: Mapping[str, float], finished: bool) -> bool:
        """Tell of an evaluation, and wait for the answer.

        Args:
            step: steps done.
            epoch: whole epochs done.
            metrics: of the validation split.
            finished: no step is left; the answer changes nothing.

        Returns:
            Whether to go on; not where nobody answers any more, since nobody wants the rest then.
        """
        said = {"step": step, "epoch": epoch, "metrics": finite(dict(metrics)), "finished": finished}
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.settimeout(_CONNECT_S)
                self._socket.connect(str(self._address))
                self._socket.settimeout(None)
                self._answers = self._socket.makefile("rb")
            self._socket.sendall((json.dumps(said) + "\n").encode())
            return bool(json.loads(self._answers.readline() or b"{}").get("go_on"))
        except (OSError, ValueError):
            return False

    def close(self) -> None:
        """End the connection; a later question makes another one."""
        if self._socket is not None:
            self._answers.close()
            self._socket.close()
            self._socket = None
