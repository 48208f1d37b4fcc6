"""The connection to a search's scheduler, which decides after each evaluation whether this trial continues.

The run waits for the answer, so that it stops at the very step whose evaluation was judged. One line of JSON each way,
over a Unix socket::

    {"step", "epoch", "metrics": {name: value}, "finished"}  ->  {"go_on": true}
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

from paceline.parallel.world import World
from paceline.runs.metric_writers import finite

_CONNECT_S = 10.0


class TrialSchedulerClient:
    """Rank 0's end of the connection, which opens at the first request."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket: socket.socket | None = None

    def should_continue(
        self, world: World, *, step: int, epoch: int, metrics: Mapping[str, float], finished: bool
    ) -> bool:
        """Tell of an evaluation, and wait for the answer; all ranks call this together.

        Returns:
            Whether to continue; False if the scheduler no longer answers, since it does not need the rest.
        """
        answer = False
        if world.rank == 0:
            answer = self._ask({"step": step, "epoch": epoch, "metrics": finite(dict(metrics)), "finished": finished})
        return bool(world.broadcast_object(answer)) or finished

    def _ask(self, evaluation: Mapping[str, Any]) -> bool:
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.settimeout(_CONNECT_S)
                self._socket.connect(self._address)
                self._socket.settimeout(None)
                self._answers = self._socket.makefile("rb")
            self._socket.sendall((json.dumps(evaluation) + "\n").encode())
            return bool(json.loads(self._answers.readline() or b"{}").get("go_on"))
        except (OSError, ValueError):
            return False

    def close(self) -> None:
        """End the connection; a later question makes another one."""
        if self._socket is not None:
            self._answers.close()
            self._socket.close()
            self._socket = None
