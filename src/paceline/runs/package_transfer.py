"""Push and pull of packages between registries: directories and HTTP(S) servers."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import quote, urlsplit

from paceline.core.errors import PackageError
from paceline.core.file_lock import locked
from paceline.core.files import fsync_directory, open_regular, remove_directory
from paceline.runs.checkpoint_manifest import FileRecord
from paceline.runs.package import verify_package
from paceline.runs.package_manifest import MANIFEST, MAX_MANIFEST_BYTES, PackageManifest
from paceline.runs.package_registry import (
    MAX_TAG_BYTES,
    PackageReference,
    Registry,
    Tag,
    is_digest,
    parse_reference,
)

# --- Sources of a registry's files: a directory, or a static file server ---


_DOWNLOAD_PIECE_BYTES = 2**18
_TIMEOUT_S = 30.0  # without data, not of the whole transfer
_LEAST_BYTES = 30 * 1024  # within this time: a server that sends a byte a second would keep a pull for ever
_SCHEMES = ("http", "https")


class RegistrySource(Protocol):
    """Reads the files of another registry."""

    def read(self, path: str, limit: int) -> bytes | None:
        """Return a small file of at most ``limit`` bytes, or None if it does not exist.

        Raises:
            PackageError: it is larger, or cannot be read.
        """

    def pieces(self, path: str, start: int) -> tuple[int, Iterator[bytes]]:
        """Return the actual start of a file's data (``start``, or 0), and its bytes in pieces.

        Raises:
            PackageError: it does not exist or cannot be read, now or during the iteration.
        """


def source_of(place: str) -> RegistrySource:
    """Open the registry at a URL or in a directory.

    Raises:
        PackageError: it is neither.
    """
    scheme, separator, _ = place.partition("://")
    if separator:
        if scheme not in _SCHEMES:
            raise PackageError(f"{place}: a registry is a directory or an http(s) URL, not {scheme}://.")
        return HttpSource(place)
    if not Path(place).is_dir():
        raise PackageError(f"there is no registry {place}: no such directory.")
    return DirectorySource(Path(place))


class DirectorySource:
    """A registry in a directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: str, limit: int) -> bytes | None:
        try:
            with open_regular(self._root / path) as file:
                content = file.read(limit + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PackageError(f"{self._root / path} cannot be read: {error.strerror}.") from error
        return _limited(content, limit, str(self._root / path))

    def pieces(self, path: str, start: int) -> tuple[int, Iterator[bytes]]:
        return start, self._read_on(self._root / path, start)

    def _read_on(self, path: Path, start: int) -> Iterator[bytes]:
        try:
            with open_regular(path) as file:
                file.seek(start)
                while piece := file.read(_DOWNLOAD_PIECE_BYTES):
                    yield piece
        except OSError as error:
            raise PackageError(f"{path} cannot be read: {error.strerror}.") from error


class HttpSource:
    """A registry behind a static file server, such as ``python -m http.server``.

    Args:
        url: the URL of the registry's directory.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        if not urlsplit(self._url).hostname:
            raise PackageError(f"{url} is not the URL of a registry, because it names no host.")

    def read(self, path: str, limit: int) -> bytes | None:
        response = self._get(path, {})
        if response is None:
            return None
        content = bytearray()
        for piece in self._read_on(path, response):
            content += piece
            if len(content) > limit:
                break
        return _limited(bytes(content), limit, f"{self._url}/{path}")

    def pieces(self, path: str, start: int) -> tuple[int, Iterator[bytes]]:
        response = self._get(path, {"Range": f"bytes={start}-"} if start else {})
        if response is None:
            raise PackageError(f"{self._url}/{path} does not exist, so the registry is incomplete.")
        # A server without support for Range answers with the whole file.
        partial = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        return (start if partial else 0), self._read_on(path, response)

    def _read_on(self, path: str, response: HTTPResponse) -> Iterator[bytes]:
        """Yield pieces as they come.

        Raises:
            PackageError: the connection broke, or is too slow to be of use.
        """
        waited_s, received = 0.0, 0
        with response:
            try:
                while True:
                    start = time.monotonic()
                    piece = response.read1(_DOWNLOAD_PIECE_BYTES)
                    waited_s += time.monotonic() - start
                    if not piece:
                        return
                    yield piece
                    received += len(piece)
                    if waited_s < _TIMEOUT_S:
                        continue
                    if received < _LEAST_BYTES:
                        raise TimeoutError(f"the server sent only {received:,} bytes in {waited_s:.0f} s")
                    waited_s, received = 0.0, 0
            except (OSError, HTTPException) as error:
                raise self._read_error(path, error) from error

    def _get(self, path: str, headers: dict[str, str]) -> HTTPResponse | None:
        request = urllib.request.Request(f"{self._url}/{quote(path)}", headers=headers)
        try:
            opened: HTTPResponse = _OPENER.open(request, timeout=_TIMEOUT_S)
            return opened
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    return None
            raise PackageError(f"{self._url}/{path}: the server answered {error.code} {error.reason}.") from error
        except (OSError, HTTPException, ValueError) as error:
            raise self._read_error(path, error) from error

    def _read_error(self, path: str, error: Exception) -> PackageError:
        reason = getattr(error, "reason", None) or error
        return PackageError(
            f"{self._url}/{path} cannot be read: {reason}. The next pull continues with the data fetched so far."
        )


class _HttpRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to other servers, but not to files or FTP servers, nor from https to http."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        if newurl.partition("://")[0] not in (_SCHEMES if req.type == "http" else ("https",)):
            raise PackageError(f"{req.full_url} redirects to {newurl}, which is not allowed.")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_OPENER = urllib.request.build_opener(_HttpRedirects)


def _limited(content: bytes, limit: int, where: str) -> bytes:
    if len(content) > limit:
        raise PackageError(f"{where} has more than {limit:,} bytes, so it does not belong to a registry.")
    return content


# --- Packages from one registry to another: a copy is verified completely before it is visible ---
#
# An interrupted pull stays in ``partial/``, and the next pull continues it.


OnBytes = Callable[[int, int], None]
"""Receives the progress: bytes present, and bytes in total."""

_PIECE_BYTES = 2**20


class Transferred(NamedTuple):
    """A package that was copied.

    Attributes:
        digest: its digest.
        reference: its tag at the destination; None if it was named by its digest.
        fetched_bytes: bytes copied, without those already present.
    """

    digest: str
    reference: PackageReference | None
    fetched_bytes: int


def pull(what: str, place: str, registry: Registry, on_bytes: OnBytes = lambda done, total: None) -> Transferred:
    """Copy a package and its tag from another registry.

    Args:
        what: the package: ``NAME@TAG``, ``NAME`` or a whole digest.
        place: the other registry's directory or URL.
        registry: the destination.
        on_bytes: receives the progress.

    Raises:
        PackageError: it is missing or damaged at the source, or the connection broke; then no part of it is visible. A
            damaged copy here is replaced.
    """
    return _copy(what, source_of(place), place, registry, on_bytes)


def push(what: str, place: Path, registry: Registry, on_bytes: OnBytes = lambda done, total: None) -> Transferred:
    """Copy a package and its tag to another registry, a directory that is created if missing.

    Args:
        what: the package: ``NAME@TAG``, ``NAME``, or a digest or a prefix of one.
        place: the other registry's directory.
        registry: the source.
        on_bytes: receives the progress.

    Raises:
        PackageError: it is missing or damaged here, or the directory cannot be written.
    """
    digest = registry.resolve(what)
    named = what if "@" in what or not digest.startswith(what.removeprefix("sha256:")) else digest
    return _copy(named, DirectorySource(registry.path), str(registry.path), Registry(place), on_bytes)


def _copy(what: str, source: RegistrySource, place: str, registry: Registry, on_bytes: OnBytes) -> Transferred:
    reference = None
    digest = what.removeprefix("sha256:")
    if not is_digest(digest):
        reference = parse_reference(what)
        content = source.read(f"tags/{reference.name}/{reference.tag}.json", MAX_TAG_BYTES)
        if content is None:
            raise PackageError(f"there is no {reference} in the registry {place}.")
        digest = Tag.from_bytes(content, f"{place}, {reference}").digest
    fetched = 0 if _is_whole(digest, registry) else _fetch(digest, source, place, registry, on_bytes)
    if reference is not None:
        registry.put_tag(reference, digest)
    return Transferred(digest, reference, fetched)


def _is_whole(digest: str, registry: Registry) -> bool:
    try:
        return verify_package(registry.path_of(digest)).digest == digest
    except PackageError:
        return False


def _fetch(digest: str, source: RegistrySource, place: str, registry: Registry, on_bytes: OnBytes) -> int:
    content = source.read(f"packages/{digest}/{MANIFEST}", MAX_MANIFEST_BYTES)
    if content is None:
        raise PackageError(f"there is no package {digest} in the registry {place}.")
    if (actual_digest := hashlib.sha256(content).hexdigest()) != digest:
        raise PackageError(f"the package {digest} in {place} is damaged: its manifest has the SHA-256 {actual_digest}.")
    manifest = PackageManifest.from_bytes(content)
    fetched = 0
    with _partial(registry, digest) as partial:
        if _is_whole(digest, registry):  # another pull finished while this one waited
            return 0
        for stray in set(os.listdir(partial)) - manifest.files.keys():
            _remove(partial / stray)
        done_bytes = 0
        for name, record in manifest.files.items():
            fetched += _fetch_file(
                source,
                f"packages/{digest}/{name}",
                partial / name,
                record,
                done_bytes,
                manifest.size_bytes,
                on_bytes,
            )
            done_bytes += record.size
        (partial / MANIFEST).write_bytes(content)
        verify_package(partial)
        fsync_directory(partial)
        registry.put(partial, digest)
    return fetched


def _fetch_file(
    source: RegistrySource,
    path: str,
    target: Path,
    record: FileRecord,
    done_bytes: int,
    total: int,
    on_bytes: OnBytes,
) -> int:
    """Fetch one file from where an earlier try ended; return the number of bytes fetched."""
    if target.is_symlink() or not (target.is_file() or not target.exists()):
        _remove(target)
    hashed, start = _hash_so_far(target, record.size)
    if start == record.size and hashed.hexdigest() == record.sha256 and target.exists():
        on_bytes(done_bytes + start, total)
        return 0
    if start == record.size:  # complete, but damaged
        start = 0
    begins, pieces = source.pieces(path, start)
    if begins != start or start == 0:
        hashed, start = hashlib.sha256(), 0
    size = start
    with target.open("r+b" if start else "wb") as file:
        file.seek(start)
        file.truncate()
        for piece in pieces:
            size += len(piece)
            if size > record.size:
                break
            file.write(piece)
            hashed.update(piece)
            on_bytes(done_bytes + size, total)
        file.flush()
        os.fsync(file.fileno())
    if size < record.size:
        raise PackageError(
            f"{path} was interrupted after {size:,} of {record.size:,} bytes. The next pull continues from there."
        )
    if size > record.size or hashed.hexdigest() != record.sha256:
        _remove(target)
        raise PackageError(
            f"{path} is damaged at the source: it does not match its {MANIFEST}. No part of the package was stored."
        )
    return size - start


def _hash_so_far(target: Path, size: int) -> tuple[hashlib._Hash, int]:
    hashed, size_so_far = hashlib.sha256(), 0
    try:
        with open_regular(target) as file:
            while piece := file.read(_PIECE_BYTES):
                hashed.update(piece)
                size_so_far += len(piece)
    except FileNotFoundError:
        pass
    return (hashed, size_so_far) if size_so_far <= size else (hashlib.sha256(), 0)


@contextmanager
def _partial(registry: Registry, digest: str) -> Iterator[Path]:
    """Create and lock the directory of an unfinished pull; remove it once the package is in place."""
    path = registry.partial_of(digest)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f".{digest}.lock")):
            path.mkdir(exist_ok=True)
            yield path
            shutil.rmtree(path, ignore_errors=True)  # only if it was not moved
            path.with_name(f".{digest}.lock").unlink(missing_ok=True)
    except OSError as error:
        raise PackageError(
            f"cannot write to the registry {registry.path}: {error.strerror}. Make it writable and free space."
        ) from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_directory(path)
    else:
        path.unlink(missing_ok=True)
