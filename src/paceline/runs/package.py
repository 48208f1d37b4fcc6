"""A model package on disk: opened, verified, and whether its programs may run."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.core.errors import PackageError, UntrustedError
from paceline.runs.checkpoint_manifest import open_listed, require_equal
from paceline.runs.package_manifest import MANIFEST, MAX_MANIFEST_BYTES, PackageManifest
from paceline.runs.package_registry import Registry

# --- Whose programs may run: the digests of packages that this user exported, or said to trust ---
#
# ``torch.export.load`` unpickles, so a foreign program can do whatever its author likes. Digests are kept in
# a file of the user's own, one a line, which others may not write.


def trust_file() -> Path:
    """``~/.config/paceline/trusted-packages``, or where XDG_CONFIG_HOME says."""
    configured = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".config") / "paceline" / "trusted-packages"


def read_trusted() -> frozenset[str]:
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


def require_trusted(digest: str, manifest: PackageManifest, path: Path) -> None:
    """Refuse a program that this user has not trusted.

    Raises:
        UntrustedError: names the digest, where the package says that it comes from, and the ways on.
    """
    if digest in read_trusted():
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


# --- Opening a package: nothing in it is believed before every byte was checked ---


_PIECE_BYTES = 2**20
_open = partial(open_listed, MANIFEST, PackageError)
_compare = partial(require_equal, MANIFEST, PackageError)


@dataclass(frozen=True)
class Package:
    """A package whose files were all verified when it was opened.

    Attributes:
        path: its directory.
        manifest: what it says of itself.
        digest: SHA-256 of the manifest, which names it.
    """

    path: Path
    manifest: PackageManifest
    digest: str

    def read(self, name: str) -> bytes:
        """The content of a file: the very bytes that are checked here, whatever happened to it since.

        Raises:
            PackageError: there is no such file, or it has changed.
        """
        if name not in self.manifest.files:
            raise PackageError(f"package {self.path} has no file {name!r:.80}.")
        with _refused(self.path) as directory:
            record = self.manifest.files[name]
            with _open(directory, name, record.size) as file:
                content = file.read(record.size + 1)
            _compare(name, record.sha256, hashlib.sha256(content).hexdigest())
            return content

    def read_weights(self) -> bytes:
        """The weights, as safetensors; they can run no code."""
        return self.read(self.manifest.weights)

    def read_program(self, program: str) -> bytes:
        """A program in a format, "pt2" or "onnx".

        Loading a pt2 may run code, so it is handed out only where this user trusts the package.

        Raises:
            UntrustedError: nobody said that this package's pt2 may run.
            PackageError: it has no such program; says which it has.
        """
        if program not in self.manifest.programs:
            there = ", ".join(self.manifest.programs) or "none"
            raise PackageError(
                f"package {self.path} has no {program} program; it has: {there}. "
                f"Export the run again with --format safetensors {program}, or use its weights with --task."
            )
        if program == "pt2":
            require_trusted(self.digest, self.manifest, self.path)
        return self.read(self.manifest.programs[program])


def open_package(
    place: str | Path, registry: Registry | None = None, on_read: Callable[[int], None] = lambda size: None
) -> Package:
    """Open and verify a package.

    Args:
        place: its directory, ``NAME@TAG``, ``NAME`` (its ``latest``), or a digest or the beginning of one.
        registry: where names are looked up; by default the user's own.
        on_read: called with the number of bytes of each piece that was read.

    Raises:
        PackageError: there is none, or it does not verify; names the file and what is wrong with it.
    """
    path = Path(place)
    if not is_path(place):
        registry = registry or Registry.of_user()
        digest = registry.resolve(str(place))
        path = registry.path_of(digest)
        package = verify_package(path, on_read)
        if package.digest != digest:
            raise PackageError(
                f"package {path} cannot be used: its digest is {package.digest}. "
                "Export it again, or pull it from where it is whole."
            )
        return package
    if not path.is_dir():
        raise PackageError(f"there is no package {path}: no such directory.")
    return verify_package(path, on_read)


def is_path(place: str | Path) -> bool:
    """Whether a package is named by its directory, and not by a reference."""
    return isinstance(place, Path) or os.sep in place or (Path(place) / MANIFEST).is_file()


def verify_package(path: Path, on_read: Callable[[int], None] = lambda size: None) -> Package:
    """Check every byte of the package in ``path``.

    Raises:
        PackageError: a file is damaged, missing, extra, too long, a link or no plain file.
    """
    with _refused(path) as directory:
        manifest, digest = _read_manifest(directory)
        if extra := set(os.listdir(directory)) - manifest.files.keys() - {MANIFEST}:
            raise PackageError(f"{min(extra)!r} is not in its {MANIFEST}")
        for name, record in manifest.files.items():
            with _open(directory, name, record.size) as file:
                hashed = hashlib.sha256()
                while piece := file.read(_PIECE_BYTES):
                    hashed.update(piece)
                    on_read(len(piece))
            _compare(name, record.sha256, hashed.hexdigest())
    return Package(path, manifest, digest)


def read_manifest(path: Path) -> tuple[PackageManifest, str]:
    """The manifest of the package in ``path`` and its digest; the other files are not looked at.

    Raises:
        PackageError: it is missing or damaged.
    """
    with _refused(path) as directory:
        return _read_manifest(directory)


@contextmanager
def _refused(path: Path) -> Iterator[int]:
    """The directory's descriptor; whatever is wrong inside becomes one error that names ``path``.

    All is read through the descriptor, so that nobody can exchange the directory meanwhile.
    """
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield directory
        finally:
            os.close(directory)
    except (PackageError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PackageError(
            f"package {path} cannot be used: {reason}. Export it again, or pull it from where it is whole."
        ) from error


def _read_manifest(directory: int) -> tuple[PackageManifest, str]:
    with _open(directory, MANIFEST) as file:
        content = file.read(MAX_MANIFEST_BYTES + 1)
    return PackageManifest.from_bytes(content), hashlib.sha256(content).hexdigest()
