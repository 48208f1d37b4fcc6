"""A registry of packages in an object store, in the layout of a registry's directory.

A package is there once its manifest is, which is written last; a tag is written after its package. If two users move
one tag at the same time, the later one's stays.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.core.errors import CheckpointError, PackageError
from paceline.core.ownership import own_prefix
from paceline.runs.checkpoint_manifest import MANIFEST, MAX_MANIFEST_BYTES, write_file
from paceline.runs.package_manifest import PackageManifest, plain_name
from paceline.runs.package_registry import MAX_TAG_BYTES, PackageNames, PackageReference, Tag
from paceline_stores.objects import ObjectStore


class PackageStore(PackageNames):
    """The packages and tags below an address.

    Every method raises ``CheckpointError`` if the store does not answer, or denies it.
    """

    def __init__(self, address: str) -> None:
        self._objects = ObjectStore(address)

    def __str__(self) -> str:
        return self._objects.address

    def digests(self) -> list[str]:
        names = re.findall(rf"^packages/([0-9a-f]{{64}})/{MANIFEST}$", "\n".join(self._objects.sizes()), re.MULTILINE)
        return sorted(names)

    def holds(self, digest: str) -> bool:
        return self._objects.read(f"packages/{digest}/{MANIFEST}", MAX_MANIFEST_BYTES) is not None

    def references(self) -> dict[PackageReference, Tag]:
        found = re.findall(r"^tags/([^/\n]+)/([^/\n]+)\.json$", "\n".join(sorted(self._objects.sizes())), re.MULTILINE)
        references = [PackageReference(plain_name(name, "a name"), plain_name(tag, "a tag")) for name, tag in found]
        return {reference: tag for reference in references if (tag := self.find(reference))}

    def find(self, reference: PackageReference) -> Tag | None:
        name = _tag_name(reference)
        content = self._objects.read(name, MAX_TAG_BYTES)
        return None if content is None else Tag.from_bytes(content, f"{self}/{name}")

    def read(self, digest: str, name: str, size: int) -> Iterator[bytes]:
        """Yield the content of a package's file, of at most so many bytes.

        Raises:
            PackageError: the file is missing, or has another size.
        """
        path = f"packages/{digest}/{name}"
        if name != MANIFEST:
            try:
                yield from self._objects.pieces(path, size)
            except CheckpointError as error:
                raise PackageError(f"the package {digest} cannot be read: {error}") from error
        elif content := self._objects.read(path, size):
            yield content

    def is_whole(self, digest: str) -> bool:
        """Return whether each file is there with its size. A copy from here verifies its bytes."""
        content = self._objects.read(f"packages/{digest}/{MANIFEST}", MAX_MANIFEST_BYTES)
        try:
            manifest = None if content is None else PackageManifest.from_bytes(content)
        except PackageError:
            return False
        if manifest is None or manifest.digest != digest:
            return False
        sizes = ObjectStore(f"{self}/packages/{digest}").sizes()
        return {name: sizes.get(name) for name in manifest.files} == {
            name: record.size for name, record in manifest.files.items()
        }

    def store(self, manifest: PackageManifest, read: Callable[[str], Iterator[bytes]]) -> None:
        """Add a package, or replace a damaged one; each file is verified here before it is written there.

        Raises:
            PackageError: a file does not have its digest.
        """
        for name, record in manifest.files.items():
            with tempfile.TemporaryDirectory(prefix=own_prefix("package")) as folder:
                file = Path(folder) / "file"
                if write_file(file, read(name)) != record:
                    raise PackageError(f"the package {manifest.digest} is damaged at the source: {name}.")
                self._objects.upload(f"packages/{manifest.digest}/{name}", file)
        self._objects.write(f"packages/{manifest.digest}/{MANIFEST}", manifest.to_bytes())

    def put_tag(self, reference: PackageReference, digest: str) -> Tag | None:
        """Point a tag at a package, and return what it was before."""
        before = self.find(reference)
        if before is None or before.digest != digest:
            self._objects.write(_tag_name(reference), Tag.following(before, digest).to_bytes())
        return before


def _tag_name(reference: PackageReference) -> str:
    return f"tags/{reference.name}/{reference.tag}.json"
