"""The HTTP side: a page from the package, and JSON of what runs are at. Nothing can be changed here."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from paceline import __version__
from paceline.dashboard.access import Access
from paceline.dashboard.index import Index
from paceline.dashboard.jobs import Jobs
from paceline.dashboard.view import Views, log_tail
from paceline.errors import ConfigError
from paceline.monitoring.writers import finite
from paceline.web.assets import HEADERS, Assets, tag_of

_PATHS = re.compile(r"/api/runs/([0-9a-f]{16})(?:/(curves|logs/(\d{1,6})))?")
_IDLE_S = 30.0  # a client that says nothing for so long is left
_MOST_CLIENTS = 64
_LONGEST_FORM = 1024  # bytes


class DashboardServer:
    """Serves until it is closed, from threads of its own.

    Args:
        roots: folders of runs, or runs.
        host: the address to listen on.
        port: 0: any that is free.
        token: what a visitor must know; None: nothing.

    Raises:
        ConfigError: the address cannot be had, or others could reach it without a token.
    """

    def __init__(
        self, roots: list[Path], *, host: str = "127.0.0.1", port: int = 0, token: bytes | None = None
    ) -> None:
        Access(host, port, token)  # before anything is opened
        self._jobs = Jobs()
        pages = Pages(Index(roots), self._jobs)
        try:
            self._server = _Server(host, port, lambda bound: Access(host, bound, token), pages)
        except OSError as error:
            self._jobs.close()
            raise ConfigError(
                f"cannot listen on {host}, port {port}: {error.strerror or error}. Choose another --port; 0 "
                "takes any that is free."
            ) from error
        self.port: int = self._server.server_address[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="paceline-dashboard", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._jobs.close()


class Pages:
    """What there is to be had, by path."""

    def __init__(self, index: Index, jobs: Jobs) -> None:
        self._index, self._jobs, self._views = index, jobs, Views()
        self._assets = Assets("paceline.dashboard")

    def find(self, path: str, query: dict[str, list[str]]) -> tuple[str, bytes, str] | None:
        """A path's type, content and tag; None where there is nothing."""
        if path == "/":
            return self._file("index.html")
        if path.startswith("/static/"):
            return self._file(path.removeprefix("/static/"))
        document = self._document(path, query)
        if document is None:
            return None
        content = json.dumps(finite(document), separators=(",", ":"), default=str).encode()
        return "application/json", content, tag_of(content)

    def _file(self, name: str) -> tuple[str, bytes, str] | None:
        asset = self._assets.find(name)
        return None if asset is None else (asset.content_type, asset.content, asset.tag)

    def _document(self, path: str, query: dict[str, list[str]]) -> dict[str, Any] | None:
        if path == "/api/runs":
            _, rows = self._index.rows(query.get("since", [""])[0])
            return {**rows, "jobs": self._jobs.rows(self._index), "version": __version__}
        match = _PATHS.fullmatch(path)
        directory = self._index.directory(match[1]) if match else None
        row = self._index.row(match[1]) if match else None
        if match is None or directory is None or row is None:
            return None
        if match[2] is None:
            return self._views.detail(match[1], directory, row)
        if match[3] is None:
            return self._views.curves(match[1], directory)
        text = log_tail(directory, int(match[3]))
        return None if text is None else {"text": text}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, access: Callable[[int], Access], pages: Pages) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        self._places = threading.BoundedSemaphore(_MOST_CLIENTS)
        self.pages = pages
        super().__init__((host, port), _Handler)
        self.access = access(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nobody's error; a reader's is told to the client (see ``_Handler``)."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "paceline"
    sys_version = ""
    timeout = _IDLE_S
    server: _Server

    def do_GET(self) -> None:
        target = urlsplit(self.path)
        access, pages = self.server.access, self.server.pages
        if not access.is_our_name(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this server has another name")
            return
        if not access.admits(self.headers.get("Authorization", ""), self.headers.get("Cookie", "")):
            public = target.path == "/" or target.path in ("/static/login.css", "/static/icon.svg")
            if not public:
                self._refuse(HTTPStatus.UNAUTHORIZED, "the token is missing or wrong")
                return
            name = "/static/login.html" if target.path == "/" else target.path
            found = pages.find(name, {})
        else:
            try:
                found = pages.find(target.path, parse_qs(target.query))
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                # Foreign files can be wrong in every way that a reader can trip over.
                self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"cannot be read: {error}")
                return
        if found is None:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")
            return
        kind, content, tag = found
        if self.headers.get("If-None-Match") == tag:
            self._answer(HTTPStatus.NOT_MODIFIED, kind, b"", tag)
        else:
            self._answer(HTTPStatus.OK, kind, content, tag)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Only ``/login``: the token from the form becomes a cookie."""
        self.close_connection = True
        access, length = self.server.access, self.headers.get("Content-Length", "")
        if self.path != "/login" or not access.needs_token:
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "nothing can be changed here")
            return
        if not length.isdecimal() or int(length) > _LONGEST_FORM:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "this is no token")
            return
        form = parse_qs(self.rfile.read(int(length)).decode(errors="replace"))
        if not access.knows(form.get("token", [""])[0]):
            self._refuse(HTTPStatus.UNAUTHORIZED, "the token is wrong")
            return
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", "/")
        self.send_header("Set-Cookie", access.set_cookie())
        self._end(b"")

    def _answer(self, status: HTTPStatus, kind: str, content: bytes, tag: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if tag is not None:
            self.send_header("ETag", tag)
        self._end(content)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._answer(status, "application/json", json.dumps({"error": why}).encode())

    def _end(self, content: bytes) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a page that asks every two seconds would fill the terminal."""
