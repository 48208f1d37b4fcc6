"""Predicts memory and time of a step under a layout of ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from paceline.core.config import config_from_mapping
from paceline.core.errors import ConfigError
from paceline.parallel.reduction_tree import ReductionPlan
from paceline_planning.measurement import Measurement
from paceline_planning.model_partition import Activations, ModelPart, Precision, Recompute, split_further

# --- How ranks are laid out: sizes of a mesh's axes, and what goes with them ---


AXES = ("pp", "dp", "fsdp", "tp")


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """A grid of ranks.

    Attributes:
        pp: stages of the pipeline.
        dp: copies of the model.
        fsdp: ranks that a copy's parameters are sharded over.
        tp: ranks that its tensors are split over.
        zero1: copies share the optimizer's state.
        zero_stage: DeepSpeed's ZeRO stage, 1 to 3; 0: it is not used.
        recompute: what backward recomputes.
        mixed_precision: fsdp gathers layers that autocast casts in half precision.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    zero1: bool = False
    zero_stage: int = 0
    recompute: Recompute = "none"
    mixed_precision: bool = False

    @property
    def axes(self) -> dict[str, int]:
        """The axes with several ranks, outermost first."""
        return {axis: size for axis in AXES if (size := getattr(self, axis)) > 1}

    @property
    def world_size(self) -> int:
        return math.prod(self.axes.values())

    @property
    def data_ranks(self) -> int:
        """Ranks with data of their own."""
        return self.dp * self.fsdp

    @property
    def family(self) -> str:
        """The strategy's name, or the axes' with a cross between: "fsdp", "dp x tp"."""
        if len(self.axes) > 1:
            return " x ".join(self.axes)
        (axis,) = self.axes or ("single",)
        if self.zero_stage:
            return "deepspeed"
        return "zero1" if self.zero1 else "ddp" if axis == "dp" else axis

    @property
    def name(self) -> str:
        """The family, with its stage, or its sizes where there are several: "dp=2,tp=4"."""
        if self.zero_stage:
            return f"deepspeed {self.zero_stage}"
        return ",".join(f"{a}={n}" for a, n in self.axes.items()) if len(self.axes) > 1 else self.family

    @property
    def options(self) -> dict[str, object]:
        """The options of a run for it; ``ddp`` and ``single`` need none."""
        options: dict[str, object] = {} if self.family in ("single", "ddp") else {"strategy": self.family}
        if len(self.axes) > 1:
            options = {"mesh": self.name}
        if self.zero_stage > 1:
            options["zero_stage"] = self.zero_stage
        if self.recompute != "none":
            options["checkpoint_activations"] = self.recompute
        if self.mixed_precision:
            options |= {"precision": "bf16", "fsdp_mixed_precision": True}
        return options

    @property
    def in_paceline(self) -> bool:
        """Whether this version can train so."""
        try:
            config = config_from_mapping(self.options, "the plan")
        except ConfigError:
            return False
        return len(self.axes) <= 1 or config.parallel.axes(self.world_size) == self.axes


def layouts(world_size: int, *, most_stages: int, splits: Collection[int]) -> Iterator[RankLayout]:
    """Return the grids of this number of ranks, without activation checkpointing.

    Args:
        most_stages: the most that the model can be cut into.
        splits: the numbers of ranks that can share its tensors.
    """
    if world_size == 1:
        yield RankLayout()
        return
    for pp in _divisors(world_size):
        if pp > most_stages:
            break
        for tp in _divisors(world_size // pp):
            if tp > 1 and tp not in splits:
                continue
            rest = world_size // pp // tp
            yield RankLayout(pp=pp, dp=rest, tp=tp)
            if pp == tp == 1:
                yield RankLayout(dp=rest, zero1=True)
                yield from (RankLayout(dp=rest, zero_stage=stage) for stage in (1, 2, 3))
            if pp == 1:
                for fsdp in _divisors(rest):
                    # All axes at once is more than anybody has asked for.
                    if fsdp > 1 and (tp == 1 or fsdp == rest):
                        yield RankLayout(dp=rest // fsdp, fsdp=fsdp, tp=tp)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


# --- Memory of a rank under each strategy: pure functions of sizes and degrees, in bytes ---


Reduction = Literal["exact", "allreduce"]

DEEPSPEED_BUCKET_BYTES = 200 * 2**20
"""Of fp32 gradients that DeepSpeed sums at a time."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of the rank that needs most, in bytes.

    Attributes:
        parameters: and buffers.
        gradients: all buffers that gradients are summed in.
        optimizer: its state.
        activations: of the micro-batches on their way, at the fullest moment of forward and backward. Under
            fsdp, those that are left when as many have gone as gradients have come.
        temporary: short-lived memory: gathered blocks, messages, the optimizer's own.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporary


def parts(m: Measurement, layout: RankLayout) -> tuple[ModelPart, ...]:
    """Return the parts of one copy of the model on its ranks: one for each stage.

    The copy is still whole along ``fsdp``.
    """
    stages = m.anatomy.stages(layout.pp)
    if layout.tp == 1:
        return stages
    assert m.halved is not None, "there is no split of the model"
    halves = m.halved.stages(layout.pp)
    return tuple(split_further(one, half, layout.tp) for one, half in zip(stages, halves, strict=True))


def predict_memory(
    m: Measurement,
    layout: RankLayout,
    reduction: Reduction,
    precision: Precision,
    *,
    num_microbatches: int,
    shared_memory: bool,
) -> Memory:
    """Return the memory of the rank that needs most.

    Args:
        shared_memory: the ranks are CPU processes of one host, and read each other's gradients.
    """
    of_stages = [
        _of_rank(
            *(m, part, layout, reduction, num_microbatches),
            measured=part.activations["bf16 gathers" if layout.mixed_precision else precision, layout.recompute],
            in_flight=in_flight(layout, stage, num_microbatches),
            shared_memory=shared_memory,
        )
        for stage, part in enumerate(parts(m, layout))
    ]
    return max(of_stages, key=lambda memory: memory.total)


def in_flight(layout: RankLayout, stage: int, num_microbatches: int) -> int:
    """Micro-batches that a stage has forwarded and not yet gone back through, at most.

    Under 1F1B, as many as there are stages from this one on (Narayanan et al., "Efficient Large-Scale Language Model
    Training on GPU Clusters", 2021, section 2.2).
    """
    return min(-(-num_microbatches // layout.data_ranks), layout.pp - stage)


def _of_rank(
    m: Measurement,
    part: ModelPart,
    layout: RankLayout,
    reduction: Reduction,
    num_microbatches: int,
    *,
    measured: Activations,
    in_flight: int,
    shared_memory: bool,
) -> Memory:
    saved, peak = measured.saved, measured.peak
    # What came in and what went out stay with each micro-batch until its backward.
    others = (in_flight - 1) * saved + in_flight * part.received_bytes
    if layout.fsdp > 1:
        return _fsdp(m, part, measured, others, layout, reduction, num_microbatches)
    if layout.zero_stage:
        return _deepspeed(m, part, peak, layout)
    ranks = layout.data_ranks
    plan = ReductionPlan(num_microbatches, ranks, kind=reduction)
    # The others' parts of the chunk that this rank sums, a part for each subtree of theirs.
    subtrees = sum(map(len, plan.subtrees)) - min(map(len, plan.subtrees)) if reduction == "exact" else 0
    # Parts of tensors live in a group of their own, whose ranks send each other messages.
    flat = layout.pp == layout.tp == 1
    received = 0 if shared_memory and flat else subtrees * part.gradient_bytes // ranks
    slot = part.gradient_bytes + part.buffer_bytes
    optimizer = part.optimizer_bytes if not layout.zero1 else -(-part.optimizer_bytes // ranks)
    # The optimizer steps when the activations are gone.
    return Memory(
        parameters=part.parameter_bytes + part.buffer_bytes,
        gradients=max(plan.num_grad_buffers) * slot,
        optimizer=optimizer,
        activations=peak + others + m.batch_bytes,
        temporary=part.buffer_bytes + max(received, part.optimizer_temporary - peak - others),
    )


def _fsdp(
    m: Measurement,
    part: ModelPart,
    measured: Activations,
    others: int,
    layout: RankLayout,
    reduction: Reduction,
    num_microbatches: int,
) -> Memory:
    """Predict fsdp: a rank holds its shards, and in addition the gathered blocks.

    Its peak is in forward, or in the backward of one of the blocks. While that runs, there are: the block's gathered
    parameters and new gradients, the gathered parameters of the block before it, which are fetched in advance, and the
    gradients of the block after it, which are on their way. The root's parameters and gradients are there all the time.
    """
    ranks = layout.fsdp
    piece = -(-part.parameter_bytes // ranks)
    plan = ReductionPlan(num_microbatches, 1)
    # Each of several copies sums a part of its chunk.
    kept = _kept_between_micro_steps(plan, layout.data_ranks) if reduction == "exact" else 0
    open_sums = kept * -(-piece // layout.dp)
    root, of_blocks = part.root_bytes, part.block_bytes
    if layout.mixed_precision:
        root, of_blocks = part.lowered_root_bytes, part.lowered_block_bytes
    # In a step's first backward, gradients come as activations go; before any later one they are all there.
    overlap = piece if num_microbatches <= layout.data_ranks else 0
    most = max(measured.forward_peak, *measured.backward_peaks)
    # (Gathered, activations): in forward a block with the next one, or all of a model without blocks.
    moments = [(root + max(map(sum, pairwise((0, *of_blocks, 0)))), max(0, measured.forward_peak + others - overlap))]
    if not of_blocks:
        moments.append((2 * root, max(0, most + others - overlap)))
    around = zip((0, *of_blocks), of_blocks, (*part.block_bytes[1:], 0), strict=False)  # sums are in fp32
    for number, (before, own, after) in enumerate(around):
        arrived = min(overlap, sum(part.block_bytes[number + 1 :]) // ranks)
        now = measured.backward_peaks[part.block_pieces[number]] + others
        moments.append((2 * root + before + 2 * own + after, max(0, now - overlap + arrived)))
    gathered, activations = max(moments, key=sum)
    optimizer_temporary = -(-part.optimizer_temporary // ranks)
    return Memory(
        parameters=piece + part.buffer_bytes,
        gradients=piece + open_sums + part.buffer_bytes,
        optimizer=-(-part.optimizer_bytes // ranks),
        activations=activations + m.batch_bytes,
        temporary=part.buffer_bytes + max(gathered, optimizer_temporary - activations),
    )


def _kept_between_micro_steps(plan: ReductionPlan, ranks: int) -> int:
    """Return the maximum number of sums that rank 0 holds between micro-steps of ``ranks`` micro-batches."""
    open_sums: set[int] = set()
    most = 0
    for number, step in enumerate(plan.accumulation(0, plan.microbatches_of(0)), start=1):
        open_sums.add(step.buffer)
        open_sums.difference_update(other for _, other in step.merges)
        if number % ranks == 0 and number < plan.num_microbatches:
            most = max(most, len(open_sums))
    return most


def _deepspeed(m: Measurement, part: ModelPart, peak: int, layout: RankLayout) -> Memory:
    """Predict DeepSpeed 0.19: in addition to the parameters, a flat copy of this rank's part for the optimizer.

    Gradients pass through a bucket, in which they are added up over the ranks. From stage 2 on a rank keeps only its
    part of them; in stage 3 also of the parameters, and gathers whole ones for the active modules.
    """
    ranks, stage = layout.dp, layout.zero_stage
    piece = -(-part.parameter_bytes // ranks)
    own_gradients = -(-part.gradient_bytes // ranks)
    bucket = min(part.gradient_bytes, DEEPSPEED_BUCKET_BYTES)
    blocks = max(part.block_bytes, default=0)
    gathered = part.root_bytes + 2 * blocks if stage == 3 else 0
    return Memory(
        parameters=(piece if stage == 3 else part.parameter_bytes) + piece + part.buffer_bytes,
        gradients=(part.gradient_bytes if stage == 1 else own_gradients) + part.buffer_bytes,
        optimizer=-(-part.optimizer_bytes // ranks),
        activations=peak + m.batch_bytes,
        # The step, for which the part's gradients are made flat, comes when the activations are gone.
        temporary=part.buffer_bytes + max(bucket + gathered, own_gradients - peak),
    )


# --- Communication and time of a step under each strategy: pure functions of sizes and degrees ---


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A step of the rank that has most to do.

    Attributes:
        bubble_s: waiting for the other stages of the pipeline.
        step_s: all of it; of arithmetic and sending the longer one where they overlap.
        limited_by: "compute", "bubble" or "communication", whichever is longest.
    """

    sent_bytes: int
    compute_s: float
    bubble_s: float
    communication_s: float
    step_s: float
    limited_by: str


def data_bytes(part: ModelPart, layout: RankLayout, reduction: Reduction, num_microbatches: int) -> int:
    """Return the bytes per step that the busiest rank sends to ranks with other data.

    ``ddp``, as a ring does: all but its own 1/W of the gradients, and again of the sums; with ``exact``, of
    each subtree that the rank sums by itself. ``zero1`` sends parameters in place of the sums. ``fsdp``, for
    every micro-batch: its part of the parameters to all others for forward and again for backward (the root's
    once), and the gradients: with ``exact`` to the ranks of all copies, which each sum a part and send it to
    the other copies; with ``allreduce`` once a step within a copy, and copies then add up their parts.
    DeepSpeed's stage 1 is as ``zero1``; stages 2 and 3 scatter every micro-batch's gradients.
    """
    ranks = layout.data_ranks
    if ranks == 1:
        return 0
    if layout.fsdp > 1:
        rounds = -(-num_microbatches // ranks)
        root, blocks = part.root_bytes, part.parameter_bytes - part.root_bytes
        if layout.mixed_precision:
            root, blocks = part.lowered_root_bytes, sum(part.lowered_block_bytes)
        gathered = rounds * (2 * blocks + root) * (layout.fsdp - 1) // layout.fsdp
        over_copies = (part.gradient_bytes // layout.fsdp) * (layout.dp - 1) // layout.dp
        if reduction == "exact":
            return gathered + rounds * part.gradient_bytes * (ranks - 1) // ranks + over_copies
        return gathered + part.gradient_bytes * (layout.fsdp - 1) // layout.fsdp + 2 * over_copies
    if layout.zero_stage > 1:
        # Gradients are scattered after every micro-batch, and parameters gathered: once a step, or for
        # every forward and backward.
        rounds = -(-num_microbatches // ranks)
        gathers = 2 * rounds if layout.zero_stage == 3 else 1
        return (rounds * part.gradient_bytes + gathers * part.parameter_bytes) * (ranks - 1) // ranks
    plan = ReductionPlan(num_microbatches, ranks, kind=reduction)
    nodes = max(len(of_rank) for of_rank in plan.subtrees)
    return (nodes + 1) * part.gradient_bytes * (ranks - 1) // ranks


def predict_timing(
    m: Measurement,
    layout: RankLayout,
    reduction: Reduction,
    *,
    num_microbatches: int,
    flops_per_s: float,
    bandwidth: float,
) -> Timing:
    """Return the time of a step, from the operations a process really makes and the bytes it sends a second."""
    micro_batches = -(-num_microbatches // layout.data_ranks)
    stages = parts(m, layout)
    again = m.anatomy.repetition(layout.recompute)
    of_one = [again * part.flops / flops_per_s for part in stages]
    # In a ring, all but its own part, twice.
    sent = [
        (
            2 * part.reduced_bytes * (layout.tp - 1) // layout.tp * micro_batches,
            (part.received_bytes + part.sent_bytes) * micro_batches
            + data_bytes(part, layout, reduction, num_microbatches),
        )
        for part in stages
    ]
    within, others = max(sent, key=sum)
    compute_s = micro_batches * max(of_one)
    # The first micro-batch passes all other stages before the last one, and goes back through them.
    bubble_s = sum(of_one) - max(of_one)
    # What a tensor-parallel group adds up, its ranks wait for.
    waited_s = within / bandwidth
    aside_s = others / bandwidth
    # fsdp's exact sums are made while backward waits; the others are sent while it continues.
    apart = layout.fsdp > 1 and reduction == "exact"
    step_s = waited_s + bubble_s + (compute_s + aside_s if apart else max(compute_s, aside_s))
    takes = {"compute": compute_s, "bubble": bubble_s, "communication": waited_s + aside_s}
    return Timing(
        sent_bytes=within + others,
        compute_s=compute_s,
        bubble_s=bubble_s,
        communication_s=takes["communication"],
        step_s=step_s,
        limited_by=max(takes, key=lambda what: takes[what]),
    )
