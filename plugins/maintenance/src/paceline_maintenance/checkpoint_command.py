"""``paceline checkpoint ls|verify|prune RUN``: a run's checkpoints and their backups."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import App, Parameter

from paceline.cli.progress import progress_bar
from paceline.core.errors import ConfigError, RunDirectoryError
from paceline.core.files import is_address
from paceline.runs.checkpoint_manifest import problems
from paceline.runs.checkpoint_store import delete, remove_stale, write_latest
from paceline.runs.directory import RunDirectory, backup_path
from paceline_pages.run_status import CheckpointEntry, checkpoint_entries

app = App(name="checkpoint", help="List, verify and remove a run's checkpoints.")

Run = Annotated[Path, Parameter(help="The run's directory.")]
BackupTo = Annotated[str | None, Parameter(help="Folder of the run's backups. Default: the one in run.toml.")]
Json = Annotated[bool, Parameter(negative="", help="Print one line of JSON.")]


@app.command
def ls(run: Run, *, backup_to: BackupTo = None, json: Json = False) -> int:
    """List the checkpoints of RUN and its backups, reading only their manifests."""
    directory, backup = _directories(run, backup_to)
    listed = checkpoint_entries(directory.checkpoints, backup)
    if json:
        print(json_module.dumps([_record(entry) for entry in listed]))
    elif not listed:
        print(f"{run} has no checkpoint yet.")
    else:
        _print_table(listed)
    return 0


@app.command
def verify(run: Run, *, backup_to: BackupTo = None, json: Json = False) -> int:
    """Read every byte of every checkpoint of RUN and its backups, and report all errors.

    The exit code is 0 only if there is a checkpoint and all of them verify.
    """
    directory, backup = _directories(run, backup_to)
    with progress_bar("verifying", quiet=json, in_bytes=True) as on_read:
        checked = check(checkpoint_entries(directory.checkpoints, backup), on_read)
    if json:
        print(json_module.dumps([{**_record(entry), "problems": messages} for entry, messages in checked]))
    else:
        for entry, messages in checked:
            where = "backup " if entry.in_backup else ""
            print(f"{where}{entry.name}: {'damaged' if messages else 'good'}")
            for message in messages:
                print(f"  {message}")
        damaged = sum(bool(messages) for _, messages in checked)
        print(f"{len(checked)} checkpoints, {damaged} damaged." if checked else f"{run} has no checkpoint.")
    return 0 if checked and not any(messages for _, messages in checked) else 1


@app.command
def prune(
    run: Run,
    *,
    keep: Annotated[
        int | None, Parameter(help="Number of newest intact checkpoints to keep. Default: the run's --keep.")
    ] = None,
    damaged: Annotated[bool, Parameter(negative="", help="Also remove damaged checkpoints.")] = False,
    dry_run: Annotated[bool, Parameter(negative="", help="Show what would be removed; remove nothing.")] = False,
    json: Json = False,
) -> int:
    """Verify all checkpoints of RUN and remove old ones; keep backups.

    Always keeps the newest intact checkpoint, and the best models of all that are kept. Keeps damaged
    checkpoints unless --damaged is given. Removes nothing if no checkpoint is intact. Needs the run's lock,
    so it fails while the run is active.
    """
    directory, _ = _directories(run, None)
    if keep is None:
        keep = int(directory.read_manifest()["config"].get("keep_checkpoints", 1))
    if keep < 1:
        raise ConfigError(f"--keep must be at least 1, but is {keep}.")
    lock = nullcontext() if dry_run else directory.locked()
    with lock, progress_bar("verifying", quiet=json, in_bytes=True) as on_read:
        removals = choose_removals(directory.checkpoints, keep, damaged=damaged, on_read=on_read)
        if not dry_run:
            for path in removals.removed:
                delete(path)
            write_latest(directory.checkpoints)
            remove_stale(directory.checkpoints)  # files of dead writers
    if json:
        names = {field: [path.name for path in paths] for field, paths in removals._asdict().items()}
        print(json_module.dumps({**names, "dry_run": dry_run}))
        return 0
    for path in removals.removed:
        print(f"{'would remove' if dry_run else 'removed'} {path.name}")
    print(f"{len(removals.removed)} {'to remove' if dry_run else 'removed'}, {len(removals.kept)} kept.")
    if removals.damaged and not removals.kept:
        print("No checkpoint is intact, so nothing was removed: the damaged ones may be all that is left of the run.")
    elif removals.damaged and not damaged:
        print(f"{len(removals.damaged)} damaged kept; --damaged removes them.")
    return 0


def _directories(run: Path, backup_to: str | None) -> tuple[RunDirectory, Path | None]:
    """Return the run's directory and its backup's."""
    directory = RunDirectory(run)
    manifest = directory.read_complete_manifest()
    location = backup_to or manifest["config"].get("backup_to")
    if location is None or is_address(location):  # `resume` verifies what is in an object store
        return directory, None
    backup = backup_path(location, manifest["id"])
    if backup_to is not None and not backup.is_dir():
        raise RunDirectoryError(f"{backup_to} holds no backup of {run}: there is no {backup}.")
    return directory, backup


def _record(entry: CheckpointEntry) -> dict[str, Any]:
    return {**asdict(entry), "path": str(entry.path), "marks": list(entry.marks)}


def _print_table(listed: list[CheckpointEntry]) -> None:
    from rich.filesize import decimal

    from paceline.core.output import Console, ListTable, short_time

    table = ListTable(">step", ">version", ">epoch", ">size", ">age", "", folds=("",))
    now = time.time()
    for entry in listed:
        table.add(
            str(entry.step),
            str(entry.version),
            "" if entry.epoch is None else str(entry.epoch),
            decimal(entry.size_bytes),
            short_time(max(0.0, now - entry.created)),
            ", ".join(entry.marks),
            style="red" if entry.problem else None,
        )
    console = Console(highlight=False)
    console.print(table)
    for entry in listed:
        if entry.problem:
            console.print(f"{entry.name}: {entry.problem}", style="red", markup=False, soft_wrap=True)


# --- Verification and removal ---


OnRead = Callable[[int, int], None]
"""Receives the progress of reading: bytes read so far, and bytes in total."""


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
        keep: number of newest intact ones to keep, at least one; the best of each of these stays too.
        damaged: remove damaged ones too, unless no intact one exists.
    """
    checked = check(checkpoint_entries(checkpoints, None), on_read)
    good = [entry for entry, messages in reversed(checked) if not messages]
    bad = [entry.path for entry, messages in checked if messages]
    best = {entry.best_version for entry in good[:keep]}
    kept = [entry.path for entry in good if entry in good[:keep] or entry.version in best]
    removed = [entry.path for entry in good if entry.path not in kept]
    if damaged and good:
        removed += bad
    return Choice(removed, kept, bad)
