"""The nodes of a job, as their leader gives them orders. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from paceline.agent.reports import Order, Orders
from paceline.membership.channel import Place
from paceline.membership.coordinator import Coordinator
from paceline.membership.views import Seat, View


class Workforce:
    """All workers of a job, on whichever node they are.

    Args:
        coordinator: knows where each of them is.

    Attributes:
        nodes: those that have come, by name.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.nodes: dict[str, Orders] = {}
        self._took_part: set[str] = set()  # nodes with workers that were in a view

    def joins(self, name: str, node: Orders, seats: Iterable[Seat]) -> None:
        """A node has come, with the workers that it has."""
        self.nodes[name] = node
        if any(seat.status != "starting" for seat in seats):
            self._took_part.add(name)

    def is_of_newcomer(self, worker: int) -> bool:
        """Whether a worker runs on a node that never took part, beside others that do."""
        at_work = self._took_part & self.nodes.keys()
        known = worker in self._coordinator.workers
        return known and bool(at_work) and self._coordinator.node(worker) not in at_work

    def start(self, worker: int, node: str, slot: int) -> None:
        """Start a worker."""
        self.nodes[node].start(worker, slot)

    def tell(self, workers: Iterable[int], order: Order) -> None:
        """Tell workers something; those that have ended may be among them."""
        for worker in workers:
            if worker in self._coordinator.workers:
                self._node_of(worker).tell(worker, order)

    def place(self, view: View, address: str, port: int) -> None:
        """Tell the members of a view to form it.

        Args:
            view: the view.
            address: of its store.
            port: of its store.
        """
        nodes = self.nodes_of(view)
        self._took_part.update(nodes)
        there: Counter[str] = Counter(nodes)
        so_far: Counter[str] = Counter()
        for rank, (worker, node) in enumerate(zip(view.members, nodes, strict=True)):
            place = Place(
                generation=view.generation,
                rank=rank,
                world_size=len(view.members),
                local_rank=so_far[node],
                local_world_size=there[node],
                computing=view.computing,
                address=address,
                port=port,
            )
            so_far[node] += 1
            self.nodes[node].tell(worker, place)

    def nodes_of(self, view: View) -> list[str]:
        """Where the members of a new view are, by rank."""
        return [self._coordinator.node(worker) for worker in view.members]

    def kill(self, workers: Iterable[int], why: str) -> None:
        """Fence workers; those that have ended may be among them."""
        for worker in workers:
            if worker in self._coordinator.workers:
                self._node_of(worker).kill(worker, why)

    def stop(self, number: int) -> None:
        """Send all workers this signal, also those that are yet to be forked."""
        for node in self.nodes.values():
            node.stop(number)

    def kill_all(self, why: str) -> None:
        """Kill all workers."""
        for node in self.nodes.values():
            node.kill_all(why)

    def _node_of(self, worker: int) -> Orders:
        return self.nodes[self._coordinator.node(worker)]
