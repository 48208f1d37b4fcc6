"""``paceline registry``: list, compare, tag, copy and roll back packages."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from paceline.cli.byte_progress import byte_progress
from paceline.core.errors import PackageError

if TYPE_CHECKING:
    from paceline.runs.package_transfer import Transferred

app = App(name="registry", help="List, tag, copy and roll back packages.")

PackageName = Annotated[str, Parameter(help="NAME@TAG, NAME (tag latest), or a digest or the beginning of one.")]
Json = Annotated[bool, Parameter(negative="", help="Print one line of JSON.")]


@app.command
def ls(*, json: Json = False) -> int:
    """List the packages of the registry with their tags."""
    from paceline.runs.package import read_manifest, read_trusted
    from paceline.runs.package_registry import Registry

    registry = Registry.of_user()
    tags: dict[str, list[str]] = {}
    for reference, tag in registry.references().items():
        tags.setdefault(tag.digest, []).append(str(reference))
    rows = []
    known = read_trusted()
    for digest in registry.digests():
        row = {"digest": digest, "tags": tags.get(digest, []), "trusted": digest in known, "problem": None}
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

    Parameters
    ----------
    package
        The package's directory, NAME@TAG, NAME (tag latest), or a digest or the beginning of one.
    """
    from paceline.cli.export import as_json, print_package
    from paceline.runs.package import open_package, read_trusted

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

    Parameters
    ----------
    tag
        NAME@TAG, or TAG to use the package's own name.
    """
    from paceline.runs.package import open_package
    from paceline.runs.package_manifest import plain_name
    from paceline.runs.package_registry import PackageReference, Registry, parse_reference

    registry = Registry.of_user()
    opened = open_package(registry.path_of(registry.resolve(package)))
    reference = parse_reference(tag) if "@" in tag else PackageReference(opened.manifest.name, plain_name(tag, "a tag"))
    previous = registry.find(reference)
    registry.put_tag(reference, opened.digest)
    return _print_result(
        json,
        {"reference": str(reference), "digest": opened.digest, "before": previous and previous.digest},
        f"{reference} now points to {opened.digest}" + (f", previously {previous.digest}." if previous else "."),
    )


@app.command
def untag(reference: str, *, json: Json = False) -> int:
    """Remove a tag; keep its package.

    Parameters
    ----------
    reference
        NAME@TAG.
    """
    from paceline.runs.package_registry import Registry, parse_reference

    parsed = parse_reference(reference)
    previous = Registry.of_user().remove_tag(parsed)
    return _print_result(
        json,
        {"reference": str(parsed), "before": previous.digest},
        f"{parsed} was removed; it pointed to {previous.digest}.",
    )


@app.command
def rollback(reference: str, *, json: Json = False) -> int:
    """Point a tag back at its previous package.

    Parameters
    ----------
    reference
        NAME@TAG, or NAME (tag latest).
    """
    from paceline.runs.package_registry import Registry, parse_reference

    parsed = parse_reference(reference)
    previous, current = Registry.of_user().roll_back(parsed)
    return _print_result(
        json,
        {"reference": str(parsed), "digest": current.digest, "before": previous.digest},
        f"{parsed} points to {current.digest} again, previously {previous.digest}.",
    )


@app.command
def push(package: PackageName, to: Path, *, json: Json = False) -> int:
    """Copy a package and its tag into another registry.

    Parameters
    ----------
    to
        The other registry's directory; any static file server can serve it.
    """
    from paceline.runs.package_registry import Registry
    from paceline.runs.package_transfer import push as push_package

    with byte_progress("copying", quiet=json) as on_bytes:
        copied = push_package(package, to, Registry.of_user(), on_bytes)
    return _print_copied(json, copied, to)


@app.command
def pull(package: str, source: str, *, json: Json = False) -> int:
    """Copy a package and its tag from another registry, and verify it before it becomes visible.

    An interrupted pull continues where it stopped.

    Parameters
    ----------
    package
        NAME@TAG, NAME (tag latest), or a whole digest.
    source
        The other registry's directory, or its http(s) URL.
    """
    from paceline.runs.package_registry import Registry
    from paceline.runs.package_transfer import pull as pull_package

    registry = Registry.of_user()
    with byte_progress("copying", quiet=json) as on_bytes:
        copied = pull_package(package, source, registry, on_bytes)
    return _print_copied(json, copied, registry.path)


def _print_copied(json: bool, copied: Transferred, registry: Path) -> int:
    path = registry / "packages" / copied.digest
    name = copied.reference or copied.digest
    return _print_result(
        json,
        {
            "package": str(path),
            "digest": copied.digest,
            "reference": None if copied.reference is None else str(copied.reference),
            "fetched_bytes": copied.fetched_bytes,
        },
        f"{name} is in {path}; copied {copied.fetched_bytes:,} bytes.",
    )


def _print_result(json: bool, document: dict[str, object], text: str) -> int:
    print(json_module.dumps(document) if json else text)
    return 0


def _print_table(rows: list[dict[str, object]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    from paceline.cli.export import wide_console

    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("digest", no_wrap=True)
    table.add_column("name and tags", overflow="fold", min_width=16)
    table.add_column("programs", no_wrap=True)
    table.add_column("created", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        tags, formats, size = row["tags"], row.get("formats", []), row.get("size_bytes")
        assert isinstance(tags, list)
        assert isinstance(formats, list)
        marks = [str(row["quantization"])] if row.get("quantization") else []
        marks += ["damaged"] if row["problem"] else [] if row["trusted"] else ["not trusted"]
        cells = (
            str(row["digest"])[:12],
            "\n".join(tags) or str(row.get("name", "")),
            " ".join(kind for kind in formats if kind != "safetensors"),
            str(row.get("created", ""))[:16].replace("T", " "),
            decimal(size) if isinstance(size, int) else "",
            ", ".join(marks),
        )
        table.add_row(*map(Text, cells), style="red" if row["problem"] else None)
    wide_console().print(table)
