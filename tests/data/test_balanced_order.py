"""Micro-batches of about equal sizes: the same samples a step, exactly once, and less difference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import DataError, RunDirectoryError
from paceline.core.options import Shuffle
from paceline.data.order import (
    DeterministicSampler,
    assign_by_length,
    check_lengths,
    require_same_order,
    restore_order,
    save_order,
)
from paceline.runs.directory import RunDirectory

SIZES = np.random.default_rng(3).lognormal(4, 1, 1003).astype(np.int64) + 1
PLAIN = DeterministicSampler(num_samples=1003, global_batch_size=50, num_microbatches=7, seed=4)


def spread(order: DeterministicSampler, step: int) -> int:
    """How many tokens the heaviest micro-batch has more than the lightest."""
    loads = [int(SIZES[order.microbatch_indices(2, step, microbatch)].sum()) for microbatch in range(7)]
    return max(loads) - min(loads)


@pytest.mark.parametrize("block", [0, 1, 32])
def test_a_step_has_the_same_samples_and_its_microbatches_as_many(block: int) -> None:
    plain = DeterministicSampler(1003, 50, 7, seed=4, shuffle=Shuffle(window=block))
    order = replace(plain, lengths=SIZES)
    for step in range(plain.steps_per_epoch):
        span = plain.batch_range(step)
        assert sorted(order.indices(2, *span)) == sorted(plain.indices(2, *span))
        assert order.microbatch_bounds(step) == plain.microbatch_bounds(step)
    assert sorted(order.indices(2, 0, 1003)) == list(range(1003))


def test_microbatches_differ_less() -> None:
    order = replace(PLAIN, lengths=SIZES)
    full = range(PLAIN.num_samples // PLAIN.global_batch_size)
    before, after = (sum(spread(which, step) for step in full) for which in (PLAIN, order))
    assert after < before / 3
    assert all(spread(order, step) <= spread(PLAIN, step) for step in full)


def test_any_part_of_an_epoch_is_that_of_the_whole() -> None:
    order = replace(PLAIN, lengths=SIZES)
    whole = order.indices(1, 0, 1003)
    for start, stop in ((0, 0), (3, 4), (40, 160), (49, 51), (950, 1003), (1003, 1003)):
        assert np.array_equal(order.indices(1, start, stop), whole[start:stop])
    with pytest.raises(IndexError, match="not within"):
        order.indices(1, 0, 1004)


def test_the_heaviest_go_first_and_the_order_within_a_microbatch_stays() -> None:
    assert assign_by_length(np.array([1, 9, 1, 8, 2, 7]), [3, 3]).tolist() == [0, 1, 4, 2, 3, 5]
    assert assign_by_length(np.array([5, 5, 5, 5]), [2, 2]).tolist() == [0, 2, 1, 3]
    assert assign_by_length(np.array([9, 1, 1, 1, 1]), [3, 2]).tolist() == [0, 3, 4, 1, 2]


@pytest.mark.parametrize(
    ("values", "message"),
    [([1, 2], "for each of the 3 samples, but returned int64 of shape"), ([1, 2, -1], "at least 0")],
)
def test_sizes_that_are_none_are_refused(values: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_lengths(values, 3, "Task")
    with pytest.raises(DataError, match=r"float64 of shape \(3,\)"):
        check_lengths([0.5, 1.0, 2.0], 3, "Task")


def test_sizes_are_kept_for_whoever_recomputes_the_order(tmp_path: Path) -> None:
    run, order = RunDirectory(tmp_path), replace(PLAIN, lengths=SIZES)
    path = run.sample_lengths
    save_order(run, PLAIN)
    assert not path.exists()
    assert restore_order(PLAIN, run) is PLAIN
    save_order(run, order)
    again = restore_order(PLAIN, run)
    assert again is not None
    assert np.array_equal(again.indices(0, 0, 1003), order.indices(0, 0, 1003))
    require_same_order(order, run)
    for other in (PLAIN, replace(PLAIN, lengths=SIZES + 1)):
        with pytest.raises(RunDirectoryError, match="sample_lengths differ from those in"):
            require_same_order(other, run)
    np.save(path, SIZES[:5])
    with pytest.raises(RunDirectoryError, match="must contain the lengths of 1003 samples"):
        restore_order(PLAIN, run)
    path.write_bytes(b"no array")
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        restore_order(PLAIN, run)
