"""What to say of a step that fails again and again: which, on which samples, with which error. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.data.balanced_order import with_saved_sizes
from paceline.data.ledger import read_ledger
from paceline.distributed.process import Failure
from paceline.distributed.tree import ReductionPlan
from paceline.errors import RunDirectoryError
from paceline.run_directory import RunDirectory

if TYPE_CHECKING:
    from paceline.data.order import DataOrder


def describe_repetition(
    directory: RunDirectory,
    *,
    steps: int,
    replacements: int,
    how: str,
    failure: Failure | None,
    rank: int | None,
    ranks: int,
) -> str:
    """The verdict on a job whose replacements are used up.

    Args:
        directory: the run's.
        steps: done so far; -1 for none that is known.
        replacements: that did not help.
        how: the last worker's end.
        failure: the error that it recorded.
        rank: its rank in its last view, None where it was in none.
        ranks: how many computed in that view.
    """
    where = f"at step {steps}" if steps >= 0 else "before its first step"
    text = f"The run is still {where} after {replacements} replacements, the last of which {how}: "
    text += "it would happen again."
    samples = "" if steps < 0 or rank is None or rank >= ranks else _samples(directory, steps, rank, ranks)
    if samples:
        text += f"\n  In step {steps + 1}, rank {rank} computes {samples}."
    if failure is not None and not failure.victim:
        text += f"\n  Its last error: {failure.type}: {failure.message}"
    return text


def _samples(directory: RunDirectory, steps: int, rank: int, ranks: int) -> str:
    """What a rank computes in the step after so many, as far as the run's files tell."""
    try:
        config = directory.read_manifest()["config"]
        order = with_saved_sizes(read_ledger(directory.ledger).order, directory.sample_sizes)
        return of_rank(config, order, steps, rank, ranks)
    except (RunDirectoryError, KeyError, TypeError, ValueError, IndexError):
        # What is said in passing must not hide why the job ends.
        return ""


def of_rank(config: Mapping[str, Any], order: DataOrder | None, steps: int, rank: int, ranks: int) -> str:
    """The shards and samples of a rank in the step after so many; "" where it has none.

    Args:
        config: the run's options.
        order: of the training samples; None for streams, whose samples are counted only.
        steps: done so far.
        rank: who computes.
        ranks: among how many, evenly.
    """
    shards = ReductionPlan(int(config["shards"]), ranks).shards_of(rank)
    named = f"shard {shards[0]}" if len(shards) == 1 else f"shards {shards[0]} to {shards[-1]}"
    if order is None:
        return f"{named} of the stream, after about {steps * int(config['global_batch_size'])} samples in all"
    epoch, step = divmod(steps, order.steps_per_epoch)
    bounds = order.shard_bounds(step)[shards.start : shards.stop]
    return f"{named}: {order.describe(epoch, bounds[0][0], bounds[-1][1])}" if bounds else ""
