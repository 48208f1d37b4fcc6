"""A run that all ranks agreed on: how it follows from the directory and the request, and the parts built from it."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import WeightedRandomSampler

from paceline import __version__
from paceline.core.built_in import PARTS
from paceline.core.config import ResolvedConfig, RunConfig, all_options, config_from_mapping, resumed_options
from paceline.core.errors import ConfigError, DataError, RunDirectoryError
from paceline.core.files import is_address, see_listed
from paceline.core.job import WorkerConfig
from paceline.core.plugins import import_object, install_command
from paceline.core.task import RunSchedule, Task
from paceline.core.task_loading import (
    TaskReference,
    build_task,
    load_task_class,
    parse_assignments,
    record_spec,
    recorded_spec,
    task_fields,
)
from paceline.data.loader import EvalBatches, build_loader, resolve_workers
from paceline.data.order import (
    DeterministicSampler,
    WeightedDraws,
    check_lengths,
    check_weights,
    require_same_order,
    save_order,
)
from paceline.data.samples import Loader
from paceline.data.stream import ShardedStream, StreamLoader, as_stream
from paceline.data.train_val_split import Split, TrainValSplit, split_train_val
from paceline.parallel.options import PipelineOptions
from paceline.parallel.strategy import AMP_DTYPES, ExampleBatchProvider, ParameterLayout, Strategy, StrategyOptions
from paceline.parallel.strategy_selection import build_layout, build_strategy, choose_strategy
from paceline.parallel.world import ParallelDims, World
from paceline.runs.directory import EpochSteps, Fork, RunDirectory
from paceline.runs.metric_writers import Writer, has_tensorboard
from paceline.runs.monitor import Monitor
from paceline.torch_internals import describe_untested
from paceline.training.control import ROW_LENGTH, Deadline, Schedule, StopSignals
from paceline.training.evaluation import Evaluator
from paceline.training.hooks import InitialWeights, ModelPreparation, build_preparation
from paceline.training.reproducibility import (
    build_split,
    configure_numerics,
    fix_cublas_workspace,
    numerics_fingerprint,
)
from paceline.training.state import explain_missing_base

if TYPE_CHECKING:
    from paceline.runs.backup import RunBackup
    from paceline.training.hooks import RunHook

# --- The run and its parts ---


_EVAL_MICROBATCHES = 4  # an evaluation batch holds this many micro-batches' samples: no gradients are kept


# --- The data, and the length of the run ---


@dataclass(frozen=True)
class DataSetup:
    """The training data and the run's length.

    Attributes:
        train: the dataset, where it is map-style.
        stream: the dataset, where it is one of streams.
        order: of the training samples; None for streams.
        train_val_split: if a validation split is taken out of ``train``.
        val: the task's own validation split, or None.
        total_steps: of the whole run; None for streams run by epochs.
        epochs: where epochs begin; None for streams.
    """

    train: Any
    stream: ShardedStream | None
    order: DeterministicSampler | None
    train_val_split: TrainValSplit | None
    val: Any
    total_steps: int | None
    epochs: EpochSteps | None = None

    @property
    def steps_per_epoch(self) -> int | None:
        """None for streams."""
        return None if self.order is None else self.order.steps_per_epoch

    @property
    def tokens_per_sample(self) -> float | None:
        """The mean, where the dataset has a number of ``tokens``."""
        tokens = getattr(self.train, "tokens", None)
        return None if self.order is None or not isinstance(tokens, int | float) else tokens / len(self.train)

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation split."""
        return self.train_val_split is not None or self.val is not None


def set_up_data(config: ResolvedConfig, task: Task, manifest: Mapping[str, Any] | None = None) -> DataSetup:
    """Build the training and validation datasets and the order of the samples.

    Args:
        manifest: the content of ``run.toml``; None for a new run.

    Raises:
        ConfigError: batch, micro-batches and data do not fit together.
        DataError: a dataset is missing or of an unknown kind.
    """
    train = build_split(task, config.training.seed, "train")
    if train is None:
        raise DataError(f'{type(task).__name__}.build_dataset("train") returned None; there is nothing to train on.')
    val = build_split(task, config.training.seed, "val")
    if config.evaluation.early_stop is not None and val is None and config.data.val_fraction is None:
        raise ConfigError(
            f"--early-stop needs a validation split, and {type(task).__name__} has none. "
            "Carve one out of the training data with --val-fraction 0.1, or leave --early-stop out."
        )
    stream = as_stream(train)
    if stream is not None:
        if config.data.val_fraction is not None:
            raise ConfigError("--val-fraction needs a dataset with a length; a stream has none.")
        if task.sample_weights(train) is not None:
            raise DataError(f"{type(task).__name__}.sample_weights needs a dataset with a length; a stream has none.")
        if "pp" in config.strategies and config[PipelineOptions].pp_schedule == "pipedream":
            raise ConfigError(
                "--pp-schedule pipedream reads one step ahead, which a stream cannot without knowing that "
                "there is one. Use --pp-schedule 1f1b."
            )
        steps, samples = config.training.max_steps, getattr(train, "run_samples", None)
        if steps is None and samples is not None:
            steps = -(-samples // config.global_batch_size)
        return DataSetup(train, stream, None, None, val, steps)
    if not callable(getattr(train, "__len__", None)):
        raise DataError(
            f"the train dataset ({type(train).__name__}) has no length and is not an IterableDataset. "
            "Return a map-style dataset (__len__ and __getitem__) or a stream."
        )
    num_samples = len(train)
    train_val_split = None
    if config.data.val_fraction is not None:
        if val is not None:
            raise ConfigError(f"{type(task).__name__} has its own validation split; leave --val-fraction out.")
        if callable(getattr(train, "split_train_val", None)):  # samples are made of others, which it must split
            train, val = train.split_train_val(config.data.val_fraction, config.training.seed)
            num_samples = len(train)
        else:
            train_val_split = split_train_val(num_samples, config.data.val_fraction, config.training.seed)
            num_samples = len(train_val_split.train)
    order = DeterministicSampler(
        num_samples,
        config.global_batch_size,
        config.microbatches,
        config.training.seed,
        task.min_microbatch_size,
        config.data.shuffle,
    )
    numbers = slice(None) if train_val_split is None else train_val_split.train(np.arange(num_samples))
    given = task.sample_weights(train)
    if given is not None:
        sampler = given if isinstance(given, WeightedRandomSampler) else None
        weights = check_weights(given if sampler is None else sampler.weights, len(train), type(task).__name__)
        draws = WeightedDraws(weights[numbers], sampler is None or sampler.replacement)
        order = replace(order, draws=draws, num_samples=num_samples if sampler is None else sampler.num_samples)
    sizes = task.sample_lengths(train)
    if sizes is not None:
        order = replace(order, lengths=check_lengths(sizes, len(train), type(task).__name__)[numbers])
    recorded = EpochSteps.of(manifest or {})
    epochs = (
        EpochSteps(order.steps_per_epoch) if recorded is None else replace(recorded, per_epoch=order.steps_per_epoch)
    )
    total_steps = config.training.max_steps
    if total_steps is None:
        assert config.training.epochs is not None
        total_steps = epochs.begin(config.training.epochs)
    return DataSetup(train, None, order, train_val_split, val, total_steps, epochs)


# --- The run ---


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a trainer works on.

    Attributes:
        task_name: the name that checkpoints record.
        config: the options, with all defaults resolved.
        processes: how many processes share this node.
        directory: the run directory, at least on the node of rank 0.
        manifest: the content of ``run.toml``, which another node may see late; empty until the run is created.
        deadline: when the job has to stop by itself.
        trial_scheduler: the socket of the scheduler that decides after each evaluation whether the run continues.
    """

    task: Task
    task_name: str
    config: ResolvedConfig
    data: DataSetup
    device: torch.device
    processes: int
    directory: RunDirectory
    manifest: dict[str, Any]
    signals: StopSignals
    deadline: Deadline
    quiet: bool
    trial_scheduler: str | None = None

    @property
    def run_id(self) -> str:
        """The unique id of the run, which was created."""
        return str(self.manifest["id"])

    def begins_fork_at(self, version: int) -> bool:
        """Return whether this run has other hyperparameters than the run whose state of this version it begins with."""
        fork = Fork.of(self.manifest)
        return fork is not None and bool(fork.changed or fork.options) and fork.version == version

    @cached_property
    def preparation(self) -> ModelPreparation:
        """What the options change in the task's model."""
        return build_preparation(self.config)

    @cached_property
    def hooks(self) -> tuple[RunHook, ...]:
        """What options, and the search whose trial this is, add to the run in this process."""
        of_search = () if self.trial_scheduler is None else (PARTS["trials"],)
        return tuple(import_object(reference)(self) for reference in (*self.config.changes.hooks, *of_search))

    def watch_evaluation(self, module: nn.Module) -> ExitStack:
        """Return the contexts of all hooks for an evaluation of the model."""
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.watch_evaluation(module))
            return stack.pop_all()

    @cached_property
    def backup(self) -> RunBackup | None:
        """The copies of ``--backup-to``, for rank 0; None without it."""
        records = self.config.records
        if records.backup_to is None:
            return None
        backup: RunBackup = import_object(PARTS["--backup-to"])(
            records.backup_to, self.directory, records.keep_checkpoints
        )
        return backup

    @property
    def num_microbatches(self) -> int:
        """S."""
        return self.config.microbatches

    @property
    def global_batch_size(self) -> int:
        """G, in samples."""
        return self.config.global_batch_size

    @cached_property
    def schedule(self) -> Schedule:
        """When epochs, evaluations, synchronizations and the run end."""
        return Schedule(self.config, self.data)

    @property
    def run_schedule(self) -> RunSchedule:
        """The description of the run for a task's callback."""
        data = self.data
        return RunSchedule(
            total_steps=data.total_steps,
            steps_per_epoch=data.steps_per_epoch,
            epochs=self.config.training.epochs if data.epochs is None else data.epochs.number(data.total_steps),
            eval_every=self.config.evaluation.eval_every,
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a new autocast context of the run's precision."""
        if self.config.training.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, AMP_DTYPES[self.config.training.precision])

    def build_loader(self, *, workers: int | None = None) -> Loader:
        """Build the loader of the training data.

        Args:
            workers: processes that read it; by default as the options say.

        Raises:
            DataError: the dataset cannot be read.
        """
        data, task = self.data, self.task
        check = workers is None and any(hook.checks_samples for hook in self.hooks)
        if data.stream is not None:
            return StreamLoader(
                data.stream,
                global_batch_size=self.global_batch_size,
                num_microbatches=self.num_microbatches,
                min_microbatch_size=task.min_microbatch_size,
                seed=self.config.training.seed,
                device=self.device,
                collate=task.collate,
                check=check,
            )
        assert data.order is not None
        return build_loader(
            data.train,
            data.order,
            seed=self.config.training.seed,
            device=self.device,
            workers=resolve_workers(data.train, task.collate, self.config.data.num_workers, self.processes)
            if workers is None
            else workers,
            collate=task.collate,
            index_map=None if data.train_val_split is None else data.train_val_split.train,
            check=check,
        )

    def build_evaluator(self, split: str) -> Evaluator | None:
        """Build the evaluator of "val" or "test", or None if the task has no such split.

        Raises:
            DataError: the dataset cannot be read.
        """
        batches = self.build_eval_batches(split)
        return None if batches is None else self._evaluator(batches, split, self.task)

    def evaluator_of(self, dataset: Any, split: str, task: Task, *, with_loss: bool) -> Evaluator:
        """Build the evaluator of a dataset that is not the task's own.

        Raises:
            DataError: the dataset cannot be read.
        """
        return self._evaluator(self._eval_batches(dataset, split), split, task, with_loss=with_loss)

    def _evaluator(self, batches: EvalBatches, split: str, task: Task, *, with_loss: bool = True) -> Evaluator:
        seed = self.config.training.seed
        return Evaluator(
            task, self.device, batches, seed=seed, autocast=self.autocast, split=split, with_loss=with_loss
        )

    @property
    def eval_batch_size(self) -> int:
        """Samples of an evaluation batch."""
        return _EVAL_MICROBATCHES * -(-self.global_batch_size // self.num_microbatches)

    def build_eval_batches(self, split: str) -> EvalBatches | None:
        """Build the evaluation batches of "val" or "test", or None if the task has no such split.

        Raises:
            DataError: the dataset cannot be read.
        """
        data = self.data
        if split == "val" and data.train_val_split is not None:
            return self._eval_batches(data.train, split, data.train_val_split.val)
        dataset = data.val if split == "val" else build_split(self.task, self.config.training.seed, split)
        return None if dataset is None else self._eval_batches(dataset, split)

    def _eval_batches(self, dataset: Any, split: str, index_map: Split | None = None) -> EvalBatches:
        collate = self.task.collate
        return EvalBatches(
            dataset,
            self.eval_batch_size,
            seed=self.config.training.seed,
            device=self.device,
            workers=resolve_workers(dataset, collate, self.config.data.num_workers, self.processes),
            collate=collate,
            index_map=index_map,
            split=split,
        )

    def build_mesh(self, world: World) -> ParallelDims:
        """Lay out the ranks of ``world`` by the options; all of them call this together.

        Raises:
            ConfigError: the options are for another number of ranks.
        """
        return ParallelDims(world, self.config.parallel.axes(world.world_size))

    def build_layout(self, mesh: ParallelDims, example_batch: ExampleBatchProvider) -> ParameterLayout:
        """Build the layout of the model on the ranks.

        Raises:
            ConfigError: the model cannot be laid out on this number of ranks.
        """
        return build_layout(self.config, mesh, self.task, example_batch)

    def build_strategy(self, module: nn.Module, mesh: ParallelDims, work_split: tuple[int, ...]) -> Strategy:
        """Build the strategy with the model; all ranks call this together.

        Raises:
            ConfigError: it cannot work with so many processes.
        """
        return build_strategy(module, mesh, self.strategy_options(work_split))

    def strategy_options(self, work_split: tuple[int, ...]) -> StrategyOptions:
        """Return the common arguments of all strategies."""
        return StrategyOptions(
            config=self.config,
            work_split=work_split,
            row_length=ROW_LENGTH,
            static_graph=self.task.static_graph,
            directory=self.directory.path,
        )

    def build_monitor(self, world: World, first_step: int) -> Monitor:
        """Build the monitor, which shows and records this rank's progress from a step on."""
        return Monitor(
            self.directory,
            rank=world.rank,
            world_size=world.world_size,
            computing=world.num_active,
            total_steps=self.data.total_steps,
            epochs=self.data.epochs,
            first_step=first_step,
            log_every=self.config.records.log_every,
            quiet=self.quiet,
            log_format=self.config.records.log_format,
            device=self.device,
            tokens_per_sample=self.data.tokens_per_sample,
            trackers=self._build_trackers,
        )

    def _build_trackers(self, earlier: Sequence[Mapping[str, Any]]) -> Sequence[Writer]:
        if not self.config.records.log_to:
            return ()
        writers: Sequence[Writer] = import_object(PARTS["--log-to's writers"])(
            self.config.records.log_to, self.directory, earlier
        )
        return writers


# --- Before training: the run that follows from a directory's content and the request ---


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The request for a run, before defaults are resolved; the same on every rank.

    Attributes:
        worker_config: the options, and which of them the user gave.
        task: the task itself, if a script has built it; else the job names it.
        default_threads: CPU threads of this process, if neither options nor the run's record say.
    """

    worker_config: WorkerConfig
    task: Task | None
    default_threads: int


def setup_run(
    request: RunRequest,
    manifest: Mapping[str, Any] | None,
    directory: RunDirectory,
    signals: StopSignals,
    *,
    device: torch.device,
    world_size: int,
    processes: int,
    memory: int | None = None,
) -> tuple[RunContext, list[str]]:
    """Set up the requested run; return it, and lines to print when it is created.

    Args:
        manifest: the content of ``run.toml``; None for a new run.
        world_size: number of processes at the start of the run.
        processes: how many of them share this node.
        memory: bytes that each of them may use, the same on every rank; None: ``auto`` selects ddp.

    Raises:
        UserError: options, task or data cannot work, or are not those of the run in the directory.
    """
    worker_config = request.worker_config
    fix_cublas_workspace()
    task, spec, config, notes = validate_request(request, manifest, world_size)
    if memory is not None:
        config, note = choose_strategy(config, task, world_size=world_size, memory=memory, device=device.type)
        if note is not None:
            notes.append(note)
    if (untested := describe_untested(torch.__version__)) is not None:
        notes.append(untested)
    if not has_tensorboard():
        notes.append(f"without files for TensorBoard, which is not installed: {install_command('tensorboard')}")
    # Recorded, and so kept when the run is continued: another number of threads gives other bits.
    threads = config.processes.threads or request.default_threads
    config = config.replace(task=spec, run_dir=str(directory.path), threads=threads)
    if config.records.backup_to is not None:
        import_object(PARTS["--backup-to"])
    if config.records.backup_to is not None and not is_address(config.records.backup_to):
        if Path(config.records.backup_to).resolve().is_relative_to(directory.path.resolve()):
            raise ConfigError(
                f"--backup-to {config.records.backup_to} is inside of the run {directory.path}, and would be lost with "
                "it. Give a folder elsewhere, best on another disk."
            )
        # Recorded, and so the same if the run continues from another directory.
        config = config.replace(backup_to=str(Path(config.records.backup_to).absolute()))
    if config.records.log_to:
        import_object(PARTS["--log-to"])(config.records.log_to)
    configure_numerics(config, threads, device)
    with explain_missing_base(manifest or {}):
        data = set_up_data(config, task, manifest)
    walltime_s = config.recovery.walltime
    run = RunContext(
        task=task,
        task_name=spec,
        config=config,
        data=data,
        device=device,
        processes=processes,
        directory=directory,
        manifest=dict(manifest or {}),
        signals=signals,
        deadline=Deadline(walltime_s, worker_config.started),
        quiet=worker_config.quiet,
        trial_scheduler=worker_config.trial_scheduler,
    )
    if manifest is not None:
        require_same_order(run.data.order, directory)
    return run, notes


def validate_request(
    request: RunRequest, manifest: Mapping[str, Any] | None, world_size: int
) -> tuple[Task, str, ResolvedConfig, list[str]]:
    """Return the task, its name, the resolved options, and lines to print about them.

    Raises:
        UserError: task or options cannot work, or are not those of the run in the directory.
    """
    worker_config = request.worker_config
    task, spec = _load_task(request, manifest)
    if manifest is None:
        config, notes = resolve_config(worker_config.config, task, world_size)
        return task, spec, config, notes
    config = ResolvedConfig(
        **resumed_options(
            worker_config.config.values,
            worker_config.explicit_options,
            config_from_mapping(manifest["config"], "run.toml"),
        )
    )
    check_world(config, world_size)
    return task, spec, config, []


# --- Defaults that depend on the task or the job are decided once, when the run is created ---


def resolve_config(config: RunConfig, task: Task, world_size: int) -> tuple[ResolvedConfig, list[str]]:
    """Return the options with the task's defaults, and lines to print about them.

    Raises:
        ConfigError: the result cannot work.
    """
    notes = []
    microbatches = config.parallel.microbatches
    if microbatches is None:
        microbatches = task.defaults.microbatches if config.parallel.grad_accumulation == 1 else "auto"
    if microbatches in (None, "auto"):
        ranks = config.data_ranks(world_size)
        microbatches = ranks * config.parallel.grad_accumulation
        of_each = config.parallel.grad_accumulation
        notes.append(f"micro-batches: {microbatches} ({ranks} processes x {of_each}), fixed for this run")
    batch = config.training.global_batch_size or task.defaults.global_batch_size or task.recommended_batch_size()
    epochs = config.training.epochs
    if epochs is None and config.training.max_steps is None:
        epochs = task.defaults.epochs
    resolved = ResolvedConfig(
        **{
            **config.values,
            "microbatches": microbatches,
            "global_batch_size": batch,
            "epochs": epochs,
            "best_metric": config.values["best_metric"] or task.defaults.best_metric,
        }
    )
    check_world(resolved, world_size)
    return resolved, notes


def check_world(config: ResolvedConfig, world_size: int) -> None:
    """Reject a number of processes that does not fit the mesh, or exceeds the micro-batches.

    Raises:
        ConfigError: says which numbers work.
    """
    world_size = config.data_ranks(world_size)
    if world_size > config.microbatches:
        raise ConfigError(
            f"{world_size} processes cannot share {config.microbatches} micro-batches: each needs at least one. "
            f"Use --nproc {config.microbatches} or fewer, or create the run with --microbatches {world_size} or more "
            "(12 divides well)."
        )


# --- The run's record ---


def create_run(
    run: RunContext, run_id: str, initial: InitialWeights | None, base: Mapping[str, str] | None = None
) -> None:
    """Write ``run.toml``, and what the run begins with; rank 0 does, once."""
    document = {"id": run_id, **_manifest(run.config, run.task, run.data, run.device)}
    if initial is not None:
        document["parent"] = initial.save_copy(run.directory)
    if base is not None:
        document["base"] = dict(base)
    save_order(run.directory, run.data.order)
    run.directory.write_manifest(document)
    run.manifest.update(document)
    run.directory.append_event("created", task=run.task_name)


def load_manifest(directory: RunDirectory) -> dict[str, Any]:
    """Read the run's manifest and result, if they exist."""
    see_listed(directory.manifest)
    if not directory.exists():
        return {"manifest": None, "result": None}
    return {"manifest": directory.read_complete_manifest(), "result": directory.read_result()}


def _load_task(request: RunRequest, manifest: Mapping[str, Any] | None) -> tuple[Task, str]:
    """Return the task and its name, checked against the run's record."""
    config, task = request.worker_config.config, request.task
    spec, fields = config.processes.task, request.worker_config.fields
    if task is None:
        if fields is None:
            spec = spec or ("" if manifest is None else recorded_spec(manifest["task"]))
            fields = parse_assignments(config.processes.set)
            if manifest is not None:
                fields = {**manifest["task"]["fields"], **fields}
        task = TaskReference(spec, fields).load()
    if manifest is not None:
        _require_same_task(manifest["task"], spec, task, config)
    return task, spec


def _require_same_task(recorded: Mapping[str, Any], spec: str, task: Task, config: RunConfig) -> None:
    if recorded["spec"] != spec and load_task_class(spec).__qualname__ != recorded["name"]:
        raise RunDirectoryError(
            f"{config.records.run_dir} is a run of {recorded['spec']}, not of {spec}. Choose another --run-dir DIR."
        )
    before, now = task_fields(build_task(type(task), recorded["fields"])), task_fields(task)
    changed = [
        f"  {name}: {before[name]} when the run was created, {now[name]} now"
        for name in now
        if before[name] != now[name]
    ]
    if changed:
        raise RunDirectoryError(
            f"{config.records.run_dir} was created with other hyperparameters:\n" + "\n".join(changed) + "\n"
            "Leave them out to continue the run, or start a new one with another --run-dir DIR, or continue from a "
            "checkpoint of this one with the new ones: paceline fork."
        )


def _manifest(config: RunConfig, task: Task, data: DataSetup, device: torch.device) -> dict[str, Any]:
    """Return the content of ``run.toml``."""
    order = data.order
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "task": {**record_spec(config.processes.task), "name": type(task).__qualname__, "fields": task_fields(task)},
        "config": {name: value for name, value in config.values.items() if all_options()[name].scope != "task"},
        "data": {
            "train_samples": None if order is None else order.num_samples,
            "train_units": None if data.train_val_split else getattr(data.train, "units", None),
            "val_samples": None if data.train_val_split is None else len(data.train_val_split.val),
            "steps_per_epoch": data.steps_per_epoch,
            "total_steps": data.total_steps,
        },
        "versions": {"paceline": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        "pins": numerics_fingerprint(config, device),
    }
