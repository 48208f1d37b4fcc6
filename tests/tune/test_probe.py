"""What a search finds out before it begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.tune.plan_search import probe
from paceline.tune.search import Search

SEARCH = Search(
    options={
        "task": f"{Path(__file__).parent / 'tasks.py'}:Line",
        "threads": 1,
        "max_steps": 20,
        "eval_every": "5steps",
        "set": ["kind=relu"],
        "seed": 1,
    },
    space=("lr=choice:1e30,0.01",),
    trials=2,
    metric="loss:min",
)


@pytest.mark.integration
def test_a_first_trial_that_diverges_does_not_end_the_search() -> None:
    assert [SEARCH.parsed_space.parameters(number)["lr"] for number in (0, 1)] == ["1e30", "0.01"]
    facts = probe(SEARCH)
    assert set(facts.metrics) == {"near", "loss"}
    assert (facts.total_steps, facts.evaluations) == (20, 4)
    with pytest.raises(ConfigError, match=r"is NaN or infinite .* \(with kind=relu, lr=1e30\)"):
        probe(replace(SEARCH, trials=1))
