"""From a joined world to a trained run: create or continue it, train, conclude."""

from __future__ import annotations

import dataclasses
import logging
import platform
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.checkpoint.checkpointer import load
from paceline.checkpoint.manifest import CheckpointInfo, differences, require_same_run
from paceline.checkpoint.storage import newest_verified
from paceline.config import RunConfig, config_from_mapping
from paceline.distributed.world import World
from paceline.errors import CheckpointError, RunDirectoryError, TaskError
from paceline.run_directory import RunDirectory
from paceline.task import (
    Task,
    TaskReference,
    build_task,
    load_task_class,
    parse_assignments,
    task_fields,
)
from paceline.training.conclusion import conclude
from paceline.training.control import StopSignals
from paceline.training.pins import configure_numerics, current_pins
from paceline.training.plan import DataPlan, check_world, continued, plan_data, resolve
from paceline.training.run import Run
from paceline.training.trainer import Trainer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What somebody asked for, before anything is resolved; the same on every rank.

    Attributes:
        config: the options.
        given: the names of those that were asked for.
        task: the task itself, where a script has built it; else ``config.task`` names it.
        default_threads: CPU threads of this process, where neither options nor the run's record say.
        quiet: show nothing on the terminal.
    """

    config: RunConfig
    given: frozenset[str]
    task: Task | None
    default_threads: int
    quiet: bool


def train(request: Request, world: World, directory: RunDirectory, signals: StopSignals) -> dict[str, Any]:
    """Create or continue the run in ``directory``, and train it to its end.

    Called by every rank alike; rank 0 holds the directory's lock.

    Returns:
        The content of ``result.json``. A run that has finished already is not trained again.

    Raises:
        UserError: options, task, data or directory cannot work; the run is as it was.
        StopRequested: a signal asked for a stop; the state is saved.
        PacelineError: the training failed; the last checkpoint is good.
    """
    started = time.perf_counter()
    recorded = world.broadcast_json(_recorded(request.config, directory) if world.rank == 0 else None)
    task, spec = _load_task(request, recorded["manifest"])
    config, notes = _configure(request, recorded["manifest"], task, world.world_size)
    if recorded["result"] is not None:
        _say(world, request, f"{directory.path} has finished; nothing is left to train.")
        return dict(recorded["result"])
    # Recorded, and so kept when the run is continued: another number of threads gives other bits.
    threads = config.threads or request.default_threads
    config = dataclasses.replace(config, task=spec, run=str(directory.path), threads=threads)
    configure_numerics(config, threads)
    data = plan_data(config, task)
    run = Run(
        task=task,
        task_name=spec,
        run_id=recorded["id"],
        config=config,
        data=data,
        world=world,
        directory=directory,
        generation=world.generation,
        signals=signals,
        quiet=request.quiet,
    )
    for note in notes:
        _say(world, request, note)
    resumed = _newest_checkpoint(run)
    with Trainer(run) as trainer:
        before = {"step": 0, "samples": 0} if resumed is None else resumed["progress"]
        # Only now: where the model could not be built, no run was created.
        if world.rank == 0 and recorded["manifest"] is None:
            directory.write_manifest({"id": recorded["id"], **_manifest(config, task, data, world)})
            directory.append_event("created", task=spec)
        if world.rank == 0:
            directory.append_event(
                "started",
                generation=world.generation,
                world_size=world.world_size,
                shards=run.num_shards,
                step=before["step"],
                total_steps=data.total_steps,
            )
        trainer.fit(resumed)
        result = conclude(trainer, started, trainer.state.progress.samples - before["samples"])
        if world.rank == 0:
            directory.write_result(result)
            directory.append_event("finished")
        trainer.monitor.finish(result)
    world.barrier()
    return result


def _recorded(config: RunConfig, directory: RunDirectory) -> dict[str, Any]:
    """What rank 0 finds in the directory: the run's manifest and result, where there are any."""
    if not directory.exists():
        if config.resume == "must":
            raise RunDirectoryError(
                f"--resume must: {directory.path} holds no run (no run.toml). Check --run DIR."
            )
        return {"manifest": None, "result": None, "id": secrets.token_hex(8)}
    if config.resume == "never":
        raise RunDirectoryError(
            f"--resume never: {directory.path} holds a run already. "
            "Choose another --run DIR, or leave --resume out."
        )
    manifest = directory.read_complete_manifest()
    return {"manifest": manifest, "result": directory.read_result(), "id": manifest["id"]}


def _load_task(request: Request, manifest: Mapping[str, Any] | None) -> tuple[Task, str]:
    """The task and its name, checked against the run's record."""
    if request.task is not None:
        task, spec = request.task, request.config.task
    else:
        spec = request.config.task or (manifest or {}).get("task", {}).get("spec", "")
        if not spec:
            raise TaskError(
                "no task was given. Write paceline train TASK, where TASK is file.py:Name or a recipe."
            )
        fields: Mapping[str, Any] = parse_assignments(request.config.set)
        if manifest is not None:
            fields = {**manifest["task"]["fields"], **fields}
        task = TaskReference(spec, fields).load()
    if manifest is not None:
        _require_same_task(manifest["task"], spec, task, request.config)
    return task, spec


def _require_same_task(recorded: Mapping[str, Any], spec: str, task: Task, config: RunConfig) -> None:
    if recorded["spec"] != spec and load_task_class(spec).__qualname__ != recorded["name"]:
        raise RunDirectoryError(
            f"{config.run} is a run of {recorded['spec']}, not of {spec}. Choose another --run DIR."
        )
    before, now = task_fields(build_task(type(task), recorded["fields"])), task_fields(task)
    changed = [
        f"  {name}: {before[name]} when the run was created, {now[name]} now"
        for name in now
        if before[name] != now[name]
    ]
    if changed:
        raise RunDirectoryError(
            f"{config.run} was created with other hyperparameters:\n" + "\n".join(changed) + "\n"
            "Leave them out to continue the run, or start a new one with another --run DIR."
        )


def _configure(
    request: Request, manifest: Mapping[str, Any] | None, task: Task, world_size: int
) -> tuple[RunConfig, list[str]]:
    if manifest is None:
        return resolve(request.config, task, world_size)
    resolved = continued(request.config, request.given, config_from_mapping(manifest["config"], "run.toml"))
    check_world(resolved, world_size)
    return resolved, []


def _manifest(config: RunConfig, task: Task, data: DataPlan, world: World) -> dict[str, Any]:
    """The content of ``run.toml``."""
    order = data.order
    # TOML has no null; the word is turned back where the field may be None.
    fields = {name: "none" if value is None else value for name, value in task_fields(task).items()}
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "task": {"spec": config.task, "name": type(task).__qualname__, "fields": fields},
        "config": {
            name: value for name, value in dataclasses.asdict(config).items() if name not in ("task", "set")
        },
        "data": {
            "train_samples": None if order is None else order.num_samples,
            "val_samples": None if data.carved is None else len(data.carved.val),
            "steps_per_epoch": data.steps_per_epoch,
            "total_steps": data.total_steps,
        },
        "versions": {
            "paceline": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "pins": current_pins(config, world.device),
    }


def _newest_checkpoint(run: Run) -> dict[str, Any] | None:
    """The state of the newest checkpoint that verifies on every rank, or None where there is none.

    Raises:
        CheckpointError: there are some, and none can be used: nothing is lost without being asked for.
    """
    world, directory = run.world, run.directory
    failed: list[str] = []
    passed_over = 0
    while True:
        choice: dict[str, Any] = {"path": None, "skipped": []}
        if world.rank == 0:
            found = newest_verified(directory.checkpoints, excluding=failed)
            choice = {"path": found.path and found.path.name, "skipped": list(found.skipped)}
        choice = world.broadcast_json(choice)
        if world.rank == 0:
            for reason in choice["skipped"]:
                _log.warning("passed over a checkpoint: %s", reason)
        passed_over += len(choice["skipped"])
        if choice["path"] is None:
            if passed_over:
                raise CheckpointError(
                    f"no checkpoint in {directory.checkpoints} can be used, for the reasons above. Restore "
                    "one from a copy, or remove that folder to train from the start."
                )
            return None
        path = directory.checkpoints / choice["path"]
        try:
            checkpoint, problem = load(path), ""
        except CheckpointError as error:
            checkpoint, problem = None, str(error)
        problems = [p for p in world.all_gather_json(problem) if p]
        if checkpoint is not None and not problems:
            _compare(run, path, checkpoint.manifest.info)
            if passed_over and world.rank == 0:
                _log.warning(
                    "continuing from %s instead, after step %d", path.name, checkpoint.manifest.info.step
                )
            return checkpoint.state
        _log.warning(
            "passed over checkpoint %s, which does not verify on every rank: %s", path.name, problems[0]
        )
        failed.append(path.name)
        passed_over += 1


def _compare(run: Run, path: Path, recorded: CheckpointInfo) -> None:
    """Refuse a foreign checkpoint; say where equal bits are no longer promised."""
    # The same task may have another name by now: its file was moved.
    now = dataclasses.replace(
        recorded, run=run.run_id, shards=run.num_shards, pins=current_pins(run.config, run.world.device)
    )
    require_same_run(path, recorded, now)
    changed = differences(recorded.pins, now.pins)
    if changed and run.world.rank == 0:
        _log.warning(
            "this process differs from the one that wrote %s, so the model will be equal within rounding, "
            "not bit for bit: %s",
            path.name,
            "; ".join(changed),
        )


def _say(world: World, request: Request, text: str) -> None:
    if world.rank == 0 and not request.quiet:
        _log.warning(text)
