"""A script's own loop over the steps of a run: ``paceline.Run``."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack
from weakref import WeakSet, finalize

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from paceline.api import Result, ends_script
from paceline.core.config import config_from_mapping
from paceline.core.environment import default_threads
from paceline.core.errors import ConfigError, StopRequested, TaskError
from paceline.core.job import WorkerConfig
from paceline.core.standard_streams import open_closed_streams
from paceline.core.task import Callback, LossResult, Task
from paceline.core.task_loading import refuse_call_at_import
from paceline.launch.local_run import own_environment, require_recovery
from paceline.parallel.progress import note_progress
from paceline.parallel.world import World
from paceline.runs.checkpoint_selection import select_checkpoint
from paceline.runs.checkpoint_state import scheduler_state
from paceline.runs.directory import OWN_LOOP
from paceline.runs.rank_log import open_rank_log
from paceline.training.control import StopCause, StopSignals
from paceline.training.evaluation import Evaluator
from paceline.training.group_context import GroupContext
from paceline.training.loaded_model import restore_model
from paceline.training.run_context import RunContext
from paceline.training.run_setup import RunRequest
from paceline.training.session import FixedGroup, build_trainer, conclude_run, enter_group, set_up
from paceline.training.state import move_scheduler
from paceline.training.state_manager import StateManager
from paceline.training.step import ComposedStep
from paceline.training.trainer import Trainer
from paceline.training.worker import join_launched_group

if TYPE_CHECKING:
    from paceline.core.run_options import LoopOptions

LossOfBatch = Callable[[Any], LossResult]
"""Takes a micro-batch; returns what :meth:`paceline.Task.loss` does."""

_log = logging.getLogger(__name__)
_open_runs: WeakSet[Run] = WeakSet()

# Workers run the script once more, which needs a guard that most loops do not have. A script's epoch may be its run.
_DEFAULTS = {"num_workers": 0, "checkpoint_every": ("1epochs", "10min")}
_OF_STEPS = ("epochs", "max_steps")
_OF_TASKS = ("set", "val_fraction", "early_stop", "eval_every", "ema")
_OF_LAUNCHERS = ("nproc", "nodes", "on")
_OF_WRAPPERS = ("compile", "reduction")

# --- What the script has built, as a task ---


@dataclass(frozen=True)
class ScriptParts:
    """What a script gives to its run.

    Attributes:
        module: the model, or several in a ``ModuleDict``.
        optimizers: by name; a single one is "main".
        dataset: the training samples.
        state: by name, what else lives from one step to the next.
        collate: turns a list of samples into a batch; None: torch's default.
        sample_weights: of the samples, or None.
        schedules: by name, the states as built of those that are learning-rate schedules.
        names: the names of the model's parameters as built, by identity.
        trained: the models that were given in training mode.
        hyperparameters: of each optimizer's groups as built, by the optimizer's name.
    """

    module: nn.Module
    optimizers: Mapping[str, Optimizer]
    dataset: Any
    state: Mapping[str, Any]
    schedules: Mapping[str, Any]
    collate: Callable[[list[Any]], Any] | None
    sample_weights: Any
    names: Mapping[int, str]
    trained: Sequence[nn.Module]
    hyperparameters: Mapping[str, list[dict[str, Any]]]


@dataclass
class OwnLoop(Task):
    """The task of a script that has a loop of its own.

    Attributes:
        script: the name of its file.
    """

    script: str = ""
    parts: InitVar[ScriptParts | None] = None

    def __post_init__(self, parts: ScriptParts | None) -> None:
        self._given = parts
        self._in_eval_mode = frozenset(() if parts is None else _in_eval_mode(parts.module))
        self._hyperparameters = {} if parts is None else parts.hyperparameters
        if parts is not None and parts.collate is not None:
            self.__dict__["collate"] = parts.collate  # rows of tensors are read at once where it is torch's own

    @property
    def _parts(self) -> ScriptParts:
        if self._given is None:
            raise TaskError(
                f"this run is of the loop in {self.script}, which builds the model itself. To continue it, start that "
                "script again, as it was started first; its weights: paceline.load(RUN, model=...)."
            )
        return self._given

    def build_model(self) -> nn.Module:
        return self._parts.module

    def build_dataset(self, split: str) -> Any:
        return self._parts.dataset if split == "train" else None

    def sample_weights(self, dataset: Any) -> Any:
        return self._parts.sample_weights

    def build_optimizer(self, model: nn.Module) -> Mapping[str, Optimizer]:
        parts, placed = self._parts, dict(model.named_parameters())
        for optimizer in parts.optimizers.values():
            for group in optimizer.param_groups:
                # Under fsdp the model has other parameters than those with which the optimizer was built.
                group["params"] = [placed[parts.names[id(parameter)]] for parameter in group["params"]]
        return parts.optimizers

    def train_step(self, step: object) -> float | None:
        raise TaskError("the script computes its steps itself.")

    def state_dict(self) -> dict[str, Any]:
        parts = self._parts
        state = {name: scheduler_state(part) for name, part in parts.state.items()}
        return {"state": state, "eval": _in_eval_mode(parts.module), "hyperparameters": self._hyperparameters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._in_eval_mode = frozenset(state["eval"])
        for name, part in self._parts.state.items():
            if name not in state["state"]:
                raise ValueError(f"it has no state[{name!r}], with which the script did not begin the run")
            part.load_state_dict(state["state"][name])
        self._hyperparameters = state.get("hyperparameters", self._hyperparameters)

    def begin_fork(self) -> None:
        """Take the hyperparameters and schedules that the script builds, these at the steps of the checkpoint."""
        parts = self._parts
        self._hyperparameters = parts.hyperparameters
        for label, as_built in parts.schedules.items():
            schedule = parts.state[label]
            if not isinstance(schedule, ReduceLROnPlateau):  # which follows a metric, not the steps
                done = schedule.last_epoch
                schedule.load_state_dict(as_built)
                move_scheduler(schedule, done)

    def warn_of_other_hyperparameters(self) -> None:
        """Say what the script builds in another way now, since the run keeps what its checkpoint has."""
        changes = [
            f"{label}: {name} {before.get(name)} -> {value}"
            for label, groups in self._parts.hyperparameters.items()
            for before, now in zip(self._hyperparameters.get(label, ()), groups, strict=False)
            for name, value in now.items()
            if before.get(name, value) != value
        ]
        if changes:
            _log.warning(
                "the script builds an optimizer with other hyperparameters than when the run began (%s); the run keeps "
                "those of its checkpoint. To change them, set them in the loop: optimizer.param_groups[0]['lr'] = ...",
                ", ".join(changes),
            )

    def restore_modes(self) -> None:
        """Give each module the mode that the script has given it: a frozen layer stays in evaluation mode."""
        for name, module in self._parts.module.named_modules():
            module.training = name not in self._in_eval_mode


def _in_eval_mode(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if not module.training]


class _Metrics(Task):
    """The metrics of :meth:`Run.evaluate`, as those of a task.

    Attributes:
        of_batch: computes them, in the evaluation that runs now.
    """

    def __init__(self) -> None:
        self.of_batch: Callable[[Any], Mapping[str, Any]] = lambda batch: {}

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return self.of_batch(batch)


@dataclass(frozen=True)
class _Evaluation:
    """A dataset that is evaluated, perhaps many times."""

    dataset: Any
    task: _Metrics
    evaluator: Evaluator

    def run(
        self, context: RunContext, world: World, module: nn.Module, metrics: Callable[[Any], Mapping[str, Any]]
    ) -> dict[str, float]:
        self.task.of_batch = metrics
        return self.evaluator.run(
            context.build_mesh(world),
            module,
            lambda: StopCause.NONE,
            is_collective=context.config.parallel.shards_state,
        )


def _as_parts(
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Optimizer | Mapping[str, Optimizer],
    dataset: Any,
    state: Mapping[str, Any],
    collate: Callable[[list[Any]], Any] | None,
    sample_weights: Any,
) -> ScriptParts:
    """Put the parts together.

    Raises:
        TaskError: an optimizer has stepped before, or has a parameter that the model has not; an object of ``state``
            cannot be saved.
    """
    if isinstance(dataset, DataLoader):
        raise TaskError(
            "the run reads the samples itself, in an order that continues exactly: give it the loader's dataset, and "
            "collate= and sample_weights= if the loader has a collate_fn or a WeightedRandomSampler."
        )
    if not isinstance(optimizer, Optimizer | Mapping):
        raise TaskError(f"optimizer is a {type(optimizer).__name__}; give one optimizer, or several by name in a dict.")
    module = model if isinstance(model, nn.Module) else nn.ModuleDict(dict(model))
    optimizers = {"main": optimizer} if isinstance(optimizer, Optimizer) else dict(optimizer)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for label, built in optimizers.items():
        if built.state:
            raise TaskError(
                f"the optimizer {label!r} has stepped before. Give the run one that is new: it loads what the run "
                "saved by itself."
            )
        if any(id(parameter) not in names for group in built.param_groups for parameter in group["params"]):
            raise TaskError(f"the optimizer {label!r} has a parameter that is not one of the run's model.")
    for label, part in state.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise TaskError(
                f"state[{label!r}] is a {type(part).__name__}, which has no state_dict and load_state_dict: the run "
                "cannot save it."
            )
    trained = [each for each in ([model] if isinstance(model, nn.Module) else model.values()) if each.training]
    schedules = {label: deepcopy(part.state_dict()) for label, part in state.items() if isinstance(part, LRScheduler)}
    hyperparameters = {label: [_plain(group) for group in built.param_groups] for label, built in optimizers.items()}
    return ScriptParts(
        module, optimizers, dataset, dict(state), schedules, collate, sample_weights, names, trained, hyperparameters
    )


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's hyperparameters that are numbers, or lists of them, as a checkpoint gives them back."""
    listed = {name: list(value) if isinstance(value, tuple) else value for name, value in group.items()}
    return {name: value for name, value in listed.items() if name != "params" and isinstance(value, int | float | list)}


# --- A step, as the script sees it ---


class LoopStep:
    """One step of a script's own loop. It is committed when the loop asks for the next one.

    All ranks call the same methods in the same order: decide by equal values only, such as ``step``, the numbers that
    :meth:`backward` returns, and the gradients after it. Code between the calls draws the same random numbers on all
    ranks; noise for each sample belongs into the loss.

    Attributes:
        step: steps done before.
        epoch: epochs done before; None if the data is a stream.
        progress: ``step`` over the steps of the run, from 0 to below 1; None if their number is unknown.
        ends_epoch: whether the epoch, or the run, ends with this step; False if the data is a stream.
        has_updated: whether :meth:`update` was called.
        left_training: whether gradients were computed with a model in evaluation mode that began in training mode.
    """

    def __init__(
        self,
        inner: ComposedStep,
        group: GroupContext,
        trainer: Trainer,
        guard: OptimizerGuard,
        parameters: Sequence[nn.Parameter],
        trained: Sequence[nn.Module],
    ) -> None:
        self._inner = inner
        self._group = group
        self._parameters = parameters
        self._optimizers_step = guard.open
        self._tracker = group.world.progress_tracker
        self._trainer = trainer
        self.step = inner.step
        self.epoch = inner.epoch
        self.progress = inner.progress
        done, steps = trainer.state.progress.step_in_epoch + 1, trainer.run.data.steps_per_epoch
        total = trainer.run.data.total_steps
        self.ends_epoch = done == steps or (steps is not None and inner.step + 1 == total)
        self.has_updated = False
        self.left_training = False
        self._trained = trained
        self._is_updating = False
        self._used: set[int] = set()  # parameters whose gradient an update has used
        for parameter in parameters:
            parameter.grad = None

    def backward(self, loss: LossOfBatch, *names: str) -> float:
        """Compute a loss and its gradient over the whole batch: one pass over the micro-batches.

        The mean gradient, with the same bits on all ranks, is added to ``parameter.grad``, as in PyTorch: within a body
        gradients add up until :meth:`update` has used them, or ``zero_grad()`` drops them. Where no micro-batch used
        the parameter, nothing is added.

        Args:
            loss: called once for each micro-batch of this rank, with the micro-batch.
            names: of optimizers; only their parameters get a gradient. By default all do.

        Returns:
            The mean loss over the batch, the same on all ranks.

        Raises:
            NonFiniteLossError: the loss or the gradient is NaN or infinite.
        """
        with self._adding_up(names):
            return self._inner.backward(lambda model, batch: loss(batch))

    def backward_over_batch(
        self,
        embed: Callable[[Any], torch.Tensor],
        loss: Callable[[torch.Tensor], torch.Tensor],
        *names: str,
    ) -> float:
        """Compute a loss of the embeddings of the whole batch; see :meth:`paceline.TrainStep.backward_over_batch`.

        Args:
            embed: returns a micro-batch's embeddings, (B, ...), one row for each sample.
            loss: takes the embeddings of all N samples, (N, ...); returns a scalar, the mean over the batch.
            names: as for :meth:`backward`.
        """
        with self._adding_up(names):
            return self._inner.backward_over_batch(lambda model, batch: embed(batch), loss)

    def update(self, *names: str, clip_norm: float | None = None, closure: Callable[[], float] | None = None) -> None:
        """Step optimizers with the gradients as they are now.

        Args:
            names: of the optimizers, in this order; by default all of them.
            clip_norm: the 2-norm to which the gradients of these optimizers' parameters are scaled down.
            closure: computes the loss again, by :meth:`backward`, for optimizers that need it, such as ``LBFGS``.
        """
        if self._trainer.state.progress.measured:
            raise TaskError(
                "step.update() was called after run.evaluate(), so the evaluated model is not the one that is saved as "
                "the best. Update first, then evaluate."
            )
        self._is_updating = True  # a closure's gradients replace each other
        try:
            with self._tracker.at_work(), self._optimizers_step():
                self._inner.update(*names, clip_norm=clip_norm, closure=closure)
        finally:
            self._is_updating = False
        state = self._trainer.state
        self._used |= {id(parameter) for name in names or state.optimizers for parameter in state.parameters_of[name]}
        self.has_updated = True

    def stop(self) -> None:
        """Let this step be the run's last, as if its length were over; all ranks call this together."""
        self._trainer.state.progress.stopped_early = True

    def log(self, **values: float) -> None:
        """Add numbers, the same on all ranks, to the step's record in ``metrics.jsonl``.

        Raises:
            TaskError: a value is not a number.
        """
        for name, value in values.items():
            try:
                self._inner.log(**{name: float(value)})
            except (TypeError, ValueError) as error:
                raise TaskError(f"step.log({name}=...) takes a number, not {value!r:.100}.") from error

    @contextmanager
    def _adding_up(self, names: tuple[str, ...]) -> Iterator[None]:
        """Add a pass's gradients, of some optimizers' parameters or all, to those that wait for an update."""
        state = self._trainer.state
        if unknown := [name for name in names if name not in state.optimizers]:
            raise TaskError(f"there is no optimizer {unknown[0]!r}; the optimizers are {', '.join(state.optimizers)}.")
        waiting = {
            id(parameter): parameter.grad.clone()
            for parameter in self._parameters
            if parameter.grad is not None and id(parameter) not in self._used and not self._is_updating
        }
        self.left_training |= not all(model.training for model in self._trained)
        with self._tracker.at_work():
            yield
        wanted = {id(parameter) for name in names for parameter in state.parameters_of[name]}
        for parameter in self._parameters:
            if names and id(parameter) not in wanted:
                parameter.grad = None
            earlier = waiting.get(id(parameter))
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)
        self._used -= {id(parameter) for parameter in self._parameters if parameter.grad is not None}

    def record_evaluation(self, name: str, metrics: Mapping[str, float]) -> None:
        """Enter an evaluation into the metrics, as of the end of this step; all ranks then draw alike again.

        With ``best_metric`` that of "val" is entered when the step is committed, and may make its model the best.
        """
        self._inner.align_random_numbers()
        if name == "val" and self._trainer.run.config.evaluation.best_metric is not None:
            self._trainer.state.progress.measured = dict(metrics)
        else:
            self._group.monitor.on_eval_end(name, self.step + 1, self.epoch or 0, metrics)


class OptimizerGuard:
    """Refuses steps of optimizers that are not part of :meth:`LoopStep.update`: clipping and sharding would miss them.

    Args:
        optimizers: guarded within the context.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._is_open = False

    def __enter__(self) -> Self:
        self._handles = [optimizer.register_step_pre_hook(self._check) for optimizer in self._optimizers]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let optimizers step within the context."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def _check(self, *unused: object) -> None:
        if not self._is_open:
            raise TaskError(
                "optimizer.step() was called in the loop. Call step.update() instead, which steps it on all ranks "
                "alike; it takes the optimizer's name where there are several."
            )


# --- The run ---


class Run:
    """A run whose steps a script computes in a loop of its own::

        run = paceline.Run("runs/mine", model, optimizer, dataset, global_batch_size=128, microbatches=12)
        for step in run.steps(epochs=3):
            step.backward(lambda batch: loss_of(model, batch))
            step.update(clip_norm=1.0)
        print(run.evaluate(lambda batch: {"accuracy": right(model, batch)}, test_data))

    The body of the loop is a transaction: the step counts once the loop asks for the next one, which commits it to the
    ledger, saves if a checkpoint is due, and stops if a signal asked for it. After any stop or fault, the same script
    continues from the newest checkpoint, which has the model, the optimizers and ``state``. The model is the same, bit
    for bit, as :func:`paceline.fit` makes from the same parts, on any number of ranks.

    A launcher starts the ranks: ``torchrun``, ``paceline launch``, ``mpirun``, ``srun``; a plain process is the only
    one. The run holds its group of ranks and the lock of its directory until :meth:`close`, or the end of the script.

    Args:
        directory: the run's; if a run is there, it continues.
        model: the model, on any device; or several, by name. The weights of rank 0 become those of all ranks.
        optimizer: built over the model's parameters, new; or several, by name.
        dataset: the training samples: map-style, ``TensorDataset`` or ``IterableDataset``.
        global_batch_size: samples of a step, over all ranks.
        state: by name, all else that a resumed run needs, with ``state_dict`` and ``load_state_dict``, such as
            schedulers. Equal on all ranks.
        collate: turns a list of samples into a batch; by default ``torch.utils.data.default_collate``.
        sample_weights: by which samples are drawn, as :meth:`paceline.Task.sample_weights` returns them.
        quiet: show nothing on the terminal.
        options: those of ``paceline train``, such as ``microbatches=12, seed=0, strategy="fsdp"``. ``num_workers`` is 0
            unless it is given, and then the loop has to be under ``if __name__ == "__main__":``.

    Attributes:
        result: how the run ended; None before.

    Raises:
        UserError: an option or a part cannot work.
    """

    def __init__(
        self,
        directory: str | Path,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | Mapping[str, Optimizer],
        dataset: Any,
        *,
        global_batch_size: int,
        state: Mapping[str, Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        sample_weights: Any = None,
        quiet: bool = False,
        **options: Unpack[LoopOptions],
    ) -> None:
        _refuse_options(options)
        self.result: Result | None = None
        self._parts = _as_parts(model, optimizer, dataset, state or {}, collate, sample_weights)
        self._options = {**options, "global_batch_size": global_batch_size, "run_dir": str(directory)}
        self._quiet = quiet
        config = config_from_mapping({**self._options, "task": OWN_LOOP}, "Run()")  # a mistake is named here
        if config.changes.preparation is not None:
            raise ConfigError(
                "Run() has no options that change the model (adapters, other weights): the script does that."
            )
        self._has_begun = False
        self._has_warned = False
        self._is_looping = False
        self._context: RunContext | None = None
        self._world: World | None = None
        self._states: StateManager | None = None
        self._step: LoopStep | None = None
        self._evaluations: dict[str, _Evaluation] = {}
        self._resources = ExitStack()
        self._closes_at_exit = finalize(self, self._resources.close)

    @property
    def rank(self) -> int:
        """This process's rank, within the loop and after it.

        Raises:
            ConfigError: the loop has not begun.
        """
        if self._world is None:
            raise ConfigError("Run.rank is known once the loop over Run.steps() has begun.")
        return self._world.rank

    def close(self) -> None:
        """Leave the group of ranks, and unlock the run's directory."""
        _open_runs.discard(self)
        self._closes_at_exit()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def steps(self, *, epochs: int | None = None, max_steps: int | None = None) -> Iterator[LoopStep]:
        """Yield the steps that are left, from the newest checkpoint on; all ranks go through them together.

        Args:
            epochs: passes over the data; by default 1.
            max_steps: steps of the whole run, instead of ``epochs``.

        Raises:
            UserError: options, parts or data cannot work; the run is as it was.
            StopRequested: a signal or the end of ``walltime`` asked for a stop; the state is saved, and the same script
                continues. A script that does not catch it exits with its code, 75 or 130.
            PacelineError: the training failed; the last checkpoint is good.
        """
        refuse_call_at_import("Run.steps()")
        if self._has_begun:
            raise ConfigError(
                "Run.steps() was called before: a run has one loop. To continue after an error, build the model and "
                "the Run again."
            )
        self._has_begun = True
        for other in list(_open_runs):
            if not other._is_looping:  # by an error in a notebook, too
                other.close()
        _open_runs.add(self)
        self._is_looping = True
        with ends_script(), ExitStack() as stack:
            stack.callback(self._end_loop)
            try:
                yield from self._steps({"epochs": epochs, "max_steps": max_steps}, stack)
            except StopRequested as stop:
                if self._world is not None and self._world.rank == 0 and not self._quiet:
                    print(f"paceline: {stop}", file=sys.stderr)
                raise

    def _steps(self, length: Mapping[str, int | None], stack: ExitStack) -> Iterator[LoopStep]:
        started = time.perf_counter()
        open_closed_streams()
        given = {**self._options, **{name: value for name, value in length.items() if value is not None}}
        config = config_from_mapping({**_DEFAULTS, **given, "task": OWN_LOOP}, "Run()")
        job = WorkerConfig(config=config, explicit_options=frozenset(given), quiet=self._quiet)
        environment = own_environment(config, given)
        require_recovery(config, environment)
        signals = stack.enter_context(StopSignals(launched=environment.source != "single"))
        self._world, directory = self._resources.enter_context(join_launched_group(job, environment))
        # Within the loop alone: Python prints an error in it later, on the terminal.
        rank, world_size = self._world.rank, self._world.world_size
        stack.enter_context(
            open_rank_log(directory, rank, world_size, quiet=self._quiet, log_format=config.records.log_format)
        )
        groups = FixedGroup(self._world)
        task = OwnLoop(Path(sys.argv[0]).name, self._parts)
        request = RunRequest(
            job=job.with_run_dir(directory.path), task=task, default_threads=default_threads(environment)
        )
        found = groups.load_manifest(directory)
        self._context, notes = set_up(request, groups, found["manifest"], directory, signals)
        if found["result"] is not None:
            last = select_checkpoint(directory.checkpoints, "last")
            restore_model(last, self._context, self._parts.module.to(self._context.device), Callback())
            task.restore_modes()
            self.result = Result.of(found["result"])
            return
        trainer = stack.enter_context(build_trainer(self._context, groups.world_size))
        self._states = trainer.states
        guard = stack.enter_context(OptimizerGuard(self._parts.optimizers.values()))
        tracker = self._world.progress_tracker
        with note_progress(tracker):
            group = enter_group(trainer, self._world, notes)
            if self._context.begins_fork_at(trainer.state.progress.version):
                task.begin_fork()
            else:
                task.warn_of_other_hyperparameters()
            task.restore_modes()
            parameters = list(trainer.state.module.parameters())  # a walk through all modules
            for step in trainer.steps(group):
                assert isinstance(step, ComposedStep), "an own loop composes its steps"
                self._step = LoopStep(step, group, trainer, guard, parameters, self._parts.trained)
                tracker.suspend()
                yield self._step
                tracker.resume()
                self._require_state()
                self._warn(self._step)
            self.result = Result.of(conclude_run(trainer, group, started))
        tracker.wait()

    def _end_loop(self) -> None:
        self._is_looping = False
        self._step = None

    def _require_state(self) -> None:
        """Reject a scheduler that the run does not save.

        Raises:
            TaskError: a scheduler has been built for an optimizer, and the run was not given one.
        """
        groups = (group for optimizer in self._parts.optimizers.values() for group in optimizer.param_groups)
        given = any(isinstance(part, LRScheduler) for part in self._parts.state.values())
        if not given and any("initial_lr" in group for group in groups):
            raise TaskError(
                "an optimizer has a learning-rate scheduler that the run does not know, so a resumed run would begin "
                'its schedule again. Give it to the run: Run(..., state={"scheduler": scheduler}).'
            )

    def _warn(self, step: LoopStep) -> None:
        """Warn once a run of what most probably was a mistake."""
        if self._has_warned or (step.has_updated and not step.left_training):
            return
        self._has_warned = True
        if not step.has_updated:
            _log.warning(
                "step %d has computed gradients that no update used. Gradients add up within one step, not over "
                "several: to accumulate more samples, give a larger global_batch_size, and more microbatches for the "
                "memory.",
                step.step + 1,
            )
        else:
            _log.warning(
                "step %d computed its gradients with the model in evaluation mode, in which the run did not begin: "
                "call model.train() after an evaluation of your own.",
                step.step + 1,
            )

    def evaluate(
        self, metrics: Callable[[Any], Mapping[str, Any]], dataset: Any, *, name: str = "val"
    ) -> dict[str, float]:
        """Evaluate the model exactly: the same numbers on any number of ranks, which all call this together.

        Within the loop the metrics are recorded, at the current step; after it they are only returned. Where the run
        has ``best_metric="accuracy:max"``, the evaluations of "val" choose the checkpoint that is kept as the best.

        Args:
            metrics: called with each batch, under ``torch.no_grad`` and with the model in evaluation mode. Returns by
                name one value for each sample, (B,), or a pair (sum, weight).
            dataset: map-style.
            name: of the split, for the record.

        Returns:
            The means, by name.

        Raises:
            DataError: the dataset cannot be read.
            TaskError: ``metrics`` returned something else.
        """
        if self._context is None or self._world is None:
            raise ConfigError("Run.evaluate() needs the ranks: call it within the loop over Run.steps(), or after it.")
        with self._world.progress_tracker.at_work():
            measured = self._evaluation(dataset, name).run(self._context, self._world, self._parts.module, metrics)
        if self._step is not None:
            self._step.record_evaluation(name, measured)
        return measured

    def model_state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict`` of the whole model on rank 0, and an empty one on the others.

        All ranks call this together, within the loop or after it. Tensors are not copied where they are whole anyway.
        """
        if self._world is None:
            raise ConfigError("Run.model_state_dict() needs the ranks: call it within the loop, or after it.")
        module = self._parts.module
        if self._states is None:  # the run was over before
            return module.state_dict() if self._world.rank == 0 else {}
        with self._world.progress_tracker.at_work():
            whole = self._states.full_model_state_dict(self._world, module)
        return whole if self._world.rank == 0 else {}

    def _evaluation(self, dataset: Any, name: str) -> _Evaluation:
        known = self._evaluations.get(name)
        if known is None or known.dataset is not dataset:
            assert self._context is not None
            task = _Metrics()
            known = _Evaluation(dataset, task, self._context.evaluator_of(dataset, name, task, with_loss=False))
            self._resources.callback(known.evaluator.close)
            self._evaluations[name] = known
        return known


def _refuse_options(options: Mapping[str, Any]) -> None:
    """Reject options that an own loop does not have.

    Raises:
        ConfigError: says what to do instead.
    """
    for names, instead in (
        (_OF_STEPS, "Give it to the loop: run.steps(epochs=3)."),
        (_OF_LAUNCHERS, "A launcher starts the ranks: torchrun --nproc-per-node 4 script.py, or paceline launch."),
        (
            _OF_WRAPPERS,
            "The loss calls the script's own model: gradients are summed exactly, and torch.compile(model) works.",
        ),
        (_OF_TASKS, "It is for tasks; in a loop of your own it is a line of the script."),
    ):
        if given := [name for name in names if name in options]:
            raise ConfigError(f"Run() has no option {given[0]}. {instead}")
