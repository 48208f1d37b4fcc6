"""What is said over one connection, byte by byte, while the queue is full and while it is not."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import BinaryIO
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from plugins.serving.tests.conftest import Server, json_request, metrics, start_server
from plugins.serving.tests.load import PATH
from tests.processes import Processes

pytestmark = pytest.mark.integration

BODY = json.dumps(json_request()).encode()
WAITING = 'waiting_rows{model="fashion-mnist"} '


def start_small(processes: Processes, env: dict[str, str], receive_timeout: str) -> Server:
    words = ("--max-batch", "1", "--max-queue", "1", "--hang-timeout", "5min")
    words = (*words, "--receive-timeout", receive_timeout)
    return start_server(processes, env, "fashion-mnist@prod", *words, shared=True)


@pytest.fixture(scope="module")
def small(module_processes: Processes, serving_env: dict[str, str]) -> Server:
    """One that soon sends away who does not go on."""
    return start_small(module_processes, serving_env, "1s")


@pytest.fixture(scope="module")
def patient(module_processes: Processes, serving_env: dict[str, str]) -> Server:
    """One that waits also for a client that is kept from the processor."""
    return start_small(module_processes, serving_env, "1min")


@pytest.fixture
def full(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The patient one, or another; its replica stands still with two rows, and one row waits."""
    server: Server = request.getfixturevalue(getattr(request, "param", "patient"))
    [replica] = server.replicas()
    replica.send_signal(signal.SIGSTOP)
    askers = [threading.Thread(target=ask_until_taken, args=(server,)) for _ in range(3)]
    try:
        for asker in askers:
            asker.start()
        # Each of the first two may be seen waiting, once, before it goes to the replica.
        times_seen = 0
        while times_seen < 3:
            assert all(asker.is_alive() for asker in askers)
            waits = f"{WAITING}1.0" in metrics(server)
            times_seen = times_seen + 1 if waits else 0
        yield server
    finally:
        replica.send_signal(signal.SIGCONT)
        for asker in askers:
            asker.join()


def ask_until_taken(server: Server) -> None:
    while httpx.post(server.url + PATH, content=BODY, timeout=60).status_code == 429:
        pass


@contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    host, _, port = urlsplit(server.url).netloc.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        yield connection


def head(*headers: str, version: str = "1.1", length: int = len(BODY), path: str = PATH) -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", f"Content-Length: {length}", *headers, "", ""]
    return "\r\n".join(lines).encode()


def answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    response = HTTPResponse(connection)
    response.begin()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


def test_who_is_refused_can_go_on_with_the_connection(full: Server) -> None:
    with connected(full) as connection:
        for _ in range(2):
            connection.sendall(head())
            status, headers, body = answer(connection)
            assert (status, int(headers["retry-after"]) >= 1) == (429, True)
            assert "the queue is full with " in json.loads(body)["error"]
            for piece in (BODY[:100], BODY[100:]):
                connection.sendall(piece)
        chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
        connection.sendall(head("Transfer-Encoding: chunked").replace(b"Content-Length", b"X-Length") + chunk)
        assert answer(connection)[0] == 429
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer(connection)[0] == 200
    assert 'requests_total{code="429",model="fashion-mnist"}' in metrics(full)


@pytest.mark.parametrize(
    "request_head",
    [
        head("Connection: keep-alive", version="1.0"),
        head("Connection: close"),
        head("Connection: close", "Expect: 100-continue"),
    ],
)
def test_who_wants_no_other_answer_is_refused_and_left(full: Server, request_head: bytes) -> None:
    with connected(full) as connection:
        connection.sendall(request_head + BODY)
        said = b""
        while piece := connection.recv(4096):
            said += piece
    assert b" 429 " in said.splitlines()[0]
    assert b"connection: close" in said.lower()


@pytest.mark.parametrize("full", ["small"], indirect=True)
def test_who_does_not_send_what_is_refused_is_sent_away(full: Server) -> None:
    with connected(full) as connection:
        connection.sendall(head() + BODY[:10])
        assert answer(connection)[0] == 429
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /v2/mod", 408),
        (head() + BODY[:10], 408),
        (head(path="/v2/models/none/infer") + BODY[:10], 404),
        (b"", 408),
    ],
)
def test_who_does_not_go_on_is_sent_away(small: Server, sent: bytes, status: int) -> None:
    with connected(small) as connection:
        connection.sendall(sent)
        assert answer(connection)[0] == status
        assert connection.recv(1) == b""


def read_answer(stream: BinaryIO) -> tuple[int, dict[str, str], bytes]:
    """One of several answers; HTTPResponse would read on into the next."""
    status = int(stream.readline().split()[1])
    headers = {}
    while line := stream.readline().strip():
        name, _, value = line.decode().partition(": ")
        headers[name.lower()] = value
    return status, headers, stream.read(int(headers["content-length"]))


ENDLESS = b"x" * 2**16
HEALTH = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = head("Transfer-Encoding: chunked").replace(b"Content-Length", b"X-Length")


@pytest.mark.parametrize(
    ("begin", "answered"),
    [
        pytest.param(HEALTH + b"a: ", [], id="value"),
        pytest.param(HEALTH, [], id="name"),
        pytest.param(b"GET /", [], id="url"),
        pytest.param(HEALTH + b"\r\n" + HEALTH + b"a: ", [200], id="second request"),
        pytest.param(head() + BODY + HEALTH + b"a: ", [200], id="while the first is computed"),
        pytest.param(CHUNKED + b"0\r\na: ", [], id="trailer"),
        pytest.param(CHUNKED + b"1;a=", [], id="chunk"),
        pytest.param(HEALTH + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n" + HEALTH + b"a: ", [200], id="upgrade"),
    ],
)
def test_a_head_without_an_end_is_not_read(server: Server, begin: bytes, answered: list[int]) -> None:
    process = psutil.Process(server.popen.pid)
    with connected(server) as connection, connection.makefile("rb") as stream:
        connection.sendall(begin)
        connection.setblocking(False)
        sent = 0
        # The server stops reading, so that what it and the kernel take is bounded.
        while sent < 2**26:
            try:
                sent += connection.send(ENDLESS)
            except BlockingIOError:
                if process.status() == psutil.STATUS_SLEEPING:
                    break
            except (BrokenPipeError, ConnectionResetError):
                break
        assert sent < 2**26
        connection.settimeout(60)
        assert [read_answer(stream)[0] for _ in answered] == answered
        status, headers, body = read_answer(stream)
        assert (status, headers["connection"], headers["content-type"]) == (431, "close", "application/json")
        assert "65,536 bytes" in json.loads(body)["error"]
        assert stream.read(1) == b""


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        pytest.param(HEALTH + b"a: b\r\n" * 99 + b"\r\n", [200], id="100 fields"),
        pytest.param(HEALTH + b"a: b\r\n" * 100 + b"\r\n", [431], id="101 fields"),
        pytest.param(CHUNKED + b"1\r\n{\r\n0\r\n" + b"a: b\r\n" * 101, [431], id="trailer fields"),
        pytest.param(HEALTH + b"a: " + b"b" * 65_000 + b"\r\n\r\n", [200], id="64 KiB"),
        pytest.param(HEALTH + b"a: " + b"b" * 65_536 + b"\r\n\r\n", [431], id="more than 64 KiB"),
        pytest.param(b"nonsense", [400], id="no HTTP"),
        pytest.param(HEALTH + b"\r\nnonsense", [200, 400], id="no second request"),
        pytest.param(head() + BODY + b"nonsense", [200, 400], id="nonsense while the first is computed"),
        pytest.param(CHUNKED + b"nonsense", [400], id="no chunk"),
        pytest.param(b"CONNECT example.org:443 HTTP/1.1\r\n\r\n", [400], id="CONNECT"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [400], id="HTTP/2"),
    ],
)
def test_what_a_head_may_hold(server: Server, sent: bytes, statuses: list[int]) -> None:
    with connected(server) as connection, connection.makefile("rb") as stream:
        connection.sendall(sent)
        for status in statuses:
            assert (said := read_answer(stream))[0] == status
            assert status == 200 or "error" in json.loads(said[2])
        if statuses[-1] != 200:
            assert stream.read(1) == b""


SMUGGLED = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA")
WEBSOCKET = ("Connection: upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAA")


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize("split", [None, 1, -1, 5], ids=["whole", "bytes", "head", "pieces"])
@pytest.mark.parametrize("framing", ["length", "chunked", "continue"])
def test_a_body_is_read_by_its_length_whatever_protocol_a_client_offers(
    server: Server, offer: tuple[str, ...], split: int | None, framing: str
) -> None:
    """A proxy that passes the offer on would otherwise take the second answer for another client's."""
    request = head(*offer, *(["Expect: 100-continue"] if framing == "continue" else []))
    body = BODY
    if framing == "chunked":
        request = request.replace(f"Content-Length: {len(BODY)}".encode(), b"Transfer-Encoding: chunked")
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    sent = request + body + HEALTH + b"\r\n"
    sizes = {None: len(sent), 1: 1, -1: len(request), 5: 997}
    with connected(server) as connection, connection.makefile("rb") as stream:
        if framing == "continue":
            connection.sendall(request)
            assert stream.readline() == b"HTTP/1.1 100 Continue\r\n"
            stream.readline()
            sent = sent[len(request) :]
        for start in range(0, len(sent), sizes[split]):
            connection.sendall(sent[start : start + sizes[split]])
        status, _, answered = read_answer(stream)
        assert status == 200, answered
        assert json.loads(answered)["outputs"]
        status, _, answered = read_answer(stream)
        assert json.loads(answered) == {"live": True}


def nested(depth: int) -> bytes:
    return b"[" * depth + b"1" + b"]" * depth


def rows(**values: bytes) -> bytes:
    picture = json.dumps([[[0] * 28] * 28]).encode()
    cells = b", ".join(b'"%s": %s' % (name.encode(), value) for name, value in {"image": picture, **values}.items())
    return b'{"rows": [{%s}]}' % cells


@pytest.mark.parametrize(
    ("path", "fields", "body", "status"),
    [
        pytest.param(PATH, {"Content-Length": "0" * 5000 + str(len(BODY))}, BODY, 200, id="length with zeros"),
        pytest.param(PATH, {"Content-Length": "1" + "0" * 40}, b"", 400, id="length of 41 digits"),
        pytest.param(PATH, {"Origin": "http://[::1"}, BODY, 403, id="origin"),
        pytest.param(PATH, {"Origin": "http://[::1]]:8/[x"}, BODY, 403, id="another origin"),
        *(
            pytest.param("/predict", {}, rows(id=nested(depth)), status, id=f"other value, {depth} deep")
            for depth, status in (
                (100, 200),
                *((d, 200 if d < 251 else 400) for d in range(247, 257)),
                (1000, 400),
            )
        ),
        *(
            pytest.param("/predict", {}, rows(image=nested(depth)), 400, id=f"value, {depth} deep")
            for depth in (100, 250, 1000)
        ),
        *(
            pytest.param(PATH, {}, b'{"inputs": [{"name": "image", "datatype": %s}]}' % nested(d), 400, id=f"type {d}")
            for d in (250, 1000)
        ),
        pytest.param(PATH, {}, b'{"inputs": [], "parameters": %s}' % nested(1000), 400, id="parameters"),
        pytest.param(PATH, {}, b'{"id": %s}' % nested(1000), 400, id="id"),
        *(
            pytest.param(
                "/v2/repository/models/fashion-mnist/load",
                {"Content-Type": "application/json"},
                json.dumps({"parameters": {"package": place}}).encode(),
                409,
                id=f"package {place[:5]}",
            )
            for place in ("x" * 300, "/tmp/" + "x" * 300, "x/" * 4000, "é" * 200)
        ),
        pytest.param("/v2/models/" + "x" * 300 + "/infer", {}, BODY, 404, id="model"),
        pytest.param("/%00%ff/" + "%2e%2e/" * 20, {}, BODY, 404, id="path"),
    ],
)
def test_no_request_is_an_error_of_the_server(
    server: Server, path: str, fields: dict[str, str], body: bytes, status: int
) -> None:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost"]
    fields = {"Content-Length": str(len(body)), **fields, **server.admin}
    lines += [f"{name}: {value}" for name, value in fields.items()]
    with connected(server) as connection, connection.makefile("rb") as stream:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        given, _, answered = read_answer(stream)
        assert (given, status == 200 or "error" in json.loads(answered)) == (status, True), answered[:300]


def test_a_body_is_never_taken_for_a_request(server: Server) -> None:
    with connected(server) as connection, connection.makefile("rb") as stream:
        for offer in ((), H2C, WEBSOCKET):
            connection.sendall(head(*offer, length=len(SMUGGLED)) + SMUGGLED)
            assert read_answer(stream)[0] == 400
        # A tunnel has no length, so nothing after it may be parsed.
        connection.sendall(b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n" + SMUGGLED)
        assert read_answer(stream)[0] == 400
        assert stream.read() == b""
    with connected(server) as connection, connection.makefile("rb") as stream:
        connection.sendall(HEALTH + b"Connection: close\r\n\r\n" + SMUGGLED)
        assert read_answer(stream)[0] == 200
        assert stream.read() == b"", "the client has said that there is no second request"


def test_a_trailer_is_no_header(server: Server) -> None:
    """Otherwise a proxy that checks headers could be passed by."""
    with connected(server) as connection:
        chunk = b"%x\r\n%s\r\n0\r\nInference-Header-Content-Length: x\r\n\r\n" % (len(BODY), BODY)
        connection.sendall(CHUNKED + chunk)
        assert answer(connection)[0] == 200


def test_an_answer_is_waited_for_while_another_request_is_on_its_way(small: Server) -> None:
    """For longer than a client may take to send one."""
    [replica] = small.replicas()
    replica.send_signal(signal.SIGSTOP)
    resume = threading.Timer(2.5, replica.send_signal, (signal.SIGCONT,))
    resume.start()
    try:
        with connected(small) as connection:
            connection.sendall(head() + BODY + head() + BODY[:10])
            assert answer(connection)[0] == 200
            connection.sendall(BODY[10:])
            assert answer(connection)[0] == 200
    finally:
        resume.cancel()
        replica.send_signal(signal.SIGCONT)


def test_who_asks_and_does_not_read_fills_no_memory(server: Server) -> None:
    process = psutil.Process(server.popen.pid)
    before = process.memory_info().rss
    with connected(server) as connection:
        ask_until_it_waits(server, connection)
        assert process.memory_info().rss - before < 100 * 2**20


def test_a_server_ends_although_a_client_does_not_read(run_processes: Processes, start: Callable[..., Server]) -> None:
    server = start("fashion-mnist@prod", "--drain-delay", "1ms")
    with connected(server) as connection:
        ask_until_it_waits(server, connection)
        server.popen.send_signal(signal.SIGINT)
        while takes_connections(server):
            pass
        assert server.popen.poll() is None
        server.popen.send_signal(signal.SIGINT)
        ended = run_processes.finish(server.popen, timeout_s=60)
        assert ended.returncode == 0
        assert "aborted the connection" in ended.stderr


def ask_until_it_waits(server: Server, connection: socket.socket) -> None:
    """Ask and read nothing until the server does not read on either, although it has nothing else to do."""
    asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000
    process = psutil.Process(server.popen.pid)
    connection.setblocking(False)
    looks = unsent = 0
    while looks < 20:
        try:
            unsent = (unsent or len(asked)) - connection.send(asked[-unsent:])
            looks = 0
        except BlockingIOError:
            looks = looks + 1 if process.status() == psutil.STATUS_SLEEPING else 0
            time.sleep(0.01)


def takes_connections(server: Server) -> bool:
    try:
        with connected(server):
            return True
    except (ConnectionRefusedError, ConnectionResetError):  # reset: it closed just then
        return False
