"""The dashboard's HTTP server."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import parse_qs, urlsplit

from paceline import __version__
from paceline.core.access import create_token, read_token
from paceline.core.config import configuration
from paceline.core.environment import is_loopback
from paceline.core.errors import ConfigError, PacelineError, RunDirectoryError
from paceline.core.files import read_document
from paceline.launch.job_records import JobRecord
from paceline.launch.launcher import JobStatus
from paceline.runs.directory import RunDirectory
from paceline.runs.metric_writers import finite
from paceline.runs.package_registry import Registry
from paceline.runs.timeline import timeline
from paceline_pages.comparison import packages_of
from paceline_pages.jobs_command import known_jobs
from paceline_pages.logs_command import ranks_with_logs
from paceline_pages.run_index import Curves, Index, read_beats
from paceline_pages.run_status import FOREIGN, checkpoint_entries, read_tail
from paceline_serving.access import is_cross_site, is_local_name, is_same_token
from paceline_serving.static_assets import HEADERS, Asset, read_assets, tag_of

# --- Access: on loopback every user of this machine, on other addresses only with the token ---


COOKIE = "paceline-dashboard"


class DashboardAccess:
    """Access rules of the dashboard.

    Args:
        token: the secret that visitors must send; None: the server requires no token.

    Raises:
        ConfigError: other machines could reach the host, and there is no token.
    """

    def __init__(self, host: str, port: int, token: bytes | None) -> None:
        if token is None and not is_loopback(host):
            raise ConfigError(
                f"--host {host} can be reached from other machines, so it needs --token-file FILE (the file is "
                "created if it is missing). Or leave --host out and use ssh -L."
            )
        self._token = token
        self._cookie_name = f"{COOKIE}-{port}"  # browsers send a host's cookies to all of its ports

    def is_our_name(self, host_header: str) -> bool:
        """Return whether a Host header names this server: a foreign name that resolves to loopback is an attack.

        With a token any name is allowed, since a page of another name does not have its cookie.
        """
        return self._token is not None or is_local_name(host_header.encode("latin-1"))

    def admits(self, authorization: str, cookies: str) -> bool:
        """Return whether a request with these headers ``Authorization`` and ``Cookie`` carries the token."""
        if self._token is None:
            return True
        scheme, _, candidate = authorization.partition(" ")
        if scheme.lower() == "bearer" and self.knows(candidate):
            return True
        try:
            cookie = SimpleCookie(cookies).get(self._cookie_name)
        except CookieError:
            return False
        return cookie is not None and is_same_token(cookie.value, self._cookie())

    def knows(self, token: str) -> bool:
        """Compare a token, in hexadecimal digits, in constant time."""
        return self._token is not None and is_same_token(token.strip(), self._token.hex())

    def set_cookie(self) -> str:
        """Return the header that sets a browser's cookie, which is derived from the token and does not contain it."""
        return f"{self._cookie_name}={self._cookie()}; HttpOnly; SameSite=Strict; Path=/"

    def _cookie(self) -> str:
        assert self._token is not None
        return hmac.new(self._token, b"paceline dashboard", hashlib.sha256).hexdigest()


def read_or_create_token(path: Path) -> bytes:
    """Return the token in a file that only its owner can read; make it if it is missing.

    Raises:
        ConfigError: others can read it, it holds no token, or it cannot be written.
    """
    return read_token(path) if path.exists() else create_token(path)


# --- Jobs submitted from this machine, queried in a background thread because a scheduler may be slow ---


_POLL_S = 10.0


class Jobs:
    """A reader of the job store that queries it at most every ten seconds, and only while a page is open.

    It keeps commands and variables of jobs to itself, since they may contain secrets.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[JobRecord, JobStatus]] = []
        self._asked_at = -math.inf
        self._asking = threading.Lock()

    def rows(self, index: Index) -> list[dict[str, Any]]:
        """Return the last known status of each job, newest first; those of the first request come later."""
        if time.monotonic() - self._asked_at > _POLL_S and self._asking.acquire(blocking=False):
            try:
                threading.Thread(target=self._ask, name="paceline-jobs", daemon=True).start()
            except RuntimeError:  # this node starts no more threads
                self._asking.release()
        return [
            {
                "id": record.id,
                "name": record.name,
                "launcher": record.launcher,
                "state": status.state,
                "detail": status.detail,
                "restarts": status.restarts,
                "submitted": record.submitted,
                "run": None if record.run is None else index.id_of(Path(record.run)),
            }
            for record, status in reversed(self._rows)
        ]

    def _ask(self) -> None:
        try:
            self._rows = list(known_jobs())
        finally:
            self._asked_at = time.monotonic()
            self._asking.release()


# --- One run, as the page shows it ---


_MAX_FOLLOWED = 16
_MAX_ENTRIES = 300
_LOG_BYTES = 64 * 1024
REPORT = "report.html"


class RunCache:
    """A cache of the last requested runs, with their curves; thread-safe."""

    def __init__(self) -> None:
        self._followed: OrderedDict[str, Curves] = OrderedDict()
        self._lock = threading.Lock()

    def curves(self, run: str, directory: RunDirectory) -> dict[str, Any]:
        with self._lock:
            return {"curves": self._follow(run, directory).as_json()}

    def detail(self, run: str, directory: RunDirectory, row: dict[str, Any]) -> dict[str, Any]:
        """Return everything else that the page shows of a run; damaged parts are omitted and named in ``problems``."""
        problems: list[str] = []
        detail: dict[str, Any] = {"run": row, "problems": problems}
        with self._lock:
            followed = self._follow(run, directory)
            rows = {row["rank"]: row for row in followed.ranks if isinstance(row.get("rank"), int)}
        detail["ranks"] = [{**asdict(beat), "telemetry": rows.get(beat.rank)} for beat in read_beats(directory)] or [
            {"rank": rank, "telemetry": telemetry} for rank, telemetry in sorted(rows.items())
        ]
        readers: dict[str, Callable[[RunDirectory], Any]] = {
            "config": lambda its: configuration(its.read_manifest()),
            "history": _history,
            "checkpoints": _checkpoints,
            "packages": _packages,
        }
        for name, read in readers.items():
            try:
                detail[name] = read(directory)
            except (PacelineError, *FOREIGN) as error:
                detail[name] = None
                problems.append(f"{name}: {error}")
        detail["logs"] = ranks_with_logs(directory)
        detail["report"] = (directory.path / REPORT).is_file()
        detail["trackers"] = _trackers(directory)
        return detail

    def _follow(self, run: str, directory: RunDirectory) -> Curves:
        followed = self._followed.setdefault(run, Curves(directory.metrics))
        self._followed.move_to_end(run)
        while len(self._followed) > _MAX_FOLLOWED:
            self._followed.popitem(last=False)
        followed.update()
        return followed


def log_tail(directory: RunDirectory, rank: int) -> str | None:
    """Return the end of a rank's output; None if it has no log."""
    path = directory.log_of(rank)
    try:
        return None if path.is_symlink() else read_tail(path)
    except OSError:
        return None


def read_report(directory: RunDirectory) -> bytes | None:
    """Return the page of ``paceline report``; None if there is none."""
    path = directory.path / REPORT
    try:
        return None if path.is_symlink() else read_document(path)
    except OSError:
        return None


def _trackers(directory: RunDirectory) -> list[dict[str, Any]]:
    found = []
    for path in sorted((directory.path / "trackers").glob("*.json")):
        try:
            note = json.loads(read_document(path, _LOG_BYTES))
            url = note.get("url")
            is_page = isinstance(url, str) and url.startswith(("http://", "https://"))
            found.append({"name": path.stem, "run": str(note["run"]), "url": url if is_page else None})
        except (OSError, ValueError, KeyError, AttributeError):
            continue  # the tracker writes another one
    return found


def _packages(directory: RunDirectory) -> list[str]:
    """Return the references, or else the digests, of a run's packages."""
    try:
        found = [path.name for path in packages_of(directory.read_manifest().get("id"))]
    except RunDirectoryError:
        return []  # the configuration's problem says so
    references = Registry.of_user().references() if found else {}
    names = {digest: [str(name) for name, tag in references.items() if tag.digest == digest] for digest in found}
    return [name for digest, own in names.items() for name in own or [digest]]


def _history(directory: RunDirectory) -> dict[str, Any]:
    history = timeline(directory.read_events())
    return {
        "entries": [asdict(entry) for entry in history.entries[-_MAX_ENTRIES:]],
        "left_out": max(0, len(history.entries) - _MAX_ENTRIES),
        "recoveries": [
            {**asdict(interruption), "seconds": round(interruption.seconds, 3)}
            for interruption in history.interruptions[-_MAX_ENTRIES:]
        ],
        "goodput": history.goodput.share,
    }


def _checkpoints(directory: RunDirectory) -> list[dict[str, Any]]:
    names = ("name", "step", "version", "epoch", "created", "size_bytes", "marks", "problem")
    return [{name: getattr(entry, name) for name in names} for entry in checkpoint_entries(directory.checkpoints, None)]


# --- HTTP: static files of the package, and read-only JSON about runs ---


_PATHS = re.compile(r"/api/runs/([0-9a-f]{16})(?:/(curves|report|logs/(\d{1,6})))?")
_IDLE_S = 30.0  # within which a client must send its next request
_MAX_CLIENTS = 64
_MAX_FORM_BYTES = 1024  # bytes


class PageServer:
    """A server in threads of its own, until it is closed.

    Args:
        find: returns the resource at a path, with the values of its query; None if there is none.
        port: 0 picks a free one.
        token: the secret that visitors must send; None: the server requires no token.
        prefix: of the options of the address, in messages.

    Raises:
        ConfigError: the address is not available, or other machines could reach it without a token.
    """

    def __init__(self, find: Find, *, host: str, port: int, token: bytes | None, prefix: str = "") -> None:
        DashboardAccess(host, port, token)  # check before anything is opened
        try:
            self._server = _Server(host, port, token, find)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}, port {port}: {error.strerror or error}. Choose another --{prefix}port; 0 "
                "picks a free one."
            ) from error
        self.port: int = self._server.server_address[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, name="paceline-dashboard", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class DashboardServer(PageServer):
    """The dashboard of the runs in some folders; the other arguments are those of :class:`PageServer`."""

    def __init__(
        self, roots: list[Path], *, host: str = "127.0.0.1", port: int = 0, token: bytes | None = None
    ) -> None:
        super().__init__(Pages(Index(roots), Jobs()).find, host=host, port=port, token=token)


Find = Callable[[str, dict[str, list[str]]], Asset | None]

_REPORT_POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
"""A report is a file of the run, which may be another's: it runs nothing, and has an origin of its own."""


class Pages:
    """The dashboard's resources, by path."""

    def __init__(self, index: Index, jobs: Jobs) -> None:
        self._index = index
        self._jobs = jobs
        self._run_cache = RunCache()
        self._assets = read_assets("paceline_pages")

    def find(self, path: str, query: dict[str, list[str]]) -> Asset | None:
        if path == "/" or path.startswith("/static/"):
            return self._assets.get("index.html" if path == "/" else path.removeprefix("/static/"))
        document = self._document(path, query)
        if document is None:
            return None
        if isinstance(document, bytes):
            return Asset("text/html; charset=utf-8", document, tag_of(document), _REPORT_POLICY)
        content = json.dumps(finite(document), separators=(",", ":"), default=str).encode()
        return Asset("application/json", content, tag_of(content))

    def _document(self, path: str, query: dict[str, list[str]]) -> dict[str, Any] | bytes | None:
        if path == "/api/runs":
            rows = self._index.rows(query.get("since", [""])[0])
            return {**rows, "jobs": self._jobs.rows(self._index), "version": __version__}
        match = _PATHS.fullmatch(path)
        directory = self._index.directory(match[1]) if match else None
        row = self._index.row(match[1]) if match else None
        if match is None or directory is None or row is None:
            return None
        if match[2] is None:
            return self._run_cache.detail(match[1], directory, row)
        if match[2] == "report":
            return read_report(directory)
        if match[3] is None:
            return self._run_cache.curves(match[1], directory)
        text = log_tail(directory, int(match[3]))
        return None if text is None else {"text": text}


_T = TypeVar("_T")


def choose_to_end(connections: Mapping[_T, tuple[str, float]]) -> _T:
    """Return the oldest connection, by client and time, of the client that has most: it goes if another one comes."""
    open_by_client = Counter(client for client, _ in connections.values())
    return min(connections, key=lambda one: (-open_by_client[connections[one][0]], connections[one][1]))


class _Server(ThreadingHTTPServer):
    """A thread for each connection, of which there are at most ``_MAX_CLIENTS``.

    A further one takes the place of the oldest one of the client that has most, so that connections on which no
    request arrives do not keep other visitors out. A client must send each request within
    ``_IDLE_S``, however it divides it.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, token: bytes | None, find: Find) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        # Each one's client, and the time since which its request is awaited: infinite while it is answered.
        self._connections: dict[socket.socket, tuple[str, float]] = {}
        self._lock = threading.Lock()
        self.find = find
        super().__init__((host, port), _Handler)
        self.access = DashboardAccess(host, self.server_address[1], token)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._connections) >= _MAX_CLIENTS:
                self._end(choose_to_end(self._connections))
            self._connections[request] = client_address[0], time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._connections.pop(request, None)

    def service_actions(self) -> None:
        """End connections whose request has not arrived in time; called by ``serve_forever`` twice a second."""
        overdue = time.monotonic() - _IDLE_S
        with self._lock:
            for request in [request for request, (_, since) in self._connections.items() if since < overdue]:
                self._end(request)

    def mark(self, request: socket.socket, *, is_answering: bool) -> None:
        """Record that a connection's request has arrived, or that its answer is sent."""
        with self._lock:
            if request in self._connections:
                since = math.inf if is_answering else time.monotonic()
                self._connections[request] = self._connections[request][0], since

    def _end(self, request: socket.socket) -> None:
        """Wake the connection's thread, which then closes it."""
        del self._connections[request]
        with suppress(OSError):  # the client has gone
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that went away; errors of readers are reported to the client (see ``_Handler``)."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "paceline"
    sys_version = ""
    timeout = _IDLE_S
    server: _Server

    def do_GET(self) -> None:
        self.server.mark(self.connection, is_answering=True)
        target, access, find = urlsplit(self.path), self.server.access, self.server.find
        if not access.is_our_name(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this server has another host name")
            return
        if target.path == "/" and access.knows(parse_qs(target.query).get("token", [""])[0]):
            self._enter()
            return
        if not access.admits(self.headers.get("Authorization", ""), self.headers.get("Cookie", "")):
            if target.path not in ("/", "/static/login.css", "/static/icon.svg"):
                self._refuse(HTTPStatus.UNAUTHORIZED, "the token is missing or wrong")
                return
            page = find("/static/login.html" if target.path == "/" else target.path, {})
        else:
            try:
                page = find(target.path, parse_qs(target.query))
            except FOREIGN as error:
                self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"cannot be read: {error}")
                return
        if page is None:
            self._refuse(HTTPStatus.NOT_FOUND, "this page does not exist")
            return
        if self.headers.get("If-None-Match") == page.tag:
            self._answer(HTTPStatus.NOT_MODIFIED, replace(page, content=b""))
        else:
            self._answer(HTTPStatus.OK, page)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Answer ``/login``, which turns the form's token into a cookie."""
        self.close_connection = True
        access, length = self.server.access, self.headers.get("Content-Length", "")
        if self.path != "/login" or access.admits("", ""):
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "the dashboard is read-only")
            return
        # Python reads digits of other scripts too, and refuses more than 4,300 of them.
        if not re.fullmatch(r"[0-9]{1,9}", length) or int(length) > _MAX_FORM_BYTES:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the token is too long")
            return
        get = self.headers.get
        if is_cross_site(get("Host", ""), get("Origin"), get("Sec-Fetch-Site")):
            self._refuse(HTTPStatus.FORBIDDEN, "the page of another site sent this")
            return
        form = parse_qs(self.rfile.read(int(length)).decode(errors="replace"))
        if not access.knows(form.get("token", [""])[0]):
            self._refuse(HTTPStatus.UNAUTHORIZED, "the token is wrong")
            return
        self._enter()

    def _enter(self) -> None:
        """Give the browser the cookie, and the address without the token."""
        self._send(HTTPStatus.SEE_OTHER, b"", {"Location": "/", "Set-Cookie": self.server.access.set_cookie()})

    def _answer(self, status: HTTPStatus, page: Asset) -> None:
        headers = {"Content-Type": page.content_type, "ETag": page.tag, "Content-Security-Policy": page.policy}
        self._send(status, page.content, {name: value for name, value in headers.items() if value})

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._answer(status, Asset("application/json", json.dumps({"error": why}).encode(), tag=""))

    def _send(self, status: HTTPStatus, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, **headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.server.mark(self.connection, is_answering=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a page that polls every two seconds would fill the terminal."""
