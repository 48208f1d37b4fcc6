"""Parameter servers: the bits of one process where they are synchronous, and of a simulation where not."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training import optimizer_tasks, tasks

from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.data.order import DeterministicSampler
from paceline.runs.checkpoint_state import model_sha256
from paceline.training.reproducibility import seed_model
from paceline.training.run_context import DataSetup
from paceline.training.state import TrainProgress
from paceline_more_strategies.asynchronous import Staleness, StalenessBound, SyncPoints
from paceline_more_strategies.parameter_server import partition_parameters

SYNC: dict[str, dict[str, Any]] = {
    # Carved validation, plateau schedule, early stop; dropout, batch norm, AdamW; a short last batch.
    "everything": {"task": "Everything", "options": {"val_fraction": 0.2, "early_stop": "accuracy:4"}},
    "two-optimizers": {"task": "TwoOptimizers", "options": {"precision": "bf16"}},
    "uneven-stream": {"task": "Uneven"},
    "best": {
        "task": "Points",
        "fields": {"num_val": 40, "num_test": 20},
        "options": {"best_metric": "accuracy:max"},
    },
    "clipped": {"task": "Points", "options": {"clip_norm": 0.05}},
}
ONE_WORKER = ("everything", "two-optimizers", "best", "clipped")
STEPS, BATCH, SEED = 15, 8, 5
SIMULATED: dict[str, dict[str, Any]] = {
    "simulated": {"ps_mode": "async"},
    "simulated-ssp": {"ps_mode": "ssp", "ps_staleness": 0},
    "simulated-servers": {"ps_mode": "async", "ps_servers": 2},
}


class Simulation:
    """Asynchronous updates in one process, in an order drawn by lot, or almost: worker 1 is slow.

    Attributes:
        arrival: whose gradient was applied, one after the other.
        staleness: how old its parameters were.
        model: after the last update.
    """

    def __init__(self, task: tasks.Points, workers: int, bound: int | None, seed: int) -> None:
        chance = random.Random(seed)
        seed_model(SEED)
        self.model = task.build_model()
        optimizer = task.build_optimizer(self.model)
        assert isinstance(optimizer, torch.optim.Optimizer)
        scheduler = task.build_scheduler(optimizer, STEPS)
        data = task.build_dataset("train")
        order = DeterministicSampler(len(data), BATCH, 1, SEED, 1)
        self.arrival: list[int] = []
        self.staleness: list[int] = []
        for first in range(0, STEPS, order.steps_per_epoch):  # an epoch's end is a cut
            steps = min(order.steps_per_epoch, STEPS - first)
            clocks, idle, handed, applied = StalenessBound(workers, bound), list(range(workers)), 0, 0
            under_way: dict[int, tuple[int, int, torch.nn.Module]] = {}
            while True:
                for worker in list(idle):
                    if handed < steps and clocks.can_start(worker):
                        under_way[worker] = (handed, applied, copy.deepcopy(self.model))
                        idle.remove(worker)
                        handed += 1
                if not under_way:
                    break
                fast = [worker for worker in sorted(under_way) if worker != 1]
                worker = chance.choice(fast if fast and chance.random() < 0.8 else sorted(under_way))
                step, version, model = under_way.pop(worker)
                start, stop = order.batch_range(step)
                batch = data[torch.from_numpy(order.indices(first // order.steps_per_epoch, start, stop))]
                (task.loss(model, batch) * (stop - start)).backward()
                for parameter, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
                    assert theirs.grad is not None
                    parameter.grad = theirs.grad / (stop - start)
                optimizer.step()
                scheduler.step()
                self.arrival.append(worker)
                self.staleness.append(applied - version)
                applied += 1
                clocks.finished(worker)
                idle.append(worker)


def task() -> tasks.Points:
    return optimizer_tasks.Overflowing(num=60)


@pytest.fixture(scope="module")
def simulations() -> dict[str, Simulation]:
    return {
        name: Simulation(task(), 4 - chosen.get("ps_servers", 1), chosen.get("ps_staleness"), seed)
        for seed, (name, chosen) in enumerate(SIMULATED.items())
    }


def options(job: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**job, "options": {**job.get("options", {}), "strategy": "ps", **more}}


def moved(stop_at: int, **chosen: Any) -> dict[str, Any]:
    job = SYNC["everything"]
    return {**job, "options": {**job["options"], **chosen, "run_dir": "moved"}, "stop_at": stop_at}


@pytest.fixture(scope="module")
def worlds(start_trainings: Any, simulations: dict[str, Simulation]) -> dict[int, Any]:
    """The jobs on one rank; on a server and one worker; on up to three of both."""
    simulated = {
        name: {
            "task": "Overflowing",
            "fields": {"num": 60},
            "arrival": simulations[name].arrival,
            "options": {
                "strategy": "ps",
                "seed": SEED,
                "microbatches": 1,
                "global_batch_size": BATCH,
                "max_steps": STEPS,
                "log_every": 1,
                **chosen,
            },
        }
        for name, chosen in SIMULATED.items()
    }
    return {
        1: start_trainings(SYNC, ranks=1),
        2: start_trainings(
            {name: options(SYNC[name], ps_mode="async") for name in ONE_WORKER}
            | {
                "asynchronous-stream": options(SYNC["uneven-stream"], ps_mode="async"),
                "too-many-servers": options(SYNC["best"], ps_servers=2),
            },
            ranks=2,
        ),
        4: start_trainings(
            {name: options(job, ps_servers=1 if name == "clipped" else 2) for name, job in SYNC.items()}
            | simulated
            | {
                "moved-1": moved(20, strategy="ps", ps_mode="async", ps_servers=3),
                "moved-2": moved(10, strategy="ps", ps_servers=2),
                "moved-3": moved(0, strategy="ddp"),
            },
            ranks=4,
        ),
    }


@pytest.mark.parametrize("name", SYNC)
def test_synchronous_bits_are_those_of_one_process(worlds: dict[int, Any], name: str) -> None:
    same(worlds[4][name], worlds[1][name])


@pytest.mark.parametrize("name", ONE_WORKER)
def test_with_one_worker_nothing_is_stale(worlds: dict[int, Any], name: str) -> None:
    result = worlds[2][name]
    same(result, worlds[1][name])
    assert result["staleness"] == {"mean": 0.0, "max": 0, "histogram": {"0": result["steps"]}}
    assert result["worker_steps"] == [result["steps"]]


def same(result: dict[str, Any], alone: dict[str, Any]) -> None:
    assert "error" not in alone
    assert "error" not in result, result
    for what in ("model_sha256", "metrics", "steps", "samples", "best_step"):
        assert result[what] == alone[what], what


@pytest.mark.parametrize("name", SIMULATED)
def test_a_run_is_that_of_a_simulation_with_the_same_order_of_arrival(
    worlds: dict[int, Any], simulations: dict[str, Simulation], name: str
) -> None:
    simulation = simulations[name]
    result = worlds[4][name]
    assert "error" not in result, result
    assert result["model_sha256"] == model_sha256(simulation.model.state_dict())
    assert result["worker_steps"] == [simulation.arrival.count(worker) for worker in range(len(result["worker_steps"]))]
    assert result["staleness"]["max"] == max(simulation.staleness)
    assert sum(result["staleness"]["histogram"].values()) == STEPS
    rates = [record["lr"] for record in worlds[4].records(name, "train")]
    assert sorted(rates, reverse=True) == [0.1 * 0.5**step for step in range(STEPS)], "each update has its own"
    assert simulation.arrival != sorted(simulation.arrival)
    assert max(simulation.staleness) > 0, "nothing of interest has happened"


def test_the_audit_is_clean(worlds: dict[int, Any], run_processes: Any) -> None:
    worlds[4].results()
    for name in ("everything", "simulated"):
        done = run_processes.paceline("audit", worlds[4].run(name))
        assert done.returncode == 0, done.stdout


def test_a_stream_is_read_in_turn_only(worlds: dict[int, Any]) -> None:
    refused = worlds[2]["asynchronous-stream"]
    assert refused["error"] == "ConfigError"
    assert "a stream must be read in turn" in refused["message"]


def test_servers_leave_workers(worlds: dict[int, Any]) -> None:
    assert "Use --ps-servers 1 or fewer, or --nproc 3 or more" in worlds[2]["too-many-servers"]["message"]


def test_a_run_goes_from_mode_to_mode(worlds: dict[int, Any]) -> None:
    # With one worker, asynchronous steps have the bits of synchronous ones.
    assert worlds[4]["moved-1"]["error"] == worlds[4]["moved-2"]["error"] == "StopRequested"
    same(worlds[4]["moved-3"], worlds[1]["everything"])


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_worker_gets_further_ahead_than_the_bound(bound: int) -> None:
    workers, chance = 4, random.Random(bound)
    clocks, done, idle = StalenessBound(workers, bound), [0] * workers, set(range(workers))
    begun: dict[int, int] = {}
    staleness, furthest = [], 0
    for applied in range(2000):
        for worker in sorted(idle):
            if clocks.can_start(worker):
                assert done[worker] - min(done) <= bound
                idle.remove(worker)
                begun[worker] = applied
        assert begun, "nobody may begin, and nobody is at work"
        # Worker 0 is slow.
        ready = [worker for worker in begun if worker != 0] or [0]
        worker = chance.choice(ready) if chance.random() < 0.9 else chance.choice(sorted(begun))
        staleness.append(applied - begun.pop(worker))
        clocks.finished(worker)
        done[worker] += 1
        furthest = max(furthest, max(done) - min(done))
        idle.add(worker)
    assert max(staleness) <= (workers - 1) * (2 * bound + 1)
    assert furthest == bound + 1, "the bound was never reached"


def test_without_a_bound_everybody_may_begin() -> None:
    clocks = StalenessBound(2, None)
    for _ in range(100):
        clocks.finished(0)
    assert clocks.can_start(0)


def test_what_is_reported_of_staleness() -> None:
    staleness = Staleness()
    assert staleness.report() == {}
    for behind in (0, 1, 1, 10, 2):
        staleness.observe(behind)
    assert staleness.report() == {
        "mean": 2.8,
        "max": 10,
        "histogram": {"0": 1, "1": 2, "2": 1, "10": 1},
    }


def test_a_stretch_ends_where_something_is_due() -> None:
    def to_next(step: int, in_epoch: int, **options: Any) -> int:
        config = RunConfig(**options)
        order = DeterministicSampler(100, 10, 1, 0, 1)
        cuts = SyncPoints(config, DataSetup(None, None, order, None, None, 25))
        return cuts.steps_to_next(TrainProgress(step=step, step_in_epoch=in_epoch))

    assert to_next(0, 0) == 10
    assert to_next(14, 4) == 6
    assert to_next(20, 0) == 5
    assert to_next(2, 2, eval_every="4steps") == 2
    assert to_next(4, 4, eval_every="4steps", checkpoint_every=("3steps", "1min")) == 2


def test_parameters_are_divided_by_size() -> None:
    assert partition_parameters([5, 5, 5, 5], 2) == (range(2), range(2, 4))
    assert partition_parameters([100, 1, 1, 1], 3) == (range(1), range(1, 2), range(2, 4))
    assert partition_parameters([1, 1, 1, 100], 2) == (range(3), range(3, 4))
    assert partition_parameters([7], 1) == (range(1),)
    with pytest.raises(ConfigError, match="has 2 trainable parameters, and each server needs one"):
        partition_parameters([1, 1], 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nproc", "1"), "--strategy ps needs a server and a worker, but there is one process"),
        (("--nproc", "2", "--ps-mode", "ssp"), "--ps-mode ssp needs --ps-staleness, such as --ps-staleness 2"),
        (
            ("--nproc", "2", "--ps-staleness", "2"),
            "--ps-staleness is for --ps-mode ssp; --ps-mode sync has no bound",
        ),
        (("--nproc", "2", "--reduction", "allreduce"), "--reduction allreduce does not work with --strategy ps"),
        (("--nproc", "2", "--precision", "fp16"), "--precision fp16 does not work with --strategy ps"),
        (("--nproc", "3", "--ps-servers", "2", "--clip-norm", "1"), "Use --ps-servers 1"),
        (("--nproc", "2", "--recover", "inplace"), "--recover inplace does not work with --strategy ps"),
    ],
)
def test_bad_input(run_processes: Any, tasks_file: Path, options: tuple[str, ...], message: str) -> None:
    done = run_processes.paceline("train", f"{tasks_file}:Points", "--strategy", "ps", "--quiet", *options)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.count(message) == 1


def test_options_of_servers_need_servers() -> None:
    with pytest.raises(ConfigError, match="--ps-mode needs --strategy ps"):
        RunConfig(ps_mode="async")
