"""The summation order: one expression for every number of ranks, in bounded memory and messages."""

from __future__ import annotations

from collections.abc import Set

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.parallel.reduction_tree import ReductionPlan, whole_subtrees

LARGEST = 64


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, int, frozenset[int]]:
    """Micro-batches, ranks, and the micro-batches that a step has."""
    num_microbatches = draw(st.integers(1, LARGEST))
    world_size = draw(st.integers(1, num_microbatches))
    present = draw(st.sets(st.integers(0, num_microbatches - 1), min_size=1))
    return num_microbatches, world_size, frozenset(present)


def reference(start: int, size: int, present: Set[int]) -> str | None:
    """The tree over ``size`` micro-batches from ``start``, as its definition says: absent leaves drop out."""
    if size == 1:
        return str(start) if start in present else None
    left = reference(start, size // 2, present)
    right = reference(start + size // 2, size // 2, present)
    return f"({left}+{right})" if left and right else left or right


@st.composite
def shared_worlds(draw: st.DrawFn) -> tuple[tuple[int, ...], frozenset[int]]:
    """Any shares, some of them 0, and the micro-batches that a step has."""
    shares = draw(st.lists(st.integers(0, 13), min_size=1, max_size=9).filter(lambda s: 0 < sum(s) <= LARGEST))
    present = draw(st.sets(st.integers(0, sum(shares) - 1), min_size=1))
    return tuple(shares), frozenset(present)


def execute(plan: ReductionPlan, present: Set[int]) -> str:
    """Run a plan on expressions instead of gradients; a buffer that was not filled reads as garbage."""
    values, held = [], []
    for rank in range(plan.world_size):
        microbatches = [microbatch for microbatch in plan.microbatches_of(rank) if microbatch in present]
        buffers = ["garbage"] * plan.num_grad_buffers[rank]
        steps = plan.accumulation(rank, microbatches)
        assert len(steps) == len(microbatches)
        for microbatch, step in zip(microbatches, steps, strict=True):
            buffers[step.buffer] = str(microbatch) if step.fresh else f"({buffers[step.buffer]}+{microbatch})"
            for into, other in step.merges:
                buffers[into] = f"({buffers[into]}+{buffers[other]})"
                buffers[other] = "garbage"
        for position, node in enumerate(plan.subtrees[rank]):
            values.append(buffers[position])
            held.append(any(node.start <= microbatch < node.stop for microbatch in microbatches))
    combine = plan.combination(tuple(held))
    for into, other in combine.additions:
        values[into] = f"({values[into]}+{values[other]})"
        values[other] = "garbage"
    return values[combine.root]


@given(worlds())
@example((LARGEST, 1, frozenset(range(LARGEST))))
@example((LARGEST, LARGEST, frozenset(range(LARGEST))))
@example((11, 3, frozenset({10})))
@example((12, 2, frozenset({0, 11})))
def test_exact_adds_along_one_tree_whatever_the_ranks(world: tuple[int, int, frozenset[int]]) -> None:
    num_microbatches, world_size, present = world
    assert execute(ReductionPlan(num_microbatches, world_size), present) == reference(0, LARGEST, present)


@given(shared_worlds())
@example(((0, 3, 0, 8, 0), frozenset(range(11))))
@example(((1, 10, 1), frozenset({0, 11})))
def test_exact_adds_along_one_tree_whatever_the_shares(world: tuple[tuple[int, ...], frozenset[int]]) -> None:
    shares, present = world
    plan = ReductionPlan(sum(shares), len(shares), "exact", shares)
    assert execute(plan, present) == reference(0, LARGEST, present)
    assert [len(plan.microbatches_of(rank)) for rank in range(len(shares))] == list(shares)
    assert [microbatch for rank in range(len(shares)) for microbatch in plan.microbatches_of(rank)] == [
        *range(sum(shares))
    ]
    assert plan.active == tuple(rank for rank, nodes in enumerate(plan.subtrees) if nodes)
    assert all(buffers >= 1 for buffers in plan.num_grad_buffers)


@given(shared_worlds())
def test_fast_needs_one_buffer_whatever_the_shares(world: tuple[tuple[int, ...], frozenset[int]]) -> None:
    shares, present = world
    plan = ReductionPlan(sum(shares), len(shares), "allreduce", shares)
    assert sorted(map(int, execute(plan, present).strip("()").replace("(", "").replace(")", "").split("+"))) == (
        sorted(present)
    )
    assert plan.num_grad_buffers == (1,) * len(shares)


def test_exact_adds_along_one_tree_for_every_short_batch_up_to_24_microbatches() -> None:
    for num_microbatches in range(1, 25):
        for count in range(1, num_microbatches + 1):
            expected = reference(0, 32, frozenset(range(count)))
            for world_size in range(1, num_microbatches + 1):
                assert execute(ReductionPlan(num_microbatches, world_size), frozenset(range(count))) == expected


@given(worlds())
def test_fast_adds_microbatches_from_left_to_right_then_ranks(world: tuple[int, int, frozenset[int]]) -> None:
    num_microbatches, world_size, present = world
    plan = ReductionPlan(num_microbatches, world_size, "allreduce")

    def left_to_right(terms: list[str]) -> str:
        total = terms[0]
        for term in terms[1:]:
            total = f"({total}+{term})"
        return total

    of_ranks = [
        [str(microbatch) for microbatch in plan.microbatches_of(rank) if microbatch in present]
        for rank in range(world_size)
    ]
    expected = left_to_right([left_to_right(microbatches) for microbatches in of_ranks if microbatches])
    assert execute(plan, present) == expected
    assert plan.num_grad_buffers == (1,) * world_size


@given(st.integers(1, LARGEST), st.data())
def test_ranks_share_the_microbatches_and_cut_them_into_the_fewest_aligned_nodes(
    num_microbatches: int, data: st.DataObject
) -> None:
    world_size = data.draw(st.integers(1, num_microbatches))
    plan = ReductionPlan(num_microbatches, world_size)
    shared = [microbatch for rank in range(world_size) for microbatch in plan.microbatches_of(rank)]
    assert shared == list(range(num_microbatches))
    for rank in range(world_size):
        microbatches = plan.microbatches_of(rank)
        assert num_microbatches // world_size <= len(microbatches) <= -(-num_microbatches // world_size)
        covered = [microbatch for node in plan.subtrees[rank] for microbatch in range(node.start, node.stop)]
        assert covered == list(microbatches)
        for node in plan.subtrees[rank]:
            assert node.size & (node.size - 1) == 0
            assert node.start % node.size == 0
            # Its parent is not whole here, else one larger node would do.
            parent = node.start - node.start % (2 * node.size)
            assert not (microbatches.start <= parent and parent + 2 * node.size <= microbatches.stop)


@given(worlds())
def test_the_buffers_of_a_rank_are_as_many_as_documented(world: tuple[int, int, frozenset[int]]) -> None:
    """The formula of the documentation: the largest i + max(1, k) over nodes i of 2^k micro-batches."""
    num_microbatches, world_size, present = world
    plan = ReductionPlan(num_microbatches, world_size)
    for rank, nodes in enumerate(plan.subtrees):
        allowed = max(i + max(1, node.size.bit_length() - 1) for i, node in enumerate(nodes))
        assert plan.num_grad_buffers[rank] == allowed
        used = {step.buffer for step in plan.accumulation(rank, sorted(present & set(plan.microbatches_of(rank))))}
        assert used <= set(range(allowed))


def test_every_buffer_is_needed_when_all_microbatches_are_there() -> None:
    for num_microbatches in range(1, LARGEST + 1):
        plan = ReductionPlan(num_microbatches, 1)
        used = {step.buffer for step in plan.accumulation(0, range(num_microbatches))}
        assert used == set(range(plan.num_grad_buffers[0]))


@pytest.mark.parametrize(
    ("num_microbatches", "most"),
    [(num_microbatches, 2 if num_microbatches in (12, 24) else 4) for num_microbatches in range(2, 25)],
)
def test_equal_ranges_send_few_nodes(num_microbatches: int, most: int) -> None:
    sizes = [size for size in range(2, num_microbatches + 1) if num_microbatches % size == 0]
    assert all(len(nodes) <= most for size in sizes for nodes in ReductionPlan(num_microbatches, size).subtrees)


@pytest.mark.parametrize(
    ("num_microbatches", "by_world_size"),
    [(2, (1, 1)), (4, (2, 1, 1, 1)), (12, (3, 3, 2, 2)), (24, (4, 4, 3, 3))],
)
def test_the_documented_table_of_buffers(num_microbatches: int, by_world_size: tuple[int, ...]) -> None:
    for world_size, most in enumerate(by_world_size, start=1):
        assert max(ReductionPlan(num_microbatches, world_size).num_grad_buffers) == most


def test_any_ranges_send_at_most_five_nodes_of_12_microbatches_and_seven_of_24() -> None:
    for num_microbatches, most in ((12, 5), (24, 7)):
        counts = [
            len(whole_subtrees(range(start, stop)))
            for start in range(num_microbatches)
            for stop in range(start + 1, num_microbatches + 1)
        ]
        assert max(counts) == most
