"""What there is to keep or remove: the runs of a folder and the packages of a registry. No torch."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.config import parse_best
from paceline.errors import ConfigError, PackageError, RunDirectoryError
from paceline.monitoring.heartbeat import read_beats
from paceline.monitoring.overview import run_directories, summarise
from paceline.packages.package import read_manifest
from paceline.packages.registry import Registry
from paceline.run_directory import RunDirectory

SILENT_S = 600.0
"""A rank on another machine that was heard of so long ago may still be at work; clocks differ."""

FRESH_S = 600.0
"""A package that is younger may be about to get its tag."""

Kind = Literal["run", "checkpoint", "package"]


@dataclass(frozen=True, kw_only=True)
class Item:
    """A run or a package.

    Attributes:
        kind: what it is.
        name: of the run's directory; of a package, its own and the start of its digest.
        path: its directory.
        group: among which it may be the best or one of the last: runs of a task, packages of a name.
        identity: the run's id, or the package's digest; "" where that is unknown.
        size_bytes: of its files, not of what links lead to.
        time: Unix time of the last sign of life.
        score: the higher, the better; None where that is unknown.
        criterion: what the score is of, such as "val accuracy:max": only scores of the same can be compared.
        parents: identities of what it came from: runs and packages.
        versions: run's id -> a state version of it that this one came from.
        kept_because: it may not be removed, whatever the policy says; None where it may.
    """

    kind: Kind
    name: str
    path: Path
    group: str
    identity: str
    size_bytes: int
    time: float
    score: float | None = None
    criterion: str = ""
    parents: frozenset[str] = frozenset()
    versions: tuple[tuple[str, int], ...] = ()
    kept_because: str | None = None


def runs_in(root: Path) -> list[Item]:
    """The runs directly in a folder, the newest first.

    Raises:
        RunDirectoryError: the folder cannot be read.
    """
    found = [_run(directory) for directory in run_directories(root)]
    return sorted(found, key=lambda item: (-item.time, item.name))


def _run(directory: RunDirectory) -> Item:
    path = directory.path
    if path.is_symlink():
        return Item(
            kind="run",
            name=path.name,
            path=path,
            group="",
            identity=_id_of(directory),
            size_bytes=0,
            time=time.time(),
            kept_because="a link",
        )
    summary = summarise(directory)
    manifest: Mapping[str, Any] = {}
    because = None
    try:
        manifest = directory.read_complete_manifest()
    except RunDirectoryError:
        because = "damaged"
    if summary.state == "damaged":
        because = "damaged"
    elif at_work(directory):
        because = "at work"
    parent = manifest.get("parent", {})
    if not isinstance(parent, dict):
        parent, because = {}, "damaged"
    parents = {str(parent[name]) for name in ("run", "package") if parent.get(name)}
    version = parent.get("version")
    split, metrics = _metrics_of(directory)
    score, criterion = _score(manifest.get("config", {}).get("best"), split, metrics)
    return Item(
        kind="run",
        name=path.name,
        path=path,
        group=summary.task or "",
        identity=str(manifest.get("id", "")),
        size_bytes=size_of(path),
        time=_last_sign(directory, summary.created),
        score=score,
        criterion=criterion,
        parents=frozenset(parents),
        versions=((str(parent["run"]), version),) if "run" in parent and isinstance(version, int) else (),
        kept_because=because,
    )


def at_work(directory: RunDirectory) -> bool:
    """Whether some process trains in it: on this machine by its lock, on others by their heartbeats."""
    if directory.is_running():
        return True
    now = time.time()
    return any(not beat.left and abs(now - beat.time) < SILENT_S for beat in read_beats(directory))


def packages_in(registry: Registry) -> list[Item]:
    """The packages of a registry, the newest first.

    Raises:
        PackageError: a tag cannot be read, so that nobody knows which package it means.
    """
    tags: dict[str, str] = {}
    for reference, tag in registry.all_tags().items():
        # What a roll-back would go to is kept too.
        for digest in tag.earlier[:1]:
            tags.setdefault(digest, f"what {reference} was before")
        tags[tag.digest] = str(reference)
    found = []
    for digest in registry.digests():
        with suppress(FileNotFoundError):  # another gc was faster
            found.append(_package(registry.path_of(digest), digest, tags))
    return sorted(found, key=lambda item: (-item.time, item.name))


def _package(path: Path, digest: str, tags: Mapping[str, str]) -> Item:
    short = digest[:12]
    written = path.lstat().st_mtime
    because = tags.get(digest)
    if path.is_symlink():
        because = "a link"
    elif because is None and time.time() - written < FRESH_S:
        because = "just made"
    name, group, score, criterion = short, "", None, ""
    parents: frozenset[str] = frozenset()
    versions: tuple[tuple[str, int], ...] = ()
    try:
        manifest, _ = read_manifest(path)
    except PackageError:
        because = because or "damaged"
    else:
        origin = manifest.provenance
        name, group = f"{manifest.name} {short}", manifest.name
        evaluation = origin.data.get("evaluation")
        best = evaluation.get("best") if isinstance(evaluation, dict) else None
        score, criterion = _score(best, str(origin.data.get("compared_split", "test")), manifest.metrics)
        parents = frozenset({origin.run})
        versions = ((origin.run, origin.state_version),)
    return Item(
        kind="package",
        name=name,
        path=path,
        group=group,
        identity=digest,
        size_bytes=0 if path.is_symlink() else size_of(path),
        time=written,
        score=score,
        criterion=criterion,
        parents=parents,
        versions=versions,
        kept_because=because,
    )


def size_of(path: Path) -> int:
    """Bytes of the files in a directory; links are not followed, and what goes meanwhile counts nothing."""
    total = 0
    with suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    total += size_of(Path(entry.path))
                else:
                    total += status.st_size
    return total


def _score(best: object, split: str, metrics: Mapping[str, Any]) -> tuple[float | None, str]:
    """The metric that ``--best`` names, or the loss, turned so that more is better; and which that is."""
    try:
        name, mode = parse_best(str(best)) if best else ("loss", "min")
    except ConfigError:
        return None, ""
    value = metrics.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return None, ""
    return -float(value) if mode == "min" else float(value), f"{split} {name}:{mode}"


def _metrics_of(directory: RunDirectory) -> tuple[str, Mapping[str, Any]]:
    """Of the validation split, by which models are chosen; of the test split where there is none."""
    try:
        metrics = (directory.read_result() or {}).get("metrics", {})
    except (RunDirectoryError, OSError, TypeError):
        return "", {}
    for split in ("val", "test"):
        if isinstance(metrics, dict) and isinstance(found := metrics.get(split), dict):
            return split, found
    return "", {}


def _last_sign(directory: RunDirectory, created: float | None) -> float:
    times = [created or 0.0]
    for path in (directory.events, directory.metrics, directory.result):
        with suppress(OSError):
            times.append(path.lstat().st_mtime)
    return max(times)


def _id_of(directory: RunDirectory) -> str:
    with suppress(RunDirectoryError):
        return str(directory.read_complete_manifest()["id"])
    return ""
