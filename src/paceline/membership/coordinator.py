"""The membership protocol of one agent, as a pure state machine: events in, actions out.

A *view* is one generation of the group: a number and its members, in the order of their ranks.
A worker is *starting* until it first asks for a view, then *waiting* until it is in one, then a
*member*. A view is broken once a member has died or has left it. Then every living member leaves
it too (a death is felt by all as a lost peer), asks for a new one, and the next generation is
formed of all that wait: survivors first, in their old order, so that rank 0 is one that holds the
state, then those who join. Where nobody survives, the next view waits for all, like the first. No view
is formed while a living member of the last one may still act in it; whoever never leaves it is silent,
and is killed by the agent before that.

A worker that ends in good order, because the run is finished or was asked to stop, breaks nothing:
the others of its view are about to end too. Whoever loses it before that asks for a new view.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["starting", "waiting", "member"]


@dataclass(frozen=True)
class View:
    """One generation of the group.

    Attributes:
        generation: rises by one with every view.
        members: worker ids; the position is the rank.
    """

    generation: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Start:
    """Start this worker, in this slot."""

    worker: int
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


@dataclass
class _Worker:
    slot: int
    status: Status = "starting"
    retiring: bool = False  # not needed; may still be taken back
    told: bool = False  # ... but not once it was told


@dataclass
class Coordinator:
    """Decides who is started, who forms which view and who is sent home.

    Attributes:
        target: how many workers there should be.
        most: how many a view may hold (the number of shards); the others wait as spares.
        view: the current view, None before the first.
        generation: the last view's.
        hiring: whether who is lacking is started.
        gathering: the next view waits for all that there should be, as the first one did.
    """

    target: int
    most: int
    generation: int
    view: View | None = None
    hiring: bool = True
    gathering: bool = False
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)  # those who ended in good order
    _next_worker: int = 0
    _asked: int = -1  # the generation whose members were asked to re-form
    _broken: int = -1  # the generation whose members were told that it is broken

    def begin(self) -> list[Action]:
        """Start the first workers."""
        return self._decide()

    def waits(self, worker: int) -> list[Action]:
        """A worker has left its view, or never had one, and asks for the next."""
        if worker in self._workers:
            self._workers[worker].status = "waiting"
        return self._decide()

    def exited(self, worker: int) -> list[Action]:
        """A worker's process has ended."""
        self._workers.pop(worker, None)
        return self._decide()

    def done(self, worker: int) -> list[Action]:
        """A worker's process has ended in good order; from now on nobody is started."""
        self._workers.pop(worker, None)
        self._done.add(worker)
        self.hiring = False
        return self._decide()

    def resize(self, target: int) -> list[Action]:
        """Another number of workers is wanted: at least 1."""
        self.target = target
        return self._decide()

    def gather(self) -> list[Action]:
        """Have the next view wait for all; where some are missing in a healthy one, it is left for that."""
        self.gathering = len(self.members()) < min(self.target, self.most)
        return self._decide()

    @property
    def workers(self) -> tuple[int, ...]:
        """All that live, by slot."""
        return tuple(sorted(self._workers, key=lambda worker: self._workers[worker].slot))

    def slot(self, worker: int) -> int:
        """A worker's slot."""
        return self._workers[worker].slot

    def members(self) -> tuple[int, ...]:
        """The living members of the current view, by rank."""
        return () if self.view is None else tuple(w for w in self.view.members if w in self._workers)

    def _decide(self) -> list[Action]:
        actions: list[Action] = self._staff()
        members = self.members()
        if self.view is not None and not self._is_broken(members):
            self._ask_for_change(members, actions)
            return actions
        acting = [w for w in members if self._workers[w].status == "member"]
        if acting:
            if self.view is not None and self._broken < self.view.generation:
                self._broken = self.view.generation
                actions.append(Break(self.view.generation, tuple(acting)))
            return actions
        self._form(members, actions)
        return actions

    def _staff(self) -> list[Action]:
        """Start whom the target lacks, and mark whom it does not need.

        Who holds the state is kept before who does not, and lower ranks before higher ones. A member is
        told only when the next view forms without it: should the others die before, it is still needed.
        """
        actions: list[Action] = []
        members = self.members()
        free = self._free_slots()
        lacking = self.target - sum(not worker.told for worker in self._workers.values())
        for slot in itertools.islice(free, max(0, lacking) if self.hiring else 0):
            self._workers[self._next_worker] = _Worker(slot)
            actions.append(Start(self._next_worker, slot))
            self._next_worker += 1
        others = [w for w in self.workers if w not in members]
        others.sort(key=lambda w: self._workers[w].status == "starting")
        staying = [w for w in (*members, *others) if not self._workers[w].told]
        for place, worker in enumerate(staying):
            self._workers[worker].retiring = place >= self.target
            if self._workers[worker].retiring and worker not in members:
                actions.append(self._retire(worker))
        return actions

    def _free_slots(self) -> Iterator[int]:
        taken = {worker.slot for worker in self._workers.values()}
        return (slot for slot in itertools.count() if slot not in taken)

    def _retire(self, worker: int) -> Retire:
        self._workers[worker].told = True
        return Retire(worker)

    def _is_broken(self, members: tuple[int, ...]) -> bool:
        assert self.view is not None
        lost = [w for w in self.view.members if w not in members and w not in self._done]
        return bool(lost) or any(self._workers[w].status == "waiting" for w in members)

    def _ask_for_change(self, members: tuple[int, ...], actions: list[Action]) -> None:
        """A healthy view changes only for who waits to join it and who is to leave it."""
        assert self.view is not None
        joining = [w for w in self._waiting() if w not in members]
        room = self.most - len(members)
        leaving = any(self._workers[w].retiring for w in members)
        changes = (joining and room > 0) or leaving or self.gathering
        if self._asked < self.view.generation and changes:
            self._asked = self.view.generation
            actions.append(AskToReform(self.view))

    def _form(self, survivors: tuple[int, ...], actions: list[Action]) -> None:
        """Form the next view of all that wait, if there is anything to wait for no longer."""
        waiting = self._waiting()
        for_all = self.gathering or not survivors
        if for_all and len(waiting) < min(self.target, self.most, len(self._workers)):
            return
        for worker in survivors:
            if self._workers[worker].retiring:
                actions.append(self._retire(worker))
        order = [w for w in survivors if w in waiting] + [w for w in waiting if w not in survivors]
        chosen = tuple(order[: self.most])
        if not chosen:
            return
        self.gathering = False
        self.generation += 1
        self.view = View(self.generation, chosen)
        for worker in chosen:
            self._workers[worker].status = "member"
        actions.append(Form(self.view))

    def _waiting(self) -> list[int]:
        return [
            w for w in self.workers if self._workers[w].status == "waiting" and not self._workers[w].retiring
        ]
