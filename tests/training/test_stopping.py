"""When a run stops: requests and their echoes, the end of the walltime, evaluations that are left."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError, PeerLostError
from paceline.core.signals import StopRequests, forwarded_signal
from paceline.data.loader import EvalBatches
from paceline.parallel.world import ParallelDims, World
from paceline.runs.directory import starts
from paceline.training import evaluation
from paceline.training.control import ControlFlags, Deadline, Schedule, StopCause, merge
from paceline.training.evaluation import EvaluationStopped, Evaluator
from paceline.training.reproducibility import configure_numerics, preserve_numerics
from paceline.training.run_context import DataSetup
from paceline.training.state import TrainProgress
from paceline_tasks.fashion_mnist import FashionMNIST

TERM, INT, USR1, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP


class Clock:
    """Both of Python's clocks, in a test's hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "time", lambda: self.now + 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    ("heard", "meanings"),
    [
        ([TERM, TERM, USR1, TERM], ["first", "again", "again", "again"]),
        ([USR1, TERM, INT], ["first", "again", "end"]),
        ([TERM, INT], ["first", "end"]),
        ([INT, TERM], ["first", "end"]),
        ([INT, INT], ["first", "end"]),
    ],
)
def test_only_ctrl_c_beside_another_request_ends_at_once(clock: Clock, heard: list[int], meanings: list[str]) -> None:
    requests = StopRequests()
    assert [requests.hear(number) for number in heard] == meanings
    assert requests.first == heard[0]


def test_the_echo_of_ctrl_c_is_not_a_second_one(clock: Clock) -> None:
    requests = StopRequests(echo_s=1.0)
    assert requests.hear(INT) == "first"
    clock.now += 0.9
    assert requests.hear(INT) == "again"
    clock.now += 0.2  # an echo has no echoes
    assert requests.hear(INT) == "end"
    after_term = StopRequests(echo_s=1.0)
    assert [after_term.hear(TERM), after_term.hear(INT)] == ["first", "end"]
    passed_on_as_term = StopRequests(echo_s=1.0)
    assert [passed_on_as_term.hear(INT), passed_on_as_term.hear(TERM)] == ["first", "again"]


def test_a_launcher_passes_on_what_workers_know() -> None:
    assert [forwarded_signal(number) for number in (INT, TERM, USR1, HUP)] == [INT, TERM, USR1, TERM]


def test_causes_and_exit_codes() -> None:
    causes = (StopCause(INT), StopCause(TERM), StopCause(USR1), StopCause.WALLTIME)
    assert [stop.description for stop in causes] == ["SIGINT", "SIGTERM", "SIGUSR1", "walltime"]
    assert [stop.exit_code for stop in causes] == [130, 75, 75, 75]
    assert merge([ControlFlags().row(), ControlFlags(stop=StopCause.WALLTIME).row()]).stop is StopCause.WALLTIME


def test_the_walltime_begins_with_the_launcher(clock: Clock) -> None:
    deadline = Deadline(100.0, started=time.time() - 60.0)
    assert deadline.is_set
    clock.now += 34.0
    assert not deadline.is_due(save_s=0.0, evaluates=False)
    clock.now += 1.5  # 5 s are the least that is kept
    assert deadline.is_due(save_s=0.0, evaluates=False)


@pytest.mark.parametrize(
    ("walltime_s", "step_s", "save_s", "evaluates", "reserve_s"),
    [
        (3600.0, 0.1, 0.1, False, 72.0),
        (36000.0, 0.1, 0.1, True, 120.0 + 7.0),
        (100.0, 3.0, 4.0, False, 14.0),
        (100.0, 3.0, 4.0, True, 21.0),
    ],
)
def test_time_is_kept_for_steps_saves_and_an_evaluation(
    clock: Clock, walltime_s: float, step_s: float, save_s: float, evaluates: bool, reserve_s: float
) -> None:
    deadline = Deadline(walltime_s, started=time.time())
    for seconds in (step_s / 2, step_s, step_s / 3):
        deadline.step_took(seconds)
    deadline.evaluation_took(7.0)
    clock.now += walltime_s - reserve_s - 0.01
    assert not deadline.is_due(save_s=save_s, evaluates=evaluates)
    clock.now += 0.02
    assert deadline.is_due(save_s=save_s, evaluates=evaluates)


def test_a_slow_first_step_is_forgotten(clock: Clock) -> None:
    deadline = Deadline(1000.0, started=time.time())
    deadline.step_took(600.0)
    assert deadline.is_due(save_s=0.0, evaluates=False)
    for _ in range(16):
        deadline.step_took(1.0)
    assert not deadline.is_due(save_s=0.0, evaluates=False)


def test_without_a_walltime_there_is_no_end(clock: Clock) -> None:
    deadline = Deadline(None, started=0.0)
    clock.now += 1e12
    assert not deadline.is_set
    assert not deadline.is_due(save_s=0.0, evaluates=True)


@pytest.mark.parametrize("text", ["2 days", "-1h", "0s"])
def test_a_walltime_is_a_duration(text: str) -> None:
    with pytest.raises(ConfigError, match="--walltime must be a duration such as 90s, 5min or 2h"):
        RunConfig(walltime=text)


@pytest.mark.parametrize("eval_every", ["1epoch", "2epochs", "3steps", "never"])
def test_an_evaluation_is_foreseen(eval_every: str) -> None:
    config = RunConfig(eval_every=eval_every, epochs=4)
    data = DataSetup(list(range(20)), None, _Order(), None, None, total_steps=20)  # type: ignore[arg-type]
    schedule, progress = Schedule(config, data), TrainProgress()
    foreseen, made = [], []
    for _ in range(20):
        foreseen.append(schedule.evaluation_follows(progress, has_next_batch=True))
        progress.step += 1
        progress.step_in_epoch += 1
        if schedule.epoch_ends(progress):
            progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0
        made.append(schedule.evaluation_is_due(progress))
        if made[-1]:
            progress.evaluated_step = progress.step
    assert foreseen == made
    assert sum(made) == {"1epoch": 4, "2epochs": 2, "3steps": 7, "never": 0}[eval_every]


class _Order:
    steps_per_epoch = 5


WORLD = World(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    device=torch.device("cpu"),
    backend="gloo",
    generation=0,
    one_host=True,
)
MESH = ParallelDims(WORLD, {"dp": 1})


def test_an_evaluation_is_left_between_two_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_GLANCE_S", 0.0)  # after each batch
    task, model = FashionMNIST(), nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    data = TensorDataset(torch.zeros(40, 1, 28, 28), torch.zeros(40, dtype=torch.int64))
    batches = EvalBatches(data, 4, seed=0, device=WORLD.device, workers=0, collate=task.collate)
    evaluator = Evaluator(task, WORLD.device, batches, seed=0, autocast=nullcontext)
    answers = [*[StopCause.NONE] * 3, StopCause.SIGTERM, StopCause.NONE]
    asked: list[StopCause] = []

    def stop() -> StopCause:
        asked.append(answers[len(asked)])
        return asked[-1]

    model.train()
    with pytest.raises(EvaluationStopped) as stopped:
        evaluator.run(MESH, model, stop)
    assert stopped.value.cause is StopCause.SIGTERM
    assert asked == answers[:4]
    assert model.training
    assert evaluator.run(MESH, model, lambda: StopCause.NONE)["loss"] > 0


def test_a_peer_lost_in_an_evaluation_leaves_each_module_in_its_mode() -> None:
    class Losing(FashionMNIST):
        def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
            raise PeerLostError("rank 1 is gone")

    task, model = Losing(), nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(784, 10))
    data = TensorDataset(torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.int64))
    batches = EvalBatches(data, 4, seed=0, device=WORLD.device, workers=0, collate=task.collate)
    model[1].eval()
    with pytest.raises(PeerLostError):
        Evaluator(task, WORLD.device, batches, seed=0, autocast=nullcontext).run(MESH, model, lambda: StopCause.NONE)
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_what_training_sets_for_the_whole_process_is_put_back() -> None:
    def settings() -> tuple[Any, ...]:
        return (
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        )

    before = settings()
    with preserve_numerics():
        configure_numerics(RunConfig(), before[0] + 1, torch.device("cpu"))
        assert settings() == (before[0] + 1, True, True, False, False)
    assert settings() == before


def test_restarts_and_recoveries_are_told_apart() -> None:
    def started(generation: int) -> dict[str, Any]:
        return {"event": "started", "generation": generation}

    def view(generation: int, recovery: bool) -> dict[str, Any]:
        return {"event": "group", "generation": generation, "recovery": recovery}

    assert starts([]) == {"restarts": 0, "recoveries": 0}
    assert starts([started(0), started(1), started(2)]) == {"restarts": 2, "recoveries": 0}
    # One is lost, its replacement joins; all are lost and go on from a checkpoint; then a resume.
    events = [started(0), view(1, True), view(2, False), view(3, True), started(3), started(4)]
    assert starts(events) == {"restarts": 1, "recoveries": 2}
