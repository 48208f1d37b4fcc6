"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import secrets
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""What a disk that is full, read-only or broken answers; it may be well again later."""


def _append(path: Path, content: bytes) -> None:
    """Add lines in one write, so that those of several processes do not mix."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            content = b"\n" + content  # a crash or a full disk cut the last line short
        while content:
            content = content[os.write(descriptor, content) :]
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file, readable for others unless private; a crash leaves the old content or the new."""
    # Not by process number: machines that share a directory do not share those.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb", opener=partial(os.open, mode=0o600 if private else 0o666)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make renames inside a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file; missing file: none; a torn last line is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
