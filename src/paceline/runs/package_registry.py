"""A registry of packages: each under its digest, with tags that name one of a model's packages.

::

    packages/DIGEST/        a package, written once
    tags/NAME/TAG.json      the package of NAME@TAG, and the previous ones
    partial/DIGEST/         an unfinished pull of a package

Any static file server can serve a registry.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import PackageError
from paceline.core.file_lock import locked
from paceline.core.files import fsync_directory, open_regular, rename, write_atomically
from paceline.core.user_directories import user_directory
from paceline.runs.checkpoint_manifest import require_complete, temporary_directory, write_file
from paceline.runs.checkpoint_store import remove_stale
from paceline.runs.package_manifest import MANIFEST, PackageManifest, canonical_json, parse_object, plain_name

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


@dataclass(frozen=True)
class Tag:
    """The package of a tag.

    Attributes:
        digest: the package's.
        earlier: the digests of previous packages, the last one first.
    """

    digest: str
    earlier: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        return canonical_json({"digest": self.digest, "earlier": self.earlier})

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Tag:
        """Parse and check a tag's file.

        Raises:
            PackageError: it is malformed.
        """
        fields = parse_object(content, where)
        tag = cls(fields.text("digest"), fields.texts("earlier"))
        fields.end()
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
        return Path(configured).expanduser().absolute()
    return user_directory("data") / "registry"


@dataclass(frozen=True)
class Registry:
    """A directory of packages and tags; constructing one touches nothing."""

    path: Path

    @classmethod
    def of_user(cls) -> Registry:
        return cls(registry_path())

    @property
    def packages(self) -> Path:
        return self.path / "packages"

    @property
    def tags(self) -> Path:
        return self.path / "tags"

    def partial_of(self, digest: str) -> Path:
        """Return the directory of an unfinished pull."""
        return self.path / "partial" / digest

    def path_of(self, digest: str) -> Path:
        return self.packages / digest

    def holds(self, digest: str) -> bool:
        """Return whether a package is here, without verifying it."""
        return (self.path_of(digest) / MANIFEST).is_file()

    def digests(self) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(entry.name for entry in self.packages.iterdir() if is_digest(entry.name))
        return []

    def references(self) -> dict[PackageReference, Tag]:
        """Return all readable tags, sorted by name."""
        tags = {}
        for file in sorted(self.tags.glob("*/*.json")):
            with suppress(PackageError):
                tags.update(self._tag_in(file))
        return tags

    def all_tags(self) -> dict[PackageReference, Tag]:
        """Return all tags.

        Raises:
            PackageError: a tag cannot be read.
        """
        tags = {}
        for file in sorted(self.tags.glob("*/*.json")):
            try:
                tags.update(self._tag_in(file))
            except PackageError as error:
                raise PackageError(
                    f"{file} cannot be read, so its package is unknown. Restore it, or remove it."
                ) from error
        return tags

    def _tag_in(self, file: Path) -> dict[PackageReference, Tag]:
        """Return the tag in a file; nothing if it was removed meanwhile."""
        reference = PackageReference(plain_name(file.parent.name, "a name"), plain_name(file.stem, "a tag"))
        tag = self.find(reference)
        return {} if tag is None else {reference: tag}

    @contextmanager
    def unchanging(self, *, exclusive: bool = True) -> Iterator[None]:
        """Lock the registry: no tag changes to another package, and no package is removed.

        Raises:
            PackageError: the registry cannot be written.
        """
        with ExitStack() as stack:
            with _writable(self.path):
                self.packages.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self.path / "lock", shared=not exclusive))
            yield

    def find(self, reference: PackageReference) -> Tag | None:
        """Return a tag, or None if it does not exist.

        Raises:
            PackageError: its file is damaged.
        """
        file = self._file_of(reference)
        try:
            with open_regular(file) as opened:
                return Tag.from_bytes(opened.read(MAX_TAG_BYTES), str(file))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PackageError(f"{file} cannot be read: {error.strerror}.") from error

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
                raise PackageError(f"{text} {problem} in the registry {self.path}. See: paceline registry ls")
        reference = parse_reference(text)
        tag = self.find(reference)
        if tag is None:
            tags = [other.tag for other in self.references() if other.name == reference.name]
            names = sorted({other.name for other in self.references()})
            alternatives = (
                f"{reference.name} has the tags {', '.join(tags)}"
                if tags
                else f"it has {', '.join(names[:20])}"
                if names
                else "it is empty"
            )
            raise PackageError(
                f"there is no {reference} in the registry {self.path}; {alternatives}. A package is a directory, "
                "NAME@TAG or a digest; see: paceline registry ls"
            )
        if not self.holds(tag.digest):
            raise PackageError(f"{reference} is the package {tag.digest}, which is not in {self.path}.")
        return tag.digest

    def put_tag(self, reference: PackageReference, digest: str) -> Tag:
        """Point a tag at a package.

        Raises:
            PackageError: the package is not here, or the tag cannot be written.
        """
        with self.unchanging(exclusive=False), self._changing(reference) as before:
            if not self.holds(digest):
                raise PackageError(f"there is no package {digest} in {self.path}: nothing to tag.")
            if before is not None and before.digest == digest:
                return before
            earlier = () if before is None else (before.digest, *before.earlier)[:_MOST_EARLIER]
            return self._write(reference, Tag(digest, earlier))

    def roll_back(self, reference: PackageReference) -> tuple[Tag, Tag]:
        """Point a tag at its previous package; return the tag before and after.

        Raises:
            PackageError: there is no such tag, it has no previous package, or that one is gone.
        """
        with self.unchanging(exclusive=False), self._changing(reference) as before:
            if before is None:
                raise PackageError(f"there is no {reference} in the registry {self.path}.")
            if not before.earlier:
                raise PackageError(
                    f"{reference} is {before.digest} and has no previous package, so it cannot be rolled back."
                )
            if not self.holds(before.earlier[0]):
                raise PackageError(
                    f"the previous package of {reference}, {before.earlier[0]}, is no longer in {self.path}."
                )
            return before, self._write(reference, Tag(before.earlier[0], before.earlier[1:]))

    def remove_tag(self, reference: PackageReference) -> Tag:
        """Remove a tag; its package stays.

        Raises:
            PackageError: there is no such tag.
        """
        with self._changing(reference) as before:
            if before is None:
                raise PackageError(f"there is no {reference} in the registry {self.path}.")
            self._file_of(reference).unlink(missing_ok=True)  # it was there, so only the answer was lost
            return before

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """Create a directory for a package's files; remove it afterwards unless :meth:`commit` moved it.

        Raises:
            PackageError: the registry cannot be written.
        """
        with _writable(self.path):
            self.packages.mkdir(parents=True, exist_ok=True)
            remove_stale(self.packages)
        with temporary_directory(self.packages) as directory:
            yield directory

    def commit(self, draft: Path, manifest: PackageManifest) -> str:
        """Write a draft's manifest and move the draft to its place; return its digest. An existing package stays.

        Raises:
            PackageError: the registry cannot be written.
        """
        with _writable(self.path):
            own = write_file(draft / MANIFEST, [manifest.to_bytes()])
            fsync_directory(draft)
            require_complete(draft, {**manifest.files, MANIFEST: own})
            target = self.path_of(manifest.digest)
            try:
                draft.rename(target)
            except OSError:
                if not self.holds(manifest.digest):
                    raise
            fsync_directory(self.packages)
        return manifest.digest

    def put(self, whole: Path, digest: str) -> None:
        """Move a verified directory to a package's place, and replace a damaged package there.

        Raises:
            PackageError: the registry cannot be written.
        """
        with self.unchanging(), _writable(self.path), temporary_directory(self.packages) as old:
            with suppress(FileNotFoundError):
                rename(self.path_of(digest), old / digest)
            rename(whole, self.path_of(digest))
            fsync_directory(self.packages)

    def _file_of(self, reference: PackageReference) -> Path:
        return self.tags / reference.name / f"{reference.tag}.json"

    def _write(self, reference: PackageReference, tag: Tag) -> Tag:
        with _writable(self.path):
            write_atomically(self._file_of(reference), tag.to_bytes())
        return tag

    @contextmanager
    def _changing(self, reference: PackageReference) -> Iterator[Tag | None]:
        """Lock a tag, and yield it."""
        with ExitStack() as stack:
            with _writable(self.path):
                self.tags.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self.path / "tags.lock"))
                self._file_of(reference).parent.mkdir(exist_ok=True)
            try:
                yield self.find(reference)
            finally:
                with suppress(OSError):  # remove the directory of a name without tags
                    (self.tags / reference.name).rmdir()


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PackageError(
            f"cannot write to the registry {path}: {error.strerror}. Make it writable and free space, or "
            "choose another with PACELINE_REGISTRY."
        ) from error
