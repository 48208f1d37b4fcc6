"""The order in which a stage works, and which weights each shard meets: pure functions of counts.

The schedule is PipeDream's 1F1B without a flush: Narayanan et al., "PipeDream: Generalized Pipeline
Parallelism for DNN Training", SOSP 2019. A stage runs as many forwards ahead of its backwards as there are
stages behind it, also over the end of a step: the next step's first forwards come before this step's last
backwards, and so before its update. Their backwards use the weights of these forwards (weight stashing).

With one shard a step this is the paper's schedule, with an update after every micro-batch. With S shards
the gradients of a step are added up first, and weights are at most one update old where S is at least the
number of stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Action:
    """Forward or backward of one shard.

    Attributes:
        kind: "F" or "B".
        position: among the shards of the step under way; from their number on, among those of the next.
    """

    kind: Literal["F", "B"]
    position: int


def forwards_ahead(stage: int, num_stages: int) -> int:
    """How many forwards a stage runs ahead of its backwards: as many as there are stages behind it."""
    return num_stages - 1 - stage


def step_actions(ahead: int, shards: int, begun: int, following: int) -> list[Action]:
    """What a stage does in a step, up to the backward of its last shard.

    Args:
        ahead: :func:`forwards_ahead` of the stage.
        shards: the step's.
        begun: how many of the step's forwards were run within the step before; see :func:`begins`.
        following: the next step's shards; 0 where all ranks finish this step before the next one.
    """
    actions: list[Action] = []
    forwards = begun
    for backward in range(shards):
        while forwards <= backward + ahead and forwards < shards + following:
            actions.append(Action("F", forwards))
            forwards += 1
        actions.append(Action("B", backward))
    return actions


def begins(ahead: int, following: int) -> int:
    """How many of the next step's forwards a stage runs within the step before: with older weights."""
    return min(ahead, following)


@dataclass
class Staleness:
    """How many updates old the weights of forwards were when their gradients were applied.

    Attributes:
        total: over all forwards.
        forwards: how many there were, each stage's counted.
        largest: of one forward.
    """

    total: int = 0
    forwards: int = 0
    largest: int = 0

    def count(self, shards: int, stale: int) -> None:
        """Take in a stage's step, of whose ``shards`` forwards ``stale`` met weights one update old."""
        self.total += stale
        self.forwards += shards
        self.largest = max(self.largest, int(stale > 0))

    def add(self, other: Sequence[int]) -> None:
        """Take in what another stage counted: ``total``, ``forwards``, ``largest``."""
        self.total += other[0]
        self.forwards += other[1]
        self.largest = max(self.largest, other[2])

    @property
    def figures(self) -> dict[str, float]:
        """For the run's result."""
        mean = self.total / self.forwards if self.forwards else 0.0
        return {"staleness_mean": round(mean, 4), "staleness_max": self.largest}
