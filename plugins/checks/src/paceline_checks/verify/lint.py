"""Checks of a task that need no second strategy: its arithmetic, and whether it is a function of its inputs."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import random
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import Subset

from paceline.core.config import ResolvedConfig
from paceline.core.plugins import is_own_file, own_folders
from paceline.core.task import BatchInfo, Loss, RunSchedule, Task
from paceline.data.order import derive_key
from paceline.data.samples import MOST_SAMPLES, check_samples, digest_of, generator_digests, seed_everything
from paceline.torch_internals import BatchNorm
from paceline.training.evaluation import as_loss
from paceline.training.reproducibility import build_split, seed_microbatch, seed_model
from paceline.training.state import build_task_callback, build_task_model, build_task_optimizers
from paceline_checks.impurities import Impurity, impurity
from paceline_checks.purity import Observation, bits_by_name, compute_twice, observe

_log = logging.getLogger(__name__)

# --- Lines of the user's code ---


_LIBRARIES = ("<", *(f"{path}/" for path in [Path(torch.__file__).parent, *sysconfig.get_paths().values()]))


def is_own(path: str) -> bool:
    """Return whether a file belongs to the user or a built-in task, and not to a library."""
    return not is_own_file(path) and (path.startswith(own_folders()) or not path.startswith(_LIBRARIES))


@contextmanager
def watch_calls(is_relevant: Callable[[Any, FrameType], bool]) -> Iterator[list[str]]:
    """Collect FILE:LINE of the user's code at each relevant call, given the built-in or the code that is called."""
    locations: list[str] = []

    def on_event(frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_call") or not is_relevant(argument if event == "c_call" else frame.f_code, frame):
            return
        caller = frame if event == "c_call" else frame.f_back
        while caller is not None and not is_own(caller.f_code.co_filename):
            caller = caller.f_back
        if caller is not None:
            locations.append(f"{caller.f_code.co_filename}:{caller.f_lineno}")

    previous = sys.getprofile()
    sys.setprofile(on_event)
    try:
        yield locations
    finally:
        sys.setprofile(previous)


def _is_unkeyed_draw(called: Any, frame: FrameType) -> bool:
    """Return whether a generator other than the global ones draws; numpy's cannot be observed."""
    owner = getattr(called, "__self__", None)
    return called is os.urandom or (isinstance(owner, random.Random) and owner is not getattr(random, "_inst", None))


def _is_seeding(called: Any, frame: FrameType) -> bool:
    return getattr(called, "__name__", getattr(called, "co_name", "")) in ("seed", "manual_seed")


def _is_reduction(called: Any, frame: FrameType) -> bool:
    return re.search("mean|sum|loss|entropy|norm", getattr(called, "__name__", "")) is not None


def _reads_rank(called: Any, frame: FrameType) -> bool:
    if called is os.environ.__class__.__getitem__.__code__:
        return frame.f_locals.get("key") in _RANK_VARIABLES
    return called in (dist.get_rank.__code__, dist.get_world_size.__code__)


def _locate(found: Impurity, method: Callable[..., Any], locations: Sequence[str] = ()) -> Impurity:
    """Add the place of the last watched call; without one, that of the method's definition, if it is the user's."""
    code = inspect.unwrap(getattr(method, "__func__", method)).__code__
    defined = f"{code.co_filename}:{code.co_firstlineno}" if is_own(code.co_filename) else None
    return replace(found, place=locations[-1] if locations else defined)


# --- The context of the checks: the task, its model, and some of its samples ---


_SAMPLES, _GROUPS = 12, 3
_LINT_KEY = 97
"""Domain of the checks' random keys."""


class LintContext:
    """A task to check: a copy of its own, which the checks may change, and the options of the runs."""

    def __init__(self, task: Task, config: ResolvedConfig) -> None:
        self.task = task
        self.config = config
        self.steps = config.training.max_steps or 1

    def build(self) -> nn.Module:
        """Return the model as every rank builds it."""
        seed_model(self.config.training.seed)
        return build_task_model(self.task)

    @cached_property
    def _module(self) -> nn.Module:
        module = self.build()
        # A task may keep the objects that it builds, and use them in its loss.
        self.task.build_callback(module, RunSchedule(total_steps=self.steps, steps_per_epoch=self.steps))
        for optimizer in build_task_optimizers(self.task, module).values():
            self.task.build_scheduler(optimizer, self.steps)
        return module

    def model(self, *, training: bool) -> nn.Module:
        """Return a copy of the model, always in the same state."""
        return copy.deepcopy(self._module).train(training)

    @cached_property
    def splits(self) -> Mapping[str, Any]:
        return {name: build_split(self.task, self.config.training.seed, name) for name in _SPLITS}

    def sample(self, dataset: Any, number: int) -> Any:
        """Return a sample, with the randomness keyed by its number."""
        seed_everything(derive_key(self.config.training.seed, _LINT_KEY, number))
        return dataset[number]

    @cached_property
    def groups(self) -> list[list[Any]]:
        """Lists of samples from all over the training data; none for a stream that ends."""
        dataset, most = self.splits["train"], _SAMPLES * _GROUPS
        if (size := _length(dataset)) is not None:
            count = min(size, most)
            samples = [self.sample(dataset, index * size // count) for index in range(count)]
        else:
            is_stream = isinstance(dataset, torch.utils.data.IterableDataset)
            samples = list(islice(iter(dataset), most)) if is_stream else []
        groups = [samples[start : start + _SAMPLES] for start in range(0, len(samples), _SAMPLES)]
        return [group for group in groups if len(group) >= 4]

    def batch(self, samples: Sequence[Any], *, microbatch: int = 0, split: str = "train") -> Any:
        """Collate samples, and announce them to the task."""
        batch = self.task.collate(list(samples))
        seed_microbatch(self.config.training.seed, 0, microbatch)
        self.task.on_batch_begin(BatchInfo(split=split, step=0, number=microbatch, samples=len(samples)))
        return batch

    def loss(self, model: nn.Module, samples: Sequence[Any], *, microbatch: int = 0) -> Loss:
        """Return the loss of a batch of these samples, with the randomness of a micro-batch."""
        batch = self.batch(samples, microbatch=microbatch)
        return as_loss(self.task, self.task.loss(model, batch), len(samples))


def _length(dataset: Any) -> int | None:
    """Return the length of a dataset that is read by number; None for another."""
    is_map = hasattr(type(dataset), "__getitem__") and hasattr(dataset, "__len__")
    return len(dataset) if is_map else None


# --- The task's arithmetic ---


_RELATIVE = 1e-4
_MAX_PADDING = 16
_MIN_VALUES = 16


@torch.no_grad()
def check_loss_mean(context: LintContext) -> Iterator[Impurity]:
    """Check that the loss is not a mean over items of which samples have different numbers."""
    model = context.model(training=False)
    for samples in context.groups[:1]:
        with watch_calls(_is_reduction) as locations:
            whole = context.loss(model, samples)
        if digest_of(whole) != digest_of(context.loss(model, samples)):
            return  # another check reports unkeyed randomness
        for what in _uneven(context, lambda part: {"loss": context.loss(model, part)}).values():
            yield _locate(impurity("mean-of-means", what=what), context.task.loss, locations)


@torch.no_grad()
def check_metrics(context: LintContext) -> Iterator[Impurity]:
    """Check that metrics are not means over blocks of different sizes."""
    model = context.model(training=False)
    for name, what in _uneven(context, lambda samples: _pairs(context, model, samples)).items():
        if name not in context.task.build_metrics():
            yield _locate(impurity("unequal-counts", [repr(name)], what=what), context.task.metrics)


def _uneven(context: LintContext, measure: Callable[[Sequence[Any]], Mapping[str, Loss]]) -> dict[str, str]:
    """Compare the means of batches with those of their two unequal parts; return those that differ."""
    uneven: dict[str, str] = {}
    for samples in context.groups:
        cut = max(1, len(samples) // 3)
        whole, *parts = (measure(part) for part in (samples, samples[:cut], samples[cut:]))
        for name in whole.keys() & parts[0].keys() & parts[1].keys():
            expected, found = _mean([whole[name]]), _mean([part[name] for part in parts])
            if abs(expected - found) > _RELATIVE * max(abs(expected), abs(found)):
                uneven.setdefault(name, f"{expected:.6g}, but its parts combine to {found:.6g}")
    return uneven


def _mean(losses: Sequence[Loss]) -> float:
    weight = sum(float(loss.weight) for loss in losses)
    return sum(float(loss.sum) for loss in losses) / weight if weight else 0.0


def _pairs(context: LintContext, model: Any, samples: Sequence[Any]) -> dict[str, Loss]:
    pairs = {}
    for name, value in context.task.metrics(model, context.batch(samples, split="val")).items():
        if isinstance(value, torch.Tensor) and value.shape == (len(samples),):
            pairs[name] = Loss(value.double().sum(), len(samples))
        elif isinstance(value, tuple) and len(value) == 2:
            pairs[name] = Loss(*value)
    return pairs


def check_duplicates(context: LintContext) -> Iterator[Impurity]:
    """Check that a split was not padded with its first samples."""
    for split in ("val", "test"):
        if number := _duplicates(dataset := context.splits[split]):
            what = f"{number} of the {split} data's {len(dataset)}"
            yield _locate(impurity("duplicated-samples", what=what), context.task.build_dataset)


def _duplicates(dataset: Any) -> int:
    inner = dataset
    while isinstance(inner, Subset):
        if number := len(inner.indices) - len(set(map(int, inner.indices))):
            return number
        inner = inner.dataset
    size = _length(dataset) or 0
    most = min(_MAX_PADDING, size // 2)
    first, last = ([digest_of(dataset[start + k]) for k in range(most)] for start in (0, size - most))
    if len(set(first)) < 2:
        return 0
    return next((number for number in range(most, 0, -1) if last[-number:] == first[:number]), 0)


@torch.no_grad()
def check_batch_norm(context: LintContext) -> Iterator[Impurity]:
    """Check that a micro-batch has enough values for batch statistics."""
    task, config, model = context.task, context.config, context.model(training=True)
    norms = {name: child for name, child in model.named_modules() if isinstance(child, BatchNorm)}
    samples = [sample for group in context.groups for sample in group]
    batch = config.global_batch_size
    size = max(batch // config.microbatches, min(batch, task.min_microbatch_size))
    values: dict[str, int] = {}

    def record(name: str, _: nn.Module, inputs: Sequence[Any]) -> None:
        values[name] = int(inputs[0].numel() / inputs[0].shape[1] / len(samples) * size)

    for name, child in norms.items():
        child.register_forward_pre_hook(partial(record, name))
    if norms and samples:
        context.loss(model, samples)
    least = min(values, key=values.__getitem__, default=None)
    if least is not None and values[least] < _MIN_VALUES:
        what = f"{values[least]} values of a micro-batch of {size} samples"
        yield _locate(impurity("tiny-batch-norm", [repr(least)], what=what), task.build_model)


def check_schedulers(context: LintContext) -> Iterator[Impurity]:
    """Check that the task does not step its scheduler in the loss or callback."""
    context = LintContext(copy.copy(context.task), context.config)  # of which the callback may change the model
    task, model = context.task, context.model(training=True)
    callback = build_task_callback(task, model, RunSchedule(total_steps=context.steps, steps_per_epoch=context.steps))
    optimizers = build_task_optimizers(task, model).values()
    schedulers = [task.build_scheduler(optimizer, context.steps) for optimizer in optimizers]
    codes = [inspect.unwrap(type(s).step).__code__ for s in schedulers if s is not None]
    with watch_calls(lambda called, _: called in codes) as locations:
        callback.on_step_begin(0, 0)
        for samples in context.groups:
            context.loss(model, samples)
        callback.on_before_optimizer_step()
    if locations:
        yield _locate(impurity("scheduler-steps"), task.build_scheduler, locations)


# --- Whether the task is a function of its inputs ---


def check_microbatches(context: LintContext) -> Iterator[Impurity]:
    """Compute a micro-batch twice, as the purity guard does, and others for their random numbers and gradients."""
    if not context.groups:
        return
    task, module = context.task, context.model(training=True)
    buffers = [buffer.clone() for buffer in module.buffers()]
    optimizers, parameters = build_task_optimizers(task, module), bits_by_name(module.named_parameters())

    def compute(group: int = 0, microbatch: int = 0) -> Observation:
        module.zero_grad()
        with torch.no_grad():
            for buffer, value in zip(module.buffers(), buffers, strict=True):
                buffer.copy_(value)
        loss = context.loss(module, context.groups[group], microbatch=microbatch)
        loss.sum.backward()  # type: ignore[no-untyped-call]
        return observe(loss, module)

    with watch_calls(_is_unkeyed_draw) as locations:
        found = compute_twice("micro-batch 0 of step 1", task, module, optimizers, parameters, compute)
    yield from (_locate(each, task.loss, locations) for each in found)

    with watch_calls(_is_seeding) as locations:
        states = [(compute(microbatch=number), generator_digests())[1] for number in range(2)]
    if names := [name for name, state in states[0].items() if state == states[1][name]]:
        yield _locate(impurity("shared-randomness", names), task.loss, locations)

    used = {name for group in range(len(context.groups)) for name in compute(group, group)[2]}
    groups = (group for optimizer in optimizers.values() for group in optimizer.param_groups)
    optimized = {id(parameter) for group in groups for parameter in group["params"]}
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    unused, forgotten = trained.keys() - used, [name for name, p in trained.items() if id(p) not in optimized]
    if unused:
        what = "get no gradient from the loss, so no optimizer changes them"
        yield _locate(impurity("unused-parameters", sorted(unused), what=what), task.build_model)
    if forgotten:
        what = "are in no optimizer: they are never updated"
        yield _locate(impurity("unused-parameters", forgotten, what=what), task.build_optimizer)


def check_data(context: LintContext) -> Iterator[Impurity]:
    """Read samples twice, as the purity guard does."""
    dataset = context.splits["train"]
    rows = range(min(MOST_SAMPLES, _length(dataset) or 0))
    with watch_calls(_is_unkeyed_draw) as draws:
        problem = check_samples(lambda _, row: context.sample(dataset, row), 0, rows, ()).problem
    if problem is not None:
        yield _locate(impurity(problem.kind, what=problem.what), type(dataset).__getitem__, draws)


_VARIABLES = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
_RANK_VARIABLES = {*_VARIABLES, "SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}
_STEPS = 3
_SPLITS = {"train": "training", "val": "validation", "test": "test"}


def check_ranks(context: LintContext) -> Iterator[Impurity]:
    """Check that rank 1 of 2, with torch's fake process group, builds and computes the same as rank 0 of 1."""
    from paceline.torch_internals import FakeStore

    first = _build_results(context)
    with mock.patch.dict(os.environ, _VARIABLES):
        dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
        try:
            with watch_calls(_reads_rank) as locations:
                # Use a new context, since a context caches the objects that it builds.
                second = _build_results(LintContext(context.task, context.config))
        finally:
            dist.destroy_process_group()
    wrong = [name for name, value in first.items() if value != second[name]]
    if wrong and locations:
        # If more than the loss differs, the loss is a consequence.
        names = wrong if len(wrong) == 1 else [name for name in wrong if name != "the loss"]
        yield _locate(impurity("reads-the-rank", names), context.task.loss, locations)


def _build_results(context: LintContext) -> dict[str, bytes]:
    """Return digests of everything that a rank builds, and of the loss of one batch."""
    model = context.build()
    results: dict[str, Any] = {"the model that build_model returns": dict(model.state_dict())}
    for split, dataset in context.splits.items():
        size = _length(dataset)
        results[f"the {_SPLITS[split]} data"] = size, context.sample(dataset, 0) if size else None
    rates = results["the learning rates"] = []
    for optimizer in build_task_optimizers(context.task, model).values():
        scheduler = context.task.build_scheduler(optimizer, max(_STEPS, context.steps))
        for _ in range(_STEPS):
            rates.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()  # without gradients, so nothing changes
            if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
                scheduler.step()
    if context.groups:
        with torch.no_grad():
            results["the loss"] = context.loss(context.model(training=True), context.groups[0])
    return {name: digest_of(result) for name, result in results.items()}


# --- All checks ---


CHECKS: tuple[Callable[[LintContext], Iterator[Impurity]], ...] = (
    *(check_loss_mean, check_metrics, check_microbatches, check_data),
    *(check_batch_norm, check_schedulers, check_duplicates, check_ranks),
)


def lint(task: Task, config: ResolvedConfig) -> list[Impurity]:
    """Return probable mistakes in a task, an instance that nothing else uses."""
    context = LintContext(task, config)
    findings: list[Impurity] = []
    for check in CHECKS:
        try:
            with warnings.catch_warnings():
                # Ignore warnings about steps outside of training, such as a scheduler's before the optimizer's.
                warnings.simplefilter("ignore")
                findings += check(context)
        except Exception as error:
            # A check that fails here fails in training too, or needs the trainer: the runs will report it.
            _log.debug("lint", exc_info=error)
            message = f"{check.__name__} failed: {type(error).__name__}: {error}"
            findings.append(Impurity("not-looked-at", message))
    return findings
