"""Removing what was chosen: looked at once more, renamed, and only then deleted. No torch.

A crash leaves a directory under a name that nobody reads; the next removal deletes it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.checkpoint import inventory
from paceline.errors import CheckpointError, PackageError, RunDirectoryError, RunInUseError
from paceline.maintenance.items import Item, at_work
from paceline.packages.registry import Registry
from paceline.run_directory import RunDirectory, fsync_directory

_DOOMED = ".gc-"
_LEFT_BEHIND = re.compile(r"\.gc-[0-9a-f]{16}")

OnItem = Callable[[Item, str | None], None]
"""Is told of each item, and why it was left; None where it is gone."""


def remove_left_behind(parent: Path) -> None:
    """Delete what a removal that was killed had renamed already."""
    with suppress(OSError):
        for path in list(parent.iterdir()):
            if _LEFT_BEHIND.fullmatch(path.name) and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)


def remove(items: Sequence[Item], root: Path, registry: Registry, on_item: OnItem) -> None:
    """Remove runs, checkpoints and packages; what has changed since it was chosen stays.

    Args:
        items: what is to go.
        root: the folder of the runs.
        registry: the packages'.
        on_item: told of each.
    """
    for parent in (root, registry.packages):
        remove_left_behind(parent)
    for item in items:
        why = None
        try:
            if item.kind == "run":
                _remove_run(item)
            elif item.kind == "checkpoint":
                _remove_checkpoint(item)
            else:
                _remove_package(item, registry)
        except (RunDirectoryError, PackageError, CheckpointError) as error:
            why = str(error)
        except OSError as error:
            why = f"{error.strerror or error}"
        on_item(item, why)


def _remove_run(item: Item) -> None:
    directory = RunDirectory(item.path)
    if item.path.is_symlink() or not item.path.is_dir():
        raise RunDirectoryError("it is no directory any more")
    if at_work(directory):
        raise RunInUseError("it is at work")
    with directory.locked():
        if directory.events.exists() and directory.events.stat().st_mtime > item.time + 1:
            raise RunInUseError("it was at work meanwhile")
        doomed = _renamed(item.path)
    # Not before its lock's file is closed: an NFS keeps what is open, and with it the directory.
    _delete(doomed)


def _remove_checkpoint(item: Item) -> None:
    directory = RunDirectory(item.path.parent.parent)
    if item.path.parent.is_symlink():
        raise RunDirectoryError("its folder is a link now")
    if at_work(directory):
        raise RunInUseError("its run is at work")
    with directory.locked():
        inventory.remove(item.path.parent, [item.path])


def _remove_package(item: Item, registry: Registry) -> None:
    with registry.unchanging():
        tags = registry.all_tags()
        for reference, tag in tags.items():
            if item.identity in (tag.digest, *tag.earlier[:1]):
                raise PackageError(f"it is {reference} now")
        doomed = _renamed(item.path)
    _delete(doomed)


def _delete(doomed: Path) -> None:
    try:
        shutil.rmtree(doomed)
    except OSError as error:
        raise RunDirectoryError(f"it is {doomed} now, and cannot be deleted: {error.strerror}") from error


def _renamed(path: Path) -> Path:
    """Take a directory's name away, through its parent's descriptor: no link is followed."""
    doomed = path.with_name(f"{_DOOMED}{secrets.token_hex(8)}")
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.rename(path.name, doomed.name, src_dir_fd=parent, dst_dir_fd=parent)
    finally:
        os.close(parent)
    fsync_directory(path.parent)
    return doomed
