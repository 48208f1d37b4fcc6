"""Checkpoints on disk: committed whole, never overwritten, found by checking.

A writer's files go into a hidden directory beside the checkpoints; renaming it is the commit. The
order of the steps is what makes a power cut harmless: data, then manifest, then the directory
(each fsynced), then the rename, then the parent. What is read is never in doubt: a directory either
has its final name and everything in it, or is not looked at.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from paceline.checkpoint.files import TEMPORARY, Buffer, chunks, remove, temporary_directory, write_file
from paceline.checkpoint.manifest import (
    MANIFEST,
    CheckpointInfo,
    Manifest,
    open_verified,
    read_manifest,
    verify,
)
from paceline.errors import CheckpointError, NotSavedError, UnwritableError
from paceline.run_directory import fsync_directory

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
    named = candidates(directory)
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
    for path in candidates(directory):
        if path.name.endswith(f"-v{state_version:08d}"):
            return path
    raise CheckpointError(f"{directory} holds no checkpoint of state version {state_version}.")


def holds_version(directory: Path, state_version: int) -> bool:
    """Whether there is a checkpoint of this state version."""
    return any(path.name.endswith(f"-v{state_version:08d}") for path in candidates(directory))


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
        NotSavedError: the disk is full, read-only or broken. What was there before is untouched.
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
    except (OSError, UnwritableError) as error:
        raise NotSavedError(
            f"cannot save the checkpoint of step {info.step} in {directory}: {_cause(error)}. "
            "Earlier checkpoints are untouched. Make room or make the directory writable."
        ) from error
    write_hint(directory)
    return target


def copy(source: Path, directory: Path) -> Path:
    """Copy a checkpoint into another directory, whole or not at all, and return the copy's path.

    The source may be deleted meanwhile. What the disk gives back of the copy is verified before the
    copy gets its name; a copy that is there and verifies is left as it is.

    Raises:
        NotSavedError: the disk is full, read-only or broken, or gave back something else.
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
                    raise NotSavedError(
                        f"{directory} does not give back what it was given: {error}"
                    ) from error
                _publish(temporary, target)
            fsync_directory(directory)
        except OSError as error:
            raise NotSavedError(f"cannot copy {source.name} to {directory}: {_cause(error)}.") from error
    write_hint(directory)
    return target


def _cause(error: Exception) -> str:
    cause = error if isinstance(error, OSError) else error.__cause__
    return (cause.strerror if isinstance(cause, OSError) else None) or str(error)


def retain(directory: Path, keep: int, newest: Path) -> None:
    """Delete all checkpoints but ``newest``, the last ``keep``, and the best one of each of these.

    One whose manifest cannot be read is neither counted nor deleted.

    Raises:
        CheckpointError: a directory cannot be deleted.
    """
    readable: dict[Path, CheckpointInfo] = {}
    for path in candidates(directory):
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


def candidates(directory: Path) -> list[Path]:
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


def write_hint(directory: Path) -> None:
    """Point the link ``LATEST`` at the newest checkpoint. Failure is no error: nothing relies on it.

    A link, because replacing a file by renaming makes ext4 write its data to the disk first. It is looked
    at again afterwards: another writer may have committed a newer one meanwhile.
    """
    temporary = directory / f"{TEMPORARY}{secrets.token_hex(8)}"
    with suppress(OSError):
        while (newest := candidates(directory)[:1]) and _read_hint(directory) != newest[0].name:
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
