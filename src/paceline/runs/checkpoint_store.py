"""Checkpoints on disk: committed whole, found, chosen, listed and removed."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import CheckpointError, CheckpointWriteError, ConfigError, RunDirectoryWriteError
from paceline.core.files import fsync_directory
from paceline.runs.checkpoint_manifest import (
    MANIFEST,
    TEMPORARY,
    Buffer,
    CheckpointInfo,
    Manifest,
    chunks,
    open_verified,
    problems,
    read_manifest,
    remove,
    temporary_directory,
    verify,
    write_file,
)

# --- Checkpoints on disk: committed whole, never overwritten, found by checking ---
#
# A writer's files go into a hidden directory beside the checkpoints; renaming it is the commit. The
# order of the steps is what makes a power cut harmless: data, then manifest, then the directory
# (each fsynced), then the rename, then the parent. What is read is never in doubt: a directory either
# has its final name and everything in it, or is not looked at.


LATEST = "LATEST"

_NAME = re.compile(r"step-(\d{8,19})-v(\d{8,19})")
_DAMAGED = ".damaged-"


def checkpoint_name(info: CheckpointInfo) -> str:
    """The directory name of a checkpoint: ``step-00000050-v00000051``."""
    return f"step-{info.step:08d}-v{info.state_version:08d}"


def parse_name(name: str) -> tuple[int, int]:
    """Step and state_version of a checkpoint's name.

    Raises:
        ValueError: it is no checkpoint's name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no checkpoint's name")
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class Found:
    """What :func:`newest_verified` came back with.

    Attributes:
        path: the newest checkpoint that verifies, or None.
        manifest: its manifest, or None.
        skipped: for each newer one, why it cannot be used; newest first.
    """

    path: Path | None
    manifest: Manifest | None
    skipped: tuple[str, ...]


def newest_verified(directory: Path, excluding: Collection[str] = ()) -> Found:
    """Find the checkpoint of the highest state_version, every byte of which verifies.

    Those named in ``excluding`` are passed over: another rank could not read them.

    ``LATEST`` is not believed; where it names a checkpoint that is gone, ``skipped`` says so.
    """
    skipped = []
    hint = _read_hint(directory)
    named = scan(directory)
    if hint is not None and hint not in (path.name for path in named):
        skipped.append(f"{LATEST} names {hint}, which is not there")
    for path in named:
        if path.name in excluding:
            continue
        try:
            return Found(path, _verify_named(path), tuple(skipped))
        except CheckpointError as error:
            skipped.append(str(error))
    return Found(None, None, tuple(skipped))


def find_version(directory: Path, state_version: int) -> Path:
    """The checkpoint of one state version; not verified yet.

    Raises:
        CheckpointError: there is none.
    """
    for path in scan(directory):
        if path.name.endswith(f"-v{state_version:08d}"):
            return path
    raise CheckpointError(f"{directory} holds no checkpoint of state version {state_version}.")


def holds_version(directory: Path, state_version: int) -> bool:
    """Whether there is a checkpoint of this state version."""
    return any(path.name.endswith(f"-v{state_version:08d}") for path in scan(directory))


def commit(
    directory: Path,
    info: CheckpointInfo,
    contents: Iterable[tuple[str, Iterable[Buffer]]],
    before_manifest: Callable[[], None] | None = None,
) -> Path:
    """Write a checkpoint into ``directory``, whole or not at all, and return its path.

    Args:
        directory: where the checkpoints are; made where it is missing.
        info: what the checkpoint is of; its name follows from it.
        contents: each file's name and the buffers that make it up.
        before_manifest: called when the files are on disk and the manifest is not: what a
            checkpoint vouches for (the ledger) is made durable here.

    A checkpoint of this name that verifies is left as it is, because a state_version determines its
    bits; one that does not is moved aside.

    Raises:
        CheckpointWriteError: the disk is full, read-only or broken. What was there before is untouched.
    """
    target = directory / checkpoint_name(info)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if _is_good(target):
            if before_manifest is not None:
                before_manifest()
            fsync_directory(directory)  # it may have failed when the checkpoint got its name
            return target
        with temporary_directory(directory) as temporary:
            records = {name: write_file(temporary / name, buffers) for name, buffers in contents}
            if before_manifest is not None:
                before_manifest()
            write_file(temporary / MANIFEST, [Manifest(info, records).to_bytes()])
            fsync_directory(temporary)
            _publish(temporary, target)
        fsync_directory(directory)
    except (OSError, RunDirectoryWriteError) as error:
        raise CheckpointWriteError(
            f"cannot save the checkpoint of step {info.step} in {directory}: {_cause(error)}. "
            "Earlier checkpoints are untouched. Make room or make the directory writable."
        ) from error
    write_latest(directory)
    return target


def copy(source: Path, directory: Path) -> Path:
    """Copy a checkpoint into another directory, whole or not at all, and return the copy's path.

    The source may be deleted meanwhile. What the disk gives back of the copy is verified before the
    copy gets its name; a copy that is there and verifies is left as it is.

    Raises:
        CheckpointWriteError: the disk is full, read-only or broken, or gave back something else.
        CheckpointError: the source is damaged or gone.
    """
    target = directory / source.name
    with open_verified(source) as (manifest, files):
        if checkpoint_name(manifest.info) != source.name:
            raise CheckpointError(f"checkpoint {source} is that of {checkpoint_name(manifest.info)}.")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if _is_good(target):
                return target
            with temporary_directory(directory) as temporary:
                for name, file in files:
                    if write_file(temporary / name, chunks(file)) != manifest.files[name]:
                        raise CheckpointError(f"checkpoint {source} changed while it was copied: {name}.")
                write_file(temporary / MANIFEST, [manifest.to_bytes()])
                fsync_directory(temporary)
                try:
                    verify(temporary)
                except CheckpointError as error:
                    raise CheckpointWriteError(f"{directory} does not give back what it was given: {error}") from error
                _publish(temporary, target)
            fsync_directory(directory)
        except OSError as error:
            raise CheckpointWriteError(f"cannot copy {source.name} to {directory}: {_cause(error)}.") from error
    write_latest(directory)
    return target


def _cause(error: Exception) -> str:
    cause = error if isinstance(error, OSError) else error.__cause__
    return (cause.strerror if isinstance(cause, OSError) else None) or str(error)


def prune(directory: Path, keep: int, newest: Path) -> None:
    """Delete all checkpoints but ``newest``, the last ``keep``, and the best one of each of these.

    One whose manifest cannot be read is neither counted nor deleted.

    Raises:
        CheckpointError: a directory cannot be deleted.
    """
    readable: dict[Path, CheckpointInfo] = {}
    for path in scan(directory):
        with suppress(CheckpointError, OSError):
            readable[path] = _info_of(path, (path / MANIFEST).lstat().st_ctime_ns)
    kept = {*list(readable)[:keep], newest}
    best = {readable[path].best_version for path in kept if path in readable}
    for path, info in readable.items():
        if path not in kept and info.state_version not in best:
            delete(path)


@lru_cache(maxsize=256)
def _info_of(path: Path, changed_ns: int) -> CheckpointInfo:
    """A checkpoint does not change, so its manifest is read once, and again only if it was touched."""
    return read_manifest(path).info


def remove_stale(directory: Path) -> None:
    """Delete what writers that no longer live have left behind, as far as the disk allows.

    A writer holds a lock on its directory for as long as it lives, also when it is killed.
    """
    try:
        stale = [entry for entry in _entries(directory) if entry.name.startswith(TEMPORARY)]
    except OSError:
        return  # a save will say what is wrong
    for entry in stale:
        # Locked by a live writer, or just deleted by another clean-up: both are left alone.
        with suppress(OSError):
            if entry.is_symlink():  # a hint that was not put in place
                entry.unlink(missing_ok=True)
                continue
            descriptor = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(entry)
            finally:
                os.close(descriptor)


def scan(directory: Path) -> list[Path]:
    """The directories that are named like checkpoints, in ``directory``; the highest state_version first."""
    found = []
    for entry in _entries(directory):
        match = _NAME.fullmatch(entry.name)
        if match and entry.is_dir() and not entry.is_symlink():
            found.append((int(match[2]), int(match[1]), entry))
    return [path for _, _, path in sorted(found, reverse=True)]


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # a save will make it, or say what is in the way
        return []


def _verify_named(path: Path) -> Manifest:
    manifest = verify(path)
    if checkpoint_name(manifest.info) != path.name:
        raise CheckpointError(
            f"checkpoint {path} cannot be used: its manifest is that of {checkpoint_name(manifest.info)}. "
            "Give it that name back."
        )
    return manifest


def _is_good(target: Path) -> bool:
    try:
        return not target.is_symlink() and _verify_named(target) is not None
    except CheckpointError:
        return False


def _publish(temporary: Path, target: Path) -> None:
    """Give a finished directory its final name, unless a good one has it already."""
    while True:
        try:
            temporary.rename(target)
            return
        except OSError:
            # Somebody else's, committed since we looked; or what is left of a damaged one.
            if _is_good(target):
                return
            if not os.path.lexists(target):
                raise
        with suppress(FileNotFoundError):
            target.rename(target.with_name(f"{_DAMAGED}{target.name}-{secrets.token_hex(4)}"))


def delete(path: Path) -> None:
    """Delete a checkpoint so that half of one is never seen under its name.

    Raises:
        CheckpointError: it cannot be deleted.
    """
    doomed = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        path.rename(doomed)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"cannot delete the old checkpoint {path}: {error.strerror}") from error
    remove(doomed)


def write_latest(directory: Path) -> None:
    """Point the link ``LATEST`` at the newest checkpoint. Failure is no error: nothing relies on it.

    A link, because replacing a file by renaming makes ext4 write its data to the disk first. It is looked
    at again afterwards: another writer may have committed a newer one meanwhile.
    """
    temporary = directory / f"{TEMPORARY}{secrets.token_hex(8)}"
    with suppress(OSError):
        while (newest := scan(directory)[:1]) and _read_hint(directory) != newest[0].name:
            temporary.symlink_to(newest[0].name)
            temporary.replace(directory / LATEST)
    with suppress(OSError):
        temporary.unlink(missing_ok=True)


def _read_hint(directory: Path) -> str | None:
    try:
        name = os.readlink(directory / LATEST)
    except OSError:
        return None
    return name if _NAME.fullmatch(name) else None


# --- Which checkpoint of a run somebody means: its best, its last, or that of a step. No torch ---


_MOST_STEPS = 5
_log = logging.getLogger(__name__)


def select_checkpoint(directory: Path, which: str | None) -> Path:
    """The checkpoint in ``directory`` that is meant.

    Args:
        directory: a run's checkpoints.
        which: "best", the best model of the newest checkpoint that verifies; "last", the newest that
            verifies; or a number of steps. None: the best, or the last where nothing was validated.

    Returns:
        Its path; it is verified when it is loaded.

    Raises:
        ConfigError: ``which`` is none of these, there is no checkpoint of that step, or no best model.
        CheckpointError: there is none that verifies.
    """
    if which not in (None, "best", "last"):
        if not which.isdecimal():
            raise ConfigError(f"a checkpoint is best, last or a number of steps such as 500, not {which!r}.")
        return _of_step(directory, int(which))
    newest = newest_verified(directory)
    for reason in newest.skipped:
        _log.warning("passed over a checkpoint: %s", reason)
    if newest.path is None or newest.manifest is None:
        why = f": {newest.skipped[0]}" if newest.skipped else "."
        raise CheckpointError(f"{directory} holds no checkpoint that verifies{why}")
    best = newest.manifest.info.best_version
    if which == "last" or (which is None and best is None):
        return newest.path
    if best is None:
        raise ConfigError(f"{directory} knows no best model, since nothing was validated. Choose the last.")
    return find_version(directory, best)


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is named as a checkpoint is."""
    try:
        parse_name(path.name)
    except ValueError:
        return False
    return path.is_dir()


def _of_step(directory: Path, step: int) -> Path:
    there = {parse_name(path.name)[0]: path for path in reversed(scan(directory))}
    if step in there:
        return there[step]
    if not there:
        raise CheckpointError(f"{directory} holds no checkpoint.")
    near = ", ".join(map(str, sorted(sorted(there, key=lambda other: abs(other - step))[:_MOST_STEPS])))
    raise ConfigError(f"{directory} holds no checkpoint of step {step}. The nearest: {near}.")


# --- What a run has in checkpoints and backups: listed, verified, chosen for removal. No torch ---


OnRead = Callable[[int, int], None]
"""Is told, while files are read, how many bytes were read so far and how many there are."""


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry:
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


def entries(checkpoints: Path, backup: Path | None) -> list[CheckpointEntry]:
    """All checkpoints of a run, oldest first, then its backups."""
    own = [_entry(path, in_backup=False) for path in reversed(scan(checkpoints))]
    copies = [] if backup is None else [_entry(path, in_backup=True) for path in reversed(scan(backup))]
    found = [*own, *copies]
    newest = max((e for e in found if e.problem is None), key=lambda e: e.version, default=None)
    backed_up = {e.name for e in copies if e.problem is None}

    def marks(entry: CheckpointEntry) -> tuple[str, ...]:
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


def check(listed: Sequence[CheckpointEntry], on_read: OnRead) -> list[tuple[CheckpointEntry, list[str]]]:
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


def choose_removals(checkpoints: Path, keep: int, *, damaged: bool, on_read: OnRead) -> Choice:
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


def remove_checkpoints(checkpoints: Path, chosen: Sequence[Path]) -> None:
    """Remove these, and what writers that are dead have left.

    Raises:
        CheckpointError: one cannot be removed.
    """
    for path in chosen:
        delete(path)
    write_latest(checkpoints)
    remove_stale(checkpoints)
