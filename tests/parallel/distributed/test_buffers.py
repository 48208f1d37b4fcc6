"""A module's buffers over the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.environment import Environment
from paceline.core.errors import TaskError
from paceline.parallel.reducer import GradientReducer
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.world import open_world

Reports = dict[int, list[dict[str, Any]]]
Step = Callable[..., None]


@pytest.fixture
def step() -> Iterator[Step]:
    """Take a step of a module of one process: ``step(module, samples of each microbatch, forward)``."""
    made: dict[nn.Module, GradientReducer] = {}
    with open_world(Environment(), device="cpu") as world:

        def take(module: nn.Module, samples: Sequence[int], forward: Callable[[int], object]) -> None:
            if module not in made:
                plan = ReductionPlan(len(samples), 1)
                made[module] = GradientReducer(module, plan, world, row_length=0, timeout_s=5)
            present = [microbatch for microbatch, count in enumerate(samples) if count]
            made[module].begin(present)
            for microbatch in present:
                made[module].begin_microbatch()
                forward(microbatch)
                made[module].end_microbatch(samples[microbatch], float(samples[microbatch]), torch.zeros(()), 0)
            made[module].finish([])

        yield take
    for reduction in made.values():
        reduction.close()


def holder(**buffers: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, value in buffers.items():
        module.register_buffer(name, value)
    return module


def test_running_statistics_are_the_mean_of_the_microbatches_by_samples(step: Step) -> None:
    inputs = [torch.randn(samples, 3, generator=torch.Generator().manual_seed(samples)) for samples in (4, 5, 7)]
    norm = nn.BatchNorm1d(3)
    for number in range(1, 3):
        mean, var = norm.running_mean.clone(), norm.running_var.clone()
        step(norm, [4, 5, 7], lambda microbatch: norm(inputs[microbatch]))
        expected_mean = sum(len(x) * (0.9 * mean + 0.1 * x.mean(0)) for x in inputs) / 16
        expected_var = sum(len(x) * (0.9 * var + 0.1 * x.var(0)) for x in inputs) / 16
        torch.testing.assert_close(norm.running_mean, expected_mean)
        torch.testing.assert_close(norm.running_var, expected_var)
        assert norm.num_batches_tracked.item() == number


def test_every_microbatch_starts_from_the_steps_base(step: Step) -> None:
    module = holder(value=torch.tensor([3.0]), count=torch.tensor(5), flag=torch.tensor(False))
    seen = []

    def forward(microbatch: int) -> None:
        seen.append((module.value.item(), module.count.item(), module.flag.item()))
        module.value.add_(microbatch)
        module.count.add_(2)
        module.flag.fill_(True)

    step(module, [1, 1, 0, 2], forward)
    assert seen == [(3.0, 5, False)] * 3
    assert module.value.item() == pytest.approx((3.0 + 4.0 + 2 * 6.0) / 4)
    assert module.count.item() == 7
    assert module.flag.item() is True


def test_what_no_microbatch_changes_is_kept_bit_for_bit(step: Step) -> None:
    values = [-torch.inf, torch.finfo(torch.float32).min, 0.1, -0.0]
    module = holder(mask=torch.tensor(values), moving=torch.zeros(1))
    before = module.mask.clone()
    for _ in range(5):
        step(module, [8, 8, 7], lambda _: module.moving.add_(1.0))
    assert module.moving.item() == 5.0
    assert torch.equal(module.mask.view(torch.int32), before.view(torch.int32))


def test_a_buffer_that_some_microbatches_change_is_averaged_over_all(step: Step) -> None:
    module = holder(value=torch.zeros(1), count=torch.tensor(0))

    def forward(microbatch: int) -> None:
        if microbatch == 1:
            module.value.add_(8.0)
            module.count.add_(1)

    step(module, [1, 1, 1, 1], forward)
    assert module.value.item() == 2.0
    assert module.count.item() == 0


def test_a_buffer_bound_to_a_new_tensor_is_found_and_bound_back(step: Step) -> None:
    module = holder(average=torch.zeros(2), same=torch.ones(2))
    average, same = module.average, module.same
    weight = torch.ones(2, requires_grad=True)

    def forward(microbatch: int) -> None:
        # With its graph, as it comes when somebody forgets to detach.
        module.average = module.average + weight * (microbatch + 1)
        module.same = module.same * 1.0

    for times in (1, 2):
        step(module, [1, 1], forward)
        assert module.average is average
        assert module.same is same
        assert not average.requires_grad
        assert average.tolist() == [1.5 * times] * 2


def test_half_precision_buffers_are_averaged_without_overflow(step: Step) -> None:
    module = holder(float16=torch.full((2,), 2000.0, dtype=torch.float16), bfloat=torch.tensor([256.0]).bfloat16())

    def forward(microbatch: int) -> None:
        module.float16.add_(1.0)
        module.bfloat.add_(2.0)

    step(module, [32, 33, 31], forward)
    assert module.float16.tolist() == [2001.0] * 2
    assert module.float16.dtype == torch.float16
    assert module.bfloat.tolist() == [258.0]


def test_a_buffer_that_changes_its_shape_is_refused(step: Step) -> None:
    module = holder(cache=torch.zeros(2))

    def forward(microbatch: int) -> None:
        module.cache = torch.zeros(5)

    with pytest.raises(TaskError, match=r"'cache' had shape \(2,\) and got \(5,\) in forward"):
        step(module, [1], forward)


def test_buffers_of_all_kinds_do_not_depend_on_the_ranks(reports: Reports) -> None:
    expected = reports[1][0]["shared"]["exact"]
    # It would be no test if they stood still.
    first, last = expected["steps"][0]["buffers"], expected["steps"][-1]["buffers"]
    assert {name for name in first if first[name] == last[name]} == {"mask", "seen"}
    for ranks in reports.values():
        for report in ranks:
            for transport in report.keys() & {"shared", "group"}:
                for kind in ("exact", "allreduce"):
                    found = report[transport][kind]
                    assert found["mask_kept"] is True
                    assert found["calls"] == 3 * 7
                    assert found["seen"] is True
                    assert found["batches"] == 7
                    assert found["average_is_the_registered_buffer"] is True
                found = report[transport]["exact"]
                assert [s["buffers"] for s in found["steps"]] == [s["buffers"] for s in expected["steps"]]
