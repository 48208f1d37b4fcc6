"""A run's end: the best model on the test split, and ``result.json``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import torch

from paceline.parallel.sharded_state import load_module
from paceline.parallel.strategy_selection import strategy_name
from paceline.parallel.world import World
from paceline.runs.checkpoint_state import model_sha256
from paceline.runs.checkpoint_store import find_version
from paceline.runs.checkpointer import load
from paceline.runs.metric_writers import finite
from paceline.runs.phases import OUTSIDE_STEPS
from paceline.training.evaluation import EvaluationStopped
from paceline.training.group_context import GroupContext
from paceline.training.trainer import Trainer


def conclude(trainer: Trainer, group: GroupContext, started: float) -> dict[str, Any]:
    """Evaluate on the test split; return the content of ``result.json``, the same on every rank.

    Args:
        trainer: after its last step. Its model becomes the best one.
        group: the ranks.
        started: ``time.perf_counter()`` when this process began.

    Raises:
        CheckpointError: the best model's checkpoint is damaged.
        StopRequested: there was a stop request; the run is trained, and concluded when it is resumed.
    """
    run, world, progress = trainer.run, group.world, trainer.state.progress
    config = run.config
    world.progress_tracker.begin("evaluation")
    seconds = time.perf_counter() - started
    phases = group.phases()
    training_s = sum(s for phase, s in phases.items() if phase not in OUTSIDE_STEPS)
    weights = trainer.states.full_model_state_dict(world)
    sha256 = world.broadcast_object(model_sha256(weights) if world.rank == 0 else None)
    metrics: dict[str, dict[str, float]] = {}
    if progress.best_metrics:
        metrics["val"] = progress.best_metrics
    test = run.build_evaluator("test")
    if test is not None:
        with closing(test):
            _load_best(trainer, world)
            group.monitor.set_status("evaluating test")
            trainer.state.callback.on_eval_begin("test", trainer.state.evaluated_module)
            try:
                measured = test.run(
                    group.mesh,
                    trainer.state.evaluated_module,
                    group.stop_reason,
                    is_collective=trainer.states.is_collective,
                )
            except EvaluationStopped as stopped:
                trainer.stop(group, stopped.cause)
            metrics["test"] = dict(trainer.state.callback.on_eval_end("test", measured))
            group.monitor.on_eval_end("test", progress.step, max(0, progress.epoch - 1), metrics["test"])
    of_preparation = run.preparation.results(trainer, group)
    of_hooks = {name: value for hook in run.hooks for name, value in hook.results(world).items()}
    phases = group.phases()
    return {
        "task": run.task_name,
        "run": str(run.directory.path),
        "strategy": strategy_name(config, world.world_size),
        "reduction": config.reducer,
        **config.changes.results,
        "world_size": world.world_size,
        "microbatches": run.num_microbatches,
        "global_batch_size": run.global_batch_size,
        "seed": config.training.seed,
        "steps": progress.step,
        "epochs": progress.epoch,
        "samples": progress.samples,
        "state_version": progress.version,
        "best_step": progress.best_step,
        "metrics": finite(metrics),  # JSON has no NaN
        **of_preparation,
        **of_hooks,
        **group.engine.extra_results,
        "model_sha256": sha256,
        **world.broadcast_object(starts(run.directory.read_events()) if world.rank == 0 else None),
        "seconds": round(seconds, 3),
        "samples_per_s": round(trainer.carryover.samples / training_s, 1) if trainer.carryover.samples else None,
        **group.strategy.stats,
        "checkpoint_stall_s": round(group.checkpoint_manager.stall_s, 4),
        "phases_s": {name: round(value, 3) for name, value in phases.items()},
        "threads": torch.get_num_threads(),
        "device": str(run.device.type),
        "devices": world.description,
        "torch": str(torch.__version__),
    }


def starts(events: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count the restarts of a run, and the groups that formed after a fault."""
    groups = {event.get("generation"): bool(event.get("recovery")) for event in events if event["event"] == "group"}
    # Without survivors, a group starts from a checkpoint: that is a recovery, not a restart.
    started = [e for e in events if e["event"] == "started" and e.get("generation") not in groups]
    return {"restarts": max(0, len(started) - 1), "recoveries": sum(groups.values())}


def _load_best(trainer: Trainer, world: World) -> None:
    """Put the best model's weights into the module that is evaluated."""
    progress, module = trainer.state.progress, trainer.state.evaluated_module
    if progress.best_version is None or progress.best_step == progress.step:
        return
    trainer.states.invalidate()  # from here on the model is not that of the run's end
    if trainer.states.is_collective:
        # Each rank takes its part from the directory that all share.
        state = load(find_version(trainer.run.directory.checkpoints, progress.best_version)).state
        _load_evaluated(trainer, state)
        return
    if world.rank == 0:
        state = load(find_version(trainer.run.directory.checkpoints, progress.best_version)).state
        _load_evaluated(trainer, state)
    world.broadcast_module(module)


def _load_evaluated(trainer: Trainer, state: Mapping[str, Any]) -> None:
    if trainer.state.ema is None:
        load_module(trainer.state.module, state["model"])
    else:
        load_module(trainer.state.ema, state["ema"])
