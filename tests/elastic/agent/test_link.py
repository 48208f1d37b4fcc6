"""Links between agents: over real sockets, against peers that lie, stop, flood, and cut."""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.elastic.consensus.transport import (
    LONGEST,
    AuthenticatedConnection,
    Listener,
    PeerConnectionError,
    connect,
)

TOKEN = bytes(range(32))
GREETING = len(b"paceline-link-1\n") + 32


def wait(*watched: Any, write: bool = False) -> None:
    """Until one of these is ready, as the agent's selector waits."""
    with selectors.DefaultSelector() as selector:
        for item in watched:
            wants = write or (isinstance(item, AuthenticatedConnection) and item.wants_write)
            selector.register(item, selectors.EVENT_READ | (selectors.EVENT_WRITE if wants else 0))
        assert selector.select(20), "nothing happens"


def receive(link: AuthenticatedConnection, count: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    while len(messages) < count:
        wait(link)
        messages += link.receive()
    return messages


def ended(link: AuthenticatedConnection) -> str:
    """Why the link ends."""
    while True:
        wait(link)
        try:
            assert link.receive() == []
        except PeerConnectionError as error:
            return str(error)


class Network:
    """A listener, and what connects to it; all is closed with the test."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack

    def listen(self, **options: Any) -> Listener:
        listener = Listener("127.0.0.1", 0, TOKEN, {"i": "listen"}, **options)
        self.stack.callback(listener.close)
        return listener

    def connect(self, listener: Listener, token: bytes = TOKEN, **options: Any) -> AuthenticatedConnection:
        link = connect("127.0.0.1", listener.port, token, {"i": "connect"}, **options)
        self.stack.callback(link.close)
        return link

    def raw(self, listener: Listener) -> socket.socket:
        end = socket.create_connection(("127.0.0.1", listener.port), timeout=20)
        self.stack.callback(end.close)
        return end

    def pair(self) -> tuple[AuthenticatedConnection, AuthenticatedConnection]:
        listener = self.listen()
        ours = self.connect(listener)
        theirs: list[AuthenticatedConnection] = []
        while not (theirs and ours.is_open):
            wait(listener, ours) if not theirs else wait(ours)
            theirs += listener.accept()[0]
            assert ours.receive() == []
        listener.close()
        self.stack.callback(theirs[0].close)
        return ours, theirs[0]

    def refusals(self, listener: Listener, count: int = 1) -> list[str]:
        refused: list[str] = []
        while len(refused) < count:
            wait(listener)
            links, why = listener.accept()
            assert not links
            refused += why
        return refused


@pytest.fixture
def network() -> Iterator[Network]:
    with ExitStack() as stack:
        yield Network(stack)


def test_both_sides_learn_of_each_other(network: Network) -> None:
    ours, theirs = network.pair()
    assert ours.hello == {"i": "listen"}
    assert theirs.hello == {"i": "connect"}


def test_messages_arrive_whole_and_in_order_in_both_directions(network: Network) -> None:
    ours, theirs = network.pair()
    messages = [{"n": n, "text": "é" * (n * n)} for n in range(60)]
    for message in messages:
        assert ours.send(message)
        assert theirs.send(message)
    assert receive(theirs, 60) == messages
    assert receive(ours, 60) == messages


def test_the_longest_message_passes_and_a_longer_one_is_refused(network: Network) -> None:
    ours, theirs = network.pair()
    message = {"x": "y" * (LONGEST - len('{"x":""}'))}
    assert ours.send(message)
    sent = 1
    while not ours.wants_write:  # until it is more than the kernel takes
        sent += ours.send(message)
    got = 0
    while got < sent:
        wait(ours, theirs)
        ours.receive()
        for received in theirs.receive():
            assert received == message
            got += 1
    with pytest.raises(ValueError, match="longer than the 1048576 that are allowed"):
        ours.send({"x": "y" * LONGEST})


def test_what_came_before_the_end_is_returned_first(network: Network) -> None:
    ours, theirs = network.pair()
    ours.send({"n": 1})
    ours.close()
    assert not ours.send({"n": 2})
    assert receive(theirs, 1) == [{"n": 1}]
    assert "the other side closed it." in ended(theirs)
    assert not theirs.send({"n": 3})


def test_a_side_that_does_not_read_neither_blocks_nor_fills_the_other(network: Network) -> None:
    ours, _ = network.pair()
    message = {"x": "y" * 500_000}
    sends = next(n for n in range(100) if not ours.send(message))
    assert sends > 10
    assert "does not read" in ended(ours)


def test_who_does_not_hold_the_token_is_refused_and_told_what_to_check(network: Network) -> None:
    listener = network.listen()
    liar = network.connect(listener, token=bytes(32))
    assert liar.receive() == []
    wait(listener)
    assert listener.accept() == ([], [])  # its greeting is not all
    wait(liar)
    liar.receive()
    [why] = network.refusals(listener)
    assert "does not hold this run's token" in why
    assert "do both have the same token file?" in ended(liar)
    assert liar.hello is None


def test_a_listener_without_the_token_learns_nothing(network: Network) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = connect("127.0.0.1", server.getsockname()[1], TOKEN, {"i": "connect"})
        network.stack.callback(link.close)
        wait(link, write=True)
        link.receive()
        end, _ = server.accept()
        with end:
            greeting = end.recv(GREETING, socket.MSG_WAITALL)
            end.sendall(greeting)  # its own words
            wait(link)
            link.receive()
            hello = end.recv(1000)
            end.sendall(hello)
            assert "does not hold this run's token" in ended(link)


def test_an_unknown_protocol_is_refused_before_anything_is_parsed(network: Network) -> None:
    listener = network.listen()
    network.raw(listener).sendall(b"GET / HTTP/1.1\r\n\r\n")
    [why] = network.refusals(listener)
    assert "not an agent of this version" in why


def test_a_hello_without_bounds_is_refused(network: Network) -> None:
    listener = network.listen()
    end = network.raw(listener)
    wait(listener)
    assert listener.accept() == ([], [])
    end.sendall(end.recv(GREETING, socket.MSG_WAITALL) + (1 << 20).to_bytes(4))
    [why] = network.refusals(listener)
    assert "1048576 bytes was announced, and 16384 are allowed" in why


def test_an_address_is_reported_once(network: Network) -> None:
    listener = network.listen()
    refused: list[str] = []
    for _ in range(3):
        end = network.raw(listener)
        end.sendall(b"x" * GREETING)
        while not _ends(end):
            wait(listener, end)
            refused += listener.accept()[1]
    assert len(refused) == 1


def test_silent_peers_keep_nobody_out(network: Network) -> None:
    listener = network.listen(most=4)
    silent = [network.raw(listener) for _ in range(10)]
    wait(listener)
    listener.accept()
    honest = network.connect(listener)
    opened: list[AuthenticatedConnection] = []
    while not opened:
        wait(listener, honest)
        opened += listener.accept()[0]
        honest.receive()
    network.stack.callback(opened[0].close)
    # All but the last of them were closed, each with nothing but a greeting.
    assert sum(_ends(end) for end in silent) >= 7


def _ends(end: socket.socket) -> bool:
    end.setblocking(False)
    try:
        while end.recv(1000):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_who_takes_too_long_is_refused(network: Network) -> None:
    listener = network.listen(within_s=0.0)
    network.raw(listener)
    assert network.refusals(listener)[0].endswith("not done with the handshake in time.")
    quick = network.listen()
    link = network.connect(quick, within_s=0.0)
    with pytest.raises(PeerConnectionError, match=r"no answer|handshake in time"):
        link.receive()
    assert quick.deadline > time.monotonic()


def test_nobody_there_is_an_error_with_its_reason(network: Network) -> None:
    listener = network.listen()
    listener.close()
    with pytest.raises(PeerConnectionError, match="refused"):  # at once, or as the answer comes  # noqa: PT012
        link = network.connect(listener)
        raise PeerConnectionError(ended(link))
    with pytest.raises(PeerConnectionError, match=r"no link with nowhere\.invalid:1"):
        connect("nowhere.invalid", 1, TOKEN, {})


def test_a_port_that_is_taken_is_an_error(network: Network) -> None:
    listener = network.listen()
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{listener.port}.*already in use"):
        Listener("127.0.0.1", listener.port, TOKEN, {})
    with pytest.raises(ConfigError, match="Cannot assign"):
        Listener("192.0.2.1", 0, TOKEN, {})


def test_the_kernel_is_asked_to_notice_a_dead_machine(network: Network) -> None:
    ours, theirs = network.pair()
    for link in (ours, theirs):
        with socket.socket(fileno=os.dup(link.fileno())) as end:
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 4000


# What a tampering network can do: it sits between the two.


class Wire:
    """A link's two ends, with a man in the middle who carries the bytes of one direction by hand."""

    def __init__(self) -> None:
        self.sender, near = self._end("connector")
        self.receiver, far = self._end("listener")
        self.near, self.far = near, far
        self.pump(self.far, self.near)
        self.pump(self.near, self.far)
        assert self.receiver.receive() == []
        self.pump(self.far, self.near)
        assert self.sender.receive() == []
        assert self.sender.is_open
        assert self.receiver.is_open

    def _end(self, side: Any) -> tuple[AuthenticatedConnection, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        ours.setblocking(False)
        theirs.settimeout(20)
        link = AuthenticatedConnection(ours, side, "peer", TOKEN, {}, time.monotonic() + 60, 4.0)
        with suppress(PeerConnectionError):
            link.receive()
        return link, theirs

    def pump(self, source: socket.socket, sink: socket.socket) -> None:
        """Carry what is there; the other end of the sink then reads it."""
        sink.sendall(source.recv(1 << 16))
        link = self.sender if sink is self.near else self.receiver
        wait(link)
        link.receive()

    def sent(self, *messages: dict[str, Any]) -> bytes:
        """What these messages are on the wire."""
        for message in messages:
            assert self.sender.send(message)
        self.sender.close()
        content = b""
        while piece := self.near.recv(1 << 16):
            content += piece
        return content

    def deliver(self, content: bytes) -> tuple[list[dict[str, Any]], str]:
        """All that the receiver takes of these bytes, and why the link ends."""
        self.far.sendall(content)
        self.far.shutdown(socket.SHUT_WR)
        messages: list[dict[str, Any]] = []
        while True:
            wait(self.receiver)
            try:
                messages += self.receiver.receive()
            except PeerConnectionError as error:
                return messages, str(error)

    def close(self) -> None:
        for end in (self.sender, self.receiver, self.near, self.far):
            end.close()


@pytest.fixture
def wires() -> Iterator[Callable[[], Wire]]:
    with ExitStack() as stack:

        def make() -> Wire:
            wire = Wire()
            stack.callback(wire.close)
            return wire

        yield make


MESSAGES = [{"n": n, "text": "x" * n} for n in range(4)]
PROPERTY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_untouched_bytes_arrive_cut_as_one_likes(wires: Callable[[], Wire]) -> None:
    wire = wires()
    content = wire.sent(*MESSAGES)
    for byte in content[:-1]:
        wire.far.sendall(bytes((byte,)))
    messages, why = wire.deliver(content[-1:])
    assert messages == MESSAGES
    assert why.endswith("the other side closed it.")


@PROPERTY
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed(wires: Callable[[], Wire], place: float, bit: int) -> None:
    wire = wires()
    content = bytearray(wire.sent(*MESSAGES))
    content[int(place * len(content))] ^= 1 << bit
    messages, why = wire.deliver(bytes(content))
    assert len(messages) < len(MESSAGES)
    assert messages == MESSAGES[: len(messages)]
    assert any(words in why for words in ("changed on its way", "in the middle of a message", "was announced"))
    wire.close()


@PROPERTY
@example(place=0.0)
@given(place=st.floats(0, 1, exclude_max=True))
def test_a_cut_gives_whole_messages_only(wires: Callable[[], Wire], place: float) -> None:
    wire = wires()
    content = wire.sent(*MESSAGES)
    messages, why = wire.deliver(content[: int(place * len(content))])
    assert messages == MESSAGES[: len(messages)]
    assert "the other side closed it" in why
    wire.close()


def frames(content: bytes) -> list[bytes]:
    found = []
    while content:
        size = 4 + int.from_bytes(content[:4]) + 32
        found.append(content[:size])
        content = content[size:]
    return found


@PROPERTY
@given(order=st.lists(st.integers(0, 3), max_size=6))
def test_a_replayed_lost_or_reordered_message_is_noticed(wires: Callable[[], Wire], order: list[int]) -> None:
    wire = wires()
    parts = frames(wire.sent(*MESSAGES))
    messages, why = wire.deliver(b"".join(parts[n] for n in order))
    right = next((i for i, n in enumerate(order) if n != i), len(order))
    assert messages == MESSAGES[:right]
    assert ("changed on its way" in why) == (right < len(order))
    wire.close()


def test_a_message_is_not_taken_for_one_of_the_other_direction(wires: Callable[[], Wire]) -> None:
    wire = wires()
    assert wire.sender.send(MESSAGES[0])
    wire.near.sendall(wire.near.recv(1 << 16))
    assert "is not the other side's" in ended(wire.sender)


def test_a_message_of_another_link_with_the_same_token_is_refused(wires: Callable[[], Wire]) -> None:
    messages, why = wires().deliver(wires().sent(MESSAGES[0]))
    assert messages == []
    assert "changed on its way" in why


def test_what_is_sent_is_json_and_authenticated(wires: Callable[[], Wire]) -> None:
    [frame] = frames(wires().sent(MESSAGES[3]))
    assert json.loads(frame[4:-32]) == MESSAGES[3]
