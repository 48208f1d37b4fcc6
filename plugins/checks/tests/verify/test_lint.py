"""The lints: each finds the task that does what it looks for, at its line, and leaves others alone."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.core.config import ResolvedConfig
from paceline_checks.impurities import Impurity
from paceline_checks.verify.lint import lint

pytestmark = pytest.mark.integration

TASKS = Path(__file__).with_name("tasks.py")


@pytest.fixture(scope="module")
def tasks() -> Any:
    spec = importlib.util.spec_from_file_location("verification_tasks", TASKS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def found(tasks: Any, name: str) -> list[Impurity]:
    task = getattr(tasks, name)()
    config = ResolvedConfig(
        microbatches=task.defaults.microbatches,
        global_batch_size=task.defaults.global_batch_size,
        max_steps=4,
    )
    return lint(task, config)


def test_a_task_that_is_right_gets_no_warning(tasks: Any) -> None:
    assert found(tasks, "Right") == []


@pytest.mark.parametrize(
    ("task", "kind", "line", "words"),
    [
        ("MeanOfMeans", "mean-of-means", "# a mean over words", r"return paceline\.Loss\(sum, weight\)"),
        ("UnequalCounts", "unequal-counts", "def metrics", "'accuracy' .* averaged over unequal counts"),
        ("StepsItsScheduler", "scheduler-steps", "# once a micro-batch", "steps its scheduler itself"),
        ("Padded", "duplicated-samples", "def build_dataset", "2 of the test data's 32 samples"),
        ("PaddedTensors", "duplicated-samples", "def build_dataset", "2 of the test data's 32 samples"),
        ("OwnGenerator", "unkeyed-randomness", "def loss", "micro-batch 0 of step 1, computed twice, gave two losses"),
        ("Counts", "hidden-state", "def loss", "gave two losses, .*, while task.calls changed"),
        ("NoisyData", "unkeyed-randomness", "# goes on from sample to sample", "sample [0-9]+ had other values when"),
        ("SharedDropout", "shared-randomness", "# each micro-batch drops the same", "the loss seeds torch"),
        ("Unused", "unused-parameters", "def build_model", r"spare\.weight get no gradient"),
        ("Forgotten", "unused-parameters", "def build_optimizer", r"3\.weight.* are in no optimizer"),
        (
            "TinyShards",
            "tiny-batch-norm",
            "def build_model",
            "over 4 values of a micro-batch of 4 samples",
        ),
        ("ReadsTheRank", "reads-the-rank", "# the rank", "two ranks differ in the loss"),
        ("SharesItself", "reads-the-rank", "dist.get_rank()", "differ in the training data, the test data"),
        ("ScalesItsRate", "reads-the-rank", "# by the world", "differ in the learning rates"),
    ],
)
def test_what_is_wrong_is_found(tasks: Any, task: str, kind: str, line: str, words: str) -> None:
    findings = found(tasks, task)
    assert [finding.kind for finding in findings] == [kind], findings
    (finding,) = findings
    assert finding.place is not None
    path, _, number = finding.place.rpartition(":")
    assert Path(path) == TASKS
    lines = TASKS.read_text().splitlines()
    # A decorated method begins at its decorator.
    assert line in lines[int(number) - 1], lines[int(number) - 1]
    assert re.search(words, finding.message), finding.message


def test_a_lint_that_fails_says_so(tasks: Any) -> None:
    @dataclasses.dataclass
    class Broken(tasks.Right):  # type: ignore[misc,name-defined]
        def metrics(self, model: Any, batch: Any) -> Any:
            raise KeyError("nothing")

    task = Broken()
    (finding,) = lint(task, ResolvedConfig(microbatches=4, global_batch_size=64, max_steps=4))
    assert finding.kind == "not-looked-at"
    assert "check_metrics failed: KeyError: 'nothing'" in finding.message
