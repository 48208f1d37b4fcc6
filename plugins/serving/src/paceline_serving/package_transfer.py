"""Copies of packages between registries, verified completely before they are visible."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import PackageError
from paceline.core.files import open_regular
from paceline.runs.checkpoint_manifest import MANIFEST, MAX_MANIFEST_BYTES, write_file
from paceline.runs.package import verify_package
from paceline.runs.package_manifest import PackageManifest
from paceline.runs.package_registry import PackageReference, Registry, parse_reference, writable

_PIECE_BYTES = 2**20

OnBytes = Callable[[int, int], None]
"""Receives the progress: bytes copied, and bytes in total."""


def open_registry(place: str | Path) -> Registry:
    """Return the registry in a directory.

    Raises:
        PackageError: ``place`` is a URL.
    """
    if "://" in str(place):
        raise PackageError(f"{place}: a registry is a directory. Mount it, or copy it to this machine first.")
    return Registry(Path(place))


class CopiedPackage(NamedTuple):
    """A package that was copied, its tag, if that named it, and the bytes: 0 if it was there already."""

    digest: str
    reference: PackageReference | None
    copied_bytes: int


def copy_package(
    what: str, source: Registry, target: Registry, on_bytes: OnBytes = lambda done, total: None
) -> CopiedPackage:
    """Copy a package and its tag.

    Args:
        what: ``NAME@TAG``, ``NAME``, a digest or a prefix of one.

    Raises:
        PackageError: it is missing or damaged at the source, or the target cannot be written; then no part of it is
            visible. A damaged copy at the target is replaced.
    """
    digest = source.resolve(what)
    is_named = "@" in what or not digest.startswith(what.removeprefix("sha256:"))
    reference = parse_reference(what) if is_named else None
    copied_bytes = 0
    if not _is_whole(target, digest):
        content = b"".join(_read(source, digest, MANIFEST, MAX_MANIFEST_BYTES))
        if hashlib.sha256(content).hexdigest() != digest:
            raise PackageError(f"the package {digest} is damaged at the source: its {MANIFEST} has another digest.")
        manifest = PackageManifest.from_bytes(content)

        def read(name: str) -> Iterator[bytes]:
            nonlocal copied_bytes
            for piece in _read(source, digest, name, manifest.files[name].size):
                copied_bytes += len(piece)
                on_bytes(copied_bytes, manifest.size_bytes)
                yield piece

        with target.draft() as draft, writable(target.path):
            for name, record in manifest.files.items():
                if write_file(draft / name, read(name)) != record:
                    raise PackageError(f"the package {digest} is damaged at the source: {name} has another digest.")
            with target.unchanging():
                if digest in target.digests() and not _is_whole(target, digest):
                    target.discard(digest)
            target.commit(draft, manifest)
    if reference is not None:
        target.put_tag(reference, digest)
    return CopiedPackage(digest, reference, copied_bytes)


def _is_whole(registry: Registry, digest: str) -> bool:
    """Return whether the whole package is here, after reading every byte."""
    try:
        return verify_package(registry.path_of(digest)).digest == digest
    except PackageError:
        return False


def _read(source: Registry, digest: str, name: str, limit: int) -> Iterator[bytes]:
    path = source.path_of(digest) / name
    try:
        with open_regular(path) as file:
            while piece := file.read(_PIECE_BYTES):
                limit -= len(piece)
                if limit < 0:
                    raise PackageError(f"the package {digest} is damaged at the source: {name} is too long.")
                yield piece
    except OSError as error:
        raise PackageError(f"{path} is damaged at the source: {error.strerror}.") from error
