"""A worker that an agent started: it takes part in one view of the group after another."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from paceline.core.errors import PeerLostError, StopRequested
from paceline.elastic.worker_channel import AgentClient, Assignment
from paceline.elastic.worker_group import open_process_group
from paceline.parallel.planning.auto_strategy import memory_per_process, require_replaceable
from paceline.runs.directory import RunDirectory
from paceline.training import run_setup
from paceline.training.control import StopSignals, exit_code
from paceline.training.run_setup import RunRequest
from paceline.training.session import ElasticLoop, build_trainer
from paceline.training.trainer import Trainer

_REFORMED = "left it as asked, after a step"


def run_elastic_worker(
    request: RunRequest,
    member: AgentClient,
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
    found = run_setup.load_manifest(directory)
    if found["result"] is not None:
        run_setup.validate(request, found["manifest"], world_size)
        return dict(found["result"])
    device = torch.device("cpu")
    run, notes = run_setup.setup_run(
        request,
        found["manifest"],
        directory,
        signals,
        device=device,
        world_size=world_size,
        processes=processes,
        memory=memory_per_process(device, processes),
    )
    require_replaceable(run.config, request.config)
    with build_trainer(run, member) as trainer:
        session = ElasticLoop(trainer, notes, started)
        left, why = -1, "has just started"
        while True:
            place = member.next_group(left, why, partial(_has_nothing_to_save, trainer))
            if place is None:
                raise StopRequested(
                    "stopped before the first step, as requested; there is nothing to save.",
                    exit_code=exit_code(signals.received),
                )
            if place.rank == 0:
                at_rank_0()
            result, why = _train_in_group(session, member, place)
            # Who loses the others only after the run's end has nothing left to do.
            result = result or directory.read_result()
            if result is not None:
                return result
            left = place.generation


def _has_nothing_to_save(trainer: Trainer) -> bool:
    return bool(trainer.run.signals.received) and not trainer.states.valid


def _train_in_group(session: ElasticLoop, member: AgentClient, place: Assignment) -> tuple[dict[str, Any] | None, str]:
    """The run's result, or None and why this member left the view."""
    result, why = None, _REFORMED
    try:
        with open_process_group(place, member, device=session.run.device) as world:
            try:
                result = session.run_group(world, joined=partial(member.joined, place.generation))
            except PeerLostError as error:
                why = str(error)
                _let_go(error)
            session.exit_group()
    except PeerLostError as error:
        why = str(error)
        _let_go(error)
    return result, why


def _let_go(error: BaseException | None) -> None:
    """Clear the frames that an error holds: what they refer to, such as the group, would live on."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
