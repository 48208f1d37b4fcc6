"""What a policy keeps, and why; all else may go. Pure functions of what was found."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.inventory import OnRead, choose
from paceline.checkpoint.storage import candidates, parse_name
from paceline.errors import ConfigError
from paceline.maintenance.items import Item, size_of
from paceline.run_directory import RunDirectory


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
class Verdict:
    """What becomes of an item.

    Attributes:
        item: the item.
        reason: why it stays; None where it goes.
    """

    item: Item
    reason: str | None


def decide(items: Sequence[Item], policy: Policy, now: float | None = None) -> list[Verdict]:
    """What becomes of each run and package.

    Args:
        items: runs and packages together, since one may come from the other.
        policy: the policy.
        now: Unix time.
    """
    now = time.time() if now is None else now
    reasons: dict[Path, str] = {}
    groups: dict[tuple[str, str], list[Item]] = defaultdict(list)
    for item in items:
        if item.kept_because is not None:
            reasons[item.path] = item.kept_because
        groups[item.kind, item.group].append(item)
    for members in groups.values():
        _keep_of_group(members, policy, now, reasons)
    _keep_parents(items, reasons)
    return [Verdict(item=item, reason=reasons.get(item.path)) for item in items]


def _keep_of_group(members: Sequence[Item], policy: Policy, now: float, reasons: dict[Path, str]) -> None:
    newest = sorted(members, key=lambda item: (-item.time, item.name))
    if policy.keep_last is not None:
        for item in newest[: policy.keep_last]:
            reasons.setdefault(item.path, "the newest" if policy.keep_last == 1 else "one of the newest")
    if policy.older_than_s is not None:
        for item in members:
            if now - item.time < policy.older_than_s:
                reasons.setdefault(item.path, "too young")
    if policy.keep_best:
        best: dict[str, tuple[float, Item]] = {}
        for item in newest:
            known = best.get(item.criterion)
            if item.score is not None and (known is None or item.score > known[0]):
                best[item.criterion] = item.score, item
        for criterion, (_, item) in best.items():
            reasons.setdefault(item.path, f"the best by {criterion}")


def _keep_parents(items: Sequence[Item], reasons: dict[Path, str]) -> None:
    """What something that stays came from stays, and what that came from."""
    by_identity: dict[str, list[Item]] = defaultdict(list)  # a directory that was copied has the same
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
    run: Item,
    policy: Policy,
    stays: Iterable[Item],
    on_read: OnRead,
    now: float | None = None,
) -> tuple[list[Item], list[str]]:
    """Which checkpoints of a run that stays may go, as ``paceline checkpoint prune`` chooses them.

    Args:
        run: it is not at work.
        policy: with ``keep_last`` None, the run's own ``--keep`` counts.
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
        keep = int(directory.read_complete_manifest()["config"].get("keep", 1))
    try:
        number = len(candidates(directory.checkpoints))
    except PermissionError:  # another user's
        return [], []
    if number <= keep:
        return [], []
    chosen = choose(directory.checkpoints, max(1, keep), damaged=False, on_read=on_read)
    wanted = {version for item in stays for identity, version in item.versions if identity == run.identity}
    found = []
    for path in reversed(chosen.removed):
        written = path.lstat().st_mtime
        young = policy.older_than_s is not None and now - written < policy.older_than_s
        if not young and parse_name(path.name)[1] not in wanted:
            found.append(
                Item(
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
