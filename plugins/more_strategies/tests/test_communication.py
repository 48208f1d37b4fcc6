"""Local SGD, DiLoCo, compressed gradients and DataParallel: against references of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.training.driver import task_named
from tests.training.states import newest
from torch.optim import Adafactor, NAdam

from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.core.job import WorkerConfig
from paceline.runs.directory import RunDirectory
from paceline.training.control import StopSignals, SyncSchedule
from paceline.training.reproducibility import preserve_numerics
from paceline.training.run_context import RunRequest, setup_run
from paceline.training.state import TrainProgress
from paceline_more_strategies.local_sgd import tensors_to_average
from paceline_more_strategies.reference import simulated_compression, simulated_model

pytestmark = pytest.mark.matrix

APART: dict[str, dict[str, Any]] = {
    # 7 steps an epoch, the last of which is short: rounds of 3, 3 and 1.
    "plain": {"task": "Points", "options": {"local_sgd_steps": 3}},
    "to-the-end": {"task": "Points", "options": {"local_sgd_steps": 50, "max_steps": 5}},
    "each-step": {"task": "Points", "options": {"local_sgd_steps": 1, "clip_norm": 0.5}},
    # Momentum and AdamW, schedules, dropout, batch norm, a counter, weighted samples; 5 micro-batches.
    "two-optimizers": {"task": "TwoOptimizers", "options": {"local_sgd_steps": 4, "eval_every": "never"}},
    "diloco": {
        "task": "TwoOptimizers",
        "options": {"local_sgd_steps": 2, "outer_optimizer": "nesterov", "precision": "bf16"},
    },
    "factored": {"task": "Factored", "options": {"local_sgd_steps": 3, "max_steps": 8}},
    # One rank's micro-batches use parameters that the others' do not.
    "branches": {"task": "Branches", "options": {"local_sgd_steps": 2}},
    "branches-sgd": {"task": "Branches", "fields": {"adamw": False}, "options": {"local_sgd_steps": 3}},
    # The scaler skips the first steps; in the last batch of an epoch some ranks have no micro-batch.
    "fp16": {
        "task": "Overflowing",
        "fields": {"num_val": 0},
        "options": {"local_sgd_steps": 2, "precision": "fp16"},
    },
}
OTHER: dict[str, dict[str, Any]] = {
    "rounded-up": {
        "task": "Points",
        "fields": {"num_val": 12, "num": 160},
        "options": {"local_sgd_steps": 4, "eval_every": "3steps", "checkpoint_every": ["5steps"], "max_steps": 17},
    },
    "stream": {"task": "Uneven", "options": {"local_sgd_steps": 4}},
    "half": {"task": "Points", "options": {"comm_hook": "fp16"}},
    "brain": {"task": "Points", "options": {"comm_hook": "bf16"}},
    "halves": {
        "task": "Overflowing",
        "fields": {"num_val": 0},
        "options": {"comm_hook": "fp16", "precision": "fp16"},
    },
    "brain-branches": {"task": "Branches", "options": {"comm_hook": "bf16"}},
    "brains": {"task": "TwoOptimizers", "options": {"comm_hook": "bf16", "clip_norm": 0.5}},
    "powersgd": {
        "task": "Points",
        "options": {"comm_hook": "powersgd", "powersgd_rank": 3, "epochs": 4},
    },
    "powersgd-1": {"task": "Points", "options": {"comm_hook": "powersgd", "epochs": 4}},
    "long": {"task": "Points", "options": {"reduction": "allreduce", "epochs": 4}},
    "fast": {"task": "Points", "options": {"reduction": "allreduce"}},
}
DILOCO = {"local_sgd_steps": 2, "outer_optimizer": "nesterov", "max_steps": 12}
POWERSGD = {"comm_hook": "powersgd", "max_steps": 24}
MOVING: dict[str, dict[str, Any]] = {
    # Two losses a step on rank 0: stopped in its 16th step, the sixth that is compressed.
    "compressed": {"task": "TwoOptimizers", "options": POWERSGD},
    "compressed-stopped": {"task": "TwoOptimizers", "options": POWERSGD, "stop_at": 32},
    "compressed-continued": {
        "task": "TwoOptimizers",
        "options": {"max_steps": 24, "run_dir": "compressed-stopped"},
    },
    "compressed-moved": {"task": "TwoOptimizers", "options": POWERSGD, "stop_at": 32},
    "whole": {"task": "Normed", "options": DILOCO},
    "stopped": {"task": "Normed", "options": DILOCO, "stop_at": 10},
    # Without being told again how.
    "continued": {"task": "Normed", "options": {"max_steps": 12, "run_dir": "stopped"}},
    "moved": {"task": "Normed", "options": DILOCO, "stop_at": 7},
}
DP: dict[str, dict[str, Any]] = {
    "everything": {"task": "Everything", "options": {"val_fraction": 0.2, "early_stop": "accuracy:4"}},
    "points": {"task": "Points", "options": {"clip_norm": 0.5}},
    "dropout": {"task": "TwoOptimizers", "options": {}},
    "fp16": {"task": "Overflowing", "options": {"precision": "fp16"}},
    "norm": {"task": "Normed", "options": {"ema": 0.9}},
}


@pytest.fixture(scope="module")
def worlds(start_trainings: Any) -> dict[int, Any]:
    return {ranks: start_trainings(APART | (OTHER | MOVING if ranks == 2 else {}), ranks=ranks) for ranks in (2, 3)}


@pytest.fixture(scope="module")
def threads(start_trainings: Any) -> Any:
    """Each job alone, and over two and three threads."""
    jobs: dict[str, dict[str, Any]] = {f"{name}-1": job for name, job in DP.items()}
    jobs |= {"alone": {"task": "Normed"}, "apart": {"task": "Normed", "options": {"local_sgd_steps": 3}}}
    for devices in (2, 3):
        for name, job in DP.items():
            options = {**job["options"], "strategy": "dp", "dp_devices": devices}
            jobs[f"{name}-{devices}"] = {**job, "options": options}
    return start_trainings(jobs)


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_train_apart_are_as_simulated(worlds: dict[int, Any], tmp_path: Path, name: str, ranks: int) -> None:
    assert "error" not in worlds[ranks][name], worlds[ranks][name]
    expected = simulated(APART[name], tmp_path, ranks)
    for parameter, value in weights(worlds[ranks].run(name)).items():
        assert torch.equal(value, expected[parameter]), parameter


def test_all_of_an_optimizers_state_is_averaged_but_for_what_counts_steps() -> None:
    module = torch.nn.ParameterDict({"matrix": torch.ones(4, 3), "scalar": torch.ones(())})
    for kind, of_both in ((Adafactor, 3), (NAdam, 6)):
        optimizer = kind(module.parameters(), lr=0.1)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        state: Any = SimpleNamespace(module=module, optimizers={"": optimizer})
        found = {id(tensor) for tensor in tensors_to_average(state)}
        states = optimizer.state.values()
        left = {name for values in states for name, value in values.items() if id(value) not in found}
        assert left == {"step"}
        assert len(found) == 2 + of_both


@pytest.mark.parametrize("name", ["half", "brain", "halves", "brains"])
def test_compressed_gradients_are_as_simulated(worlds: dict[int, Any], tmp_path: Path, name: str) -> None:
    expected = simulated(OTHER[name], tmp_path, 2, simulated_compression)
    for parameter, value in weights(worlds[2].run(name)).items():
        assert torch.equal(value, expected[parameter]), parameter


def test_a_rank_alone_trains_as_ever(threads: Any) -> None:
    assert threads["apart"]["model_sha256"] == threads["alone"]["model_sha256"]


def test_the_ledger_is_whole(worlds: dict[int, Any], run_processes: Any) -> None:
    for name in ("two-optimizers", "rounded-up"):
        worlds[2].results()
        done = run_processes.paceline("audit", worlds[2].run(name))
        assert done.returncode == 0, done.stdout
        assert "Clean" in done.stdout


def test_evaluations_and_saves_wait_for_the_round_to_end(worlds: dict[int, Any]) -> None:
    # An epoch has 10 steps, so rounds end after 4, 8, 10, 14 and 17, the last.
    assert "error" not in worlds[2]["rounded-up"]
    assert [record["step"] for record in worlds[2].records("rounded-up", "eval")] == [4, 8, 10, 14, 17]
    events = map(json.loads, (worlds[2].run("rounded-up") / "events.jsonl").read_text().splitlines())
    saved = {event["step"] for event in events if event["event"] == "checkpoint"}
    assert {8, 10, 17} <= saved <= {4, 8, 10, 14, 17}  # and after the best evaluations


def test_streams_are_refused(worlds: dict[int, Any]) -> None:
    assert "--local-sgd-steps needs a dataset with a length" in worlds[2]["stream"]["message"]


@pytest.mark.parametrize(
    ("name", "like", "nearness"),
    [("half", "fast", 2e-3), ("brain", "fast", 2e-2), ("powersgd", "long", 5e-2)],
)
def test_what_is_compressed_is_near(worlds: dict[int, Any], name: str, like: str, nearness: float) -> None:
    assert "error" not in worlds[2][name], worlds[2][name]
    plain = weights(worlds[2].run(like))
    for parameter, value in weights(worlds[2].run(name)).items():
        torch.testing.assert_close(value, plain[parameter], rtol=nearness, atol=nearness)
        assert not torch.equal(value, plain[parameter])


def test_powersgd_learns_from_what_it_left_out(worlds: dict[int, Any]) -> None:
    loss, plain = (worlds[2].records(name, "train")[-1]["loss"] for name in ("powersgd-1", "long"))
    assert loss < 1.1 * plain


def test_a_scaler_decides_once_under_a_hook(worlds: dict[int, Any]) -> None:
    halves = worlds[2]["halves"]
    assert "error" not in halves, halves
    assert newest(worlds[2].run("halves"))["scaler"]["scale"] < 2.0**13


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", DP)
def test_threads_compute_the_bits_of_one_process(threads: Any, name: str, devices: int) -> None:
    alone, several = threads[f"{name}-1"], threads[f"{name}-{devices}"]
    assert "error" not in several, several
    assert several["strategy"] == "dp"
    for what in ("model_sha256", "metrics", "steps", "samples", "best_step"):
        assert several[what] == alone[what], what


def test_a_run_goes_on_as_it_was_created(worlds: dict[int, Any]) -> None:
    two = worlds[2]
    assert two["stopped"]["error"] == "StopRequested"
    assert two["continued"]["steps"] == 12
    assert two["continued"]["model_sha256"] == two["whole"]["model_sha256"]


def test_a_run_goes_on_under_another_strategy(worlds: dict[int, Any], start_trainings: Any) -> None:
    # Eight losses on rank 0: in the second step of the second round of two.
    assert worlds[2]["moved"]["error"] == "StopRequested"
    run = worlds[2].run("moved")
    state = newest(run)
    assert state["progress"]["step"] == 4
    assert state["outer"]["state"]
    options = {"run_dir": str(run), "local_sgd_steps": 0, "outer_optimizer": "none", "max_steps": 12}
    assert start_trainings({"job": {"task": "Normed", "options": options}})["job"]["steps"] == 12


def test_what_powersgd_left_out_is_in_the_checkpoint(worlds: dict[int, Any]) -> None:
    two = worlds[2]
    assert two["compressed-stopped"]["error"] == "StopRequested"
    assert two["compressed-continued"]["steps"] == 24
    assert two["compressed-continued"]["model_sha256"] == two["compressed"]["model_sha256"]


def test_what_powersgd_left_out_is_shared_by_other_ranks(worlds: dict[int, Any], start_trainings: Any) -> None:
    assert worlds[2]["compressed-moved"]["error"] == "StopRequested"
    run = worlds[2].run("compressed-moved")
    before = newest(run)["powersgd"]
    assert before["steps"] > 10
    assert {len(errors) for errors in before["errors"].values()} == {2}
    moved = start_trainings(
        {"job": {"task": "TwoOptimizers", "options": {"max_steps": 24, "run_dir": str(run)}}},
        ranks=3,
    )
    assert moved["job"]["steps"] == 24
    after = newest(run)["powersgd"]
    assert after["steps"] == 24
    assert after["errors"].keys() == before["errors"].keys()
    assert {len(errors) for errors in after["errors"].values()} == {3}


def test_rounds() -> None:
    rounds = SyncSchedule(every=4, steps_per_epoch=10, total_steps=23)
    ends = [
        step
        for step in range(1, 24)
        if rounds.is_sync_step(TrainProgress(step=step, step_in_epoch=(step - 1) % 10 + 1))
    ]
    assert ends == [4, 8, 10, 14, 18, 20, 23]
    assert [rounds.interval_start(TrainProgress(step=end, step_in_epoch=end % 10)) for end in ends] == [
        0,
        *ends[:-1],
    ]
    assert SyncSchedule(1, None, None).interval_start(TrainProgress(step=7, step_in_epoch=0)) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"local_sgd_steps": 4, "strategy": "fsdp"},
            "--local-sgd-steps 4 works with --strategy ddp only, not with fsdp",
        ),
        (
            {"local_sgd_steps": 4, "reduction": "allreduce"},
            "--reduction allreduce does not work with --local-sgd-steps",
        ),
        ({"local_sgd_steps": 4, "ema": 0.9}, "--ema does not work with --local-sgd-steps"),
        ({"local_sgd_steps": 4, "comm_hook": "fp16"}, "with --local-sgd-steps none are sent"),
        ({"outer_optimizer": "nesterov"}, "such as --local-sgd-steps 50"),
        ({"outer_lr": 0.5}, "need --outer-optimizer nesterov"),
        ({"local_sgd_steps": 4, "outer_optimizer": "nesterov", "outer_momentum": 1.0}, "between 0 and 1"),
        ({"comm_hook": "fp16", "reduction": "allreduce"}, "Leave --reduction out"),
        ({"comm_hook": "fp16", "powersgd_rank": 2}, "--powersgd-rank needs --comm-hook powersgd"),
        ({"comm_hook": "powersgd", "precision": "fp16"}, "Use --precision bf16"),
        ({"dp_devices": 2}, "--dp-devices needs --strategy dp"),
        ({"strategy": "dp", "compile": True}, "--compile does not work with --strategy dp"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        RunConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--strategy", "dp", "--nproc", "2"),
            "--strategy dp needs one process for all devices, but there are 2",
        ),
        (("--strategy", "dp", "--dp-devices", "9"), "--dp-devices 9: a step has 4 micro-batches"),
        (("--nproc", "2", "--local-sgd-steps", "4", "--recover", "inplace"), "does not work with --local-sgd-steps 4"),
        (("--nproc", "1", "--comm-hook", "bf16"), "--comm-hook bf16 needs at least two processes"),
    ],
)
def test_bad_input(run_processes: Any, tasks_file: Path, options: tuple[str, ...], message: str) -> None:
    done = run_processes.paceline("train", f"{tasks_file}:Points", "--quiet", *options)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(message) == 1, done.stderr


def simulated(
    job: dict[str, Any], directory: Path, ranks: int, simulate: Any = simulated_model
) -> dict[str, torch.Tensor]:
    """The model of the same training by replicas in one process."""
    config = RunConfig(threads=1, run_dir=str(directory / "run"), **job["options"])
    request = RunRequest(
        worker_config=WorkerConfig(config=config, quiet=True),
        task=task_named(job["task"])(**job.get("fields", {})),
        default_threads=1,
    )
    with preserve_numerics():
        run, _ = setup_run(
            request,
            None,
            RunDirectory(directory / "run"),
            StopSignals(),
            device=torch.device("cpu"),
            world_size=ranks,
            processes=1,
            memory=2**30,
        )
        return dict(simulate(run, ranks))


def weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(newest(run)["model"])
