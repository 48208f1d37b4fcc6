"""Copies of packages between registries, verified completely before they are visible."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from paceline.core.errors import PackageError
from paceline.core.files import open_regular
from paceline.runs.checkpoint_manifest import write_file
from paceline.runs.package import verify_package
from paceline.runs.package_manifest import MANIFEST, MAX_MANIFEST_BYTES, PackageManifest
from paceline.runs.package_registry import PackageReference, Registry, parse_reference, writable

_PIECE_BYTES = 2**20

OnBytes = Callable[[int, int], None]
"""Receives the progress: bytes copied, and bytes in total."""


class PackageStore(Protocol):
    """A registry from which or into which packages are copied; each method raises PackageError."""

    def resolve(self, text: str) -> str:
        """Return the digest of ``NAME@TAG``, of ``NAME``, or of a prefix of a digest."""

    def read(self, digest: str, name: str) -> Iterator[bytes]:
        """Read a file of a package."""

    def holds(self, digest: str) -> bool:
        """Return whether the whole package is here, after reading every byte."""

    def write(self, manifest: PackageManifest, read: Callable[[str], Iterable[bytes]]) -> None:
        """Write a package, which appears whole or not at all, and replaces a damaged one."""

    def put_tag(self, reference: PackageReference, digest: str) -> object:
        """Point a tag at a package."""


class DirectoryStore:
    """A registry in a directory.

    Raises:
        PackageError: ``place`` is a URL.
    """

    def __init__(self, place: str | Path) -> None:
        if "://" in str(place):
            raise PackageError(f"{place}: a registry is a directory. Mount it, or copy it to this machine first.")
        self._registry = Registry(Path(place))
        self.resolve, self.put_tag = self._registry.resolve, self._registry.put_tag

    def read(self, digest: str, name: str) -> Iterator[bytes]:
        path = self._registry.path_of(digest) / name
        try:
            with open_regular(path) as file:
                while piece := file.read(_PIECE_BYTES):
                    yield piece
        except OSError as error:
            raise PackageError(f"{path} is damaged at the source: {error.strerror}.") from error

    def holds(self, digest: str) -> bool:
        try:
            return verify_package(self._registry.path_of(digest)).digest == digest
        except PackageError:
            return False

    def write(self, manifest: PackageManifest, read: Callable[[str], Iterable[bytes]]) -> None:
        digest = manifest.digest
        with self._registry.draft() as draft, writable(self._registry.path):
            for name, record in manifest.files.items():
                if write_file(draft / name, read(name)) != record:
                    raise PackageError(f"the package {digest} is damaged at the source: {name} has another digest.")
            with self._registry.unchanging():
                if digest in self._registry.digests() and not self.holds(digest):
                    self._registry.discard(digest)
            self._registry.commit(draft, manifest)


class CopiedPackage(NamedTuple):
    """A package that was copied, its tag, if that named it, and the bytes: 0 if it was there already."""

    digest: str
    reference: PackageReference | None
    copied_bytes: int


def copy_package(
    what: str, source: PackageStore, target: PackageStore, on_bytes: OnBytes = lambda done, total: None
) -> CopiedPackage:
    """Copy a package and its tag.

    Args:
        what: ``NAME@TAG``, ``NAME``, a digest or a prefix of one.
        source: has the package.
        target: gets it.
        on_bytes: receives the progress.

    Raises:
        PackageError: it is missing or damaged at the source, or the target cannot be written; then no part of it is
            visible. A damaged copy at the target is replaced.
    """
    digest = source.resolve(what)
    is_named = "@" in what or not digest.startswith(what.removeprefix("sha256:"))
    reference = parse_reference(what) if is_named else None
    copied_bytes = 0
    if not target.holds(digest):
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

        target.write(manifest, read)
    if reference is not None:
        target.put_tag(reference, digest)
    return CopiedPackage(digest, reference, copied_bytes)


def _read(source: PackageStore, digest: str, name: str, limit: int) -> Iterator[bytes]:
    for piece in source.read(digest, name):
        limit -= len(piece)
        if limit < 0:
            raise PackageError(f"the package {digest} is damaged at the source: {name} is too long.")
        yield piece
