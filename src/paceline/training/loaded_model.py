"""A run's trained model, from one of its checkpoints, and the evaluation that the run would do of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from paceline.core.config import RunConfig, config_from_mapping
from paceline.core.environment import Environment, default_threads
from paceline.core.errors import CheckpointError, DataError
from paceline.core.job import WorkerConfig
from paceline.core.ownership import own_prefix
from paceline.core.task import Callback, RankInfo, Task
from paceline.core.task_loading import TaskReference, recorded_spec
from paceline.parallel.world import ParallelDims, World, open_world
from paceline.runs.checkpoint_manifest import CheckpointInfo, differences
from paceline.runs.checkpoint_selection import select_checkpoint
from paceline.runs.checkpointer import Checkpoint, load
from paceline.runs.directory import RunDirectory
from paceline.training.control import StopCause, StopSignals
from paceline.training.evaluation import Evaluator, Observe
from paceline.training.hooks import build_preparation
from paceline.training.reproducibility import numerics_fingerprint, preserve_numerics, seed_model
from paceline.training.run_context import RunContext, RunRequest, setup_run
from paceline.training.state import (
    PREFIXES,
    build_task_callback,
    build_task_model,
    complete,
    frozen_parameters,
    load_changed_buffers,
    require_base,
)

Device = Literal["auto", "cpu", "cuda"]

Fill = Callable[[RunContext, nn.Module, Callback], tuple[int, int]]
"""Loads what was saved into a model and its callback; returns the steps and epochs that it had done."""


def load_model(
    directory: RunDirectory,
    wanted: str | None = None,
    *,
    model: nn.Module | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Build the model of a run's task again, with the weights of a checkpoint; the data is not needed.

    Args:
        wanted: which checkpoint, as :func:`paceline.runs.checkpoint_selection.select_checkpoint` says.
        model: filled instead, where a script builds the model itself.

    Returns:
        The model in evaluation mode: the moving average where the run keeps one.

    Raises:
        UserError: the directory holds no run, or its task cannot be built.
        CheckpointError: there is no such checkpoint, it is damaged, or does not fit the model as it is now.
    """
    manifest = directory.read_complete_manifest()
    path = select_checkpoint(directory.checkpoints, wanted)
    config = config_from_mapping(manifest["config"], str(directory.manifest))
    built = None
    if model is None:
        with preserve_numerics():
            _, model = built = _build_again(manifest, config)
    _fill_model(path, read_checkpoint(directory, path, built=built).state, model, config)
    return model.to(device).eval()


@dataclass(frozen=True, kw_only=True)
class EvaluableModel:
    """A model, ready to be evaluated on one process as its run would.

    Attributes:
        run: the run that trained it, with the recorded options.
        module: the model, in evaluation mode: the moving average where the run keeps one.
    """

    run: RunContext
    module: nn.Module
    _world: World
    _callback: Callback

    def evaluator(self, split: str) -> Evaluator | None:
        """Build the evaluator of "val" or "test", or None if the run has no such split; the caller closes it.

        Raises:
            DataError: the dataset cannot be read.
        """
        return self.run.build_evaluator(split)

    def evaluate(
        self, evaluator: Evaluator, split: str, observe: Observe | None = None, *, module: nn.Module | None = None
    ) -> dict[str, float]:
        """Compute the metrics of a split, by name, as the run itself would record them.

        Args:
            module: evaluated instead of the model.

        Raises:
            TaskError: the task's metrics are not what they should be.
        """
        module = self.module if module is None else module
        self._callback.on_eval_begin(split, module)
        mesh = ParallelDims(self._world, {"dp": 1})
        measured = evaluator.run(mesh, module, lambda: StopCause.NONE, observe=observe)
        return dict(self._callback.on_eval_end(split, measured))


@dataclass(frozen=True, kw_only=True)
class LoadedModel(EvaluableModel):
    """The model of one of a run's checkpoints.

    Attributes:
        is_best: whether it is the best model so far.
    """

    path: Path
    info: CheckpointInfo
    is_best: bool

    @property
    def changed_numerics(self) -> list[str]:
        """In what this process differs from the one that wrote the checkpoint, where bits depend on it."""
        now = numerics_fingerprint(self.run.config, self.run.device)
        return differences(self.info.pins, now)


@contextmanager
def load_trained_model(
    directory: RunDirectory, wanted: str | None = None, *, device: Device = "auto", task: str = ""
) -> Iterator[LoadedModel]:
    """Build the run's task and model again, and load a checkpoint into it.

    Args:
        directory: the run's; nothing is written there.
        wanted: which checkpoint, as :func:`paceline.runs.checkpoint_selection.select_checkpoint` says.
        device: where the model goes; ``auto`` is a GPU where there is one.
        task: where the task's class is now, if not where it was when the run was trained.

    Raises:
        UserError: the directory holds no run, or its task or data cannot be built.
        CheckpointError: there is no such checkpoint, it is damaged, or does not fit the task as it is now.
    """
    manifest = directory.read_complete_manifest()
    path = select_checkpoint(directory.checkpoints, wanted)
    infos = []

    def fill(run: RunContext, module: nn.Module, callback: Callback) -> tuple[int, int]:
        info = restore_model(path, run, module, callback)
        infos.append(info)
        return info.step, info.epoch

    with load_evaluable_model(directory, manifest, fill, device=device, task=task) as model:
        (info,) = infos
        yield LoadedModel(
            run=model.run,
            module=model.module,
            path=path,
            info=info,
            is_best=info.best_version == info.state_version,
            _world=model._world,
            _callback=model._callback,
        )


@contextmanager
def load_evaluable_model(
    directory: RunDirectory, manifest: Mapping[str, Any], fill: Fill, *, device: Device = "auto", task: str = ""
) -> Iterator[EvaluableModel]:
    """Build a recorded task and its model again, and have them filled.

    Args:
        directory: the run's, for messages; nothing is read or written there.
        manifest: the tables ``task`` and ``config`` of ``run.toml``.
        fill: loads what was saved.
        device: where the model goes; ``auto`` is a GPU where there is one.
        task: its class, if not where the record says.

    Raises:
        UserError: the task or its data cannot be built.
    """
    alone = Environment()
    with (
        preserve_numerics(),
        tempfile.TemporaryDirectory(prefix=own_prefix("model")) as scratch,
        open_world(alone, device=device) as world,
    ):
        config = RunConfig(run_dir=str(directory.path), device=device, task=task)
        request = RunRequest(
            worker_config=WorkerConfig(config=config, quiet=True), task=None, default_threads=default_threads(alone)
        )
        run, _ = setup_run(request, manifest, directory, StopSignals(), device=world.device, world_size=1, processes=1)
        seed_model(run.config.training.seed)
        module = build_task_model(run.task, manifest).to(run.device)
        callback = build_task_callback(run.task, module, run.run_schedule)
        with closing(callback):
            step, epoch = fill(run, module, callback)
            callback.attach(_alone(run, Path(scratch)), step=step, epoch=epoch)
            module.eval()
            yield EvaluableModel(run=run, module=module, _world=world, _callback=callback)


def make_evaluator(trained: EvaluableModel, split: str) -> Evaluator:
    """Build the evaluator of a required split.

    Raises:
        DataError: the run has no such split; the message says which it has.
    """
    evaluator = trained.evaluator(split)
    if evaluator is not None:
        return evaluator
    others = []
    for name in ("test", "val"):
        other = trained.evaluator(name) if name != split else None
        if other is not None:
            other.close()
            others.append(name)
    hint = f"Use --split {others[0]}." if others else "It has no test and no validation split."
    raise DataError(f"{trained.run.directory.path} has no {split} split. {hint}")


def read_checkpoint(
    directory: RunDirectory, path: Path, *, task: str = "", built: tuple[Task, nn.Module] | None = None
) -> Checkpoint:
    """Read a checkpoint of a run, with the frozen parameters that it leaves out: the run's model is built again.

    Args:
        task: where the task's class is now, if not where it was when the run was trained.
        built: the task and its model, on the CPU, where they are built already; they stay as they are.

    Raises:
        CheckpointError: it is damaged.
        UserError: the task cannot be built, or its base has changed.
    """
    checkpoint = load(path)
    if "base" not in checkpoint.state:
        return checkpoint
    state, manifest = dict(checkpoint.state), directory.read_complete_manifest()
    config = config_from_mapping(manifest["config"], str(directory.manifest))
    with preserve_numerics():
        its, module = _build_again(manifest, config, task) if built is None else (built[0], deepcopy(built[1]))
        require_base(its.frozen_base(), state["base"])
        build_preparation(config).prepare(module)
    for part, names in frozen_parameters(module).items():
        if part in state:
            state[part] = complete(state, part, module.state_dict(prefix=PREFIXES[part]), names)
    return checkpoint._replace(state=state)


def _build_again(manifest: Mapping[str, Any], config: RunConfig, spec: str = "") -> tuple[Task, nn.Module]:
    task = TaskReference(spec or recorded_spec(manifest["task"]), manifest["task"]["fields"]).load()
    seed_model(config.training.seed)
    return task, build_task_model(task, manifest)


def evaluated_weights(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the evaluated weights of a checkpoint, by the names of the trained model: the moving average, if any.

    Raises:
        CheckpointError: it holds no model.
    """
    if "model" not in state:
        raise CheckpointError("the checkpoint holds no model.")
    if "ema" not in state:
        return dict(state["model"])
    entries, prefix = state["ema"].items(), PREFIXES["ema"]
    return {name.removeprefix(prefix): value for name, value in entries if name.startswith(prefix)}


def restore_model(path: Path, run: RunContext, module: nn.Module, callback: Callback) -> CheckpointInfo:
    """Load a checkpoint's model, and what it has of the callback and the task; return what it says of itself.

    Raises:
        CheckpointError: it is damaged, or does not fit the task as it is now.
    """
    checkpoint = read_checkpoint(run.directory, path, task=run.task_name)
    state = checkpoint.state
    _fill_model(path, state, module, run.config)
    with _explain_misfit(path):
        callback.load_state_dict(state.get("callback", {}))
        if "task" in state:
            run.task.load_state_dict(state["task"])
    return checkpoint.manifest.info


def _fill_model(path: Path, state: Mapping[str, Any], module: nn.Module, config: RunConfig) -> None:
    with _explain_misfit(path):
        module.load_state_dict(build_preparation(config).task_weights(evaluated_weights(state)))
        load_changed_buffers(module, state.get("ema_buffers" if "ema" in state else "buffers", {}))


@contextmanager
def _explain_misfit(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"checkpoint {path} does not fit the task as it is now: {error}\n"
            "Check out the task's code as it was when the run was trained."
        ) from error


def _alone(run: RunContext, scratch: Path) -> RankInfo:
    """Make a group of this process alone; the task's loggers write nothing."""
    return RankInfo(
        rank=0,
        world_size=1,
        local_rank=0,
        device=torch.device(run.device),
        directory=scratch,
        log_every=run.config.records.log_every,
        gather=lambda value: [value],
        trains=False,
    )
