"""An agent's links to the other agents of its job: who can be reached, and what they say. No torch."""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.agent.link import Link, LinkError, connect
from paceline.agent.listener import Listener

_ALIVE = "alive"
_ALIVE_EVERY_S = 0.5
_RETRY_S = 0.5
_HANDSHAKE_S = 5.0

Address = tuple[str, int]


class Events(Protocol):
    """Who hears of the peers."""

    def linked(self, peer: str, hello: Mapping[str, Any]) -> None:
        """A link with this peer stands."""

    def lost(self, peer: str, why: str) -> None:
        """The link has ended, or the peer was silent for too long."""

    def heard(self, peer: str, message: Mapping[str, Any]) -> None:
        """A message has come."""

    def refused(self, why: str) -> None:
        """Somebody who does not hold the run's token, or is no agent, was sent away."""


@dataclass
class _Peer:
    name: str
    link: Link
    heard_at: float


@dataclass
class _Call:
    """An address that this agent connects to, and calls again as long as it is wanted."""

    address: Address
    link: Link | None = None
    next_at: float = 0.0
    last_error: str = ""


@dataclass
class Mesh:
    """All links of one agent, in its loop.

    Attributes:
        selector: of the loop; its handlers are the registered data.
        listener: where others link to this one.
        token: the run's.
        hello: what the others learn of this one with the handshake; ``name`` is in it.
        events: who hears what happens.
        silence_s: a peer that says nothing for so long is lost.
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
        """Link to these addresses, again and again where that fails or ends, and to no others any more."""
        for address in set(self._calls) - set(addresses):
            call = self._calls.pop(address)
            if call.link is not None and not call.link.is_open:
                self._unwatch(call.link)
                call.link.close()
        for address in addresses:
            self._calls.setdefault(address, _Call(address))
        self._dial()

    @property
    def last_error(self) -> str:
        """Why the address called first cannot be reached; "" where it can, or was not tried yet."""
        return next((call.last_error for call in self._calls.values() if call.last_error), "")

    def send(self, peer: str, message: Mapping[str, Any]) -> None:
        """Send; nothing happens where there is no link, whose end is told of otherwise."""
        if peer in self._peers:
            link = self._peers[peer].link
            link.send(message)
            self._watch(link)

    def hello_of(self, peer: str) -> Mapping[str, Any]:
        """What a linked peer has said of itself."""
        return (self._peers[peer].link.hello if peer in self._peers else None) or {}

    def address_of(self, peer: str) -> Address | None:
        """Where a linked peer listens; None where it does not say."""
        match self.hello_of(peer):
            case {"host": str(host), "port": int(port)}:
                return host, port
        return None

    def drop(self, peer: str) -> None:
        """End the link with a peer, without an event."""
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
        """Do what is due: tell the peers that we live, lose patience with the silent, call again."""
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
        """End all links, once what was sent is with the kernel."""
        for peer in list(self._peers):
            self.drop(peer)
        self.call([])
        self.selector.unregister(self.listener)
        self.listener.close()

    # Calls.

    def _dial(self) -> None:
        now = time.monotonic()
        for call in self._calls.values():
            if call.link is None and now >= call.next_at:
                call.next_at = now + _RETRY_S
                try:
                    call.link = connect(*call.address, self.token, self.hello, within_s=_HANDSHAKE_S)
                except LinkError as error:
                    call.last_error = str(error)
                    continue
                self._watch(call.link, call)

    def _on_call(self, call: _Call) -> None:
        link = call.link
        assert link is not None
        try:
            messages = link.receive()
        except LinkError as error:
            call.last_error = str(error)
            self._end_call(call)
            return
        if link.is_open:
            call.last_error = ""
            self._unwatch(link)
            self._welcome(link)
            for message in messages:
                self._hear(link, message)
        else:
            self._watch(link, call)

    def _end_call(self, call: _Call) -> None:
        if call.link is not None:
            self._close(call.link)
            call.link, call.next_at = None, time.monotonic() + _RETRY_S

    # Links.

    def _on_listener(self) -> None:
        opened, refused = self.listener.accept()
        for why in refused:
            self.events.refused(why)
        for link in opened:
            self._welcome(link)

    def _welcome(self, link: Link) -> None:
        assert link.hello is not None
        name = str(link.hello.get("name", ""))
        if name in self._peers:
            # It has noticed the old link's end before us.
            self._lose(self._peers[name], "has linked anew")
        self._peers[name] = _Peer(name, link, time.monotonic())
        self._watch(link)
        self.events.linked(name, link.hello)

    def _on_link(self, link: Link) -> None:
        peer = self._of(link)
        if peer is None:
            return
        try:
            messages = link.receive()
        except LinkError as error:
            self._lose(peer, str(error))
            return
        for message in messages:
            self._hear(link, message)
        if self._of(link) is not None:
            self._watch(link)

    def _hear(self, link: Link, message: Mapping[str, Any]) -> None:
        peer = self._of(link)
        if peer is None:
            return  # dropped by what came before
        peer.heard_at = time.monotonic()
        if message.get("kind") != _ALIVE:
            self.events.heard(peer.name, message)

    def _lose(self, peer: _Peer, why: str) -> None:
        del self._peers[peer.name]
        self._close(peer.link)
        self.events.lost(peer.name, why)

    def _close(self, link: Link) -> None:
        self._unwatch(link)
        link.close()
        for call in self._calls.values():
            if call.link is link:
                call.link, call.next_at = None, time.monotonic() + _RETRY_S

    def _of(self, link: Link) -> _Peer | None:
        return next((peer for peer in self._peers.values() if peer.link is link), None)

    def _watch(self, link: Link, call: _Call | None = None) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_write else 0)
        handler = (lambda: self._on_link(link)) if call is None else (lambda: self._on_call(call))
        try:
            key = self.selector.get_key(link)
        except KeyError:
            self.selector.register(link, wanted, handler)
        else:
            if key.events != wanted:
                self.selector.modify(link, wanted, key.data)

    def _unwatch(self, link: Link) -> None:
        with suppress(KeyError, ValueError):
            self.selector.unregister(link)
