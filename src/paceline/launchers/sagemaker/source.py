"""The directory that a job's machines are given a copy of, as one archive."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

from paceline.errors import ConfigError

_LEFT_OUT = {"__pycache__", "runs", "jobs", "node_modules"}
_MOST_BYTES = 500 * 1024**2


def pack(directory: Path) -> bytes:
    """A gzipped tar of a directory's :func:`packed_files`; equal contents make equal bytes.

    Raises:
        ConfigError: there is no such directory, or it is too large.
    """
    files = packed_files(directory)
    size = sum(path.stat().st_size for path in files)
    if size > _MOST_BYTES:
        largest = max(files, key=lambda path: path.stat().st_size)
        raise ConfigError(
            f"--source {directory} has {size >> 20} MiB, over {_MOST_BYTES >> 20}; the "
            f"largest file is {largest.relative_to(directory)}. Put data into S3, and name another directory."
        )
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for path in files:
            entry = tarfile.TarInfo(path.relative_to(directory).as_posix())
            content = path.read_bytes()
            entry.size, entry.mode = len(content), 0o755 if path.stat().st_mode & 0o100 else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def packed_files(directory: Path) -> list[Path]:
    """The files of a directory that the machines get, sorted; their paths begin with the directory's.

    Hidden files, ``runs``, ``jobs`` and caches are left out, links to directories, and links that lead
    elsewhere.

    Raises:
        ConfigError: there is no such directory.
    """
    if not directory.is_dir():
        raise ConfigError(f"--source {directory}: there is no such directory.")
    return sorted(_files(directory, directory.resolve()))


def _files(directory: Path, source: Path) -> list[Path]:
    found = []
    for path in directory.iterdir():
        if path.name.startswith(".") or path.name in _LEFT_OUT:
            continue
        if path.is_dir() and not path.is_symlink():
            found += _files(path, source)
        elif path.is_file() and (not path.is_symlink() or path.resolve().is_relative_to(source)):
            found.append(path)
    return found
