"""A run's checkpoints and their backups, by their manifests. No torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.errors import CheckpointError
from paceline.runs.checkpoint_manifest import MANIFEST, read_manifest
from paceline.runs.checkpoint_store import checkpoint_name, parse_name, scan


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry:
    """One checkpoint or backup.

    Attributes:
        epoch: epochs done; None if the manifest is damaged.
        best_version: the version of the best model then.
        created: Unix time.
        marks: "latest" (the newest), "best" (of the newest), "backup" (it is one), "backed up" (it has one), "damaged".
        problem: the error in its manifest or the sizes of its files, if any.
    """

    name: str
    path: Path
    step: int
    version: int
    epoch: int | None
    best_version: int | None
    size_bytes: int
    created: float
    in_backup: bool
    marks: tuple[str, ...] = ()
    problem: str | None = None


def entries(checkpoints: Path, backup: Path | None) -> list[CheckpointEntry]:
    """Return all checkpoints of a run, oldest first, then its backups."""
    own = [_entry(path, in_backup=False) for path in reversed(scan(checkpoints))]
    copies = [] if backup is None else [_entry(path, in_backup=True) for path in reversed(scan(backup))]
    all_entries = [*own, *copies]
    newest = max((e for e in all_entries if e.problem is None), key=lambda e: e.version, default=None)
    backed_up = {e.name for e in copies if e.problem is None}

    def marks(entry: CheckpointEntry) -> tuple[str, ...]:
        good = entry.problem is None
        conditions = {
            "latest": good and newest is not None and entry.version == newest.version,
            "best": good and newest is not None and entry.version == newest.best_version,
            "backup": entry.in_backup,
            "backed up": not entry.in_backup and entry.name in backed_up,
            "damaged": not good,
        }
        return tuple(mark for mark, holds in conditions.items() if holds)

    return [replace(entry, marks=marks(entry)) for entry in all_entries]


def _entry(path: Path, *, in_backup: bool) -> CheckpointEntry:
    step, version = parse_name(path.name)
    epoch = best = problem = None
    size = 0
    try:
        manifest = read_manifest(path)
        epoch, best = manifest.info.epoch, manifest.info.best_version
        if checkpoint_name(manifest.info) != path.name:
            problem = f"its {MANIFEST} is that of {checkpoint_name(manifest.info)}"
        for name, record in manifest.files.items():
            try:
                actual_size = (path / name).lstat().st_size
            except OSError:
                problem = f"{name} is missing"
                continue
            size += actual_size
            if actual_size != record.size:
                problem = f"{name} has {actual_size} bytes, but its {MANIFEST} says {record.size}"
    except CheckpointError as error:
        problem = str(error.__cause__ or error)
    created = 0.0
    with suppress(OSError):
        created = path.stat().st_mtime
    return CheckpointEntry(
        name=path.name,
        path=path,
        step=step,
        version=version,
        epoch=epoch,
        best_version=best,
        size_bytes=size,
        created=created,
        in_backup=in_backup,
        problem=problem,
    )
