"""Where a registry's files are read: in a directory, or from a static file server by HTTP(S)."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, urlsplit

from paceline.errors import PackageError

_PIECE_BYTES = 2**18
_TIMEOUT_S = 30.0  # of silence, not of the whole
_SCHEMES = ("http", "https")


class Source(Protocol):
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


def source_of(place: str) -> Source:
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
                while piece := file.read(_PIECE_BYTES):
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
        partial = response.status == 206 and response.headers.get("Content-Range", "").startswith(
            f"bytes {start}-"
        )
        return (start if partial else 0), self._read_on(path, response)

    def _read_on(self, path: str, response: HTTPResponse) -> Iterator[bytes]:
        with response:
            try:
                while piece := response.read(_PIECE_BYTES):
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
            raise PackageError(
                f"{self._url}/{path}: the server answered {error.code} {error.reason}."
            ) from error
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
