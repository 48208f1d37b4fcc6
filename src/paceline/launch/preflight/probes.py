"""What is tried on a machine: its disk, and the way to the others."""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypedDict

from paceline.runs.checkpoint_manifest import TEMPORARY
from paceline.runs.checkpoint_store import entries
from paceline.runs.directory import RunDirectory

# --- Whether all machines see one run directory, and what room it has ---


_LOOK_EVERY_S = 0.1
_LATE_S = 3.0  # network file systems show a new file a little later
_PIECE_BYTES = 1 << 20
_BLOCK = 512  # bytes, of st_blocks


class Storage(TypedDict):
    """What a machine sees of a directory.

    ``free`` is in bytes, and counts what a killed writer of checkpoints has left: the next one removes it.
    ``checkpoints`` are the sizes in bytes of the run's good ones; ``seen`` are the machines whose marks are
    there.
    """

    path: str
    error: str | None
    hard_links: bool
    free: int | None
    checkpoints: list[int]
    seen: list[int]


def existing(path: Path) -> Path:
    """The directory, or the nearest one above it that is there."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def mark_name(examination: str, node_rank: int) -> str:
    """The file by which others see that a machine uses the same directory."""
    return f".paceline-doctor-{examination}-{node_rank}"


def leave_mark(directory: Path, name: str) -> str | None:
    """Write a file of 1 MiB as checkpoints are written; return why that cannot be, where it cannot."""
    path = directory / name
    try:
        with path.open("wb") as file:
            file.write(bytes(_PIECE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return error.strerror or str(error)
    return None


def look(directory: Path, run: Path, own: str, others: Mapping[int, str], error: str | None) -> Storage:
    """Wait a little for the others' marks, and try what a run needs of a file system.

    Args:
        directory: the run's, or the nearest one above it that is there.
        run: the run's, which may not be there.
        own: this machine's mark.
        others: the other machines' marks.
        error: why this machine's could not be written.
    """
    deadline = time.monotonic() + _LATE_S
    while (missing := [node for node, name in others.items() if not (directory / name).exists()]) and (
        time.monotonic() < deadline
    ):
        time.sleep(_LOOK_EVERY_S)
    free, there = None, RunDirectory(run).checkpoints
    with suppress(OSError):
        status = os.statvfs(directory)
        free = status.f_bavail * status.f_frsize + _left_behind(there)
    sizes = []
    with suppress(OSError):
        sizes = [entry.size_bytes for entry in entries(there, None) if entry.problem is None]
    return Storage(
        path=str(directory),
        error=error,
        hard_links=error is not None or _links(directory / own),
        free=free,
        checkpoints=sizes,
        seen=[node for node in others if node not in missing],
    )


def remove_mark(directory: Path, name: str) -> None:
    """Leave nothing behind."""
    with suppress(OSError):
        (directory / name).unlink(missing_ok=True)


def _left_behind(checkpoints: Path) -> int:
    """Bytes on disk of checkpoints that were not finished."""
    size = 0
    for entry in checkpoints.glob(f"{TEMPORARY}*"):
        with suppress(OSError):  # somebody is removing it
            if not entry.is_symlink():  # to a whole one
                size += sum(file.lstat().st_blocks for file in entry.iterdir()) * _BLOCK
    return size


def _links(mark: Path) -> bool:
    link = mark.with_name(f"{mark.name}-link")
    try:
        link.hardlink_to(mark)
    except OSError:
        return False
    remove_mark(link.parent, link.name)
    return True


# --- How machines test the way to each other: connections, round trips, bandwidth ---
#
# Whoever connects first shows that it holds the examination's token; a probe can do no more than be echoed or
# counted, for a limited time.


_PROOF = 32
_PINGS = 20
_PIECE = bytes(1 << 18)
_PATIENCE_S = 5.0
_CONNECT_S = 3.0
BANDWIDTH_S = 0.4

Kind = Literal[b"E", b"D"]  # echo, drain


class Connection(TypedDict):
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


def check_connection(host: str, port: int, token: bytes) -> Connection:
    """Connect, and measure round trips."""
    try:
        with _connected(host, port, token, b"E") as end:
            times = []
            for _ in range(_PINGS):
                start = time.perf_counter()
                end.sendall(b"x")
                if not _receive(end, 1):
                    return Connection(error="it closed the connection: another program listens there", ms=None)
                times.append(time.perf_counter() - start)
    except OSError as error:
        return Connection(error=_words(error), ms=None)
    return Connection(error=None, ms=min(times) * 1e3)


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
