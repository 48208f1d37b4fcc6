"""What may be removed from disk, and its removal."""

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
from paceline.core.files import fsync_directory
from paceline.core.options import parse_best
from paceline.runs import checkpoint_store
from paceline.runs.checkpoint_store import OnRead, choose_removals, parse_name, scan
from paceline.runs.directory import RunDirectory
from paceline.runs.package import read_manifest
from paceline.runs.package_registry import Registry
from paceline.runs.status import read_beats, run_directories, summarise

# --- What there is to keep or remove: the runs of a folder and the packages of a registry. No torch ---


SILENT_S = 600.0
"""A rank on another machine that was heard of so long ago may still be at work; clocks differ."""

FRESH_S = 600.0
"""A package that is younger may be about to get its tag."""

Kind = Literal["run", "checkpoint", "package"]


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A run or a package.

    Attributes:
        kind: what it is.
        name: of the run's directory; of a package, its own and the start of its digest.
        path: its directory.
        group: among which it may be the best or one of the last: runs of a task, packages of a name.
        identity: the run's id, or the package's digest; "" where that is unknown.
        size_bytes: of its files, not of what links lead to.
        time: Unix time of the last sign of life.
        score: the higher, the better; None where that is unknown.
        criterion: what the score is of, such as "val accuracy:max": only scores of the same can be compared.
        parents: identities of what it came from: runs and packages.
        versions: run's id -> a state version of it that this one came from.
        kept_because: it may not be removed, whatever the policy says; None where it may.
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
    """The runs directly in a folder, the newest first.

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
    because = None
    try:
        manifest = directory.read_complete_manifest()
    except RunDirectoryError:
        because = "damaged"
    if summary.state == "damaged":
        because = "damaged"
    elif is_active(directory):
        because = "at work"
    parent = manifest.get("parent", {})
    if not isinstance(parent, dict):
        parent, because = {}, "damaged"
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
        time=_last_sign(directory, summary.created),
        score=score,
        criterion=criterion,
        parents=frozenset(parents),
        versions=((str(parent["run"]), version),) if "run" in parent and isinstance(version, int) else (),
        kept_because=because,
    )


def is_active(directory: RunDirectory) -> bool:
    """Whether some process trains in it: on this machine by its lock, on others by their heartbeats."""
    if directory.is_running():
        return True
    now = time.time()
    return any(not beat.left and abs(now - beat.time) < SILENT_S for beat in read_beats(directory))


def packages_in(registry: Registry) -> list[Artifact]:
    """The packages of a registry, the newest first.

    Raises:
        PackageError: a tag cannot be read, so that nobody knows which package it means.
    """
    tags: dict[str, str] = {}
    for reference, tag in registry.all_tags().items():
        # What a roll-back would go to is kept too.
        for digest in tag.earlier[:1]:
            tags.setdefault(digest, f"what {reference} was before")
        tags[tag.digest] = str(reference)
    found = []
    for digest in registry.digests():
        with suppress(FileNotFoundError):  # another gc was faster
            found.append(_package(registry.path_of(digest), digest, tags))
    return sorted(found, key=lambda item: (-item.time, item.name))


def _package(path: Path, digest: str, tags: Mapping[str, str]) -> Artifact:
    short = digest[:12]
    written = path.lstat().st_mtime
    because = tags.get(digest)
    if path.is_symlink():
        because = "a link"
    elif because is None and time.time() - written < FRESH_S:
        because = "just made"
    name, group, score, criterion = short, "", None, ""
    parents: frozenset[str] = frozenset()
    versions: tuple[tuple[str, int], ...] = ()
    try:
        manifest, _ = read_manifest(path)
    except PackageError:
        because = because or "damaged"
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
        kept_because=because,
    )


def size_of(path: Path) -> int:
    """Bytes of the files in a directory; links are not followed, and what goes meanwhile counts nothing."""
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
    """The metric that ``--best-metric`` names, or the loss, turned so that more is better; and which that is."""
    try:
        name, mode = parse_best(str(best)) if best else ("loss", "min")
    except ConfigError:
        return None, ""
    value = metrics.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return None, ""
    return -float(value) if mode == "min" else float(value), f"{split} {name}:{mode}"


def _metrics_of(directory: RunDirectory) -> tuple[str, Mapping[str, Any]]:
    """Of the validation split, by which models are chosen; of the test split where there is none."""
    try:
        metrics = (directory.read_result() or {}).get("metrics", {})
    except (RunDirectoryError, OSError, TypeError):
        return "", {}
    for split in ("val", "test"):
        if isinstance(metrics, dict) and isinstance(found := metrics.get(split), dict):
            return split, found
    return "", {}


def _last_sign(directory: RunDirectory, created: float | None) -> float:
    times = [created or 0.0]
    for path in (directory.events, directory.metrics, directory.result):
        with suppress(OSError):
            times.append(path.lstat().st_mtime)
    return max(times)


def _id_of(directory: RunDirectory) -> str:
    with suppress(RunDirectoryError):
        return str(directory.read_complete_manifest()["id"])
    return ""


# --- What a policy keeps, and why; all else may go. Pure functions of what was found ---


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Which may go.

    Attributes:
        keep_last: of each task's runs, each name's packages and each run's checkpoints, so many of the newest
            stay; None: their number is no reason to stay.
        older_than_s: what is younger stays; None: age is no reason to stay.
        keep_best: of each task's runs and each name's packages the best stays, by each criterion there is.

    Raises:
        ConfigError: it says nothing, or a number cannot work.
    """

    keep_last: int | None = None
    older_than_s: float | None = None
    keep_best: bool = False

    def __post_init__(self) -> None:
        if self.keep_last is None and self.older_than_s is None:
            raise ConfigError(
                "say what may go: --keep-last N keeps the N newest of each, --older-than 30d keeps what is "
                "younger; both together keep what either keeps."
            )
        if self.keep_last is not None and self.keep_last < 1:
            raise ConfigError(f"--keep-last must be at least 1, but is {self.keep_last}.")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What becomes of an item.

    Attributes:
        item: the item.
        reason: why it stays; None where it goes.
    """

    item: Artifact
    reason: str | None


def decide(items: Sequence[Artifact], policy: Policy, now: float | None = None) -> list[Decision]:
    """What becomes of each run and package.

    Args:
        items: runs and packages together, since one may come from the other.
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
        _keep_of_group(members, policy, now, reasons)
    _keep_parents(items, reasons)
    return [Decision(item=item, reason=reasons.get(item.path)) for item in items]


def _keep_of_group(members: Sequence[Artifact], policy: Policy, now: float, reasons: dict[Path, str]) -> None:
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
    """What something that stays came from stays, and what that came from."""
    by_identity: dict[str, list[Artifact]] = defaultdict(list)  # a directory that was copied has the same
    for item in items:
        by_identity[item.identity].append(item)
    left = [item for item in items if item.path in reasons]
    while left:
        child = left.pop()
        for identity in sorted(child.parents):
            for parent in by_identity.get(identity, []):
                if parent.path not in reasons:
                    reasons[parent.path] = f"parent of {child.name}"
                    left.append(parent)


def checkpoints_to_remove(
    run: Artifact,
    policy: Policy,
    stays: Iterable[Artifact],
    on_read: OnRead,
    now: float | None = None,
) -> tuple[list[Artifact], list[str]]:
    """Which checkpoints of a run that stays may go, as ``paceline checkpoint prune`` chooses them.

    Args:
        run: it is not at work.
        policy: with ``keep_last`` None, the run's own ``--keep-checkpoints`` counts.
        stays: all that is kept; a checkpoint that one of these came from stays.
        on_read: told of the bytes that were verified.
        now: Unix time.

    Returns:
        Those, oldest first; and the names of damaged ones, which stay.
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
    except PermissionError:  # another user's
        return [], []
    if number <= keep:
        return [], []
    chosen = choose_removals(directory.checkpoints, max(1, keep), damaged=False, on_read=on_read)
    wanted = {version for item in stays for identity, version in item.versions if identity == run.identity}
    found = []
    for path in reversed(chosen.removed):
        written = path.lstat().st_mtime
        young = policy.older_than_s is not None and now - written < policy.older_than_s
        if not young and parse_name(path.name)[1] not in wanted:
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
    return found, [path.name for path in chosen.damaged]


# --- Removing what was chosen: looked at once more, renamed, and only then deleted. No torch ---
#
# A crash leaves a directory under a name that nobody reads; the next removal deletes it.


_DOOMED = ".gc-"
_LEFT_BEHIND = re.compile(r"\.gc-[0-9a-f]{16}")

OnItem = Callable[[Artifact, str | None], None]
"""Is told of each item, and why it was left; None where it is gone."""


def remove_left_behind(parent: Path) -> None:
    """Delete what a removal that was killed had renamed already."""
    with suppress(OSError):
        for path in list(parent.iterdir()):
            if _LEFT_BEHIND.fullmatch(path.name) and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)


def remove(items: Sequence[Artifact], root: Path, registry: Registry, on_item: OnItem) -> None:
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


def _remove_run(item: Artifact) -> None:
    directory = RunDirectory(item.path)
    if item.path.is_symlink() or not item.path.is_dir():
        raise RunDirectoryError("it is no directory any more")
    if is_active(directory):
        raise RunInUseError("it is at work")
    with directory.locked():
        if directory.events.exists() and directory.events.stat().st_mtime > item.time + 1:
            raise RunInUseError("it was at work meanwhile")
        doomed = _renamed(item.path)
    # Not before its lock's file is closed: an NFS keeps what is open, and with it the directory.
    _delete(doomed)


def _remove_checkpoint(item: Artifact) -> None:
    directory = RunDirectory(item.path.parent.parent)
    if item.path.parent.is_symlink():
        raise RunDirectoryError("its folder is a link now")
    if is_active(directory):
        raise RunInUseError("its run is at work")
    with directory.locked():
        checkpoint_store.remove_checkpoints(item.path.parent, [item.path])


def _remove_package(item: Artifact, registry: Registry) -> None:
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
