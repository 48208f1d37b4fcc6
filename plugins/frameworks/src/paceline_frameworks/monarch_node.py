"""One host's part of a job that Monarch carries: an actor. Monarch sends only its name, so hosts need Paceline."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence

from monarch.actor import Actor, concurrent_endpoint

from paceline.core.environment import variables_of_another_job
from paceline_ray.actor_nodes import ActorCommand

SILENCE_S = 60.0
"""An actor that its controller has not greeted for so long ends itself, and its command with it."""

_OF_MONARCH = ("HYPERACTOR_MESH", "HYPERACTOR_PROCESS_NAME", "HYPERACTOR_EXECUTION_ID", "MONARCH_CLIENT_TRACE_ID")
"""How variables begin that make a process Monarch's; a command that uses Monarch itself must not get them."""


class MonarchNode(Actor):  # type: ignore[misc] # the library is not typed
    """Runs a node's command. All endpoints are concurrent: a signal does not wait until a line is there to read."""

    def __init__(self) -> None:
        self._command = ActorCommand()
        self._greeted_at = time.monotonic()
        # An attached host keeps an actor when the process that asked for it is killed.
        threading.Thread(target=self._end_in_silence, daemon=True).start()

    @concurrent_endpoint
    async def greet(self) -> None:
        """Tell the actor that its controller is there."""
        self._greeted_at = time.monotonic()

    @concurrent_endpoint
    async def name(self) -> str:
        return os.uname().nodename

    @concurrent_endpoint
    async def can_listen(self, address: str, port: int) -> bool:
        return self._command.can_listen(address, port)

    @concurrent_endpoint
    async def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        """Start the command; ``env`` is added to this host's variables."""
        # srun makes a worker loop a rank of its step, which the command must not take itself for.
        own = {name: value for name, value in variables_of_another_job().items() if not name.startswith(_OF_MONARCH)}
        await asyncio.to_thread(self._command.start, argv, {**own, **env}, cwd)

    @concurrent_endpoint
    async def read(self, timeout_s: float) -> tuple[list[tuple[int, bytes]], int | None]:
        """Return the output since the last call, as :meth:`ActorCommand.read` does."""
        return await asyncio.to_thread(self._command.read, timeout_s)

    @concurrent_endpoint
    async def send_signal(self, number: int) -> None:
        """Signal the command, and not its children."""
        self._command.send_signal(number)

    @concurrent_endpoint
    async def end(self) -> None:
        """Kill the command and all that it has started."""
        self._command.end()

    def _end_in_silence(self) -> None:
        while time.monotonic() < self._greeted_at + SILENCE_S:
            time.sleep(1)
        self._command.end()
        os._exit(1)
