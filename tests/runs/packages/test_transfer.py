"""Pulls and pushes: verified whole before anything is visible, and gone on with where they broke off."""

from __future__ import annotations

import os
import re
import shutil
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from tests.processes import Processes
from tests.runs.packages.conftest import PutPackage

from paceline.core.errors import PackageError
from paceline.runs import package_transfer
from paceline.runs.package import open_package
from paceline.runs.package_registry import PackageReference, Registry
from paceline.runs.package_transfer import pull, push

SIZE = 700_000


@pytest.fixture
def origin(tmp_path: Path, put_package: PutPackage) -> tuple[Registry, str]:
    """A registry with ``demo@prod``, whose files are larger than a piece."""
    origin = Registry(tmp_path / "origin")
    digest = put_package(origin, seed=7, size=SIZE)
    origin.put_tag(PackageReference("demo", "prod"), digest)
    return origin, digest


class Server(socketserver.ThreadingTCPServer):
    """Serves a directory with Range requests, and hangs up after so many bytes of bodies, once."""

    daemon_threads = True

    def __init__(self, root: Path, hang_up_after: int | None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.left = hang_up_after
        self.ranges: list[str | None] = []
        self.pause_s: float | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        file = self.server.root / self.path.lstrip("/")
        if not file.is_file():
            self.send_error(404)
            return
        content = file.read_bytes()
        given = self.headers.get("Range")
        self.server.ranges.append(given)
        start = int(re.fullmatch(r"bytes=(\d+)-", given)[1]) if given else 0  # type: ignore[index]
        self.send_response(206 if given else 200)
        if given:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        if self.server.pause_s is not None:
            with suppress(OSError):
                for byte in body:
                    self.wfile.write(bytes([byte]))
                    time.sleep(self.server.pause_s)
            return
        if self.server.left is not None:
            if self.server.left < len(body):
                self.wfile.write(body[: self.server.left])
                self.server.left = None
                return
            self.server.left -= len(body)
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def serving(root: Path, hang_up_after: int | None = None) -> Iterator[Server]:
    with Server(root, hang_up_after) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)


def test_a_pull_by_http_brings_package_and_tag(registry: Registry, origin: tuple[Registry, str]) -> None:
    told: list[tuple[int, int]] = []
    with serving(origin[0].path) as server:
        pulled = pull("demo@prod", server.url, registry, lambda done, total: told.append((done, total)))
    opened = open_package("demo@prod", registry)
    assert opened.digest == pulled.digest == origin[1]
    assert pulled.fetched_bytes == opened.manifest.size_bytes
    assert told[-1] == (opened.manifest.size_bytes, opened.manifest.size_bytes)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert not registry.partial_of(origin[1]).exists()


def test_a_pull_that_broke_off_goes_on_where_it_was(registry: Registry, origin: tuple[Registry, str]) -> None:
    manifest_bytes = (origin[0].path_of(origin[1]) / "manifest.json").stat().st_size
    tag_bytes = (origin[0].tags / "demo" / "prod.json").stat().st_size
    with serving(origin[0].path, hang_up_after=manifest_bytes + tag_bytes + SIZE + 400_000) as server:
        with pytest.raises(PackageError, match="The next pull continues from there"):
            pull("demo@prod", server.url, registry)
        assert not registry.holds(origin[1])
        assert registry.references() == {}, "nothing is visible before all of it is there"
        kept = {file.name: file.stat().st_size for file in registry.partial_of(origin[1]).iterdir()}
        server.ranges.clear()
        pulled = pull("demo@prod", server.url, registry)
    asked = [given for given in server.ranges if given]
    assert len(asked) == 1, "one file was cut short"
    assert int(asked[0].removeprefix("bytes=").rstrip("-")) in kept.values()
    assert pulled.fetched_bytes == open_package("demo@prod", registry).manifest.size_bytes - sum(kept.values())


def test_a_pull_gives_up_a_server_that_sends_byte_by_byte(
    registry: Registry, origin: tuple[Registry, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package_transfer, "_TIMEOUT_S", 0.3)
    with serving(origin[0].path) as server:
        server.pause_s = 0.02
        with pytest.raises(PackageError, match=r"the server sent only .* bytes in .* The next pull continues"):
            pull("demo@prod", server.url, registry)
        server.pause_s = None
        assert pull("demo@prod", server.url, registry).digest == origin[1]


def test_what_was_kept_is_not_believed(registry: Registry, origin: tuple[Registry, str]) -> None:
    partial = registry.partial_of(origin[1])
    partial.mkdir(parents=True)
    (partial / "weights.safetensors").write_bytes(b"something else")
    (partial / "program.pt2").write_bytes(b"x" * (SIZE + len("program.pt2")))  # the right size
    (partial / "README.md").symlink_to("/etc/hostname")
    (partial / "stray").mkdir()
    with serving(origin[0].path) as server:
        # A wrong beginning shows at the end of the file only; the next try takes it from the start.
        with pytest.raises(PackageError, match="is damaged at the source"):
            pull(origin[1], server.url, registry)
        pull(origin[1], server.url, registry)
    assert open_package(origin[1], registry).digest == origin[1]


def test_a_plain_file_server_is_enough(
    registry: Registry,
    origin: tuple[Registry, str],
    run_processes: Processes,
) -> None:
    partial = registry.partial_of(origin[1])
    partial.mkdir(parents=True)
    content = (origin[0].path_of(origin[1]) / "program.pt2").read_bytes()
    (partial / "program.pt2").write_bytes(content[:1000])
    words = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory"]
    server = run_processes.start([*words, origin[0].path])
    assert server.stdout is not None
    port = re.search(r"port (\d+)", server.stdout.readline())
    assert port is not None
    # It knows no Range, so the file comes whole.
    pulled = pull("demo@prod", f"http://127.0.0.1:{port[1]}/", registry)
    assert pulled.fetched_bytes == open_package("demo@prod", registry).manifest.size_bytes


@pytest.mark.parametrize("name", ["weights.safetensors", "manifest.json"])
def test_a_damaged_origin_gives_nothing(registry: Registry, origin: tuple[Registry, str], name: str) -> None:
    file = origin[0].path_of(origin[1]) / name
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    with serving(origin[0].path) as server, pytest.raises(PackageError, match="damaged"):
        pull("demo@prod", server.url, registry)
    assert registry.digests() == []
    assert registry.references() == {}


def _damage(package: Path, how: str) -> None:
    file = package / "weights.safetensors"
    if how == "no manifest":
        (package / "manifest.json").unlink()
    elif how == "another package":
        shutil.rmtree(package)
        shutil.copytree(package.with_name(how), package)
    else:
        content = bytearray(file.read_bytes())
        content[-20] ^= 1
        file.write_bytes(content)


@pytest.mark.parametrize("how", ["a byte", "no manifest", "another package"])
def test_a_package_that_is_damaged_here_is_repaired_by_a_pull(
    registry: Registry, origin: tuple[Registry, str], put_package: PutPackage, how: str
) -> None:
    pull("demo@prod", str(origin[0].path), registry)
    package = registry.path_of(origin[1])
    registry.path_of(put_package(registry, seed=8)).rename(package.with_name("another package"))
    _damage(package, how)
    with pytest.raises(PackageError, match=r"pull it from an intact registry|is not in"):
        open_package("demo@prod", registry)
    pulled = pull("demo@prod", str(origin[0].path), registry)
    assert pulled.fetched_bytes == open_package("demo@prod", registry).manifest.size_bytes
    assert sorted(os.listdir(registry.packages)) == sorted([origin[1], "another package"])


def test_a_damaged_package_stays_where_none_is_whole(registry: Registry, origin: tuple[Registry, str]) -> None:
    pull("demo@prod", str(origin[0].path), registry)
    for each in (registry, origin[0]):
        _damage(each.path_of(origin[1]), "a byte")
    with pytest.raises(PackageError, match="is damaged at the source"):
        pull("demo@prod", str(origin[0].path), registry)
    assert registry.holds(origin[1])


def test_a_longer_file_is_cut_off(registry: Registry, origin: tuple[Registry, str]) -> None:
    with (origin[0].path_of(origin[1]) / "program.pt2").open("ab") as file:
        file.write(b"more")
    with serving(origin[0].path) as server, pytest.raises(PackageError, match="damaged"):
        pull("demo@prod", server.url, registry)


def test_a_push_to_a_directory_and_a_pull_from_it(
    registry: Registry, origin: tuple[Registry, str], tmp_path: Path
) -> None:
    pushed = push("demo@prod", tmp_path / "shared", origin[0])
    assert pushed.fetched_bytes > 2 * SIZE
    assert push("demo@prod", tmp_path / "shared", origin[0]).fetched_bytes == 0, "it is there already"
    pull("demo@prod", str(tmp_path / "shared"), registry)
    assert open_package("demo@prod", registry).digest == origin[1]
    push(origin[1][:12], tmp_path / "by-digest", origin[0])
    assert Registry(tmp_path / "by-digest").digests() == [origin[1]]
    assert Registry(tmp_path / "by-digest").references() == {}


@pytest.mark.parametrize(
    ("what", "place", "message"),
    [
        ("demo@prod", "ftp://127.0.0.1/x", "not ftp://"),
        ("demo@prod", "file:///etc", "not file://"),
        ("demo@prod", "/no/such/place", "no such directory"),
        ("../demo", "http://127.0.0.1:9", "lower-case letters"),
        ("demo@prod", "http://127.0.0.1:9", "cannot be read"),
        ("demo@prod", "http://", "names no host"),
    ],
)
def test_what_is_no_registry_or_package(registry: Registry, what: str, place: str, message: str) -> None:
    with pytest.raises(PackageError, match=message):
        pull(what, place, registry)


def test_what_is_not_there(registry: Registry, origin: tuple[Registry, str]) -> None:
    with serving(origin[0].path) as server:
        with pytest.raises(PackageError, match="there is no demo@test"):
            pull("demo@test", server.url, registry)
        with pytest.raises(PackageError, match=f"there is no package {'a' * 64}"):
            pull("a" * 64, server.url, registry)
