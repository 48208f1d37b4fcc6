"""What a run does from its first step to its result: one list of jobs, looked at from all sides."""

from __future__ import annotations

import gzip
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

WORSE = {"best_metric": "score:max", "early_stop": "score:3", "epochs": 8}
EVERYTHING = {"val_fraction": 0.2, "clip_norm": 0.5, "ema": 0.9, "early_stop": "loss:2", "seed": 3}
# name -> the job that is run at once, and the number of the loss in whose midst the other one is stopped.
INTERRUPTED: dict[str, tuple[dict[str, Any], int]] = {
    "everything": ({"task": "Everything", "options": EVERYTHING}, 100),
    "overflow": ({"task": "Overflowing", "options": {"precision": "fp16"}}, 10),
    "two-optimizers": ({"task": "TwoOptimizers", "fields": {"num_val": 9}}, 8),
    "stream": ({"task": "Iterable"}, 7),
    "stream-at-the-end-of-an-epoch": ({"task": "Uneven", "fields": {"num_val": 9}}, 24),
    # In the last step of the first epoch, before its evaluation finds the best model of all.
    "best-at-the-end-of-an-epoch": ({"task": "WorseAndWorse", "options": {**WORSE, "keep_checkpoints": 1}}, 25),
}
JOBS: dict[str, dict[str, Any]] = {
    "logged": {
        "task": "Points",
        "fields": {"lr": 0.05, "num_val": 10, "num_test": 12},
        "options": {
            "log_every": 5,
            "seed": 9,
            "checkpoint_every": "3steps",
            "keep_checkpoints": 2,
            "best_metric": "accuracy:max",
        },
    },
    "few-steps": {"task": "Points", "options": {"max_steps": 3, "checkpoint_every": "never"}},
    "saved-by-the-clock": {"task": "Points", "options": {"checkpoint_every": ["0.000001s"], "keep_checkpoints": 100}},
    "evaluated-every-4-steps": {
        "task": "Points",
        "fields": {"num_val": 5},
        "options": {"eval_every": "4steps"},
    },
    "evaluated-every-2-epochs": {
        "task": "Points",
        "fields": {"num_val": 5},
        "options": {"eval_every": "2epochs", "epochs": 3},
    },
    "never-evaluated": {
        "task": "Points",
        "fields": {"num_val": 5, "num_test": 5},
        "options": {"eval_every": "never"},
    },
    "profiled": {"task": "Points", "options": {"profile": 3}},
}
for name, (job, stop_at) in INTERRUPTED.items():
    JOBS[name] = job
    here = {**job, "options": {**job.get("options", {}), "run_dir": f"{name}-in-two-parts"}}
    JOBS[f"{name}-stopped"] = {**here, "stop_at": stop_at}
    JOBS[f"{name}-continued"] = here

FINISHED = {"run_dir": "few-steps", "max_steps": 3}
# name -> a job that is refused, the error, and what its message says.
REFUSED: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "unknown-option": (
        {"task": "Points", "options": {"global_batchsize": 8}},
        "ConfigError",
        ["no option 'global_batchsize'", "Did you mean global_batch_size"],
    ),
    "set": ({"task": "Points", "options": {"set": ["lr=1"]}}, "ConfigError", ["Task(lr=0.1)"]),
    "unknown-best": (
        {"task": "Points", "fields": {"num_val": 5}, "options": {"best_metric": "f1:max"}},
        "ConfigError",
        ["--best-metric: there is no metric 'f1'", "accuracy, loss"],
    ),
    "unknown-early-stop": (
        {"task": "Points", "fields": {"num_val": 5}, "options": {"early_stop": "f1:2"}},
        "ConfigError",
        ["--early-stop: there is no metric 'f1'"],
    ),
    "nothing-to-stop-early-by": (
        {"task": "Points", "options": {"early_stop": "loss:2"}},
        "ConfigError",
        ["--early-stop needs a validation split", "--val-fraction"],
    ),
    "two-validation-splits": (
        {"task": "Points", "fields": {"num_val": 5}, "options": {"val_fraction": 0.1}},
        "ConfigError",
        ["has its own validation split"],
    ),
    "carved-stream": (
        {"task": "Iterable", "options": {"val_fraction": 0.1}},
        "ConfigError",
        ["--val-fraction needs a dataset with a length"],
    ),
    "gradient-that-no-scale-makes-finite": (
        {"task": "NaNGradient", "options": {"precision": "fp16", "epochs": 20}},
        "NonFiniteLossError",
        [
            "the gradient of step 28 (epoch 14, step 2 in it) is NaN or infinite, though its loss is",
            "at each scale of --precision fp16 down to 6.10352e-05",
            "start a new run",
        ],
    ),
    "empty-stream": ({"task": "Iterable", "fields": {"num": 0}}, "DataError", ["must not be empty"]),
    "small-batch": (
        {"task": "Points", "options": {"global_batch_size": 7}},
        "ConfigError",
        ["--global-batch-size 7 is too small for 4 micro-batches"],
    ),
    "another-task": (
        {"task": "TwoOptimizers", "options": FINISHED},
        "RunDirectoryError",
        ["few-steps is a run of tests.training.tasks:Points, not of tests.training.tasks:TwoOptimizers"],
    ),
    "other-hyperparameters": (
        {"task": "Points", "fields": {"lr": 3.0}, "options": FINISHED},
        "RunDirectoryError",
        ["lr: 0.1 when the run was created, 3.0 now"],
    ),
    "another-seed": (
        {"task": "Points", "options": {**FINISHED, "seed": 4}},
        "ConfigError",
        ["--seed: 0 when the run was created, 4 now"],
    ),
    "resume-never": (
        {"task": "Points", "options": {**FINISHED, "resume": "never"}},
        "RunDirectoryError",
        ["--resume never: few-steps holds a run already"],
    ),
    "resume-must": (
        {"task": "Points", "options": {"resume": "must"}},
        "RunDirectoryError",
        ["--resume must: resume-must holds no run"],
    ),
}
AGAIN = {"finished-again": {"task": "Points", "options": {**FINISHED, "num_workers": 0}}}


@pytest.fixture(scope="module")
def trained(start_trainings: Any) -> Any:
    """All jobs, trained one after the other."""
    trainings = start_trainings(JOBS | {name: job for name, (job, *_) in REFUSED.items()} | AGAIN)
    trainings.results()
    return trainings


def steps_of(checkpoints: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in checkpoints.glob("step-*"))


def events(run: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", INTERRUPTED)
def test_a_run_in_two_parts_ends_with_the_same_bits(trained: Any, name: str) -> None:
    whole, stopped, continued = (trained[name + suffix] for suffix in ("", "-stopped", "-continued"))
    assert stopped["error"] == "StopRequested"
    assert "everything is saved" in stopped["message"]
    assert continued["restarts"] == 1
    for key in ("model_sha256", "steps", "epochs", "samples", "state_version", "best_step", "metrics"):
        assert continued[key] == whole[key], key
    run = trained.run(f"{name}-in-two-parts")
    assert [e for e in events(run) if e != "checkpoint"] == [
        *("created", "started", "stopped"),
        *("started", "finished"),
    ]


def test_a_stopped_run_stands_where_it_was_stopped(trained: Any) -> None:
    # 100 samples, 16 at a time, over 4 micro-batches: the 25th loss is in the seventh step, which ends the epoch.
    assert "stopped after step 7" in trained["best-at-the-end-of-an-epoch-stopped"]["message"]
    assert "stopped after step 2" in trained["stream-stopped"]["message"]


def test_early_stopping_ends_the_run_and_the_best_model_is_tested(trained: Any) -> None:
    result = trained["best-at-the-end-of-an-epoch"]
    assert result["epochs"] == 4, "the best evaluation, and three that were no better"
    assert result["best_step"] == 7
    # The score is minus the number of steps that the model has seen.
    assert result["metrics"]["val"]["score"] == result["metrics"]["test"]["score"] == -7.0
    assert steps_of(trained.run("best-at-the-end-of-an-epoch") / "checkpoints") == [7, 28], "best and last"


def test_a_metric_that_is_not_a_number_is_null_in_the_result(trained: Any) -> None:
    assert trained["best-at-the-end-of-an-epoch"]["metrics"]["val"]["undefined"] is None
    text = (trained.run("best-at-the-end-of-an-epoch") / "result.json").read_text()
    assert "NaN" not in text


def test_checkpoints_are_those_that_were_asked_for(trained: Any) -> None:
    found = {
        name: steps_of(trained.run(name) / "checkpoints") for name in ("logged", "few-steps", "saved-by-the-clock")
    }
    assert found["few-steps"] == [3], "only the end"
    assert found["saved-by-the-clock"] == list(range(1, 15)), "every microsecond is every step"
    # Every three steps and at the end; the last two stay, and the best.
    assert found["logged"] == sorted({12, 14, trained["logged"]["best_step"]})


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("evaluated-every-4-steps", [4, 8, 12, 14]),
        ("evaluated-every-2-epochs", [14, 21]),
        ("logged", [7, 14]),
        ("never-evaluated", []),
    ],
)
def test_evaluations_are_at_their_steps_and_at_the_end(trained: Any, name: str, steps: list[int]) -> None:
    records = [r for r in trained.records(name, "eval") if r["split"] == "val"]
    assert [record["step"] for record in records] == steps
    assert ("val" in trained[name]["metrics"]) == bool(steps)


def test_without_validation_the_last_model_is_tested(trained: Any) -> None:
    result = trained["never-evaluated"]
    assert result["metrics"].keys() == {"test"}
    assert result["metrics"]["test"].keys() == {"accuracy", "loss"}
    assert result["best_step"] is None


def test_result_json_says_it_all(trained: Any) -> None:
    result = trained["logged"]
    assert json.loads((trained.run("logged") / "result.json").read_text()) == {
        key: value for key, value in result.items() if key != "job"
    }
    expected = {
        "task": "tests.training.tasks:Points",
        "strategy": "single",
        "reduction": "exact",
        "world_size": 1,
        "microbatches": 4,
        "global_batch_size": 16,
        "seed": 9,
        "steps": 14,
        "epochs": 2,
        "samples": 200,
        "restarts": 0,
        "threads": 1,
        "device": "cpu",
    }
    assert {key: result[key] for key in expected} == expected
    assert len(result["model_sha256"]) == 64
    assert result["seconds"] > 0
    assert result["samples_per_s"] > 0
    assert result["metrics"].keys() == {"val", "test"}
    assert result["torch"].startswith("2.")


def test_metrics_jsonl_holds_the_curves(trained: Any) -> None:
    train, evaluations = trained.records("logged", "train"), trained.records("logged", "eval")
    assert [record["step"] for record in train] == [5, 10, 14]
    assert [record["epoch"] for record in train] == [0, 1, 1]
    assert all(record["lr"] == 0.05 and record["loss"] > 0 for record in train)
    assert [(r["step"], r["epoch"], r["split"]) for r in evaluations] == [
        *((7, 0, "val"), (14, 1, "val")),
        (14, 1, "test"),
    ]
    assert evaluations[-1]["metrics"] == trained["logged"]["metrics"]["test"]


def test_tensorboard_holds_the_same_scalars(trained: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained.run("logged") / "tensorboard"))
    events.Reload()
    for tag, records in (
        ("train/loss", [(r["step"], r["loss"]) for r in trained.records("logged", "train")]),
        ("train/lr", [(5, 0.05), (10, 0.05), (14, 0.05)]),
        (
            "eval/val/accuracy",
            [(r["step"], r["metrics"]["accuracy"]) for r in trained.records("logged", "eval") if r["split"] == "val"],
        ),
    ):
        found = [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]
        assert records == found, tag


def test_run_toml_has_nothing_left_open(trained: Any) -> None:
    manifest = tomllib.loads((trained.run("logged") / "run.toml").read_text())
    assert manifest["task"] == {
        "spec": "tests.training.tasks:Points",
        "name": "Points",
        "fields": {"lr": 0.05, "num": 100, "num_val": 10, "num_test": 12},
    }
    config = manifest["config"]
    assert (config["microbatches"], config["global_batch_size"], config["epochs"]) == (4, 16, 2)
    assert (config["best_metric"], config["seed"]) == ("accuracy:max", 9)
    assert manifest["data"] == {"train_samples": 100, "steps_per_epoch": 7, "total_steps": 14}
    assert manifest["pins"]["threads"] == 1


def test_max_steps_ends_in_the_middle_of_an_epoch(trained: Any) -> None:
    result = trained["few-steps"]
    assert (result["steps"], result["epochs"], result["samples"]) == (3, 0, 48)


def test_a_finished_run_is_not_trained_again(trained: Any) -> None:
    assert {**trained["finished-again"], "job": 0} == {**trained["few-steps"], "job": 0}
    assert events(trained.run("few-steps")).count("started") == 1


def test_profile_writes_a_trace_and_where_the_time_went(trained: Any) -> None:
    folder = trained.run("profiled") / "profile"
    phases = json.loads((folder / "rank-0.phases.json").read_text())
    assert (phases["first_step"], phases["steps"]) == (6, 3)
    assert {"data", "forward", "backward", "optimizer"} <= phases["phases"].keys()
    assert sum(phase["share"] for phase in phases["phases"].values()) == pytest.approx(1)
    trace = json.loads(gzip.decompress((folder / "rank-0.trace.json.gz").read_bytes()))
    assert any("linear" in str(event.get("name")) for event in trace["traceEvents"])
    assert "aten::" in (folder / "rank-0.operators.txt").read_text()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_with_a_reason(trained: Any, name: str) -> None:
    _, error, words = REFUSED[name]
    assert trained[name]["error"] == error, trained[name]
    assert [word for word in words if word not in trained[name]["message"]] == [], trained[name]["message"]


def test_a_run_can_be_repeated_from_its_run_toml(
    trained: Any, run_processes: Any, tests_importable: dict[str, str]
) -> None:
    config = trained.run("logged") / "run.toml"
    arguments = ["train", "--config", config, "--run-dir", "again", "--json", "--quiet"]
    finished = run_processes.paceline(*arguments, env=tests_importable)
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout.splitlines()[-1])
    assert result["run"] == "again"
    assert result["model_sha256"] == trained["logged"]["model_sha256"]
    shown = run_processes.paceline(*arguments, "--seed", "2", "--max-steps", "4", "--dry-run", env=tests_importable)
    assert "seed = 2" in shown.stdout
    assert "max_steps = 4" in shown.stdout
    assert "epochs" not in shown.stdout
