"""Probes of a node's storage and of its connections to other nodes."""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal, TypedDict

from paceline.core.file_lock import lock_now
from paceline.runs.checkpoint_admin import entries
from paceline.runs.checkpoint_manifest import TEMPORARY
from paceline.runs.directory import RunDirectory
from paceline.runs.file_system import Lack, probe

# --- Storage: do all nodes see one run directory, and how much space does it have? ---


_POLL_S = 0.1
_LATE_S = 3.0  # network file systems show new files with a delay
_PIECE_BYTES = 1 << 20
_BLOCK = 512  # bytes, of st_blocks


class Storage(TypedDict):
    """A node's view of a directory.

    ``free`` is in bytes and includes unfinished checkpoints of killed writers, which the next writer removes.
    ``checkpoints`` are the sizes in bytes of the run's intact ones; ``seen`` are the nodes whose marks are
    visible, and ``unlocked`` those whose marks this node could lock, though they are locked. ``lacks`` are what the
    file system lacks, each with advice.
    """

    path: str
    error: str | None
    lacks: Sequence[tuple[str, str]]
    free: int | None
    checkpoints: list[int]
    seen: list[int]
    unlocked: list[int]


def nearest_existing(path: Path) -> Path:
    """Return the directory, or its nearest existing parent."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def mark_name(key: str, node_rank: int) -> str:
    """Return the name of the file that shows other nodes that this node uses the same directory."""
    return f".paceline-doctor-{key}-{node_rank}"


def leave_mark(directory: Path, name: str, stack: ExitStack) -> str | None:
    """Write a file of 1 MiB like a checkpoint, and lock it until ``stack`` ends; return the error, if any."""
    path = directory / name
    try:
        file = stack.enter_context(path.open("wb"))
        file.write(bytes(_PIECE_BYTES))
        file.flush()
        os.fsync(file.fileno())
        lock_now(file.fileno())
    except OSError as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return error.strerror or str(error)
    return None


def inspect_storage(directory: Path, run: Path, others: Mapping[int, str], error: str | None) -> Storage:
    """Wait a little for the other nodes' marks, and test what a run needs of a file system.

    Args:
        directory: the run's directory, or its nearest existing parent.
        run: the run's directory, which may not exist.
        others: the other nodes' marks.
        error: why this node's mark could not be written.
    """
    deadline = time.monotonic() + _LATE_S
    while (missing := [node for node, name in others.items() if not (directory / name).exists()]) and (
        time.monotonic() < deadline
    ):
        time.sleep(_POLL_S)
    free, checkpoints = None, RunDirectory(run).checkpoints
    with suppress(OSError):
        status = os.statvfs(directory)
        free = status.f_bavail * status.f_frsize + _unfinished_bytes(checkpoints)
    sizes = []
    with suppress(OSError):
        sizes = [entry.size_bytes for entry in entries(checkpoints, None) if entry.problem is None]
    lacks: list[Lack] = []
    with suppress(OSError):
        lacks = probe(directory) if error is None else []
    return Storage(
        path=str(directory),
        error=error,
        lacks=lacks,
        free=free,
        checkpoints=sizes,
        seen=[node for node in others if node not in missing],
        unlocked=[node for node, name in others.items() if node not in missing and _can_lock(directory / name)],
    )


def remove_mark(directory: Path, name: str) -> None:
    """Remove a mark, if it exists."""
    with suppress(OSError):
        (directory / name).unlink(missing_ok=True)


def _unfinished_bytes(checkpoints: Path) -> int:
    """Return the bytes on disk of unfinished checkpoints."""
    size = 0
    for entry in checkpoints.glob(f"{TEMPORARY}*"):
        with suppress(OSError):  # it may be removed at the same time
            if not entry.is_symlink():  # a link to a finished one
                size += sum(file.lstat().st_blocks for file in entry.iterdir()) * _BLOCK
    return size


def _can_lock(mark: Path) -> bool:
    try:
        with mark.open("r+b") as file:
            return lock_now(file.fileno())
    except OSError:  # it is locked, or another user's
        return False


# --- Connections between nodes: reachability, round trips, bandwidth ---
#
# A connecting node proves that it holds the token; a probe can only be echoed or counted, for a limited time.


_PROOF = 32
_PINGS = 20
_PIECE = bytes(1 << 18)
_TIMEOUT_S = 5.0
_CONNECT_S = 3.0
BANDWIDTH_S = 0.4

Kind = Literal[b"E", b"D"]  # echo, drain


class Connection(TypedDict):
    """The connection to a port of another node: the shortest round trip in ms, or an error."""

    error: str | None
    ms: float | None


class Flow(TypedDict):
    """The received rate of a stream to another node in bytes/s, or an error."""

    error: str | None
    bytes_per_s: float | None


class ProbeServer:
    """A server for probes on one address; ``port`` is its port."""

    def __init__(self, host: str, port: int, token: bytes) -> None:
        """Listen; port 0 picks a free one.

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
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(_TIMEOUT_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(_TIMEOUT_S)
            head = _receive(connection, _PROOF + 1)
            if len(head) <= _PROOF or not hmac.compare_digest(head[:_PROOF], self._proof):
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if head[_PROOF:] == b"D":
                self._drain(connection)
            else:
                for _ in range(_PINGS):
                    connection.sendall(_receive(connection, 1))

    def _drain(self, connection: socket.socket) -> None:
        first = connection.recv(len(_PIECE))
        start, count = time.monotonic(), 0
        while first and (elapsed_s := time.monotonic() - start) < BANDWIDTH_S:
            connection.settimeout(max(0.01, BANDWIDTH_S - elapsed_s))
            with suppress(TimeoutError):
                piece = connection.recv(len(_PIECE))
                if not piece:
                    break
                count += len(piece)
        seconds = time.monotonic() - start
        connection.settimeout(_TIMEOUT_S)
        connection.sendall(json.dumps({"bytes": count, "seconds": seconds}).encode() + b"\n")
        # Read everything before closing: otherwise the answer could be lost.
        while connection.recv(len(_PIECE)):
            pass


def check_connection(host: str, port: int, token: bytes) -> Connection:
    """Connect, and measure round trips."""
    try:
        with _open_connection(host, port, token, b"E") as connection:
            times = []
            for _ in range(_PINGS):
                start = time.perf_counter()
                connection.sendall(b"x")
                if not _receive(connection, 1):
                    return Connection(error="the connection was closed: another program listens on this port", ms=None)
                times.append(time.perf_counter() - start)
    except OSError as error:
        return Connection(error=_describe_error(error), ms=None)
    return Connection(error=None, ms=min(times) * 1e3)


def measure_flow(host: str, port: int, token: bytes) -> Flow:
    """Send over one TCP stream for a while; the other node counts."""
    try:
        with _open_connection(host, port, token, b"D") as connection:
            # Discard what the kernel still holds at the end.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            start = time.monotonic()
            while (remaining_s := start + 1.5 * BANDWIDTH_S - time.monotonic()) > 0:
                connection.settimeout(remaining_s)
                with suppress(TimeoutError):
                    connection.send(_PIECE)
            connection.settimeout(_TIMEOUT_S)
            answer = json.loads(connection.makefile("rb").readline() or b"null")
    except (OSError, ValueError) as error:
        return Flow(error=_describe_error(error), bytes_per_s=None)
    if not isinstance(answer, dict):
        return Flow(error="the connection was closed", bytes_per_s=None)
    return Flow(error=None, bytes_per_s=answer["bytes"] / max(answer["seconds"], 1e-6))


def _open_connection(host: str, port: int, token: bytes, kind: Kind) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_CONNECT_S)
    try:
        connection.settimeout(_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_proof(token) + kind)
    except BaseException:
        connection.close()
        raise
    return connection


def _proof(token: bytes) -> bytes:
    return hmac.digest(token, b"paceline doctor probe", "sha256")


def _receive(connection: socket.socket, count: int) -> bytes:
    """Receive ``count`` bytes, or fewer if the other side closes."""
    received = b""
    while len(received) < count and (piece := connection.recv(count - len(received))):
        received += piece
    return received


def _describe_error(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return getattr(error, "strerror", None) or str(error)
