"""Data files of an object store on this node: each is downloaded once, and kept in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.core.errors import CheckpointError
from paceline.core.files import parse_json, user_directory, write_atomically
from paceline_stores.objects import FoundObject, ObjectStore

_log = logging.getLogger(__name__)


def download(address: str) -> list[Path]:
    """Return the files of an address on this node, by name.

    Args:
        address: such as ``s3://corpus/web-*.bin``, with ``*`` and ``[...]`` as in a shell.

    Raises:
        CheckpointError: the store does not give a file, none has such a name, or the disk is full.
    """
    folder, _, _ = address.partition("*")[0].partition("[")[0].rpartition("/")
    store = ObjectStore(folder)
    found = store.find(address.removeprefix(f"{folder}/"))
    if not found:
        raise CheckpointError(f"{address}: there is no such object. Check the address.")
    return [_cached(store, each) for each in found]


def _cached(store: ObjectStore, found: FoundObject) -> Path:
    """Return an object's file; the first process of a node downloads it."""
    address = f"{store.address}/{found.name}"
    digest = hashlib.sha256(f"{address}\n{found.size}\n{found.version}".encode()).hexdigest()[:32]
    folder = user_directory("cache") / "data" / digest
    file, record = folder / Path(found.name).name, folder / "download.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / "lock"):
            if record.is_file() and file.is_file() and file.stat().st_size == parse_json(record.read_bytes())["size"]:
                return file
            _log.info("downloading %s (%.1f MiB)", address, found.size / 2**20)
            digest = _download(store, found, file)
            known: dict[str, Any] = {"address": address, "size": found.size, "sha256": digest}
            write_atomically(record, json.dumps({**known, "version": found.version}).encode())
    except OSError as error:
        raise CheckpointError(
            f"{address} cannot be kept in {folder.parent}: {error.strerror or error}. Free some space there, or set "
            "XDG_CACHE_HOME to a directory with more."
        ) from error
    return file


def _download(store: ObjectStore, found: FoundObject, file: Path) -> str:
    """Write an object to a file, whole or not at all; return its SHA-256."""
    for left in file.parent.glob(f".{file.name}.{os.uname().nodename}-*"):  # of a process that was killed
        left.unlink(missing_ok=True)
    part = file.with_name(f".{file.name}.{os.uname().nodename}-{os.getpid()}")
    digest = hashlib.sha256()
    try:
        with part.open("wb") as target:
            for piece in store.pieces(found.name, found.size):
                digest.update(piece)
                target.write(piece)
            target.flush()
            os.fsync(target.fileno())
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return digest.hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process of a node download; where a file system has no locks, several do, to the same file."""
    with path.open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
