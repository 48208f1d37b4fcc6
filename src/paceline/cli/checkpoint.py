"""``paceline checkpoint ls|verify|prune RUN``: a run's checkpoints and their backups."""

from __future__ import annotations

import json as json_module
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from paceline.cli.byte_progress import byte_progress
from paceline.core.errors import ConfigError, RunDirectoryError
from paceline.runs import checkpoint_store
from paceline.runs.directory import RunDirectory, backup_path

if TYPE_CHECKING:
    from paceline.runs.checkpoint_store import CheckpointEntry

app = App(name="checkpoint", help="List, verify and remove a run's checkpoints.")

Run = Annotated[Path, Parameter(help="The run's directory.")]
BackupTo = Annotated[str | None, Parameter(help="Folder of its backups. Default: the one in run.toml.")]
Json = Annotated[bool, Parameter(negative="", help="Print one line of JSON.")]


@app.command
def ls(run: Run, *, backup_to: BackupTo = None, json: Json = False) -> int:
    """List the checkpoints of RUN and its backups; only their manifests are read."""
    directory, backup = _places(run, backup_to)
    entries = checkpoint_store.entries(directory.checkpoints, backup)
    if json:
        print(json_module.dumps([_record(entry) for entry in entries]))
    elif not entries:
        print(f"{run} has no checkpoint yet.")
    else:
        _print_table(entries)
    return 0


@app.command
def verify(run: Run, *, backup_to: BackupTo = None, json: Json = False) -> int:
    """Read every byte of every checkpoint of RUN and of its backups, and name all that is wrong.

    The exit code is 0 only where all of them verify and there is at least one.
    """
    directory, backup = _places(run, backup_to)
    with byte_progress("verifying", quiet=json) as on_read:
        checked = checkpoint_store.check(checkpoint_store.entries(directory.checkpoints, backup), on_read)
    if json:
        print(json_module.dumps([{**_record(entry), "problems": problems} for entry, problems in checked]))
    else:
        for entry, problems in checked:
            where = "backup " if entry.in_backup else ""
            print(f"{where}{entry.name}: {'damaged' if problems else 'good'}")
            for problem in problems:
                print(f"  {problem}")
        damaged = sum(bool(problems) for _, problems in checked)
        print(f"{len(checked)} checkpoints, {damaged} damaged." if checked else f"{run} has no checkpoint.")
    return 0 if checked and not any(problems for _, problems in checked) else 1


@app.command
def prune(
    run: Run,
    *,
    keep: Annotated[
        int | None, Parameter(help="Keep this many of the newest good ones. Default: the run's --keep.")
    ] = None,
    damaged: Annotated[bool, Parameter(negative="", help="Remove damaged ones too.")] = False,
    dry_run: Annotated[bool, Parameter(negative="", help="Say what would be removed; remove nothing.")] = False,
    json: Json = False,
) -> int:
    """Remove old checkpoints of RUN; backups stay. All are verified first.

    The newest good one stays whatever is asked for, and so do those of the best models of all that stay.
    Damaged ones stay too, unless --damaged is given; where no good one is left, nothing is removed. It
    holds the run's lock, as training does, so it is refused while the run is at work.
    """
    directory, _ = _places(run, None)
    if keep is None:
        keep = int(directory.read_manifest()["config"].get("keep_checkpoints", 1))
    if keep < 1:
        raise ConfigError(f"--keep must be at least 1, but is {keep}.")
    if dry_run:
        with byte_progress("verifying", quiet=json) as on_read:
            chosen = checkpoint_store.choose_removals(directory.checkpoints, keep, damaged=damaged, on_read=on_read)
    else:
        with directory.locked(), byte_progress("verifying", quiet=json) as on_read:
            chosen = checkpoint_store.choose_removals(directory.checkpoints, keep, damaged=damaged, on_read=on_read)
            checkpoint_store.remove_checkpoints(directory.checkpoints, chosen.removed)
    if json:
        names = {field: [path.name for path in paths] for field, paths in chosen._asdict().items()}
        print(json_module.dumps({**names, "dry_run": dry_run}))
        return 0
    for path in chosen.removed:
        print(f"{'would remove' if dry_run else 'removed'} {path.name}")
    print(f"{len(chosen.removed)} {'to remove' if dry_run else 'removed'}, {len(chosen.kept)} kept.")
    if chosen.damaged and not chosen.kept:
        print("None is good, so nothing was removed: what is damaged may be all that is left of the run.")
    elif chosen.damaged and not damaged:
        print(f"{len(chosen.damaged)} damaged ones stay; --damaged removes them.")
    return 0


def _places(run: Path, backup_to: str | None) -> tuple[RunDirectory, Path | None]:
    """The run's directory and its backups'."""
    directory = RunDirectory(run)
    manifest = directory.read_complete_manifest()
    recorded = manifest["config"].get("backup_to")
    backup = backup_path(backup_to or recorded, manifest["id"])
    if backup_to is not None and backup is not None and not backup.is_dir():
        raise RunDirectoryError(f"{backup_to} holds no backup of {run}: there is no {backup}.")
    return directory, backup


def _record(entry: CheckpointEntry) -> dict[str, Any]:
    return {**asdict(entry), "path": str(entry.path), "marks": list(entry.marks)}


def _print_table(entries: list[CheckpointEntry]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    from paceline.cli.runs import short_time

    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in ("step", "version", "epoch", "size", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    now = time.time()
    for entry in entries:
        table.add_row(
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
    for entry in entries:
        if entry.problem:
            console.print(f"{entry.name}: {entry.problem}", style="red", markup=False, soft_wrap=True)
