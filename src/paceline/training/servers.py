"""Training with parameter servers, step by step (``--strategy ps``): only servers update."""

from __future__ import annotations

from typing import Any

from paceline.callback import Callback
from paceline.distributed.mesh import Mesh
from paceline.distributed.world import World
from paceline.errors import TaskError
from paceline.membership.handover import Agreement, hand_over
from paceline.membership.member import Member
from paceline.strategies.parameter_server import OnServers
from paceline.training.run import Run
from paceline.training.state import TrainingState
from paceline.training.trainer import Trainer


class ServerTrainer(Trainer):
    """Has only servers hold optimizer state and update; everybody gets the parameters from them.

    Raises:
        UserError: the task's model, optimizers or data cannot be built, or it has a callback of its own.
    """

    def __init__(self, run: Run, member: Member | None = None) -> None:
        super().__init__(run, member)
        require_no_callback(run, self.state)

    def attach(self, mesh: Mesh) -> None:
        self._on_servers = OnServers(self.state.module, self.run.config.num_servers(mesh.world.world_size))
        drop_others_state(self.state, self._on_servers, mesh.world.rank)
        super().attach(mesh)

    def _update(self, *, finite: bool = True) -> None:
        if self.world.rank < self._on_servers.servers:
            self._on_servers.keep_gradients_of(self.world.rank)
            super()._update(finite=finite)
        self._on_servers.publish(self.world)

    def _whole_state(self) -> dict[str, Any]:
        return with_all_optimizers(super()._whole_state(), self.world, self._on_servers.servers)


def require_no_callback(run: Run, state: TrainingState) -> None:
    """Refuse a task with a callback: it is called by all ranks alike, and they do not do alike.

    Raises:
        TaskError: it has one.
    """
    if type(state.callback) is not Callback:
        raise TaskError(
            f"--strategy {run.config.methods[0]} does not work with the callback of {run.task_name}, which "
            "all ranks call alike in each step. Use --strategy ddp."
        )


def drop_others_state(state: TrainingState, on_servers: OnServers, rank: int) -> None:
    """Free the optimizer state, which a checkpoint gave whole, of all parameters but this rank's."""
    mine = (
        {id(parameter) for parameter in on_servers.parameters[rank]} if rank < on_servers.servers else set()
    )
    for optimizer in state.optimizers.values():
        for parameter in [p for p in optimizer.state if id(p) not in mine]:
            del optimizer.state[parameter]


def with_all_optimizers(state: dict[str, Any], world: World, servers: int) -> dict[str, Any]:
    """A state with the optimizer state that the other servers hold, on rank 0; all ranks call this together.

    Raises:
        PeerLostError: a rank is gone.
    """
    if servers == 1:
        return state
    merged = {name: dict(optimizer["state"]) for name, optimizer in state["optimizers"].items()}
    for server in range(1, servers):
        mine = merged if world.rank == server else None
        received = hand_over(world, Agreement(server, 0, (0,)), mine)
        for name, entries in (received or {}).items():
            merged[name].update(entries)
    whole = {
        name: {**optimizer, "state": dict(sorted(merged[name].items()))}
        for name, optimizer in state["optimizers"].items()
    }
    return {**state, "optimizers": whole}
