"""A search's row in a list, read again only when its files have changed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from paceline.core.file_lock import is_locked
from paceline.core.files import parse_json, read_document


class IndexedSearch:
    """A search; its two files are read again only when they have changed.

    Attributes:
        row: as the page shows it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signature: tuple[object, ...] | None = None
        self.row: dict[str, Any] = {}

    def update(self) -> bool:
        """Read what has changed; return whether the search still exists."""
        files = [self._path / name for name in ("tune.json", "result.json")]
        signature = (is_locked(self._path / "tune.lock"), *map(file_signature, files))
        if signature != self._signature:
            self._signature = signature
            settings, result = map(_read_object, files)
            state = "running" if signature[0] else "finished" if result.get("done") is True else "stopped"
            best, metric = result.get("best"), str(settings.get("metric", "")).partition(":")[0]
            best = best if isinstance(best, dict) and isinstance(best.get(metric), int | float) else None
            options, planned = settings.get("options"), result.get("planned", settings.get("trials"))
            self.row = {
                "id": page_name(self._path),
                "name": self._path.name,
                "state": state,
                "task": str(options.get("task", "")) if isinstance(options, dict) else "",
                "planned": planned if isinstance(planned, int) else None,
                "metric": metric,
                "value": None if best is None else best[metric],
                "best": None if best is None else page_name(self._path / str(best.get("run", ""))),
            }
        return signature[1] is not None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        document = parse_json(read_document(path))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def page_name(path: Path) -> str:
    """Return the name of a directory in a page's address."""
    return hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:16]


def file_signature(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with a file; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
