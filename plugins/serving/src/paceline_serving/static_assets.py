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
    """A static file or another answer: its ``ETag``, and its own Content-Security-Policy, if it has one."""

    content_type: str
    content: bytes
    tag: str
    policy: str | None = None


def read_assets(package: str) -> dict[str, Asset]:
    """Return the files in the ``static`` folders of this package and of another, by their names.

    They are read once, so that no request can name a path. File names must be unique.
    """
    assets: dict[str, Asset] = {}
    for folder in (__package__, package):
        for item in (importlib.resources.files(folder) / "static").iterdir():
            kind = _TYPES.get(item.name[item.name.rfind(".") :])
            if kind is not None:
                assert item.name not in assets, item.name
                content = item.read_bytes()
                assets[item.name] = Asset(kind, content, tag_of(content))
    return assets


def tag_of(content: bytes) -> str:
    """Return the ``ETag`` of a content."""
    return f'"{hashlib.sha256(content).hexdigest()[:20]}"'
