"""Before training: the run that follows from a directory's content and the request."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.core.config import ResolvedConfig, RunConfig, all_options, config_from_mapping, resumed_options
from paceline.core.errors import ConfigError, RunDirectoryError
from paceline.core.files import is_address, see_listed
from paceline.core.job import WorkerConfig
from paceline.core.plugins import install_command
from paceline.core.task import Task
from paceline.core.task_loading import (
    TaskReference,
    build_task,
    load_task_class,
    parse_assignments,
    record_spec,
    recorded_spec,
    task_fields,
)
from paceline.data.order import require_same_order, save_order
from paceline.parallel.strategy_selection import choose_strategy
from paceline.runs.directory import RunDirectory
from paceline.runs.metric_writers import has_tensorboard
from paceline.torch_internals import describe_untested
from paceline.training.control import StopSignals
from paceline.training.hooks import InitialWeights
from paceline.training.reproducibility import configure_numerics, fix_cublas_workspace, numerics_fingerprint
from paceline.training.run_context import DataSetup, RunContext, set_up_data
from paceline.training.schedule import Deadline
from paceline.training.task_parts import explain_missing_base


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
    task, spec, config, notes = validate(request, manifest, world_size)
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
    if config.records.backup_to is not None and not is_address(config.records.backup_to):
        if Path(config.records.backup_to).resolve().is_relative_to(directory.path.resolve()):
            raise ConfigError(
                f"--backup-to {config.records.backup_to} is inside of the run {directory.path}, and would be lost with "
                "it. Give a folder elsewhere, best on another disk."
            )
        # Recorded, and so the same if the run continues from another directory.
        config = config.replace(backup_to=str(Path(config.records.backup_to).absolute()))
    if config.records.log_to:
        from paceline.runs.trackers import require

        require(config.records.log_to)
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


def validate(
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


def create(run: RunContext, run_id: str, initial: InitialWeights | None, base: Mapping[str, str] | None = None) -> None:
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
