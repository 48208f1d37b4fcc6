"""Authenticated links between agents, over TCP and for one selector: nothing here ever blocks. No torch.

Both sides greet with a random nonce. From these and the run's shared token each derives a key for what the
connector sends and one for what the listener sends; so nothing can be reflected, and nothing of an earlier
link fits. Then every message travels as a frame: its length (4 bytes, big-endian), a JSON object, and an
HMAC-SHA256 over the direction's sequence number and the object. The first frame of each side is its
*hello*, which proves that it holds the token; the listener sends its own only to who has proven it. Of an
unauthenticated peer nothing is parsed but a greeting of fixed size and a length.

What passes cannot be forged, changed, replayed, reordered or cut without notice. It is not encrypted: who
can listen on the network can read it.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

from paceline.errors import PacelineError

LONGEST = 1 << 20  # bytes of a message
_LONGEST_HELLO = 1 << 14
_MOST_UNSENT = 8 << 20  # bytes that wait for a peer that does not read
_READ = 1 << 16
_READS = 4  # in one go, so that one peer cannot keep the agent from the others

_MAGIC = b"paceline-link-1\n"
_NONCE = 32
_LENGTH = 4
_TAG = 32

Side = Literal["connector", "listener"]
_OTHER: dict[Side, Side] = {"connector": "listener", "listener": "connector"}


class LinkError(PacelineError):
    """A link has ended, or never came about; the message says why."""


def connect(
    host: str,
    port: int,
    token: bytes,
    hello: Mapping[str, Any],
    *,
    within_s: float = 10.0,
    dead_after_s: float = 4.0,
) -> Link:
    """Begin a link with the agent that listens there; it is there once :attr:`Link.is_open`.

    Args:
        host: an address; a name is looked up first, which may take the resolver's time.
        port: of its :class:`~paceline.agent.listener.Listener`.
        token: the run's.
        hello: what the other side learns of this one with the handshake; at most 16 KiB as JSON.
        within_s: how long connecting and the handshake may take.
        dead_after_s: after how long a machine that does not answer any more counts as dead.

    Raises:
        LinkError: there is no such address, or no way to it.
    """
    where = f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        end = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
    except OSError as error:
        raise LinkError(f"no link with {where}: {error.strerror}.") from error
    try:
        with suppress(BlockingIOError):
            end.connect(address)
        return Link(end, "connector", where, token, hello, time.monotonic() + within_s, dead_after_s)
    except OSError as error:
        end.close()
        raise LinkError(f"no link with {where}: {error.strerror}.") from error


class Link:
    """One end of a link, for a selector that watches it for reading, and for writing while it wants to.

    Whenever it is ready for either, or its deadline has passed, call :meth:`receive`.

    Attributes:
        peer: the other side's address, for messages to people.
        deadline: by when the handshake must be done, on the monotonic clock; infinite afterwards.
        hello: what the other side has said of itself, once the link is open.
    """

    def __init__(
        self,
        end: socket.socket,
        side: Side,
        peer: str,
        token: bytes,
        hello: Mapping[str, Any],
        deadline: float,
        dead_after_s: float,
    ) -> None:
        """Take over a non-blocking TCP socket; see :func:`connect` and the listener's ``accept``."""
        self.peer = peer
        self.deadline = deadline
        self.hello: dict[str, Any] | None = None
        self._end = end
        self._side: Side = side
        self._token = token
        self._own_hello = _body(hello, _LONGEST_HELLO)
        self._nonce = secrets.token_bytes(_NONCE)
        self._keys: dict[Side, bytes] | None = None
        self._sent = 0  # frames
        self._taken = 0
        self._unread = bytearray()
        self._unsent = bytearray(_MAGIC + self._nonce)
        self._messages: list[dict[str, Any]] = []
        self._connected = side == "listener"
        self._why: str | None = None  # it ended
        _notice_death(end, dead_after_s)

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._end.fileno()

    @property
    def is_open(self) -> bool:
        """Whether the other side has proven that it holds the token, and the link has not ended."""
        return self.hello is not None and self._why is None

    @property
    def wants_write(self) -> bool:
        """Whether something waits for the socket to become writable."""
        return self._why is None and (bool(self._unsent) or not self._connected)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send, or keep until the socket takes it; say whether the link is open.

        Raises:
            ValueError: it is longer than ``LONGEST`` bytes, or holds what JSON does not.
        """
        body = _body(message, LONGEST)
        if not self.is_open:
            return False
        self._frame(body)
        self._write()
        if len(self._unsent) > _MOST_UNSENT:
            self._finish("it does not read what it is sent")
        return self.is_open

    def receive(self) -> list[dict[str, Any]]:
        """Go on with what waits in either direction; return the messages that have come.

        Raises:
            LinkError: the link has ended, and all that came before was returned.
        """
        if self._why is None and time.monotonic() >= self.deadline:
            self._finish("it was not done with the handshake in time" if self._connected else "no answer")
        if self._why is None and self._is_connected():
            self._write()
            self._read()
        messages, self._messages = self._messages, []
        if self._why is not None and not messages:
            raise LinkError(f"the link with {self.peer} has ended: {self._why}.")
        return messages

    def close(self) -> None:
        """End it; what the kernel has taken is still delivered."""
        self._why = self._why or "it was closed here"
        self._end.close()

    # The socket.

    def _is_connected(self) -> bool:
        if not self._connected:
            error = self._end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._finish(_strerror(error))
            else:
                try:
                    self._end.getpeername()
                    self._connected = True
                except OSError:
                    pass  # not yet
        return self._connected

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._end.send(self._unsent, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass
        except OSError as error:
            # What came before may still be read.
            self._unsent.clear()
            self._read()
            self._finish(_strerror(error.errno))

    def _read(self) -> None:
        for _ in range(_READS):
            if self._why is not None:
                return
            try:
                # Before the other side is known, not a byte more is taken than the handshake needs.
                piece = self._end.recv(_READ if self.hello is not None else self._lacking())
            except BlockingIOError:
                return
            except OSError as error:
                self._finish(_strerror(error.errno))
                return
            if not piece:
                self._finish(self._how_it_closed())
                return
            self._unread += piece
            self._digest()

    def _finish(self, why: str) -> None:
        self._why = self._why or why
        self._unsent.clear()
        # A selector wakes for it, so that the driver learns of it where it was not reading.
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def _how_it_closed(self) -> str:
        if self.hello is not None:
            return (
                "the other side closed it in the middle of a message"
                if self._unread
                else "the other side closed it"
            )
        return "the other side closed it during the handshake: do both have the same token file?"

    # Frames.

    def _lacking(self) -> int:
        """How many bytes the handshake's next part lacks."""
        if self._keys is None:
            return len(_MAGIC) + _NONCE - len(self._unread)
        if len(self._unread) < _LENGTH:
            return _LENGTH - len(self._unread)
        return _LENGTH + int.from_bytes(self._unread[:_LENGTH]) + _TAG - len(self._unread)

    def _digest(self) -> None:
        """Take whole parts from what was read."""
        if self._keys is None and not self._greeted():
            return
        while self._why is None and len(self._unread) >= _LENGTH:
            length = int.from_bytes(self._unread[:_LENGTH])
            longest = LONGEST if self.hello is not None else _LONGEST_HELLO
            if length > longest:
                self._finish(f"a message of {length} bytes was announced, and {longest} are allowed")
                return
            if len(self._unread) < _LENGTH + length + _TAG:
                return
            body = bytes(self._unread[_LENGTH : _LENGTH + length])
            tag = bytes(self._unread[_LENGTH + length : _LENGTH + length + _TAG])
            del self._unread[: _LENGTH + length + _TAG]
            self._deliver(body, tag)

    def _greeted(self) -> bool:
        start = min(len(self._unread), len(_MAGIC))
        if self._unread[:start] != _MAGIC[:start]:
            self._finish("it is no agent of this version of Paceline")
            return False
        if self._lacking():
            return False
        theirs = bytes(self._unread[len(_MAGIC) :])
        self._unread.clear()
        listener, connector = (self._nonce, theirs) if self._side == "listener" else (theirs, self._nonce)
        self._keys = {
            side: hmac.digest(
                self._token, b"%s%s\0%s%s" % (_MAGIC, side.encode(), listener, connector), "sha256"
            )
            for side in _OTHER
        }
        if self._side == "connector":
            self._frame(self._own_hello)
            self._write()
        return True

    def _tag(self, side: Side, number: int, body: bytes) -> bytes:
        assert self._keys is not None
        return hmac.digest(self._keys[side], number.to_bytes(8) + body, "sha256")

    def _frame(self, body: bytes) -> None:
        self._unsent += len(body).to_bytes(_LENGTH) + body + self._tag(self._side, self._sent, body)
        self._sent += 1

    def _deliver(self, body: bytes, tag: bytes) -> None:
        if not hmac.compare_digest(tag, self._tag(_OTHER[self._side], self._taken, body)):
            self._finish(
                "it does not hold this run's token"
                if self.hello is None
                else "a message was changed on its way, or is not the other side's"
            )
            return
        self._taken += 1
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self._finish("what it sent is no JSON object")
        elif self.hello is not None:
            self._messages.append(message)
        else:
            self.hello = message
            self.deadline = math.inf
            if self._side == "listener":
                self._frame(self._own_hello)
                self._write()


def _body(message: Mapping[str, Any], longest: int) -> bytes:
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    if len(body) > longest:
        raise ValueError(f"a message of {len(body)} bytes is longer than the {longest} that are allowed")
    return body


def _strerror(number: int | None) -> str:
    return "unknown error" if number is None else os.strerror(number)


def _notice_death(end: socket.socket, dead_after_s: float) -> None:
    """Have the kernel end the connection with a machine that is gone, be something under way or not."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, math.ceil(dead_after_s) - 1))
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(dead_after_s * 1000))
