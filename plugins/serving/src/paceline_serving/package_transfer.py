"""Copies of packages between registries, verified completely before they are visible."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from paceline.core.errors import PackageError
from paceline.core.files import check_location, is_address, open_regular
from paceline.runs.checkpoint_manifest import MANIFEST, MAX_MANIFEST_BYTES, write_file
from paceline.runs.package import verify_package
from paceline.runs.package_manifest import PackageManifest
from paceline.runs.package_registry import PackageReference, Registry, parse_reference, writable

if TYPE_CHECKING:
    from paceline_stores.package_store import PackageStore

_PIECE_BYTES = 2**20

OnBytes = Callable[[int, int], None]
"""Receives the progress: bytes copied, and bytes in total."""

ReadFile = Callable[[str], Iterator[bytes]]
"""Yields the content of a package's file."""


PackageLocation: TypeAlias = "PackageDirectory | PackageStore"
"""A registry that packages are copied from and to."""


class PackageDirectory(Registry):
    """A registry in a directory."""

    def read(self, digest: str, name: str, size: int) -> Iterator[bytes]:
        """Yield the content of a package's file, of at most so many bytes."""
        path = self.path_of(digest) / name
        try:
            with open_regular(path) as file:
                while piece := file.read(_PIECE_BYTES):
                    size -= len(piece)
                    if size < 0:
                        raise PackageError(f"the package {digest} is damaged at the source: {name} is too long.")
                    yield piece
        except OSError as error:
            raise PackageError(f"{path} is damaged at the source: {error.strerror}.") from error

    def is_whole(self, digest: str) -> bool:
        """Return whether the whole package is here, after reading every byte."""
        try:
            return verify_package(self.path_of(digest)).digest == digest
        except PackageError:
            return False

    def store(self, manifest: PackageManifest, read: ReadFile) -> None:
        """Add a package, or replace a damaged one; nothing is visible before every file has its digest."""
        digest = manifest.digest
        with self.draft() as draft, writable(self.path):
            for name, record in manifest.files.items():
                if write_file(draft / name, read(name)) != record:
                    raise PackageError(f"the package {digest} is damaged at the source: {name} has another digest.")
            with self.unchanging():
                if digest in self.digests() and not self.is_whole(digest):
                    self.discard(digest)
            self.commit(draft, manifest)


def open_location(location: str | Path) -> PackageLocation:
    """Return the registry in a directory, or at an address of an object store.

    Raises:
        ConfigError: the address is malformed.
    """
    if not is_address(location):
        return PackageDirectory(Path(location))
    from paceline_stores.package_store import PackageStore

    check_location(str(location), "the registry")
    return PackageStore(str(location))


class CopiedPackage(NamedTuple):
    """A package that was copied, its tag, if that named it, and the bytes: 0 if it was there already."""

    digest: str
    reference: PackageReference | None
    copied_bytes: int


def copy_package(
    what: str, source: PackageLocation, target: PackageLocation, on_bytes: OnBytes = lambda done, total: None
) -> CopiedPackage:
    """Copy a package and its tag.

    Args:
        what: ``NAME@TAG``, ``NAME``, a digest or a prefix of one.

    Raises:
        PackageError: it is missing or damaged at the source, or the target cannot be written; then no part of it is
            visible. A damaged copy at the target is replaced.
        CheckpointError: an object store cannot be read or written.
    """
    digest = source.resolve(what)
    is_named = "@" in what or not digest.startswith(what.removeprefix("sha256:"))
    reference = parse_reference(what) if is_named else None
    copied_bytes = 0
    if not target.is_whole(digest):
        content = b"".join(source.read(digest, MANIFEST, MAX_MANIFEST_BYTES))
        if hashlib.sha256(content).hexdigest() != digest:
            raise PackageError(f"the package {digest} is damaged at the source: its {MANIFEST} has another digest.")
        manifest = PackageManifest.from_bytes(content)

        def read(name: str) -> Iterator[bytes]:
            nonlocal copied_bytes
            for piece in source.read(digest, name, manifest.files[name].size):
                copied_bytes += len(piece)
                on_bytes(copied_bytes, manifest.size_bytes)
                yield piece

        target.store(manifest, read)
    if reference is not None:
        target.put_tag(reference, digest)
    return CopiedPackage(digest, reference, copied_bytes)
