"""Static files of pages in the package, and their HTTP headers."""

from __future__ import annotations

import hashlib
import importlib.resources
from dataclasses import dataclass

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer, a form's Origin would be null
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""No inline or external content, no framing; caches must revalidate."""


@dataclass(frozen=True)
class Asset:
    """A static file with its content type and ``ETag``."""

    content_type: str
    content: bytes
    tag: str


class Assets:
    """The files in the ``static`` folders of this package and of ``packages``.

    They are read once, so that no request can name a path. File names must be unique.
    """

    def __init__(self, *packages: str) -> None:
        self._assets: dict[str, Asset] = {}
        for package in (__package__, *packages):
            for item in (importlib.resources.files(package) / "static").iterdir():
                kind = _TYPES.get(item.name[item.name.rfind(".") :])
                if kind is None:
                    continue
                assert item.name not in self._assets, item.name
                content = item.read_bytes()
                self._assets[item.name] = Asset(kind, content, tag_of(content))

    def find(self, name: str) -> Asset | None:
        return self._assets.get(name)


def tag_of(content: bytes) -> str:
    """Return the ``ETag`` of a content."""
    return f'"{hashlib.sha256(content).hexdigest()[:20]}"'
