"""Files that a manifest lists: opened, and compared with what it says of them."""

from __future__ import annotations

import io
import os
import stat

from paceline.errors import PacelineError


def open_listed(
    manifest: str, failure: type[PacelineError], directory: int, name: str, size: int | None = None
) -> io.BufferedReader:
    """Open a regular file of a directory, whoever wrote it.

    Args:
        manifest: the file that lists it.
        failure: raised with what is wrong.
        directory: a descriptor.
        name: of the file in it.
        size: what the manifest says, in bytes; None for the manifest itself.
    """
    try:
        # A symbolic link would lead out of the directory, and a FIFO would block for ever.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.fdopen(os.open(name, flags, dir_fd=directory), "rb")
    except FileNotFoundError:
        raise failure(f"{name} is missing") from None
    except OSError as error:
        raise failure(f"{name} cannot be opened: {error.strerror}") from error
    status = os.fstat(file.fileno())
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = f"{name} is not a regular file"
    elif size is not None and status.st_size != size:
        problem = f"{name} has {status.st_size} bytes, but its {manifest} says {size}"
    if problem is not None:
        file.close()
        raise failure(problem)
    return file


def require_equal(manifest: str, failure: type[PacelineError], name: str, expected: str, sha256: str) -> None:
    """Raise ``failure`` if a file's SHA-256 is not the one that the manifest says."""
    if sha256 != expected:
        raise failure(f"{name} is damaged: its SHA-256 is {sha256}, but its {manifest} says {expected}")
