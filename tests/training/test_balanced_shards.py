"""Lines of different lengths, dealt to micro-batches by their lengths: the same steps, shared more evenly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.data.audit import audit
from paceline.data.ledger import read_ledger
from paceline.data.order import restore_order
from paceline.runs.directory import RunDirectory

OPTIONS = {"max_steps": 5, "global_batch_size": 24, "log_every": 1}
LINES = {"task": "Lines", "options": OPTIONS}
AS_THEY_COME = {**LINES, "fields": {"balanced": False}}
WEIGHTED = {**LINES, "fields": {"weighted": True}}


@pytest.fixture(scope="module")
def alone(start_trainings: Any) -> Any:
    return start_trainings({"lines": LINES, "as-they-come": AS_THEY_COME, "weighted": WEIGHTED})


@pytest.fixture(scope="module")
def staged(start_trainings: Any) -> Any:
    options = {**OPTIONS, "strategy": "pp", "pp_split": "equal"}
    return start_trainings({"lines": {**LINES, "options": options}, "weighted": WEIGHTED}, ranks=2)


def test_a_pipeline_has_the_bits_of_one_process(alone: Any, staged: Any) -> None:
    assert "error" not in staged["lines"], staged["lines"]
    assert staged["lines"]["model_sha256"] == alone["lines"]["model_sha256"]


def test_what_a_loss_says_is_recorded_alike_by_a_pipeline_and_on_two_ranks(alone: Any, staged: Any) -> None:
    alone.results()
    staged.results()
    for name in ("lines", "weighted"):
        one, two = ([record["logged"] for record in worlds.records(name, "train")] for worlds in (alone, staged))
        assert one == two
        assert len(one) == 5
        assert all(1 < values["bytes"] < 120 and 0 <= values["right"] <= 1 for values in one)


def test_the_mean_over_bytes_is_that_of_micro_batches_as_they_come(alone: Any) -> None:
    alone.results()
    balanced, plain = (
        [record["loss"] for record in alone.records(name, "train")] for name in ("lines", "as-they-come")
    )
    assert len(balanced) == 5
    assert balanced == pytest.approx(plain, rel=1e-4)


def test_micro_batches_have_about_as_many_bytes(alone: Any) -> None:
    alone.results()
    run = RunDirectory(alone.run("lines"))
    plain = read_ledger(run.ledger).order
    order = restore_order(plain, run)
    sizes = np.load(run.sample_lengths, allow_pickle=False)
    assert plain is not None
    assert order is not None
    heaviest, heaviest_plain = (
        [
            max(int(sizes[which.microbatch_indices(0, step, microbatch)].sum()) for microbatch in range(4))
            for step in range(2)
        ]
        for which in (order, plain)
    )
    mean = [sizes[plain.indices(0, *plain.batch_range(step))].sum() / 4 for step in range(2)]
    assert all(most < 1.05 * even for most, even in zip(heaviest, mean, strict=True))
    assert max(most / even for most, even in zip(heaviest_plain, mean, strict=True)) > 1.1


def test_the_audit_knows_which_samples_a_microbatch_had(alone: Any, staged: Any) -> None:
    for worlds in (alone, staged):
        worlds.results()
        run = RunDirectory(worlds.run("lines"))
        assert audit(run).clean
        kept = run.sample_lengths.read_bytes()
        run.sample_lengths.unlink()
        assert "read other samples" in audit(run).verdict
        run.sample_lengths.write_bytes(kept)


def test_weights_draw_the_same_samples_on_two_ranks_also_with_balanced_lengths(alone: Any, staged: Any) -> None:
    assert staged["weighted"]["model_sha256"] == alone["weighted"]["model_sha256"] != alone["lines"]["model_sha256"]
    for worlds in (alone, staged):
        run = RunDirectory(worlds.run("weighted"))
        report = audit(run)
        assert (report.clean, [epoch.repeated for epoch in report.epochs]) == (True, [0, 0])
        assert "every weighted draw of 1 epoch and" in report.verdict
        run.sample_weights.unlink()
        assert "read other samples" in audit(run).verdict
