"""How machines test the way to each other: connections, round trips, bandwidth.

Whoever connects first shows that it holds the examination's token; a probe can do no more than be echoed or
counted, for a limited time.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Literal, TypedDict

_PROOF = 32
_PINGS = 20
_PIECE = bytes(1 << 18)
_PATIENCE_S = 5.0
_CONNECT_S = 3.0
BANDWIDTH_S = 0.4

Kind = Literal[b"E", b"D"]  # echo, drain


class Way(TypedDict):
    """How one machine reaches a port of another: the shortest round trip in ms, or why it does not."""

    error: str | None
    ms: float | None


class Flow(TypedDict):
    """What arrived of a stream to another machine, in bytes/s; or why none did."""

    error: str | None
    bytes_per_s: float | None


class ProbeServer:
    """Listens on one address, and answers probes.

    Attributes:
        port: where it listens.
    """

    def __init__(self, host: str, port: int, token: bytes) -> None:
        """Listen; port 0 for any.

        Raises:
            OSError: it cannot listen there.
        """
        self._proof = _proof(token)
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
            self._listener.listen(256)
        except BaseException:
            self._listener.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name="doctor-probes", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Listen no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(_PATIENCE_S)

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(end,), daemon=True).start()

    def _answer(self, end: socket.socket) -> None:
        with end, suppress(OSError):
            end.settimeout(_PATIENCE_S)
            head = _receive(end, _PROOF + 1)
            if len(head) <= _PROOF or not hmac.compare_digest(head[:_PROOF], self._proof):
                return
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if head[_PROOF:] == b"D":
                self._drain(end)
            else:
                for _ in range(_PINGS):
                    end.sendall(_receive(end, 1))

    def _drain(self, end: socket.socket) -> None:
        first = end.recv(len(_PIECE))
        start, count = time.monotonic(), 0
        while first and (passed := time.monotonic() - start) < BANDWIDTH_S:
            end.settimeout(max(0.01, BANDWIDTH_S - passed))
            with suppress(TimeoutError):
                piece = end.recv(len(_PIECE))
                if not piece:
                    break
                count += len(piece)
        seconds = time.monotonic() - start
        end.settimeout(_PATIENCE_S)
        end.sendall(json.dumps({"bytes": count, "seconds": seconds}).encode() + b"\n")
        # Were this end closed while something of the stream is unread, its answer could be lost.
        while end.recv(len(_PIECE)):
            pass


def try_way(host: str, port: int, token: bytes) -> Way:
    """Connect, and measure round trips."""
    try:
        with _connected(host, port, token, b"E") as end:
            times = []
            for _ in range(_PINGS):
                start = time.perf_counter()
                end.sendall(b"x")
                if not _receive(end, 1):
                    return Way(error="it closed the connection: another program listens there", ms=None)
                times.append(time.perf_counter() - start)
    except OSError as error:
        return Way(error=_words(error), ms=None)
    return Way(error=None, ms=min(times) * 1e3)


def measure_flow(host: str, port: int, token: bytes) -> Flow:
    """Send for a while as fast as one TCP stream goes; the other side counts."""
    try:
        with _connected(host, port, token, b"D") as end:
            # What the kernel still holds at the end need not arrive.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            start = time.monotonic()
            while (left := start + 1.5 * BANDWIDTH_S - time.monotonic()) > 0:
                end.settimeout(left)
                with suppress(TimeoutError):
                    end.send(_PIECE)
            end.settimeout(_PATIENCE_S)
            answer = json.loads(end.makefile("rb").readline() or b"null")
    except (OSError, ValueError) as error:
        return Flow(error=_words(error), bytes_per_s=None)
    if not isinstance(answer, dict):
        return Flow(error="it closed the connection", bytes_per_s=None)
    return Flow(error=None, bytes_per_s=answer["bytes"] / max(answer["seconds"], 1e-6))


def _connected(host: str, port: int, token: bytes, kind: Kind) -> socket.socket:
    end = socket.create_connection((host, port), timeout=_CONNECT_S)
    try:
        end.settimeout(_PATIENCE_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.sendall(_proof(token) + kind)
    except BaseException:
        end.close()
        raise
    return end


def _proof(token: bytes) -> bytes:
    return hmac.digest(token, b"paceline doctor probe", "sha256")


def _receive(end: socket.socket, count: int) -> bytes:
    """So many bytes; fewer where the other side closes."""
    received = b""
    while len(received) < count and (piece := end.recv(count - len(received))):
        received += piece
    return received


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return getattr(error, "strerror", None) or str(error)
