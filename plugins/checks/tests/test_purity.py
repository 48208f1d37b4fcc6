"""The purity guard: a task whose model depends on the number of processes, or on a restart, is stopped or told of."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from tests.training.impure_tasks import Normalised
from torch import nn
from torch.optim import SGD

from paceline.runs.directory import RunDirectory
from paceline.runs.purity import read_purity
from paceline_checks.purity import couples_parameters

pytestmark = pytest.mark.matrix

# A data worker imports torch first, which takes seconds: only one job has one.
_SHORT = {"max_steps": 4, "microbatches": 4, "global_batch_size": 24, "num_workers": 0}
_OTHER_VALUES = "sample [0-9]+ had other values when it was read again"
FOUND = {
    "annealing": ({"task": "Annealing"}, "gave two losses, .*, while task.calls changed"),
    "curriculum": ({"task": "Curriculum"}, "task.progress.number counted a micro-batch twice"),
    "entropy": ({"task": "Entropy"}, r"micro-batch [0-9] of step 1, computed twice, gave two losses, [^,]*\."),
    "running-mean": ({"task": "RunningMean"}, "while model.center changed"),
    "initialised": ({"task": "DataDependentInit"}, "forward or backward changed the parameters scale"),
    "momentum": ({"task": "MomentumInForward"}, "changed the parameters slow.weight, slow.bias"),
    "left-in-evaluation": ({"task": "LeftInEvaluation"}, "while model.training, .* changed"),
    "rate": ({"task": "RateByBatch"}, "a micro-batch changed lr of group 0 in optimizer main"),
    "metrics": (
        {"task": "MonteCarlo", "fields": {"num_val": 20}, "options": {"eval_every": "2steps", "max_steps": 4}},
        "an evaluation changed the buffers 1.running_mean",
    ),
    "own-generator": ({"task": "Read", "fields": {"kind": "OwnGenerator"}}, _OTHER_VALUES),
    "mixed": ({"task": "Read", "fields": {"kind": "MixedWithPrevious"}}, _OTHER_VALUES),
    "cached": ({"task": "Read", "fields": {"kind": "CachedAugmentation"}}, "drew other random numbers"),
    "by-a-worker": (
        {"task": "Read", "fields": {"kind": "CachedAugmentation"}, "options": {"num_workers": 1}},
        "drew other random numbers",
    ),
    **{
        kind: ({"task": "Read", "fields": {"kind": kind}}, "other values when the stream was opened again.*seed its")
        for kind in ("ShuffledByClock", "ShuffledByCounter")
    },
}
_OTHER_STREAM = "two ranks read other samples at the beginning of the stream.*leave out the split by rank"
BETWEEN_RANKS = {
    "unseeded": ({"task": "Unseeded"}, "two ranks read other values in the same samples"),
    "split-by-group": ({"task": "Read", "fields": {"kind": "SplitByGroup"}}, _OTHER_STREAM),
    "split-by-environment": ({"task": "Read", "fields": {"kind": "SplitByEnvironment"}}, _OTHER_STREAM),
    "split-by-node": ({"task": "SplitByNode"}, _OTHER_STREAM),
    "coupled": ({"task": "Coupled", "options": {"strategy": "zero1"}}, r"the optimizer main \(Normalised\) updates"),
    "drifting": ({"task": "Drifting"}, "after step 4 the ranks have different bits in 0.weight"),
}
WARNED = {
    "logging": ({"task": "Logging"}, "task.losses changed whenever a micro-batch was computed"),
    "annealing-warned": ({"task": "Annealing", "options": {"purity": "warn"}}, FOUND["annealing"][1]),
}
REFUSED = {"zero-grad": {"task": "ZeroGrad", "options": {"purity": "off"}}}
SILENT = {
    "lookalike": {"task": "Lookalike"},
    "rows": {"task": "Read"},
    "stream": {"task": "Read", "fields": {"kind": "ShuffledByKey"}},
    "off": {"task": "Annealing", "options": {"purity": "off"}},
}
RESTARTED = {
    "stopped": {"task": "Unseeded", "stop_at": 9, "options": {"purity": "error"}},
    "continued": {"task": "Unseeded", "options": {"run_dir": "stopped"}},
}


def _jobs(*tables: Any) -> dict[str, Any]:
    jobs = {}
    for table in tables:
        for name, entry in table.items():
            job = entry[0] if isinstance(entry, tuple) else entry
            jobs[name] = {**job, "options": {**_SHORT, **job.get("options", {})}}
    return jobs


@pytest.fixture(scope="module")
def on_one(start_trainings: Any) -> Any:
    return start_trainings(_jobs(FOUND, WARNED, REFUSED, SILENT, RESTARTED))


@pytest.fixture(scope="module")
def on_two(start_trainings: Any, on_one: Any) -> Any:
    return start_trainings(_jobs(FOUND, BETWEEN_RANKS, WARNED, REFUSED, SILENT), ranks=2)


@pytest.mark.parametrize("name", FOUND)
def test_a_task_that_would_depend_on_the_processes_is_stopped(on_one: Any, on_two: Any, name: str) -> None:
    for trainings in (on_one, on_two):
        assert trainings[name]["error"] == "PurityError"
        assert re.search(FOUND[name][1], trainings[name]["message"])
        assert "Nothing was saved" in trainings[name]["message"]
        assert "--purity warn" in trainings[name]["message"]
        directory = RunDirectory(trainings.run(name))
        assert not directory.checkpoints.exists() or not list(directory.checkpoints.iterdir())
        assert len(read_purity(directory).found) == 1


def test_gradients_that_a_loss_removes_are_refused(on_one: Any, on_two: Any) -> None:
    for trainings in (on_one, on_two):
        assert trainings["zero-grad"]["error"] == "TaskError"
        assert "the loss removed the gradients" in trainings["zero-grad"]["message"]


@pytest.mark.parametrize("name", BETWEEN_RANKS)
def test_ranks_that_differ_are_stopped(on_two: Any, name: str) -> None:
    assert on_two[name]["error"] == "PurityError"
    assert re.search(BETWEEN_RANKS[name][1], on_two[name]["message"])


def test_an_optimizer_of_independent_updates_is_not_suspected() -> None:
    class Rescaled(SGD):
        count = 0

        def step(self, closure: Any = None) -> None:
            self.count += 1
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.data -= parameter.grad / parameter.norm() / self.count

    parameters = [nn.Parameter(torch.ones(5)) for _ in range(2)]
    rescaled = Rescaled(parameters)
    assert not couples_parameters(rescaled)
    assert (rescaled.count, parameters[0].sum()) == (0, 5)
    assert couples_parameters(Normalised(parameters))


def test_the_state_inside_a_wrapped_optimizer_is_not_copied() -> None:
    class Uncopied(torch.Tensor):
        def __deepcopy__(self, memo: Any) -> Any:
            copied.append(self)

    copied: list[Any] = []
    parameter = nn.Parameter(torch.ones(5))
    wrapper, inner = Normalised([parameter]), SGD([parameter])
    inner.state[parameter]["momentum_buffer"] = torch.ones(5).as_subclass(Uncopied)
    vars(wrapper)["inner"] = inner
    generator = torch.get_rng_state()
    assert couples_parameters(wrapper)
    assert not copied
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("name", WARNED)
def test_what_may_be_harmless_is_told_once(on_one: Any, on_two: Any, name: str) -> None:
    for trainings in (on_one, on_two):
        found = trainings[name]["purity"]["found"]
        assert found
        assert all(re.search(WARNED[name][1], message) for message in found)
        summary = read_purity(RunDirectory(trainings.run(name)))
        assert list(summary.found) == found
        assert str(summary).startswith(f"The purity guard found {len(found)}: ")
    assert len(on_two["logging"]["purity"]["found"]) == 1


@pytest.mark.parametrize("name", ["lookalike", "rows", "stream"])
def test_a_pure_task_is_not_suspected(on_one: Any, on_two: Any, name: str) -> None:
    assert len({trainings[name]["model_sha256"] for trainings in (on_one, on_two)}) == 1
    for trainings in (on_one, on_two):
        purity = trainings[name]["purity"]
        assert purity["found"] == []
        assert purity["checks"]["microbatches"] == purity["checks"]["forward"] == 2
        assert purity["checks"]["samples"] == 6
    assert on_two[name]["purity"]["checks"]["replicas"] == 1


def test_a_check_leaves_no_trace_in_the_run(on_one: Any, on_two: Any) -> None:
    """The calls that a check made do not count: with it, the model is that of a run without it."""
    assert on_one["off"]["purity"] == {"mode": "off", "checks": {}, "found": []}
    assert on_one["annealing-warned"]["model_sha256"] == on_one["off"]["model_sha256"]
    assert "did not check" in str(read_purity(RunDirectory(on_one.run("off"))))


def test_data_that_are_others_after_a_restart_are_told(on_one: Any) -> None:
    assert on_one["stopped"]["error"] == "StopRequested"
    (found,) = on_one["continued"]["purity"]["found"]
    assert "this process reads other values in the same samples than those with which the run began" in found


def test_the_audit_tells_what_was_found(on_one: Any, run_processes: Any) -> None:
    on_one.results()
    for name, words in {"logging": "The purity guard found 1: task.losses", "rows": "guard found nothing"}.items():
        done = run_processes.paceline("audit", on_one.run(name))
        assert done.returncode == 0, done.stderr
        assert words in done.stdout
        found = json.loads(run_processes.paceline("audit", on_one.run(name), "--json").stdout)["purity"]["found"]
        assert len(found) == words.count("1:")
