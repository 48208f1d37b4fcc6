"""Memory, communication and time against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline_planning.measurement import Measurement
from paceline_planning.model_partition import (
    Activations,
    MemoryTrace,
    ModelPart,
    ModelPartition,
    Recompute,
    Segment,
    Variant,
    activations,
)
from paceline_planning.predict import (
    Memory,
    RankLayout,
    in_flight,
    layouts,
    predict_memory,
    predict_timing,
)
from paceline_planning.recommend import ClusterSpec

PIECES = tuple(
    Segment(
        name=name,
        parameter_bytes=nbytes,
        gradient_bytes=nbytes,
        buffer_bytes=0,
        shares=None,
    )
    for name, nbytes in (("a", 1600), ("b", 1200), ("c", 1200))
)
# Each piece saves 200, 200 and 100, hands on 50, and makes its gradient in backward.
EVENTS = (
    *((0, 200), (1, 200), (2, 100)),
    *((2, 1200), (2, -1200), (2, -100)),
    *((1, 1200), (1, -1200), (1, -200)),
    *((0, 1000), (0, -1000), (0, -200)),
)
TRACE = MemoryTrace(
    events=EVENTS,
    forward_events=3,
    flops=(400_000, 300_000, 300_000),
    output_bytes=(50, 50, 4),
    gradient_events=frozenset({3, 4, 6, 7, 9, 10}),
)
# Backward computes a third of all once more.
TRACES: dict[Variant, MemoryTrace] = {
    ("fp32", "none"): TRACE,
    ("fp32", "selective"): TRACE,
    ("fp32", "block"): dataclasses.replace(TRACE, flops=(600_000, 400_000, 1_000_000 // 3)),
}
WHOLE = ModelPart(
    parameter_bytes=4000,
    gradient_bytes=4000,
    buffer_bytes=0,
    optimizer_bytes=8000,
    optimizer_temporary=0,
    flops=1_000_000,
    root_bytes=1000,
    block_bytes=(1000, 1200, 800),
    block_pieces=(0, 1, 2),
    lowered_root_bytes=900,
    lowered_block_bytes=(500, 600, 400),
    activations={
        ("fp32", "none"): Activations(saved=500, peak=1700, forward_peak=500, backward_peaks=(500,) * 3),
        ("fp32", "selective"): Activations(saved=200, peak=1450, forward_peak=250, backward_peaks=(250,) * 3),
        ("fp32", "block"): Activations(saved=104, peak=1350, forward_peak=150, backward_peaks=(150,) * 3),
        ("bf16 gathers", "none"): Activations(saved=250, peak=1500, forward_peak=300, backward_peaks=(300,) * 3),
    },
)
# Three quarters of all that is there are split; what is added up is 600 bytes of a micro-batch.
HALF = dataclasses.replace(
    WHOLE,
    parameter_bytes=2500,
    gradient_bytes=2500,
    optimizer_bytes=5000,
    flops=625_000,
    reduced_bytes=600,
    root_bytes=625,
    block_bytes=(625, 750, 500),
    block_pieces=(0, 1, 2),
    lowered_root_bytes=550,
    lowered_block_bytes=(312, 375, 250),
    activations={
        variant: Activations(saved=400, peak=1100, forward_peak=400, backward_peaks=(400,) * 3)
        for variant in WHOLE.activations
    },
)
M = Measurement(
    microbatch=1,
    parameters=1000,
    batch_bytes=100,
    modules={"a": 4000},
    frozen=False,
    anatomy=ModelPartition(whole=WHOLE, pieces=PIECES, traces=TRACES),
    halved=ModelPartition(whole=HALF, pieces=PIECES, traces=TRACES),
)


@pytest.mark.parametrize(
    ("layout", "reduction", "microbatches", "shared", "expected"),
    [
        # Two slots for a tree of four micro-batches, one for a sum from left to right.
        (RankLayout(), "exact", 4, False, (4000, 8000, 8000, 1800, 0)),
        (RankLayout(), "allreduce", 4, False, (4000, 4000, 8000, 1800, 0)),
        (RankLayout(dp=4), "exact", 4, True, (4000, 4000, 8000, 1800, 0)),
        # A quarter of the gradients of each of the three others.
        (RankLayout(dp=4), "exact", 4, False, (4000, 4000, 8000, 1800, 3000)),
        (RankLayout(dp=4), "allreduce", 4, False, (4000, 4000, 8000, 1800, 0)),
        (RankLayout(dp=4, zero1=True), "allreduce", 4, False, (4000, 4000, 2000, 1800, 0)),
        # A quarter to step beside the parameters, and all gradients once more in a bucket; from stage 2 on a
        # quarter of the gradients, in stage 3 of the parameters, and two blocks with the root.
        (RankLayout(dp=4, zero_stage=1), "allreduce", 4, False, (5000, 4000, 2000, 1800, 4000)),
        (RankLayout(dp=4, zero_stage=2), "allreduce", 4, False, (5000, 1000, 2000, 1800, 4000)),
        (RankLayout(dp=4, zero_stage=3), "allreduce", 4, False, (2000, 1000, 2000, 1800, 4000 + 1000 + 2 * 1200)),
        # Root twice (2000); around the largest block: 1000 + 2 * 1200 + 800. Gradients come as the 500
        # of activations go, and no more are counted; one round of the tree keeps nothing.
        (RankLayout(fsdp=4), "exact", 4, False, (1000, 1000, 2000, 100, 6200)),
        # Three rounds: the sum of the first four micro-batches waits, and then that of eight.
        (RankLayout(fsdp=4), "exact", 12, False, (1000, 1000 + 1000, 2000, 600, 6200)),
        (RankLayout(fsdp=4), "allreduce", 8, False, (1000, 1000, 2000, 600, 6200)),
        # Two copies of four parts: each sums half of a part, and keeps that from the first round to the next.
        (RankLayout(dp=2, fsdp=4), "exact", 8, False, (1000, 1000, 2000, 100, 6200)),
        (RankLayout(dp=2, fsdp=4), "exact", 16, False, (1000, 1000 + 500, 2000, 600, 6200)),
        # Three quarters are split: 2500 and 1750 are left.
        (RankLayout(tp=2), "allreduce", 4, False, (2500, 2500, 5000, 1200, 0)),
        (RankLayout(tp=4), "allreduce", 4, False, (1750, 1750, 3500, 900, 0)),
        # The second of two stages: pieces b and c, what came in, and the batch.
        (RankLayout(pp=2), "allreduce", 4, False, (2400, 2400, 4800, 1500 + 50 + 100, 0)),
        (RankLayout(recompute="selective"), "allreduce", 4, False, (4000, 4000, 8000, 1550, 0)),
        (RankLayout(recompute="block"), "allreduce", 4, False, (4000, 4000, 8000, 1450, 0)),
        # Gathered and new gradients in half precision, sums in fp32: around the second block 500 + 2 * 600 + 800,
        # and twice the root.
        (RankLayout(fsdp=4, mixed_precision=True), "exact", 4, False, (1000, 1000, 2000, 100, 1800 + 2500)),
    ],
)
def test_memory(layout: RankLayout, reduction: Any, microbatches: int, shared: bool, expected: tuple[int, ...]) -> None:
    memory = predict_memory(M, layout, reduction, "fp32", num_microbatches=microbatches, shared_memory=shared)
    assert dataclasses.astuple(memory) == expected
    assert memory.total == sum(expected)


def with_whole(**changes: int) -> Measurement:
    whole = dataclasses.replace(WHOLE, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(M, anatomy=dataclasses.replace(M.anatomy, whole=whole))


def test_what_an_optimizer_needs_while_it_steps_comes_after_the_activations() -> None:
    memory: list[Memory] = [
        predict_memory(
            with_whole(optimizer_temporary=temporary),
            RankLayout(),
            "allreduce",
            "fp32",
            num_microbatches=1,
            shared_memory=False,
        )
        for temporary in (1000, 4000)
    ]
    assert [m.temporary for m in memory] == [0, 4000 - 1700]


@pytest.mark.parametrize(
    ("layout", "reduction", "microbatches", "expected"),
    [
        (RankLayout(), "exact", 4, 0),
        (RankLayout(dp=4), "allreduce", 4, 2 * 4000 * 3 // 4),
        (RankLayout(dp=4), "exact", 4, 2 * 4000 * 3 // 4),
        # Micro-batches 1 and 2 are rank 1's, and no subtree: it sends both.
        (RankLayout(dp=2), "exact", 3, 3 * 4000 // 2),
        # Two rounds: 3000 of blocks twice, 1000 of the root once, the gradients each time or once.
        (RankLayout(fsdp=4), "exact", 8, (2 * 7000 + 2 * 4000) * 3 // 4),
        (RankLayout(fsdp=4), "allreduce", 8, (2 * 7000 + 4000) * 3 // 4),
        (RankLayout(fsdp=4, mixed_precision=True), "allreduce", 8, (2 * (2 * 1500 + 900) + 4000) * 3 // 4),
        # One round of each group of two, and both copies' halves.
        (RankLayout(dp=2, fsdp=2), "allreduce", 4, (7000 + 4000) // 2 + 2 * 2000 // 2),
        # Two rounds, in which all four ranks get a fourth of the gradients each, and its sum from the copy.
        (RankLayout(dp=2, fsdp=2), "exact", 8, 2 * 7000 // 2 + 2 * 4000 * 3 // 4 + 2000 // 2),
        # What a layer computes, of each micro-batch: in a ring of two, all of it once.
        (RankLayout(tp=2), "exact", 4, 4 * 600),
        # 50 bytes over the border, and as many back.
        (RankLayout(pp=2), "exact", 4, 4 * 50),
        (RankLayout(dp=2, pp=2), "allreduce", 4, 2 * 50 + 2400),
    ],
)
def test_communication(layout: RankLayout, reduction: Any, microbatches: int, expected: int) -> None:
    timing = predict_timing(M, layout, reduction, num_microbatches=microbatches, flops_per_s=1e9, bandwidth=1e9)
    assert timing.sent_bytes == expected


@pytest.mark.parametrize(
    ("reduction", "bandwidth", "step_s", "limited_by"),
    [
        ("exact", 16500.0, 3.0, "compute"),  # one after the other
        ("allreduce", 16500.0, 2.0, "compute"),  # the longer one
        ("allreduce", 1350.0, 10.0, "communication"),
    ],
)
def test_time(reduction: Any, bandwidth: float, step_s: float, limited_by: str) -> None:
    timing = predict_timing(
        M,
        RankLayout(fsdp=4),
        reduction,
        num_microbatches=8,
        flops_per_s=1e6,
        bandwidth=bandwidth,
    )
    assert timing.compute_s == 2.0
    assert timing.step_s == pytest.approx(step_s)
    assert timing.limited_by == limited_by


def test_nodes_must_divide_the_gpus() -> None:
    with pytest.raises(ConfigError, match=r"--nodes 3 does not divide it\. The nearest that does: --gpus 9"):
        ClusterSpec(gpus=8, nodes=3, memory=1, bandwidth=1.0, flops_per_s=1.0)


def test_the_pipeline_waits_for_its_first_and_last_micro_batch() -> None:
    # Cut after the first piece: 0.4 and 0.6 seconds a micro-batch, and four of them.
    timing = predict_timing(M, RankLayout(pp=2), "exact", num_microbatches=4, flops_per_s=1e6, bandwidth=1e9)
    assert (timing.compute_s, timing.bubble_s) == pytest.approx((2.4, 0.4))
    assert timing.step_s == pytest.approx(2.8)


RECOMPUTE: tuple[Recompute, ...] = ("none", "block")


def test_a_third_more_is_computed_where_forward_is_made_twice() -> None:
    one, again = (
        predict_timing(M, RankLayout(recompute=r), "exact", num_microbatches=3, flops_per_s=1e6, bandwidth=1.0)
        for r in RECOMPUTE
    )
    assert (one.compute_s, again.compute_s) == pytest.approx((3.0, 4.0))


def test_micro_batches_that_stages_hold() -> None:
    layout = RankLayout(pp=4, dp=2)
    assert [in_flight(layout, stage, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(RankLayout(dp=2), 0, 16) == 1
    assert in_flight(layout, 0, 4) == 2


def test_pieces_own_what_they_make() -> None:
    assert activations(TRACE, 0, 3) == Activations(
        saved=500, peak=1700, forward_peak=500, backward_peaks=(200, 400, 500)
    )
    assert activations(TRACE, 0, 1) == Activations(saved=200, peak=1200, forward_peak=200, backward_peaks=(200,))
    assert activations(TRACE, 1, 3).peak == 200 + 100 + 1200


def test_every_grid_has_all_ranks() -> None:
    grids = list(layouts(8, most_stages=4, splits=(2, 4, 8)))
    assert all(layout.world_size == 8 for layout in grids)
    assert len(set(grids)) == len(grids)
    assert {layout.family for layout in grids} == {
        *("ddp", "zero1", "deepspeed", "fsdp", "tp", "dp x fsdp", "dp x tp", "pp x dp", "pp x tp"),
        *("fsdp x tp", "pp x dp x tp"),
    }
    assert {layout.name for layout in layouts(2, most_stages=1, splits=())} == {
        *("ddp", "zero1", "deepspeed 1", "deepspeed 2", "deepspeed 3", "fsdp")
    }
