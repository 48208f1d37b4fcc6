"""Retention policies for runs, checkpoints and packages, and their removal from disk."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.core.errors import CheckpointError, ConfigError, PackageError, RunDirectoryError, RunInUseError
from paceline.core.files import fsync_directory, remove_directory, rename
from paceline.core.options import parse_best
from paceline.runs import checkpoint_admin
from paceline.runs.checkpoint_admin import OnRead, choose_removals
from paceline.runs.checkpoint_store import parse_name, scan
from paceline.runs.directory import RunDirectory
from paceline.runs.package import read_manifest
from paceline.runs.package_registry import Registry
from paceline.runs.status import run_directories, summarise

# --- Inventory: the runs of a folder and the packages of a registry ---


FRESH_S = 600.0
"""A younger package may be about to get its tag."""

Kind = Literal["run", "checkpoint", "package"]


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A run, a checkpoint or a package.

    Attributes:
        kind: of the artifact.
        name: of the run's directory; for a package, its name and the start of its digest.
        path: its directory.
        group: runs of a task or packages of a name, among which it may be the best or one of the newest.
        identity: the run's id, or the package's digest; "" if unknown.
        size_bytes: of its files, without the targets of links.
        time: Unix time of the last sign of life.
        score: higher is better; None if unknown.
        criterion: of the score, such as "val accuracy:max"; only equal criteria can be compared.
        parents: identities of its sources: runs and packages.
        versions: run's id -> the state version of that run from which this artifact came.
        kept_because: a reason to keep it whatever the policy says; None if it may be removed.
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


def runs_in(root: Path) -> list[Artifact]:
    """Return the runs directly in a folder, newest first.

    Raises:
        RunDirectoryError: the folder cannot be read.
    """
    found = [_run(directory) for directory in run_directories(root)]
    return sorted(found, key=lambda item: (-item.time, item.name))


def _run(directory: RunDirectory) -> Artifact:
    path = directory.path
    if path.is_symlink():
        return Artifact(
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
    kept_because = None
    try:
        manifest = directory.read_complete_manifest()
    except RunDirectoryError:
        kept_because = "damaged"
    if summary.state == "damaged":
        kept_because = "damaged"
    elif directory.is_running():
        kept_because = "active"
    parent = manifest.get("parent", {})
    if not isinstance(parent, dict):
        parent, kept_because = {}, "damaged"
    parents = {str(parent[name]) for name in ("run", "package") if parent.get(name)}
    version = parent.get("version")
    split, metrics = _metrics_of(directory)
    score, criterion = _score(manifest.get("config", {}).get("best_metric"), split, metrics)
    return Artifact(
        kind="run",
        name=path.name,
        path=path,
        group=summary.task or "",
        identity=str(manifest.get("id", "")),
        size_bytes=size_of(path),
        time=_last_activity(directory, summary.created),
        score=score,
        criterion=criterion,
        parents=frozenset(parents),
        versions=((str(parent["run"]), version),) if "run" in parent and isinstance(version, int) else (),
        kept_because=kept_because,
    )


def packages_in(registry: Registry) -> list[Artifact]:
    """Return the packages of a registry, newest first.

    Raises:
        PackageError: a tag cannot be read, so its package is unknown.
    """
    tags: dict[str, str] = {}
    for reference, tag in registry.all_tags().items():
        # Also keep the package that a roll-back would restore.
        for digest in tag.earlier[:1]:
            tags.setdefault(digest, f"previous package of {reference}")
        tags[tag.digest] = str(reference)
    found = []
    for digest in registry.digests():
        with suppress(FileNotFoundError):  # removed by another gc meanwhile
            found.append(_package(registry.path_of(digest), digest, tags))
    return sorted(found, key=lambda item: (-item.time, item.name))


def _package(path: Path, digest: str, tags: Mapping[str, str]) -> Artifact:
    short = digest[:12]
    written = path.lstat().st_mtime
    kept_because = tags.get(digest)
    if path.is_symlink():
        kept_because = "a link"
    elif kept_because is None and time.time() - written < FRESH_S:
        kept_because = "just created"
    name, group, score, criterion = short, "", None, ""
    parents: frozenset[str] = frozenset()
    versions: tuple[tuple[str, int], ...] = ()
    try:
        manifest, _ = read_manifest(path)
    except PackageError:
        kept_because = kept_because or "damaged"
    else:
        origin = manifest.provenance
        name, group = f"{manifest.name} {short}", manifest.name
        evaluation = origin.data.get("evaluation")
        best = evaluation.get("best_metric") if isinstance(evaluation, dict) else None
        score, criterion = _score(best, str(origin.data.get("compared_split", "test")), manifest.metrics)
        parents = frozenset({origin.run})
        versions = ((origin.run, origin.state_version),)
    return Artifact(
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
        kept_because=kept_because,
    )


def size_of(path: Path) -> int:
    """Return the bytes of the files in a directory, without following links; files that vanish count zero."""
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
    """Return the ``--best-metric`` or the loss, negated if lower is better, and its criterion."""
    try:
        name, mode = parse_best(str(best)) if best else ("loss", "min")
    except ConfigError:
        return None, ""
    value = metrics.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return None, ""
    return -float(value) if mode == "min" else float(value), f"{split} {name}:{mode}"


def _metrics_of(directory: RunDirectory) -> tuple[str, Mapping[str, Any]]:
    """Return the metrics of the validation split, by which models are selected, or else of the test split."""
    try:
        metrics = (directory.read_result() or {}).get("metrics", {})
    except (RunDirectoryError, OSError, TypeError):
        return "", {}
    for split in ("val", "test"):
        if isinstance(metrics, dict) and isinstance(split_metrics := metrics.get(split), dict):
            return split, split_metrics
    return "", {}


def _last_activity(directory: RunDirectory, created: float | None) -> float:
    times = [created or 0.0]
    for path in (*directory.event_files(), directory.metrics, directory.result):
        with suppress(OSError):
            times.append(path.lstat().st_mtime)
    return max(times)


def _id_of(directory: RunDirectory) -> str:
    with suppress(RunDirectoryError):
        return str(directory.read_complete_manifest()["id"])
    return ""


# --- Policy: the artifacts to keep, with reasons. Pure functions of the inventory ---


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The rules for what to keep.

    Attributes:
        keep_last: keep this many of the newest runs of each task, packages of each name and checkpoints of
            each run; None: do not keep any for being new.
        older_than_s: keep what is younger; None: do not keep any for their age.
        keep_best: keep the best run of each task and package of each name, by each criterion.

    Raises:
        ConfigError: the policy is empty, or a number is not possible.
    """

    keep_last: int | None = None
    older_than_s: float | None = None
    keep_best: bool = False

    def __post_init__(self) -> None:
        if self.keep_last is None and self.older_than_s is None:
            raise ConfigError(
                "the policy is empty: --keep-last N keeps the N newest of each kind, --older-than 30d keeps "
                "what is younger; both together keep what either keeps."
            )
        if self.keep_last is not None and self.keep_last < 1:
            raise ConfigError(f"--keep-last must be at least 1, but is {self.keep_last}.")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision about an item.

    Attributes:
        item: the item.
        reason: to keep it; None to remove it.
    """

    item: Artifact
    reason: str | None


def decide(items: Sequence[Artifact], policy: Policy, now: float | None = None) -> list[Decision]:
    """Decide which runs and packages to keep.

    Args:
        items: runs and packages together, since one may be the source of the other.
        policy: the policy.
        now: Unix time.
    """
    now = time.time() if now is None else now
    reasons: dict[Path, str] = {}
    groups: dict[tuple[str, str], list[Artifact]] = defaultdict(list)
    for item in items:
        if item.kept_because is not None:
            reasons[item.path] = item.kept_because
        groups[item.kind, item.group].append(item)
    for members in groups.values():
        _apply_policy(members, policy, now, reasons)
    _keep_parents(items, reasons)
    return [Decision(item=item, reason=reasons.get(item.path)) for item in items]


def _apply_policy(members: Sequence[Artifact], policy: Policy, now: float, reasons: dict[Path, str]) -> None:
    newest = sorted(members, key=lambda item: (-item.time, item.name))
    if policy.keep_last is not None:
        for item in newest[: policy.keep_last]:
            reasons.setdefault(item.path, "the newest" if policy.keep_last == 1 else "one of the newest")
    if policy.older_than_s is not None:
        for item in members:
            if now - item.time < policy.older_than_s:
                reasons.setdefault(item.path, "too young")
    if policy.keep_best:
        best: dict[str, tuple[float, Artifact]] = {}
        for item in newest:
            known = best.get(item.criterion)
            if item.score is not None and (known is None or item.score > known[0]):
                best[item.criterion] = item.score, item
        for criterion, (_, item) in best.items():
            reasons.setdefault(item.path, f"the best by {criterion}")


def _keep_parents(items: Sequence[Artifact], reasons: dict[Path, str]) -> None:
    """Keep the sources of every kept item, recursively."""
    by_identity: dict[str, list[Artifact]] = defaultdict(list)  # copies of a directory have the same identity
    for item in items:
        by_identity[item.identity].append(item)
    pending = [item for item in items if item.path in reasons]
    while pending:
        child = pending.pop()
        for identity in sorted(child.parents):
            for parent in by_identity.get(identity, []):
                if parent.path not in reasons:
                    reasons[parent.path] = f"parent of {child.name}"
                    pending.append(parent)


def checkpoints_to_remove(
    run: Artifact,
    policy: Policy,
    kept: Iterable[Artifact],
    on_read: OnRead,
    now: float | None = None,
) -> tuple[list[Artifact], list[str]]:
    """Choose the checkpoints to remove from a run that is kept, as ``paceline checkpoint prune`` does.

    Args:
        run: an inactive run.
        policy: with ``keep_last`` None, the run's own ``--keep-checkpoints`` counts.
        kept: all kept items, whose source checkpoints are kept too.
        on_read: called with the number of verified bytes.
        now: Unix time.

    Returns:
        The checkpoints, oldest first, and the names of damaged ones, which are kept.
    """
    now = time.time() if now is None else now
    directory = RunDirectory(run.path)
    if directory.checkpoints.is_symlink():
        return [], []
    keep = policy.keep_last
    if keep is None:
        keep = int(directory.read_complete_manifest()["config"].get("keep_checkpoints", 1))
    try:
        number = len(scan(directory.checkpoints))
    except PermissionError:  # owned by another user
        return [], []
    if number <= keep:
        return [], []
    choice = choose_removals(directory.checkpoints, max(1, keep), damaged=False, on_read=on_read)
    source_versions = {version for item in kept for identity, version in item.versions if identity == run.identity}
    found = []
    for path in reversed(choice.removed):
        written = path.lstat().st_mtime
        is_young = policy.older_than_s is not None and now - written < policy.older_than_s
        if not is_young and parse_name(path.name)[1] not in source_versions:
            found.append(
                Artifact(
                    kind="checkpoint",
                    name=f"{run.name}/{path.name}",
                    path=path,
                    group=run.name,
                    identity="",
                    size_bytes=size_of(path),
                    time=written,
                )
            )
    return found, [path.name for path in choice.damaged]


# --- Removal: check each item again, rename it, and only then delete it ---
#
# A crash leaves a directory under a name that is never read; the next removal deletes it.


_DOOMED_PREFIX = ".gc-"
_DOOMED_NAME = re.compile(r"\.gc-[0-9a-f]{16}")

OnItem = Callable[[Artifact, str | None], None]
"""Called with each item and the reason why it could not be removed; None if it was removed."""


def delete_leftovers(parent: Path) -> None:
    """Delete directories that a killed removal had already renamed."""
    with suppress(OSError):
        for path in list(parent.iterdir()):
            if _DOOMED_NAME.fullmatch(path.name) and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)


def remove(items: Sequence[Artifact], root: Path, registry: Registry, on_item: OnItem) -> None:
    """Remove runs, checkpoints and packages, except those that changed since they were chosen.

    Args:
        items: to remove.
        root: folder of the runs.
        registry: of the packages.
        on_item: called with each item.
    """
    for parent in (root, registry.packages):
        delete_leftovers(parent)
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


def _remove_run(item: Artifact) -> None:
    directory = RunDirectory(item.path)
    if item.path.is_symlink() or not item.path.is_dir():
        raise RunDirectoryError("it is not a directory any more")
    if directory.is_running():
        raise RunInUseError("it is active")
    with directory.locked():
        if _last_activity(directory, None) > item.time + 1:
            raise RunInUseError("it was active meanwhile")
        doomed = _rename_doomed(item.path)
    # Only after the lock's file is closed: NFS keeps open files, and with them the directory.
    _delete(doomed)


def _remove_checkpoint(item: Artifact) -> None:
    directory = RunDirectory(item.path.parent.parent)
    if item.path.parent.is_symlink():
        raise RunDirectoryError("its folder has become a link")
    if directory.is_running():
        raise RunInUseError("its run is active")
    with directory.locked():
        checkpoint_admin.remove_checkpoints(item.path.parent, [item.path])


def _remove_package(item: Artifact, registry: Registry) -> None:
    with registry.unchanging():
        tags = registry.all_tags()
        for reference, tag in tags.items():
            if item.identity in (tag.digest, *tag.earlier[:1]):
                raise PackageError(f"it is now {reference}")
        doomed = _rename_doomed(item.path)
    _delete(doomed)


def _delete(doomed: Path) -> None:
    try:
        remove_directory(doomed)
    except OSError as error:
        raise RunDirectoryError(f"it was renamed to {doomed}, but cannot be deleted: {error.strerror}") from error


def _rename_doomed(path: Path) -> Path:
    """Rename a directory through its parent's descriptor, so that no link is followed."""
    doomed = path.with_name(f"{_DOOMED_PREFIX}{secrets.token_hex(8)}")
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        rename(path.name, doomed.name, directory=parent)
    finally:
        os.close(parent)
    fsync_directory(path.parent)
    return doomed
