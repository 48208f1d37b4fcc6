"""Whose programs may run: the digests of packages that this user exported, or said to trust.

``torch.export.load`` unpickles, so a foreign program can do whatever its author likes. Digests are kept in a
file of the user's own, one a line, which others may not write.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from paceline.errors import PackageError, UntrustedError
from paceline.packages.manifest import Manifest


def trust_file() -> Path:
    """``~/.config/paceline/trusted-packages``, or where XDG_CONFIG_HOME says."""
    configured = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (
        (configured if configured.is_absolute() else Path.home() / ".config")
        / "paceline"
        / "trusted-packages"
    )


def trusted() -> frozenset[str]:
    """The digests that this user trusts.

    Raises:
        PackageError: the file is another user's, or others may write it.
    """
    path = trust_file()
    try:
        with path.open("rb") as file:
            _check(path, os.fstat(file.fileno()))
            return frozenset(file.read().decode("ascii", "replace").split())
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise PackageError(f"{path} cannot be read: {error.strerror}.") from error


def trust(digest: str) -> None:
    """Let the program of this package run from now on.

    Raises:
        PackageError: the file cannot be written, or is not this user's alone.
    """
    path = trust_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0) as file:
            _check(path, os.fstat(file.fileno()))
            fcntl.flock(file, fcntl.LOCK_EX)
            content = file.read()
            if digest.encode() in content.split():
                return
            # A crash may have cut the last line short.
            line = b"\n" if content and not content.endswith(b"\n") else b""
            file.write(line + digest.encode() + b"\n")
            os.fsync(file.fileno())
    except OSError as error:
        raise PackageError(
            f"cannot note in {path} that package {digest} is trusted: {error.strerror}. Make it writable."
        ) from error


def require_trusted(digest: str, manifest: Manifest, path: Path) -> None:
    """Refuse a program that this user has not trusted.

    Raises:
        UntrustedError: names the digest, where the package says that it comes from, and the ways on.
    """
    if digest in trusted():
        return
    origin = manifest.provenance
    raise UntrustedError(
        f"package {path} holds a program that may run any code when it is loaded, and you have not "
        f"trusted it.\n"
        f"  digest  {digest}\n"
        f"  says    {manifest.name}, of the task {origin.task}, run {origin.run}, step {origin.step}; "
        f"exported {manifest.created}\n"
        "If you know who made it, say --trust once. The safetensors weights can be used without trust, with "
        "the task's own code (--task TASK), and so can an ONNX program."
    )


def _check(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PackageError(
            f"{path} must be a plain file of your own that nobody else may write, or others could choose "
            f"whose programs you run. Look at it, then: chmod 600 {path}"
        )
