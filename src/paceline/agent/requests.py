"""What other commands ask of a run at work: answered by the agent that leads. No torch."""

from __future__ import annotations

from paceline.agent.cluster import Cluster
from paceline.agent.control_socket import Status, WorkerStatus
from paceline.agent.leader import Leader
from paceline.agent.node import Node
from paceline.errors import ConfigError
from paceline.launchers.local.base import LocalSpec
from paceline.run_directory import RunDirectory


class Requests:
    """Answers them; see :class:`~paceline.agent.control_socket.Controlled`.

    Args:
        spec: the job's.
        directory: the run's.
        cluster: knows who leads.
        node: this machine's workers.
    """

    def __init__(self, spec: LocalSpec, directory: RunDirectory, cluster: Cluster, node: Node) -> None:
        self._spec, self._directory, self._cluster, self._node = spec, directory, cluster, node

    def status(self) -> Status:
        """Where the job stands.

        Raises:
            ConfigError: this agent does not lead.
        """
        leader = self._leader()
        coordinator, beats = leader.coordinator, leader.beats
        members = coordinator.members()
        others = [worker for worker in coordinator.workers if worker not in members]
        steps = {worker: beats[worker].step if worker in beats else -1 for worker in (*members, *others)}
        return Status(
            generation=-1 if coordinator.view is None else coordinator.generation,
            target=coordinator.target,
            whole=leader.chronicle.is_whole(coordinator.view),
            stopping=leader.ending.is_sure,
            recoveries=leader.judgement.recoveries,
            step=max((steps[worker] for worker in members), default=-1),
            workers=tuple(
                WorkerStatus(
                    rank=members.index(worker) if worker in members else None,
                    slot=coordinator.slot(worker),
                    node=coordinator.node(worker),
                    pid=self._node.pid_of(worker),
                    step=step,
                    phase=beats[worker].phase if worker in beats else "starting",
                )
                for worker, step in steps.items()
            ),
        )

    def scale(self, nproc: int) -> None:
        """Want another number of workers on each machine; who joins or leaves does so after a step.

        Raises:
            ConfigError: there cannot be so many, the job is ending, or this agent does not lead.
        """
        leader = self._leader()
        leader.ending.refuse_changes()
        if nproc < 1:
            raise ConfigError(f"--nproc must be at least 1, but is {nproc}.")
        leader.learn_shards()
        coordinator = leader.coordinator
        machines, most = len(coordinator.nodes), coordinator.most
        if nproc * machines > most:
            raise ConfigError(
                f"{nproc * machines} processes cannot share {most} shards: each needs at least one. "
                f"Use --nproc {most // machines} or fewer. "
                "A run's number of shards is fixed when it is created."
            )
        leader.resize(
            dict.fromkeys(coordinator.nodes, nproc),
            before=coordinator.target,
            target=nproc * machines + coordinator.spares,
        )

    def scale_nodes(self, nodes: int) -> None:
        """Want fewer machines: those that came last leave after a step.

        Raises:
            ConfigError: there cannot be so many, the job is ending, or this agent does not lead.
        """
        leader = self._leader()
        there = [name for name in self._cluster.roster.nodes if name in leader.nodes]
        if nodes > len(there):
            raise ConfigError(
                f"the run is on {len(there)} machine(s). Another one joins it, up to --nodes MIN:MAX, when "
                f"this is given there: paceline join {self._directory.path}"
            )
        if nodes < self._spec.least_nodes:
            raise ConfigError(
                f"--nodes must be at least {self._spec.least_nodes}, as the run was started so."
            )
        # The leading one stays: somebody has to see the others off.
        leaving = [name for name in reversed(there) if name != self._cluster.name][: len(there) - nodes]
        leader.retire(leaving)

    def gather(self) -> None:
        """Train on only once all that there should be take part.

        Raises:
            ConfigError: this agent does not lead.
        """
        self._leader().gather()

    def _leader(self) -> Leader:
        if self._cluster.leader is None:
            raise ConfigError("another machine's agent leads the run by now; ask again there.")
        return self._cluster.leader
