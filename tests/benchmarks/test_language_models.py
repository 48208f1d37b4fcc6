from __future__ import annotations

import pytest

from benchmarks.language_models.suite import bench_language_models
from paceline.core.errors import ConfigError


def ignore(line: str) -> None:
    """A progress that shows nothing."""


@pytest.mark.slow
def test_the_same_packs_have_the_losses_of_the_trainer() -> None:
    result = bench_language_models(rounds=1, steps=2, warmup=1, progress=ignore)
    (table,) = result.comparisons or ()
    assert [row.name for row in table.rows] == ["trl", "trainer", "paceline"]
    assert all(spread.median > 0 for row in table.rows for spread in row.spreads)
    verdicts = {verdict.suite: verdict.met for verdict in result.verdicts or ()}
    assert verdicts["loss"]
    assert verdicts["lines"]


def test_an_epoch_has_fewer_steps() -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        bench_language_models(rounds=1, steps=0, warmup=1, progress=ignore)
