"""``paceline registry``: list, compare, tag, copy and roll back packages."""

from __future__ import annotations

import hashlib
import json as json_module
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

from cyclopts import App, Parameter

from paceline.cli.progress import progress_bar
from paceline.core.errors import PackageError
from paceline.core.files import check_location, is_address, open_regular
from paceline.runs.checkpoint_manifest import MANIFEST, MAX_MANIFEST_BYTES, write_file
from paceline.runs.package import open_package, read_manifest, read_trusted, verify_package
from paceline.runs.package_manifest import PackageManifest
from paceline.runs.package_registry import PackageReference, Registry, parse_reference, registry_path, writable

if TYPE_CHECKING:
    from paceline_stores.package_store import PackageStore

_PIECE_BYTES = 2**20

app = App(name="registry", help="List, tag, copy and roll back packages.")

PackageName = Annotated[str, Parameter(help="NAME@TAG, NAME (tag latest), or a digest or the beginning of one.")]
Json = Annotated[bool, Parameter(negative="", help="Print one line of JSON.")]


@app.command
def ls(*, json: Json = False) -> int:
    """List the packages of the registry with their tags."""
    registry = Registry.of_user()
    tags: dict[str, list[str]] = {}
    for reference, tag in registry.references().items():
        tags.setdefault(tag.digest, []).append(str(reference))
    rows = []
    known = read_trusted()
    for digest in registry.digests():
        row: dict[str, Any] = {
            "digest": digest,
            "tags": tags.get(digest, []),
            "trusted": digest in known,
            "problem": None,
        }
        try:
            manifest, _ = read_manifest(registry.path_of(digest))
            row |= {
                "name": manifest.name,
                "created": manifest.created,
                "formats": [*manifest.differences],
                "quantization": manifest.quantization,
                "size_bytes": manifest.size_bytes,
                "run": manifest.provenance.run,
                "step": manifest.provenance.step,
                "metrics": dict(manifest.metrics),
            }
        except PackageError as error:
            row["problem"] = str(error)
        rows.append(row)
    rows.sort(key=lambda row: str(row.get("created", "")))
    if json:
        print(json_module.dumps(rows))
    elif not rows:
        print(f"The registry {registry.path} is empty. Add a package with: paceline export RUN")
    else:
        _print_table(rows)
    return 0


@app.command
def show(package: str, *, json: Json = False) -> int:
    """Verify every byte of a package, and show it.

    Args:
        package: The package's directory, NAME@TAG, NAME (tag latest), or a digest or the beginning of one.
    """
    from paceline.cli.export import as_json, print_package

    opened = open_package(package)
    is_trusted = opened.digest in read_trusted()
    if json:
        print(json_module.dumps({**as_json(opened), "trusted": is_trusted}))
    else:
        print_package(opened, opened.manifest.name)
        if "pt2" in opened.manifest.programs:
            print(f"The pt2 program is {'trusted' if is_trusted else 'not trusted: --trust allows it to run'}.")
    return 0


@app.command
def tag(package: PackageName, tag: str, *, json: Json = False) -> int:
    """Point a tag at a package.

    Args:
        tag: NAME@TAG, or TAG to use the package's own name.
    """
    registry = Registry.of_user()
    opened = open_package(registry.path_of(registry.resolve(package)))
    reference = parse_reference(tag if "@" in tag else f"{opened.manifest.name}@{tag}")
    before = registry.put_tag(reference, opened.digest)
    return _print_tag(reference, opened.digest, before.digest if before else None, json=json)


@app.command
def untag(reference: str, *, json: Json = False) -> int:
    """Remove a tag; keep its package.

    Args:
        reference: NAME@TAG.
    """
    parsed = parse_reference(reference)
    return _print_tag(parsed, None, Registry.of_user().remove_tag(parsed).digest, json=json)


@app.command
def rollback(reference: str, *, json: Json = False) -> int:
    """Point a tag back at its previous package.

    Args:
        reference: NAME@TAG, or NAME (tag latest).
    """
    parsed = parse_reference(reference)
    before, now = Registry.of_user().roll_back(parsed)
    return _print_tag(parsed, now.digest, before.digest, json=json)


def _print_tag(reference: PackageReference, digest: str | None, before: str | None, *, json: bool) -> int:
    if json:
        print(json_module.dumps({"reference": str(reference), "digest": digest, "before": before}))
    else:
        text = f"points to {digest}" if digest else "was removed"
        print(f"{reference} {text}{f', previously {before}' if before else ''}.")
    return 0


@app.command
def push(package: PackageName, to: str, *, json: Json = False) -> int:
    """Copy a package and its tag into another registry; it is verified before it becomes visible there.

    Args:
        to: The other registry's directory or address (s3://BUCKET/FOLDER).
    """
    return _copy(package, registry_path(), to, json=json)


@app.command
def pull(package: PackageName, source: str, *, json: Json = False) -> int:
    """Copy a package and its tag from another registry; it is verified before it becomes visible.

    Args:
        source: The other registry's directory or address (s3://BUCKET/FOLDER).
    """
    return _copy(package, source, registry_path(), json=json)


def _copy(package: str, source: str | Path, to: str | Path, *, json: bool) -> int:
    with progress_bar("copying", quiet=json, in_bytes=True) as on_bytes:
        digest, reference, size = copy_package(package, open_location(source), open_location(to), on_bytes)
    path = f"{to}/packages/{digest}"
    name = None if reference is None else str(reference)
    if json:
        print(json_module.dumps({"package": path, "digest": digest, "reference": name, "fetched_bytes": size}))
    else:
        print(f"{name or digest} is in {path}; copied {size:,} bytes.")
    return 0


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.filesize import decimal

    from paceline.core.output import ListTable, wide_console

    folds = ("name and tags", "programs", "")
    table = ListTable("digest", "name and tags", "programs", "created", ">size", "", folds=folds)
    for row in rows:
        mark = "damaged" if row["problem"] else "" if row["trusted"] else "not trusted"
        table.add(
            row["digest"][:12],
            "\n".join(row["tags"]) or row.get("name", ""),
            " ".join(kind for kind in row.get("formats", ()) if kind != "safetensors"),
            row.get("created", "")[:16].replace("T", " "),
            decimal(row["size_bytes"]) if "size_bytes" in row else "",
            ", ".join(filter(None, (row.get("quantization"), mark))),
            style="red" if row["problem"] else None,
        )
    wide_console().print(table)


# --- Copies of packages between registries, verified completely before they are visible ---


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
