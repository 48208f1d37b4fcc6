"""New files and directories beside the checkpoints, until they get their names."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.checkpoint.manifest import FileRecord
from paceline.checkpoint.write_faults import fail_if_armed

TEMPORARY = ".tmp-"
"""How the names begin of what is not committed yet, or not any more."""

_CHUNK_BYTES = 4 * 2**20  # hashed while it is still in the cache, then written

Buffer = bytes | memoryview


@contextmanager
def temporary_directory(parent: Path) -> Iterator[Path]:
    """A new directory, locked while in use and gone afterwards, unless it was renamed."""
    while True:
        path = parent / f"{TEMPORARY}{secrets.token_hex(8)}"
        path.mkdir()
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # a clean-up took it for a dead writer's before it was locked
        except OSError:
            remove(path)
            raise
        with suppress(OSError):  # some network file systems have no locks; clean-up then leaves it alone
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink > 0 and path.exists():
            break
        os.close(descriptor)
    try:
        yield path
    finally:
        remove(path)
        os.close(descriptor)


def write_file(path: Path, buffers: Iterable[Buffer]) -> FileRecord:
    """Write a new file through to the disk; its hash is of what was handed to the system."""
    digest = hashlib.sha256()
    size = 0
    with path.open("xb", buffering=0) as file:
        for buffer in buffers:
            view = memoryview(buffer)
            for start in range(0, len(view), _CHUNK_BYTES):
                fail_if_armed(path)
                chunk = view[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                size += len(chunk)
                while chunk:
                    chunk = chunk[os.write(file.fileno(), chunk) :]
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def chunks(file: io.BufferedReader) -> Iterator[bytes]:
    """A file's content from its start, in pieces."""
    file.seek(0)
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def remove(path: Path) -> None:
    """Delete a file or a directory, as far as the disk allows."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
