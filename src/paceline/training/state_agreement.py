"""The state from which a group continues: the most advanced rank's, or the newest checkpoint that verifies."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import CheckpointError, ConfigError, PacelineError
from paceline.core.files import look_anew, see_listed, wait_to_see
from paceline.data.ledger import LedgerEntry, last_recorded_version
from paceline.elastic.group_formation import StateSource, elect_source, transfer_state
from paceline.parallel.device import why_idle
from paceline.parallel.strategy_selection import strategy_name
from paceline.parallel.world import ParallelDims, World
from paceline.runs.checkpoint_manifest import CheckpointInfo, differences, require_same_run
from paceline.runs.checkpoint_store import holds_version, newest_verified
from paceline.runs.checkpointer import Checkpoint, Checkpointer, load
from paceline.runs.directory import Fork
from paceline.training import run_setup
from paceline.training.reproducibility import compare_numerics, numerics_fingerprint
from paceline.training.run_context import RunContext

if TYPE_CHECKING:
    from paceline.training.trainer import Trainer

_log = logging.getLogger(__name__)

# --- In memory, on disk, or new ---


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
            run_setup.create(run, run_id, initial, trainer.state.base)
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
        run.manifest.update(run_setup.load_manifest(run.directory)["manifest"] or {})
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
