"""Packages pushed to and pulled from other registries: folders, and addresses."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import quote, urlsplit

from paceline.core.errors import PackageError
from paceline.core.files import fsync_directory
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

# --- Where a registry's files are read: in a directory, or from a static file server by HTTP(S) ---


_DOWNLOAD_PIECE_BYTES = 2**18
_TIMEOUT_S = 30.0  # of silence, not of the whole
_SCHEMES = ("http", "https")


class RegistrySource(Protocol):
    """The files of a registry somewhere else."""

    def read(self, path: str, limit: int) -> bytes | None:
        """A small file of at most ``limit`` bytes; None where it is not there.

        Raises:
            PackageError: it is larger, or cannot be read.
        """

    def pieces(self, path: str, start: int) -> tuple[int, Iterator[bytes]]:
        """A file from ``start`` on: where it really begins (``start``, or 0), and its bytes in pieces.

        Raises:
            PackageError: it is not there or cannot be read, now or while it is.
        """


def source_of(place: str) -> RegistrySource:
    """The registry at a URL or in a directory.

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
    """A registry in a directory.

    Args:
        root: of the registry.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: str, limit: int) -> bytes | None:
        try:
            with (self._root / path).open("rb") as file:
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
            with path.open("rb") as file:
                file.seek(start)
                while piece := file.read(_DOWNLOAD_PIECE_BYTES):
                    yield piece
        except OSError as error:
            raise PackageError(f"{path} cannot be read: {error.strerror}.") from error


class HttpSource:
    """A registry behind a static file server, such as ``python -m http.server``.

    Args:
        url: of the registry's directory.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        if not urlsplit(self._url).hostname:
            raise PackageError(f"{url} is no URL of a registry: it names no host.")

    def read(self, path: str, limit: int) -> bytes | None:
        response = self._get(path, {})
        if response is None:
            return None
        with response:
            try:
                content = response.read(limit + 1)
            except (OSError, HTTPException) as error:
                raise self._broken(path, error) from error
        return _limited(content, limit, f"{self._url}/{path}")

    def pieces(self, path: str, start: int) -> tuple[int, Iterator[bytes]]:
        response = self._get(path, {"Range": f"bytes={start}-"} if start else {})
        if response is None:
            raise PackageError(f"{self._url}/{path} is not there: the registry is not whole.")
        # Not every server knows Range: one that does not answers with the whole file.
        partial = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        return (start if partial else 0), self._read_on(path, response)

    def _read_on(self, path: str, response: HTTPResponse) -> Iterator[bytes]:
        with response:
            try:
                while piece := response.read(_DOWNLOAD_PIECE_BYTES):
                    yield piece
            except (OSError, HTTPException) as error:
                raise self._broken(path, error) from error

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
            raise self._broken(path, error) from error

    def _broken(self, path: str, error: Exception) -> PackageError:
        reason = getattr(error, "reason", None) or error
        return PackageError(
            f"{self._url}/{path} cannot be read: {reason}. What was fetched of the package, if anything was, "
            "stays; the next pull goes on from there."
        )


class _WithinHttp(urllib.request.HTTPRedirectHandler):
    """A server may send on to another, but not to a file or an FTP server, nor from https to http."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        if newurl.partition("://")[0] not in (_SCHEMES if req.type == "http" else ("https",)):
            raise PackageError(f"{req.full_url} sends on to {newurl}, which is refused.")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_OPENER = urllib.request.build_opener(_WithinHttp)


def _limited(content: bytes, limit: int, where: str) -> bytes:
    if len(content) > limit:
        raise PackageError(f"{where} has more than {limit:,} bytes: it is no part of a registry.")
    return content


# --- Packages from one registry to another: a copy is verified whole before it is visible ---
#
# What was fetched of one that broke off stays in ``partial/``, and the next pull goes on from there.


OnBytes = Callable[[int, int], None]
"""Is told how many bytes are there, and how many there will be."""

_PIECE_BYTES = 2**20


class Transferred(NamedTuple):
    """A package that was copied.

    Attributes:
        digest: its digest.
        reference: the tag that means it now, there where it was copied to; None: it was named by its digest.
        fetched_bytes: what was copied; what was there already is not in it.
    """

    digest: str
    reference: PackageReference | None
    fetched_bytes: int


def pull(what: str, place: str, registry: Registry, on_bytes: OnBytes = lambda done, total: None) -> Transferred:
    """Copy a package and its tag from another registry.

    Args:
        what: ``NAME@TAG``, ``NAME`` or a whole digest.
        place: the other registry's directory or URL.
        registry: takes it.
        on_bytes: told of the progress.

    Raises:
        PackageError: it is not there, is damaged there, or the connection broke; nothing of it is visible
            then. One that is damaged here is replaced.
    """
    return _copy(what, source_of(place), place, registry, on_bytes)


def push(what: str, place: Path, registry: Registry, on_bytes: OnBytes = lambda done, total: None) -> Transferred:
    """Copy a package and its tag to another registry, a directory; it is made where there is none.

    Args:
        what: ``NAME@TAG``, ``NAME``, or a digest or the beginning of one.
        place: the other registry's directory.
        registry: has it.
        on_bytes: told of the progress.

    Raises:
        PackageError: it is not here or damaged, or the directory cannot be written.
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
    if (found := hashlib.sha256(content).hexdigest()) != digest:
        raise PackageError(f"the package {digest} in {place} is damaged: its manifest has the SHA-256 {found}.")
    manifest = PackageManifest.from_bytes(content)
    fetched = 0
    with _partial(registry, digest) as partial:
        if _is_whole(digest, registry):  # by another pull, while this one waited
            return 0
        for stray in set(os.listdir(partial)) - manifest.files.keys():
            _remove(partial / stray)
        there = 0
        for name, record in manifest.files.items():
            fetched += _fetch_file(
                source,
                f"packages/{digest}/{name}",
                partial / name,
                record,
                there,
                manifest.size_bytes,
                on_bytes,
            )
            there += record.size
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
    there: int,
    total: int,
    on_bytes: OnBytes,
) -> int:
    """One file, from where an earlier try ended; returns the bytes that were fetched."""
    if target.is_symlink() or not (target.is_file() or not target.exists()):
        _remove(target)
    hashed, start = _hash_so_far(target, record.size)
    if start == record.size and hashed.hexdigest() == record.sha256 and target.exists():
        on_bytes(there + start, total)
        return 0
    if start == record.size:  # all there, and wrong
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
            on_bytes(there + size, total)
        file.flush()
        os.fsync(file.fileno())
    if size < record.size:
        raise PackageError(
            f"{path} broke off after {size:,} of {record.size:,} bytes. What was fetched stays; the "
            "next pull goes on "
            "from there."
        )
    if size > record.size or hashed.hexdigest() != record.sha256:
        _remove(target)
        raise PackageError(
            f"{path} is damaged where it comes from: it is not what its {MANIFEST} says. Nothing of "
            "the package is "
            "kept under its name."
        )
    return size - start


def _hash_so_far(target: Path, size: int) -> tuple[hashlib._Hash, int]:
    hashed, there = hashlib.sha256(), 0
    try:
        with target.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                hashed.update(piece)
                there += len(piece)
    except FileNotFoundError:
        pass
    return (hashed, there) if there <= size else (hashlib.sha256(), 0)


@contextmanager
def _partial(registry: Registry, digest: str) -> Iterator[Path]:
    """The folder of what is fetched, for one process at a time; gone once it was renamed."""
    path = registry.partial_of(digest)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{digest}.lock").open("a+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path.mkdir(exist_ok=True)
            yield path
            shutil.rmtree(path, ignore_errors=True)  # where it was not needed any more
            path.with_name(f".{digest}.lock").unlink(missing_ok=True)
    except OSError as error:
        raise PackageError(
            f"cannot write to the registry {registry.path}: {error.strerror}. Make it writable and make room."
        ) from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
