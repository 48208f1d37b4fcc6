"""Who may reach a server, and what it takes from whom."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from plugins.serving.tests.conftest import Server, json_request
from plugins.serving.tests.load import PATH
from tests.processes import Processes

from paceline.core.errors import ConfigError
from paceline_serving import access
from paceline_serving.access import AccessPolicy, BearerTokens, read_bearer_token
from paceline_serving.batching import RequestFailure
from paceline_serving.model import ServingOptions
from paceline_serving.server import ListenAddress, bind, listen


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text("0123456789abcdef\n")
    return path


def test_a_token(
    start: Callable[..., Server], run_processes: Processes, token_file: Path, wait_until: Callable[..., None]
) -> None:
    origin = {"Origin": "https://app.example"}
    words = ("--cors-origin", origin["Origin"], "--cors-origin", "http://localhost:3000")
    words = (*words, "--receive-timeout", "1s", "--access-log")
    server = start("fashion-mnist@prod", "--token-file", token_file, *words)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        # A browser asks first, without the token; the page of an origin that is not named gets no permission.
        question = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        asked = client.options(PATH, headers={**question, **origin})
        assert (asked.status_code, asked.headers["Access-Control-Allow-Origin"]) == (204, origin["Origin"])
        assert "Authorization" in asked.headers["Access-Control-Allow-Headers"]
        foreign = client.options(PATH, headers={**question, "Origin": "https://evil.example"})
        assert (foreign.status_code, "Access-Control-Allow-Origin" in foreign.headers) == (401, False)
        for status, headers in ((401, {}), (200, {"Authorization": "Bearer 0123456789abcdef"})):
            answer = client.post(PATH, json=json_request(), headers={**headers, **origin})
            assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (status, origin["Origin"])
            assert answer.headers["Vary"] == "Origin"
        assert client.post(PATH, json=json_request(), headers={**headers, "Origin": "null"}).status_code == 403
        assert client.get("/v2/health/ready").status_code == 200
        for address in ("/v2", "/metrics", "/openapi.json", "/v2/models/fashion-mnist"):
            assert client.get(address).status_code == 401
        wrong = {"Authorization": "Bearer 0123456789abcdeg"}
        assert client.post(PATH, json=json_request(), headers=wrong).status_code == 401
        for scheme in ("Bearer", "bearer", "BEARER "):
            right = {"Authorization": f"{scheme} 0123456789abcdef", "Host": "proxy.example"}
            assert client.post(PATH, json=json_request(), headers=right).status_code == 200
        for other in ("Basic 0123456789abcdef", "0123456789abcdef", "Bearer"):
            assert client.get("/v2", headers={"Authorization": other}).status_code == 401
        # Each client may have a token of its own, and a token may be exchanged while the server runs.
        token_file.write_text("# clients\nalice aaaaaaaaaaaaaaaa\n\nbob bbbbbbbbbbbbbbbb\n")
        wait_until(lambda: client.get("/v2", headers=right).status_code == 401, "the tokens of now", timeout_s=60)
        for token in ("a" * 16, "b" * 16):
            assert client.get("/v2", headers={"Authorization": f"Bearer {token}"}).status_code == 200
    # A client that does not go on is sent away.
    host, _, port = urlsplit(server.url).netloc.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as slow:
        slow.sendall(b"POST /v2 HTTP/1.1\r\nContent-Length: 10\r\n\r\n12")
        answers = b""
        while piece := slow.recv(4096):
            answers += piece
        assert b" 401 " in answers
    server.popen.send_signal(signal.SIGINT)
    log = run_processes.finish(server.popen).stderr
    assert re.search(r"127\.0\.0\.1 alice GET '/v2' 200", log)
    assert "2 tokens are valid" in log
    assert "aaaa" not in log


def test_the_tokens_of_a_file(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_RELOAD_S", 0)
    tokens = BearerTokens(token_file)
    assert tokens.client_of(b"0123456789abcdef") == ""
    assert tokens.client_of(b"0123456789abcdeg") is None
    token_file.write_text("alice aaaaaaaaaaaaaaaa\n")
    assert tokens.client_of(b"a" * 16) == "alice"
    assert tokens.client_of(b"0123456789abcdef") is None
    for invalid in ("", "alice\n", "alice bob aaaaaaaaaaaaaaaa\n", "al/ice aaaaaaaaaaaaaaaa\n", "# aaaaaaaaaaaaaaaa\n"):
        token_file.write_text(invalid)
        assert tokens.client_of(b"a" * 16) == "alice", "an invalid file leaves the last valid tokens"
        with pytest.raises(ConfigError, match="token"):
            BearerTokens(token_file)
    token_file.unlink()
    assert tokens.client_of(b"a" * 16) == "alice"
    os.mkfifo(token_file, 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        BearerTokens(token_file)


def test_a_token_file_that_others_can_read(token_file: Path) -> None:
    assert read_bearer_token(token_file) == "0123456789abcdef"
    token_file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_bearer_token(token_file)


@pytest.mark.parametrize("content", [b"", b"short", b"two words in here", b"\xff" * 20])
def test_a_token_that_is_none(token_file: Path, content: bytes) -> None:
    token_file.write_bytes(content)
    with pytest.raises(ConfigError, match="at least 16"):
        read_bearer_token(token_file)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_no_public_address_without_a_token(host: str, token_file: Path) -> None:
    with pytest.raises(ConfigError, match="--token-file"):
        ListenAddress(host=host)
    assert ListenAddress(host=host, tokens=BearerTokens(token_file)).host == host


@pytest.mark.parametrize(
    "origin", ["*", "null", "https://a.example/", "https://A.example", "a.example", "ftp://a.example"]
)
def test_an_origin_that_is_none(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origin must be scheme, host and port"):
        ListenAddress(cors_origins=(origin,))
    ListenAddress(cors_origins=("https://a.example", "http://127.0.0.1:3000", "http://[::1]:80"))


def test_a_page_that_may_use_the_models_may_not_exchange_them() -> None:
    origin = b"https://app.example"
    policy = AccessPolicy(None, (origin.decode(),), "secret")
    headers = {b"host": b"localhost:8000", b"content-type": b"application/json", b"authorization": b"Bearer secret"}
    policy.check_admin("127.0.0.1", headers)
    policy.check_origin({**headers, b"origin": origin})
    with pytest.raises(RequestFailure, match="only programs of this machine"):
        policy.check_admin("127.0.0.1", {**headers, b"origin": origin})


def test_a_port_in_use() -> None:
    with bind(ListenAddress(port=0)) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}.*in use.*--port 0"):
            bind(ListenAddress(port=port))


def test_two_servers_that_were_started_at_the_same_time() -> None:
    with bind(ListenAddress(port=0)) as first:
        port = first.getsockname()[1]
        with bind(ListenAddress(port=port)) as second:  # the first does not listen yet
            listen(first)
            with pytest.raises(ConfigError, match=f"port {port}.*in use.*--port 0"):
                listen(second)


def test_options_out_of_range() -> None:
    with pytest.raises(ConfigError, match="--replicas must be between 1 and 256, but is 0"):
        ServingOptions(replicas=0)
    with pytest.raises(ConfigError, match="--devices"):
        ServingOptions(devices=("tpu",))


def test_what_a_browser_or_another_machine_could_send_exchanges_nothing(server: Server) -> None:
    address = f"{server.url}/v2/repository/models/fashion-mnist/load"
    body = json.dumps({"parameters": {"package": "fashion-mnist@next"}})
    missing = json.dumps({"parameters": {"package": "fashion-mnist@nobody"}})
    as_json = {"Content-Type": "application/json", **server.admin}
    assert server.token_file.stat().st_mode & 0o077 == 0
    with httpx.Client(timeout=60) as client:
        assert client.post(address, content=body, headers={"Content-Type": "text/plain"}).status_code == 415
        elsewhere = {**as_json, "Host": "evil.example:80"}
        assert client.post(address, content=body, headers=elsewhere).status_code == 403
        for other in ({}, {"Authorization": f"Bearer {'0' * 64}"}, {"Authorization": "Basic x"}):
            unknown = {"Content-Type": "application/json", **other}
            assert client.post(address, content=body, headers=unknown).status_code == 401
        assert client.post(address, content="{}", headers=as_json).status_code == 400
        assert client.post(address, content=missing, headers=as_json).status_code == 409


def test_a_page_with_a_name_of_its_own_for_this_machine_gets_no_answer(server: Server) -> None:
    """A browser takes evil.example for the page's own server, whatever address the name has just then."""
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example:1", "10.0.0.1"):
        for path in ("/v2", "/metrics", "/v2/models/fashion-mnist"):
            assert httpx.get(server.url + path, headers={"Host": host}, timeout=60).status_code == 403
        answer = httpx.post(server.url + PATH, json=json_request(), headers={"Host": host}, timeout=60)
        assert answer.status_code == 403
        assert "--token-file" in answer.json()["error"]
        assert httpx.get(f"{server.url}/v2/health/live", headers={"Host": host}, timeout=60).status_code == 200
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:8000", "127.0.0.2:80"):
        assert httpx.get(f"{server.url}/v2", headers={"Host": host}, timeout=60).status_code == 200
    evil = {"Origin": "https://evil.example"}
    for foreign in (evil, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = httpx.post(server.url + PATH, json=json_request(), headers=foreign, timeout=60)
        assert answer.status_code == 403
        assert "--cors-origin" in answer.json()["error"]
    for own in ({"Origin": server.url}, {"Origin": "https://a.proxy", "Sec-Fetch-Site": "same-origin"}):
        assert httpx.post(server.url + PATH, json=json_request(), headers=own, timeout=60).status_code == 200
    preflight = {**evil, "Access-Control-Request-Method": "POST"}
    for answer in (
        httpx.options(server.url + PATH, headers=preflight, timeout=60),
        httpx.get(f"{server.url}/v2", headers=preflight, timeout=60),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_a_body_that_is_too_large(server: Server) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    try:
        for headers in ({}, {"Transfer-Encoding": "chunked"}):
            pieces = [b" " * 2**20] * 3
            body = iter(pieces) if headers else b"".join(pieces)
            connection.request("POST", PATH, body, headers, encode_chunked=bool(headers))
            answer = connection.getresponse()
            assert answer.status == 413
            assert "at most" in (said := answer.read().decode()) or "more than" in said
            connection.close()
    finally:
        connection.close()


def test_a_request_says_how_long_it_may_take(server: Server) -> None:
    for wrong in ("0", "-1", "x", "1e3", "9" * 20):
        headers = {"Request-Timeout-Ms": wrong}
        answer = httpx.post(f"{server.url}{PATH}", json=json_request(), headers=headers, timeout=60)
        assert answer.status_code == 400, wrong


def test_what_is_not_served_says_so(run_processes: Processes, serving_env: dict[str, str]) -> None:
    foreign = {**serving_env, "XDG_CONFIG_HOME": "/nonexistent"}
    done = run_processes.paceline("serve", "fashion-mnist@prod", "--port", "0", env=foreign)
    assert done.returncode == 2
    assert "--trust once" in done.stderr
    done = run_processes.paceline("serve", "fashion-mnist@prod", "--program", "onnx", env=serving_env)
    assert done.returncode == 2
    assert "has no onnx program; it has: pt2" in done.stderr
