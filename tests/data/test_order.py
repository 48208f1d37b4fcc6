from __future__ import annotations

import math
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError, DataError
from paceline.core.options import Shuffle
from paceline.data.order import (
    MAX_SIZE,
    DeterministicSampler,
    Permutation,
    derive_key,
    splitmix64,
)

KEYS = st.integers(0, 2**64 - 1)


def reference_permutation(n: int, key: int, position: int) -> int:
    """The permutation's definition, one number at a time with Python's integers."""
    root = math.isqrt(n - 1) + 1
    rows = root + root % 2
    cols = -(-n // rows)
    rounds = 24 if n < 32 else 12 if n < 256 else 8 if n < 4096 else 6
    x = position
    while True:
        left, right = divmod(x, cols)
        for i in range(rounds):
            round_key = splitmix64(key + i * 0x9E3779B97F4A7C15 & 2**64 - 1)
            source = left if i % 2 else right
            h = (source + round_key) * 0xBF58476D1CE4E5B9 % 2**64
            h = ((h ^ h >> 32) * 0x94D049BB133111EB % 2**64) >> 32
            if i % 2:
                right = (right + (h * cols >> 32)) % cols
            else:
                left = (left + (h * rows >> 32)) % rows
        x = left * cols + right
        if x < n:
            return x


@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_it_is_a_permutation_for_every_small_n(key: int) -> None:
    for n in range(1, 601):
        numbers = Permutation(n, key)(np.arange(n))
        assert np.array_equal(np.sort(numbers), np.arange(n)), f"n = {n}"


@given(n=st.integers(601, 5000), key=KEYS)
def test_it_is_a_permutation_for_larger_n(n: int, key: int) -> None:
    assert np.array_equal(np.sort(Permutation(n, key)(np.arange(n))), np.arange(n))


@given(n=st.integers(10_000, 10**12), key=KEYS, data=st.data())
def test_windows_of_huge_permutations_repeat_nothing(n: int, key: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, n - 2000))
    second = data.draw(st.integers(0, n - 2000))
    positions = np.union1d(np.arange(first, first + 2000), np.arange(second, second + 2000))
    numbers = Permutation(n, key)(positions)
    assert np.unique(numbers).size == positions.size
    assert numbers.min() >= 0
    assert numbers.max() < n


@given(n=st.one_of(st.integers(1, 40), st.integers(1, MAX_SIZE)), key=KEYS, data=st.data())
def test_it_equals_its_definition_in_plain_integers(n: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    expected = [reference_permutation(n, key, position) for position in positions]
    assert Permutation(n, key)(np.array(positions)).tolist() == expected


@pytest.mark.parametrize(
    ("n", "key", "expected"),
    [
        (2, 1, [0, 1]),
        (10, 0, [7, 2, 6, 8, 9, 0]),
        (10, 7, [6, 4, 7, 2, 9, 1]),
        (31, 5, [0, 22, 16, 1, 17, 12]),
        (60_000, 0, [25576, 49599, 55142, 48178, 26505, 32860]),
        (10**6, 2**64 - 1, [307428, 69841, 944947, 752290, 115036, 928707]),
        (10**12, 42, [420643456077, 334535016799, 6937378346, 437861858821, 949312716574, 577339016596]),
        (2**62, 1, [1468653743942737028, 824786135481874790, 3344932753880243683, 4450058426432667499]),
    ],
)
def test_the_values_never_change(n: int, key: int, expected: list[int]) -> None:
    assert Permutation(n, key)(np.arange(len(expected))).tolist() == expected


def test_the_keys_never_change() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the published first output of seed 0
    assert derive_key(1, 2, 3) == 15020427595393229491
    assert len({derive_key(1, 2), derive_key(2, 1), derive_key(1), derive_key(2)}) == 4


def test_a_long_call_equals_short_ones() -> None:
    permutation = Permutation(100_000, 3)
    whole = permutation(np.arange(100_000))
    pieces = [permutation(np.arange(a, min(a + 777, 100_000))) for a in range(0, 100_000, 777)]
    assert np.array_equal(whole, np.concatenate(pieces))


def test_the_argument_is_left_alone() -> None:
    positions = np.arange(50)
    Permutation(50, 1)(positions)
    assert np.array_equal(positions, np.arange(50))


@pytest.mark.parametrize("position", [-1, 10])
def test_positions_outside_are_refused(position: int) -> None:
    with pytest.raises(IndexError, match=r"\[0, 10\)"):
        Permutation(10, 0)(np.array([0, position]))


@pytest.mark.parametrize("n", [0, -3, MAX_SIZE + 1])
def test_sizes_outside_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match="between 1 and"):
        Permutation(n, 0)


def chi_square_sigmas(counts: np.ndarray) -> float:
    """How many standard deviations the chi-square statistic of equally likely cells is off."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2).sum() / expected - freedom) / math.sqrt(2 * freedom))


def test_each_number_comes_first_equally_often() -> None:
    firsts = [int(Permutation(10, derive_key(key))(np.array([0]))[0]) for key in range(3000)]
    assert abs(chi_square_sigmas(np.bincount(firsts, minlength=10))) < 4


@pytest.mark.integration
@pytest.mark.parametrize("n", [3, 4, 5])
def test_every_arrangement_of_a_few_comes_equally_often(n: int) -> None:
    codes = [int(Permutation(n, derive_key(99, key))(np.arange(n)) @ n ** np.arange(n)) for key in range(3000)]
    _, counts = np.unique(codes, return_counts=True)
    assert counts.size == math.factorial(n)
    assert abs(chi_square_sigmas(counts)) < 4


@st.composite
def orders(draw: st.DrawFn) -> DeterministicSampler:
    min_microbatch_size = draw(st.integers(1, 4))
    num_microbatches = draw(st.integers(1, 12))
    batch = draw(st.integers(num_microbatches * min_microbatch_size, num_microbatches * min_microbatch_size + 40))
    block = draw(st.sampled_from([0, 1, 2, 7, 64, 10_000]))
    samples = draw(st.integers(min_microbatch_size, 700))
    return DeterministicSampler(samples, batch, num_microbatches, draw(KEYS), min_microbatch_size, Shuffle(block))


@given(order=orders(), epoch=st.integers(0, 1000))
def test_an_epoch_is_partitioned_into_steps_and_steps_into_microbatches(
    order: DeterministicSampler, epoch: int
) -> None:
    position = 0
    numbers = []
    for step in range(order.steps_per_epoch):
        start, stop = order.batch_range(step)
        bounds = order.microbatch_bounds(step)
        assert start == position
        assert [a for a, _ in bounds] == [start, *(b for _, b in bounds[:-1])]
        assert bounds[-1][1] == stop
        sizes = [b - a for a, b in bounds]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
        assert sizes[-1] >= order.min_microbatch_size
        assert len(sizes) <= order.num_microbatches
        numbers += [order.microbatch_indices(epoch, step, microbatch) for microbatch in range(len(bounds))]
        position = stop
    assert position == order.num_samples
    assert np.array_equal(np.sort(np.concatenate(numbers)), np.arange(order.num_samples))


@given(order=orders(), data=st.data())
def test_any_number_of_ranks_sees_the_same_batch(order: DeterministicSampler, data: st.DataObject) -> None:
    epoch = data.draw(st.integers(0, 5))
    step = data.draw(st.integers(0, order.steps_per_epoch - 1))
    world_size = data.draw(st.integers(1, order.num_microbatches))
    bounds = order.microbatch_bounds(step)
    fetched = [
        order.indices(epoch, bounds[first][0], bounds[min(last, len(bounds)) - 1][1])
        for rank in range(world_size)
        for first, last in [
            (rank * order.num_microbatches // world_size, (rank + 1) * order.num_microbatches // world_size)
        ]
        if first < len(bounds)
    ]
    assert np.array_equal(np.concatenate(fetched), order.indices(epoch, *order.batch_range(step)))


def test_a_full_batch_uses_every_microbatch() -> None:
    order = DeterministicSampler(60_000, 128, 12, seed=0)
    assert [b - a for a, b in order.microbatch_bounds(3)] == [11] * 8 + [10] * 4


def test_a_short_last_batch_uses_fewer_microbatches() -> None:
    order = DeterministicSampler(96 * 3 + 7, 96, 12, seed=0)
    assert order.steps_per_epoch == 4
    assert order.microbatch_bounds(3) == ((288, 291), (291, 293), (293, 295))


def test_a_rest_too_small_for_a_microbatch_joins_the_batch_before() -> None:
    order = DeterministicSampler(96 * 3 + 1, 96, 12, seed=0)
    assert order.steps_per_epoch == 3
    assert order.batch_range(2) == (192, 289)
    assert [b - a for a, b in order.microbatch_bounds(2)] == [9] + [8] * 11


def test_an_epoch_smaller_than_a_batch_is_one_step() -> None:
    order = DeterministicSampler(5, 96, 12, seed=0)
    assert order.steps_per_epoch == 1
    assert order.microbatch_bounds(0) == ((0, 3), (3, 5))


@pytest.mark.parametrize("block", [1, 16])
def test_the_order_depends_on_seed_and_epoch_and_repeats_for_the_same(block: int) -> None:
    def numbers(seed: int, epoch: int) -> tuple[int, ...]:
        order = DeterministicSampler(1000, 96, 12, seed, shuffle=Shuffle(block))
        return tuple(order.indices(epoch, 0, 1000).tolist())

    assert numbers(7, 3) == numbers(7, 3)
    assert len({numbers(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16


def test_the_orders_values_never_change() -> None:
    by_sample = DeterministicSampler(1000, 96, 12, 7)
    by_block = DeterministicSampler(1000, 96, 12, 7, shuffle=Shuffle(16))
    assert by_sample.microbatch_indices(2, 3, 4).tolist() == [994, 9, 103, 21, 311, 120, 205, 384]
    assert by_block.indices(0, 12, 18).tolist() == [468, 465, 473, 476, 895, 890]
    assert by_block.indices(5, 990, 1000).tolist() == [28, 23, 25, 26, 16, 21, 17, 29, 24, 27]


def test_blocks_keep_neighbours_together_and_shuffle_within() -> None:
    order = DeterministicSampler(1003, 96, 12, 7, shuffle=Shuffle(10))
    numbers = order.indices(0, 0, 1003)
    blocks = numbers // 10
    assert np.count_nonzero(np.diff(blocks)) == 100  # 101 blocks, each in one piece
    assert not np.array_equal(blocks, np.sort(blocks))
    arrangements = {tuple((numbers[blocks == block] % 10).tolist()) for block in range(100)}
    assert len(arrangements) > 95  # blocks are not all shuffled alike


def test_the_short_block_moves_between_epochs() -> None:
    order = DeterministicSampler(103, 20, 2, 7, shuffle=Shuffle(10))
    places = {int(np.flatnonzero(order.indices(epoch, 0, 103) >= 100)[0]) for epoch in range(20)}
    assert len(places) > 5


@given(order=orders(), data=st.data())
def test_a_range_of_positions_is_a_part_of_the_epoch(order: DeterministicSampler, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, order.num_samples))
    stop = data.draw(st.integers(start, order.num_samples))
    whole = order.indices(2, 0, order.num_samples)
    assert np.array_equal(order.indices(2, start, stop), whole[start:stop])


@pytest.mark.parametrize("block", [20_000, 3])
def test_blocks_larger_and_smaller_than_a_chunk_are_permuted(block: int) -> None:
    order = DeterministicSampler(70_001, 96, 12, 7, shuffle=Shuffle(block))
    assert np.array_equal(np.sort(order.indices(0, 0, 70_001)), np.arange(70_001))


def test_no_shuffle_is_the_data_sets_order() -> None:
    order = DeterministicSampler(100, 10, 2, 7, shuffle=Shuffle(0))
    assert order.indices(4, 30, 40).tolist() == list(range(30, 40))


@pytest.mark.parametrize("block", [0, 1, 4096])
def test_the_first_batch_of_a_billion_takes_no_memory(block: int) -> None:
    tracemalloc.start()
    try:
        order = DeterministicSampler(10**9, 1024, 4, seed=11, shuffle=Shuffle(block))
        numbers = order.indices(0, *order.batch_range(0))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.unique(numbers).size == 1024
    assert peak < 2**20


def test_an_order_travels_to_worker_processes() -> None:
    order = DeterministicSampler(1000, 96, 12, 7)
    copy = pickle.loads(pickle.dumps(order))  # noqa: S301 (our own bytes)
    assert np.array_equal(copy.indices(1, 0, 96), order.indices(1, 0, 96))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (
            {"global_batch_size": 16, "num_microbatches": 12},
            ConfigError,
            "--global-batch-size 24 or more, or --microbatches 8",
        ),
        ({"global_batch_size": 1, "num_microbatches": 1}, ConfigError, "--global-batch-size 2 or more"),
        ({"num_microbatches": 0}, ConfigError, "--microbatches must be at least 1"),
        ({"min_microbatch_size": 0}, ConfigError, "min_microbatch_size must be at least 1"),
        ({"shuffle": Shuffle(-1)}, ConfigError, "--shuffle"),
        ({"num_samples": 1}, DataError, "has 1 samples"),
        ({"num_samples": 2**62 + 1}, DataError, "the maximum"),
    ],
)
def test_impossible_orders_are_refused(values: dict[str, object], error: type[Exception], message: str) -> None:
    good: dict[str, object] = {"num_samples": 1000, "global_batch_size": 96, "num_microbatches": 4, "seed": 0}
    with pytest.raises(error, match=message):
        DeterministicSampler(**{**good, **values})


def test_steps_microbatches_and_positions_outside_are_refused() -> None:
    order = DeterministicSampler(100, 32, 4, 0)
    for call in (
        lambda: order.batch_range(4),
        lambda: order.batch_range(-1),
        lambda: order.microbatch_indices(0, 3, 2),
        lambda: order.microbatch_indices(0, 0, -1),
        lambda: order.indices(0, 90, 101),
        lambda: order.indices(0, -1, 5),
    ):
        with pytest.raises(IndexError):
            call()
