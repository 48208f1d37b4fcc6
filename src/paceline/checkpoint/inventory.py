"""What a run has in checkpoints and backups: listed, verified, chosen for removal. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from paceline.checkpoint.manifest import MANIFEST, problems, read_manifest
from paceline.checkpoint.storage import (
    candidates,
    checkpoint_name,
    delete,
    parse_name,
    remove_stale,
    write_hint,
)
from paceline.errors import CheckpointError

OnRead = Callable[[int, int], None]
"""Is told, while files are read, how many bytes were read so far and how many there are."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint or backup.

    Attributes:
        name: of its directory; says step and version.
        path: its directory.
        step: optimizer steps done.
        version: the state version.
        epoch: epochs done; None where the manifest is damaged.
        best_version: the version of the best model then.
        size_bytes: of its files on disk.
        created: Unix time.
        in_backup: it is a backup.
        marks: "latest" (the newest), "best" (of the newest), "backup" (it is one), "backed up" (there is
            one of it), "damaged".
        problem: what is wrong with its manifest or the sizes of its files, where something is.
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


def entries(checkpoints: Path, backup: Path | None) -> list[Entry]:
    """All checkpoints of a run, oldest first, then its backups."""
    own = [_entry(path, in_backup=False) for path in reversed(candidates(checkpoints))]
    copies = [] if backup is None else [_entry(path, in_backup=True) for path in reversed(candidates(backup))]
    found = [*own, *copies]
    newest = max((e for e in found if e.problem is None), key=lambda e: e.version, default=None)
    backed_up = {e.name for e in copies if e.problem is None}

    def marks(entry: Entry) -> tuple[str, ...]:
        good = entry.problem is None
        given = {
            "latest": good and newest is not None and entry.version == newest.version,
            "best": good and newest is not None and entry.version == newest.best_version,
            "backup": entry.in_backup,
            "backed up": not entry.in_backup and entry.name in backed_up,
            "damaged": not good,
        }
        return tuple(mark for mark, holds in given.items() if holds)

    return [replace(entry, marks=marks(entry)) for entry in found]


def _entry(path: Path, *, in_backup: bool) -> Entry:
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
                found = (path / name).lstat().st_size
            except OSError:
                problem = f"{name} is missing"
                continue
            size += found
            if found != record.size:
                problem = f"{name} has {found} bytes, but its {MANIFEST} says {record.size}"
    except CheckpointError as error:
        problem = str(error.__cause__ or error)
    created = 0.0
    with suppress(OSError):
        created = path.stat().st_mtime
    return Entry(
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


def check(listed: Sequence[Entry], on_read: OnRead) -> list[tuple[Entry, list[str]]]:
    """Read every byte of these; each with all that is wrong with it."""
    total, done = sum(entry.size_bytes for entry in listed), 0

    def counted(size: int) -> None:
        nonlocal done
        done += size
        on_read(done, total)

    checked = []
    for entry in listed:
        found = problems(entry.path, counted)
        if not found and entry.problem is not None:
            found = [entry.problem]
        checked.append((entry, found))
    return checked


class Choice(NamedTuple):
    """What is removed, what is kept of the good ones, and which are damaged."""

    removed: list[Path]
    kept: list[Path]
    damaged: list[Path]


def choose(checkpoints: Path, keep: int, *, damaged: bool, on_read: OnRead) -> Choice:
    """Choose what to remove, after reading every byte.

    Args:
        checkpoints: the run's folder of them.
        keep: so many of the newest good ones stay, at least one; and the best of each that stays.
        damaged: remove damaged ones too; never where no good one is there.
        on_read: is told of the progress.
    """
    checked = check(entries(checkpoints, None), on_read)
    good = [entry for entry, found in reversed(checked) if not found]
    bad = [entry.path for entry, found in checked if found]
    best = {entry.best_version for entry in good[:keep]}
    kept = [entry.path for entry in good if entry in good[:keep] or entry.version in best]
    removed = [entry.path for entry in good if entry.path not in kept]
    if damaged and good:
        removed += bad
    return Choice(removed, kept, bad)


def remove(checkpoints: Path, chosen: Sequence[Path]) -> None:
    """Remove these, and what writers that are dead have left.

    Raises:
        CheckpointError: one cannot be removed.
    """
    for path in chosen:
        delete(path)
    write_hint(checkpoints)
    remove_stale(checkpoints)
