"""Checks of a task's arithmetic that need no second strategy."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import random
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.data import Subset

import paceline
from paceline.core.callback import BatchInfo, RunSchedule
from paceline.core.config import RunConfig
from paceline.core.task import Loss, Task
from paceline.data.order import derive_key
from paceline.data.samples import seed_everything
from paceline.insight.verify.verify import Finding
from paceline.torch_internals import BatchNorm, tree_leaves
from paceline.training.evaluation import as_loss
from paceline.training.reproducibility import build_split, seed_microbatch, seed_model
from paceline.training.task_parts import build_task_callback, build_task_model

# --- Source locations in the user's code ---


_PACELINE = str(Path(paceline.__file__).parent) + "/"
_LIBRARIES = (
    "<",
    str(Path(torch.__file__).parent) + "/",
    sysconfig.get_path("stdlib") + "/",
    sysconfig.get_path("purelib") + "/",
    sysconfig.get_path("platlib") + "/",
)


def is_own(path: str) -> bool:
    """Return whether a file belongs to the user or a built-in task, and not to a library."""
    if path.startswith(_PACELINE):
        return path.startswith(_PACELINE + "training/tasks/")
    return not path.startswith(_LIBRARIES)


def own_caller(frame: FrameType | None) -> str | None:
    """Return FILE:LINE of the innermost frame in the user's code, if any."""
    while frame is not None:
        if is_own(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def definition(method: Callable[..., Any]) -> str | None:
    """Return FILE:LINE of a method's definition, if it is the user's."""
    code = inspect.unwrap(getattr(method, "__func__", method)).__code__
    return f"{code.co_filename}:{code.co_firstlineno}" if is_own(code.co_filename) else None


class LastMean(TorchFunctionMode):
    """A recorder of where many numbers were last reduced to one: in a loss, that is its mean.

    Attributes:
        place: FILE:LINE.
    """

    place: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() == 0:
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            if any(value.numel() > 1 for value in tensors):
                self.place = own_caller(sys._getframe(1)) or self.place
        return result


@contextmanager
def watch_calls(is_relevant: Callable[[FrameType, str, Any], bool]) -> Iterator[list[str]]:
    """Collect FILE:LINE of the user's code at each relevant call.

    Args:
        is_relevant: decides about a profiler's event (see :func:`sys.setprofile`).
    """
    places: list[str] = []

    def on_event(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and is_relevant(frame, event, argument):
            place = own_caller(frame if event == "c_call" else frame.f_back)
            if place is not None and place not in places:
                places.append(place)

    previous = sys.getprofile()
    sys.setprofile(on_event)
    try:
        yield places
    finally:
        sys.setprofile(previous)


# --- The context of the checks: the task, its model, and some of its samples ---


_SAMPLES, _GROUPS = 12, 3
_LINT_KEY = 97
"""Domain of the checks' random keys."""


class LintContext:
    """A task to check.

    Attributes:
        task: a copy of its own, which the checks may change.
        config: of the runs, with ``microbatches``, ``global_batch_size`` and ``max_steps``.
    """

    def __init__(self, task: Task, config: RunConfig) -> None:
        self.task = task
        self.config = config
        self._splits: dict[str, Any] = {}

    def build(self) -> nn.Module:
        """Return the model as every rank builds it."""
        seed_model(self.config.seed)
        return build_task_model(self.task)

    @cached_property
    def _module(self) -> nn.Module:
        module, steps = self.build(), self.config.max_steps or 1
        # A task may keep the objects that it builds, and use them in its loss.
        self.task.build_callback(module, RunSchedule(total_steps=steps, steps_per_epoch=steps))
        for optimizer in self.optimizers(module):
            self.task.build_scheduler(optimizer, steps)
        return module

    def optimizers(self, module: nn.Module) -> list[Optimizer]:
        """Return the task's optimizers of a model."""
        built = self.task.build_optimizer(module)
        return [*built.values()] if isinstance(built, Mapping) else [built]

    def model(self, *, training: bool) -> nn.Module:
        """Return a copy of the model, always in the same state."""
        return copy.deepcopy(self._module).train(training)

    @cached_property
    def dataset(self) -> Any:
        return self.split("train")

    def split(self, name: str) -> Any:
        """Return the dataset of a split, which is built once."""
        if name not in self._splits:
            self._splits[name] = build_split(self.task, self.config.seed, name)
        return self._splits[name]

    def sample(self, dataset: Any, number: int) -> Any:
        """Return a sample, with the randomness keyed by its number."""
        seed_everything(derive_key(self.config.seed, _LINT_KEY, number))
        return dataset[number]

    @cached_property
    def groups(self) -> list[list[Any]]:
        """Return lists of samples from all over the training data; none for a stream that ends."""
        dataset = self.dataset
        num_samples = _SAMPLES * _GROUPS
        if hasattr(type(dataset), "__getitem__") and hasattr(dataset, "__len__"):
            size = len(dataset)
            numbers = (
                [index * size // num_samples for index in range(num_samples)] if size >= num_samples else range(size)
            )
            samples = [self.sample(dataset, number) for number in numbers]
        elif isinstance(dataset, torch.utils.data.IterableDataset):
            samples = list(islice(iter(dataset), num_samples))
        else:
            samples = []
        groups = [samples[start : start + _SAMPLES] for start in range(0, len(samples), _SAMPLES)]
        return [group for group in groups if len(group) >= 4]

    def batch(self, samples: Sequence[Any]) -> Any:
        """Collate samples as for the task's methods."""
        return self.task.collate(list(samples))

    def loss(self, model: nn.Module, samples: Sequence[Any], *, microbatch: int = 0) -> Loss:
        """Return the loss of a batch of these samples, with the randomness of a micro-batch."""
        batch = self.batch(samples)
        seed_microbatch(self.config.seed, 0, microbatch)
        self.task.on_batch_begin(BatchInfo(split="train", step=0, number=microbatch, samples=len(samples)))
        return as_loss(self.task, self.task.loss(model, batch), len(samples))


def same(left: Any, right: Any) -> bool:
    """Return whether two nested values are bitwise equal."""
    left_leaves, right_leaves = tree_leaves(left), tree_leaves(right)
    return len(left_leaves) == len(right_leaves) and all(
        _equal(a, b) for a, b in zip(left_leaves, right_leaves, strict=True)
    )


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and bool(torch.equal(left, right))
    try:
        return bool((left == right) if not hasattr(left, "shape") else (left == right).all())
    except (TypeError, ValueError, AttributeError):
        return True  # not comparable


# --- Means of means: compare a batch with its unequal parts ---


_RELATIVE = 1e-4


@torch.no_grad()
def check_loss_mean(context: LintContext) -> Iterator[Finding]:
    """Check that the loss is not a mean over items of which samples have different numbers."""
    model = context.model(training=False)
    for samples in context.groups:
        with LastMean() as mean:
            whole = context.loss(model, samples)
        if not same(whole, context.loss(model, samples)):
            return  # another check reports unkeyed randomness
        parts = [context.loss(model, part) for part in _parts(samples)]
        expected, found = _mean([whole]), _mean(parts)
        if _differ(expected, found):
            has_weight = isinstance(context.task.loss(model, context.batch(samples)), Loss)
            advice = (
                "its weight does not match its sum"
                if has_weight
                else "it is a mean over items of which samples have different numbers (tokens, valid labels): "
                "return paceline.Loss(sum, weight)"
            )
            yield Finding(
                lint="mean-of-means",
                message=f"the loss of a batch is {expected:.6g}, but its parts combine to {found:.6g}: {advice}"
                "; or samples depend on each other, so that the loss depends on the number of micro-batches.",
                place=mean.place or definition(context.task.loss),
            )
            return


@torch.no_grad()
def check_metrics(context: LintContext) -> Iterator[Finding]:
    """Check that metrics are not means over blocks of different sizes."""
    model = context.model(training=False)
    whole_names = set(context.task.build_metrics())
    reported: set[str] = set()
    for samples in context.groups:
        whole = _pairs(context, model, samples)
        parts = [_pairs(context, model, part) for part in _parts(samples)]
        for name, pair in whole.items():
            part_values = [part[name] for part in parts if name in part]
            if name in reported or name in whole_names or len(part_values) < len(parts):
                continue
            expected, found = _mean([pair]), _mean(part_values)
            if _differ(expected, found):
                reported.add(name)
                yield Finding(
                    lint="unequal-counts",
                    message=f"the metric {name!r} of a batch is {expected:.6g}, but its parts combine to "
                    f"{found:.6g}: it is averaged over unequal counts. Return one value per sample, or "
                    "(sum, weight).",
                    place=definition(context.task.metrics),
                )


def _parts(samples: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    cut = max(1, len(samples) // 3)
    return samples[:cut], samples[cut:]


def _pairs(context: LintContext, model: Any, samples: Sequence[Any]) -> dict[str, Loss]:
    pairs = {}
    batch = context.batch(samples)
    context.task.on_batch_begin(BatchInfo(split="val", step=0, number=0, samples=len(samples)))
    for name, value in context.task.metrics(model, batch).items():
        if isinstance(value, torch.Tensor) and value.shape == (len(samples),):
            pairs[name] = Loss(value.double().sum(), len(samples))
        elif isinstance(value, tuple) and len(value) == 2:
            pairs[name] = Loss(torch.as_tensor(float(value[0])), float(value[1]))
    return pairs


def _mean(losses: Sequence[Loss]) -> float:
    weight = sum(float(loss.weight) for loss in losses)
    total = sum(float(loss.sum) for loss in losses)
    return total / weight if weight else 0.0


def _differ(left: float, right: float) -> bool:
    return abs(left - right) > _RELATIVE * max(abs(left), abs(right))


# --- Duplicated samples in an evaluation ---


_MAX_PADDING = 16


def check_duplicates(context: LintContext) -> Iterator[Finding]:
    """Check that a split was not padded with its first samples."""
    for split in ("val", "test"):
        dataset = context.split(split)
        num_duplicates = _repeated(context, dataset)
        if num_duplicates:
            yield Finding(
                lint="duplicated-samples",
                message=f"{num_duplicates} of the {split} data's {len(dataset)} samples occur twice, and count "
                "twice in its metrics. Return each sample once: Paceline distributes them without padding.",
                place=definition(context.task.build_dataset),
            )


def _repeated(context: LintContext, dataset: Any) -> int:
    if not hasattr(type(dataset), "__getitem__") or not hasattr(dataset, "__len__"):
        return 0
    inner: Any = dataset
    while isinstance(inner, Subset):
        num_duplicates = len(inner.indices) - len(set(map(int, inner.indices)))
        if num_duplicates:
            return num_duplicates
        inner = inner.dataset
    size = len(dataset)
    max_padding = min(_MAX_PADDING, size // 2)
    if max_padding < 1 or same(context.sample(dataset, 0), context.sample(dataset, 1)):
        return 0
    for padding in range(max_padding, 0, -1):
        pairs = ((dataset[size - padding + index], dataset[index]) for index in range(padding))
        if all(same(last, first) for last, first in pairs):
            return padding
    return 0


# --- Untrained parameters, batch norm over too few values, schedulers stepped by the task


_MIN_VALUES = 16
_MAX_NAMED = 3


def check_gradients(context: LintContext) -> Iterator[Finding]:
    """Check that every trained parameter has a gradient and an optimizer."""
    if not context.groups:
        return
    model = context.model(training=True)
    for number, samples in enumerate(context.groups):
        context.loss(model, samples, microbatch=number).sum.backward()  # type: ignore[no-untyped-call]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    unused = [name for name, parameter in trained.items() if parameter.grad is None]
    if unused:
        yield Finding(
            lint="unused-parameters",
            message=f"{_describe_parameters(unused)} get no gradient from the loss, so no optimizer changes them. "
            "Remove them, or freeze them with requires_grad_(False).",
            place=definition(context.task.build_model),
        )
    optimized = {id(p) for o in context.optimizers(model) for group in o.param_groups for p in group["params"]}
    forgotten = [name for name, parameter in trained.items() if id(parameter) not in optimized]
    if forgotten:
        yield Finding(
            lint="unused-parameters",
            message=f"{_describe_parameters(forgotten)} are in no optimizer: they are never updated. Add them, or "
            "freeze them with requires_grad_(False).",
            place=definition(context.task.build_optimizer),
        )


@torch.no_grad()
def check_batch_norm(context: LintContext) -> Iterator[Finding]:
    """Check that a micro-batch has enough values for batch statistics."""
    model = context.model(training=True)
    norms = {name: child for name, child in model.named_modules() if isinstance(child, BatchNorm)}
    samples = [sample for group in context.groups for sample in group]
    microbatches, batch = context.config.microbatches, context.config.global_batch_size
    assert isinstance(microbatches, int)
    assert batch is not None
    size = max(batch // microbatches, min(batch, context.task.min_microbatch_size))
    if not norms or not samples:
        return
    few: dict[str, int] = {}

    def record(name: str, inputs: Sequence[Any]) -> None:
        per_sample = inputs[0].numel() / inputs[0].shape[1] / len(samples)
        values = int(per_sample * size)
        if values < _MIN_VALUES:
            few[name] = values

    for name, child in norms.items():
        child.register_forward_pre_hook(lambda _, inputs, name=name: record(name, inputs))
    context.loss(model, samples)
    if few:
        name, values = min(few.items(), key=lambda item: item[1])
        yield Finding(
            lint="tiny-batch-norm",
            message=f"batch norm {name!r} computes its mean and variance over {values} values of a micro-batch "
            f"of {size} samples. Use fewer --microbatches, a larger --global-batch-size, or a norm that does not "
            "depend on the batch (GroupNorm, LayerNorm).",
            place=definition(context.task.build_model),
        )


def check_schedulers(context: LintContext) -> Iterator[Finding]:
    """Check that the task does not step its scheduler in the loss or callback."""
    task = copy.copy(context.task)
    model = context.model(training=True)
    steps = context.config.max_steps or 1
    callback = build_task_callback(task, model, RunSchedule(total_steps=steps, steps_per_epoch=steps))
    places: list[str | None] = []
    stepping = LintContext(task, context.config)
    for optimizer in stepping.optimizers(model):
        scheduler = task.build_scheduler(optimizer, steps)
        if scheduler is not None:
            scheduler.step = _record_calls(scheduler.step, places)
    callback.on_step_begin(0, 0)
    for samples in context.groups:
        stepping.loss(model, samples)
    callback.on_before_optimizer_step()
    if places:
        yield Finding(
            lint="scheduler-steps",
            message="the task steps its scheduler itself in each micro-batch, and Paceline again in each step. Leave "
            "that to Paceline, and return the scheduler from build_scheduler.",
            place=next((place for place in places if place), definition(context.task.build_scheduler)),
        )


def _record_calls(step: Callable[..., Any], places: list[str | None]) -> Callable[..., Any]:
    def wrapper(*arguments: Any, **named: Any) -> Any:
        places.append(own_caller(sys._getframe(1)))
        return step(*arguments, **named)

    return wrapper


def _describe_parameters(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"the parameters {', '.join(names[:_MAX_NAMED])}{more}"


# --- Random numbers that are not keyed, or equal in every micro-batch ---


_SEEDED = "Paceline keys the global generators of torch, Python and numpy by sample or micro-batch: use those."


@torch.no_grad()
def check_loss_randomness(context: LintContext) -> Iterator[Finding]:
    """Check that a repeated micro-batch has the same loss, and that micro-batches draw different numbers."""
    if not context.groups:
        return
    samples = context.groups[0]
    with watch_calls(_is_unkeyed_draw) as draws:
        first = context.loss(context.model(training=True), samples)
    repeated = context.loss(context.model(training=True), samples)
    if not same(first, repeated):
        yield Finding(
            lint="unkeyed-randomness",
            message="the loss of the same micro-batch of the same step differs each time: it uses a generator of its "
            f"own, so its value depends on which rank computed how many micro-batches before. {_SEEDED}",
            place=draws[-1] if draws else definition(context.task.loss),
        )
    with watch_calls(_is_seeding) as seedings:
        context.loss(context.model(training=True), samples, microbatch=0)
    first_states = _states()
    context.loss(context.model(training=True), samples, microbatch=1)
    for name, state in _states().items():
        if same(state, first_states[name]):
            yield Finding(
                lint="shared-randomness",
                message=f"the loss seeds {name} itself: every micro-batch on every rank uses the same numbers (for "
                f"example, the same dropout mask). Do not seed there. {_SEEDED}",
                place=seedings[-1] if seedings else definition(context.task.loss),
            )


def check_data(context: LintContext) -> Iterator[Finding]:
    """Check that a repeated read of a sample returns the same sample."""
    dataset = context.dataset
    if not hasattr(type(dataset), "__getitem__") or not hasattr(dataset, "__len__") or not len(dataset):
        return
    with watch_calls(_is_unkeyed_draw) as draws:
        first = context.sample(dataset, 0)
    if not same(first, context.sample(dataset, 0)):
        yield Finding(
            lint="unkeyed-randomness",
            message="the same sample of the training data differs each time: it uses a generator of its own, so it "
            f"depends on what was read before. {_SEEDED}",
            place=draws[-1] if draws else definition(type(dataset).__getitem__),
        )


def _states() -> dict[str, Any]:
    numpy_state: Any = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "random": torch.tensor([value % 2**32 for value in random.getstate()[1]]),
        "numpy": torch.from_numpy(numpy_state[1].astype(np.int64)),
    }


def _is_unkeyed_draw(frame: FrameType, event: str, argument: Any) -> bool:
    """Return whether an event is a call to a generator other than the global ones; numpy's cannot be observed."""
    if event != "c_call":
        return False
    owner = getattr(argument, "__self__", None)
    if isinstance(owner, random.Random):
        return owner is not getattr(random, "_inst", None)
    return argument is os.urandom


def _is_seeding(frame: FrameType, event: str, argument: Any) -> bool:
    if event == "c_call":
        return getattr(argument, "__name__", "") in ("seed", "manual_seed")
    return frame.f_code is torch.manual_seed.__code__ or frame.f_code is random.Random.seed.__code__


# --- Dependence on the rank, and so on the number of processes ---


_VARIABLES = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
_RANK_VARIABLES = {*_VARIABLES, "SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}
_RANK_FUNCTIONS = {dist.get_rank.__code__, dist.get_world_size.__code__}
_DESCRIPTIONS = {
    "model": "the model that build_model returns",
    "train": "the training data",
    "val": "the validation data",
    "test": "the test data",
    "rates": "the learning rates",
    "loss": "the loss",
}
_STEPS = 3


def check_ranks(context: LintContext) -> Iterator[Finding]:
    """Check that rank 1 of 2 builds and computes the same as rank 0 of 1."""
    first = _build_results(context)
    with _second_of_two(), watch_calls(_reads_rank) as places:
        # Use a new context, since a context caches the objects that it builds.
        second = _build_results(LintContext(context.task, context.config))
    wrong = [name for name, value in first.items() if not same(value, second[name])]
    if len(wrong) > 1 and "loss" in wrong:
        wrong.remove("loss")  # a consequence of the others
    if wrong and places:
        splits = any(name in ("train", "val", "test") for name in wrong)
        advice = (
            "Return all samples: Paceline distributes them, and samples would be lost or seen twice."
            if splits
            else "Do not use the rank: the result would depend on the number of processes."
        )
        yield Finding(
            lint="reads-the-rank",
            message=f"{_join_descriptions(wrong)} differ{'s' if len(wrong) == 1 else ''} between ranks. {advice}",
            place=places[0],
        )


def _join_descriptions(names: list[str]) -> str:
    words = [_DESCRIPTIONS[name] for name in names]
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[:-1] else words)


def _build_results(context: LintContext) -> dict[str, Any]:
    """Return everything that a rank builds, and the loss of one batch."""
    model = context.build()
    first = {"model": dict(model.state_dict())}
    sizes = {split: _outline(context, split) for split in ("train", "val", "test")}
    rates = []
    for optimizer in context.optimizers(model):
        scheduler = context.task.build_scheduler(optimizer, max(_STEPS, context.config.max_steps or 1))
        rates.append([group["lr"] for group in optimizer.param_groups])
        for _ in range(_STEPS if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) else 0):
            optimizer.step()  # without gradients, so nothing changes
            if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
    loss: Any = ()
    if context.groups:
        with torch.no_grad():
            loss = tuple(context.loss(context.model(training=True), context.groups[0]))
    return {**first, **sizes, "rates": rates, "loss": loss}


def _outline(context: LintContext, split: str) -> Any:
    """Return the size of a split and its first sample."""
    dataset = context.split(split)
    if not hasattr(type(dataset), "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    return [len(dataset), context.sample(dataset, 0) if len(dataset) else None]


@contextmanager
def _second_of_two() -> Iterator[None]:
    """Make this process rank 1 of 2, with torch's fake process group, which needs no peer."""
    from paceline.torch_internals import FakeStore

    with mock.patch.dict(os.environ, _VARIABLES):
        dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


def _reads_rank(frame: FrameType, event: str, argument: Any) -> bool:
    if event != "call":
        return False
    if frame.f_code is os.environ.__class__.__getitem__.__code__:
        return frame.f_locals.get("key") in _RANK_VARIABLES
    return frame.f_code in _RANK_FUNCTIONS


# --- All checks ---


_log = logging.getLogger(__name__)

LINTS = (
    check_loss_mean,
    check_metrics,
    check_loss_randomness,
    check_data,
    check_gradients,
    check_batch_norm,
    check_schedulers,
    check_duplicates,
    check_ranks,
)


def lint(task: Task, config: RunConfig) -> list[Finding]:
    """Return probable mistakes in a task's arithmetic.

    Args:
        task: an instance that nothing else uses.
        config: with ``microbatches``, ``global_batch_size`` and ``max_steps``.
    """
    context = LintContext(task, config)
    findings: list[Finding] = []
    for check in LINTS:
        try:
            with warnings.catch_warnings():
                # Ignore warnings about steps outside of training, such as a scheduler's before the optimizer's.
                warnings.simplefilter("ignore")
                findings += check(context)
        except Exception as error:
            # A check that fails here fails in training too, or needs the trainer: the runs will report it.
            _log.debug("lint", exc_info=error)
            findings.append(
                Finding(
                    lint="not-looked-at",
                    message=f"{check.__name__} failed: {type(error).__name__}: {error}",
                )
            )
    return findings
