"""A script's own loop over the steps of a run: ``paceline.Run``."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack
from weakref import WeakSet, finalize

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.api import Result, ends_script
from paceline.core.config import config_from_mapping
from paceline.core.environment import default_threads
from paceline.core.errors import ConfigError, PeerLostError, StopRequested, TaskError
from paceline.core.job import WorkerConfig
from paceline.core.standard_streams import open_closed_streams
from paceline.core.task import Callback, Task
from paceline.core.task_loading import refuse_call_at_import
from paceline.elastic.worker_channel import HeartbeatState
from paceline.launch.local_run import own_environment, require_recovery
from paceline.parallel.world import World
from paceline.runs.checkpoint_selection import select_checkpoint
from paceline.runs.directory import OWN_LOOP
from paceline.runs.rank_log import open_rank_log
from paceline.runs.rank_progress import note_progress
from paceline.training.control import StopCause, StopSignals
from paceline.training.group_context import alone
from paceline.training.loaded_model import restore_model
from paceline.training.run_context import RunContext, RunRequest
from paceline.training.session import (
    FixedGroup,
    Groups,
    JoinedGroup,
    build_trainer,
    conclude_run,
    enter_group,
    set_up,
)
from paceline.training.state_manager import StateManager
from paceline.training.trainer import Trainer
from paceline.training.worker import join_launched_group
from paceline_own_loop.composed_step import ComposedStep
from paceline_own_loop.parts import OwnLoop, as_parts
from paceline_own_loop.ranks import start_ranks, started_rank, starts_ranks
from paceline_own_loop.step import LoopStep, OptimizerGuard

if TYPE_CHECKING:
    from paceline.core.run_options import LoopOptions

_log = logging.getLogger(__name__)
_open_runs: WeakSet[Run] = WeakSet()

# Workers run the script once more, which needs a guard that most loops do not have. A script's epoch may be its run.
_DEFAULTS = {"num_workers": 0, "checkpoint_every": ("1epochs", "10min")}
OF_STEPS = ("epochs", "max_steps")
OF_TASKS = ("set", "val_fraction", "early_stop", "eval_every", "ema")
OF_LAUNCHERS = ("nodes", "on")
OF_WRAPPERS = ("compile", "reduction")


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

    A plain process is the only rank. With ``nproc=4`` it starts four, each of which runs the script; it ends as they
    end, and replaces those that die, while the others continue in place. Or a launcher starts the ranks: ``torchrun``,
    ``paceline launch``, ``mpirun``, ``srun``. The run holds its group of ranks and the lock of its directory until
    :meth:`close`, or the end of the script.

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
        self._parts = as_parts(model, optimizer, dataset, state or {}, collate, sample_weights)
        self._options = {**options, "global_batch_size": global_batch_size, "run_dir": str(directory)}
        self._quiet = quiet
        config = config_from_mapping({**self._options, "task": OWN_LOOP}, "Run()")  # a mistake is named here
        if config.changes.preparation is not None:
            raise ConfigError(
                "Run() has no options that change the model (adapters, other weights): the script does that."
            )
        self._has_begun = False
        self._has_entered = False
        self._outlives_losses = False
        self._pulse = HeartbeatState()
        self._has_lost_group = False
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

        ``len()`` of what is returned, which ``tqdm`` asks for, begins the loop; a stream by epochs has none.

        Args:
            epochs: passes over the data; by default 1.
            max_steps: steps of the whole run, instead of ``epochs``.

        Raises:
            UserError: options, parts or data cannot work; the run is as it was.
            StopRequested: a signal or the end of ``walltime`` asked for a stop; the state is saved, and the same script
                continues. A script that does not catch it exits with its code, 75 or 130.
            PacelineError: the training failed; the last checkpoint is good.
        """
        return _Steps(self._loop({"epochs": epochs, "max_steps": max_steps}), self._count_left)

    def _loop(self, length: Mapping[str, int | None]) -> Iterator[LoopStep]:
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
                yield from self._steps(length, stack)
            except StopRequested as stop:
                is_agents = started_rank(str(self._options["run_dir"])) is not None  # which says it itself
                if self._world is not None and self._world.rank == 0 and not (self._quiet or is_agents):
                    print(f"paceline: {stop}", file=sys.stderr)
                raise

    def _steps(self, length: Mapping[str, int | None], stack: ExitStack) -> Iterator[LoopStep]:
        started = time.perf_counter()
        open_closed_streams()
        given = {**self._options, **{name: value for name, value in length.items() if value is not None}}
        config = config_from_mapping({**_DEFAULTS, **given, "task": OWN_LOOP}, "Run()")
        worker_config = WorkerConfig(config=config, explicit_options=frozenset(given), quiet=self._quiet)
        task = OwnLoop(Path(sys.argv[0]).name, self._parts)
        groups: Groups
        if (started_here := started_rank(str(given["run_dir"]))) is not None:
            signals = stack.enter_context(StopSignals(launched=True))
            groups, directory = started_here.groups, started_here.directory
            self._pulse = started_here.groups.agent.pulse
            request = replace(started_here.request, task=task)
            started_here.close = self.close
            self._outlives_losses = not request.worker_config.config.parallel.shards_state
        else:
            environment = own_environment(config, given)
            if environment.source == "single" and starts_ranks(worker_config):
                start_ranks(worker_config)
            require_recovery(config, environment)
            signals = stack.enter_context(StopSignals(launched=environment.source != "single"))
            self._world, directory = self._resources.enter_context(join_launched_group(worker_config, environment))
            # Within the loop alone: Python prints an error in it later, on the terminal.
            rank, world_size = self._world.rank, self._world.world_size
            stack.enter_context(
                open_rank_log(directory, rank, world_size, quiet=self._quiet, log_format=config.records.log_format)
            )
            groups = FixedGroup(self._world)
            request = RunRequest(
                worker_config=worker_config.with_run_dir(directory.path),
                task=task,
                default_threads=default_threads(environment),
            )
        found = groups.load_manifest(directory)
        self._context, notes = set_up(request, groups, found["manifest"], directory, signals)
        if found["result"] is not None:
            last = select_checkpoint(directory.checkpoints, "last")
            restore_model(last, self._context, self._parts.module.to(self._context.device), Callback())
            task.restore_modes()
            self.result = Result.of(found["result"])
            return
        trainer = stack.enter_context(build_trainer(self._context, groups.world_size, groups.agent))
        self._states = trainer.states
        guard = stack.enter_context(OptimizerGuard(self._parts.optimizers.values()))
        joined_groups = groups.join(trainer)
        self._resources.callback(joined_groups.close)  # the script may use the last group after the loop
        for joined in joined_groups:
            self._world = joined.world
            with joined:
                yield from self._steps_in_group(trainer, joined, guard, notes, started)
            task.note_modes()
            if joined.result is not None:
                break
        else:
            self._has_lost_group = True
        result = joined.result or directory.read_result()
        assert result is not None, "the last group has the result"
        self.result = Result.of(result)

    def _steps_in_group(
        self, trainer: Trainer, joined: JoinedGroup, guard: OptimizerGuard, notes: list[str], started: float
    ) -> Iterator[LoopStep]:
        """Yield the steps of one group of ranks, and conclude the run if it ends in it.

        Raises:
            PeerLostError: a rank is gone.
        """
        task, tracker = trainer.run.task, joined.world.progress_tracker
        assert isinstance(task, OwnLoop)
        with note_progress(tracker):
            group = enter_group(trainer, joined.world, notes)
            joined.can_train()
            if trainer.run.begins_fork_at(trainer.state.progress.version):
                task.begin_fork()
            elif not self._has_entered:
                task.warn_of_other_hyperparameters()
            self._has_entered = True
            task.restore_modes()
            parameters = list(trainer.state.module.parameters())  # a walk through all modules
            for inner in trainer.steps(group):
                assert isinstance(inner, ComposedStep), "an own loop composes its steps"
                if group.can_lose_ranks:
                    task.begin_body()
                self._step = step = LoopStep(
                    inner, group, trainer, guard, parameters, self._parts.trained, group.can_lose_ranks
                )
                self._pulse.phase = "script"  # which may take long to leave a broken group
                tracker.suspend()
                yield step
                tracker.resume()
                self._pulse.phase = "training"
                step.leave_group()
                task.end_body()
                if step.loss_of_rank is not None:
                    raise step.loss_of_rank
                self._require_state()
                self._warn(step)
            if trainer.finished:
                joined.result = conclude_run(trainer, group, started)
        tracker.wait()

    def _end_loop(self) -> None:
        self._is_looping = False
        self._step = None

    def _count_left(self) -> int:
        if self._states is None or self._context is None:
            return 0
        if (total := self._context.data.total_steps) is None:
            raise TypeError("how many steps there are is not known: the data is a stream")
        return total - self._states.state.progress.step

    def _require_state(self) -> None:
        """Reject a scheduler that the run does not save."""
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
        evaluation = self._evaluations.get(name)
        if evaluation is None or evaluation.dataset is not dataset:
            evaluation = self._evaluations[name] = _Evaluation(dataset, name, self._context)
            self._resources.callback(evaluation.evaluator.close)
        evaluation.of_batch = metrics
        measure = partial(evaluation.run, self._context, self._parts.module)
        measured = None
        if not (self._has_lost_group or (self._step is not None and self._step.loss_of_rank is not None)):
            losses = suppress(PeerLostError) if self._outlives_losses else nullcontext()
            with losses, self._world.progress_tracker.at_work():
                measured = measure(self._world)
        if measured is None:
            measured = measure(alone(self._world))  # the same numbers, of all data on this rank
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


def _refuse_options(options: Mapping[str, Any]) -> None:
    """Reject options that an own loop does not have."""
    for names, instead in (
        (OF_STEPS, "Give it to the loop: run.steps(epochs=3)."),
        (
            OF_LAUNCHERS,
            "nproc=4 starts four ranks here; on several nodes torchrun or paceline launch does.",
        ),
        (
            OF_WRAPPERS,
            "The loss calls the script's own model: gradients are summed exactly, and torch.compile(model) works.",
        ),
        (OF_TASKS, "It is for tasks; in a loop of your own it is a line of the script."),
    ):
        if given := [name for name in names if name in options]:
            raise ConfigError(f"Run() has no option {given[0]}. {instead}")


class _Evaluation(Task):
    """A dataset that :meth:`Run.evaluate` evaluates, perhaps many times, by the metrics of a task.

    Attributes:
        of_batch: computes them, in the evaluation that runs now.
    """

    of_batch: Callable[[Any], Mapping[str, Any]]

    def __init__(self, dataset: Any, name: str, context: RunContext) -> None:
        self.dataset = dataset
        self.evaluator = context.evaluator_of(dataset, name, self, with_loss=False)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return self.of_batch(batch)

    def run(self, context: RunContext, module: nn.Module, world: World) -> dict[str, float]:
        is_collective = context.config.parallel.shards_state
        return self.evaluator.run(
            context.build_mesh(world), module, lambda: StopCause.NONE, is_collective=is_collective
        )


class _Steps(Iterator[LoopStep]):
    """The steps of a loop, and how many are left."""

    def __init__(self, steps: Iterator[LoopStep], count_left: Callable[[], int]) -> None:
        self._steps = steps
        self._count_left = count_left
        self._has_begun = False

    def __next__(self) -> LoopStep:
        self._has_begun = True
        return next(self._steps)

    def __len__(self) -> int:
        if not self._has_begun:
            self._has_begun = True
            self._steps = chain(list(islice(self._steps, 1)), self._steps)
        return self._count_left()
