"""One model, whatever the number of processes: runs on 1 to 4 ranks, looked at from all sides.

The same jobs run on one, two and four ranks at the same time; three are the command line's.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.task_loading import load_task_class
from paceline.runs.checkpoint_store import newest_verified
from paceline.runs.checkpointer import load

# Cold, as the processes of users are: forks of one process share the seed of their hashes.
pytestmark = [pytest.mark.matrix, pytest.mark.cold]

WORLDS = (1, 2, 4)
EXACT: dict[str, dict[str, Any]] = {
    # Carved validation, plateau schedule, early stop, clipping, moving average; dropout, batch norm, AdamW.
    "everything": {
        "task": "Everything",
        "options": {
            "val_fraction": 0.2,
            "clip_norm": 0.5,
            "ema": 0.9,
            "early_stop": "accuracy:4",
            "seed": 3,
            "log_every": 1,
        },
    },
    "verified": {
        "task": "Everything",
        "options": {"val_fraction": 0.2, "clip_norm": 0.5, "ema": 0.9, "early_stop": "accuracy:4", "seed": 3}
        | {"sdc_check_every": 2},
    },
    "two-optimizers": {
        "task": "TwoOptimizers",
        "fields": {"num_val": 21},
        "options": {"precision": "bf16", "log_every": 1},
    },
    "fp16": {"task": "Overflowing", "options": {"precision": "fp16", "log_every": 1}},
    "fp16-few-samples": {"task": "Overflowing", "fields": {"num": 8}, "options": {"precision": "fp16"}},
    "metrics": {"task": "ManyMetrics"},
    "iterable": {"task": "Iterable", "options": {"log_every": 1}},
    "uneven-stream": {"task": "Uneven", "options": {"log_every": 1}},
    "hugging-face": {"task": "HuggingFace"},
    "blocks": {"task": "Points", "options": {"shuffle": "window:8"}},
    "sparse": {"task": "SparseWords"},
    "sparse-lookup": {"task": "HashedWords"},
    "sparse-adam": {"task": "SparseWords", "fields": {"adam": True}},
    "annealed": {"task": "Annealed"},
    "momentum-encoder": {"task": "MomentumEncoder"},
    "complex": {"task": "Spectrum", "options": {"ema": 0.9, "clip_norm": 0.5}},
    "random": {"task": "Random", "options": {"log_every": 1}},
    **{f"{width}-features": {"task": "Tabular", "fields": {"width": width}} for width in (5, 13, 32, 33)},
}
NOT_ON_FOUR = (
    "hugging-face",
    "fp16-few-samples",
    "metrics",
    "blocks",
    "sparse-adam",
    "sparse-lookup",
    "5-features",
    "32-features",
)
"""Four ranks on two cores take longest, and these have a relative that trains there."""
RESUMED = ("everything", "sparse-adam", "annealed", "momentum-encoder", "complex", "random", "hugging-face")
# In the second step; in the second epoch where the order of the epoch is the dataset's own.
STOPPED = {f"{name}-stopped": {**EXACT[name], "stop_at": 34 if name == "hugging-face" else 6} for name in RESUMED}
CONTINUED = {
    f"{name}-continued": {**EXACT[name], "options": {**EXACT[name].get("options", {}), "run_dir": f"{name}-stopped"}}
    for name in RESUMED
}
WORKERS: dict[str, dict[str, Any]] = {
    f"{workers}-workers": {"task": "FromRecords", "options": {"num_workers": workers, "epochs": 1}}
    for workers in (0, 1)
} | {"verified-records": {"task": "FromRecords", "options": {"num_workers": 1, "epochs": 1, "sdc_check_every": 1}}}
# Parameters, gradients and messages lie elsewhere in memory there, and kernels may choose their code by that.
ELSEWHERE: dict[str, dict[str, Any]] = {
    f"{width}-features-{strategy}": {
        "task": "Tabular",
        "fields": {"width": width},
        "options": {"strategy": strategy},
    }
    for width in (5, 13, 33)
    for strategy in ("fsdp", "zero1", "pp")
}
OTHER: dict[str, dict[str, Any]] = {
    f"{reduction}-{task.lower()}": {"task": task, "options": {"reduction": reduction}, "fields": fields}
    for reduction in ("exact", "allreduce", "ddp")
    for task, fields in (("TwoOptimizers", {"num_val": 21}), ("Uneven", {"num_val": 20}))
} | {
    # Its last batch has samples for half of the ranks only.
    "torch-fp16": {
        "task": "Overflowing",
        "fields": {"num": 36},
        "options": {"reduction": "ddp", "precision": "fp16"},
    },
    "fast-verified": {
        "task": "TwoOptimizers",
        "options": {"reduction": "allreduce", "sdc_check_every": 1},
        "fields": {"num_val": 21},
    },
    "verified-torch": {"task": "Points", "options": {"reduction": "ddp", "sdc_check_every": 1}},
    "verified-stream": {"task": "Uneven", "options": {"sdc_check_every": 1}},
    "single": {"task": "Points", "options": {"strategy": "single"}},
    "too-few-microbatches": {"task": "Points", "options": {"microbatches": 3}},
}


@pytest.fixture(scope="module")
def by_world(start_trainings: Any) -> dict[int, Any]:
    """Who trained what, by number of ranks; all have ended."""
    more = {1: WORKERS | STOPPED | CONTINUED, 2: WORKERS | ELSEWHERE, 4: OTHER}
    jobs = {1: EXACT, 2: EXACT, 4: {name: job for name, job in EXACT.items() if name not in NOT_ON_FOUR}}
    started = {ranks: start_trainings(jobs[ranks] | more[ranks], ranks=ranks) for ranks in WORLDS}
    for trainings in started.values():
        trainings.results()
    return started


@pytest.mark.parametrize("name", EXACT)
def test_every_number_of_processes_gives_the_same_bits(by_world: dict[int, Any], name: str) -> None:
    worlds = WORLDS[:2] if name in NOT_ON_FOUR else WORLDS
    results = [by_world[ranks][name] for ranks in worlds]
    assert [r["world_size"] for r in results] == list(worlds)
    for key in ("model_sha256", "steps", "epochs", "samples", "state_version", "best_step", "metrics"):
        assert len({json.dumps(r[key]) for r in results}) == 1, f"{key}: {[r[key] for r in results]}"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_every_strategy_gives_the_same_bits_for_features_of_any_width(by_world: dict[int, Any], name: str) -> None:
    alone = name.rpartition("-")[0]
    assert by_world[2][name]["model_sha256"] == by_world[1][alone]["model_sha256"]


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_was_stopped_and_resumed_has_the_same_bits(by_world: dict[int, Any], name: str) -> None:
    assert by_world[1][f"{name}-stopped"]["error"] == "StopRequested"
    assert by_world[1][f"{name}-continued"]["model_sha256"] == by_world[1][name]["model_sha256"]
    rates = [
        [(record["step"], record["lr"]) for record in by_world[1].records(job, "train")]
        for job in (name, f"{name}-stopped")
    ]
    assert rates[0] == rates[1]


@pytest.mark.parametrize("name", ["everything", "two-optimizers", "fp16", "iterable", "uneven-stream"])
def test_every_number_of_processes_logs_the_same_curves(by_world: dict[int, Any], name: str) -> None:
    def curve(ranks: int) -> list[Any]:
        by_world[ranks].results()
        train = [(r["step"], r["loss"], r["lr"]) for r in by_world[ranks].records(name, "train")]
        return train + [(r["step"], r["metrics"]) for r in by_world[ranks].records(name, "eval")]

    curves = [curve(ranks) for ranks in WORLDS]
    assert len(curves[0]) > 3
    assert all(other == curves[0] for other in curves[1:])


@pytest.mark.slow
def test_the_command_line_gives_the_same_bits(by_world: dict[int, Any], tasks_file: Path, run_processes: Any) -> None:
    options = [
        *("--val-fraction", "0.2", "--clip-norm", "0.5", "--ema", "0.9", "--early-stop", "accuracy:4"),
        *("--seed", "3", "--nproc", "3", "--threads", "1", "--json", "--quiet", "--run-dir", "run"),
    ]
    finished = run_processes.paceline("train", f"{tasks_file}:Everything", *options)
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout.splitlines()[-1])
    assert (result["world_size"], result["strategy"]) == (3, "ddp")
    assert result["model_sha256"] == by_world[1]["everything"]["model_sha256"]


def test_features_of_the_run_took_part(by_world: dict[int, Any]) -> None:
    result, trainings = by_world[1]["everything"], by_world[1]
    rates = [record["lr"] for record in trainings.records("everything", "train")]
    evaluations = trainings.records("everything", "eval")
    assert result["epochs"] == len(evaluations) < 40, "early stopping ended the run"
    assert result["steps"] == 5 * result["epochs"], "200 samples, 48 at a time: a short last batch"
    assert result["samples"] == 200 * result["epochs"]
    assert rates[0] == 0.02
    assert rates[-1] < 0.02, "the plateau schedule lowered the rate"
    state = load(newest_verified(trainings.run("everything") / "checkpoints").path).state
    assert state["model"].keys() < {key.removeprefix("module.") for key in state["ema"]}
    assert int(state["ema"]["n_averaged"]) == result["steps"]
    assert not torch.equal(state["model"]["6.weight"], state["ema"]["module.6.weight"])


def test_verification_changes_no_bit(by_world: dict[int, Any]) -> None:
    assert by_world[2]["verified"]["model_sha256"] == by_world[2]["everything"]["model_sha256"]
    assert by_world[4]["fast-verified"]["model_sha256"] == by_world[4]["allreduce-twooptimizers"]["model_sha256"]


def test_verification_is_refused_where_bits_may_differ(by_world: dict[int, Any]) -> None:
    trainings = by_world[4]
    assert "--sdc-check-every needs --reduction exact or allreduce" in trainings["verified-torch"]["message"]
    assert "--sdc-check-every needs a map-style dataset" in trainings["verified-stream"]["message"]


def test_a_counter_rises_by_one_a_step_and_both_optimizers_and_schedules_move(
    by_world: dict[int, Any],
) -> None:
    trainings, result = by_world[1], by_world[1]["two-optimizers"]
    state = load(newest_verified(trainings.run("two-optimizers") / "checkpoints").path).state
    assert int(state["model"]["seen"]) == result["steps"] == 10
    assert int(state["model"]["body.1.num_batches_tracked"]) == 10
    assert state["optimizers"].keys() == state["schedulers"].keys() == {"body", "head"}
    last = trainings.records("two-optimizers", "train")[-1]["learning_rates"]
    assert last == pytest.approx([0.2 / 11, 0.02 / 11]), "those of the tenth step, not of an eleventh"


def test_an_overflow_skips_the_step_and_its_schedule_and_lowers_the_scale(by_world: dict[int, Any]) -> None:
    trainings = by_world[4]
    result = trainings["fp16"]
    rates = [record["lr"] for record in trainings.records("fp16", "train")]
    state = load(newest_verified(trainings.run("fp16") / "checkpoints").path).state
    skipped = 6 - state["schedulers"]["main"]["last_epoch"]
    assert 0 < skipped < result["steps"] == 6
    assert rates[0] == 0.1
    assert sum(a == b for a, b in itertools.pairwise(rates)) == skipped, "all of them before the last step"
    assert rates[-1] == pytest.approx(0.1 * 0.5 ** (5 - skipped))
    assert state["scaler"]["scale"] == 2.0 ** (16 - 3 - skipped)
    assert result["state_version"] == 6 + 3 + 3, "a skipped step is a transition, too"


def test_metrics_are_those_of_the_whole_split(by_world: dict[int, Any], tasks_file: Path) -> None:
    trainings, result = by_world[2], by_world[2]["metrics"]
    task = load_task_class(f"{tasks_file}:ManyMetrics")()
    classes = sys.modules[type(task).__module__].CLASSES
    assert result["best_step"] == result["steps"], "else the checkpoint is not the model that was evaluated"
    model = task.build_model()
    model.load_state_dict(load(newest_verified(trainings.run("metrics") / "checkpoints").path).state["model"])
    for split in ("val", "test"):
        features, labels = task.build_dataset(split).tensors
        with torch.no_grad():
            logits = model(features)
        scores, guesses, positive = logits.softmax(1)[:, 0], logits.argmax(1), labels == 0
        pairs = [(s > t) + 0.5 * (s == t) for s in scores[positive] for t in scores[~positive]]
        f1 = []
        for c in range(classes):
            hits = ((guesses == c) & (labels == c)).sum()
            f1.append(2 * hits / max(1, int((guesses == c).sum() + (labels == c).sum())))
        expected = {
            "accuracy": (guesses == labels).double().mean(),
            "recall": ((scores > 0.4) & positive).sum() / positive.sum(),
            "loss": torch.nn.functional.cross_entropy(logits, labels),
            "auroc": torch.stack(pairs).mean(),
            "f1": torch.stack(f1).mean(),
            "mean": scores.mean(),
        }
        assert result["metrics"][split] == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-5)


def test_streams_end_when_all_microbatches_are_exhausted(by_world: dict[int, Any]) -> None:
    result = by_world[2]["iterable"]
    # 75 items over 4 micro-batches, 4 at a time: none is left out, though 19 are no multiple of 4.
    assert (result["epochs"], result["samples"]) == (2, 150)
    result = by_world[2]["uneven-stream"]
    # Micro-batches of 10, 20, 30 and 40 samples, 4 at a time.
    assert (result["epochs"], result["steps"], result["samples"]) == (2, 20, 200)


@pytest.mark.parametrize("task", ["twooptimizers", "uneven"])
@pytest.mark.parametrize("reduction", ["allreduce", "ddp"])
def test_other_reductions_agree_within_rounding(by_world: dict[int, Any], reduction: str, task: str) -> None:
    exact, other = (by_world[4][f"{name}-{task}"] for name in ("exact", reduction))
    assert other["reduction"] == reduction
    assert (other["steps"], other["samples"]) == (exact["steps"], exact["samples"])
    assert other["metrics"]["val"]["loss"] == pytest.approx(exact["metrics"]["val"]["loss"], rel=1e-4)


def test_ranks_without_a_microbatch_do_not_hang_under_torch(by_world: dict[int, Any]) -> None:
    result = by_world[4]["torch-fp16"]
    assert (result["steps"], result["samples"]) == (6, 3 * 36)


def test_what_cannot_run_on_several_processes_is_refused(by_world: dict[int, Any]) -> None:
    assert by_world[4]["single"]["error"] == "ConfigError"
    assert "--strategy single needs one process, but there are 4" in by_world[4]["single"]["message"]
    assert by_world[4]["too-few-microbatches"]["error"] == "ConfigError"
    assert "4 processes cannot share 3 micro-batches" in by_world[4]["too-few-microbatches"]["message"]


def test_worker_processes_do_not_change_the_bits(by_world: dict[int, Any]) -> None:
    assert len({by_world[ranks][name]["model_sha256"] for ranks in (1, 2) for name in WORKERS}) == 1


@pytest.mark.slow
def test_a_compiled_model_has_the_same_bits_on_any_number_of_processes(start_trainings: Any) -> None:
    job = {"compiled": {"task": "TwoOptimizers", "options": {"compile": True, "max_steps": 3}}}
    started = [start_trainings(job, ranks=ranks) for ranks in (1, 3)]
    assert len({trainings["compiled"]["model_sha256"] for trainings in started}) == 1
