"""From a run to its end: agree on the state, train, conclude; in one world, or in one after another."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.checkpointer import load
from paceline.checkpoint.manifest import CheckpointInfo, differences, require_same_run
from paceline.checkpoint.storage import holds_version, newest_verified
from paceline.distributed.world import World
from paceline.errors import CheckpointError, PacelineError, PeerLostError, StopRequested
from paceline.membership.channel import Place
from paceline.membership.handover import agree, hand_over
from paceline.membership.join import open_view
from paceline.membership.member import Member
from paceline.run_directory import RunDirectory
from paceline.training import preparation
from paceline.training.conclusion import conclude
from paceline.training.control import StopSignals, exit_code
from paceline.training.pins import current_pins
from paceline.training.preparation import Request
from paceline.training.run import Run
from paceline.training.trainer import Trainer

_log = logging.getLogger(__name__)

_REFORMED = "left it as asked, after a step"


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
    found: dict[str, Any] | None = None
    if world.rank == 0:
        found = preparation.recorded(directory)
    found = world.broadcast_json(found)
    assert found is not None
    if found["result"] is not None:
        preparation.check(request, found["manifest"], world.world_size)
        if world.rank == 0:
            _say_finished(request, directory)
        return dict(found["result"])
    run, notes = preparation.prepare(
        request,
        found["manifest"],
        directory,
        signals,
        device=world.device,
        world_size=world.world_size,
        processes=world.local_world_size,
    )
    with Trainer(run) as trainer:
        try:
            result = _Session(trainer, notes, started).take_part(world)
        except Exception as error:
            # Paceline's own errors say it where it matters.
            if trainer.valid and (isinstance(error, PeerLostError) or not isinstance(error, PacelineError)):
                error.add_note(f"in step {trainer.state.progress.step + 1}")
            raise
    assert result is not None, "the ranks of a world that stays do not leave it"
    world.barrier()
    return result


def train_as_member(
    request: Request,
    member: Member,
    directory: RunDirectory,
    signals: StopSignals,
    *,
    processes: int,
    world_size: int,
    at_rank_0: Callable[[], None],
) -> dict[str, Any]:
    """What :func:`train` does, as one of several processes of a machine that come and go.

    A member prepares itself alone, whether the run begins or has gone on for long, and then takes part
    in one view after another. After a loss it goes on from its own state, or from another member's.

    Args:
        request: what somebody asked for; the same in every member.
        member: tells of the views.
        directory: the run's; the agent holds its lock.
        signals: who asks for a stop.
        processes: how many members there are to be on this machine.
        world_size: how many members begin the run.
        at_rank_0: called whenever this member becomes rank 0.

    Returns:
        The content of ``result.json``.

    Raises:
        Retired: the agent does not need this member any more.
        UserError, StopRequested, PacelineError: as :func:`train`.
    """
    started = time.perf_counter()
    found = preparation.recorded(directory)
    if found["result"] is not None:
        preparation.check(request, found["manifest"], world_size)
        return dict(found["result"])
    device = torch.device("cpu")
    run, notes = preparation.prepare(
        request,
        found["manifest"],
        directory,
        signals,
        device=device,
        world_size=world_size,
        processes=processes,
    )
    with Trainer(run, member) as trainer:
        session = _Session(trainer, notes, started)
        left, why = -1, "has just started"
        while True:
            place = member.next_view(left, why, partial(_has_nothing_to_save, trainer))
            if place is None:
                raise StopRequested(
                    "stopped before the first step, as asked; nothing is to be saved.",
                    exit_code=exit_code(signals.received),
                )
            if place.rank == 0:
                at_rank_0()
            result, why = _take_part_in_view(session, member, place)
            # Who loses the others only after the run's end has nothing left to do.
            result = result or directory.read_result()
            if result is not None:
                return result
            left = place.generation


def _has_nothing_to_save(trainer: Trainer) -> bool:
    return bool(trainer.run.signals.received) and not trainer.valid


def _take_part_in_view(session: _Session, member: Member, place: Place) -> tuple[dict[str, Any] | None, str]:
    """The run's result, or None and why this member left the view."""
    result, why = None, _REFORMED
    try:
        with open_view(place, member, device=session.run.device) as world:
            try:
                result = session.take_part(world, joined=partial(member.joined, place.generation))
            except PeerLostError as error:
                why = str(error)
                _let_go(error)
            session.leave()
    except PeerLostError as error:
        why = str(error)
        _let_go(error)
    return result, why


def _let_go(error: BaseException | None) -> None:
    """Clear the frames that an error holds: what they refer to, such as the group, would live on."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class _Session:
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

    def take_part(self, world: World, joined: Callable[[], None] = lambda: None) -> dict[str, Any] | None:
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
        self._agree_on_state(world)
        trainer.attach(world)
        joined()
        if not trainer.fit():
            return None
        result = conclude(trainer, self._started)
        if world.rank == 0:
            self.run.directory.write_result(result)
            self.run.directory.append_event("finished")
        trainer.monitor.finish(result)
        self.leave()
        world.barrier()
        return result

    def leave(self) -> None:
        """Close what belongs to the world; a second call does nothing.

        Raises:
            CheckpointError: a save in the background failed.
        """
        self._trainer.detach()

    def _agree_on_state(self, world: World) -> None:
        """Have every rank hold the state that the furthest one holds, or else the newest that is saved."""
        trainer = self._trainer
        agreement = agree(world, valid=trainer.valid, version=trainer.state.progress.version)
        if agreement.source is not None:
            state = trainer.state_to_give() if world.rank == agreement.source else None
            received = hand_over(world, agreement, state)
            if received is not None:
                trainer.take(received)
            if not self._best_is_lost(world):
                return
        directory = self.run.directory
        new = bool(world.broadcast_json(not directory.exists()))
        run_id = str(world.broadcast_json(secrets.token_hex(8) if new else self.run.run_id))
        trainer.restore(world, _newest_checkpoint(self.run, world, run_id))
        if world.rank == 0:
            # Only now: where the model could not be built, no run was created.
            if new:
                preparation.create(self.run, run_id)
                for note in self._notes:
                    _say(self.run.quiet, note)
            self.run.directory.append_event(
                "started",
                generation=world.generation,
                world_size=world.world_size,
                shards=self.run.num_shards,
                step=trainer.state.progress.step,
                total_steps=self.run.data.total_steps,
            )

    def _best_is_lost(self, world: World) -> bool:
        """Whether the best model is on no disk: rank 0 died while it wrote it, and the run went on.

        Then a part of the run is done again, from the newest checkpoint, to get it back.
        """
        progress = self._trainer.state.progress
        lost = (
            world.rank == 0
            and progress.best_version not in (None, progress.version)
            and not holds_version(self.run.directory.checkpoints, progress.best_version or 0)
        )
        return bool(world.broadcast_json(lost))


def _newest_checkpoint(run: Run, world: World, run_id: str) -> dict[str, Any] | None:
    """The state of the newest checkpoint that verifies on every rank, or None where there is none.

    Raises:
        CheckpointError: there are some, and none can be used: nothing is lost without being asked for.
    """
    directory = run.directory
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
                directory.append_event("fallback", reason=reason)
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
            _compare(run, world, run_id, path, checkpoint.manifest.info)
            if passed_over and world.rank == 0:
                _log.warning(
                    "continuing from %s instead, after step %d", path.name, checkpoint.manifest.info.step
                )
            return checkpoint.state
        _log.warning(
            "passed over checkpoint %s, which does not verify on every rank: %s", path.name, problems[0]
        )
        if world.rank == 0:
            directory.append_event("fallback", reason=problems[0])
        failed.append(path.name)
        passed_over += 1


def _compare(run: Run, world: World, run_id: str, path: Path, recorded: CheckpointInfo) -> None:
    """Refuse a foreign checkpoint; say where equal bits are no longer promised."""
    # The same task may have another name by now: its file was moved.
    now = dataclasses.replace(
        recorded, run=run_id, shards=run.num_shards, pins=current_pins(run.config, run.device)
    )
    require_same_run(path, recorded, now)
    changed = differences(recorded.pins, now.pins)
    if changed and world.rank == 0:
        _log.warning(
            "this process differs from the one that wrote %s, so the model will be equal within rounding, "
            "not bit for bit: %s",
            path.name,
            "; ".join(changed),
        )


def _say_finished(request: Request, directory: RunDirectory) -> None:
    _say(request.quiet, f"{directory.path} has finished; nothing is left to train.")


def _say(quiet: bool, text: str) -> None:
    if not quiet:
        _log.warning(text)
