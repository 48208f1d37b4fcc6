"""Files of pages, as they are in the package, and the headers that go with them."""

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
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Nothing inline, nothing from elsewhere, in nobody's frame; caches ask whether their copy still holds."""


@dataclass(frozen=True)
class Asset:
    """A file.

    Attributes:
        content_type: with its character set.
        content: its bytes.
        tag: its ``ETag``.
    """

    content_type: str
    content: bytes
    tag: str


class Assets:
    """The files in the folders ``static`` of this package and of others.

    They are read once: no request leads to a file of these folders or any other.

    Args:
        packages: by their full names; no two have a file of the same name.
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
        """The file of this name; None where there is none."""
        return self._assets.get(name)


def tag_of(content: bytes) -> str:
    """The ``ETag`` of a content."""
    return f'"{hashlib.sha256(content).hexdigest()[:20]}"'
