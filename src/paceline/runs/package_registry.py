"""Where packages are kept: each under its digest, with tags that name one of a model's packages.

::

    packages/DIGEST/        a package, written once
    tags/NAME/TAG.json      which package is meant by NAME@TAG, and which were before
    partial/DIGEST/         what a pull has of a package so far

All files are plain, so that any static file server can serve a registry.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import PackageError
from paceline.core.files import fsync_directory, write_atomically
from paceline.runs.checkpoint_manifest import temporary_directory, write_file
from paceline.runs.checkpoint_store import remove_stale
from paceline.runs.package_manifest import MANIFEST, PackageManifest, canonical_json, parse_object, plain_name

LATEST = "latest"
MAX_TAG_BYTES = 2**20

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHORT_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{8,64})")
_MOST_EARLIER = 100


class PackageReference(NamedTuple):
    """``NAME@TAG``."""

    name: str
    tag: str

    def __str__(self) -> str:
        return f"{self.name}@{self.tag}"


@dataclass(frozen=True)
class Tag:
    """Which package a tag means.

    Attributes:
        digest: the package's.
        earlier: the digests that it meant before, the last one first.
    """

    digest: str
    earlier: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """As it is written."""
        return canonical_json({"digest": self.digest, "earlier": self.earlier})

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Tag:
        """Parse and check.

        Raises:
            PackageError: it is no tag's content.
        """
        fields = parse_object(content, where)
        tag = cls(fields.text("digest"), fields.texts("earlier"))
        fields.end()
        for digest in (tag.digest, *tag.earlier):
            if not is_digest(digest):
                raise PackageError(f"{where} holds {digest!r:.80}, which is no digest.")
        return tag


def is_digest(text: str) -> bool:
    """Whether this is a whole digest."""
    return _DIGEST.fullmatch(text) is not None


def parse_reference(text: str) -> PackageReference:
    """The name and tag of ``NAME@TAG`` or ``NAME``, whose tag is ``latest``.

    Raises:
        PackageError: name or tag has another form.
    """
    name, separator, tag = text.partition("@")
    return PackageReference(
        plain_name(name, "a package's name"), plain_name(tag if separator else LATEST, "a package's tag")
    )


def registry_path() -> Path:
    """``$PACELINE_REGISTRY``, else ``paceline/registry`` among the user's XDG data."""
    if configured := os.environ.get("PACELINE_REGISTRY"):
        return Path(configured).expanduser().absolute()
    xdg = Path(os.environ.get("XDG_DATA_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".local" / "share") / "paceline" / "registry"


@dataclass(frozen=True)
class Registry:
    """A directory of packages and tags; making one touches nothing."""

    path: Path

    @classmethod
    def of_user(cls) -> Registry:
        """The user's own."""
        return cls(registry_path())

    @property
    def packages(self) -> Path:
        """``packages/``."""
        return self.path / "packages"

    @property
    def tags(self) -> Path:
        """``tags/``."""
        return self.path / "tags"

    def partial_of(self, digest: str) -> Path:
        """What a pull has so far of a package."""
        return self.path / "partial" / digest

    def path_of(self, digest: str) -> Path:
        """The directory of a package."""
        return self.packages / digest

    def holds(self, digest: str) -> bool:
        """Whether a package is here; it is not verified."""
        return (self.path_of(digest) / MANIFEST).is_file()

    def digests(self) -> list[str]:
        """Of all packages."""
        with suppress(FileNotFoundError):
            return sorted(entry.name for entry in self.packages.iterdir() if is_digest(entry.name))
        return []

    def references(self) -> dict[PackageReference, Tag]:
        """All tags, in the order of their names."""
        found = {}
        for file in sorted(self.tags.glob("*/*.json")):
            with suppress(PackageError):
                found.update(self._tag_in(file))
        return found

    def all_tags(self) -> dict[PackageReference, Tag]:
        """The same, where none may be missed.

        Raises:
            PackageError: one cannot be read.
        """
        found = {}
        for file in sorted(self.tags.glob("*/*.json")):
            try:
                found.update(self._tag_in(file))
            except PackageError as error:
                raise PackageError(
                    f"{file} cannot be read, so nobody knows which package it means. Restore it, or remove it."
                ) from error
        return found

    def _tag_in(self, file: Path) -> dict[PackageReference, Tag]:
        """The tag, unless it has gone meanwhile."""
        reference = PackageReference(plain_name(file.parent.name, "a name"), plain_name(file.stem, "a tag"))
        tag = self.find(reference)
        return {} if tag is None else {reference: tag}

    @contextmanager
    def unchanging(self, *, exclusive: bool = True) -> Iterator[None]:
        """No tag begins to mean another package in here, and no package is removed.

        Raises:
            PackageError: the registry cannot be written.
        """
        with _writable(self.path):
            self.packages.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.packages, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield
        finally:
            os.close(descriptor)

    def find(self, reference: PackageReference) -> Tag | None:
        """What a tag means; None where there is no such tag.

        Raises:
            PackageError: its file is damaged.
        """
        file = self._file_of(reference)
        try:
            with file.open("rb") as opened:
                return Tag.from_bytes(opened.read(MAX_TAG_BYTES), str(file))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PackageError(f"{file} cannot be read: {error.strerror}.") from error

    def resolve(self, text: str) -> str:
        """The digest of ``NAME@TAG``, of ``NAME``, or of the beginning of a digest.

        Raises:
            PackageError: nothing here has that name; says what has.
        """
        if "@" not in text and (match := _SHORT_DIGEST.fullmatch(text)):
            matches = [digest for digest in self.digests() if digest.startswith(match[1])]
            if len(matches) == 1:
                return matches[0]
            if matches or text.startswith("sha256:") or is_digest(text):
                problem = f"is the beginning of {len(matches)} digests" if matches else "is no package's digest"
                raise PackageError(f"{text} {problem} in the registry {self.path}. See: paceline registry ls")
        reference = parse_reference(text)
        tag = self.find(reference)
        if tag is None:
            tags = [other.tag for other in self.references() if other.name == reference.name]
            names = sorted({other.name for other in self.references()})
            there = (
                f"{reference.name} has the tags {', '.join(tags)}"
                if tags
                else f"it has {', '.join(names[:20])}"
                if names
                else "it is empty"
            )
            raise PackageError(
                f"there is no {reference} in the registry {self.path}; {there}. A package is a directory, "
                "NAME@TAG or a digest; see: paceline registry ls"
            )
        if not self.holds(tag.digest):
            raise PackageError(f"{reference} is the package {tag.digest}, which is not in {self.path}.")
        return tag.digest

    def put_tag(self, reference: PackageReference, digest: str) -> Tag:
        """Let a tag mean a package from now on.

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
        """Let a tag mean again what it meant before; returns what it meant, and what it means now.

        Raises:
            PackageError: there is no such tag, it never meant another package, or that one is gone.
        """
        with self.unchanging(exclusive=False), self._changing(reference) as before:
            if before is None:
                raise PackageError(f"there is no {reference} in the registry {self.path}.")
            if not before.earlier:
                raise PackageError(
                    f"{reference} is {before.digest}, and was nothing before: there is nothing to go back to."
                )
            if not self.holds(before.earlier[0]):
                raise PackageError(f"{reference} was {before.earlier[0]}, which is not in {self.path} any more.")
            return before, self._write(reference, Tag(before.earlier[0], before.earlier[1:]))

    def remove_tag(self, reference: PackageReference) -> Tag:
        """Forget a tag; its package stays.

        Raises:
            PackageError: there is no such tag.
        """
        with self._changing(reference) as before:
            if before is None:
                raise PackageError(f"there is no {reference} in the registry {self.path}.")
            self._file_of(reference).unlink()
            return before

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """A directory for a package's files, gone afterwards unless :meth:`commit` took it.

        Raises:
            PackageError: the registry cannot be written.
        """
        with _writable(self.path):
            self.packages.mkdir(parents=True, exist_ok=True)
            remove_stale(self.packages)
        with temporary_directory(self.packages) as directory:
            yield directory

    def commit(self, draft: Path, manifest: PackageManifest) -> str:
        """Give a draft its manifest and its place; returns its digest. A package that is there stays.

        Raises:
            PackageError: the registry cannot be written.
        """
        with _writable(self.path):
            write_file(draft / MANIFEST, [manifest.to_bytes()])
            fsync_directory(draft)
            target = self.path_of(manifest.digest)
            try:
                draft.rename(target)
            except OSError:
                if not self.holds(manifest.digest):
                    raise
            fsync_directory(self.packages)
        return manifest.digest

    def put(self, whole: Path, digest: str) -> None:
        """Give a verified directory a package's place; what was there before is damaged, and goes.

        Raises:
            PackageError: the registry cannot be written.
        """
        with self.unchanging(), _writable(self.path), temporary_directory(self.packages) as old:
            with suppress(FileNotFoundError):
                self.path_of(digest).rename(old / digest)
            whole.rename(self.path_of(digest))
            fsync_directory(self.packages)

    def _file_of(self, reference: PackageReference) -> Path:
        return self.tags / reference.name / f"{reference.tag}.json"

    def _write(self, reference: PackageReference, tag: Tag) -> Tag:
        with _writable(self.path):
            write_atomically(self._file_of(reference), tag.to_bytes())
        return tag

    @contextmanager
    def _changing(self, reference: PackageReference) -> Iterator[Tag | None]:
        """What a tag means, while nobody else changes it."""
        with _writable(self.path):
            self._file_of(reference).parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.tags / reference.name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield self.find(reference)
        finally:
            os.close(descriptor)
            with suppress(OSError):  # a name without a tag
                (self.tags / reference.name).rmdir()


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PackageError(
            f"cannot write to the registry {path}: {error.strerror}. Make it writable and make room, or "
            "choose another with PACELINE_REGISTRY."
        ) from error
