"""The parts of training that are functions: the plan, the judge, the control word, losses."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

from paceline.core.config import ResolvedConfig, RunConfig, resumed_options
from paceline.core.errors import CheckpointError, ConfigError, DataError, TaskError
from paceline.core.task import Defaults, Loss, RunSchedule, Task
from paceline.data.loader import EvalBatches
from paceline.parallel.options import FsdpOptions
from paceline.parallel.sharded_state import require_own_memory
from paceline.parallel.world import ParallelDims, World
from paceline.training.control import ROW_LENGTH, ControlFlags, ModelSelector, StopCause, StopSignals, merge, statuses
from paceline.training.evaluation import Evaluator, as_loss
from paceline.training.optim import EMA
from paceline.training.reproducibility import seed_microbatch
from paceline.training.run_context import check_world, resolve_config, set_up_data
from paceline.training.state import TrainingState, TrainProgress, build_task_model


@dataclass
class Line(Task):
    """A line; what a test changes is an argument."""

    datasets: Any = None
    value: Any = None
    optimizers: Any = None

    defaults: ClassVar[Defaults] = Defaults(global_batch_size=8, microbatches=2, epochs=3, best_metric="error:min")

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def build_dataset(self, split: str) -> Any:
        return self.datasets.get(split)

    def build_optimizer(self, model: nn.Module) -> Optimizer | Mapping[str, Optimizer]:
        built = SGD(model.parameters(), lr=0.1) if self.optimizers is None else self.optimizers
        return built(model) if callable(built) else built

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[0])

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"value": self.value}


def points(number: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(number))[:, None])


# --- the plan


def test_what_is_left_open_is_filled_in_once() -> None:
    config, notes = resolve_config(RunConfig(), Line(), 1)
    assert (config.microbatches, config.global_batch_size, config.training.epochs, config.values["best_metric"]) == (
        2,
        8,
        3,
        "error:min",
    )
    assert notes == []


def test_what_is_given_wins_over_the_task() -> None:
    given = RunConfig(microbatches=4, global_batch_size=16, max_steps=5, best_metric="loss:min")
    config, _ = resolve_config(given, Line(), 1)
    assert (config.microbatches, config.global_batch_size, config.training.epochs, config.training.max_steps) == (
        4,
        16,
        None,
        5,
    )
    assert config.evaluation.best_metric == ("loss", "min")


@pytest.mark.parametrize(
    ("options", "microbatches"),
    [
        ({"microbatches": "auto"}, 3),
        ({"microbatches": "auto", "grad_accumulation": 4}, 12),
        ({"grad_accumulation": 2}, 6),
    ],
)
def test_auto_microbatches_are_said_aloud(options: dict[str, Any], microbatches: int) -> None:
    config, notes = resolve_config(RunConfig(**options), Line(), 3)
    assert config.microbatches == microbatches
    assert notes == [
        f"micro-batches: {microbatches} (3 processes x {config.parallel.grad_accumulation}), fixed for this run"
    ]


def test_more_processes_than_microbatches_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"5 processes cannot share 4 micro-batches.*--nproc 4 or fewer.*--microbatches 5"
    ):
        check_world(ResolvedConfig(microbatches=4), 5)


def resumed(config: RunConfig, explicit: Collection[str], recorded: RunConfig) -> RunConfig:
    return RunConfig(**resumed_options(config.values, explicit, recorded))


def test_a_continued_run_keeps_its_options_and_takes_over_what_decides_no_bits() -> None:
    recorded = RunConfig(microbatches=4, seed=7, epochs=3, nproc=1, threads=1)
    config = resumed(RunConfig(nproc=2, num_workers=0, seed=7, run_dir="a"), {"nproc", "num_workers", "seed"}, recorded)
    assert (config.training.seed, config.parallel.microbatches, config.training.epochs) == (7, 4, 3)
    assert (config.processes.nproc, config.data.num_workers, config.records.run_dir, config.processes.threads) == (
        (2,),
        0,
        "a",
        1,
    )


def test_another_strategy_continues_a_run_whose_parameters_were_gathered_in_low_precision() -> None:
    recorded = RunConfig(microbatches=4, strategy="fsdp", precision="bf16", fsdp_mixed_precision=True)
    config = resumed(RunConfig(strategy="ddp", run_dir="a"), {"strategy"}, recorded)
    assert (config.parallel.strategy, config.training.precision, config[FsdpOptions].fsdp_mixed_precision) == (
        "ddp",
        "bf16",
        False,
    )
    again = resumed(RunConfig(precision="bf16", fsdp_mixed_precision=False), {"fsdp_mixed_precision"}, recorded)
    assert not again[FsdpOptions].fsdp_mixed_precision


def test_a_continued_run_refuses_another_accumulation_which_would_have_no_effect() -> None:
    recorded = RunConfig(microbatches=4, grad_accumulation=2)
    with pytest.raises(ConfigError, match="--grad-accumulation: 2 when the run was created, 4 now"):
        resumed(RunConfig(grad_accumulation=4, run_dir="runs/a"), {"grad_accumulation"}, recorded)
    assert (
        resumed(
            RunConfig(grad_accumulation=2, run_dir="runs/a"), {"grad_accumulation"}, recorded
        ).parallel.grad_accumulation
        == 2
    )
    assert resumed(RunConfig(run_dir="runs/a"), (), recorded).parallel.grad_accumulation == 2


def test_a_continued_run_refuses_what_decides_bits() -> None:
    recorded = RunConfig(microbatches=4, seed=7, epochs=3)
    with pytest.raises(ConfigError) as caught:
        resumed(
            RunConfig(seed=8, epochs=3, precision="bf16", run_dir="runs/a"),
            {"seed", "epochs", "precision"},
            recorded,
        )
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("runs/a was created with other options")
    assert lines[1:3] == [
        "  --seed: 7 when the run was created, 8 now",
        "  --precision: fp32 when the run was created, bf16 now",
    ]


def planned(config: RunConfig, **datasets: Any) -> Any:
    task = Line(datasets=datasets)
    return set_up_data(resolve_config(config, task, 1)[0], task)


def test_the_length_of_a_run() -> None:
    assert planned(RunConfig(), train=points(20)).total_steps == 3 * 3
    assert planned(RunConfig(max_steps=4), train=points(20)).total_steps == 4
    carved = planned(RunConfig(val_fraction=0.2), train=points(20))
    assert (carved.total_steps, len(carved.train_val_split.val), carved.order.num_samples) == (3 * 2, 4, 16)


@pytest.mark.parametrize(
    ("datasets", "message"),
    [({}, "returned None; there is nothing to train on"), ({"train": iter([1])}, "has no length")],
)
def test_no_data_is_refused(datasets: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        planned(RunConfig(), **datasets)


# --- the judge


def judged(values: list[float], **options: Any) -> tuple[list[bool], TrainProgress]:
    judge, progress = ModelSelector(RunConfig(**options)), TrainProgress()
    improved = []
    for number, value in enumerate(values, start=1):
        progress.step = progress.version = number
        improved.append(judge.apply({"loss": value, "accuracy": value, "val/loss": value}, progress))
    return improved, progress


def test_the_lowest_loss_is_the_best_unless_told_otherwise() -> None:
    assert judged([3.0, 2.0, 2.0, 4.0, 1.0])[0] == [True, True, False, False, True]
    improved, progress = judged([3.0, 2.0, 2.0, 4.0, 1.0], best_metric="accuracy:max")
    assert improved == [True, False, False, True, False]
    assert (progress.best, progress.best_step, progress.best_metrics["accuracy"]) == (4.0, 4, 4.0)


def test_nan_is_never_the_best() -> None:
    improved, progress = judged([math.nan, 2.0, math.nan], early_stop="loss:3")
    assert improved == [False, True, False]
    assert progress.best == 2.0
    assert judged([math.nan] * 3, early_stop="loss:3")[1].stopped_early


@pytest.mark.parametrize(
    ("options", "values", "stops"),
    [
        ({"early_stop": "loss:2"}, [3.0, 2.0, 2.0, 2.0], True),
        ({"early_stop": "loss:2"}, [3.0, 3.0, 2.0, 2.0], False),
        ({"early_stop": "accuracy:2"}, [3.0, 2.0, 2.0], True),
        ({"early_stop": "accuracy:2", "best_metric": "accuracy:min"}, [3.0, 2.0, 1.0], False),
        ({"early_stop": "accuracy:min:2"}, [3.0, 2.0, 1.0], False),
        ({"early_stop": "accuracy:min:2"}, [3.0, 3.0, 4.0], True),
        ({"early_stop": "loss:max:2"}, [3.0, 2.0, 1.0], True),
        ({"early_stop": "val/loss:2"}, [3.0, 2.0, 1.0], False),
        ({}, [3.0, 4.0, 5.0], False),
    ],
)
def test_early_stopping_counts_evaluations_without_a_better_one(
    options: dict[str, Any], values: list[float], stops: bool
) -> None:
    assert judged(values, **options)[1].stopped_early is stops


# --- the control word


def test_what_one_rank_says_all_obey() -> None:
    rows = [
        ControlFlags().row(),
        ControlFlags(stop=StopCause.SIGTERM, has_next_batch=False).row(),
        ControlFlags(save=True, has_next_batch=False).row([1.0] * 4),
    ]
    assert {len(row) for row in rows} == {ROW_LENGTH}
    assert merge(rows) == ControlFlags(stop=StopCause.SIGTERM, save=True, has_next_batch=True)
    assert merge(rows[1:]).has_next_batch is False
    assert statuses(rows)[2] == [1.0] * 4


def test_a_signal_sets_a_flag_and_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        assert signals.received is StopCause.NONE
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received is StopCause.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    assert (StopCause.SIGTERM.exit_code, StopCause.SIGINT.exit_code) == (75, 130)


# --- losses, metrics and randomness


def test_a_mean_is_multiplied_out() -> None:
    assert as_loss(Line(), torch.tensor(2.0), 3) == (torch.tensor(6.0), 3.0)
    given = Loss(torch.tensor(2.0), 5.0)
    assert as_loss(Line(), given, 3) is given


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.zeros(3), r"a tensor of shape \(3,\)"),
        (2.0, "float"),
        (None, "NoneType"),
        (Loss(1.0, 2.0), "a Loss whose sum is float"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_loss_is_refused(value: Any, what: str) -> None:
    with pytest.raises(TaskError, match=rf"Line\.loss returned {what}.*paceline\.Loss\(sum, weight\)"):
        as_loss(Line(), value, 3)


WORLD = World(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    device=torch.device("cpu"),
    backend="gloo",
    generation=0,
    one_host=True,
)
MESH = ParallelDims(WORLD, {"dp": 1})


def evaluated(task: Task, number: int = 5) -> dict[str, float]:
    batches = EvalBatches(points(number), 4, seed=0, device=WORLD.device, workers=0, collate=task.collate)
    evaluator = Evaluator(task, WORLD.device, batches, seed=0, autocast=nullcontext)
    return evaluator.run(MESH, nn.Linear(1, 1), lambda: StopCause.NONE)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.zeros(4, 2), r"a tensor of shape \(4, 2\)"),
        (torch.tensor(1.0), r"a tensor of shape \(\)"),
        (0.5, "float"),
    ],
)
def test_what_is_no_metric_is_refused(value: Any, what: str) -> None:
    with pytest.raises(TaskError, match=rf"Line\.metrics gave {what} for 'value' in a batch of 4 samples"):
        evaluated(Line(value=value))


def test_sums_are_divided_by_their_weights_once() -> None:
    # Two blocks, of four samples and of one.
    assert evaluated(Line(value=(torch.tensor(3.0), 4)))["value"] == 0.75
    assert math.isnan(evaluated(Line(value=(0.0, 0.0)))["value"])


class Whole(Line):
    """Metrics of torchmetrics, one of them wrong in a way that a test chooses."""

    def build_metrics(self) -> Mapping[str, Any]:
        from torchmetrics.classification import MulticlassAccuracy

        return {"value": MulticlassAccuracy(num_classes=2, average=None)}


def test_a_metric_object_must_compute_one_number_from_a_tuple() -> None:
    labels = torch.tensor([0, 1])
    with pytest.raises(TaskError, match=r"build_metrics: 'value' computes a tensor of shape \(2,\).*one number"):
        evaluated(Whole(value=(labels, labels)))
    with pytest.raises(TaskError, match=r"Whole\.metrics gave a Tensor for 'value'; it must be a tuple"):
        evaluated(Whole(value=labels))


def test_randomness_depends_on_its_purpose_and_on_nothing_before() -> None:
    with torch.random.fork_rng():
        draws = []
        for key in ((1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0), (1, 0, 0)):
            seed_microbatch(*key)
            draws.append(float(torch.rand(())))
    assert draws[0] == draws[-1]
    assert len(set(draws)) == 4


# --- the state


def state_of(
    task: Task, *, total_steps: int | None = 10, model: nn.Module | None = None, **options: Any
) -> TrainingState:
    config, _ = resolve_config(RunConfig(**options), task, 1)
    schedule = RunSchedule(total_steps=total_steps, steps_per_epoch=None)
    return TrainingState(task, config, model or nn.Linear(1, 1), torch.device("cpu"), schedule)


@dataclass
class Scheduled(Line):
    """With the schedule that a test chooses."""

    schedule: Any = None

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> Any:
        return self.schedule(optimizer, total_steps)


def test_a_plateau_schedule_needs_no_number_of_steps() -> None:
    task = Scheduled(schedule=lambda optimizer, total: ReduceLROnPlateau(optimizer, patience=0))
    state = state_of(task, total_steps=None)
    state.step_plateaus(1.0)
    state.step_plateaus(2.0)
    assert state.learning_rates() == [pytest.approx(0.01)]
    assert state_of(Scheduled(schedule=lambda optimizer, total: None), total_steps=None).schedulers == {}


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer, total: StepLR(optimizer, 10),
        lambda optimizer, total: OneCycleLR(optimizer, max_lr=1.0, total_steps=total),
        lambda optimizer, total: StepLR(optimizer, 10 // total),
    ],
)
def test_other_schedules_need_the_number_of_steps(schedule: Any) -> None:
    with pytest.raises(TaskError, match="needs the number of steps, and a stream has no length"):
        state_of(Scheduled(schedule=schedule), total_steps=None)


def test_a_schedule_that_cannot_be_saved_is_refused() -> None:
    class Schedule:
        def step(self) -> None: ...

    with pytest.raises(TaskError, match="returned a Schedule without state_dict, load_state_dict"):
        state_of(Scheduled(schedule=lambda optimizer, total: Schedule()))


def test_a_model_without_shapes_is_refused() -> None:
    @dataclass
    class Lazy(Line):
        def build_model(self) -> nn.Module:
            return nn.Sequential(nn.LazyLinear(3))

    with pytest.raises(TaskError, match=r"'0\.weight' has no shape yet"):
        build_task_model(Lazy())


def test_a_hook_that_would_see_single_micro_batches_is_refused() -> None:
    @dataclass
    class Halving(Line):
        def build_model(self) -> nn.Module:
            model = nn.Linear(1, 1)
            model.bias.register_post_accumulate_grad_hook(lambda bias: bias.grad.mul_(0.5))
            return model

    with pytest.raises(TaskError, match=r"'bias' has a hook by register_post_accumulate_grad_hook"):
        build_task_model(Halving())


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: nn.SyncBatchNorm(3), "Leave out convert_sync_batchnorm"),
        (lambda: Sharing(torch.ones(1).expand(3)), r"'1\.shared' has elements that share memory"),
        (lambda: Sharing(torch.arange(5.0).unfold(0, 3, 1)), r"'1\.shared' has elements that share memory"),
    ],
)
def test_a_layer_that_trains_on_one_process_alone_is_refused(layer: Any, message: str) -> None:
    @dataclass
    class Layered(Line):
        def build_model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(1, 1), layer())

    with pytest.raises(TaskError, match=message):
        build_task_model(Layered())


def test_a_sparse_buffer_and_buffers_that_share_memory_are_taken() -> None:
    @dataclass
    class Graph(Line):
        def build_model(self) -> nn.Module:
            mask = torch.ones(4, 4)
            return nn.Sequential(nn.Linear(1, 1), Sharing(torch.eye(3).to_sparse()), Sharing(mask), Sharing(mask[:2]))

    model = build_task_model(Graph())
    require_own_memory("zero1", model)
    model[3].shared = model[0].weight.detach()
    with pytest.raises(ConfigError, match=r"the buffer '3\.shared' and the parameter '0\.weight' share memory"):
        require_own_memory("zero1", model)


class Sharing(nn.Module):
    def __init__(self, shared: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("shared", shared)


class Noting(nn.Linear):
    """Has a state that is not a tensor."""

    note: Any = "first"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def test_a_module_may_have_a_state_that_is_not_a_tensor() -> None:
    state, other = state_of(Line(), model=Noting(1, 1)), state_of(Line(), model=Noting(1, 1))
    state.module.note = "second"
    state.require_storable()
    other.load_state_dict(state.state_dict())
    assert other.module.note == "second"
    state.module.note = {1, 2}
    with pytest.raises(TaskError, match="model: the state cannot be saved"):
        state.require_storable()


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer, total: StepLR(optimizer, 1, gamma=0.5),
        lambda optimizer, total: OneCycleLR(optimizer, max_lr=1.0, total_steps=total),
        lambda optimizer, total: CosineAnnealingLR(optimizer, total),
        lambda optimizer, total: ReduceLROnPlateau(optimizer, patience=0),
    ],
)
def test_learning_rates_are_those_of_the_last_step(schedule: Any, lr: Any) -> None:
    taken: list[float] = []

    def build(model: nn.Linear) -> dict[str, Optimizer]:
        optimizers: dict[str, Optimizer] = {
            "two groups": SGD([{"params": [model.weight]}, {"params": [], "lr": copy.copy(lr) / 5}], lr=lr),
            "one": SGD([model.bias], lr=copy.copy(lr) / 10),
        }
        for each in optimizers.values():
            each.register_step_pre_hook(lambda one, *_: taken.extend(float(group["lr"]) for group in one.param_groups))
        return optimizers

    state = state_of(Scheduled(optimizers=build, schedule=schedule))
    assert json.dumps(state.learning_rates()), "they may be tensors"
    for step in range(6):
        taken.clear()
        for parameter in state.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        state.update(None)
        assert state.learning_rates() == taken
        assert len(taken) == 3
        state.step_plateaus(float(step))
        assert state.learning_rates() == taken


def test_a_parameter_group_that_is_added_in_training_is_refused_before_a_save() -> None:
    state = state_of(Line())
    state.optimizers["main"].add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    for save_or_step in (state.state_dict, lambda: state.update(None)):
        with pytest.raises(TaskError, match="the optimizer 'main' got a parameter group during training"):
            save_or_step()


def test_which_parameters_are_trained_belongs_to_the_state() -> None:
    state, other = state_of(Line()), state_of(Line())
    state.module.bias.requires_grad_(False)
    other.load_state_dict(state.state_dict())
    assert not other.module.bias.requires_grad
    with other.all_trainable():
        assert other.module.bias.requires_grad
    assert not other.module.bias.requires_grad
    other.load_state_dict(state_of(Line()).state_dict())
    assert other.module.bias.requires_grad


def test_an_optimizer_may_have_a_state_of_its_own_form() -> None:
    class Counting(SGD):
        steps = 0

        def state_dict(self) -> Any:
            return {"inner": super().state_dict(), "steps": self.steps}

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict["inner"])
            self.steps = state_dict["steps"]

    def build() -> TrainingState:
        return state_of(Line(optimizers=lambda model: Counting(model.parameters(), lr=0.1)))

    state, other = build(), build()
    state.optimizers["main"].steps = 7
    state.require_storable()
    other.load_state_dict(state.state_dict())
    assert other.optimizers["main"].steps == 7


def test_a_state_of_another_shape_is_refused() -> None:
    state = state_of(Line()).state_dict()
    other = state_of(Line(optimizers=lambda model: {"a": SGD(model.parameters(), lr=0.1)}))
    with pytest.raises(CheckpointError, match=r"does not fit the task as it is now: it holds main, the task builds a"):
        other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="does not fit the task as it is now"):
        state_of(Line(), ema=0.5).load_state_dict(state)
    bias = state_of(Line(optimizers=lambda model: SGD([model.bias], lr=0.1)))
    with pytest.raises(
        CheckpointError, match="the checkpoint has 'weight', and the task has not, in group 0 of the opt"
    ):
        bias.load_state_dict(state)
    state["model"]["weight"] = torch.ones(1, 2)
    with pytest.raises(CheckpointError, match="size mismatch for weight"):
        state_of(Line()).load_state_dict(state)


class Closing(SGD):
    def step(self, closure: Any) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        ({}, "no optimizer with a trainable parameter"),
        ({"main": "adam"}, "returned a str for 'main'"),
        (
            lambda model: Closing(model.parameters(), lr=0.1),
            "Closing computes the loss itself, within",
        ),
    ],
)
def test_what_is_no_optimizer_is_refused(optimizers: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        state_of(Line(optimizers=optimizers))


def test_the_average_starts_at_the_first_step_and_then_follows() -> None:
    state = state_of(Line(), ema=0.75)
    seen = []
    for gradient in (1.0, -2.0, 5.0):
        for parameter in state.module.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        state.update(None)
        seen.append(state.module.weight.detach().clone())
    expected = 0.75 * (0.75 * seen[0] + 0.25 * seen[1]) + 0.25 * seen[2]
    torch.testing.assert_close(state.evaluated_module.weight.detach(), expected)


class Constants(nn.Module):
    """A layer of spectral norm 1, position ids, a mask with infinities, and batch norm's statistics."""

    ids: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("ids", torch.arange(256))
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))


def test_what_has_no_mean_is_copied_into_the_average_or_derived_from_it() -> None:
    torch.manual_seed(0)
    model = Constants()
    average = EMA(copy.deepcopy(model), 0.999)
    reference = copy.deepcopy(model)
    for step in range(20):
        model.norm(model.layer(torch.randn(16, 8)))
        with torch.no_grad():
            model.layer.parametrizations.weight.original.add_(torch.randn(8, 8), alpha=0.3)  # type: ignore[union-attr, operator]
        average.update_parameters(model)
        if step == 0:
            reference.load_state_dict(model.state_dict())
        else:
            reference.norm.running_mean.lerp_(model.norm.running_mean, 0.001)  # type: ignore[union-attr, arg-type]
    averaged = average.module.eval()
    assert isinstance(averaged, Constants)
    assert torch.equal(averaged.ids, torch.arange(256))
    assert torch.equal(averaged.mask, model.mask)
    assert averaged.norm.num_batches_tracked == model.norm.num_batches_tracked == 20
    torch.testing.assert_close(averaged.norm.running_mean, reference.norm.running_mean)
    # Within the precision of a power iteration a step; with averaged singular vectors it was up to 2.
    assert float(torch.linalg.matrix_norm(averaged.layer.weight.detach(), 2)) == pytest.approx(1, abs=0.05)


def test_a_model_that_cannot_be_copied_has_no_average() -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        model = nn.utils.weight_norm(nn.Linear(1, 1))
    model(torch.ones(1, 1))
    config, _ = resolve_config(RunConfig(ema=0.5), Line(), 1)
    schedule = RunSchedule(total_steps=1, steps_per_epoch=None)
    with pytest.raises(TaskError, match=r"--ema needs a copy.*parametrizations\.weight_norm"):
        TrainingState(Line(), config, model, torch.device("cpu"), schedule)


def test_gradients_are_clipped_to_the_norm() -> None:
    state = state_of(Line())
    before = [parameter.detach().clone() for parameter in state.module.parameters()]
    for parameter in state.module.parameters():
        parameter.grad = torch.full_like(parameter, 30.0)
    state.update(lambda: nn.utils.clip_grad_norm_(state.module.parameters(), 0.5))
    moved = [a - b.detach() for a, b in zip(before, state.module.parameters(), strict=True)]
    # The learning rate is 0.1; two parameters share the norm.
    torch.testing.assert_close(torch.cat([m.flatten() for m in moved]), torch.full((2,), 0.1 * 0.5 / 2**0.5))
