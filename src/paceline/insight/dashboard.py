"""The dashboard's server."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from paceline import __version__
from paceline.core.access import LOOPBACK_NAMES, is_loopback, is_same_token
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.option_sets import select
from paceline.insight.run_index import Curves, Index
from paceline.launch.launcher import JobStatus
from paceline.launch.submit import JobRecord, read_records
from paceline.runs.checkpoint_store import entries
from paceline.runs.directory import RunDirectory
from paceline.runs.metrics import finite
from paceline.runs.status import read_beats
from paceline.runs.timeline import timeline
from paceline.serving.static_assets import HEADERS, Assets, tag_of

# --- Who may look: on loopback everybody on this machine, elsewhere only who knows the token ---


COOKIE = "paceline-dashboard"


class DashboardAccess:
    """Decides about requests.

    Args:
        host: what the server listens on.
        port: likewise.
        token: the secret; None: nobody is asked for one.

    Raises:
        ConfigError: others could reach the host, and there is no token.
    """

    def __init__(self, host: str, port: int, token: bytes | None) -> None:
        if token is None and not is_loopback(host):
            raise ConfigError(
                f"--host {host} lets other machines in, so it needs --token-file FILE (made for you where "
                "there is none). Or leave --host out, and come through ssh -L."
            )
        self._names = {f"{name}:{port}" for name in LOOPBACK_NAMES}
        if is_loopback(host):
            self._names.add(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        self._token = token

    @property
    def needs_token(self) -> bool:
        """Whether a visitor is asked for one."""
        return self._token is not None

    def is_our_name(self, host_header: str) -> bool:
        """Whether the browser meant this server: a foreign name that leads to loopback is an attack.

        With a token any name will do, since a page of another name does not have its cookie.
        """
        return self._token is not None or host_header.lower() in self._names

    def admits(self, authorization: str, cookies: str) -> bool:
        """Whether a request carries the token: these are its headers ``Authorization`` and ``Cookie``."""
        if self._token is None:
            return True
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "bearer" and self.knows(given):
            return True
        try:
            cookie = SimpleCookie(cookies).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and is_same_token(cookie.value, self._cookie())

    def knows(self, token: str) -> bool:
        """Whether this is the token, in hexadecimal digits; takes the same time wherever it differs."""
        return self._token is not None and is_same_token(token.strip(), self._token.hex())

    def set_cookie(self) -> str:
        """The header by which a browser is remembered: what follows from the token, and not the token."""
        return f"{COOKIE}={self._cookie()}; HttpOnly; SameSite=Strict; Path=/"

    def _cookie(self) -> str:
        assert self._token is not None
        return hmac.new(self._token, b"paceline dashboard", hashlib.sha256).hexdigest()


# --- The jobs that were submitted from here, asked about beside the requests: a scheduler may take its time


_EVERY_S = 10.0
_ASKED_S = 30.0  # nobody has looked for so long: no scheduler is asked
_SHOWN_S = 86400.0  # of an ended job, as `paceline jobs` does


class Jobs:
    """Looks at the job store every ten seconds, while somebody asks.

    Commands and variables of jobs stay where they are: they may tell secrets.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[JobRecord, JobStatus]] = []
        self._asked = 0.0
        self._wake = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._watch, name="paceline-jobs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ending = True
        self._wake.set()
        self._thread.join(1.0)

    def rows(self, index: Index) -> list[dict[str, Any]]:
        """What is known of each job, the newest first; None of it is older than the last question but one."""
        was_asked, self._asked = self._asked, time.monotonic()
        if self._asked - was_asked > _ASKED_S:
            self._wake.set()
        return [
            {
                "id": record.id,
                "name": record.name,
                "launcher": record.launcher,
                "state": status.state,
                "detail": status.detail,
                "restarts": status.restarts,
                "submitted": record.submitted,
                "run": _listed(record, index),
            }
            for record, status in reversed(self._rows)
        ]

    def _watch(self) -> None:
        while not self._ending:
            if self._asked and time.monotonic() - self._asked < _ASKED_S:
                self._rows = [
                    (record, status)
                    for record in read_records()
                    if not (status := _status(record)).ended or time.time() - record.submitted < _SHOWN_S
                ]
            self._wake.wait(_EVERY_S)
            self._wake.clear()


def _status(record: JobRecord) -> JobStatus:
    try:
        return record.status()
    except (PacelineError, OSError) as error:
        return JobStatus(state="unknown", detail=str(error).partition(". ")[0])


def _listed(record: JobRecord, index: Index) -> str | None:
    return None if record.run is None else index.id_of(Path(record.run))


# --- One run, as the page shows it ---


_MOST_FOLLOWED = 16
_MOST_ENTRIES = 300
_LOG_BYTES = 64 * 1024
_SHOWN_OPTIONS = select(lambda its: its.summary)


class Views:
    """Follows the runs that were last looked at; safe to use from several threads."""

    def __init__(self) -> None:
        self._followed: OrderedDict[str, Curves] = OrderedDict()
        self._lock = threading.Lock()

    def curves(self, run: str, directory: RunDirectory) -> dict[str, Any]:
        """The curves, up to date."""
        with self._lock:
            return {"curves": self._follow(run, directory).as_json()}

    def detail(self, run: str, directory: RunDirectory, row: dict[str, Any]) -> dict[str, Any]:
        """All else that the page shows of a run; what is damaged is left out, and named in ``problems``."""
        problems: list[str] = []
        detail: dict[str, Any] = {"run": row, "problems": problems}
        with self._lock:
            followed = self._follow(run, directory)
            rows = {row["rank"]: row for row in followed.ranks if isinstance(row.get("rank"), int)}
        detail["ranks"] = [{**asdict(beat), "telemetry": rows.get(beat.rank)} for beat in read_beats(directory)] or [
            {"rank": rank, "telemetry": telemetry} for rank, telemetry in sorted(rows.items())
        ]
        for name, read in (("config", _config), ("history", _history), ("checkpoints", _checkpoints)):
            try:
                detail[name] = read(directory)
            except (PacelineError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                detail[name] = None
                problems.append(f"{name}: {error}")
        detail["logs"] = _logs(directory)
        return detail

    def _follow(self, run: str, directory: RunDirectory) -> Curves:
        followed = self._followed.setdefault(run, Curves(directory.metrics))
        self._followed.move_to_end(run)
        while len(self._followed) > _MOST_FOLLOWED:
            self._followed.popitem(last=False)
        followed.update()
        return followed


def log_tail(directory: RunDirectory, rank: int) -> str | None:
    """The end of what a rank printed; None where it has no log."""
    path = directory.log_of(rank)
    try:
        if path.is_symlink() or not path.is_file():
            return None
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LOG_BYTES))
            content = file.read().decode(errors="replace")
    except OSError:
        return None
    return content if size <= _LOG_BYTES else content.partition("\n")[2]


def _config(directory: RunDirectory) -> dict[str, Any]:
    manifest = directory.read_manifest()
    task = manifest.get("task", {})
    fields = [f"{name}={value}" for name, value in task.get("fields", {}).items()]
    shown = {"task": task.get("spec", ""), "set": fields, **manifest.get("config", {})}
    return {name: shown[name] for name in _SHOWN_OPTIONS if name in shown}


def _history(directory: RunDirectory) -> dict[str, Any]:
    read = timeline(directory.read_events())
    return {
        "entries": [asdict(entry) for entry in read.entries[-_MOST_ENTRIES:]],
        "left_out": max(0, len(read.entries) - _MOST_ENTRIES),
        "recoveries": [
            {**asdict(interruption), "seconds": round(interruption.seconds, 3)}
            for interruption in read.interruptions[-_MOST_ENTRIES:]
        ],
        "goodput": read.goodput.share,
        "lost_s": dict(read.goodput.lost_s),
    }


def _checkpoints(directory: RunDirectory) -> list[dict[str, Any]]:
    return [
        {
            **{name: getattr(entry, name) for name in ("name", "step", "version", "epoch", "created")},
            "size_bytes": entry.size_bytes,
            "marks": list(entry.marks),
            "problem": entry.problem,
        }
        for entry in entries(directory.checkpoints, None)
    ]


def _logs(directory: RunDirectory) -> list[int]:
    numbers = (path.stem.removeprefix("rank-") for path in directory.logs.glob("rank-*.log"))
    return sorted(int(number) for number in numbers if number.isdecimal())


# --- The HTTP side: a page from the package, and JSON of what runs are at. Nothing can be changed here ---


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
        DashboardAccess(host, port, token)  # before anything is opened
        self._jobs = Jobs()
        pages = Pages(Index(roots), self._jobs)
        try:
            self._server = _Server(host, port, lambda bound: DashboardAccess(host, bound, token), pages)
        except OSError as error:
            self._jobs.close()
            raise ConfigError(
                f"cannot listen on {host}, port {port}: {error.strerror or error}. Choose another --port; 0 "
                "takes any that is free."
            ) from error
        self.port: int = self._server.server_address[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, name="paceline-dashboard", daemon=True)

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
        self._assets = Assets("paceline.insight")

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

    def __init__(self, host: str, port: int, access: Callable[[int], DashboardAccess], pages: Pages) -> None:
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
