"""This rank's training state: initialized, loaded from a checkpoint or from another rank, exported."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import deepcopy
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import DataError
from paceline.core.task import Loss
from paceline.data.ledger import LedgerEntry
from paceline.data.samples import Loader, MicroBatch
from paceline.data.stream import StreamLoader
from paceline.parallel.options import MemoryOptions
from paceline.parallel.sharded_state import gather_full, require_common_state, shards_of
from paceline.parallel.strategy import ParameterLayout, Replicated
from paceline.parallel.world import ParallelDims, World
from paceline.parallel.wrap_units import checkpoint_activations
from paceline.runs.checkpoint_state import model_sha256
from paceline.torch_internals import tree_leaves
from paceline.training.checkpoint_manager import RECENT_STEPS
from paceline.training.optim import require_equal_groups
from paceline.training.reproducibility import release_cublas_workspace, seed_model
from paceline.training.run_context import RunContext
from paceline.training.state import TrainingState, build_task_model, require_base
from paceline.training.step import microbatch_loss


class StateCondition(Enum):
    """What a rank's copy of the state is.

    ``INVALID``, while something changes it and after an error in that, it has no version's bits.
    """

    ABSENT = auto()
    AS_BUILT = auto()
    VALID = auto()
    INVALID = auto()


class StateManager:
    """The state, and what goes with it from one rank to another.

    The state is first *as built* by the task, or *absent* if it needs the ranks or initial weights. It becomes
    *valid* by :meth:`begin` (a new run), :meth:`restore` (from a checkpoint) or :meth:`import_state` (from another
    rank). While :meth:`mutating` changes it, and after an error in that, it is *invalid*; then :meth:`undo_step` makes
    it valid again if there is a copy, and else one of those three does.

    Args:
        loader: reads the training data; its positions belong to the state.
        await_readers: waits until no other thread reads the state, which then may change.

    Attributes:
        condition: which of these it is.
        recent: the ledger entries of the last steps.

    Raises:
        UserError: the task's model or optimizers cannot be built.
    """

    def __init__(self, run: RunContext, loader: Loader, await_readers: Callable[[], None] = lambda: None) -> None:
        self._run = run
        self.loader = loader
        self.await_readers = await_readers
        self.condition = StateCondition.ABSENT
        self.grad_norm: Tensor | None = None
        self.recent: deque[LedgerEntry] = deque(maxlen=RECENT_STEPS)
        self._layout: ParameterLayout = Replicated()
        self._state: TrainingState | None = None
        self._copy: Mapping[str, Any] | None = None  # of the state before a step, for undo_step()
        # If each rank holds the complete state, it is built here, so that an error is raised before others wait for
        # this rank. A new run with initial weights has to wait for these.
        waits = run.preparation.has_initial_weights and not run.manifest
        if not run.config.parallel.shards_state and not waits:
            self._state = self._new_state()
            self.condition = StateCondition.AS_BUILT

    @property
    def valid(self) -> bool:
        """Whether the state is complete and has the bits of its version."""
        return self.condition is StateCondition.VALID

    @property
    def state(self) -> TrainingState:
        """The model and all that changes with it; built when it is first asked for.

        Raises:
            UserError: the task's model or optimizers cannot be built.
        """
        if self._state is None:
            self._state = self._new_state()
            self.condition = StateCondition.AS_BUILT
        return self._state

    @property
    def version(self) -> int:
        """The state's version."""
        return 0 if self._state is None else self._state.progress.version

    def close(self) -> None:
        """Release the state."""
        if self._state is not None:
            self._state.callback.close()
            self._state = None
            self.condition = StateCondition.ABSENT

    def _new_state(self, weights: Mapping[str, Tensor] | None = None) -> TrainingState:
        """Build the task's state, with the initial weights if there are any."""
        run = self._run
        build_model = partial(self._build_model, weights)
        module = self._layout.place(build_model, run.device)
        if run.device.type == "cuda":
            release_cublas_workspace(module)
        twin = None
        if run.config.training.ema is not None:
            twin = self._layout.make_ema_model(build_model, module, run.device)
        state = TrainingState(run.task, run.config, module, run.device, run.run_schedule, twin)
        if run.config.parallel.shards_state:
            for name, optimizer in state.optimizers.items():
                require_common_state(name, optimizer, ",".join(run.config.strategies))
        state.optimizers = dict(self._layout.wrap_optimizers(state.optimizers))
        return state

    def _build_model(self, weights: Mapping[str, Tensor] | None) -> nn.Module:
        config = self._run.config
        seed_model(config.training.seed)
        module = build_task_model(self._run.task, self._run.manifest)
        self._run.preparation.prepare(module, weights)
        memory = config[MemoryOptions]
        if memory.checkpoint_activations != "none":
            checkpoint_activations(
                module, memory.checkpoint_activations, memory.checkpoint_blocks, to_the_end="tp" in config.strategies
            )
        return module

    def invalidate(self) -> None:
        """Mark the state as invalid, until :meth:`mutating` ends."""
        self.await_readers()
        self.condition = StateCondition.INVALID

    @contextmanager
    def mutating(self) -> Iterator[None]:
        """Mark the state as invalid within the context, and after an error."""
        self.invalidate()
        yield
        self.condition = StateCondition.VALID
        self._copy = None

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Mark the state as valid within the context, and after an error: it is still that before the step."""
        self.condition = StateCondition.VALID
        yield
        self.invalidate()

    def begin(self, mesh: ParallelDims, weights: Mapping[str, Tensor] | None = None) -> None:
        """Begin a new run; all ranks call this together.

        Args:
            weights: initial weights, the same on all ranks.

        Raises:
            ConfigError: ``weights`` do not fit the model.
            TaskError: the ranks' optimizers have different parameter groups.
            PeerLostError: a rank is gone.
        """
        self._lay_out(mesh, rebuilds=weights is not None)
        if weights is not None:
            self._state = self._new_state(weights)
        require_equal_groups(mesh.world, self.state.parameter_names)
        if not self._run.config.parallel.shards_state:
            # A model may be built with randomness that no seed of torch's reaches.
            mesh.world.broadcast_module(self.state.module)
            if self.state.ema is not None:
                mesh.world.broadcast_module(self.state.ema)
        if weights is None and self.state.frozen["model"]:
            self.state.base = self._agree_on_base(mesh.world)
        self.condition = StateCondition.VALID

    def restore(self, mesh: ParallelDims, saved: Mapping[str, Any], *, own_hyperparameters: bool = False) -> None:
        """Continue from a checkpoint; all ranks call this together.

        Args:
            saved: the state of the checkpoint, the same on all ranks.
            own_hyperparameters: keep those that the task builds, for a fork of another run.

        Raises:
            CheckpointError: ``saved`` does not fit the task.
            TaskError: the ranks' optimizers have different parameter groups, or the base has changed.
            PeerLostError: a rank is gone.
        """
        self._lay_out(mesh)
        require_equal_groups(mesh.world, self.state.parameter_names)
        if "base" in saved:
            saved = {**saved, "base": self._agree_on_base(mesh.world, saved["base"])}
        self.import_state(saved, own_hyperparameters=own_hyperparameters)

    def _agree_on_base(self, world: World, recorded: Mapping[str, str] | None = None) -> Mapping[str, str] | None:
        """Return the task's base, which each node reads; a collective.

        Args:
            recorded: that of the checkpoint.

        Raises:
            TaskError: a node has another one.
        """
        own = self._run.task.frozen_base() if world.local_rank == 0 else None
        bases = [dict(base) for base in world.all_gather_object(own and dict(own)) if base] or [{}]
        for base in bases:
            require_base(base, recorded or bases[0])
        return bases[0] or None

    def _lay_out(self, mesh: ParallelDims, *, rebuilds: bool = False) -> None:
        """Lay the state out on the ranks; drop the present one unless it is as built, and can be taken as it is."""
        if self.valid:
            self.invalidate()
        self.recent.clear()
        self._layout = self._run.build_layout(mesh, ExampleBatch(self._run))
        if self._run.config.parallel.shards_state or self.condition is not StateCondition.AS_BUILT or rebuilds:
            self.close()  # before another one takes its place in memory

    def import_state(self, state: Mapping[str, Any], *, own_hyperparameters: bool = False) -> None:
        """Continue from the state of a checkpoint or another rank.

        Args:
            own_hyperparameters: keep those that the task builds.

        Raises:
            CheckpointError: it does not fit the task.
        """
        own = self.state
        self.invalidate()
        own.load_state_dict(state, own_hyperparameters=own_hyperparameters)
        if isinstance(self.loader, StreamLoader) and "streams" in state:
            self.loader.load_state_dict(state["streams"])
        if "recent" in state:
            self.recent.clear()
            self.recent.extend(LedgerEntry(*entry) for entry in state["recent"])
        self.condition = StateCondition.VALID

    def full_state_dict(self, world: World) -> dict[str, Any]:
        """Gather the state in the form of one process, on rank 0, with each rank's own shards if the ranks save them.

        All ranks call this together.
        """
        state = self.state.state_to_save()
        return dict(shards_of(state) if self.saves_shards else self._layout.full(state, keep=world.rank == 0))

    @property
    def saves_shards(self) -> bool:
        """Whether each rank saves its own part of the state."""
        return self._layout.saves_shards

    def model_sha256(self, world: World) -> str:
        """Return the hash of the model's state, whose tensors rank 0 holds one by one if they are sharded.

        All ranks call this together.
        """
        if self.saves_shards:
            sha256 = model_sha256(self.state.module.state_dict(), partial(gather_full, keep=world.rank == 0))
        else:
            state = self.full_model_state_dict(world)
            sha256 = model_sha256(state) if world.rank == 0 else ""
        return str(world.broadcast_object(sha256))

    def full_model_state_dict(self, world: World, module: nn.Module | None = None) -> dict[str, Any]:
        """Gather the model's state in the form of one process, on rank 0; all ranks call this together.

        Args:
            module: the model, for a script that has it when the training is over.
        """
        return dict(self._layout.full((module or self.state.module).state_dict(), keep=world.rank == 0))

    def full_evaluated_weights(self, world: World) -> dict[str, Tensor]:
        """Gather the evaluated weights by the names of the task's model, on rank 0; all ranks call this together."""
        whole = self._layout.full(self.state.evaluated_module.state_dict(), keep=world.rank == 0)
        if world.rank != 0:
            return {}
        weights = {name: value for name, value in whole.items() if isinstance(value, Tensor)}
        return self._run.preparation.task_weights(weights)

    def clip_gradients(self, max_norm: float) -> None:
        """Scale the gradients of the whole model down to a 2-norm; all ranks call this together."""
        self.grad_norm = self._layout.clip_gradients(self.state.module, max_norm)

    def update(self, finite: bool = True) -> None:
        """Apply the gradients: clip, step, and move schedules and average along; all ranks call this together.

        Args:
            finite: whether the gradients of all ranks are; if not, a scaler skips the step.
        """
        clip_norm = self._run.config.training.clip_norm
        clip = None if clip_norm is None else partial(self.clip_gradients, clip_norm)
        self.state.update(clip, finite=finite)

    def apply_gradients(
        self, names: Sequence[str], clip_norm: float | None, closure: Callable[[], float] | None
    ) -> None:
        """Clip the gradients of some optimizers' parameters, and step these; all ranks call this together.

        Args:
            clip_norm: the 2-norm to which the gradients are scaled down; None: that of ``--clip-norm``, if it is set.
            closure: computes the loss and the gradients again, for optimizers that need it.
        """
        self.grad_norm = None
        clip_norm = self._run.config.training.clip_norm if clip_norm is None else clip_norm
        clip = None if clip_norm is None else partial(self._clip_only, names, clip_norm)
        self.state.apply_gradients(names, clip, closure)

    def _clip_only(self, names: Sequence[str], max_norm: float) -> None:
        own = {id(parameter) for name in names for parameter in self.state.parameters_of[name]}
        others = [p for p in self.state.module.parameters() if id(p) not in own and p.grad is not None]
        gradients = [parameter.grad for parameter in others]
        for parameter in others:
            parameter.grad = None
        self.clip_gradients(max_norm)
        for parameter, gradient in zip(others, gradients, strict=True):
            parameter.grad = gradient

    def keep_copy(self) -> None:
        """Copy the state before a step that updates it more than once; :meth:`undo_step` returns to it."""
        self._copy = deepcopy(self.state.state_dict())

    @property
    def has_changed(self) -> bool:
        """Whether the state differs from the copy, if there is one."""
        if self._copy is None:
            return False
        before, now = tree_leaves(self._copy), tree_leaves(self.state.state_dict())
        return len(before) != len(now) or not all(map(_are_equal, before, now))

    def undo_step(self) -> None:
        """Return to the state before an unfinished step, if there is a copy of it."""
        copy, self._copy = self._copy, None
        if copy is not None and not self.valid:
            self.state.load_state_dict(copy)
            self.condition = StateCondition.VALID

    @property
    def is_collective(self) -> bool:
        """Whether all ranks must call the model together, because each holds a part of it."""
        return self._layout.is_collective

    def export_state(self) -> dict[str, Any]:
        """Return the state for a rank without one, for :meth:`import_state`."""
        state = {**self.state.state_dict(), "recent": [list(entry) for entry in self.recent]}
        if isinstance(self.loader, StreamLoader):
            epoch, step = self.state.progress.epoch, self.state.progress.step_in_epoch
            state["streams"] = self.loader.positions(epoch, step, range(self._run.num_microbatches))
        return state

    def gather_positions(self, world: World, microbatches: Iterable[int] | None = None) -> dict[str, Any] | None:
        """Exchange the positions of all ranks' streams; all ranks call this together.

        Args:
            microbatches: this rank's micro-batches; None: those that it has read.

        Returns:
            Positions by micro-batch; None if the dataset is not a stream.
        """
        if not isinstance(self.loader, StreamLoader):
            return None
        progress = self.state.progress
        furthest: dict[str, Any] = {}
        own = self.loader.reading if microbatches is None else microbatches
        mine = self.loader.positions(progress.epoch, progress.step_in_epoch, own)
        for of_rank in world.all_gather_object(mine):
            for microbatch, position in of_rank.items():
                if microbatch not in furthest or furthest[microbatch]["step"] < position["step"]:
                    furthest[microbatch] = position
        self.loader.add_positions(furthest)
        return furthest


def _are_equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else bool(one == other)


# --- A trial of the task, before its model is laid out on the ranks ---


class ExampleBatch:
    """Tries the task on the first micro-batch of its training data."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._microbatch: MicroBatch | None = None

    def parts(self, module: nn.Module) -> Sequence[Any] | None:
        """Return the task's parts of its model's forward."""
        return self._run.task.pipeline_blocks(module)

    def loss(self, module: nn.Module) -> Loss:
        """Compute the loss of the first micro-batch.

        Raises:
            DataError: there is no sample.
            TaskError: the task returned no loss.
        """
        if self._microbatch is None:
            # With another loader, so that the run's own keeps its position in streams.
            with closing(self._run.build_loader(workers=0)) as loader:
                there = loader.fetch(0, 0, range(self._run.num_microbatches))
            if not there:
                raise DataError("the training data holds no sample.")
            self._microbatch = there[0]
        return microbatch_loss(self._run, module, 0, self._microbatch)
