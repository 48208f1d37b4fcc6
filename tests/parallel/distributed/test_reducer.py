"""What a step adds up to: the same bits for any number of ranks, and what plain PyTorch computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.environment import Environment
from paceline.core.errors import DataError, TaskError
from paceline.parallel.grad_buffers import FlatLayout
from paceline.parallel.reducer import GradientReducer, StepSums
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.transports import LocalTransport
from paceline.parallel.world import open_world

Reports = dict[int, list[dict[str, Any]]]
Losses = Callable[[int], tuple[torch.Tensor, torch.Tensor | float, int]]


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def alone(one_thread: None) -> Iterator[Callable[[nn.Module, int], GradientReducer]]:
    """Reducers of one process with so many micro-batches."""
    made: list[GradientReducer] = []
    with open_world(Environment(), device="cpu") as world:

        def build(module: nn.Module, num_microbatches: int) -> GradientReducer:
            made.append(GradientReducer(module, ReductionPlan(num_microbatches, 1), world, row_length=0, timeout_s=5))
            return made[-1]

        yield build
    for reduction in made:
        reduction.close()


def take_step(reduction: GradientReducer, present: Sequence[int], losses: Losses) -> StepSums:
    """A step whose micro-batches have these summed losses, weights and numbers of samples."""
    reduction.begin(present)
    for microbatch in present:
        reduction.begin_microbatch()
        loss, weight, samples = losses(microbatch)
        loss.backward()
        reduction.end_microbatch(samples, weight, loss, 0)
    return reduction.finish([])


class RecordingTransport(LocalTransport):
    """Records which bucket is sent, and when."""

    overlaps = True

    def __init__(self, name: str, sent: list[str], layout: FlatLayout) -> None:
        super().__init__(1, layout.flat_buffers, torch.device("cpu"))
        self._name, self._sent = name, sent

    def launch(self, bucket: int) -> None:
        self._sent.append(f"{self._name}{bucket}")


@pytest.mark.parametrize("with_gradients", [True, False])
def test_ranks_with_and_without_micro_batches_send_in_one_order(one_thread: None, with_gradients: bool) -> None:
    """Two reducers of a rank, as of two stages of a pipeline; the library that sums the gradients otherwise is last."""
    orders = []
    for present in ([0], []):
        sent: list[str] = []
        stages = {name: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for name in "ab"}
        with open_world(Environment(), device="cpu") as world:
            reducers = {
                name: GradientReducer(
                    stage,
                    ReductionPlan(1, 1),
                    world,
                    row_length=0,
                    with_gradients=with_gradients,
                    transport=partial(RecordingTransport, name, sent),
                )
                for name, stage in stages.items()
            }
            for name in "ba":
                reducers[name].begin(present)
            for name in "ba" if present else "":
                reducers[name].begin_microbatch()
                loss = stages[name](torch.ones(2, 4))[0].sum()
                loss.backward()
                reducers[name].end_microbatch(2, 2.0, loss, 0)
            sent.append("library")
            for reducer in reducers.values():
                with suppress(DataError):  # on no rank there is a sample
                    reducer.finish([])
                reducer.close()
        orders.append(sent)
    assert orders[0] == orders[1]
    assert "".join(name[0] for name in orders[0]) == ("bbbaaal" if with_gradients else "laabb")


def transports(reports: Reports) -> list[tuple[str, dict[str, Any]]]:
    """Each rank's report about each transport, with a name for it."""
    return [
        (f"rank {rank} of {world_size}, {transport}", report[transport])
        for world_size, ranks in reports.items()
        for rank, report in enumerate(ranks)
        for transport in ("shared", "group")
        if transport in report
    ]


def test_exact_gives_the_same_bits_for_every_number_of_ranks_and_every_transport(reports: Reports) -> None:
    expected = reports[1][0]["shared"]["exact"]
    assert len(transports(reports)) == 1 + 2 * (2 + 3 + 4)
    for name, report in transports(reports):
        for step, (found, alone) in enumerate(zip(report["exact"]["steps"], expected["steps"], strict=True), start=1):
            assert found == alone, f"{name}, step {step}"
        assert report["exact"]["state"] == expected["state"], name


def test_a_watched_microbatch_changes_no_bit_and_has_one_fingerprint_everywhere(reports: Reports) -> None:
    expected = reports[1][0]["shared"]["watched exact"]["fingerprints"]
    assert [len(of_step) for of_step in expected] == [2] * 7
    for name, report in transports(reports):
        for kind in ("exact", "allreduce"):
            watched = report[f"watched {kind}"]
            assert watched["steps"] == report[kind]["steps"], f"{name}, {kind}"
            assert watched["checked"] == [len(rows) for rows in watched["rows"]]
        # With fast the weights, and so the fingerprints, depend on the number of ranks from step 2 on.
        found = report["watched exact"]["fingerprints"]
        assert [set(of_step) for of_step in found] == [set(of_step[:1]) for of_step in expected], name


def test_exact_gives_the_same_bits_for_any_shares_and_to_ranks_without_any(reports: Reports) -> None:
    expected = reports[1][0]["shared"]["exact"]
    for name, report in transports(reports):
        for found in report["by_shares"]["exact"]:
            assert found["steps"] == expected["steps"], name
            assert found["state"] == expected["state"], name
            assert found["strides_kept"], name


def test_fast_gives_all_ranks_the_same_bits_for_any_shares(reports: Reports) -> None:
    exact = torch.tensor(reports[1][0]["shared"]["exact"]["first_gradient"])
    for world_size, ranks in reports.items():
        for transport in ("shared", "group") if world_size > 1 else ("shared",):
            for of_ranks in zip(*(report[transport]["by_shares"]["allreduce"] for report in ranks), strict=True):
                assert all(report["steps"] == of_ranks[0]["steps"] for report in of_ranks)
                found = torch.tensor(of_ranks[0]["first_gradient"])
                torch.testing.assert_close(found, exact, rtol=0.05, atol=0.05)


def test_ranks_out_of_step_with_a_spare_mix_nothing_up(reports: Reports) -> None:
    assert {tuple(report["stress_with_spare"]) for _, report in transports(reports)} == {()}


def test_fast_gives_all_ranks_the_same_bits_and_about_the_exact_gradient(reports: Reports) -> None:
    exact = torch.tensor(reports[1][0]["shared"]["exact"]["first_gradient"])
    assert exact.abs().max() > 0.01
    for world_size, ranks in reports.items():
        for transport in ("shared", "group") if world_size > 1 else ("shared",):
            of_ranks = [report[transport]["allreduce"] for report in ranks]
            assert all(report["steps"] == of_ranks[0]["steps"] for report in of_ranks)
            found = torch.tensor(of_ranks[0]["first_gradient"])
            # The bfloat16 layer's gradients are rounded to 8 bits at each addition.
            torch.testing.assert_close(found, exact, rtol=0.05, atol=0.05)


def test_fast_depends_on_the_ranks(reports: Reports) -> None:
    """So the equalities of ``exact`` mean something: this model's sums do depend on the order."""
    alone = reports[1][0]["shared"]["allreduce"]["steps"][0]["gradients"]
    assert reports[3][0]["shared"]["allreduce"]["steps"][0]["gradients"] != alone


def test_every_rank_sees_every_ranks_numbers(reports: Reports) -> None:
    for name, report in transports(reports):
        world_size = int(name.split()[3].rstrip(","))
        for step, rows in enumerate(report["exact"]["rows"]):
            assert rows == [[rank, step + 0.5] for rank in range(world_size)]


def test_step_sums_count_the_samples_once(reports: Reports) -> None:
    present = [range(11), range(8), (0, 1), range(11), (9,), (1, 2, 5, 8, 10), range(11)]
    for _, report in transports(reports):
        for step, microbatches in zip(report["exact"]["steps"], present, strict=True):
            assert step["sums"]["samples"] == 48
            assert step["sums"]["checksum"] == sum(2**microbatch for microbatch in microbatches)
            assert step["sums"]["finite"] is True
            assert step["sums"]["bad_microbatch"] is None


def test_gradients_keep_memory_formats_and_stay_none_for_frozen_parameters(reports: Reports) -> None:
    for _, report in transports(reports):
        found = report["exact"]
        assert found["strides_kept"] is True
        assert found["frozen_gradient"] is None
        assert found["unused_gradient"] is None
        assert found["gradients_left"] == []


def test_nan_and_infinity_are_found_by_all_ranks(reports: Reports) -> None:
    for _, report in transports(reports):
        assert report["bad_numbers"] == [
            {"case": "NaN loss", "bad_microbatch": 4, "finite": False},
            {"case": "infinite gradient", "bad_microbatch": None, "finite": False},
            {"case": "overflow", "bad_microbatch": None, "finite": False},
            {"case": "no weight", "bad_microbatch": None, "finite": False},
            {"case": "good again", "bad_microbatch": None, "finite": True},
        ]


def classifier() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(16, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator)) for _ in range(steps)
    ]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_one_microbatch_has_the_bits_of_an_ordinary_loop(
    alone: Callable[[nn.Module, int], GradientReducer], name: str
) -> None:
    """With a power of two of samples: their number is multiplied in and divided out again."""

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        if name == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    plain, ours = classifier(), classifier()
    plain_optimizer, our_optimizer = optimizer_of(plain), optimizer_of(ours)
    reduction = alone(ours, 1)
    for x, y in batches(6):
        plain_optimizer.zero_grad()
        plain_loss = nn.functional.cross_entropy(plain(x), y)
        plain_loss.backward()
        plain_optimizer.step()
        sums = take_step(
            reduction, [0], lambda _, x=x, y=y: (nn.functional.cross_entropy(ours(x), y) * len(x), 16.0, 16)
        )
        our_optimizer.step()
        assert sums.loss == plain_loss.item()
    for (key, expected), found in zip(plain.state_dict().items(), ours.state_dict().values(), strict=True):
        assert torch.equal(found, expected), key


def test_several_microbatches_give_the_gradient_of_the_whole_batch(
    alone: Callable[[nn.Module, int], GradientReducer],
) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    x, y = batches(1)[0]
    nn.functional.cross_entropy(model(x), y).backward()
    expected = [p.grad.clone() for p in model.parameters()]

    def of_microbatch(microbatch: int) -> tuple[torch.Tensor, float, int]:
        bounds = slice((0, 3, 7, 12)[microbatch], (3, 7, 12, 16)[microbatch])
        size = bounds.stop - bounds.start
        return nn.functional.cross_entropy(model(x[bounds]), y[bounds]) * size, float(size), size

    take_step(alone(model, 4), range(4), of_microbatch)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_unequal_weights_give_the_weighted_mean_not_the_mean_of_means(
    alone: Callable[[nn.Module, int], GradientReducer],
) -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 8.0])
    weights = torch.tensor([[1.0, 1.0], [5.0, 0.0], [0.0, 0.0], [2.0, 7.0]])
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)

    def of_microbatch(microbatch: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        losses = model(values[microbatch].expand(2, 1)).squeeze(1)
        return (losses * weights[microbatch]).sum(), weights[microbatch].sum(), 2

    sums = take_step(alone(model, 4), range(4), of_microbatch)
    weighted = (values * weights.sum(1)).sum() / weights.sum()
    assert sums.loss == pytest.approx(weighted.item())
    assert sums.weight == 16
    assert sums.samples == 8
    assert model.weight.grad.item() == pytest.approx(weighted.item())
    assert weighted.item() != pytest.approx(values.mean().item())


def test_gradients_set_to_none_between_steps_change_no_bit(
    alone: Callable[[nn.Module, int], GradientReducer],
) -> None:
    model = nn.Linear(3, 1)
    reduction = alone(model, 2)
    for _ in range(2):
        # A gradient of -0.0, which 0.0 + -0.0 is not.
        take_step(reduction, [0, 1], lambda _: (-(model.weight * 0.0).sum(), 1.0, 1))
        assert not torch.signbit(model.weight.grad).any()
        assert model.bias.grad is None
        model.zero_grad(set_to_none=True)


def test_many_float16_gradients_are_not_mistaken_for_infinity(
    alone: Callable[[nn.Module, int], GradientReducer],
) -> None:
    model = nn.Module()
    model.weights = nn.Parameter(torch.ones(200_000, dtype=torch.float16))
    assert not torch.isfinite(torch.ones(200_000, dtype=torch.float16).sum())
    sums = take_step(alone(model, 1), [0], lambda _: (model.weights.sum(dtype=torch.float32), 1.0, 1))
    assert sums.finite
    assert model.weights.grad.unique().tolist() == [1.0]


def test_a_gradient_in_two_parts_is_refused_in_later_steps_too(
    alone: Callable[[nn.Module, int], GradientReducer],
) -> None:
    model = nn.Linear(2, 2)

    def losses(microbatch: int) -> tuple[torch.Tensor, float, int]:
        if microbatch == 2:
            (0.1 * model.weight.square().sum()).backward()
        return model(torch.ones(1, 2)).sum(), 1.0, 1

    reduction = alone(model, 3)
    take_step(reduction, [0, 1], losses)
    with pytest.raises(TaskError, match="a parameter received its gradient in two parts"):
        take_step(reduction, [0, 1, 2], losses)


def test_a_second_part_with_a_graph_of_its_own_is_refused_too(
    alone: Callable[[nn.Module, int], GradientReducer],
) -> None:
    model = nn.Linear(2, 2)

    def losses(microbatch: int) -> tuple[torch.Tensor, float, int]:
        model.weight.pow(3).sum().backward(create_graph=True)
        return model(torch.ones(1, 2)).sum(), 1.0, 1

    with (
        pytest.warns(UserWarning, match="create_graph=True will create a reference cycle"),
        pytest.raises(TaskError, match="a parameter received its gradient in two parts"),
    ):
        take_step(alone(model, 1), [0], losses)


@pytest.mark.parametrize("create_graph", [False, True])
def test_only_what_a_step_uses_has_a_gradient(
    alone: Callable[[nn.Module, int], GradientReducer], create_graph: bool
) -> None:
    """More parameters than a float64 has exact bits; a gradient of zeros is one."""
    model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(120)])
    reduction = alone(model, 3)
    for step in range(3):
        reduction.begin([0, 1, 2])
        for microbatch in range(3):
            reduction.begin_microbatch()
            loss = model[step + 50 * microbatch].square().sum() + (0 * model[119 - step]).sum()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of a reference cycle
                loss.backward(create_graph=create_graph)
            reduction.end_microbatch(1, 1.0, loss, 0)
        reduction.finish([])
        used = [index for index, parameter in enumerate(model) if parameter.grad is not None]
        assert used == sorted([step, step + 50, step + 100, 119 - step])
        assert not model[119 - step].grad.any()


def test_a_buffer_that_forward_sets_is_refused(alone: Callable[[nn.Module, int], GradientReducer]) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("mean", None)

    def losses(microbatch: int) -> tuple[torch.Tensor, float, int]:
        if microbatch == 1:
            model[0].mean = torch.zeros(2)
        return model(torch.ones(1, 2)).sum(), 1.0, 1

    with pytest.raises(TaskError, match=r"the buffer '0\.mean' was None when training began"):
        take_step(alone(model, 2), [0, 1], losses)


def test_a_parameter_that_thaws_while_training_is_refused(
    alone: Callable[[nn.Module, int], GradientReducer],
) -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    reduction = alone(model, 1)
    take_step(reduction, [0], lambda _: (model(torch.ones(1, 2)).sum(), 1.0, 1))
    model.bias.requires_grad_(True)
    with pytest.raises(TaskError, match="'bias' requires a gradient now"):
        reduction.begin([0])


def test_a_model_without_parameters_still_counts(alone: Callable[[nn.Module, int], GradientReducer]) -> None:
    leaf = torch.ones(1, requires_grad=True)
    sums = take_step(alone(nn.Identity(), 3), [0, 2], lambda microbatch: (leaf.sum() * (microbatch + 1), 2.0, 4))
    assert (sums.samples, sums.weight, sums.loss, sums.finite) == (8, 4.0, 1.0, True)


def test_a_gradient_that_comes_in_two_parts_is_refused_for_every_number_of_ranks(reports: Reports) -> None:
    # Reentrant checkpointing of a shared layer: two parts would be added at other places for another W.
    for ranks in reports.values():
        for report in ranks:
            assert report["reentrant"].startswith("TaskError: a parameter received its gradient in two parts")
            assert "pass use_reentrant=False" in report["reentrant"]
