"""``python -m benchmarks serve``: its bars, and the faults that it measures, tried with few of each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks.__main__ import ServingSuiteName
from benchmarks.results import Quantity, compare
from benchmarks.rounds import REPORT, Sample, Variant
from benchmarks.serving import faults
from benchmarks.serving import round as serving_round
from benchmarks.serving.round import _infer_one
from benchmarks.serving.suite import SUITES, bench_serve, verdicts
from paceline.core.errors import ConfigError


def met(suite: str, samples: dict[str, list[Sample]]) -> dict[str, bool | None]:
    return {verdict.contender: verdict.met for verdict in verdicts(suite, samples)}


def test_requests_a_second_and_tails_are_compared_round_by_round() -> None:
    samples = {
        "paceline": [{"requests_per_s": 200.0, "p99_ms": 5.0}, {"requests_per_s": 20.0, "p99_ms": 50.0}],
        "fastapi": [{"requests_per_s": 100.0, "p99_ms": 9.0}, {"requests_per_s": 10.0, "p99_ms": 90.0}],
        "litserve": [{"requests_per_s": 100.0, "p99_ms": 4.0}, {"requests_per_s": 10.0, "p99_ms": 40.0}],
    }
    assert met("json", samples) == {
        "requests/s against FastAPI": True,  # 2 in both rounds
        "p99 against FastAPI": True,
        "requests/s against LitServe": False,
        "p99 against LitServe": False,
    }


@pytest.mark.parametrize(("failed", "slowest_s", "untrue"), [(0, 1.9, 0), (1, 2.1, 1)])
def test_a_killed_replica_s_bars(failed: int, slowest_s: float, untrue: int) -> None:
    sample: Sample = {"failed": failed, "slowest_s": slowest_s, "untrue": untrue}
    found = met("kill", {"paceline-kill-1": [sample], "paceline-kill-2": [sample]})
    assert set(found.values()) == {failed == 0}
    assert len(found) == 6


def test_overload_s_bars() -> None:
    sample = {"refused_p99_ms": 19.0, "accepted_p99_ms": 90.0, "accepted_bound_ms": 100.0, "growth_mib": 1.0}
    good = {**sample, "broken": 0.0, "not_sent_percent": 0.5}
    assert set(met("overload", {"paceline-overload": [good]}).values()) == {True}
    bad = {**good, "accepted_p99_ms": 101.0}
    assert met("overload", {"paceline-overload": [bad]})["p99 of a 200, of its bound"] is False


def test_one_contender_is_a_line_a_quantity() -> None:
    contender = Variant(name="one", title="alone", commands=lambda directory: [])
    quantities = (Quantity("a", "first", 0), Quantity("b", "second"))
    table = compare("alone", quantities, [contender], {"one": [{"a": 1, "b": 2}, {"a": 3, "b": 4}]}).table()
    assert table.as_markdown().splitlines() == [
        "| alone | median | min to max |",
        "| :-- | --: | --: |",
        "| first | 2 | 1 to 3 |",
        "| second | 3.0 | 2.0 to 4.0 |",
    ]
    assert table.as_rich().row_count == 2


def test_every_suite_can_be_named() -> None:
    assert get_args(ServingSuiteName) == SUITES
    with pytest.raises(ConfigError, match="--rounds must be at least 1"):
        bench_serve(only=(), rounds=0, seconds=1, progress=print)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(partial(faults.swaps, count=3), id="packages are exchanged"),
        pytest.param(partial(faults.drains, count=2), id="servers end and start"),
        pytest.param(partial(faults.kills, replicas=2, count=2), id="replicas are killed"),
    ],
)
def test_no_request_fails_while(tmp_path: Path, fault: Callable[..., Coroutine[Any, Any, Sample]]) -> None:
    report = asyncio.run(fault(_infer_one, 8, tmp_path))
    assert report["failed"] == 0
    assert report["requests"] > 0


@pytest.mark.slow
def test_a_file_is_predicted_by_two_processes(tmp_path: Path) -> None:
    serving_round.main("predict-2", tmp_path, 0.02)
    report = json.loads((tmp_path / REPORT).read_text())
    assert report["rows_per_s"] > 0
