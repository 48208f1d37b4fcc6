"""One run in this process: the trainer that its options ask for, from the first group to the result."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from paceline.core.errors import CheckpointError, PacelineError, PeerLostError
from paceline.elastic.worker_channel import AgentClient
from paceline.elastic.worker_group import StateSource, elect_source, transfer_state
from paceline.parallel.planning.auto_strategy import memory_per_process
from paceline.parallel.world import ParallelDims, World
from paceline.runs.checkpoint_manifest import CheckpointInfo
from paceline.runs.checkpoint_store import holds_version
from paceline.runs.directory import RunDirectory
from paceline.training import run_setup
from paceline.training.checkpoint_manager import ledger_has_gap, newest_checkpoint, retry
from paceline.training.control import StopSignals
from paceline.training.finalize import conclude
from paceline.training.fine_tuning import read_pretrained
from paceline.training.run_context import RunContext
from paceline.training.run_setup import RunRequest
from paceline.training.trainer import Trainer

# --- The trainers by strategy ---


def build_trainer(run: RunContext, member: AgentClient | None = None) -> Trainer:
    """The trainer that the run's strategy needs; arguments are a trainer's.

    Raises:
        UserError: the task's model, optimizers or data cannot be built, or do not work with the strategy.
    """
    if "hogwild" in run.config.strategies:
        from paceline.training.hogwild import HogwildTrainer

        return HogwildTrainer(run, member)
    if "ps" in run.config.strategies and run.config.asynchronous:
        from paceline.training.async_ps import AsyncParameterServerTrainer

        return AsyncParameterServerTrainer(run, member)
    if "ps" in run.config.strategies:
        from paceline.training.async_trainer import SyncParameterServerTrainer

        return SyncParameterServerTrainer(run, member)
    return Trainer(run, member)


# --- From a run to its end: agree on the state, train, conclude ---


_log = logging.getLogger(__name__)


def train(request: RunRequest, world: World, directory: RunDirectory, signals: StopSignals) -> dict[str, Any]:
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
    found: dict[str, Any] | None = None
    if world.rank == 0:
        found = run_setup.load_manifest(directory)
    found = world.broadcast_object(found)
    assert found is not None
    if found["result"] is not None:
        run_setup.validate(request, found["manifest"], world.world_size)
        if world.rank == 0:
            _say_finished(request, directory)
        return dict(found["result"])
    memory = memory_per_process(world.device, world.local_world_size)
    run, notes = run_setup.setup_run(
        request,
        found["manifest"],
        directory,
        signals,
        device=world.device,
        world_size=world.world_size,
        processes=world.local_world_size,
        memory=min(world.all_gather_object(memory)),
    )
    with build_trainer(run) as trainer:
        try:
            result = ElasticLoop(trainer, notes, started).run_group(world)
        except Exception as error:
            # Paceline's own errors say it where it matters.
            if trainer.states.valid and (isinstance(error, PeerLostError) or not isinstance(error, PacelineError)):
                error.add_note(f"in step {trainer.state.progress.step + 1}")
            raise
    assert result is not None, "the ranks of a world that stays do not leave it"
    world.barrier()
    return result


class ElasticLoop:
    """A trainer's way through one world after another.

    Args:
        trainer: whose run it is.
        notes: what to say aloud when the run is created.
        started: ``time.perf_counter()`` when this process began.
    """

    def __init__(self, trainer: Trainer, notes: list[str], started: float) -> None:
        self.run = trainer.run
        self._trainer = trainer
        self._notes = notes
        self._started = started

    def run_group(self, world: World, joined: Callable[[], None] = lambda: None) -> dict[str, Any] | None:
        """Agree on the state, train to the end and conclude; all ranks of ``world`` do so together.

        Args:
            world: the ranks.
            joined: called once this rank has the state and can train.

        Returns:
            The content of ``result.json``; None where the ranks left together before the end.

        Raises:
            PeerLostError: a rank is gone.
            PacelineError: as :func:`train` says.
        """
        trainer = self._trainer
        mesh = self.run.build_mesh(world)
        self._agree_on_state(mesh)
        trainer.join_group(mesh)
        joined()
        if not trainer.fit():
            return None
        result = conclude(trainer, self._started)
        if world.rank == 0:
            retry(partial(self.run.directory.write_result, result))
            self.run.directory.append_event("finished")
        trainer.monitor.finish(result)
        self.exit_group()
        world.barrier()
        return result

    def exit_group(self) -> None:
        """Close what belongs to the world; a second call does nothing."""
        self._trainer.leave_group()

    def _agree_on_state(self, mesh: ParallelDims) -> None:
        """Have every rank hold the state that the furthest one holds, or else the newest that is saved."""
        trainer, world = self._trainer, mesh.world
        agreement = elect_source(world, valid=trainer.states.valid, version=trainer.states.version)
        if agreement.source is not None:
            state = trainer.states.export_state() if world.rank == agreement.source else None
            received = transfer_state(world, agreement, state)
            if received is not None:
                trainer.states.import_state(received)
            if not self._something_is_lost(world):
                return
        with suppress(CheckpointError):
            trainer.checkpointer.wait()  # what is on disk is looked at next
        world.barrier()
        directory = self.run.directory
        new = bool(world.broadcast_object(not directory.exists()))
        run_id = str(world.broadcast_object(secrets.token_hex(8) if new else self.run.run_id))
        saved = newest_checkpoint(self.run, world, run_id)
        parent = read_pretrained(self.run, world) if saved is None else None
        trainer.states.restore(mesh, saved, None if parent is None else parent.weights)
        if world.rank == 0:
            # Only now: where the model could not be built, no run was created.
            if new:
                run_setup.create(self.run, run_id, parent)
                for note in self._notes:
                    _say(self.run.quiet, note)
            self.run.directory.append_event(
                "started",
                generation=world.generation,
                world_size=world.world_size,
                microbatches=self.run.num_microbatches,
                step=trainer.state.progress.step,
                total_steps=self.run.data.total_steps,
            )

    def _something_is_lost(self, world: World) -> bool:
        """Whether the best model, or what the ledger must say, was only in a process that is gone.

        Then a part of the run is done again, from the newest checkpoint, to get it back.
        """
        trainer, directory = self._trainer, self.run.directory
        best = trainer.state.progress.best_version
        missing, lost = False, False
        if world.rank == 0:
            lost = ledger_has_gap(directory.ledger, trainer.states.recent)
            missing = (
                best not in (None, trainer.state.progress.version)
                and not trainer.checkpointer.has_in_memory(best or 0)
                and not holds_version(directory.checkpoints, best or 0)
            )
        missing, lost = world.broadcast_object([missing, lost])
        if lost or not missing:
            return bool(lost)
        assert best is not None
        with suppress(CheckpointError):
            trainer.checkpointer.wait()
        holders = world.all_gather_object(trainer.checkpointer.has_in_memory(best))
        if any(holders):
            self._give_best(world, holders.index(True))
        return not any(holders)

    def _give_best(self, world: World, holder: int) -> None:
        """Copy the best model to rank 0, which owes it to the disk from now on."""
        checkpointer = self._trainer.checkpointer
        held = checkpointer.in_memory() if world.rank == holder else None
        info = world.broadcast_object(held and dataclasses.asdict(held.manifest.info), holder)
        given = StateSource(holder, info["state_version"], (0,))
        received = transfer_state(world, given, held.state if held else None)
        if received is not None:
            checkpointer.keep_in_memory(received, CheckpointInfo(**info))


def _say_finished(request: RunRequest, directory: RunDirectory) -> None:
    _say(request.quiet, f"{directory.path} has finished; nothing is left to train.")


def _say(quiet: bool, text: str) -> None:
    if not quiet:
        _log.warning(text)
