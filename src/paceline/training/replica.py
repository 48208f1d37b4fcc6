"""One rank's copy of all that training changes: begun, taken from elsewhere, or given away."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.data.ledger import LedgerEntry
from paceline.data.microbatch import Loader
from paceline.data.stream import StreamLoader
from paceline.distributed.world import World
from paceline.training.randomness import seed_model
from paceline.training.run import Run
from paceline.training.saving import RECENT_STEPS
from paceline.training.state import TrainingState, built_model


class Replica:
    """The state, and what goes with it from one rank to another.

    Attributes:
        state: the model and all that changes with it.
        valid: whether ``state`` is whole, and so is what its version says.
        recent: the last steps' ledger entries.
        loader: of the training data, whose positions belong to the state; set it once that is built.

    Args:
        run: what is trained.

    Raises:
        UserError: the task's model or optimizers cannot be built.
    """

    loader: Loader

    def __init__(self, run: Run) -> None:
        self._run = run
        self.state = self._new_state()
        self.valid, self._pristine = False, True
        self.recent: deque[LedgerEntry] = deque(maxlen=RECENT_STEPS)

    def _new_state(self) -> TrainingState:
        run = self._run
        seed_model(run.config.seed)
        module = built_model(run.task).to(run.device)
        return TrainingState(run.task, run.config, module, run.device, run.data.total_steps)

    def restore(self, world: World, saved: Mapping[str, Any] | None) -> None:
        """Begin, or go on from a checkpoint; all ranks do so together.

        Args:
            world: the ranks.
            saved: the state of the checkpoint, the same on all ranks; None to begin.

        Raises:
            CheckpointError: ``saved`` does not fit the task.
            PeerLostError: a rank is gone.
        """
        self.valid = False
        self.recent.clear()
        if not self._pristine:
            self.state = self._new_state()
        if saved is not None:
            self.take(saved)
            return
        # A model may be built with randomness that no seed of torch's reaches.
        world.broadcast_module(self.state.module)
        if self.state.ema is not None:
            world.broadcast_module(self.state.ema)
        self.valid, self._pristine = True, False

    def take(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that a checkpoint or another rank gave.

        Raises:
            CheckpointError: it does not fit the task.
        """
        self.valid, self._pristine = False, False
        self.state.load_state_dict(state)
        if isinstance(self.loader, StreamLoader) and "streams" in state:
            self.loader.load_state_dict(state["streams"])
        if "recent" in state:
            self.recent.clear()
            self.recent.extend(LedgerEntry(*entry) for entry in state["recent"])
        self.valid = True

    def give(self) -> dict[str, Any]:
        """The state for a rank that lacks it: what :meth:`take` takes."""
        state = {**self.state.state_dict(), "recent": [list(entry) for entry in self.recent]}
        if isinstance(self.loader, StreamLoader):
            epoch, step = self.state.progress.epoch, self.state.progress.step_in_epoch
            state["streams"] = self.loader.positions(epoch, step, range(self._run.num_shards))
        return state

    def gather_positions(self, world: World, shards: Iterable[int] | None = None) -> dict[str, Any] | None:
        """Have all ranks know where each one's streams stand; they call this together.

        Args:
            world: the ranks.
            shards: this rank's; those that it has read where None is given.

        Returns:
            Positions by shard; None where the dataset is no stream.
        """
        if not isinstance(self.loader, StreamLoader):
            return None
        progress = self.state.progress
        furthest: dict[str, Any] = {}
        own = self.loader.reading if shards is None else shards
        mine = self.loader.positions(progress.epoch, progress.step_in_epoch, own)
        for of_rank in world.all_gather_json(mine):
            for shard, position in of_rank.items():
                if shard not in furthest or furthest[shard]["step"] < position["step"]:
                    furthest[shard] = position
        self.loader.add_positions(furthest)
        return furthest
