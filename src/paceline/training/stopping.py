"""How the ranks of a run that is to stop leave it."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import NoReturn

from paceline.core.errors import ConfigError, PeerLostError, StopRequested
from paceline.parallel.world import World
from paceline.runs.failures import describe_stop
from paceline.training import control
from paceline.training.run_context import RunContext


def stop_all_ranks(run: RunContext, world: World, stop: int, *, step: int, idle: bool) -> NoReturn:
    """Leave together, once the state is saved.

    Args:
        run: what was trained.
        world: all its ranks call this.
        stop: what asked for it, as in the control word.
        step: where the run stands.
        idle: whether this rank did not do a single step.

    Raises:
        StopRequested: always, but for
        ConfigError: the time was up before a single step was done; it would be so again.
    """
    if stop == control.WALLTIME and world.broadcast_object(idle):
        raise ConfigError(
            f"--walltime {run.config.walltime} is over before an evaluation after step {step} is done, "
            "and it would be so again. Give more time, or evaluate less data."
        )
    stopped = {"cause": control.cause(stop), "step": step}
    if world.rank == 0:
        run.directory.append_event("stopped", **stopped)
    # Whoever leaves breaks the others' connections, so nobody does before the state is safe.
    with suppress(PeerLostError) if world.rank == 0 else nullcontext():
        world.barrier()
    raise StopRequested(describe_stop(stopped, run.directory), exit_code=control.exit_code(stop))
