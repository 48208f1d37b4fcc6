"""Who is let in, what is answered, and that nothing can be changed or reached besides."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from urllib.parse import urlencode

import pytest
from tests.processes import Processes
from tests.runs.made import make_run

from paceline.core.access import create_token
from paceline.core.errors import ConfigError
from paceline_pages import dashboard
from paceline_pages.dashboard import DashboardServer, choose_to_end, read_or_create_token


def ask(
    server: DashboardServer, path: str, method: str = "GET", body: str | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    directory = make_run(folder / "runs" / "run", [{"event": "finished"}], steps=5)
    directory.log_of(0).write_text("printed\n")
    return folder / "runs"


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[DashboardServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(runs.parent / "state"))
        with DashboardServer([runs]) as server:
            yield server


def the_run(server: DashboardServer) -> str:
    (run,) = json.loads(ask(server, "/api/runs")[2])["runs"]
    return str(run["id"])


def test_a_run_and_its_curves_and_log(server: DashboardServer) -> None:
    run = the_run(server)
    detail = json.loads(ask(server, f"/api/runs/{run}")[2])
    assert detail["run"]["name"] == "run"
    assert detail["problems"] == []
    assert [entry["event"] for entry in detail["history"]["entries"]] == ["created", "started", "finished"]
    assert [rank["rank"] for rank in detail["ranks"]] == [0, 1]
    curves = json.loads(ask(server, f"/api/runs/{run}/curves")[2])["curves"]
    assert curves["loss"]["step"] == [1, 2, 3, 4, 5]
    assert json.loads(ask(server, f"/api/runs/{run}/logs/0")[2]) == {"text": "printed\n"}


def test_what_has_not_changed_is_not_sent_again(server: DashboardServer) -> None:
    path = f"/api/runs/{the_run(server)}/curves"
    _, headers, content = ask(server, path)
    assert content
    status, again, nothing = ask(server, path, If_None_Match=headers["ETag"])
    assert (status, again["ETag"], nothing) == (304, headers["ETag"], b"")


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../etc/passwd",
        "/static/../server.py",
        "/static/..%2f..%2fserver.py",
        "/static//etc/passwd",
        "/static/",
        "/static/.",
        "/api/runs/..",
        "/api/runs/%2e%2e/logs/0",
        "/api/runs/0000000000000000",
        "/api/runs/0000000000000000/logs/0",
        "/api/runs/RUN/logs/../../run.toml",
        "/api/runs/RUN/logs/-1",
        "/api/runs/RUN/logs/9",
        "/api/runs/RUN/run.toml",
        "//etc/passwd",
        "/index.html",
    ],
)
def test_no_path_leads_to_a_file(server: DashboardServer, path: str) -> None:
    status, _, content = ask(server, path.replace("RUN", the_run(server)))
    assert status == 404
    assert set(json.loads(content)) == {"error"}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(server: DashboardServer, runs: Path, method: str) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*"))
    for path in ("/", "/api/runs", f"/api/runs/{the_run(server)}", "/login"):
        assert ask(server, path, method, "{}")[0] in (405, 501)
    assert sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*")) == before


def test_every_answer_carries_the_policy(server: DashboardServer) -> None:
    for path in ("/", "/static/app.js", "/api/runs", "/nothing"):
        headers = ask(server, path)[1]
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; style")
        assert headers["X-Content-Type-Options"] == "nosniff"
    # No inline script or style, and nothing from elsewhere, is in what is served.
    for name in ("/", "/static/login.css", "/static/dashboard.css", "/static/app.js", "/static/run.js"):
        content = ask(server, name)[2].decode()
        assert "style=" not in content
        assert "https://" not in content
        assert "<script>" not in content


def test_a_report_can_run_nothing_and_is_no_link_to_another_file(server: DashboardServer, runs: Path) -> None:
    path, page = f"/api/runs/{the_run(server)}/report", runs / "run" / "report.html"
    assert ask(server, path)[0] == 404
    (runs / "secret").write_text("a secret")
    page.symlink_to(runs / "secret")
    assert ask(server, path)[0] == 404
    page.unlink()
    page.write_text("<script>alert(1)</script>")
    status, headers, content = ask(server, path)
    assert (status, content) == (200, page.read_bytes())
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Content-Security-Policy"].startswith("sandbox; default-src 'none';")
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_a_foreign_name_that_leads_here_is_refused(server: DashboardServer) -> None:
    assert ask(server, "/api/runs", Host="evil.example")[0] == 421
    assert ask(server, "/api/runs", Host=f"localhost:{server.port}")[0] == 200


def test_a_client_that_sends_nonsense_harms_nobody(server: DashboardServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(b"\x00\xff nonsense\r\n\r\n")
        assert b"400" in client.recv(1000)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(b"GET /" + b"a" * 70_000)
        assert b"414" in client.recv(1000)
    assert ask(server, "/api/runs")[0] == 200


def connect(server: DashboardServer, sent: bytes = b"GET /api/runs HTTP/1.1\r\n") -> socket.socket:
    """Send the beginning of a request."""
    client = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    client.sendall(sent)
    return client


def test_clients_that_send_no_whole_request_keep_nobody_out(
    server: DashboardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "_MAX_CLIENTS", 4)
    half_open = [connect(server) for _ in range(6)]
    with ExitStack() as stack:
        for client in half_open:
            stack.enter_context(client)
        assert ask(server, "/api/runs")[0] == 200
        assert half_open[0].recv(100) == b"", "the oldest one was closed"
        half_open[-1].sendall(f"Host: localhost:{server.port}\r\n\r\n".encode())
        assert half_open[-1].recv(100).startswith(b"HTTP/1.1 200")


def test_a_client_must_send_its_request_in_time(server: DashboardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time counts for the whole request: a byte now and then does not prolong it."""
    with connect(server) as dripping:
        monkeypatch.setattr(dashboard, "_IDLE_S", 0.0)
        dripping.sendall(b"X")
        assert dripping.recv(100) == b""


def test_a_client_with_many_connections_loses_its_own() -> None:
    connections = {
        "old": ("192.0.2.1", 1.0),
        "new": ("192.0.2.2", 3.0),
        "newer": ("192.0.2.2", 2.0),
    }
    assert choose_to_end(connections) == "newer"


def test_the_token_lets_in_by_header_or_cookie(runs: Path, tmp_path: Path) -> None:
    token = create_token(tmp_path / "token")
    with DashboardServer([runs], host="0.0.0.0", token=token) as server:
        for headers in ({}, {"Authorization": "Bearer " + "0" * 64}, {"Cookie": "paceline-dashboard=x"}):
            status, _, content = ask(server, "/api/runs", **headers)
            assert (status, b"run" in content) == (401, False)
        assert b"token" in ask(server, "/")[2]
        assert ask(server, "/static/app.js")[0] == 401
        assert ask(server, "/api/runs", Authorization=f"Bearer {token.hex()}")[0] == 200
        assert ask(server, "/login", "POST", urlencode({"token": "0" * 64}))[0] == 401
        assert ask(server, "/login", "POST", "x" * 5000)[0] == 413
        for length in ("0" * 5000, "\u00b2", "-1", "+1", "1_0", ""):
            assert ask(server, "/login", "POST", "", Content_Length=length)[0] == 413
        right = urlencode({"token": token.hex()})
        for foreign in (
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Origin": "http://[::1"},
            {"Sec-Fetch-Site": "cross-site"},
        ):
            status, headers, _ = ask(server, "/login", "POST", right, **foreign)
            assert (status, "Set-Cookie" in headers) == (403, False)
        own = {"Origin": f"http://127.0.0.1:{server.port}"}
        assert ask(server, "/login", "POST", right, **own)[0] == 303
        status, headers, _ = ask(server, "/login", "POST", urlencode({"token": token.hex()}))
        assert (status, headers["Location"]) == (303, "/")
        cookie, _, rules = headers["Set-Cookie"].partition("; ")
        assert token.hex() not in cookie
        assert "HttpOnly" in rules
        assert "SameSite=Strict" in rules
        assert ask(server, "/api/runs", Cookie=cookie)[0] == 200
        assert ask(server, f"/?token={token.hex()}")[1]["Set-Cookie"].startswith(cookie)
        assert "Set-Cookie" not in ask(server, f"/?token={'0' * 64}")[1]
        assert b"app.js" in ask(server, "/", Cookie=cookie)[2]


@pytest.mark.parametrize("on_terminal", [True, False])
def test_the_command_always_asks_for_a_token_and_prints_it_on_a_terminal_only(
    runs: Path, run_processes: Processes, on_terminal: bool
) -> None:
    control, terminal = os.openpty()
    command = [sys.executable, "-m", "paceline", "dashboard", runs, "--port", "0"]
    with os.fdopen(control, "r") as screen, os.fdopen(terminal, "w") as stdout:
        serving = subprocess.Popen(command, stdout=stdout) if on_terminal else run_processes.start(command)
        try:
            output = screen if serving.stdout is None else serving.stdout
            said = "".join(output.readline() for _ in range(1 if on_terminal else 2))
            port = int(re.findall(r"127\.0\.0\.1:(\d+)/", said)[0])
            server = cast("DashboardServer", SimpleNamespace(port=port))
            assert ask(server, "/api/runs")[0] == 401
            if on_terminal:
                token = re.findall(r"token=([0-9a-f]{64})", said)[0]
            else:
                assert "token=" not in said
                file = Path(re.findall(r"token in (\S+)\.$", said)[0])
                assert stat.S_IMODE(file.stat().st_mode) == 0o600
                token = file.read_text().strip()
            assert ask(server, "/api/runs", Authorization=f"Bearer {token}")[0] == 200
        finally:
            serving.send_signal(signal.SIGTERM)
            assert serving.wait(60) == 0
    assert on_terminal or not file.exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_others_are_not_let_in_without_a_token(runs: Path, host: str) -> None:
    with pytest.raises(ConfigError, match=r"can be reached from other machines, so it needs --token-file"):
        DashboardServer([runs], host=host)


def test_a_port_that_is_taken_is_named(server: DashboardServer, runs: Path) -> None:
    with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1, port {server.port}: .*--port"):
        DashboardServer([runs], port=server.port)


def test_a_token_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = read_or_create_token(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_or_create_token(path) == token
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_or_create_token(path)
