"""Connections between agents: authenticated, framed, and monitored."""

from __future__ import annotations

import errno
import hmac
import json
import math
import os
import secrets
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from paceline.core.errors import ConfigError, PacelineError

# --- Authenticated connections over TCP, for one selector, without blocking. No torch
#
# Both sides send a random nonce. From these and the run's shared token each derives one key per direction, which
# prevents reflection and replay from an earlier connection. Every message is then a frame: its length (4 bytes,
# big-endian), a JSON object, and an HMAC-SHA256 over the direction's sequence number and the object. The first frame of
# each side is its *hello*, which proves that it has the token; the listener sends its own only after the peer's proof.
# From an unauthenticated peer only a greeting of fixed size and a length are parsed.
#
# Messages cannot be forged, changed, replayed, reordered or truncated without detection. They are not encrypted, so the
# network can read them.


LONGEST = 1 << 20  # bytes of a message
_LONGEST_HELLO = 1 << 14
_MOST_UNSENT = 8 << 20  # queued bytes for a peer that does not read
_READ = 1 << 16
_READS = 4  # per event, so that one peer cannot starve the others

_MAGIC = b"paceline-link-1\n"
_NONCE = 32
_LENGTH = 4
_TAG = 32

Side = Literal["connector", "listener"]
_OTHER: dict[Side, Side] = {"connector": "listener", "listener": "connector"}


class PeerConnectionError(PacelineError):
    """A connection has ended, or was never established; the message gives the reason."""


def connect(
    host: str,
    port: int,
    token: bytes,
    hello: Mapping[str, Any],
    *,
    within_s: float = 10.0,
    dead_after_s: float = 4.0,
) -> AuthenticatedConnection:
    """Open a connection with the agent that listens there; it is ready once :attr:`AuthenticatedConnection.is_open`.

    Args:
        host: an address; resolving a name may block.
        port: of its :class:`~paceline.elastic.consensus.transport.Listener`.
        hello: this side's handshake data; at most 16 KiB as JSON.
        within_s: time limit of connecting and the handshake.
        dead_after_s: timeout after which a node that does not answer counts as dead.

    Raises:
        PeerConnectionError: the address does not exist, or has no route.
    """
    where = f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        end = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
    except OSError as error:
        raise PeerConnectionError(f"no link with {where}: {error.strerror}.") from error
    try:
        with suppress(BlockingIOError):
            end.connect(address)
        return AuthenticatedConnection(end, "connector", where, token, hello, time.monotonic() + within_s, dead_after_s)
    except OSError as error:
        end.close()
        raise PeerConnectionError(f"no link with {where}: {error.strerror}.") from error


_PROBE = "probe"  # in the hello of a process that asks for the agent's name alone


def agent_name(address: tuple[str, int], token: bytes, within_s: float) -> str | None:
    """Return the name of the agent at this address that has the token; None without one. It hears of no peer."""
    try:
        link = connect(*address, token, {_PROBE: True}, within_s=within_s)
    except PeerConnectionError:
        return None
    with closing(link), selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        while link.hello is None:
            selector.modify(link, selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_write else 0))
            selector.select(max(0.0, link.deadline - time.monotonic()))
            try:
                link.receive()
            except PeerConnectionError:
                break  # it may have sent its name before
        return None if link.hello is None else str(link.hello.get("name", ""))


def is_agent(address: tuple[str, int], within_s: float) -> bool:
    """Return whether an agent, of any run, greets at this address; it needs no token, and shakes no hands."""
    with suppress(OSError), socket.create_connection(address, timeout=within_s) as end:
        return end.recv(len(_MAGIC)) == _MAGIC
    return False


class AuthenticatedConnection:
    """One end of a connection, for a selector that watches for reading, and for writing if requested.

    Call :meth:`receive` whenever it is ready for either, or its deadline has passed.

    Attributes:
        peer: the other side's address, for messages.
        deadline: of the handshake, by the monotonic clock; infinite afterwards.
        hello: the other side's handshake data, once the connection is open.
        peer_closed: whether the other side has closed the connection.
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
        self.peer_closed = False
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
        self._why: str | None = None  # why it ended
        _notice_death(end, dead_after_s)

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def is_open(self) -> bool:
        """Whether the other side has proven that it has the token, and the connection has not ended."""
        return self.hello is not None and self._why is None

    @property
    def wants_write(self) -> bool:
        """Whether to watch the socket for writing."""
        return self._why is None and (bool(self._unsent) or not self._connected)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send, or queue until the socket is writable; return whether the connection is open.

        Raises:
            ValueError: the message is longer than ``LONGEST`` bytes, or not JSON.
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
        """Process both directions; return the received messages.

        Raises:
            PeerConnectionError: the connection has ended, and all messages were returned.
        """
        if self._why is None and time.monotonic() >= self.deadline:
            self._finish("it was not done with the handshake in time" if self._connected else "no answer")
        if self._why is None and self._is_connected():
            self._write()
            self._read()
        messages, self._messages = self._messages, []
        if self._why is not None and not messages:
            raise PeerConnectionError(f"the link with {self.peer} has ended: {self._why}.")
        return messages

    def close(self) -> None:
        """Close it; the kernel still delivers what it has taken."""
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
            # Earlier messages may still be read.
            self._unsent.clear()
            self._read()
            # The kernel reports an error once; after that, a node that does not answer reads like a closed connection.
            self.peer_closed = error.errno in (errno.ECONNRESET, errno.EPIPE)
            self._finish(_strerror(error.errno))

    def _read(self) -> None:
        for _ in range(_READS):
            if self._why is not None:
                return
            try:
                # Before the authentication, read not a byte more than the handshake needs.
                piece = self._end.recv(_READ if self.hello is not None else self._lacking())
            except BlockingIOError:
                return
            except OSError as error:
                self.peer_closed = error.errno == errno.ECONNRESET
                self._finish(_strerror(error.errno))
                return
            if not piece:
                self.peer_closed = self._why is None
                self._finish(self._how_it_closed())
                return
            self._unread += piece
            self._digest()

    def _finish(self, why: str) -> None:
        self._why = self._why or why
        self._unsent.clear()
        # This wakes the selector, so that the driver learns of it.
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def _how_it_closed(self) -> str:
        if self.hello is not None:
            return "the other side closed it in the middle of a message" if self._unread else "the other side closed it"
        closed = "the other side closed it during the handshake"
        # A listener proves that it has the token only to a side that has done so.
        return closed if self._side == "listener" else f"{closed}: do both have the same token file?"

    # Frames.

    def _lacking(self) -> int:
        """Return how many bytes the handshake's next part lacks."""
        if self._keys is None:
            return len(_MAGIC) + _NONCE - len(self._unread)
        if len(self._unread) < _LENGTH:
            return _LENGTH - len(self._unread)
        return _LENGTH + int.from_bytes(self._unread[:_LENGTH]) + _TAG - len(self._unread)

    def _digest(self) -> None:
        """Process complete frames."""
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
            self._finish("it is not an agent of this version of Paceline")
            return False
        if self._lacking():
            return False
        peer_nonce = bytes(self._unread[len(_MAGIC) :])
        self._unread.clear()
        listener, connector = (self._nonce, peer_nonce) if self._side == "listener" else (peer_nonce, self._nonce)
        self._keys = {
            side: hmac.digest(self._token, b"%s%s\0%s%s" % (_MAGIC, side.encode(), listener, connector), "sha256")
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
            self._finish("its message is not a JSON object")
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
    """Make the kernel end the connection with a dead node, with or without traffic."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, math.ceil(dead_after_s) - 1))
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(dead_after_s * 1000))


# --- The listener. No torch ---


_MOST_REPORTED = 64  # addresses


class Listener:
    """Listens on one address, and authenticates connections.

    For a selector it is one descriptor, ready for reading when :meth:`accept` has work. At most ``most`` handshakes run
    at once: a further one replaces the oldest, so that silent peers cannot block others.

    Attributes:
        port: the actual port.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes,
        hello: Mapping[str, Any],
        *,
        within_s: float = 5.0,
        dead_after_s: float = 4.0,
        most: int = 32,
    ) -> None:
        """Listen.

        Args:
            host: an address of this node, such as 127.0.0.1.
            port: 0 for any.
            hello: this side's handshake data.
            within_s: time limit of a handshake.
            dead_after_s: as for :func:`connect`.
            most: maximum number of concurrent handshakes.

        Raises:
            ConfigError: it cannot listen there.
        """
        self._token, self._hello = token, hello
        self._within_s, self._dead_after_s, self._most = within_s, dead_after_s, most
        self._shaking: dict[AuthenticatedConnection, str] = {}  # the oldest first; and the peer's host
        self._reported: set[str] = set()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"cannot listen on {host}:{port} for other nodes: {error.strerror}. "
                "Choose an address of this node and a free port."
            ) from error
        self.host, self.port = self._socket.getsockname()[:2]
        self._ready = selectors.EpollSelector()
        self._ready.register(self._socket, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return the descriptor of an epoll that watches the socket and all handshakes."""
        return self._ready.fileno()

    @property
    def deadline(self) -> float:
        """The latest time for :meth:`accept`, by the monotonic clock."""
        return min((link.deadline for link in self._shaking), default=math.inf)

    def accept(self) -> tuple[list[AuthenticatedConnection], list[str]]:
        """Continue the handshakes; return newly open connections, and refusals.

        The refusals are messages for the user; every address is reported once.
        """
        opened: list[AuthenticatedConnection] = []
        refused: list[str] = []
        ready = {key.fileobj for key, _ in self._ready.select(0)}
        if self._socket in ready:
            ready |= set(self._welcome(refused))
        now = time.monotonic()
        for link in [link for link in self._shaking if link in ready or link.deadline <= now]:
            try:
                link.receive()
            except PeerConnectionError as error:
                self._report(self._drop(link), str(error), refused)
                continue
            if link.is_open:
                self._ready.unregister(link)
                del self._shaking[link]
                opened.append(link)
        return opened, refused

    def close(self) -> None:
        """Stop listening, and end the handshakes; open connections stay."""
        for link in list(self._shaking):
            self._drop(link)
        self._ready.close()
        self._socket.close()

    def _welcome(self, refused: list[str]) -> list[AuthenticatedConnection]:
        links = []
        for _ in range(self._most):
            try:
                end, address = self._socket.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue
                if self._shaking:
                    # No descriptor is left, so give up a handshake for the new connection.
                    self._drop(next(iter(self._shaking)))
                    continue
                self._report("", f"another node's connection cannot be accepted: {error.strerror}.", refused)
                break
            end.setblocking(False)
            host, port = address[:2]
            try:
                link = AuthenticatedConnection(
                    end,
                    "listener",
                    f"{host}:{port}",
                    self._token,
                    self._hello,
                    time.monotonic() + self._within_s,
                    self._dead_after_s,
                )
            except OSError:
                end.close()  # it has already gone
                continue
            while len(self._shaking) >= self._most:
                oldest = next(iter(self._shaking))
                self._report(self._drop(oldest), f"{oldest.peer} was too slow in the handshake.", refused)
            self._shaking[link] = host
            self._ready.register(link, selectors.EVENT_READ)
            links.append(link)
        return links

    def _drop(self, link: AuthenticatedConnection) -> str:
        self._ready.unregister(link)
        link.close()
        return self._shaking.pop(link)

    def _report(self, host: str, why: str, refused: list[str]) -> None:
        if host not in self._reported and len(self._reported) < _MOST_REPORTED:
            self._reported.add(host)
            refused.append(why)


# --- The network of an agent's peers. No torch ---


_ALIVE = "alive"
_ALIVE_EVERY_S = 0.5
_RETRY_S = 0.5
_HANDSHAKE_S = 5.0

Address = tuple[str, int]


class Events(Protocol):
    """Receives the events of peers."""

    def linked(self, peer: str, hello: Mapping[str, Any]) -> None:
        """Handle a new connection with this peer."""

    def lost(self, peer: str, why: str, *, closed: bool = False) -> None:
        """Handle the end of a connection, or a peer that was silent for too long.

        Args:
            closed: whether the peer, or the kernel after the end of its process, has closed it.
        """

    def heard(self, peer: str, message: Mapping[str, Any]) -> None:
        """Handle a message."""

    def refused(self, why: str) -> None:
        """Handle a rejected connection: without the run's token, or of another program."""


@dataclass
class _Peer:
    name: str
    link: AuthenticatedConnection
    heard_at: float


@dataclass
class _Call:
    """An address to which this agent connects, and reconnects as long as it is wanted."""

    address: Address
    link: AuthenticatedConnection | None = None
    next_at: float = 0.0
    last_error: str = ""


@dataclass
class PeerNetwork:
    """All connections of one agent, in its loop.

    Attributes:
        selector: of the loop; handlers are the registered data.
        hello: this agent's handshake data, which include its ``name``.
        silence_s: timeout of a silent peer.
    """

    selector: selectors.BaseSelector
    listener: Listener
    token: bytes
    hello: Mapping[str, Any]
    events: Events
    silence_s: float
    _peers: dict[str, _Peer] = field(default_factory=dict)
    _calls: dict[Address, _Call] = field(default_factory=dict)
    _alive_at: float = 0.0

    def __post_init__(self) -> None:
        self.selector.register(self.listener, selectors.EVENT_READ, self._on_listener)

    def call(self, addresses: Sequence[Address]) -> None:
        """Connect to these addresses, with retries, and to no others any more."""
        for address in set(self._calls) - set(addresses):
            call = self._calls.pop(address)
            if call.link is not None and not call.link.is_open:
                self._unwatch(call.link)
                call.link.close()
        for address in addresses:
            self._calls.setdefault(address, _Call(address))
        self._dial()

    @property
    def connected(self) -> tuple[str, ...]:
        """The peers with an open connection."""
        return tuple(self._peers)

    @property
    def last_error(self) -> str:
        """Why an address cannot be reached; "" if all can, or were not tried yet."""
        return next((call.last_error for call in self._calls.values() if call.last_error), "")

    def send(self, peer: str, message: Mapping[str, Any]) -> None:
        """Send a message, if there is a connection."""
        if peer in self._peers:
            link = self._peers[peer].link
            link.send(message)
            self._watch(link)

    def hello_of(self, peer: str) -> Mapping[str, Any]:
        """Return a connected peer's handshake data."""
        return (self._peers[peer].link.hello if peer in self._peers else None) or {}

    def address_of(self, peer: str) -> Address | None:
        """Return a connected peer's address, or None if unknown."""
        match self.hello_of(peer):
            case {"host": str(host), "port": int(port)}:
                return host, port
        return None

    def drop(self, peer: str) -> None:
        """Close the connection with a peer, without an event."""
        if peer in self._peers:
            self._close(self._peers.pop(peer).link)

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""
        due = [self.listener.deadline, self._alive_at + _ALIVE_EVERY_S]
        due += [peer.heard_at + self.silence_s for peer in self._peers.values()]
        due += [c.next_at if c.link is None else c.link.deadline for c in self._calls.values()]
        return min(due, default=math.inf)

    def expire(self, now: float) -> None:
        """Run what is due: send heartbeats, drop silent peers, reconnect."""
        if now >= self._alive_at + _ALIVE_EVERY_S:
            self._alive_at = now
            for name in list(self._peers):
                self.send(name, {"kind": _ALIVE})
        if now >= self.listener.deadline:
            self._on_listener()
        for peer in [p for p in self._peers.values() if now >= p.heard_at + self.silence_s]:
            self._lose(peer, f"was silent for {self.silence_s:g} s")
        for call in list(self._calls.values()):
            if call.link is not None and now >= call.link.deadline:
                self._on_call(call)
        self._dial()

    def close(self) -> None:
        """Close all connections, after the kernel has taken what was sent."""
        for peer in list(self._peers):
            self.drop(peer)
        self.call([])
        self.selector.unregister(self.listener)
        self.listener.close()

    # Outgoing connections.

    def _dial(self) -> None:
        now = time.monotonic()
        for call in self._calls.values():
            if call.link is None and now >= call.next_at:
                call.next_at = now + _RETRY_S
                if any(call.address == self.address_of(peer) for peer in self._peers):
                    continue  # it was reached by another name of its host
                try:
                    call.link = connect(*call.address, self.token, self.hello, within_s=_HANDSHAKE_S)
                except PeerConnectionError as error:
                    call.last_error = str(error)
                    continue
                self._watch(call.link, call)

    def _on_call(self, call: _Call) -> None:
        link = call.link
        assert link is not None
        try:
            messages = link.receive()
        except PeerConnectionError as error:
            call.last_error = str(error)
            self._close(link)
            return
        if link.is_open:
            call.last_error = ""
            self._unwatch(link)
            self._welcome(link)
            for message in messages:
                self._hear(link, message)
        else:
            self._watch(link, call)

    # Open connections.

    def _on_listener(self) -> None:
        opened, refused = self.listener.accept()
        for why in refused:
            self.events.refused(why)
        for link in opened:
            if link.hello is not None and _PROBE in link.hello:
                link.close()
            else:
                self._welcome(link)

    def _welcome(self, link: AuthenticatedConnection) -> None:
        assert link.hello is not None
        name = str(link.hello.get("name", ""))
        if name in self._peers:
            # The peer noticed the old connection's end before this side.
            self._lose(self._peers[name], "has reconnected")
        self._peers[name] = _Peer(name, link, time.monotonic())
        self._watch(link)
        self.events.linked(name, link.hello)

    def _on_link(self, link: AuthenticatedConnection) -> None:
        peer = self._of(link)
        if peer is None:
            return
        try:
            messages = link.receive()
        except PeerConnectionError as error:
            self._lose(peer, str(error))
            return
        for message in messages:
            self._hear(link, message)
        if self._of(link) is not None:
            self._watch(link)

    def _hear(self, link: AuthenticatedConnection, message: Mapping[str, Any]) -> None:
        peer = self._of(link)
        if peer is None:
            return  # dropped by an earlier message
        peer.heard_at = time.monotonic()
        if message.get("kind") != _ALIVE:
            self.events.heard(peer.name, message)

    def _lose(self, peer: _Peer, why: str) -> None:
        del self._peers[peer.name]
        self._close(peer.link)
        self.events.lost(peer.name, why, closed=peer.link.peer_closed)

    def _close(self, link: AuthenticatedConnection) -> None:
        self._unwatch(link)
        link.close()
        for call in self._calls.values():
            if call.link is link:
                call.link, call.next_at = None, time.monotonic() + _RETRY_S

    def _of(self, link: AuthenticatedConnection) -> _Peer | None:
        return next((peer for peer in self._peers.values() if peer.link is link), None)

    def _watch(self, link: AuthenticatedConnection, call: _Call | None = None) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_write else 0)
        handler = (lambda: self._on_link(link)) if call is None else (lambda: self._on_call(call))
        try:
            key = self.selector.get_key(link)
        except KeyError:
            self.selector.register(link, wanted, handler)
        else:
            if key.events != wanted:
                self.selector.modify(link, wanted, key.data)

    def _unwatch(self, link: AuthenticatedConnection) -> None:
        with suppress(KeyError, ValueError):
            self.selector.unregister(link)
