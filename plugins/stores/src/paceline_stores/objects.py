"""The objects below an address, by their names relative to it, through fsspec."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.errors import CheckpointError
from paceline.core.files import parse_json, user_directory, write_atomically
from paceline.core.ownership import locked
from paceline.core.plugins import install_command

_log = logging.getLogger(__name__)

PARTS = "run/.part-"
"""The prefix of objects that a ``file://`` store has not renamed yet; they are deleted like old files of a run."""

_PIECE_BYTES = 8 * 2**20
_CREDENTIALS = (
    "Check the credentials in the environment or in the files of the store's own tools (for s3: AWS_PROFILE, "
    "AWS_ACCESS_KEY_ID), whether they have expired, and what they allow."
)

_S3: Mapping[str, Any] = {
    "config_kwargs": {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 3, "mode": "standard"}},
    "max_concurrency": 2,  # parts of 50 MiB that are in memory at once
}
_OPTIONS: Mapping[str, Mapping[str, Any]] = {"s3": _S3, "s3a": _S3, "file": {"auto_mkdir": True}}
"""What each kind of store is opened with, unless fsspec's own configuration of the user says otherwise.

Credentials and endpoints come from the environment and the user's files.
"""


_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified")
"""Where the file systems of fsspec say which content an object has."""


class StoreError(CheckpointError):
    """An object store cannot be read or written; a retry may succeed."""


class FoundObject(NamedTuple):
    """An object that a pattern matches.

    Attributes:
        name: relative to the address.
        size: bytes.
        version: changes with the content, as far as the store tells.
    """

    name: str
    size: int
    version: str


class ObjectStore:
    """The objects below an address. An object is seen whole or not at all, but for large files of a ``file://`` store.

    Every method raises :class:`StoreError` if the store does not answer, or denies it.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """The file system, and the path of the address in it."""
        scheme = self.address.partition("://")[0]
        try:
            from fsspec.config import conf
            from fsspec.core import url_to_fs

            own = {name: value for name, value in _OPTIONS.get(scheme, {}).items() if name not in conf.get(scheme, {})}
            # Another machine writes, too: nothing that was listed may be remembered.
            files, path = url_to_fs(self.address, use_listings_cache=False, skip_instance_cache=True, **own)
        except ImportError as error:
            raise StoreError(
                f"{self.address} needs a library that is not installed ({error}). For s3: "
                f"{install_command('object-stores')}; for gs: gcsfs; for az and abfs: adlfs."
            ) from error
        except ValueError as error:  # an unknown scheme
            raise StoreError(f"{self.address} cannot be used: {error}. Schemes are s3, gs, az, file, ...") from error
        if scheme in ("s3", "s3a"):
            files.retries = 2  # each with the three attempts of above
        return files, str(path).rstrip("/")

    def sizes(self) -> dict[str, int]:
        """Return the sizes in bytes of all objects, by name."""
        files, base = self._opened
        with self._explain("listed"):
            found = files.find(base, detail=True)
        return {path.removeprefix(base).lstrip("/"): int(info["size"] or 0) for path, info in found.items()}

    def find(self, pattern: str) -> list[FoundObject]:
        """Return the objects that match a pattern, by name."""
        files, base = self._opened
        with self._explain("listed"):
            found = files.glob(f"{base}/{pattern}", detail=True)
            if not found:  # a bucket that is missing, or denied, has no objects for a glob
                with suppress(FileNotFoundError):
                    files.ls(base)
        return [
            FoundObject(
                path.removeprefix(base).lstrip("/"),
                int(info["size"]),
                next((str(info[key]) for key in _VERSIONS if info.get(key)), ""),
            )
            for path, info in sorted(found.items())
            if info["type"] == "file"
        ]

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the content of a small object; None if there is none."""
        files, base = self._opened
        with self._explain(f"read ({name})"):
            try:
                with files.open(f"{base}/{name}", "rb", block_size=_PIECE_BYTES) as file:
                    content = bytes(file.read(limit + 1))
            except FileNotFoundError:
                return None
        if len(content) > limit:
            raise StoreError(
                f"{self.address}/{name} has more than {limit:,} bytes, and is nothing that Paceline wrote."
            )
        return content

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
        """Yield the content of an object of so many bytes.

        Raises:
            CheckpointError: it is missing, or has another size.
        """
        files, base = self._opened
        left = size
        with self._explain(f"read ({name})"), files.open(f"{base}/{name}", "rb", block_size=_PIECE_BYTES) as file:
            while piece := bytes(file.read(min(_PIECE_BYTES, left + 1))):
                left -= len(piece)
                if left < 0:
                    break
                yield piece
        if left:
            raise CheckpointError(f"{self.address}/{name} does not have its {size:,} bytes")

    def write(self, name: str, content: bytes, *, new: bool = False) -> bool:
        """Write an object, or replace it.

        Args:
            new: write it only if there is none, where the store can tell.

        Returns:
            Whether it was written.
        """
        files, base = self._opened
        with self._explain(f"written ({name})"):
            if not new and self.address.startswith("file:"):  # others do not show an object that is being written
                part = f"{base}/{PARTS}{secrets.token_hex(8)}"
                files.pipe_file(part, content)
                files.mv(part, f"{base}/{name}")
                return True
            try:
                files.pipe_file(f"{base}/{name}", content, mode="create" if new else "overwrite")
            except FileExistsError:
                return False
            except NotImplementedError:
                files.pipe_file(f"{base}/{name}", content)
        return True

    def upload(self, name: str, file: Path) -> None:
        """Write an object with the content of a file."""
        files, base = self._opened
        with self._explain(f"written ({name})"):
            files.put_file(str(file), f"{base}/{name}")

    def remove(self, names: list[str]) -> None:
        """Delete objects, one after another; those that are gone are ignored."""
        files, base = self._opened
        for name in names:
            with self._explain(f"deleted ({name})"), suppress(FileNotFoundError):
                files.rm_file(f"{base}/{name}")

    def abort_uploads(self) -> None:
        """Delete the parts of uploads that ended processes have begun, as far as the store tells."""
        files, base = self._opened
        if not hasattr(files, "list_multipart_uploads"):
            return
        with suppress(Exception):  # some buckets do not allow the listing
            bucket, key, _ = files.split_path(base)
            for upload in files.list_multipart_uploads(bucket):
                if upload["Key"].startswith(f"{key}/"):
                    files.call_s3(
                        "abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )

    @contextmanager
    def _explain(self, verb: str) -> Iterator[None]:
        """Turn the errors of fsspec's many libraries, each with classes of its own, into one."""
        try:
            yield
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            raise StoreError(
                f"{self.address} cannot be {verb}: there is no such bucket or object. Check the address."
            ) from error
        except PermissionError as error:
            raise StoreError(
                f"{self.address} cannot be {verb}: the store denies it ({_reason(error)}). {_CREDENTIALS}"
            ) from error
        except Exception as error:
            advice = f" {_CREDENTIALS}" if "redential" in type(error).__name__ else ""
            raise StoreError(f"{self.address} cannot be {verb}: {_reason(error)}.{advice}") from error


def _reason(error: Exception) -> str:
    text = re.sub(r"//[^/@\s]+@", "//", str(error)).strip().rstrip(".")
    return f"{type(error).__name__}: {text:.300}" if text else type(error).__name__


# --- Data files on this node: each is downloaded once, and kept in the user's cache ---


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
    key = hashlib.sha256(f"{address}\n{found.size}\n{found.version}".encode()).hexdigest()[:32]
    folder = user_directory("cache") / "data" / key
    file, record = folder / Path(found.name).name, folder / "download.json"
    digest = hashlib.sha256()

    def pieces() -> Iterator[bytes]:
        for piece in store.pieces(found.name, found.size):
            digest.update(piece)
            yield piece

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock"):
            if record.is_file() and file.is_file() and file.stat().st_size == parse_json(record.read_bytes())["size"]:
                return file
            for left in folder.glob(f".{file.name}.*"):  # of a process that was killed
                left.unlink(missing_ok=True)
            _log.info("downloading %s (%.1f MiB)", address, found.size / 2**20)
            write_atomically(file, pieces())
            known = {"address": address, "size": found.size, "sha256": digest.hexdigest(), "version": found.version}
            write_atomically(record, json.dumps(known).encode())
    except OSError as error:
        raise CheckpointError(
            f"{address} cannot be kept in {folder.parent}: {error.strerror or error}. Free some space there, or set "
            "XDG_CACHE_HOME to a directory with more."
        ) from error
    return file
