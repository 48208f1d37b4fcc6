"""PipeDream: the bits of its simulation in one process, whatever comes in between steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline_more_strategies.asynchronous import Staleness
from paceline_more_strategies.pipedream import (
    PipeDreamAction,
    begins,
    forwards_ahead,
    step_actions,
)

JOBS: dict[str, dict[str, Any]] = {
    # Dropout behind the cut, batch norm, AdamW, a plateau schedule, evaluations and saves in between.
    "everything": {
        "task": "Everything",
        "options": {
            "val_fraction": 0.2,
            "max_steps": 30,
            "eval_every": "7steps",
            "checkpoint_every": ("10steps",),
        },
    },
    # A short last batch, of fewer micro-batches.
    "short": {
        "task": "Points",
        "fields": {"num": 107},
        "options": {"global_batch_size": 24, "microbatches": 5},
    },
    "plain": {"task": "Points", "fields": {"num_val": 20}, "options": {"best_metric": "accuracy:max"}},
    "bf16": {"task": "Points", "options": {"precision": "bf16", "reduction": "allreduce"}},
    "layered": {"task": "Layered"},
}
OTHER: dict[str, dict[str, Any]] = {
    "stream": {"task": "Iterable"},
    "stopped": {"task": "Points", "options": {"max_steps": 12, "run_dir": "again"}, "stop_at": 14},
    "continued": {"task": "Points", "options": {"max_steps": 12, "run_dir": "again"}},
}
SIZES = {
    "everything": (3, [1, 1, 1]),
    "short": (2, [1, 1]),
    "plain": (2, [1, 1]),
    "bf16": (2, [1, 1]),
    "layered": (2, [2, 3]),
}


@pytest.fixture(scope="module")
def pipelines(start_trainings: Any) -> dict[str, dict[str, Any]]:
    """Each job as a pipeline, and simulated by one process."""
    found: dict[str, dict[str, Any]] = {name: {} for name in JOBS}
    started = {}
    for ranks in (2, 3):
        jobs = {name: piped(JOBS[name]) for name in JOBS if SIZES[name][0] == ranks}
        if ranks == 2:
            jobs |= {name: piped(job) for name, job in OTHER.items()}
        started[ranks] = start_trainings(jobs, ranks=ranks)
    alone = start_trainings({name: {**JOBS[name], "pipedream": SIZES[name][1]} for name in JOBS})
    for name in JOBS:
        found[name] = {"pipeline": started[SIZES[name][0]], "alone": alone}
    return found


def piped(job: dict[str, Any]) -> dict[str, Any]:
    """The job, as a pipeline whose stages have equal numbers of blocks: its bits must not depend on measured times."""
    options = {"strategy": "pp", "pp_schedule": "pipedream"}
    return {**job, "options": {**job.get("options", {}), **options}}


@pytest.mark.parametrize("name", JOBS)
def test_the_bits_are_those_of_its_simulation(pipelines: dict[str, Any], name: str) -> None:
    piped, alone = (pipelines[name][how][name] for how in ("pipeline", "alone"))
    assert "error" not in piped, piped
    for what in ("model_sha256", "metrics", "steps", "samples", "staleness_mean", "staleness_max"):
        assert piped[what] == alone[what], what
    assert piped["staleness_max"] == 1
    assert 0 < piped["staleness_mean"] < 0.5


@pytest.mark.slow
def test_copies_of_a_pipeline_share_the_microbatches(start_trainings: Any) -> None:
    """Two copies of two stages, each with half of the micro-batches."""
    job = piped({"task": "Everything", "options": {"max_steps": 12}})
    job["options"] = {**job["options"], "strategy": "auto", "mesh": "pp=2,dp=2"}
    on_four = start_trainings({"job": job}, ranks=4)["job"]
    assert "error" not in on_four, on_four
    assert (on_four["steps"], on_four["staleness_max"]) == (12, 1)


@pytest.mark.parametrize("run", ["short", "again"])
def test_no_sample_is_lost_or_seen_twice(pipelines: dict[str, Any], run_processes: Any, run: str) -> None:
    on_two = pipelines["short"]["pipeline"]
    on_two.results()
    done = run_processes.paceline("audit", on_two.run(run))
    assert done.returncode == 0, done.stdout


def test_it_stops_between_two_steps_and_goes_on(pipelines: dict[str, Any]) -> None:
    on_two = pipelines["short"]["pipeline"]
    assert on_two["stopped"]["error"] == "StopRequested"
    assert (on_two["continued"]["steps"], on_two["continued"]["restarts"]) == (12, 1)


def test_a_stream_is_refused(pipelines: dict[str, Any]) -> None:
    refused = pipelines["short"]["pipeline"]["stream"]
    assert refused["error"] == "ConfigError"
    assert "reads one step ahead, which a stream cannot" in refused["message"]


def test_a_stage_is_never_idle_at_a_steps_end() -> None:
    """Two stages, three micro-batches a step: the first one runs one forward ahead, of the next step at last."""

    def forwards(*positions: int) -> list[PipeDreamAction]:
        return [PipeDreamAction("F", position) for position in positions]

    def backwards(*positions: int) -> list[PipeDreamAction]:
        return [PipeDreamAction("B", position) for position in positions]

    first, last = forwards_ahead(0, 2), forwards_ahead(1, 2)
    assert (first, last) == (1, 0)
    begun = begins(first, 3)
    assert step_actions(first, 3, 0, 3) == [
        *forwards(0, 1), *backwards(0), *forwards(2), *backwards(1), *forwards(3), *backwards(2)
    ]  # fmt: skip
    assert step_actions(first, 3, begun, 3) == [
        *forwards(1), *backwards(0), *forwards(2), *backwards(1), *forwards(3), *backwards(2)
    ]  # fmt: skip
    # Before a save: every forward's backward is done.
    assert step_actions(first, 3, begun, 0) == [
        *forwards(1), *backwards(0), *forwards(2), *backwards(1), *backwards(2)
    ]  # fmt: skip
    assert step_actions(last, 2, 0, 3) == [*forwards(0), *backwards(0), *forwards(1), *backwards(1)]


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("microbatches", [4, 5, 12])
def test_what_is_in_flight_is_bounded_by_the_stages(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        ahead = forwards_ahead(stage, stages)
        in_flight, most, done, begun = 0, 0, [], 0
        for step, following in enumerate([microbatches, microbatches, 3, 0]):
            size = [microbatches, microbatches, microbatches, 3][step]
            for action in step_actions(ahead, size, begun, following):
                in_flight += 1 if action.kind == "F" else -1
                most = max(most, in_flight)
                done.append((action.kind, step, action.position) if action.position < size else
                            (action.kind, step + 1, action.position - size))  # fmt: skip
            begun = begins(ahead, following)
        assert (in_flight, most) == (0, stages - stage)
        assert len(done) == len(set(done)) == 2 * (3 * microbatches + 3)


def test_staleness_is_counted() -> None:
    staleness = Staleness()
    assert staleness.stats == {"staleness_mean": 0.0, "staleness_max": 0}
    staleness.observe(0, 7)
    staleness.observe(2, 0)
    staleness.observe(1)
    assert staleness.stats == {"staleness_mean": 0.125, "staleness_max": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--clip-norm", "1"), "--clip-norm 1.0 needs all stages' gradients before one is updated"),
        (("--precision", "fp16"), "Use --pp-schedule 1f1b or --precision bf16."),
    ],
)
def test_bad_input(run_processes: Any, tasks_file: Path, options: tuple[str, ...], message: str) -> None:
    pipedream = ("--strategy", "pp", "--pp-schedule", "pipedream", "--nproc", "2", "--quiet")
    done = run_processes.paceline("train", f"{tasks_file}:Points", *pipedream, *options)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
