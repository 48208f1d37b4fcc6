"""A model package on disk: verification, and the trust that its programs need."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.core.errors import PackageError, UntrustedError
from paceline.core.files import open_regular, user_directory
from paceline.core.ownership import locked
from paceline.core.standard_streams import escape_controls
from paceline.runs.checkpoint_manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    open_listed,
    open_untrusted,
    read_listed,
    require_no_other,
    verify_listed,
)
from paceline.runs.onnx_files import external_files
from paceline.runs.package_manifest import PackageManifest
from paceline.runs.package_registry import Registry

# --- Trust: the digests of packages that this user exported or trusts ---
#
# ``torch.export.load`` unpickles, so a foreign program can run any code. The digests are in a file of the user's own,
# one per line, that other users must not be able to write.


def trust_file() -> Path:
    """Return the path of the trusted digests: under XDG_CONFIG_HOME, by default ``~/.config``."""
    return user_directory("config") / "trusted-packages"


def read_trusted() -> frozenset[str]:
    """Return the digests that this user trusts.

    Raises:
        PackageError: another user owns or may write the file.
    """
    path = trust_file()
    try:
        with open_regular(path) as file:
            _check(path, os.fstat(file.fileno()))
            return frozenset(file.read().decode("ascii", "replace").split())
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise PackageError(f"{path} cannot be read: {error.strerror}.") from error


def trust(digest: str) -> None:
    """Allow the program of this package to run from now on.

    Raises:
        PackageError: the file cannot be written, or is not this user's alone.
    """
    path = trust_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with (
            locked(path.with_name(path.name + ".lock")),
            os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0) as file,
        ):
            _check(path, os.fstat(file.fileno()))
            content = file.read()
            if digest.encode() in content.split():
                return
            # A crash may have cut the last line short.
            line = b"\n" if content and not content.endswith(b"\n") else b""
            file.write(line + digest.encode() + b"\n")
            os.fsync(file.fileno())
    except OSError as error:
        raise PackageError(
            f"cannot record in {path} that package {digest} is trusted: {error.strerror}. Make it writable."
        ) from error


def require_trusted(digest: str, manifest: PackageManifest, path: Path) -> None:
    """Reject a program that this user has not trusted.

    Raises:
        UntrustedError: names the digest, the claimed origin, and the next steps.
    """
    if digest in read_trusted():
        return
    origin = manifest.provenance
    # Foreign text must not look like a line of this message.
    name, task, run, created = map(escape_controls, (manifest.name, origin.task, origin.run, manifest.created))
    raise UntrustedError(
        f"package {path} contains a program that may run any code when it is loaded, and you have not "
        f"trusted it.\n"
        f"  digest  {digest}\n"
        f"  claims  {name}, of the task {task:.200}, run {run:.200}, step {origin.step}; exported {created:.40}\n"
        "If you know its author, give --trust once. The safetensors weights need no trust with "
        "the task's own code (--task TASK), and neither does an ONNX program."
    )


def _check(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PackageError(
            f"{path} must be a regular file that only you can write, or other users could trust "
            f"programs for you. Check its content, then: chmod 600 {path}"
        )


# --- Opening a package: verify every byte before use ---


_REMEDY = "Export it again, or pull it from an intact registry."

_untrusted = partial(open_untrusted, "package", PackageError, _REMEDY)


@dataclass(frozen=True)
class Package:
    """A package whose files were all verified when it was opened.

    Attributes:
        digest: SHA-256 of the manifest, which identifies the package.
    """

    path: Path
    manifest: PackageManifest
    digest: str

    def read(self, name: str) -> bytes:
        """Read a file and verify exactly the bytes returned.

        Raises:
            PackageError: there is no such file, or it has changed.
        """
        if name not in self.manifest.files:
            raise PackageError(f"package {self.path} has no file {name!r:.80}.")
        with _untrusted(self.path) as directory:
            return read_listed(directory, name, self.manifest.files[name])

    def read_weights(self) -> bytes:
        """Return the weights, as safetensors, which cannot run code."""
        return self.read(self.manifest.weights)

    def read_program(self, program: str) -> bytes:
        """Return a program in a format, "pt2" or "onnx".

        Loading a pt2 may run code, so this user must trust the package. An ONNX program may take weights from other
        files, which must be the package's own.

        Raises:
            UntrustedError: the user has not trusted this package's pt2.
            PackageError: it has no such program, lists its programs; or an ONNX program names other files.
        """
        if program not in self.manifest.programs:
            programs = ", ".join(self.manifest.programs) or "none"
            raise PackageError(
                f"package {self.path} has no {program} program; it has: {programs}. "
                f"Export the run again with --format safetensors {program}, or use its weights with --task."
            )
        if program == "pt2":
            require_trusted(self.digest, self.manifest, self.path)
        content = self.read(self.manifest.programs[program])
        if program == "onnx" and (others := external_files(content) - self.manifest.files.keys()):
            raise PackageError(
                f"package {self.path} cannot be used: its ONNX program takes weights from {min(others)!r:.80}, a file "
                "which is not in the package. Use another program, or the weights with --task."
            )
        return content


def open_package(
    location: str | Path, registry: Registry | None = None, on_read: Callable[[int], None] = lambda size: None
) -> Package:
    """Open and verify a package.

    Args:
        location: its directory, ``NAME@TAG``, ``NAME`` (its ``latest``), or a digest or a prefix of one.
        registry: the registry of the names; by default the user's.
        on_read: called with the number of bytes of each piece that was read.

    Raises:
        PackageError: it does not exist, or does not verify; names the file and the error.
    """
    path = Path(location)
    if os.path.isfile(path / "run.toml"):
        raise PackageError(f"{path} is a run. Export it first: paceline export {path} --name NAME")
    if not is_path(location):
        registry = registry or Registry.of_user()
        digest = registry.resolve(str(location))
        path = registry.path_of(digest)
        package = verify_package(path, on_read)
        if package.digest != digest:
            raise PackageError(
                f"package {path} cannot be used: its digest is {package.digest}. "
                "Export it again, or pull it from an intact registry."
            )
        return package
    if not os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        raise PackageError(f"there is no package {path}: no such directory.")
    return verify_package(path, on_read)


def is_path(location: str | Path) -> bool:
    """Return whether a package is named by its directory rather than by a reference."""
    return isinstance(location, Path) or os.sep in location or os.path.isfile(Path(location) / MANIFEST)


def verify_package(path: Path, on_read: Callable[[int], None] = lambda size: None) -> Package:
    """Check every byte of the package in ``path``.

    Raises:
        PackageError: a file is damaged, missing, extra, too long, a link or not a regular file.
    """
    with _untrusted(path) as directory:
        manifest, digest = _read_manifest(directory)
        require_no_other(directory, manifest.files)
        for name, record in manifest.files.items():
            verify_listed(directory, name, record, on_read)
    return Package(path, manifest, digest)


def read_manifest(path: Path) -> tuple[PackageManifest, str]:
    """Return the manifest of the package in ``path`` and its digest, without the other files.

    Raises:
        PackageError: it is missing or damaged.
    """
    with _untrusted(path) as directory:
        return _read_manifest(directory)


def _read_manifest(directory: int) -> tuple[PackageManifest, str]:
    with open_listed(directory, MANIFEST) as file:
        content = file.read(MAX_MANIFEST_BYTES + 1)
    return PackageManifest.from_bytes(content), hashlib.sha256(content).hexdigest()
