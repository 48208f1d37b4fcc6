"""Fashion-MNIST: where it is looked for, what is believed, how it is downloaded."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from paceline.core.errors import DataError
from paceline_tasks import fashion_mnist
from paceline_tasks.fashion_mnist import (
    DEBIAN_DIRECTORY,
    MIRRORS,
    IdxFile,
    cache_directory,
    load_fashion_mnist,
    read_idx,
)

NOWHERE = Path("/nonexistent")


def idx(shape: tuple[int, ...], data: bytes) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape) + data


SMALL = {
    "train-images-idx3-ubyte.gz": ((3, 2, 2), bytes(range(12))),
    "train-labels-idx1-ubyte.gz": ((3,), bytes([9, 0, 5])),
    "t10k-images-idx3-ubyte.gz": ((1, 2, 2), bytes([255, 0, 1, 2])),
    "t10k-labels-idx1-ubyte.gz": ((1,), bytes([7])),
}
PAYLOADS = {name: gzip.compress(idx(*content)) for name, content in SMALL.items()}


@dataclass
class Mirror:
    """A web server of this test's, and how it is to behave for each path."""

    url: str
    requests: list[str] = field(default_factory=list)
    answers: dict[str, Callable[[BaseHTTPRequestHandler, bytes], None]] = field(default_factory=dict)


def answer(handler: BaseHTTPRequestHandler, body: bytes, announced: object = None) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body) if announced is None else announced))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            served.requests.append(self.path)
            if name in PAYLOADS:
                served.answers.get(name, answer)(self, PAYLOADS[name])
            else:
                self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Mirror(f"http://127.0.0.1:{server.server_address[1]}/data")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield served
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and four small files in place of the published ones."""
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    files = [
        IdxFile(name, shape, hashlib.sha256(idx(shape, data)).hexdigest()) for name, (shape, data) in SMALL.items()
    ]
    monkeypatch.setattr(fashion_mnist, "FILES", {"train": (files[0], files[1]), "test": (files[2], files[3])})
    return tmp_path / "fashion-mnist"


def test_a_download_is_checked_kept_and_not_repeated(cache: Path, mirror: Mirror) -> None:
    images, labels = load_fashion_mnist("train", installed=NOWHERE, mirrors=[mirror.url])
    assert (images.dtype, tuple(images.shape)) == (torch.uint8, (3, 1, 2, 2))
    assert images.flatten().tolist() == list(range(12))
    assert (labels.dtype, labels.tolist()) == (torch.int64, [9, 0, 5])
    assert {path.name for path in cache.iterdir()} == {*SMALL, ".lock"}
    assert load_fashion_mnist("test", installed=NOWHERE, mirrors=[])[1].tolist() == [7]
    assert sorted(mirror.requests) == sorted(f"/data/{name}" for name in SMALL)


def test_of_several_processes_one_downloads(cache: Path, mirror: Mirror) -> None:
    # flock is held by the open file, so threads shut each other out as processes do.
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(load_fashion_mnist, "train", installed=NOWHERE, mirrors=[mirror.url]) for _ in range(4)]
        results = [job.result(timeout=30) for job in jobs]
    assert all(labels.tolist() == [9, 0, 5] for _, labels in results)
    assert len(mirror.requests) == 4


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (lambda h, body: answer(h, body[:-4]), "train-images-idx3-ubyte.gz.* is damaged"),
        (lambda h, body: answer(h, body[: len(body) // 2], len(body)), r"idx3-ubyte.gz: the transfer was interrupted"),
        (lambda h, body: answer(h, body[:-4], "12, 12"), "train-images-idx3-ubyte.gz.* is damaged"),
        (lambda h, body: answer(h, bytes(300), ""), "idx3-ubyte.gz: it is larger than 256 bytes"),
        (
            lambda h, body: answer(h, gzip.compress(idx((3, 2, 2), bytes(12)))),
            "is not the published file: SHA-256",
        ),
        (lambda h, body: answer(h, b"<html>please log in</html>"), "Not a gzipped file"),
        (lambda h, body: h.send_error(404), "HTTP Error 404"),
    ],
    ids=["cut", "interrupted", "two lengths", "too long", "other content", "web page", "missing"],
)
def test_what_a_mirror_may_do_wrong(
    cache: Path,
    mirror: Mirror,
    behaviour: Callable[[BaseHTTPRequestHandler, bytes], None],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fashion_mnist, "_MAX_DOWNLOAD_BYTES", 256)
    mirror.answers["train-images-idx3-ubyte.gz"] = behaviour
    with pytest.raises(DataError, match=message) as caught:
        load_fashion_mnist("train", installed=NOWHERE, mirrors=[mirror.url])
    text = str(caught.value)
    assert "apt-get install dataset-fashion-mnist" in text
    assert f"into {cache}" in text
    assert MIRRORS[0] in text
    # Nothing half-done is left, and the next mirror is asked.
    assert [path.name for path in cache.iterdir()] == [".lock"]
    good = mirror.url.replace("/data", "/good")
    del mirror.answers["train-images-idx3-ubyte.gz"]
    assert load_fashion_mnist("train", installed=NOWHERE, mirrors=[f"{mirror.url}/x/?", good])[1].tolist() == [9, 0, 5]


def test_a_second_mirror_is_asked(cache: Path, mirror: Mirror) -> None:
    closed = "http://127.0.0.1:1"  # tcpmux: nobody listens there
    assert load_fashion_mnist("test", installed=NOWHERE, mirrors=[closed, mirror.url])[1].tolist() == [7]


def test_a_damaged_cache_is_repaired(cache: Path, mirror: Mirror, caplog: pytest.LogCaptureFixture) -> None:
    load_fashion_mnist("train", installed=NOWHERE, mirrors=[mirror.url])
    damaged = cache / "train-labels-idx1-ubyte.gz"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    mirror.requests.clear()
    assert load_fashion_mnist("train", installed=NOWHERE, mirrors=[mirror.url])[1].tolist() == [9, 0, 5]
    assert mirror.requests == ["/data/train-labels-idx1-ubyte.gz"]
    assert f"{damaged} is damaged" in caplog.text


def test_an_installed_package_is_used_where_the_cache_is_empty(cache: Path, tmp_path: Path) -> None:
    installed = tmp_path / "package"
    installed.mkdir()
    for name, payload in PAYLOADS.items():
        (installed / name).write_bytes(payload)
    assert load_fashion_mnist("train", installed=installed, mirrors=[])[1].tolist() == [9, 0, 5]
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_no_crash(cache: Path, mirror: Mirror) -> None:
    cache.write_text("a file where the directory should be")
    with pytest.raises(DataError, match=f"What failed: {cache}"):
        load_fashion_mnist("train", installed=NOWHERE, mirrors=[mirror.url])


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(DataError, match="no split 'validation'; it has train and test"):
        load_fashion_mnist("validation")


@pytest.mark.parametrize(
    "content",
    [
        idx((4,), b"abcd"),
        idx((3,), b"abc") + bytes(10**6),
        idx((3,), b"ab"),
        b"",
        b"\0\0\x09\1" + idx((3,), b"abc")[4:],
        idx((3,), b"abd"),
    ],
)
def test_only_the_very_file_is_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(content))
    published = IdxFile("labels.gz", (3,), hashlib.sha256(idx((3,), b"abc")).hexdigest())
    with pytest.raises(DataError, match="not the published file: SHA-256"):
        read_idx(path, published)
    path.write_bytes(gzip.compress(idx((3,), b"abc")))
    assert read_idx(path, published).tolist() == list(b"abc")


def test_where_downloads_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == Path("/home/somebody/.cache/paceline/fashion-mnist")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "paceline" / "fashion-mnist"
    monkeypatch.setenv("PACELINE_DATA", "~/data")
    assert cache_directory() == Path("/home/somebody/data/fashion-mnist")


@pytest.mark.skipif(not DEBIAN_DIRECTORY.is_dir(), reason="dataset-fashion-mnist is not installed")
def test_debians_files_are_the_published_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    for split, size in (("train", 60_000), ("test", 10_000)):
        images, labels = load_fashion_mnist(split, mirrors=[])
        assert tuple(images.shape) == (size, 1, 28, 28)
        assert torch.bincount(labels).tolist() == [size // 10] * 10
