"""A validation split is disjoint from the training split, spread evenly, and always the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError, DataError
from paceline.data.train_val_split import split_train_val

KEYS = st.integers(0, 2**64 - 1)


@given(num_samples=st.integers(2, 800), fraction=st.floats(0.001, 0.999), seed=KEYS)
def test_the_splits_are_disjoint_exhaustive_and_in_order(num_samples: int, fraction: float, seed: int) -> None:
    train, val = split_train_val(num_samples, fraction, seed)
    train_numbers, val_numbers = train(np.arange(len(train))), val(np.arange(len(val)))
    assert np.array_equal(np.sort(np.concatenate([train_numbers, val_numbers])), np.arange(num_samples))
    assert np.all(np.diff(train_numbers) > 0)
    assert np.all(np.diff(val_numbers) > 0)
    assert abs(len(val) - num_samples * fraction) <= 1


@given(num_samples=st.integers(10**9, 2**52), fraction=st.floats(0.001, 0.9), data=st.data())
def test_splitting_is_exact_where_products_exceed_64_bits(
    num_samples: int, fraction: float, data: st.DataObject
) -> None:
    train, val = split_train_val(num_samples, fraction, seed=3)
    j = data.draw(st.integers(0, len(val) - 1))
    chosen = int(val(np.array([j]))[0])
    # The interval it was taken from, in exact integers.
    assert -(-j * num_samples // len(val)) <= chosen < -(-(j + 1) * num_samples // len(val))
    # j samples before it went to validation, so this many before it are for training.
    before = chosen - j
    around = [i for i in (before - 1, before) if 0 <= i < len(train)]
    below, above = (train(np.array(around)) < chosen).tolist() if len(around) == 2 else (True, False)
    assert below
    assert not above


def test_a_validation_split_is_spread_evenly() -> None:
    _, val = split_train_val(60_000, 0.1, seed=7)
    assert np.bincount(val(np.arange(len(val))) // 6000, minlength=10).tolist() == [600] * 10


def test_the_chosen_samples_never_change_and_depend_on_the_seed() -> None:
    assert split_train_val(100, 0.1, 7).val(np.arange(10)).tolist() == [9, 19, 23, 36, 48, 54, 68, 76, 88, 92]
    assert split_train_val(100, 0.1, 8).val(np.arange(10)).tolist() != [9, 19, 23, 36, 48, 54, 68, 76, 88, 92]


def test_impossible_splits_are_refused() -> None:
    for fraction in (0.0, 1.0, -0.5, float("nan")):
        with pytest.raises(ConfigError, match="--val-fraction"):
            split_train_val(100, fraction, 0)
    with pytest.raises(DataError, match="1 samples"):
        split_train_val(1, 0.5, 0)
    for split in split_train_val(100, 0.1, 0):
        with pytest.raises(IndexError):
            split(np.array([len(split)]))
        with pytest.raises(IndexError):
            split(np.array([-1]))
