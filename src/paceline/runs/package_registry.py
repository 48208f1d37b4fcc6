"""A registry of packages: each under its digest, with tags that name one of a model's packages.

::

    packages/DIGEST/        a package, written once
    tags/NAME/TAG.json      the package of NAME@TAG, and the previous ones
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import PackageError
from paceline.core.files import check_path, fsync_directory, open_regular, rename, user_directory, write_atomically
from paceline.core.ownership import locked
from paceline.runs.checkpoint_manifest import (
    MANIFEST,
    canonical_json,
    require_complete,
    temporary_directory,
    write_file,
)
from paceline.runs.checkpoint_store import remove_stale
from paceline.runs.package_manifest import PackageManifest, StrictStruct, parse_document, plain_name

LATEST = "latest"
MAX_TAG_BYTES = 2**20

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHORT_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{8,64})")
_MOST_EARLIER = 100


class PackageReference(NamedTuple):
    """A reference ``NAME@TAG``."""

    name: str
    tag: str

    def __str__(self) -> str:
        return f"{self.name}@{self.tag}"


class Tag(StrictStruct, frozen=True):
    """The package of a tag.

    Attributes:
        earlier: the digests of previous packages, the last one first.
    """

    digest: str
    earlier: tuple[str, ...]

    @classmethod
    def following(cls, before: Tag | None, digest: str) -> Tag:
        """Return the tag of a package that replaces ``before``."""
        return cls(digest, () if before is None else (before.digest, *before.earlier)[:_MOST_EARLIER])

    def to_bytes(self) -> bytes:
        return canonical_json({"digest": self.digest, "earlier": self.earlier})

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Tag:
        """Parse and check a tag's file.

        Raises:
            PackageError: it is malformed.
        """
        tag = parse_document(content, where, cls)
        for digest in (tag.digest, *tag.earlier):
            if not is_digest(digest):
                raise PackageError(f"{where} contains {digest!r:.80}, which is not a digest.")
        return tag


def is_digest(text: str) -> bool:
    """Return whether this is a complete digest."""
    return _DIGEST.fullmatch(text) is not None


def parse_reference(text: str) -> PackageReference:
    """Parse ``NAME@TAG``, or ``NAME``, whose tag is ``latest``.

    Raises:
        PackageError: name or tag has another form.
    """
    name, separator, tag = text.partition("@")
    return PackageReference(
        plain_name(name, "a package's name"), plain_name(tag if separator else LATEST, "a package's tag")
    )


def registry_path() -> Path:
    """Return ``$PACELINE_REGISTRY``, else ``paceline/registry`` in the user's XDG data."""
    if configured := os.environ.get("PACELINE_REGISTRY"):
        check_path(configured, "PACELINE_REGISTRY")
        return Path(configured).expanduser().absolute()
    return user_directory("data") / "registry"


class PackageNames(ABC):
    """Digests and tags of packages, wherever they are; as text, it is that place."""

    @abstractmethod
    def digests(self) -> list[str]:
        """Return the digests of all packages, sorted."""

    @abstractmethod
    def holds(self, digest: str) -> bool:
        """Return whether a package is here, without verifying it."""

    @abstractmethod
    def references(self) -> Mapping[PackageReference, Tag]:
        """Return all tags, sorted by name."""

    @abstractmethod
    def find(self, reference: PackageReference) -> Tag | None:
        """Return a tag, or None if it does not exist.

        Raises:
            PackageError: its file is damaged.
        """

    def resolve(self, text: str) -> str:
        """Return the digest of ``NAME@TAG``, of ``NAME``, or of a prefix of a digest.

        Raises:
            PackageError: it names no package here; lists the names that exist.
        """
        if "@" not in text and (match := _SHORT_DIGEST.fullmatch(text)):
            matches = [digest for digest in self.digests() if digest.startswith(match[1])]
            if len(matches) == 1:
                return matches[0]
            if matches or text.startswith("sha256:") or is_digest(text):
                problem = f"is the prefix of {len(matches)} digests" if matches else "is not a package's digest"
                raise PackageError(f"{text} {problem} in the registry {self}. See: paceline registry ls")
        reference = parse_reference(text)
        tag = self.find(reference)
        if tag is None:
            names = [str(other) for other in self.references()]
            names = [name for name in names if name.startswith(f"{reference.name}@")] or names
            raise PackageError(
                f"there is no {reference} in the registry {self}; it has {', '.join(names[:20]) or 'no tags'}. "
                "A package is a directory, NAME@TAG or a digest; see: paceline registry ls"
            )
        if not self.holds(tag.digest):
            raise PackageError(f"{reference} is the package {tag.digest}, which is not in {self}.")
        return tag.digest


@dataclass(frozen=True)
class Registry(PackageNames):
    """A directory of packages and tags; constructing one touches nothing."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def of_user(cls) -> Registry:
        return cls(registry_path())

    @property
    def packages(self) -> Path:
        return self.path / "packages"

    @property
    def tags(self) -> Path:
        return self.path / "tags"

    def path_of(self, digest: str) -> Path:
        return self.packages / digest

    def holds(self, digest: str) -> bool:
        return (self.path_of(digest) / MANIFEST).is_file()

    def digests(self) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(entry.name for entry in self.packages.iterdir() if is_digest(entry.name))
        return []

    def references(self, *, strict: bool = False) -> dict[PackageReference, Tag]:
        """Return all tags, sorted by name.

        Raises:
            PackageError: with ``strict``, a tag cannot be read; without, it is left out.
        """
        tags = {}
        for file in sorted(self.tags.glob("*/*.json")):
            try:
                reference = PackageReference(plain_name(file.parent.name, "a name"), plain_name(file.stem, "a tag"))
                if tag := self.find(reference):  # it may have been removed meanwhile
                    tags[reference] = tag
            except PackageError as error:
                if strict:
                    raise PackageError(
                        f"{file} cannot be read, so its package is unknown. Restore it, or remove it."
                    ) from error
        return tags

    def find(self, reference: PackageReference) -> Tag | None:
        file = self._file_of(reference)
        try:
            with open_regular(file) as opened:
                return Tag.from_bytes(opened.read(MAX_TAG_BYTES), str(file))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PackageError(f"{file} cannot be read: {error.strerror}.") from error

    @contextmanager
    def unchanging(self) -> Iterator[None]:
        """Lock the registry: nothing else changes a tag, or removes a package.

        Raises:
            PackageError: the registry cannot be written.
        """
        with ExitStack() as stack:
            with writable(self.path):
                self.packages.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self.path / "lock"))
            yield

    def put_tag(self, reference: PackageReference, digest: str) -> Tag | None:
        """Point a tag at a package, and return what it was before.

        Raises:
            PackageError: the package is not here, or the tag cannot be written.
        """
        with self.unchanging():
            if not self.holds(digest):
                raise PackageError(f"there is no package {digest} in {self.path}: nothing to tag.")
            before = self.find(reference)
            if before is None or before.digest != digest:
                self._write(reference, Tag.following(before, digest))
            return before

    def roll_back(self, reference: PackageReference) -> tuple[Tag, Tag]:
        """Point a tag at its previous package; return the tag before and after.

        Raises:
            PackageError: there is no such tag, it has no previous package, or that one is gone.
        """
        with self.unchanging():
            before = self._existing(reference)
            if not before.earlier or not self.holds(before.earlier[0]):
                why = f"{before.earlier[0]} is no longer in {self.path}" if before.earlier else "it has none"
                raise PackageError(
                    f"{reference} cannot be rolled back from {before.digest} to a previous package: {why}."
                )
            return before, self._write(reference, Tag(before.earlier[0], before.earlier[1:]))

    def remove_tag(self, reference: PackageReference) -> Tag:
        """Remove a tag, and return it; its package stays.

        Raises:
            PackageError: there is no such tag.
        """
        with self.unchanging(), writable(self.path):
            before = self._existing(reference)
            file = self._file_of(reference)
            file.unlink(missing_ok=True)  # it was there, so only the answer was lost
            with suppress(OSError):  # it has other tags
                file.parent.rmdir()
            return before

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """Create a directory for a package's files; remove it afterwards unless :meth:`commit` moved it.

        Raises:
            PackageError: the registry cannot be written.
        """
        with writable(self.path):
            self.packages.mkdir(parents=True, exist_ok=True)
            remove_stale(self.packages)
        with temporary_directory(self.packages) as directory:
            yield directory

    def commit(self, draft: Path, manifest: PackageManifest) -> str:
        """Write a draft's manifest and move the draft to its place; return its digest. An existing package stays.

        Raises:
            PackageError: the registry cannot be written.
        """
        with writable(self.path):
            own = write_file(draft / MANIFEST, [manifest.to_bytes()])
            fsync_directory(draft)
            require_complete(draft, {**manifest.files, MANIFEST: own})
            try:
                draft.rename(self.path_of(manifest.digest))
            except OSError:
                if not self.holds(manifest.digest):
                    raise
            fsync_directory(self.packages)
        return manifest.digest

    def discard(self, digest: str) -> None:
        """Remove a package; the caller holds the lock of :meth:`unchanging`.

        Raises:
            PackageError: the registry cannot be written.
        """
        with writable(self.path), temporary_directory(self.packages) as old:
            rename(self.path_of(digest), old / digest)

    def _file_of(self, reference: PackageReference) -> Path:
        return self.tags / reference.name / f"{reference.tag}.json"

    def _existing(self, reference: PackageReference) -> Tag:
        tag = self.find(reference)
        if tag is None:
            raise PackageError(f"there is no {reference} in the registry {self.path}.")
        return tag

    def _write(self, reference: PackageReference, tag: Tag) -> Tag:
        with writable(self.path):
            self._file_of(reference).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file_of(reference), tag.to_bytes())
        return tag


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn an error of the disk into one that names the registry in ``path`` and the remedy."""
    try:
        yield
    except OSError as error:
        raise PackageError(
            f"cannot write to the registry {path}: {error.strerror}. Make it writable and free space, or "
            "choose another with PACELINE_REGISTRY."
        ) from error
