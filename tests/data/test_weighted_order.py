"""Draws by weights: a function of (seed, epoch, position), in the shares of the weights, equal on every machine."""

from __future__ import annotations

import dataclasses
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, WeightedRandomSampler

from paceline.core.config import ResolvedConfig
from paceline.core.errors import ConfigError, DataError, RunDirectoryError
from paceline.core.options import Shuffle
from paceline.core.task import Task
from paceline.data import order as data_order
from paceline.data.loader import build_loader
from paceline.data.order import (
    DeterministicSampler,
    WeightedDraws,
    check_weights,
    require_same_order,
    restore_order,
    save_order,
)
from paceline.runs.directory import RunDirectory
from paceline.training.run_context import set_up_data

PLAIN = DeterministicSampler(num_samples=1000, global_batch_size=50, num_microbatches=6, seed=4)
WEIGHTS = np.array([0.0, 1.0, 2.0, 5.0] * 250)


def drawn_by(weights: Any, *, replacement: bool = True, num_samples: int = 1000) -> DeterministicSampler:
    draws = WeightedDraws(np.asarray(weights, np.float64), replacement)
    return dataclasses.replace(PLAIN, draws=draws, num_samples=num_samples)


@pytest.mark.parametrize(("replacement", "known"), [(True, 1360546228), (False, 3273514935)])
def test_the_draws_never_change(replacement: bool, known: int) -> None:
    weights = (np.arange(1000) * 7919 % 1000 / 7.0) ** 2
    order = drawn_by(weights, replacement=replacement, num_samples=300)
    drawn = np.concatenate([order.indices(epoch, 0, 300) for epoch in range(3)])
    assert zlib.crc32(drawn.astype("<i8").tobytes()) == known


@pytest.mark.parametrize("replacement", [True, False])
def test_a_part_of_an_epoch_is_that_of_the_whole(replacement: bool) -> None:
    order = drawn_by(WEIGHTS, replacement=replacement, num_samples=700)
    whole = order.indices(1, 0, 700)
    assert not np.array_equal(order.indices(2, 0, 700), whole)
    for start, stop in ((0, 0), (3, 4), (49, 51), (690, 700)):
        assert np.array_equal(order.indices(1, start, stop), whole[start:stop])
    with pytest.raises(IndexError, match="not within"):
        order.indices(1, 0, 701)


def test_samples_have_their_shares_with_replacement() -> None:
    order = drawn_by([1e-300, 0.0, 1e300, 3e300, 1e300], num_samples=200_000)
    counts = np.bincount(order.indices(0, 0, 200_000), minlength=5)
    assert counts[:2].tolist() == [0, 0]
    assert counts[2:] / 200_000 == pytest.approx([0.2, 0.6, 0.2], abs=0.005)


def test_samples_have_their_shares_without_replacement() -> None:
    """The probability of {i, j} in two draws, in any order, is that of successive draws."""
    weights = np.array([1.0, 2.0, 3.0, 0.0, 4.0])
    order = DeterministicSampler(2, 5, 1, seed=3, draws=WeightedDraws(weights, replacement=False))
    pairs = [tuple(order.indices(epoch, 0, 2).tolist()) for epoch in range(20_000)]
    assert all(a != b for a, b in pairs)
    share = weights / 10
    for i, j in ((0, 1), (1, 4), (2, 4)):
        expected = share[i] * share[j] * (1 / (1 - share[i]) + 1 / (1 - share[j]))
        assert (pairs.count((i, j)) + pairs.count((j, i))) / 20_000 == pytest.approx(expected, abs=0.012)
        assert pairs.count((i, j)) == pytest.approx(pairs.count((j, i)), rel=0.12)  # heavy ones do not come first


def test_the_logarithm_is_exact_to_the_last_bits() -> None:
    hashes = np.array([0, 1 << 12, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15, 12345678901234567890], np.uint64)
    expected = [-math.log(((int(h) >> 12) + 0.5) / 2**52) for h in hashes]
    assert data_order._exponential(hashes) == pytest.approx(expected, rel=1e-15)


def test_products_of_64_bits_are_exact() -> None:
    values = np.random.default_rng(2).integers(0, 2**64, 1000, dtype=np.uint64)
    for size in (1, 2**32 - 1, 2**32, 2**62 - 12345):
        assert data_order._scale(values, size).tolist() == [int(value) * size >> 64 for value in values]


def test_weights_are_kept_for_whoever_recomputes_the_order(tmp_path: Path) -> None:
    run, order = RunDirectory(tmp_path), drawn_by(WEIGHTS, replacement=False, num_samples=500)
    save_order(run, order)
    again = restore_order(dataclasses.replace(PLAIN, num_samples=500), run)
    assert again is not None
    assert again.is_weighted
    assert np.array_equal(again.indices(3, 0, 500), order.indices(3, 0, 500))
    require_same_order(order, run)
    for other in (PLAIN, drawn_by(WEIGHTS, num_samples=500), drawn_by(WEIGHTS * 2, replacement=False, num_samples=500)):
        with pytest.raises(RunDirectoryError, match="sample_weights differ from those in"):
            require_same_order(other, run)
    np.save(run.sample_weights, WEIGHTS)
    with pytest.raises(RunDirectoryError, match="must contain weights, but contains float64"):
        restore_order(PLAIN, run)
    save_order(run, PLAIN)
    assert not run.sample_weights.exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 2.0], r"each of the 3 samples, but returned shape \(2,\)"),
        ([1.0, -1.0, 2.0], "at least 0"),
        ([1.0, math.nan, 2.0], "finite"),
        (["a", "b", "c"], "a number for each sample"),
    ],
)
def test_weights_that_are_none_are_refused(values: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_weights(values, 3, "Task")


def test_draws_that_are_impossible_are_refused() -> None:
    with pytest.raises(DataError, match="are all 0"):
        drawn_by(np.zeros(1000))
    with pytest.raises(DataError, match="1000 samples cannot be drawn from 750 with a weight above 0"):
        drawn_by(WEIGHTS, replacement=False)
    with pytest.raises(ConfigError, match="leave --shuffle out"):
        dataclasses.replace(drawn_by(WEIGHTS), shuffle=Shuffle(window=0))


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def test_each_draw_of_a_sample_has_an_augmentation_of_its_own() -> None:
    order = DeterministicSampler(20, 10, 2, seed=0, draws=WeightedDraws(np.eye(20)[3], replacement=True))
    loader = build_loader(Noisy(), order, seed=0, device=torch.device("cpu"), workers=0, collate=torch.stack)
    values = torch.cat([batch.batch for step in range(2) for batch in loader.fetch(0, step, range(2))])
    loader.close()
    assert len(values.unique()) == 20


class Weighted(Task):
    def __init__(self, weights: Any) -> None:
        self.weights = weights

    def build_dataset(self, split: str) -> Any:
        return TensorDataset(torch.arange(100.0)) if split == "train" else None

    def sample_weights(self, dataset: Any) -> Any:
        return self.weights


def config_of(**options: Any) -> ResolvedConfig:
    return ResolvedConfig(**{"global_batch_size": 10, "microbatches": 2, "epochs": 1, **options})


def test_a_task_gives_weights_or_the_sampler_of_torch() -> None:
    weights = torch.arange(100.0)
    order = set_up_data(config_of(), Weighted(weights)).order
    assert order is not None
    assert order.draws is not None
    assert (order.num_samples, order.draws.replacement) == (100, True)
    order = set_up_data(config_of(), Weighted(WeightedRandomSampler(weights, 30, replacement=False))).order
    assert order is not None
    assert order.draws is not None
    assert (order.num_samples, order.draws.replacement, order.steps_per_epoch) == (30, False, 3)
    data = set_up_data(config_of(val_fraction=0.2), Weighted(weights))
    assert data.train_val_split is not None
    assert data.order is not None
    assert data.order.draws is not None
    assert data.order.draws.weights.tolist() == data.train_val_split.train(np.arange(80)).tolist()
