"""Checkpoints on disk: committed atomically, selected, listed and removed."""

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

# --- Checkpoints on disk: committed atomically, never overwritten, verified before use ---
#
# A writer's files go into a hidden directory next to the checkpoints; renaming it is the commit. The
# order makes a power cut harmless: data, then manifest, then the directory (each fsynced), then the
# rename, then the parent. A directory with a final name is therefore complete.


LATEST = "LATEST"

_NAME = re.compile(r"step-(\d{8,19})-v(\d{8,19})")
_DAMAGED = ".damaged-"


def checkpoint_name(info: CheckpointInfo) -> str:
    """Return the directory name of a checkpoint: ``step-00000050-v00000051``."""
    return f"step-{info.step:08d}-v{info.state_version:08d}"


def parse_name(name: str) -> tuple[int, int]:
    """Parse step and state_version out of a checkpoint's name.

    Raises:
        ValueError: it is not a checkpoint's name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not a checkpoint's name")
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class Found:
    """The result of :func:`newest_verified`.

    Attributes:
        path: the newest checkpoint that verifies, or None.
        manifest: its manifest, or None.
        skipped: for each newer one, why it cannot be used; newest first.
    """

    path: Path | None
    manifest: Manifest | None
    skipped: tuple[str, ...]


def newest_verified(directory: Path, excluding: Collection[str] = ()) -> Found:
    """Find the checkpoint with the highest state_version that verifies completely.

    It skips names in ``excluding``, which another rank could not read. It does not rely on ``LATEST``; if that names a
    missing checkpoint, ``skipped`` says so.
    """
    skipped = []
    hint = _read_hint(directory)
    named = scan(directory)
    if hint is not None and hint not in (path.name for path in named):
        skipped.append(f"{LATEST} names {hint}, which does not exist")
    for path in named:
        if path.name in excluding:
            continue
        try:
            return Found(path, _verify_named(path), tuple(skipped))
        except CheckpointError as error:
            skipped.append(str(error))
    return Found(None, None, tuple(skipped))


def find_version(directory: Path, state_version: int) -> Path:
    """Return the checkpoint of a state version, unverified.

    Raises:
        CheckpointError: there is none.
    """
    for path in scan(directory):
        if path.name.endswith(f"-v{state_version:08d}"):
            return path
    raise CheckpointError(f"{directory} holds no checkpoint of state version {state_version}.")


def holds_version(directory: Path, state_version: int) -> bool:
    """Return whether there is a checkpoint of this state version."""
    return any(path.name.endswith(f"-v{state_version:08d}") for path in scan(directory))


def commit(
    directory: Path,
    info: CheckpointInfo,
    contents: Iterable[tuple[str, Iterable[Buffer]]],
    before_commit: Callable[[], None] | None = None,
) -> Path:
    """Write a checkpoint into ``directory`` atomically, and return its path.

    An existing checkpoint of this name that verifies is kept, because a state_version determines its bits; a damaged
    one is moved aside.

    Args:
        directory: the checkpoints' directory; created if missing.
        info: the description, which determines the name.
        contents: each file's name and buffers.
        before_commit: called when the files are on disk and the manifest is not, to make durable what the checkpoint
            relies on (the ledger).

    Raises:
        CheckpointWriteError: the disk is full, read-only or broken. Earlier files are untouched.
    """
    target = directory / checkpoint_name(info)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if _is_good(target):
            if before_commit is not None:
                before_commit()
            fsync_directory(directory)  # it may have failed after the rename
            return target
        with temporary_directory(directory) as temporary:
            records = {name: write_file(temporary / name, buffers) for name, buffers in contents}
            if before_commit is not None:
                before_commit()
            write_file(temporary / MANIFEST, [Manifest(info, records).to_bytes()])
            fsync_directory(temporary)
            _publish(temporary, target)
        fsync_directory(directory)
    except (OSError, RunDirectoryWriteError) as error:
        raise CheckpointWriteError(
            f"cannot save the checkpoint of step {info.step} in {directory}: {_cause(error)}. "
            "Earlier checkpoints are untouched. Free space or make the directory writable."
        ) from error
    write_latest(directory)
    return target


def copy(source: Path, directory: Path) -> Path:
    """Copy a checkpoint into another directory atomically, and return the copy's path.

    The source may be deleted meanwhile. The copy is read back and verified before it gets its name; an existing copy
    that verifies is kept.

    Raises:
        CheckpointWriteError: the disk is full, read-only or broken, or returned other bytes.
        CheckpointError: the source is damaged or gone.
    """
    target = directory / source.name
    with open_verified(source) as (manifest, files):
        if checkpoint_name(manifest.info) != source.name:
            raise CheckpointError(f"checkpoint {source} has the manifest of {checkpoint_name(manifest.info)}.")
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
                    raise CheckpointWriteError(
                        f"{directory} does not return the bytes that were written: {error}"
                    ) from error
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

    Checkpoints with an unreadable manifest are neither counted nor deleted.

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
    """Read a manifest once, and again only if its file was touched, because checkpoints do not change."""
    return read_manifest(path).info


def remove_stale(directory: Path) -> None:
    """Delete the files of dead writers, as far as the disk allows.

    A writer holds a lock on its directory until its process ends, even by a kill.
    """
    try:
        stale = [entry for entry in _entries(directory) if entry.name.startswith(TEMPORARY)]
    except OSError:
        return  # the next save reports the error
    for entry in stale:
        # Skip what a live writer has locked or another clean-up has just deleted.
        with suppress(OSError):
            if entry.is_symlink():  # an unused LATEST link
                entry.unlink(missing_ok=True)
                continue
            descriptor = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(entry)
            finally:
                os.close(descriptor)


def scan(directory: Path) -> list[Path]:
    """Return the directories named like checkpoints, the highest state_version first."""
    checkpoints = []
    for entry in _entries(directory):
        match = _NAME.fullmatch(entry.name)
        if match and entry.is_dir() and not entry.is_symlink():
            checkpoints.append((int(match[2]), int(match[1]), entry))
    return [path for _, _, path in sorted(checkpoints, reverse=True)]


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # the next save creates it or reports the error
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
    """Rename a finished directory to its final name, unless an intact checkpoint has it already."""
    while True:
        try:
            temporary.rename(target)
            return
        except OSError:
            # Another process committed it meanwhile, or a damaged one is in the way.
            if _is_good(target):
                return
            if not os.path.lexists(target):
                raise
        with suppress(FileNotFoundError):
            target.rename(target.with_name(f"{_DAMAGED}{target.name}-{secrets.token_hex(4)}"))


def delete(path: Path) -> None:
    """Delete a checkpoint so that a partial one is never visible under its name.

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
    """Point the link ``LATEST`` at the newest checkpoint; failures are ignored, because nothing relies on it.

    It is a link, because replacing a file by renaming makes ext4 flush its data first. The loop checks again
    afterwards, because another writer may have committed a newer one meanwhile.
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


# --- Selection of a checkpoint: the best, the last, or that of a step. No torch ---


_MOST_STEPS = 5
_log = logging.getLogger(__name__)


def select_checkpoint(directory: Path, which: str | None) -> Path:
    """Return the path of a checkpoint in ``directory``; loading verifies it.

    Args:
        directory: a run's checkpoints.
        which: "best", the best model according to the newest checkpoint that verifies; "last", the newest that
            verifies; or a number of steps. None: the best, or the last without validation.

    Raises:
        ConfigError: ``which`` is not one of these, there is no checkpoint of that step, or no best model.
        CheckpointError: no checkpoint verifies.
    """
    if which not in (None, "best", "last"):
        if not which.isdecimal():
            raise ConfigError(f"a checkpoint must be best, last or a number of steps such as 500, but is {which!r}.")
        return _of_step(directory, int(which))
    newest = newest_verified(directory)
    for reason in newest.skipped:
        _log.warning("skipped a checkpoint: %s", reason)
    if newest.path is None or newest.manifest is None:
        detail = f": {newest.skipped[0]}" if newest.skipped else "."
        raise CheckpointError(f"{directory} holds no checkpoint that verifies{detail}")
    best = newest.manifest.info.best_version
    if which == "last" or (which is None and best is None):
        return newest.path
    if best is None:
        raise ConfigError(f"{directory} has no best model, because the run was not validated. Choose last.")
    return find_version(directory, best)


def is_checkpoint(path: Path) -> bool:
    """Return whether a directory has a checkpoint's name."""
    try:
        parse_name(path.name)
    except ValueError:
        return False
    return path.is_dir()


def _of_step(directory: Path, step: int) -> Path:
    by_step = {parse_name(path.name)[0]: path for path in reversed(scan(directory))}
    if step in by_step:
        return by_step[step]
    if not by_step:
        raise CheckpointError(f"{directory} holds no checkpoint.")
    near = ", ".join(map(str, sorted(sorted(by_step, key=lambda other: abs(other - step))[:_MOST_STEPS])))
    raise ConfigError(f"{directory} holds no checkpoint of step {step}. The nearest: {near}.")


# --- Listing, verification and removal of checkpoints and backups. No torch ---


OnRead = Callable[[int, int], None]
"""Receives the progress of reading: bytes read so far, and bytes in total."""


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry:
    """One checkpoint or backup.

    Attributes:
        name: name of its directory, with step and version.
        path: its directory.
        step: optimizer steps done.
        version: the state version.
        epoch: epochs done; None if the manifest is damaged.
        best_version: the version of the best model then.
        size_bytes: size of its files on disk.
        created: Unix time.
        in_backup: whether it is a backup.
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


def check(listed: Sequence[CheckpointEntry], on_read: OnRead) -> list[tuple[CheckpointEntry, list[str]]]:
    """Read every byte of these checkpoints; return each with its errors."""
    total, done = sum(entry.size_bytes for entry in listed), 0

    def on_piece(size: int) -> None:
        nonlocal done
        done += size
        on_read(done, total)

    checked = []
    for entry in listed:
        messages = problems(entry.path, on_piece)
        if not messages and entry.problem is not None:
            messages = [entry.problem]
        checked.append((entry, messages))
    return checked


class Choice(NamedTuple):
    """The checkpoints to remove, the intact ones to keep, and the damaged ones."""

    removed: list[Path]
    kept: list[Path]
    damaged: list[Path]


def choose_removals(checkpoints: Path, keep: int, *, damaged: bool, on_read: OnRead) -> Choice:
    """Choose checkpoints to remove, after reading every byte.

    Args:
        checkpoints: the run's directory of checkpoints.
        keep: number of newest intact ones to keep, at least one; the best of each of these stays too.
        damaged: remove damaged ones too, unless no intact one exists.
        on_read: receives the progress.
    """
    checked = check(entries(checkpoints, None), on_read)
    good = [entry for entry, messages in reversed(checked) if not messages]
    bad = [entry.path for entry, messages in checked if messages]
    best = {entry.best_version for entry in good[:keep]}
    kept = [entry.path for entry in good if entry in good[:keep] or entry.version in best]
    removed = [entry.path for entry in good if entry.path not in kept]
    if damaged and good:
        removed += bad
    return Choice(removed, kept, bad)


def remove_checkpoints(checkpoints: Path, chosen: Sequence[Path]) -> None:
    """Remove these checkpoints, and files of dead writers.

    Raises:
        CheckpointError: one cannot be removed.
    """
    for path in chosen:
        delete(path)
    write_latest(checkpoints)
    remove_stale(checkpoints)
