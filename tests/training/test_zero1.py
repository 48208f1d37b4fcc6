"""A sharded optimizer: the bits of one process, a part of the state on each rank, whole checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.states import newest

from paceline.parallel.zero1 import owners

JOBS: dict[str, dict[str, Any]] = {
    "everything": {
        "task": "Everything",
        "options": {"val_fraction": 0.2, "early_stop": "accuracy:4", "max_steps": 12, "ema": 0.9},
    },
    "two-optimizers": {"task": "TwoOptimizers", "options": {"precision": "bf16", "clip_norm": 0.05}},
    "fp16": {"task": "Overflowing", "options": {"precision": "fp16"}},
    "frozen": {"task": "Frozen", "options": {"sdc_check_every": 2}},
    "state-from-the-start": {"task": "Told", "fields": {"optimizer": "Adagrad"}},
    "told": {"task": "Told", "fields": {"optimizer": "AdamW"}},
}


@pytest.fixture(scope="module")
def worlds(start_trainings: Any) -> dict[int, Any]:
    def jobs(**options: Any) -> dict[str, Any]:
        return {name: {**job, "options": {**job.get("options", {}), **options}} for name, job in JOBS.items()}

    return {
        1: start_trainings(jobs(), ranks=1),
        2: start_trainings(
            {
                **jobs(strategy="zero1"),
                "unsharded": {
                    "task": "Told",
                    "fields": {"optimizer": "Noted"},
                    "options": {"strategy": "zero1"},
                },
                "alias": {"task": "Parts", "fields": {"use": "alias"}, "options": {"strategy": "zero1"}},
            },
            ranks=2,
        ),
        3: start_trainings(jobs(strategy="zero1"), ranks=3),
    }


@pytest.mark.parametrize("name", JOBS)
def test_the_bits_are_those_of_one_process(worlds: dict[int, Any], name: str) -> None:
    for ranks in (2, 3):
        assert worlds[ranks][name].get("strategy") == "zero1", worlds[ranks][name]
        for what in ("model_sha256", "metrics", "steps", "samples", "best_step"):
            assert worlds[ranks][name][what] == worlds[1][name][what], what


@pytest.mark.parametrize("name", ["everything", "two-optimizers", "state-from-the-start"])
def test_a_checkpoint_is_that_of_one_process(worlds: dict[int, Any], name: str) -> None:
    for ranks in (1, 2, 3):
        worlds[ranks].results()
    alone = newest(worlds[1].run(name))["optimizers"]
    for ranks in (2, 3):
        sharded = newest(worlds[ranks].run(name))["optimizers"]
        assert flat(sharded).keys() == flat(alone).keys()
        for key, value in flat(alone).items():
            assert torch.equal(torch.as_tensor(flat(sharded)[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("name", ["told", "state-from-the-start"])
def test_each_rank_keeps_its_part_of_the_state(worlds: dict[int, Any], name: str) -> None:
    of_ranks = {}
    for ranks in (1, 3):
        worlds[ranks].results()
        parts = sorted(worlds[ranks].run(name).glob("numbers-*.json"))
        of_ranks[ranks] = [json.loads(part.read_text()) for part in parts]
    (whole,) = of_ranks[1]
    assert len(of_ranks[3]) == 3
    assert sum(of_ranks[3]) == whole
    assert max(of_ranks[3]) < 0.9 * whole


def test_a_state_that_cannot_be_gathered_is_refused(worlds: dict[int, Any]) -> None:
    refused = worlds[2]["unsharded"]
    assert refused["error"] == "ConfigError"
    assert "keeps a dict as 'notes' of a parameter. Use --strategy ddp." in refused["message"]


def test_parameters_that_share_memory_are_refused(worlds: dict[int, Any]) -> None:
    assert (
        "but the parameter 'scale' and the parameter 'head.bias' share memory. Use one parameter"
        in worlds[2]["alias"]["message"]
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_goes_from_strategy_to_strategy(start_trainings: Any, tmp_path: Path) -> None:
    def train(run: str, ranks: int, stop_at: int = 0, **options: Any) -> dict[str, Any]:
        options |= {"run_dir": str(tmp_path / run), "max_steps": 12, "seed": 3}
        job = {"task": "Everything", "options": options, "stop_at": stop_at}
        return start_trainings({"job": job}, ranks=ranks)["job"]

    whole = train("whole", 1)
    assert train("moved", 2, 20, strategy="zero1")["error"] == "StopRequested"
    assert train("moved", 2, 20, strategy="fsdp")["error"] == "StopRequested"
    assert train("moved", 2, strategy="zero1")["model_sha256"] == whole["model_sha256"]


def test_parameters_are_shared_by_size() -> None:
    assert owners([1, 10, 4, 5, 1], 2) == [1, 0, 1, 1, 0]
    assert owners([3], 4) == [0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nproc", "1"), "--strategy zero1 shards the optimizer's state over processes, but there is only one"),
        (("--nproc", "2", "--reduction", "ddp"), "With --strategy zero1 use exact or allreduce"),
        (("--nproc", "2", "--fsdp-offload"), "--fsdp-offload needs --strategy fsdp"),
    ],
)
def test_bad_input(run_processes: Any, tasks_file: Path, options: tuple[str, ...], message: str) -> None:
    done = run_processes.paceline("train", f"{tasks_file}:Points", "--strategy", "zero1", "--quiet", *options)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(message) == 1


def flat(optimizers: dict[str, Any]) -> dict[tuple[str, str, str], Any]:
    return {
        (name, parameter, key): value
        for name, optimizer in optimizers.items()
        for parameter, values in optimizer["state"].items()
        for key, value in values.items()
    }
