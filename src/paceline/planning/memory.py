"""Memory of a rank under each strategy: pure functions of sizes and degrees, in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from paceline.distributed.tree import ReductionPlan
from paceline.planning.anatomy import split_further
from paceline.planning.layout import Layout
from paceline.planning.measure import Measurement
from paceline.planning.parts import Part, Precision

Reduction = Literal["exact", "fast"]

DEEPSPEED_BUCKET_BYTES = 200 * 2**20
"""Of fp32 gradients that DeepSpeed sums at a time."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What the rank that needs most holds, in bytes.

    Attributes:
        parameters: and buffers.
        gradients: all buffers that gradients are summed in.
        optimizer: its state.
        activations: of the micro-batches on their way, at the fullest moment of forward and backward. Under
            fsdp, those that are left when as many have gone as gradients have come.
        temporary: what is there for a moment only: gathered blocks, messages, the optimizer's own.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int

    @property
    def total(self) -> int:
        """The peak."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporary


def classic_mixed_precision(parameters: int) -> int:
    """Bytes of a model's states under Adam in half precision, as the ZeRO paper counts them.

    Weights and gradients take 2 bytes each; fp32 weights, momentum and variance 4 each: 16 a parameter
    (Rajbhandari et al., 2020, section 3.1). Paceline's mixed precision is autocast: fp32 weights and
    gradients, and half-precision copies of the weights from forward to backward.
    """
    return parameters * (2 + 2 + 4 + 4 + 4)


def parts(m: Measurement, layout: Layout) -> tuple[Part, ...]:
    """What the ranks of one copy of the model hold of it: a part for each stage.

    The copy is still whole along ``fsdp``.
    """
    stages = m.anatomy.stages(layout.pp)
    if layout.tp == 1:
        return stages
    assert m.halved is not None, "nobody knows how to split it"
    halves = m.halved.stages(layout.pp)
    return tuple(split_further(one, half, layout.tp) for one, half in zip(stages, halves, strict=True))


def predict_memory(
    m: Measurement,
    layout: Layout,
    reduction: Reduction,
    precision: Precision,
    *,
    num_shards: int,
    shared_memory: bool,
) -> Memory:
    """The memory of the rank that needs most.

    Args:
        m: the task's.
        layout: of the ranks.
        reduction: how gradients are summed.
        precision: of the arithmetic.
        num_shards: S.
        shared_memory: the ranks are CPU processes of one host, and read each other's gradients.
    """
    of_stages = [
        _of_rank(
            m,
            part,
            layout,
            reduction,
            precision,
            num_shards=num_shards,
            in_flight=in_flight(layout, stage, num_shards),
            shared_memory=shared_memory,
        )
        for stage, part in enumerate(parts(m, layout))
    ]
    return max(of_stages, key=lambda memory: memory.total)


def in_flight(layout: Layout, stage: int, num_shards: int) -> int:
    """Micro-batches that a stage has forwarded and not yet gone back through, at most.

    GPipe forwards all of them first; under 1F1B, as many as there are stages from this one on (Narayanan et
    al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, section 2.2).
    """
    micro_batches = -(-num_shards // layout.data_ranks)
    return (
        min(micro_batches, layout.pp - stage if layout.schedule == "1f1b" else micro_batches)
        if layout.pp > 1
        else 1
    )


def _of_rank(
    m: Measurement,
    part: Part,
    layout: Layout,
    reduction: Reduction,
    precision: Precision,
    *,
    num_shards: int,
    in_flight: int,
    shared_memory: bool,
) -> Memory:
    measured = part.activations[precision]
    saved, peak = measured.saved, measured.peak
    if layout.checkpointing:
        saved, peak = measured.kept, measured.again_peak
    # What came in and what went out stay with each micro-batch until its backward.
    others = (in_flight - 1) * saved + in_flight * part.received_bytes
    if layout.fsdp > 1:
        return _fsdp(m, part, saved + others, peak + others, layout, reduction, num_shards)
    if layout.zero_stage:
        return _deepspeed(m, part, peak, layout)
    ranks = layout.data_ranks
    plan = ReductionPlan(num_shards, ranks, kind=reduction)
    # The others' parts of the chunk that this rank sums, a part for each subtree of theirs.
    subtrees = sum(map(len, plan.nodes)) - min(map(len, plan.nodes)) if reduction == "exact" else 0
    # Parts of tensors live in a group of their own, whose ranks send each other messages.
    flat = layout.pp == layout.tp == 1
    received = 0 if shared_memory and flat else subtrees * part.gradient_bytes // ranks
    slot = part.gradient_bytes + part.buffer_bytes
    optimizer = part.optimizer_bytes if not layout.zero1 else -(-part.optimizer_bytes // ranks)
    # The optimizer steps when the activations are gone.
    return Memory(
        parameters=part.parameter_bytes + part.buffer_bytes,
        gradients=max(plan.slots) * slot,
        optimizer=optimizer,
        activations=peak + others + m.batch_bytes,
        temporary=part.buffer_bytes + max(received, part.optimizer_temporary - peak - others),
    )


def _fsdp(
    m: Measurement,
    part: Part,
    saved: int,
    peak: int,
    layout: Layout,
    reduction: Reduction,
    num_shards: int,
) -> Memory:
    """Everything is cut into parts; what is gathered comes on top.

    While a block's backward runs, there are: its gathered parameters and new gradients, the gathered
    parameters of the block before it, which are fetched in advance, and the gradients of the block after it,
    which are on their way. The root's parameters and gradients are there all the time.
    """
    ranks = layout.fsdp
    piece = -(-part.parameter_bytes // ranks)
    plan = ReductionPlan(num_shards, 1)
    # Each of several copies sums a part of its chunk.
    kept = plan.kept_between_rounds(layout.data_ranks) if reduction == "exact" else 0
    open_sums = kept * -(-piece // layout.dp)
    around = (0, *part.block_bytes, 0)
    blocks = max((before + 2 * own + after for before, own, after in _triples(around)), default=0)
    # New gradients are among what was measured; here they are counted with their blocks.
    without_gradients = max(saved, peak - part.largest_gradient)
    # In a step's first backward, gradients come as activations go; before any later one they are all there.
    overlap = piece if num_shards <= layout.data_ranks else 0
    activations = max(0, without_gradients - overlap)
    optimizer_temporary = -(-part.optimizer_temporary // ranks)
    gathered = 2 * part.root_bytes + blocks
    return Memory(
        parameters=piece + part.buffer_bytes,
        gradients=piece + open_sums + part.buffer_bytes,
        optimizer=-(-part.optimizer_bytes // ranks),
        activations=activations + m.batch_bytes,
        temporary=part.buffer_bytes + max(gathered, optimizer_temporary - activations),
    )


def _deepspeed(m: Measurement, part: Part, peak: int, layout: Layout) -> Memory:
    """What DeepSpeed 0.19 keeps: beside the parameters, this rank's part of them to be stepped, flat.

    Gradients pass through a bucket, in which they are added up over the ranks. From stage 2 on only this
    rank's part of them is kept; in stage 3 so it is with the parameters, and whole ones are gathered for
    the modules at work.
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


def _triples(sizes: tuple[int, ...]) -> list[tuple[int, int, int]]:
    return [(a, b, c) for (a, b), (_, c) in pairwise(pairwise(sizes))]
