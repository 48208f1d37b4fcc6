"""A run in this process, from its options to its result: in one group of ranks, or in one after another."""

from __future__ import annotations

import dataclasses
import logging
import math
import secrets
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.core.config import RunConfig
from paceline.core.errors import (
    CheckpointError,
    ConfigError,
    PacelineError,
    PeerLostError,
    RunDirectoryError,
    StopRequested,
    TaskError,
)
from paceline.core.files import look_anew, see_listed, wait_to_see
from paceline.core.plugins import import_object
from paceline.data.ledger import LedgerEntry, last_recorded_version
from paceline.elastic.group_formation import StateSource, elect_source, open_process_group, transfer_state
from paceline.elastic.worker_channel import AgentClient, Assignment
from paceline.parallel.strategy_selection import memory_per_process, require_replaceable, strategy_class, strategy_name
from paceline.parallel.world import LocalDevice, ParallelDims, World, gpu_identity, why_idle
from paceline.runs.checkpoint_manifest import CheckpointInfo, differences, require_same_run
from paceline.runs.checkpoint_store import find_version, holds_version, newest_verified
from paceline.runs.checkpointer import Checkpoint, Checkpointer, load
from paceline.runs.directory import Fork, RunDirectory, starts
from paceline.runs.metric_writers import finite
from paceline.runs.monitor import OUTSIDE_STEPS
from paceline.runs.rank_progress import note_progress
from paceline.training.checkpoint_manager import retry
from paceline.training.control import StopSignals
from paceline.training.evaluation import EvaluationStopped
from paceline.training.group_context import Engine, GroupContext
from paceline.training.reproducibility import compare_numerics, numerics_fingerprint
from paceline.training.run_context import RunContext, RunRequest, create_run, load_manifest, setup_run, validate_request
from paceline.training.trainer import SyncEngine, Trainer

_log = logging.getLogger(__name__)

# --- The path of a run: find or create it, set up, train in groups ---


@contextmanager
def _exit_is_an_error() -> Iterator[None]:
    try:
        yield
    except SystemExit as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise TaskError(
            f"the task's own code ended this process before the run's end, by sys.exit({error.code!r})"
            f" in {last.filename}, line {last.lineno}. "
            "Raise an exception to fail, or set --max-steps or --epochs to train for less."
        ) from error


@_exit_is_an_error()
def train(request: RunRequest, groups: Groups, directory: RunDirectory, signals: StopSignals) -> dict[str, Any]:
    """Create or continue the run in ``directory``, and train it to its end.

    Args:
        request: the requested options; the same on every rank.
        groups: the groups of ranks that this process joins.
        directory: the run directory; rank 0 or its agent holds the lock.

    Returns:
        The content of ``result.json``. A finished run is not trained again.

    Raises:
        Retired: the agent does not need this process any more.
        UserError: options, task, data or directory cannot work; the run is as it was.
        StopRequested: a signal asked for a stop; the state is saved.
        PacelineError: the training failed; the last checkpoint is good.
    """
    started = time.perf_counter()
    found = groups.load_manifest(directory)
    if found["result"] is not None:
        validate_request(request, found["manifest"], groups.world_size)
        if groups.announces:
            _log.info("%s has finished; nothing is left to train.", directory.path)
        return dict(found["result"])
    run, notes = set_up(request, groups, found["manifest"], directory, signals)
    with (
        build_trainer(run, groups.world_size, groups.agent) as trainer,
        closing(groups.join(trainer)) as joined_groups,
    ):
        result = None
        for joined in joined_groups:
            with joined:
                result = joined.result = train_in_group(trainer, notes, started, joined.world, joined.can_train)
        result = result or directory.read_result()
        assert result is not None, "the last group has the result"
        return result


def set_up(
    request: RunRequest,
    groups: Groups,
    manifest: Mapping[str, Any] | None,
    directory: RunDirectory,
    signals: StopSignals,
) -> tuple[RunContext, list[str]]:
    """Set up the run in these groups; return it, and lines to print when it is created.

    Raises:
        UserError: options, task or data cannot work; the run is as it was.
    """
    run, notes = setup_run(
        request,
        manifest,
        directory,
        signals,
        device=groups.device,
        world_size=groups.world_size,
        processes=groups.processes,
        memory=groups.memory_per_process(),
    )
    if groups.agent is not None:
        require_replaceable(run.config, request.worker_config.config)
    return run, notes


def build_trainer(run: RunContext, world_size: int, agent: AgentClient | None = None) -> Trainer:
    """Build the run's trainer, with the engine that its strategy names (``module:Class``) or :class:`SyncEngine`.

    Raises:
        UserError: the task's model, optimizers or data cannot be built, or do not work with the strategy.
    """
    reference = getattr(strategy_class(run.config, world_size), "engine", None)
    engine: type[Engine] = SyncEngine if reference is None else import_object(reference)
    return Trainer(run, engine, agent)


def train_in_group(
    trainer: Trainer, notes: list[str], started: float, world: World, joined: Callable[[], None] = lambda: None
) -> dict[str, Any] | None:
    """Agree on the state, call ``joined``, train to the end and conclude; all ranks of ``world`` do so together.

    Returns:
        The content of ``result.json``; None where the ranks left together before the end.

    Raises:
        PeerLostError: a rank is gone.
        PacelineError: as :func:`train` says.
    """
    with note_progress(world.progress_tracker):
        group = enter_group(trainer, world, notes)
        joined()
        with trainer.saving_before_errors(group):
            for step in trainer.steps(group):  # evaluations, commits, saves and stops are in here
                step.compute()
        return conclude_run(trainer, group, started) if trainer.finished else None


def enter_group(trainer: Trainer, world: World, notes: list[str]) -> GroupContext:
    """Agree on the state, and enter the group; all ranks of ``world`` do so together."""
    mesh = trainer.run.build_mesh(world)
    agree_on_state(trainer, mesh, notes)
    return trainer.join_group(mesh)


def conclude_run(trainer: Trainer, group: GroupContext, started: float) -> dict[str, Any]:
    """Record the result of a finished run, and leave the group together; return the result."""
    run, world = trainer.run, group.world
    result = conclude(trainer, group, started)
    if world.rank == 0:
        retry(partial(run.directory.write_result, result))
        run.directory.append_event("finished")
    group.monitor.finish(result)
    trainer.leave_group()
    world.barrier()
    return result


# --- Where groups come from: the launcher gives one that stays, an agent one after another ---


@dataclass
class JoinedGroup:
    """A group that this rank has joined: a context that the loss of another rank ends normally if a group follows.

    Attributes:
        world: the ranks.
        can_train: to be called once this rank can train.
        outlives_losses: whether a next group follows.
        result: of the run, once it has one.
        why: why this rank has left the group.
    """

    world: World
    can_train: Callable[[], None] = lambda: None
    outlives_losses: bool = False
    result: dict[str, Any] | None = None
    why: str = "left it as asked, after a step"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if outlives := self.outlives_losses and isinstance(error, PeerLostError):
            self.why = str(error)
            clear_frames(error)
        return outlives


class FixedGroup:
    """The one group that a launcher has started: when a rank is lost, all of them end.

    Attributes:
        world_size: how many processes begin the run.
        processes: how many of them share this node.
        agent: None: there is no agent.
        announces: whether this process tells the user that nothing is left to train.
    """

    agent: AgentClient | None = None

    def __init__(self, world: World) -> None:
        self._world = world
        self.device = world.device
        self.world_size = world.world_size
        self.processes = world.local_world_size
        self.announces = world.rank == 0

    def load_manifest(self, directory: RunDirectory) -> dict[str, Any]:
        """Return the run's manifest and result, as rank 0 reads them."""
        found = load_manifest(directory) if self._world.rank == 0 else {}
        return dict(self._world.broadcast_object(found))

    def memory_per_process(self) -> int:
        """Return the bytes that each process may use, the same for all of them."""
        gpu = gpu_identity(self.device)
        # Several share one under gloo; a launcher may show each process its own alone.
        sharing = self._world.all_gather_object(gpu).count(gpu) if gpu is not None else self.processes
        told: list[int] = self._world.all_gather_object(memory_per_process(self.device, sharing))
        return min(told)

    def join(self, trainer: Trainer) -> Generator[JoinedGroup, None, None]:
        """Yield the group, to train in it to the run's result."""
        yield JoinedGroup(self._world)
        self._world.barrier()


class ElasticGroups:
    """The groups that an agent forms, as processes come and go.

    A process prepares itself alone, whether the run begins or has long been running, and then takes part in one group
    after another. After a loss it continues from its own state, or from another rank's.

    Args:
        processes: number of worker processes on this node.
        world_size: number of processes at the run's start.
        comm_debug: verbose logs of NCCL and torch.distributed.
        on_rank_0: called whenever this process becomes rank 0.

    Attributes: as those of :class:`FixedGroup`.
    """

    announces = False

    def __init__(
        self,
        agent: AgentClient,
        *,
        local: LocalDevice,
        processes: int,
        world_size: int,
        comm_debug: bool,
        on_rank_0: Callable[[], None],
    ) -> None:
        self.agent = agent
        self._on_rank_0 = on_rank_0
        self._open_group = partial(open_process_group, agent=agent, local=local, comm_debug=comm_debug)
        self.device = local.device
        self.processes = processes
        self.world_size = world_size
        self._unconnected_since = math.inf  # when it first failed to connect to a group, since it last did

    def load_manifest(self, directory: RunDirectory) -> dict[str, Any]:
        """Return the run's manifest and result; this process has no group yet."""
        return load_manifest(directory)

    def memory_per_process(self) -> int:
        """Return the bytes that each process of this node may use."""
        # All that an agent forks see the same GPUs, and take them in turn.
        devices = torch.cuda.device_count() if self.device.type == "cuda" else 1
        return memory_per_process(self.device, -(-self.processes // devices))

    def join(self, trainer: Trainer) -> Generator[JoinedGroup, None, None]:
        """Join one group after another, and yield each, until one has the run's result."""
        signals = trainer.run.signals
        generation, why = -1, "has just started"
        while True:
            assignment = self.agent.next_group(
                generation, why, lambda: bool(signals.received) and not trainer.states.valid
            )
            if assignment is None:
                raise StopRequested(
                    "stopped before the first step, as requested; there is nothing to save.",
                    exit_code=signals.received.exit_code,
                )
            if assignment.rank == 0:
                self._on_rank_0()
            self.agent.progress_tracker.wait()
            trainer.run.directory.wait_for_disk()
            self.agent.progress_tracker.join()
            generation, result = assignment.generation, None
            try:
                with self._open_group(assignment) as world:
                    self._unconnected_since = math.inf
                    joined = JoinedGroup(world, partial(self.agent.joined, generation), outlives_losses=True)
                    yield joined
                    # Not while an error is handled: its frames would keep the group's connections open.
                    trainer.leave_group()
                    result, why = joined.result, joined.why
            except PeerLostError as error:
                why = str(error)
                clear_frames(error)
                self._limit_attempts(assignment, trainer.run.config, why)
            # A process that loses the others only after the run's end has nothing left to do.
            with suppress(RunDirectoryError):  # its disk may fail meanwhile
                if result or trainer.run.directory.read_result():
                    return

    def _limit_attempts(self, assignment: Assignment, config: RunConfig, why: str) -> None:
        """Give up connecting to processes of this node; other nodes may come back at any time.

        Raises:
            ConfigError: no group was formed within the limit.
        """
        now = time.monotonic()
        self._unconnected_since = min(self._unconnected_since, now)
        is_one_node = assignment.local_world_size == assignment.world_size
        if is_one_node and now - self._unconnected_since > config.processes.init_timeout:
            raise ConfigError(
                f"processes of this node could not connect to each other at {assignment.address} for "
                f"{config.values['init_timeout']} (--init-timeout): {why}. A firewall of this node may drop "
                "connections: allow those of the loopback interface, then resume the run."
            )


Groups = FixedGroup | ElasticGroups


def clear_frames(error: BaseException | None) -> None:
    """Clear the frames that an error holds: they would keep objects such as the group alive."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


# --- A run's end: the best model on the test split, and ``result.json`` ---


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
    sha256 = trainer.states.model_sha256(world)
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


def _load_best(trainer: Trainer, world: World) -> None:
    """Put the best model's weights into the module that is evaluated."""
    progress, module = trainer.state.progress, trainer.state.evaluated_module
    if progress.best_version is None or progress.best_step == progress.step:
        return
    part = "model" if trainer.state.ema is None else "ema"
    trainer.states.invalidate()  # from here on the model is not that of the run's end
    if trainer.states.is_collective or world.rank == 0:
        # Each rank takes its part from the directory that all share.
        path = find_version(trainer.run.directory.checkpoints, progress.best_version)
        trainer.state.load_weights(part, load(path, whole=False).state)
    if not trainer.states.is_collective:
        world.broadcast_module(module)


# --- The state from which a group continues: in memory, on disk, or new ---


def agree_on_state(trainer: Trainer, mesh: ParallelDims, notes: list[str]) -> None:
    """Give every rank the state of the most advanced one, or else the newest saved one."""
    run, directory, world = trainer.run, trainer.run.directory, mesh.world
    has_just_begun = not trainer.states.valid
    compare_numerics(world, run.config, run.device)
    _share_manifest(run, world)
    agreement = elect_source(world, valid=trainer.states.valid, version=trainer.states.version)
    if agreement.source is not None:
        state = trainer.states.export_state() if world.rank == agreement.source else None
        received = transfer_state(world, agreement, state)
        if received is not None:
            trainer.states.import_state(received)
        if has_just_begun:
            trainer.code.warn_of_changes(directory)
        if not _something_is_lost(trainer, world):
            return
    if world.rank == 0:
        _log.info("%s", _first_line(run, world))
    with suppress(CheckpointError):
        trainer.checkpointer.wait()  # the next lines read the checkpoints on disk
    world.barrier()
    new = not run.manifest
    run_id = str(world.broadcast_object(secrets.token_hex(8) if new else run.run_id))
    _claim_backup(run, world, run_id)
    saved = newest_checkpoint(run, world, run_id)
    initial = run.preparation.read_weights(run, world) if saved is None else None
    if saved is None:
        trainer.states.begin(mesh, None if initial is None else initial.weights)
        trainer.states.state.require_storable()
        if not trainer.states.is_collective:
            trainer.rehearse_evaluation(mesh)
    else:
        is_fork = run.begins_fork_at(saved["progress"]["version"])
        trainer.states.restore(mesh, saved, own_hyperparameters=is_fork)
    if world.rank == 0:
        # Only now, so that a model that cannot be built creates no run.
        if new:
            create_run(run, run_id, initial, trainer.state.base)
            for note in [*notes, *trainer.state.describe_precision()]:
                _log.info("%s", note)
        if has_just_begun:
            trainer.code.warn_of_changes(directory)
            trainer.code.record(directory, trainer.state.progress.step, type(run.task).__module__, run.data.train)
        directory.append_event(
            "started",
            generation=world.generation,
            world_size=world.world_size,
            microbatches=run.num_microbatches,
            step=trainer.state.progress.step,
            total_steps=run.data.total_steps,
        )
    if new:
        run.manifest.update(world.broadcast_object(run.manifest))


def _share_manifest(run: RunContext, world: World) -> None:
    """Give every rank the run's manifest: it may be younger than a process, and its node may see it late."""
    if world.rank == 0 and not run.manifest:
        run.manifest.update(load_manifest(run.directory)["manifest"] or {})
    known = world.all_gather_object(bool(run.manifest))
    if any(known) and not all(known):
        run.manifest.update(world.broadcast_object(run.manifest, known.index(True)))


def _first_line(run: RunContext, world: World) -> str:
    # Threads of dp use the other GPUs.
    idle = None if "dp" in run.config.strategies else why_idle(run.device, run.processes)
    return (
        f"training on {world.description}, strategy {strategy_name(run.config, world.world_size)}: "
        f"{run.global_batch_size} samples a step, in {run.num_microbatches} micro-batches{f'. {idle}' if idle else ''}"
    )


# --- What only a lost process had ---


def _something_is_lost(trainer: Trainer, world: World) -> bool:
    """Return whether the best model, or entries of the ledger, existed only in a lost process.

    Then the run repeats its steps from the newest checkpoint to restore them.
    """
    directory = trainer.run.directory
    best = trainer.state.progress.best_version
    missing, lost = False, False
    if world.rank == 0:
        lost = _ledger_has_gap(directory.ledger, trainer.states.recent)
        missing = (
            best is not None
            and best != trainer.state.progress.version
            and not trainer.checkpointer.has_in_memory(best)
            and not holds_version(directory.checkpoints, best)
        )
    missing, lost = world.broadcast_object([missing, lost])
    if lost or not missing:
        return bool(lost)
    assert best is not None
    with suppress(CheckpointError):
        trainer.checkpointer.wait()
    holders = world.all_gather_object(trainer.checkpointer.has_in_memory(best))
    if any(holders):
        _give_best(trainer.checkpointer, world, holders.index(True))
    return not any(holders)


def _ledger_has_gap(directory: Path, recent: deque[LedgerEntry]) -> bool:
    """Return whether steps may be unrecorded: the ledger on disk ends before the entries in ``recent``."""
    return len(recent) == recent.maxlen and (last_recorded_version(directory) or 0) < recent[0].version


def _give_best(checkpointer: Checkpointer, world: World, holder: int) -> None:
    """Copy the best model to rank 0, which must write it from now on."""
    held = checkpointer.in_memory() if world.rank == holder else None
    info = world.broadcast_object(held and dataclasses.asdict(held.manifest.info), holder)
    given = StateSource(holder, info["state_version"], (0,))
    received = transfer_state(world, given, held.state if held else None)
    if received is not None:
        checkpointer.keep_in_memory(received, CheckpointInfo(**info))


# --- The newest checkpoint that every rank can read ---


def newest_checkpoint(run: RunContext, world: World, run_id: str) -> dict[str, Any] | None:
    """Return the state of the newest checkpoint that verifies on every rank, or None.

    Raises:
        CheckpointError: there are some, and none can be used: nothing is lost without being asked for.
    """
    search = _CheckpointSearch(run, world)
    while (path := search.find()) is not None:
        checkpoint, problem = _load_on_all_ranks(run, world, path)
        if checkpoint is None:
            search.pass_over(path, problem)
            continue
        _compare(run, world, run_id, path, checkpoint.manifest.info)
        if search.num_passed_over and world.rank == 0:
            _log.warning("continuing from %s instead, after step %d", path.name, checkpoint.manifest.info.step)
        return checkpoint.state
    if search.num_passed_over:
        raise CheckpointError(
            f"no checkpoint in {run.directory.checkpoints} can be used, for the reasons above. Restore "
            "one from a copy, or remove that folder to train from the start."
        )
    return None


class _CheckpointSearch:
    """Finds checkpoints for all ranks, the newest first, and reports those that cannot be used.

    All ranks call each method together.

    Attributes:
        num_passed_over: number of those that cannot be used.
    """

    def __init__(self, run: RunContext, world: World) -> None:
        self._run = run
        self._world = world
        if world.rank == 0:
            see_listed(run.directory.checkpoints)
            look_anew(run.directory.checkpoints)
        self._failed: list[str] = []
        self._may_restore = True
        self.num_passed_over = 0

    def find(self) -> Path | None:
        """Return the newest checkpoint that verifies on rank 0 and was not passed over, or None."""
        name, skipped = self._world.broadcast_object(self._find_on_rank_0() if self._world.rank == 0 else None)
        if self._world.rank == 0:
            for reason in skipped:
                _log.warning("passed over a checkpoint: %s", reason)
                self._run.directory.append_event("fallback", reason=reason)
        self.num_passed_over += len(skipped)
        return None if name is None else self._run.directory.checkpoints / name

    def _find_on_rank_0(self) -> tuple[str | None, list[str]]:
        """Return its name, and why newer ones cannot be used; if there is none, once try the backup."""
        found = newest_verified(self._run.directory.checkpoints, excluding=self._failed)
        path, skipped = found.path, list(found.skipped)
        if path is None and self._may_restore:
            self._may_restore = False
            path, reasons = _restored(self._run)
            skipped += reasons
        return None if path is None else path.name, skipped

    def pass_over(self, path: Path, problem: str) -> None:
        """Report a checkpoint that a rank cannot read; it is not found again."""
        _log.warning("passed over checkpoint %s, which does not verify on every rank: %s", path.name, problem)
        if self._world.rank == 0:
            self._run.directory.append_event("fallback", reason=problem)
        self._failed.append(path.name)
        self.num_passed_over += 1


def _load_on_all_ranks(run: RunContext, world: World, path: Path) -> tuple[Checkpoint | None, str]:
    """Load a checkpoint; None where it does not verify on every rank, and the reason."""
    wait_to_see(path, _log.info)
    try:
        checkpoint, problem = load(path, whole=not run.config.parallel.shards_state), ""
    except CheckpointError as error:
        checkpoint, problem = None, str(error)
    problems = [p for p in world.all_gather_object(problem) if p]
    return (None, problems[0]) if problems else (checkpoint, "")


def _claim_backup(run: RunContext, world: World, run_id: str) -> None:
    """Check the store of ``--backup-to`` on rank 0, before anything is trained.

    Raises:
        ConfigError: the run cannot be copied there; on all ranks.
    """
    if run.backup is None:
        return
    problem = None
    if world.rank == 0:
        try:
            run.backup.claim(run_id)
        except PacelineError as error:
            problem = str(error)
    if (problem := world.broadcast_object(problem)) is not None:
        raise ConfigError(problem)


def _restored(run: RunContext) -> tuple[Path | None, list[str]]:
    """Copy a backup back into the run; return it, or None if no backup verifies, and the reasons."""
    if not run.manifest or run.backup is None:
        return None, []
    path, reasons = run.backup.restore(run.run_id)
    if path is not None:
        backup = run.config.records.backup_to
        _log.warning("no checkpoint of the run's own can be used: %s comes back from %s", path.name, backup)
    return path, list(reasons)


def _compare(run: RunContext, world: World, run_id: str, path: Path, recorded: CheckpointInfo) -> None:
    """Refuse a foreign checkpoint; say where equal bits are no longer promised."""
    # The same task has another name if its file was moved.
    now = dataclasses.replace(
        recorded,
        run=run_id,
        microbatches=run.num_microbatches,
        pins=numerics_fingerprint(run.config, run.device),
    )
    require_same_run(path, recorded, now)
    Fork.require_no_earlier(run.manifest, path, recorded.state_version)
    changed = differences(recorded.pins, now.pins)
    if changed and world.rank == 0:
        _log.warning(
            "this process differs from the one that wrote %s, so the model will be equal within rounding, "
            "not bit for bit: %s",
            path.name,
            "; ".join(changed),
        )
