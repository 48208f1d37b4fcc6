"""The bodies of requests that a server holds: read with bounds, and parsed outside of the event loop if large."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from paceline_serving.batching import RequestFailure
from paceline_serving.connection import Request

LARGE_BYTES = 256 * 1024
"""What is at most as large is parsed in the event loop, where it takes a few milliseconds."""

_T = TypeVar("_T")
_BODIES = 4  # of the largest size, at the same time
_UNCOUNTED_BYTES = 64 * 1024  # of each body; a connection holds as much anyway
_RETRY_AFTER_S = 1


class RequestBodies:
    """The bodies that one server holds, over all connections and protocols.

    Small bodies are always accepted, so that clients with large ones cannot keep others out.

    Attributes:
        held_bytes: of all bodies, without the first 64 KiB of each.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self.held_bytes = 0
        self.max_held_bytes = _BODIES * max_body_bytes
        # One thread: several would compete with the event loop for the interpreter.
        self._thread = ThreadPoolExecutor(1, "paceline-parse")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def hold(self) -> BodySize:
        return BodySize(self)

    def run(self, function: Callable[..., _T], *arguments: Any) -> asyncio.Future[_T]:
        """Call a function of a large body in the thread."""
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


class BodySize:
    """The size of one body so far; a context manager."""

    def __init__(self, bodies: RequestBodies) -> None:
        self._bodies = bodies
        self._size = self._counted = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bodies.held_bytes -= self._counted

    def add(self, size: int) -> None:
        """Count ``size`` bytes more.

        Raises:
            RequestFailure: 503; the server would hold too many bytes.
        """
        self._size += size
        counted, bodies = max(0, self._size - _UNCOUNTED_BYTES), self._bodies
        held_bytes = bodies.held_bytes + counted - self._counted
        if held_bytes > bodies.max_held_bytes:
            raise RequestFailure(
                503,
                f"the server holds requests of {bodies.held_bytes:,} bytes, and accepts at most "
                f"{bodies.max_held_bytes:,}. Try again in {_RETRY_AFTER_S} s.",
                [(b"retry-after", str(_RETRY_AFTER_S).encode())],
            )
        bodies.held_bytes = held_bytes
        self._counted = counted


async def read_body(request: Request, limit: int, held: BodySize) -> bytes | bytearray:
    """Read a request's body.

    Raises:
        RequestFailure: it has more than ``limit`` bytes, or the server holds too many.
        ClientGone: the client has disconnected.
    """
    # Its parser takes up to 20 digits after any number of zeros.
    declared = int(request.headers.get(b"content-length", b"").lstrip(b"0") or b"0")
    if declared > limit:
        raise RequestFailure(413, f"the body has {declared:,} bytes; at most {limit:,} are allowed.")
    first = await request.read()
    held.add(len(first))
    if not request.has_more:
        return first
    body = bytearray(first)
    while piece := await request.read():
        if len(body) + len(piece) > limit:
            await _discard(request, limit)
            raise RequestFailure(413, f"the body has more than {limit:,} bytes.", [(b"connection", b"close")])
        held.add(len(piece))
        body += piece
    return body


async def _discard(request: Request, limit: int) -> None:
    """Read on for a while: a client that is still sending when the connection closes does not see the answer."""
    discarded = 0
    while discarded < limit and (piece := await request.read()):
        discarded += len(piece)
