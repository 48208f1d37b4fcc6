"""The manifest of a checkpoint, and the verification of the files against it."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from paceline.core.errors import CheckpointError, PacelineError
from paceline.core.files import fail_if_armed
from paceline.core.ownership import Owner, boot_id, own_prefix

# --- Files that a manifest lists, of a checkpoint or a package ---


MANIFEST = "manifest.json"
_PIECE_BYTES = 2**20


@contextmanager
def open_untrusted(what: str, failure: type[PacelineError], remedy: str, path: Path) -> Iterator[int]:
    """Yield an untrusted directory's descriptor; turn any error inside into one that names ``path``.

    Reads go through the descriptor, so that exchanging the directory meanwhile has no effect.

    Args:
        what: what the directory is, for messages.
        remedy: what the user can do, a sentence.
    """
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield directory
        finally:
            os.close(directory)
    except (failure, CheckpointError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise failure(f"{what} {path} cannot be used: {reason}. {remedy}") from error


def open_listed(directory: int, name: str, size: int | None = None) -> io.BufferedReader:
    """Open a regular file of an untrusted directory.

    Args:
        directory: a descriptor.
        size: the expected size in bytes; None for the manifest itself.

    Raises:
        CheckpointError: it is missing, of another size, or not a regular file.
    """
    try:
        # A symbolic link could leave the directory, and a FIFO could block for ever.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.fdopen(os.open(name, flags, dir_fd=directory), "rb")
    except FileNotFoundError:
        raise CheckpointError(f"{name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{name} cannot be opened: {error.strerror}") from error
    status = os.fstat(file.fileno())
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = f"{name} is not a regular file"
    elif size is not None and status.st_size != size:
        problem = f"{name} has {status.st_size} bytes, but its {MANIFEST} says {size}"
    if problem is not None:
        file.close()
        raise CheckpointError(problem)
    return file


def read_listed(directory: int, name: str, record: FileRecord) -> bytes:
    """Return the content of a file of an untrusted directory, exactly as verified.

    Raises:
        CheckpointError: it is not what the manifest says.
    """
    with open_listed(directory, name, record.size) as file:
        content = file.read(record.size + 1)
    _compare(name, record, hashlib.sha256(content))
    return content


def verify_listed(directory: int, name: str, record: FileRecord, on_read: Callable[[int], None]) -> None:
    """Read a file of an untrusted directory; call ``on_read`` with the number of bytes of each piece.

    Raises:
        CheckpointError: it is not what the manifest says.
    """
    with open_listed(directory, name, record.size) as file:
        digest = hashlib.sha256()
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            on_read(len(piece))
    _compare(name, record, digest)


def require_no_other(directory: int, files: Iterable[str]) -> None:
    """Require that an untrusted directory has no file besides these and the manifest.

    Raises:
        CheckpointError: names the first one that is not listed.
    """
    if extra := set(os.listdir(directory)) - {*files, MANIFEST}:
        raise CheckpointError(f"{min(extra)!r} is not in its {MANIFEST}")


def _compare(name: str, record: FileRecord, digest: hashlib._Hash) -> None:
    if (sha256 := digest.hexdigest()) != record.sha256:
        raise CheckpointError(f"{name} is damaged: its SHA-256 is {sha256}, but its {MANIFEST} says {record.sha256}")


# --- ``manifest.json``: a checkpoint's description, and the size and SHA-256 of each of its files ---
#
# Its text is canonical and contains its own checksum, so a change of any byte is detected.


FORMATS = (1, 2, 3)
"""In format 1 the optimizers' states go by the numbers of the parameters, in format 2 by their names; 3 is sharded."""
WHOLE = 2
MAX_MANIFEST_BYTES = 4 * 2**20

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

_REMEDY = "Resume from another checkpoint, or restore this one from a copy."

_untrusted = partial(open_untrusted, "checkpoint", CheckpointError, _REMEDY)

NumericsValue = str | int | float | bool | None | list[str | int | float | bool | None]


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """The description of a checkpoint.

    Attributes:
        step: optimizer steps done.
        state_version: transitions of the state done; it orders checkpoints.
        epoch: epochs done.
        generation: number of restarts of the run.
        microbatches: the run's number of micro-batches, S.
        pins: the numerics fingerprint (torch version, threads, ...): JSON scalars or lists of them.
        best_version: the state_version of the best model so far, whose checkpoint is kept as long as this one.

    Raises:
        CheckpointError: a value has the wrong type or range.
    """

    task: str
    step: int
    state_version: int
    epoch: int
    generation: int
    microbatches: int
    pins: Mapping[str, NumericsValue]
    best_version: int | None = None
    run: str = ""

    def __post_init__(self) -> None:
        for name in ("task", "run"):
            value = getattr(self, name)
            if type(value) is not str or len(value) > 4096:
                raise CheckpointError(f"{name} must be a string of at most 4,096 characters, but is {value!r:.80}")
        for name in ("step", "state_version", "epoch", "generation", "microbatches"):
            _check_count(name, getattr(self, name))
        if self.best_version is not None:
            _check_count("best_version", self.best_version)
        if not isinstance(self.pins, Mapping):
            raise CheckpointError(f"`pins` must be a mapping, but is {self.pins!r:.80}")
        for name, numerics_value in self.pins.items():
            values = numerics_value if type(numerics_value) is list else [numerics_value]
            if type(name) is not str or not all(
                value is None or type(value) in (str, int, float, bool) for value in values
            ):
                raise CheckpointError(
                    f"pin {name!r:.80} must be a JSON scalar or a list of them: {numerics_value!r:.80}"
                )


@dataclass(frozen=True)
class FileRecord:
    """A file's size in bytes and its SHA-256 in hexadecimal."""

    size: int
    sha256: str

    def __post_init__(self) -> None:
        _check_count("size", self.size)
        if type(self.sha256) is not str or not _SHA256.fullmatch(self.sha256):
            raise CheckpointError(f"sha256 must be 64 hexadecimal digits, but is {self.sha256!r:.80}")


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's description, its files by name, and its format.

    A manifest is valid if it is the canonical text of what it says. So :meth:`to_bytes` must leave a field that a later
    format adds out of the text of earlier ones.

    Raises:
        CheckpointError: a file's name is a path, hidden, or the manifest's own.
    """

    info: CheckpointInfo
    files: Mapping[str, FileRecord]
    format: int = WHOLE

    def __post_init__(self) -> None:
        for name in self.files:
            if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
                raise CheckpointError(f"{name!r:.200} is not a plain file name")

    def to_bytes(self) -> bytes:
        """Return the canonical text of this manifest."""
        document = {
            "format": self.format,
            **asdict(self.info),
            "files": {name: asdict(record) for name, record in self.files.items()},
        }
        document["manifest_sha256"] = hashlib.sha256(canonical_json(document)).hexdigest()
        return canonical_json(document)

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Parse ``content``.

        Raises:
            CheckpointError: it differs from the result of :meth:`to_bytes`.
        """
        try:
            document = parse_json(content)
            if type(document) is not dict:
                raise CheckpointError("it is not a JSON object")
            version = document.get("format")
            if type(version) is not int or version not in FORMATS:
                raise CheckpointError(
                    f"its format is {version!r:.80}; this version reads {FORMATS[0]} to {FORMATS[-1]}"
                )
            files = document["files"]
            info = {k: v for k, v in document.items() if k not in ("format", "files", "manifest_sha256")}
            manifest = cls(CheckpointInfo(**info), {name: FileRecord(**files[name]) for name in files}, version)
            if manifest.to_bytes() != content:
                raise CheckpointError("it does not match its own checksum")
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{MANIFEST} is damaged: {error}") from error
        return manifest


def _check_count(name: str, value: Any) -> None:
    if type(value) is not int or not 0 <= value < 2**63:
        raise CheckpointError(f"{name} must be an integer from 0 to 2**63 - 1, but is {value!r:.80}")


def canonical_json(document: Mapping[str, Any]) -> bytes:
    """Return the canonical text of a document."""
    return (json.dumps(document, sort_keys=True, indent=2, allow_nan=False) + "\n").encode()


def parse_json(content: bytes, what: str = "it") -> Any:
    """Parse JSON strictly: no NaN, no duplicate keys, no nesting beyond Python's stack.

    Raises:
        CheckpointError: the content is not such JSON.
    """

    def refuse(constant: str) -> NoReturn:
        raise CheckpointError(f"{what} holds {constant}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            raise CheckpointError(f"{what} holds a key twice")
        return mapping

    try:
        return json.loads(content, parse_constant=refuse, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not JSON: {error}") from error


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint in ``path``, without the other files.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    with _untrusted(path) as directory:
        return _read_manifest(directory)


def verify(path: Path) -> Manifest:
    """Check every byte of the checkpoint in ``path``.

    Raises:
        CheckpointError: names the file that is damaged, missing, extra or of another size.
    """
    with _untrusted(path) as directory:
        manifest = _read_manifest(directory)
        for name, record in _listed(directory, manifest):
            verify_listed(directory, name, record, lambda size: None)
        return manifest


def read_verified(path: Path, skips: Callable[[str], bool] = lambda name: False) -> tuple[Manifest, dict[str, bytes]]:
    """Return the manifest of the checkpoint in ``path`` and its files' contents, exactly as verified.

    Args:
        skips: returns whether a file is not read.

    Raises:
        CheckpointError: as :func:`verify`.
    """
    with _untrusted(path) as directory:
        manifest = _read_manifest(directory)
        files = [(name, record) for name, record in _listed(directory, manifest) if not skips(name)]
        return manifest, {name: read_listed(directory, name, record) for name, record in files}


def read_range(path: Path, name: str, start: int, size: int) -> bytearray:
    """Read bytes of a file of the checkpoint in ``path``, unverified.

    Raises:
        CheckpointError: they are not there.
    """
    with _untrusted(path) as directory, open_listed(directory, name) as file:
        file.seek(start)
        content = bytearray(size)
        if file.readinto(content) != size:
            raise CheckpointError(f"{name} is too short")
        return content


@contextmanager
def open_verified(path: Path) -> Iterator[tuple[Manifest, list[tuple[str, io.BufferedReader]]]]:
    """Open and verify the checkpoint in ``path``; its files stay readable even if it is deleted.

    Raises:
        CheckpointError: as :func:`verify`.
    """
    with ExitStack() as stack:
        with _untrusted(path) as directory:
            manifest = _read_manifest(directory)
            files = [
                (name, stack.enter_context(open_listed(directory, name, record.size)))
                for name, record in _listed(directory, manifest)
            ]
            for name, file in files:
                _compare(name, manifest.files[name], hashlib.file_digest(file, "sha256"))
        yield manifest, files


def problems(path: Path, on_read: Callable[[int], None] = lambda size: None) -> list[str]:
    """List everything wrong with the checkpoint in ``path``, one line per file; empty if it verifies.

    Args:
        on_read: called after each piece that was read, with its number of bytes.
    """
    messages: list[str] = []
    try:
        with _untrusted(path) as directory:
            manifest = _read_manifest(directory)
            extra = set(os.listdir(directory)) - manifest.files.keys() - {MANIFEST}
            messages += [f"{name!r} is not in its {MANIFEST}" for name in sorted(extra)]
            for name, record in manifest.files.items():
                try:
                    verify_listed(directory, name, record, on_read)
                except CheckpointError as error:
                    messages.append(str(error))
                except OSError as error:
                    messages.append(f"{name} cannot be read: {error.strerror}")
    except CheckpointError as error:
        messages.append(str(error.__cause__ or error))
    return messages


def _read_manifest(directory: int) -> Manifest:
    with open_listed(directory, MANIFEST) as file:
        content = file.read(MAX_MANIFEST_BYTES + 1)
    if len(content) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{MANIFEST} has more than {MAX_MANIFEST_BYTES} bytes")
    return Manifest.from_bytes(content)


def _listed(directory: int, manifest: Manifest) -> Iterator[tuple[str, FileRecord]]:
    """Yield the files to read, after checking that exactly these exist, in the right sizes."""
    require_no_other(directory, manifest.files)
    for name, record in manifest.files.items():
        open_listed(directory, name, record.size).close()
    yield from manifest.files.items()


# --- Temporary files and directories next to the checkpoints ---


TEMPORARY = ".tmp-"
"""The prefix of names that are not committed, or no longer."""

_CHUNK_BYTES = 4 * 2**20  # hashed while it is still in the cache, then written

Buffer = bytes | memoryview


_LEFT_S = 24 * 3600.0
_in_use: set[str] = set()  # by this process, whose disk may fail when it removes one


def temporary_name() -> str:
    """Return a name that tells the process of this machine to which it belongs.

    Not a lock: clients of NFS, Lustre and CIFS hold locks on folders within one node only.
    """
    return f"{TEMPORARY}{boot_id()}-{own_prefix()}{secrets.token_hex(8)}"


def is_left(path: Path) -> bool:
    """Return whether the process that named a temporary file or directory has ended.

    Of another machine's process nothing is known; it has ended if it has not touched the directory for a day.
    """
    boot, _, name = path.name.removeprefix(TEMPORARY).partition("-")
    owner = Owner.parse(name)
    if owner is not None and boot == boot_id():
        return path.name not in _in_use if owner == Owner.of(os.getpid()) else owner.has_ended
    return abs(time.time() - path.lstat().st_mtime) > _LEFT_S


@contextmanager
def temporary_directory(parent: Path) -> Iterator[Path]:
    """Create a directory, and remove it afterwards unless it was renamed."""
    path = parent / temporary_name()
    _in_use.add(path.name)
    try:
        path.mkdir(exist_ok=True)  # the name is unique: if it is taken, an answer was lost
        yield path
    finally:
        remove(path)
        _in_use.discard(path.name)


def write_file(path: Path, buffers: Iterable[Buffer]) -> FileRecord:
    """Write a new file through to the disk; its hash covers what was passed to the system."""
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


def require_complete(directory: Path, records: Mapping[str, FileRecord]) -> None:
    """Require that a directory holds these files, in their sizes, and no other: called just before it is published.

    Raises:
        OSError: another program has removed or changed one.
    """
    with os.scandir(directory) as entries:
        sizes = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}
    expected = {name: record.size for name, record in records.items()}
    for name in sorted(sizes.keys() | expected.keys()):
        if sizes.get(name) != expected.get(name):
            raise OSError(errno.EIO, f"another program has removed or changed {name}", str(directory))


def chunks(file: io.BufferedReader) -> Iterator[bytes]:
    """Yield a file's content from its start, in pieces."""
    file.seek(0)
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def remove(path: Path) -> None:
    """Delete a file or a directory, as far as the disk allows."""
    with suppress(OSError):
        try:
            path.unlink(missing_ok=True)
        except (IsADirectoryError, PermissionError):  # a directory, whose removal POSIX calls not permitted
            shutil.rmtree(path, ignore_errors=True)


# --- Compatibility of a checkpoint with this run and process ---


def differences(recorded: Mapping[str, NumericsValue], current: Mapping[str, NumericsValue]) -> list[str]:
    """Return one line per different value of the numerics: ``threads: 1 in the checkpoint, 2 now``.

    A field that one of them lacks is not compared: another version, or another kind of device, has other fields.
    """
    return [
        f"{name}: {recorded[name]} in the checkpoint, {current[name]} now"
        for name in sorted(recorded.keys() & current.keys())
        # 1, 1.0 and True are equal in Python, but not the same setting.
        if json.dumps(recorded[name]) != json.dumps(current[name])
    ]


def require_same_run(path: Path, recorded: CheckpointInfo, current: CheckpointInfo) -> None:
    """Reject a checkpoint of another task or run, or with another number of micro-batches.

    Raises:
        CheckpointError: names the difference, and what to do.
    """
    if recorded.task != current.task:
        raise CheckpointError(
            f"checkpoint {path} belongs to the task {recorded.task!r}, not {current.task!r}. Choose another "
            "--run-dir DIR."
        )
    if recorded.microbatches != current.microbatches:
        raise CheckpointError(
            f"checkpoint {path} was made with --microbatches {recorded.microbatches}, not {current.microbatches}; a "
            f"run keeps its number of micro-batches. Resume with --microbatches {recorded.microbatches}, or choose "
            "another --run-dir DIR."
        )
    if recorded.run != current.run:
        raise CheckpointError(
            f"checkpoint {path} was written by another run of {recorded.task!r}. Remove it from this run's "
            "directory, or continue the run that it belongs to."
        )
