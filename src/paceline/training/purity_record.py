"""A process's record of the purity guard: the checks made, the findings, and when the next check is due."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import PurityError
from paceline.parallel.world import World
from paceline.runs.checkpoint_store import scan
from paceline.runs.directory import RunDirectory

_REMEDIES = "What a task may do, and the remedies: docs/what-a-task-may-do.md."

_log = logging.getLogger(__name__)

_EVERY_S = 60.0  # after the first checks, a process checks at most so often,
_SHARE = 400  # and computes for so many times as long as a check took before the next one


class PurityClock:
    """When a check is due: at the first times, and then so rarely that checks take little of the time.

    Args:
        first: number of checks to make at once.
    """

    def __init__(self, first: int) -> None:
        self._first, self._next = first, 0.0

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


@dataclass(frozen=True)
class Impurity:
    """Something on which the bits of a run should not depend.

    Attributes:
        check: ``microbatch``, ``attribute``, ``forward``, ``sample``, ``data`` or ``replicas``.
        message: what differed, in one or two sentences.
        certain: whether the model depends on it; else it may.
        about: names what differed, so that it counts once, whichever rank, step and values showed it.
    """

    check: str
    message: str
    certain: bool = True
    about: str = ""


class PurityRecord:
    """What a process has checked and found, over all groups.

    Attributes:
        mode: ``--purity``.
        steps: when this process checks a step.
        replicas: when the ranks compare their replicas; rank 0 decides.
        checks: how often each check was made.
        found: the messages of all ranks, one for each thing that differed.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.steps, self.replicas = PurityClock(first=2), PurityClock(first=1)
        self.checks: Counter[str] = Counter()
        self.found: list[str] = []
        self._known: set[tuple[str, str]] = set()
        self._pending: list[Impurity] = []

    @property
    def has_news(self) -> bool:
        """Whether this rank found something that the others do not know."""
        return bool(self._pending)

    def add(self, impurity: Impurity) -> None:
        """Keep what this rank found, until the ranks settle it together."""
        known = self._known.union((other.check, other.about) for other in self._pending)
        if (impurity.check, impurity.about) not in known:
            self._pending.append(impurity)

    def settle(self, world: World, directory: RunDirectory) -> None:
        """Record what any rank found, and stop or warn; all ranks call this together.

        Raises:
            PurityError: something certain was found before the first checkpoint.
        """
        pending, self._pending = self._pending, []
        gathered = world.all_gather_object([dataclasses.asdict(found) for found in pending])
        new: list[Impurity] = []
        for found in (Impurity(**entry) for entries in gathered for entry in entries):
            if (found.check, found.about) not in self._known:
                self._known.add((found.check, found.about))
                new.append(found)
        self.found += [found.message for found in new]
        saved = bool(world.broadcast_object(bool(scan(directory.checkpoints)) if world.rank == 0 else None))
        if world.rank == 0:
            for found in new:
                directory.append_event("impure", check=found.check, message=found.message)
        certain = [found.message for found in new if found.certain]
        if certain and self.mode == "error" and not saved:
            raise PurityError(
                f"the model would depend on the number of processes, or on a restart: {certain[0]} Nothing was saved. "
                f"{_REMEDIES} To train all the same: --purity warn."
            )
        if world.rank == 0:
            for found in new:
                _log.warning(
                    "the model may depend on the number of processes, or on a restart: %s %s", found.message, _REMEDIES
                )

    def result(self) -> dict[str, Any]:
        """Return the entry of ``result.json``."""
        return {"mode": self.mode, "checks": dict(sorted(self.checks.items())), "found": self.found}
