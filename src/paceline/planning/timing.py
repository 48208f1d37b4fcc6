"""Communication and time of a step under each strategy: pure functions of sizes and degrees."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.distributed.tree import ReductionPlan
from paceline.planning.layout import Layout
from paceline.planning.measure import Measurement
from paceline.planning.memory import Reduction, parts
from paceline.planning.parts import Part

_AGAIN = 4 / 3
"""A step's operations with checkpointing, against without: forward is one third, and is made twice."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A step of the rank that has most to do.

    Attributes:
        sent_bytes: what it sends.
        compute_s: arithmetic, at the given speed.
        bubble_s: waiting for the other stages of the pipeline.
        communication_s: sending, at the given speed.
        step_s: all of it; of arithmetic and sending the longer one where they overlap.
        limited_by: "compute", "bubble" or "communication", whichever is longest.
    """

    sent_bytes: int
    compute_s: float
    bubble_s: float
    communication_s: float
    step_s: float
    limited_by: str


def data_bytes(part: Part, layout: Layout, reduction: Reduction, num_shards: int) -> int:
    """What the rank that sends most sends in a step to ranks with other data.

    ``ddp``, as a ring does: all but its own 1/W of the gradients, and again of the sums; with ``exact``, of
    each subtree that the rank sums by itself. ``zero1`` sends parameters in place of the sums. ``fsdp``, for
    every micro-batch: its part of the parameters to all others for forward and again for backward (the root's
    once), and the gradients: with ``exact`` to the ranks of all copies, which each sum a part and send it to
    the other copies; with ``fast`` once a step within a copy, and copies then add up their parts.
    DeepSpeed's stage 1 is as ``zero1``; stages 2 and 3 scatter every micro-batch's gradients.
    """
    ranks = layout.data_ranks
    if ranks == 1:
        return 0
    if layout.fsdp > 1:
        rounds = -(-num_shards // ranks)
        blocks = part.parameter_bytes - part.root_bytes
        gathered = rounds * (2 * blocks + part.root_bytes) * (layout.fsdp - 1) // layout.fsdp
        over_copies = (part.gradient_bytes // layout.fsdp) * (layout.dp - 1) // layout.dp
        if reduction == "exact":
            return gathered + rounds * part.gradient_bytes * (ranks - 1) // ranks + over_copies
        return gathered + part.gradient_bytes * (layout.fsdp - 1) // layout.fsdp + 2 * over_copies
    if layout.zero_stage > 1:
        # Gradients are scattered after every micro-batch, and parameters gathered: once a step, or for
        # every forward and backward.
        rounds = -(-num_shards // ranks)
        gathers = 2 * rounds if layout.zero_stage == 3 else 1
        return (rounds * part.gradient_bytes + gathers * part.parameter_bytes) * (ranks - 1) // ranks
    plan = ReductionPlan(num_shards, ranks, kind=reduction)
    nodes = max(len(of_rank) for of_rank in plan.nodes)
    return (nodes + 1) * part.gradient_bytes * (ranks - 1) // ranks


def predict_timing(
    m: Measurement,
    layout: Layout,
    reduction: Reduction,
    *,
    num_shards: int,
    flops_per_s: float,
    bandwidth: float,
) -> Timing:
    """The time of a step.

    Args:
        m: the task's.
        layout: of the ranks.
        reduction: how gradients are summed.
        num_shards: S.
        flops_per_s: operations a second that a process really makes.
        bandwidth: bytes a second that a process sends.
    """
    micro_batches = -(-num_shards // layout.data_ranks)
    stages = parts(m, layout)
    again = _AGAIN if layout.checkpointing else 1.0
    of_one = [again * part.flops / flops_per_s for part in stages]
    # In a ring, all but its own part, twice.
    within = [2 * part.reduced_bytes * (layout.tp - 1) // layout.tp * micro_batches for part in stages]
    between = [(part.received_bytes + part.sent_bytes) * micro_batches for part in stages]
    over_data = [data_bytes(part, layout, reduction, num_shards) for part in stages]
    busiest = max(range(len(stages)), key=lambda s: within[s] + between[s] + over_data[s])
    compute_s = micro_batches * max(of_one)
    # The first micro-batch passes all other stages before the last one, and goes back through them.
    bubble_s = sum(of_one) - max(of_one)
    # What a tensor-parallel group adds up, its ranks wait for.
    waited_s = within[busiest] / bandwidth
    aside_s = (between[busiest] + over_data[busiest]) / bandwidth
    # fsdp's exact sums are made while backward waits; the others are sent while it goes on.
    apart = layout.fsdp > 1 and reduction == "exact"
    step_s = waited_s + bubble_s + (compute_s + aside_s if apart else max(compute_s, aside_s))
    takes = {"compute": compute_s, "bubble": bubble_s, "communication": waited_s + aside_s}
    return Timing(
        sent_bytes=within[busiest] + between[busiest] + over_data[busiest],
        compute_s=compute_s,
        bubble_s=bubble_s,
        communication_s=takes["communication"],
        step_s=step_s,
        limited_by=max(takes, key=lambda what: takes[what]),
    )
