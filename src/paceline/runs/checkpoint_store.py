"""Checkpoints on disk: committed atomically, never overwritten, verified before use.

A writer's files go into a hidden directory next to the checkpoints; renaming it is the commit. The order makes a power
cut harmless: data, then manifest, then the directory (each fsynced), then the rename, then the parent. A directory with
a final name is therefore complete.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from paceline.core.errors import CheckpointError, CheckpointWriteError, RunDirectoryWriteError
from paceline.core.files import FULL, fsync_directory, rename
from paceline.runs.checkpoint_manifest import (
    MANIFEST,
    TEMPORARY,
    WHOLE,
    Buffer,
    CheckpointInfo,
    FileRecord,
    Manifest,
    chunks,
    is_left,
    open_verified,
    read_manifest,
    remove,
    require_complete,
    temporary_directory,
    temporary_name,
    verify,
    write_file,
)

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
    *,
    format: int = WHOLE,
    draft: Path | None = None,
    collect: Callable[[], Mapping[str, FileRecord]] = dict,
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
        draft: the temporary directory in it, if others write there; the caller removes what is left.
        collect: waits for the files of others there, and returns them.

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
        with temporary_directory(directory) if draft is None else nullcontext(draft) as temporary:
            records = {name: write_file(temporary / name, buffers) for name, buffers in contents}
            records |= collect()
            if before_commit is not None:
                before_commit()
            own = write_file(temporary / MANIFEST, [Manifest(info, records, format).to_bytes()])
            fsync_directory(temporary)
            require_complete(temporary, {**records, MANIFEST: own})
            _publish(temporary, target)
        fsync_directory(directory)
    except (OSError, RunDirectoryWriteError) as error:
        number = getattr(error, "errno", None) or 0
        raise CheckpointWriteError(
            f"cannot save the checkpoint of step {info.step} in {directory}: {_cause(error)}. "
            f"Earlier checkpoints are untouched. {FULL.get(number, 'Free space or make the directory writable')}."
        ) from error
    write_latest(directory)
    return target


def copy(source: Path, directory: Path, **changed: Any) -> Path:
    """Copy a checkpoint into another directory atomically, and return the copy's path.

    The source may be deleted meanwhile. The copy is read back and verified before it gets its name; an existing copy
    that verifies is kept.

    Args:
        directory: the checkpoints' directory; created if missing.
        changed: fields of the copy's :class:`CheckpointInfo`, such as the id of the run that it belongs to.

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
                manifest = replace(manifest, info=replace(manifest.info, **changed))
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
        CheckpointError: a directory cannot be listed or deleted.
    """
    readable: dict[Path, CheckpointInfo] = {}
    try:
        found = scan(directory)
    except OSError as error:
        raise CheckpointError(f"older checkpoints in {directory} stay: {error.strerror}.") from error
    for path in found:
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
    """Delete the files of writers that have ended, as far as the disk allows."""
    try:
        stale = [directory / entry.name for entry in _entries(directory) if entry.name.startswith(TEMPORARY)]
    except OSError:
        return  # the next save reports the error
    for entry in stale:
        with suppress(OSError):  # another clean-up may delete it at the same time
            if is_left(entry):
                remove(entry)


def scan(directory: Path) -> list[Path]:
    """Return the directories named like checkpoints, the highest state_version first."""
    checkpoints = []
    for entry in _entries(directory):
        match = _NAME.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False):  # mostly known from the listing: no request to a server
            checkpoints.append((int(match[2]), int(match[1]), directory / entry.name))
    return [path for _, _, path in sorted(checkpoints, reverse=True)]


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
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
        return stat.S_ISDIR(target.lstat().st_mode) and _verify_named(target) is not None
    except (CheckpointError, FileNotFoundError):
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
    doomed = path.with_name(temporary_name())
    try:
        rename(path, doomed)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"cannot delete the old checkpoint {path}: {error.strerror}") from error
    remove(doomed)


def write_latest(directory: Path) -> None:
    """Point the link ``LATEST`` at the newest checkpoint; failures are ignored, because nothing relies on it.

    It is a link, because replacing a file by renaming makes ext4 flush its data first.
    """
    temporary = directory / temporary_name()
    try:
        for newest in scan(directory)[:1]:
            temporary.symlink_to(newest.name)
            temporary.replace(directory / LATEST)
    except OSError:
        remove(temporary)


def _read_hint(directory: Path) -> str | None:
    try:
        name = os.readlink(directory / LATEST)
    except OSError:
        return None
    return name if _NAME.fullmatch(name) else None
