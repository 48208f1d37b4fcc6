"""Micro-batches that move between ranks while a run trains, ranks that only hold the state, and measured speed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.training.test_exactness import EXACT, WORKERS

from paceline.core.config import RunConfig
from paceline.data.audit import audit
from paceline.data.ledger import LedgerEntry, read_ledger
from paceline.parallel.reducer import StepSums
from paceline.parallel.reduction_tree import equal_work_split
from paceline.parallel.world import World
from paceline.runs.directory import RunDirectory
from paceline.runs.monitor import PhaseTimer
from paceline.training.control import ROW_LENGTH, ControlFlags, statuses, values_of
from paceline_more_strategies.load_balancing import (
    WINDOW_STEPS,
    WINDOWS,
    LoadBalancer,
    LoadBalancing,
    Speed,
    SpeedMeter,
)
from paceline_more_strategies.options import LoadBalanceOptions

pytestmark = pytest.mark.matrix

NAMES = ("everything", "two-optimizers", "fp16", "metrics", "iterable", "uneven-stream")
JOBS = {name: EXACT[name] for name in NAMES} | {"1-workers": WORKERS["1-workers"]}
RESUMED = {"task": "Uneven", "options": {"log_every": 1, "epochs": 3}}
LAGGING = {"task": "Lagging", "options": {"max_steps": 8 * 4 * WINDOWS, "log_every": 1}}
FAST = {"task": "TwoOptimizers", "options": {"reduction": "allreduce"}, "fields": {"num_val": 21}}


@pytest.fixture(scope="module")
def alone(start_trainings: Any) -> Any:
    return start_trainings(JOBS | {"resumed": RESUMED, "fast": FAST, "lagging": LAGGING})


@pytest.fixture(scope="module")
def moving(start_trainings: Any) -> Any:
    """The same on three ranks: two compute, with other micro-batches after each step, and one is a spare."""
    jobs = {
        **{name: {**job, "computing": 2} for name, job in JOBS.items()},
        "stopped": {
            **RESUMED,
            "options": {**RESUMED["options"], "run_dir": "resumed"},
            "computing": 2,
            "stop_at": 9,
        },
        "resumed": {**RESUMED, "computing": 2},
        "fast": {**FAST, "computing": 2},
    }
    return start_trainings(jobs, ranks=3)


@pytest.mark.parametrize("name", JOBS)
def test_moving_microbatches_and_a_spare_change_no_bit(alone: Any, moving: Any, name: str) -> None:
    for key in ("model_sha256", "steps", "epochs", "samples", "state_version", "best_step", "metrics"):
        assert moving[name][key] == alone[name][key], key


def steps_of(run: Path) -> list[LedgerEntry]:
    return [entry for entry, is_final in read_ledger(run / "ledger").entries() if is_final]


@pytest.mark.parametrize("name", [*JOBS, "resumed"])
def test_each_sample_was_seen_once_and_the_ledger_says_by_whom(alone: Any, moving: Any, name: str) -> None:
    alone.results()
    num_microbatches = moving[name]["microbatches"]
    expected, found = steps_of(alone.run(name)), steps_of(moving.run(name))
    assert [entry._replace(ranks=1) for entry in found] == expected
    ranks = {entry.ranks for entry in found}
    assert ranks <= {(0, first, num_microbatches) for first in range(1, num_microbatches)}
    assert len(ranks) > 1


def test_an_audit_of_moving_microbatches_is_clean(moving: Any) -> None:
    moving.results()
    report = audit(RunDirectory(moving.run("everything")))
    assert report.clean, report.verdict


def test_streams_that_moved_are_resumed_at_the_exact_sample(alone: Any, moving: Any) -> None:
    assert moving["stopped"]["error"] == "StopRequested"
    assert moving["resumed"]["model_sha256"] == alone["resumed"]["model_sha256"]


def test_fast_agrees_within_rounding(alone: Any, moving: Any) -> None:
    loss = alone["fast"]["metrics"]["val"]["loss"]
    assert moving["fast"]["metrics"]["val"]["loss"] == pytest.approx(loss, rel=1e-4)


def test_moves_are_events(moving: Any) -> None:
    moving.results()
    moves = [e for e in events(moving.run("two-optimizers")) if e["event"] == "shares"]
    assert len(moves) > 3
    for event, following in itertools.pairwise(moves):
        assert sum(event["shares"]) == moving["two-optimizers"]["microbatches"]
        assert event["shares"][2] == 0
        assert following["before"] == event["shares"]


def test_a_slow_rank_is_given_less_and_the_bits_stay(alone: Any, start_trainings: Any) -> None:
    equal = {**LAGGING, "options": {**LAGGING["options"], "load_balance": "equal", "max_steps": 2}}
    trainings = start_trainings({"lagging": LAGGING, "equal": equal}, ranks=2)
    assert trainings["lagging"]["model_sha256"] == alone["lagging"]["model_sha256"]
    # Where the machine itself stalls for a while, they may be shared once more later.
    event, *_ = [e for e in events(trainings.run("lagging")) if e["event"] == "shares"]
    assert (event["before"], event["shares"]) == ([2, 2], [3, 1])
    assert event["ms_per_microbatch"][1] > 40
    assert steps_of(trainings.run("lagging"))[event["step"]].ranks == (0, 3)
    assert {entry.ranks for entry in steps_of(trainings.run("equal"))} == {2}


def world_of(size: int, rank: int = 0, computing: int | None = None) -> World:
    return World(
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        device=torch.device("cpu"),
        backend="gloo",
        generation=0,
        one_host=True,
        active=computing,
    )


class Told(World):
    """A world in which it is known what the ranks tell."""

    told: Any = ()

    def all_gather_object(self, value: Any) -> list[Any]:
        return json.loads(json.dumps([value, *self.told]))  # type: ignore[no-any-return]


class Balanced:
    """A rank's load balancer in a group of which it is known what the ranks tell."""

    def __init__(
        self,
        tmp_path: Path,
        told: list[Any],
        speed: Speed | None = None,
        *,
        step: int = 0,
        computing: int | None = None,
        **options: Any,
    ) -> None:
        world = Told(**vars(world_of(len(told) + 1, computing=computing)))
        object.__setattr__(world, "told", told)
        spares = world.world_size - world.num_active
        self.world = world
        self.work_split = (*equal_work_split(12, world.num_active), *(0,) * spares)
        self.monitor = SimpleNamespace(timer=PhaseTimer())
        run: Any = SimpleNamespace(
            config=RunConfig(**options),
            num_microbatches=12,
            directory=RunDirectory(tmp_path),
            device=torch.device("cpu"),
        )
        self.balancing = LoadBalancing(run)
        self.balancing.speed = speed
        group: Any = self
        states: Any = SimpleNamespace(state=SimpleNamespace(progress=SimpleNamespace(step=step)))
        self.hook: Any = self.balancing.step_hook(group, states)

    def split_work(self, work_split: tuple[int, ...]) -> None:
        self.work_split = work_split

    def step(self, speeds: list[Speed], step: int) -> None:
        rows = [ControlFlags(**speed._asdict()).row() for speed in speeds]
        self.hook.after_reduce(StepSums(24, 24.0, 1.0, 0, rows, None, True))
        self.hook.on_step_end(step)


def events(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_world_begins_with_the_speeds_of_the_one_before(tmp_path: Path) -> None:
    group = Balanced(tmp_path, [[0.02, 0.0]], Speed(0.01, 0.0), step=7)
    assert isinstance(group.hook, LoadBalancer)
    assert group.work_split == (8, 4)
    assert group.balancing.speed == Speed(0.01, 0.0)
    [event] = events(tmp_path)
    assert (event["event"], event["step"], event["shares"], event["before"]) == ("shares", 7, [8, 4], [6, 6])


def test_spares_get_nothing_and_their_speed_does_not_count(tmp_path: Path) -> None:
    group = Balanced(tmp_path, [[0.02, 0.0], [9.0, 0.0]], Speed(0.01, 0.0), computing=2)
    assert group.work_split == (8, 4, 0)


@pytest.mark.parametrize(
    "options",
    [{"reduction": "ddp"}, {"strategy": "zero1"}, {"strategy": "ps"}, {"local_sgd_steps": 5}, {"comm_hook": "fp16"}],
    ids=str,
)
def test_where_a_rank_cannot_have_any_number_the_work_is_split_equally(tmp_path: Path, options: Any) -> None:
    group = Balanced(tmp_path, [[0.02, 0.0]], Speed(0.01, 0.0), **options)
    assert group.hook is None
    assert group.work_split == (6, 6)
    assert events(tmp_path) == []


def test_ranks_share_anew_when_all_have_measured(tmp_path: Path) -> None:
    group = Balanced(tmp_path, [None])
    slow = [Speed(0.01, 0.0), Speed(0.02, 0.0)]
    for step in range(20):
        group.step([slow[0], Speed(0.0, 0.0)], step)
    for step in range(WINDOWS):
        assert group.work_split == (6, 6)
        group.step(slow, step)
    assert group.work_split == (8, 4)
    assert group.balancing.speed == Speed(0.01, 0.0)
    [event] = events(tmp_path)
    assert event["ms_per_microbatch"] == [10.0, 20.0]


def test_speed_is_the_mean_over_the_window_without_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr("paceline.runs.monitor.perf_counter", lambda: float(next(clock)))
    timer = PhaseTimer()
    stopwatch = SpeedMeter(timer, torch.device("cpu"))
    for step in range(WINDOW_STEPS):
        assert stopwatch.speed() is None
        stopwatch.begin()
        timer.mark("data")
        for _ in range(1 + step % 2):  # 12 micro-batches in 8 steps
            timer.mark("forward")
            timer.mark("backward")
        stopwatch.end(1 + step % 2)
        for phase in ("reduction", "optimizer", "other", "evaluation", "checkpoint"):
            timer.mark(phase)
    assert stopwatch.speed() == Speed((8 + 24) / 12, 2.0)
    stopwatch.restart()
    assert stopwatch.speed() is None


@pytest.mark.gpu
def test_speed_of_a_gpu_is_the_time_between_events() -> None:
    timer = PhaseTimer()
    device = torch.device("cuda")
    stopwatch = SpeedMeter(timer, device)
    matrix = torch.randn(4096, 4096, device=device)
    for _ in range(200):
        stopwatch.begin()
        for _ in range(20):
            matrix @ matrix
        timer.mark("backward")
        stopwatch.end(1)
        torch.cuda.synchronize()
        timer.mark("reduction")
    speed = stopwatch.speed()
    assert speed is not None
    # The host only enqueues: almost all of the time is where it waits.
    assert speed.microbatch_s > 2 * timer.seconds["backward"] / 200
    assert speed.microbatch_s == pytest.approx(timer.seconds["reduction"] / 200, rel=0.5)


def test_speeds_travel_in_the_rows() -> None:
    row = ControlFlags(**Speed(5.0, 6.0)._asdict()).row([1.0, 2.0, 3.0, 4.0])
    assert len(row) == len(ControlFlags().row()) == ROW_LENGTH
    assert (values_of([row], "microbatch_s"), values_of([row], "step_s")) == ([5.0], [6.0])
    assert statuses([row]) == [[1.0, 2.0, 3.0, 4.0]]


def test_the_option_has_two_values() -> None:
    assert RunConfig()[LoadBalanceOptions].load_balance == "auto"
    assert RunConfig().changes.hooks != RunConfig(load_balance="equal").changes.hooks
