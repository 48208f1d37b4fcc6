"""The record of the purity guard: a process's while it trains, and a run's on disk."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.core.errors import PurityError
from paceline.core.impurities import Impurity
from paceline.runs.checkpoint_store import scan
from paceline.runs.directory import RunDirectory

if TYPE_CHECKING:
    from paceline.parallel.world import World

_log = logging.getLogger(__name__)

_DEPENDS = "depend on the number of processes, or on a restart:"
_REMEDIES = "What a task may do, and the remedies: docs/what-a-task-may-do.md."
_EVERY_S = 60.0  # after the first checks, a process checks at most so often,
_SHARE = 400  # and computes for so many times as long as a check took before the next one
_NAMES = {
    "microbatches": "micro-batches computed twice",
    "samples": "samples read twice",
    "forward": "steps in which forward left the parameters alone",
    "replicas": "comparisons of all ranks' replicas",
}


class PurityClock:
    """When a check is due: the ``first`` times at once, and then so rarely that checks take little of the time."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._next = 0.0

    def is_due(self) -> bool:
        """Return whether a check is due."""
        return self._first > 0 or time.monotonic() >= self._next

    @contextmanager
    def check(self) -> Iterator[None]:
        """Measure the check that runs in the context; it determines when the next one is due."""
        began = time.monotonic()
        yield
        now = time.monotonic()
        self._first -= 1
        self._next = now + max(_EVERY_S, _SHARE * (now - began))


class PurityRecord:
    """What a process has checked and found, over all groups.

    Attributes:
        steps: when this process checks a step.
        replicas: when the ranks compare their replicas; rank 0 decides.
        checks: how often each check was made.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self.steps = PurityClock(first=2)
        self.replicas = PurityClock(first=1)
        self.checks: Counter[str] = Counter()
        self._known: dict[tuple[str, str], Impurity] = {}
        self._pending: dict[tuple[str, str], Impurity] = {}

    @property
    def has_news(self) -> bool:
        """Whether this rank found something that the others do not know."""
        return bool(self._pending)

    def add(self, found: Impurity) -> None:
        """Keep what this rank found, until the ranks settle it together."""
        key = found.kind, found.about
        if key not in self._known:
            self._pending.setdefault(key, found)

    def settle(self, world: World, directory: RunDirectory) -> None:
        """Record what any rank found, and stop or warn; all ranks call this together.

        Raises:
            PurityError: something certain was found before the first checkpoint.
        """
        pending, self._pending = self._pending, {}
        gathered = world.all_gather_object([dataclasses.astuple(found) for found in pending.values()])
        new: dict[tuple[str, str], Impurity] = {}
        for found in (Impurity(*entry) for entries in gathered for entry in entries):
            if (found.kind, found.about) not in self._known:
                new.setdefault((found.kind, found.about), found)
        self._known |= new
        saved = bool(world.broadcast_object(bool(scan(directory.checkpoints)) if world.rank == 0 else None))
        if world.rank == 0:
            for found in new.values():
                directory.append_event("impure", check=found.kind, message=found.message)
        certain = [found.message for found in new.values() if found.certain]
        if certain and self._mode == "error" and not saved:
            raise PurityError(
                f"the model would {_DEPENDS} {certain[0]} Nothing was saved. {_REMEDIES} To train all the same: "
                "--purity warn."
            )
        if world.rank == 0:
            for found in new.values():
                _log.warning("the model may %s %s %s", _DEPENDS, found.message, _REMEDIES)

    def result(self) -> dict[str, Any]:
        """Return the entry of ``result.json``."""
        found = tuple(found.message for found in self._known.values())
        return PuritySummary(self._mode, dict(sorted(self.checks.items())), found).to_json()


@dataclass(frozen=True)
class PuritySummary:
    """The purity guard's part of a run's record.

    Attributes:
        mode: ``--purity``; None for a run of a version without the guard.
        checks: how often rank 0 made each check; empty while the run has no result.
        found: what any rank found, one sentence or two each.
    """

    mode: str | None
    checks: Mapping[str, int]
    found: tuple[str, ...]

    def __str__(self) -> str:
        """Say it in one sentence."""
        if self.found:
            return f"The purity guard found {len(self.found)}: {' '.join(self.found)}"
        if self.mode in (None, "off"):
            return "The purity guard did not check this run."
        made = ", ".join(f"{self.checks[name]:,} {what}" for name, what in _NAMES.items() if self.checks.get(name))
        return f"The purity guard found nothing{f' ({made})' if made else ''}."

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {"mode": self.mode, "checks": dict(self.checks), "found": list(self.found)}


def read_purity(directory: RunDirectory) -> PuritySummary:
    """Read what the purity guard recorded, also of a run that has not finished.

    Raises:
        RunDirectoryError: this is not a run.
    """
    recorded = _mapping((directory.read_result() or {}).get("purity"))
    mode = recorded.get("mode", _mapping(directory.read_manifest().get("config")).get("purity"))
    found = [str(event.get("message")) for event in directory.read_events() if event["event"] == "impure"]
    checks = {name: count for name, count in _mapping(recorded.get("checks")).items() if type(count) is int}
    return PuritySummary(mode, checks, tuple(dict.fromkeys(found)))


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return what should be a mapping; an empty one if the file says something else."""
    return value if isinstance(value, dict) else {}
