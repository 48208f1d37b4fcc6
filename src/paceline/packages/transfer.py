"""Packages from one registry to another: a copy is verified whole before it is visible.

What was fetched of one that broke off stays in ``partial/``, and the next pull goes on from there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from paceline.checkpoint.manifest import FileRecord
from paceline.errors import PackageError
from paceline.packages.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest
from paceline.packages.package import verify_package
from paceline.packages.registry import MAX_TAG_BYTES, Reference, Registry, Tag, is_digest, parse_reference
from paceline.packages.sources import DirectorySource, Source, source_of
from paceline.run_directory import fsync_directory

OnBytes = Callable[[int, int], None]
"""Is told how many bytes are there, and how many there will be."""

_PIECE_BYTES = 2**20


class Transferred(NamedTuple):
    """A package that was copied.

    Attributes:
        digest: its digest.
        reference: the tag that means it now, there where it was copied to; None: it was named by its digest.
        fetched_bytes: what was copied; what was there already is not in it.
    """

    digest: str
    reference: Reference | None
    fetched_bytes: int


def pull(
    what: str, place: str, registry: Registry, on_bytes: OnBytes = lambda done, total: None
) -> Transferred:
    """Copy a package and its tag from another registry.

    Args:
        what: ``NAME@TAG``, ``NAME`` or a whole digest.
        place: the other registry's directory or URL.
        registry: takes it.
        on_bytes: told of the progress.

    Raises:
        PackageError: it is not there, is damaged there, or the connection broke; nothing of it is visible
            then. One that is damaged here is replaced.
    """
    return _copy(what, source_of(place), place, registry, on_bytes)


def push(
    what: str, place: Path, registry: Registry, on_bytes: OnBytes = lambda done, total: None
) -> Transferred:
    """Copy a package and its tag to another registry, a directory; it is made where there is none.

    Args:
        what: ``NAME@TAG``, ``NAME``, or a digest or the beginning of one.
        place: the other registry's directory.
        registry: has it.
        on_bytes: told of the progress.

    Raises:
        PackageError: it is not here or damaged, or the directory cannot be written.
    """
    digest = registry.resolve(what)
    named = what if "@" in what or not digest.startswith(what.removeprefix("sha256:")) else digest
    return _copy(named, DirectorySource(registry.path), str(registry.path), Registry(place), on_bytes)


def _copy(what: str, source: Source, place: str, registry: Registry, on_bytes: OnBytes) -> Transferred:
    reference = None
    digest = what.removeprefix("sha256:")
    if not is_digest(digest):
        reference = parse_reference(what)
        content = source.read(f"tags/{reference.name}/{reference.tag}.json", MAX_TAG_BYTES)
        if content is None:
            raise PackageError(f"there is no {reference} in the registry {place}.")
        digest = Tag.from_bytes(content, f"{place}, {reference}").digest
    fetched = 0 if _is_whole(digest, registry) else _fetch(digest, source, place, registry, on_bytes)
    if reference is not None:
        registry.put_tag(reference, digest)
    return Transferred(digest, reference, fetched)


def _is_whole(digest: str, registry: Registry) -> bool:
    try:
        return verify_package(registry.path_of(digest)).digest == digest
    except PackageError:
        return False


def _fetch(digest: str, source: Source, place: str, registry: Registry, on_bytes: OnBytes) -> int:
    content = source.read(f"packages/{digest}/{MANIFEST}", MAX_MANIFEST_BYTES)
    if content is None:
        raise PackageError(f"there is no package {digest} in the registry {place}.")
    if (found := hashlib.sha256(content).hexdigest()) != digest:
        raise PackageError(
            f"the package {digest} in {place} is damaged: its manifest has the SHA-256 {found}."
        )
    manifest = Manifest.from_bytes(content)
    fetched = 0
    with _partial(registry, digest) as partial:
        if _is_whole(digest, registry):  # by another pull, while this one waited
            return 0
        for stray in set(os.listdir(partial)) - manifest.files.keys():
            _remove(partial / stray)
        there = 0
        for name, record in manifest.files.items():
            fetched += _fetch_file(
                source,
                f"packages/{digest}/{name}",
                partial / name,
                record,
                there,
                manifest.size_bytes,
                on_bytes,
            )
            there += record.size
        (partial / MANIFEST).write_bytes(content)
        verify_package(partial)
        fsync_directory(partial)
        registry.put(partial, digest)
    return fetched


def _fetch_file(
    source: Source, path: str, target: Path, record: FileRecord, there: int, total: int, on_bytes: OnBytes
) -> int:
    """One file, from where an earlier try ended; returns the bytes that were fetched."""
    if target.is_symlink() or not (target.is_file() or not target.exists()):
        _remove(target)
    hashed, start = _hash_so_far(target, record.size)
    if start == record.size and hashed.hexdigest() == record.sha256 and target.exists():
        on_bytes(there + start, total)
        return 0
    if start == record.size:  # all there, and wrong
        start = 0
    begins, pieces = source.pieces(path, start)
    if begins != start or start == 0:
        hashed, start = hashlib.sha256(), 0
    size = start
    with target.open("r+b" if start else "wb") as file:
        file.seek(start)
        file.truncate()
        for piece in pieces:
            size += len(piece)
            if size > record.size:
                break
            file.write(piece)
            hashed.update(piece)
            on_bytes(there + size, total)
        file.flush()
        os.fsync(file.fileno())
    if size < record.size:
        raise PackageError(
            f"{path} broke off after {size:,} of {record.size:,} bytes. What was fetched stays; the "
            "next pull goes on "
            "from there."
        )
    if size > record.size or hashed.hexdigest() != record.sha256:
        _remove(target)
        raise PackageError(
            f"{path} is damaged where it comes from: it is not what its {MANIFEST} says. Nothing of "
            "the package is "
            "kept under its name."
        )
    return size - start


def _hash_so_far(target: Path, size: int) -> tuple[hashlib._Hash, int]:
    hashed, there = hashlib.sha256(), 0
    try:
        with target.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                hashed.update(piece)
                there += len(piece)
    except FileNotFoundError:
        pass
    return (hashed, there) if there <= size else (hashlib.sha256(), 0)


@contextmanager
def _partial(registry: Registry, digest: str) -> Iterator[Path]:
    """The folder of what is fetched, for one process at a time; gone once it was renamed."""
    path = registry.partial_of(digest)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{digest}.lock").open("a+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path.mkdir(exist_ok=True)
            yield path
            shutil.rmtree(path, ignore_errors=True)  # where it was not needed any more
            path.with_name(f".{digest}.lock").unlink(missing_ok=True)
    except OSError as error:
        raise PackageError(
            f"cannot write to the registry {registry.path}: {error.strerror}. Make it writable and make room."
        ) from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
