"""Views, and what :class:`~paceline.membership.coordinator.Coordinator` asks its driver to do. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["starting", "waiting", "member"]


@dataclass(frozen=True)
class View:
    """One generation of the group.

    Attributes:
        generation: rises by one with every view.
        members: worker ids; the position is the rank.
        computing: how many of them, from rank 0 on, compute shards; the others are spares.
    """

    generation: int
    members: tuple[int, ...]
    computing: int


@dataclass(frozen=True)
class Start:
    """Start this worker on this node, in this slot."""

    worker: int
    node: str
    slot: int


@dataclass(frozen=True)
class Form:
    """Tell these members to form this view."""

    view: View


@dataclass(frozen=True)
class AskToReform:
    """Tell the view's members to leave it together, after a step."""

    view: View


@dataclass(frozen=True)
class Break:
    """Tell these members that the view is broken, should they not feel it by themselves."""

    generation: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Retire:
    """Tell a worker to end: it is not needed any more."""

    worker: int


Action = Start | Form | AskToReform | Break | Retire


@dataclass(frozen=True)
class Seat:
    """Where a worker is on its node, and what it does."""

    slot: int
    status: Status
