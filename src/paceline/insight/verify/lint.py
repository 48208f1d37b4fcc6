"""Checks of a task that need no second strategy."""

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
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.data import Subset

import paceline
from paceline.core.callback import BatchInfo, RunSchedule
from paceline.core.config import RunConfig
from paceline.core.task import Loss, Task
from paceline.data.order import derive_key
from paceline.data.samples import seed_everything
from paceline.insight.verify.verify import Finding
from paceline.training.evaluation import as_loss
from paceline.training.reproducibility import seed_microbatch, seed_model
from paceline.training.state import build_task_model

# --- Where in the user's own code something happens ---


_PACELINE = str(Path(paceline.__file__).parent) + "/"
_LIBRARIES = (
    "<",
    str(Path(torch.__file__).parent) + "/",
    sysconfig.get_path("stdlib") + "/",
    sysconfig.get_path("purelib") + "/",
    sysconfig.get_path("platlib") + "/",
)


def is_own(path: str) -> bool:
    """Whether a file is the user's, or a recipe's, rather than a library's."""
    if path.startswith(_PACELINE):
        return path.startswith(_PACELINE + "training/tasks/")
    return not path.startswith(_LIBRARIES)


def own_caller(frame: FrameType | None) -> str | None:
    """FILE:LINE of the innermost frame that is the user's; None where there is none."""
    while frame is not None:
        if is_own(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def definition(method: Callable[..., Any]) -> str | None:
    """FILE:LINE of a method's definition, where it is the user's."""
    code = inspect.unwrap(getattr(method, "__func__", method)).__code__
    return f"{code.co_filename}:{code.co_firstlineno}" if is_own(code.co_filename) else None


class LastMean(TorchFunctionMode):
    """Notes where many numbers were last made into one: in a loss, that is its mean.

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
def watch_calls(is_meant: Callable[[FrameType, str, Any], bool]) -> Iterator[list[str]]:
    """Collect FILE:LINE of the user's code whenever it comes to a call that is meant.

    Args:
        is_meant: of a profiler's event (see :func:`sys.setprofile`).
    """
    places: list[str] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and is_meant(frame, event, argument):
            place = own_caller(frame if event == "c_call" else frame.f_back)
            if place is not None and place not in places:
                places.append(place)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield places
    finally:
        sys.setprofile(before)


# --- What the lints look at: the task, its model, and some of its samples ---


_SAMPLES, _GROUPS = 12, 3
_LINT = 97
"""Domain of the keys of what is looked at."""


class LintContext:
    """A task to be looked at.

    Attributes:
        task: a copy of its own, which the lints may change.
        config: of the runs, with micro-batches and batch.

    Args:
        task: what is looked at.
        config: with ``microbatches``, ``global_batch_size`` and ``max_steps``.
    """

    def __init__(self, task: Task, config: RunConfig) -> None:
        self.task = task
        self.config = config
        self._splits: dict[str, Any] = {}

    def build(self) -> nn.Module:
        """The model, as every rank builds it."""
        seed_model(self.config.seed)
        return build_task_model(self.task)

    @cached_property
    def _module(self) -> nn.Module:
        module, steps = self.build(), self.config.max_steps or 1
        # A task may keep what it builds, and use it in its loss.
        self.task.build_callback(module, RunSchedule(total_steps=steps, steps_per_epoch=steps))
        for optimizer in self.optimizers(module):
            self.task.build_scheduler(optimizer, steps)
        return module

    def optimizers(self, module: nn.Module) -> list[Optimizer]:
        """What the task optimizes a model with."""
        built = self.task.build_optimizer(module)
        return [*built.values()] if isinstance(built, Mapping) else [built]

    def model(self, *, training: bool) -> nn.Module:
        """A model to compute with: always in the same state."""
        return copy.deepcopy(self._module).train(training)

    @cached_property
    def dataset(self) -> Any:
        """The training data."""
        return self.split("train")

    def split(self, name: str) -> Any:
        """The dataset of a split, read once."""
        if name not in self._splits:
            self._splits[name] = self.task.build_dataset(name)
        return self._splits[name]

    def sample(self, dataset: Any, number: int) -> Any:
        """A sample, with the randomness that is keyed by it."""
        seed_everything(derive_key(self.config.seed, _LINT, number))
        return dataset[number]

    @cached_property
    def groups(self) -> list[list[Any]]:
        """Some lists of samples, from all over the training data; none where it is a stream that ends."""
        dataset = self.dataset
        wanted = _SAMPLES * _GROUPS
        if hasattr(type(dataset), "__getitem__") and hasattr(dataset, "__len__"):
            size = len(dataset)
            numbers = [index * size // wanted for index in range(wanted)] if size >= wanted else range(size)
            samples = [self.sample(dataset, number) for number in numbers]
        elif isinstance(dataset, torch.utils.data.IterableDataset):
            samples = list(islice(iter(dataset), wanted))
        else:
            samples = []
        groups = [samples[start : start + _SAMPLES] for start in range(0, len(samples), _SAMPLES)]
        return [group for group in groups if len(group) >= 4]

    def batch(self, samples: Sequence[Any]) -> Any:
        """What the task's methods get of these samples."""
        return self.task.collate(list(samples))

    def loss(self, model: nn.Module, samples: Sequence[Any], *, microbatch: int = 0) -> Loss:
        """The loss of a batch of these samples, with the randomness of a micro-batch."""
        batch = self.batch(samples)
        seed_microbatch(self.config.seed, 0, microbatch)
        self.task.on_batch_begin(BatchInfo(split="train", step=0, number=microbatch, samples=len(samples)))
        return as_loss(self.task, self.task.loss(model, batch), len(samples))


def same(left: Any, right: Any) -> bool:
    """Whether two nested values hold the same bits."""
    mine, theirs = pytree.tree_leaves(left), pytree.tree_leaves(right)
    return len(mine) == len(theirs) and all(_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and bool(torch.equal(left, right))
    try:
        return bool((left == right) if not hasattr(left, "shape") else (left == right).all())
    except (TypeError, ValueError, AttributeError):
        return True  # nobody can say


# --- Means of means, and metrics averaged over unequal counts: a batch against its unequal parts ---


_RELATIVE = 1e-4


@torch.no_grad()
def check_loss_mean(subject: LintContext) -> Iterator[Finding]:
    """A mean over what samples have different numbers of is none that micro-batches can be added up to."""
    model = subject.model(training=False)
    for samples in subject.groups:
        with LastMean() as mean:
            whole = subject.loss(model, samples)
        if not same(whole, subject.loss(model, samples)):
            return  # randomness that nobody keys is told of elsewhere
        parts = [subject.loss(model, part) for part in _parts(samples)]
        expected, found = _mean([whole]), _mean(parts)
        if _apart(expected, found):
            weighed = isinstance(subject.task.loss(model, subject.batch(samples)), Loss)
            what = (
                "its weight is not what its sum is over"
                if weighed
                else "it is a mean over what samples have different numbers of (tokens, labels that count): "
                "return paceline.Loss(sum, weight)"
            )
            yield Finding(
                lint="mean-of-means",
                message=f"the loss of a batch is {expected:.6g}, but its parts add up to {found:.6g}: {what}"
                "; or samples depend on each other, and so the loss on the number of micro-batches.",
                place=mean.place or definition(subject.task.loss),
            )
            return


@torch.no_grad()
def check_metrics(subject: LintContext) -> Iterator[Finding]:
    """A pair (mean, 1) counts a small block as much as a large one."""
    model = subject.model(training=False)
    whole_names = set(subject.task.build_metrics())
    told: set[str] = set()
    for samples in subject.groups:
        whole = _pairs(subject, model, samples)
        parts = [_pairs(subject, model, part) for part in _parts(samples)]
        for name, pair in whole.items():
            of_parts = [part[name] for part in parts if name in part]
            if name in told or name in whole_names or len(of_parts) < len(parts):
                continue
            expected, found = _mean([pair]), _mean(of_parts)
            if _apart(expected, found):
                told.add(name)
                yield Finding(
                    lint="unequal-counts",
                    message=f"the metric {name!r} of a batch is {expected:.6g}, but its parts add up to "
                    f"{found:.6g}: it is averaged over unequal counts. Return one value a sample, or "
                    "(sum, weight).",
                    place=definition(subject.task.metrics),
                )


def _parts(samples: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    cut = max(1, len(samples) // 3)
    return samples[:cut], samples[cut:]


def _pairs(subject: LintContext, model: Any, samples: Sequence[Any]) -> dict[str, Loss]:
    pairs = {}
    batch = subject.batch(samples)
    subject.task.on_batch_begin(BatchInfo(split="val", step=0, number=0, samples=len(samples)))
    for name, value in subject.task.metrics(model, batch).items():
        if isinstance(value, torch.Tensor) and value.shape == (len(samples),):
            pairs[name] = Loss(value.double().sum(), len(samples))
        elif isinstance(value, tuple) and len(value) == 2:
            pairs[name] = Loss(torch.as_tensor(float(value[0])), float(value[1]))
    return pairs


def _mean(losses: Sequence[Loss]) -> float:
    weight = sum(float(loss.weight) for loss in losses)
    total = sum(float(loss.sum) for loss in losses)
    return total / weight if weight else 0.0


def _apart(left: float, right: float) -> bool:
    return abs(left - right) > _RELATIVE * max(abs(left), abs(right))


# --- Samples that an evaluation sees twice ---


_PADDED_UP_TO = 16


def check_duplicates(subject: LintContext) -> Iterator[Finding]:
    """A split that was padded to a multiple of something begins anew at its end."""
    for split in ("val", "test"):
        dataset = subject.split(split)
        twice = _repeated(subject, dataset)
        if twice:
            yield Finding(
                lint="duplicated-samples",
                message=f"{twice} of the {split} data's {len(dataset)} samples are there twice, and count "
                "twice in its metrics. Return each sample once: Paceline shares them without padding.",
                place=definition(subject.task.build_dataset),
            )


def _repeated(subject: LintContext, dataset: Any) -> int:
    if not hasattr(type(dataset), "__getitem__") or not hasattr(dataset, "__len__"):
        return 0
    inner: Any = dataset
    while isinstance(inner, Subset):
        twice = len(inner.indices) - len(set(map(int, inner.indices)))
        if twice:
            return twice
        inner = inner.dataset
    size = len(dataset)
    most = min(_PADDED_UP_TO, size // 2)
    if most < 1 or same(subject.sample(dataset, 0), subject.sample(dataset, 1)):
        return 0
    for padding in range(most, 0, -1):
        pairs = ((dataset[size - padding + index], dataset[index]) for index in range(padding))
        if all(same(last, first) for last, first in pairs):
            return padding
    return 0


# --- Parameters that nothing trains, batch norm over too few values, schedulers that the task steps itself


_LEAST_VALUES = 16
_NAMED = 3


def check_gradients(subject: LintContext) -> Iterator[Finding]:
    """A parameter without a gradient is not trained; nor is one that no optimizer has."""
    if not subject.groups:
        return
    model = subject.model(training=True)
    for number, samples in enumerate(subject.groups):
        subject.loss(model, samples, microbatch=number).sum.backward()  # type: ignore[no-untyped-call]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    unused = [name for name, parameter in trained.items() if parameter.grad is None]
    if unused:
        yield Finding(
            lint="unused-parameters",
            message=f"{_listed(unused)} get no gradient from the loss: they are not trained, "
            "and DistributedDataParallel would wait for them. Remove or freeze them (requires_grad_(False)).",
            place=definition(subject.task.build_model),
        )
    held = {id(p) for o in subject.optimizers(model) for group in o.param_groups for p in group["params"]}
    forgotten = [name for name, parameter in trained.items() if id(parameter) not in held]
    if forgotten:
        yield Finding(
            lint="unused-parameters",
            message=f"{_listed(forgotten)} are in no optimizer: they are never updated. Give them to one, or "
            "freeze them by requires_grad_(False).",
            place=definition(subject.task.build_optimizer),
        )


@torch.no_grad()
def check_batch_norm(subject: LintContext) -> Iterator[Finding]:
    """A micro-batch's statistics are those of its own values only."""
    model = subject.model(training=True)
    norms = {name: child for name, child in model.named_modules() if isinstance(child, _BatchNorm)}
    samples = [sample for group in subject.groups for sample in group]
    microbatches, batch = subject.config.microbatches, subject.config.global_batch_size
    assert isinstance(microbatches, int)
    assert batch is not None
    size = max(batch // microbatches, min(batch, subject.task.min_microbatch_size))
    if not norms or not samples:
        return
    few: dict[str, int] = {}

    def look(name: str, inputs: Sequence[Any]) -> None:
        per_sample = inputs[0].numel() / inputs[0].shape[1] / len(samples)
        values = int(per_sample * size)
        if values < _LEAST_VALUES:
            few[name] = values

    for name, child in norms.items():
        child.register_forward_pre_hook(lambda _, inputs, name=name: look(name, inputs))
    subject.loss(model, samples)
    if few:
        name, values = min(few.items(), key=lambda item: item[1])
        yield Finding(
            lint="tiny-batch-norm",
            message=f"batch norm {name!r} takes its mean and variance over {values} values, those of a micro-batch "
            f"of {size} samples. Use fewer --microbatches, a greater --global-batch-size, or a norm that does not "
            "depend on the batch (GroupNorm, LayerNorm).",
            place=definition(subject.task.build_model),
        )


def check_schedulers(subject: LintContext) -> Iterator[Finding]:
    """Paceline steps a scheduler once a step; a loss is computed once a micro-batch."""
    task = copy.copy(subject.task)
    model = subject.model(training=True)
    steps = subject.config.max_steps or 1
    callback = task.build_callback(model, RunSchedule(total_steps=steps, steps_per_epoch=steps))
    places: list[str | None] = []
    stepping = LintContext(task, subject.config)
    for optimizer in stepping.optimizers(model):
        scheduler = task.build_scheduler(optimizer, steps)
        if scheduler is not None:
            scheduler.step = _noting(scheduler.step, places)
    callback.on_step_begin(0, 0)
    for samples in subject.groups:
        stepping.loss(model, samples)
    callback.on_before_optimizer_step()
    if places:
        yield Finding(
            lint="scheduler-steps",
            message="the task steps its scheduler itself: once a micro-batch, and Paceline once more a step. Leave "
            "that to Paceline, and return the scheduler from build_scheduler.",
            place=next((place for place in places if place), definition(subject.task.build_scheduler)),
        )


def _noting(step: Callable[..., Any], places: list[str | None]) -> Callable[..., Any]:
    def noted(*arguments: Any, **named: Any) -> Any:
        places.append(own_caller(sys._getframe(1)))
        return step(*arguments, **named)

    return noted


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"the parameters {', '.join(names[:_NAMED])}{more}"


# --- Random numbers that nobody keys, or that every micro-batch gets alike ---


_SEEDED = "Paceline keys torch's, Python's and numpy's global generators by sample or micro-batch: draw from those."


@torch.no_grad()
def check_loss_randomness(subject: LintContext) -> Iterator[Finding]:
    """The same micro-batch twice gives the same loss; two micro-batches do not draw the same numbers."""
    if not subject.groups:
        return
    samples = subject.groups[0]
    with watch_calls(_draws) as drawn:
        first = subject.loss(subject.model(training=True), samples)
    again = subject.loss(subject.model(training=True), samples)
    if not same(first, again):
        yield Finding(
            lint="unkeyed-randomness",
            message="the loss of one micro-batch of one step comes out differently each time: it draws from a "
            f"generator of its own, so its value depends on who computes how many micro-batches before. {_SEEDED}",
            place=drawn[-1] if drawn else definition(subject.task.loss),
        )
    with watch_calls(_seeds) as seeded:
        subject.loss(subject.model(training=True), samples, microbatch=0)
    left = _states()
    subject.loss(subject.model(training=True), samples, microbatch=1)
    for name, state in _states().items():
        if same(state, left[name]):
            yield Finding(
                lint="shared-randomness",
                message=f"the loss seeds {name} itself: every micro-batch, on every rank, draws the same numbers "
                f"(dropout drops the same). Do not seed there. {_SEEDED}",
                place=seeded[-1] if seeded else definition(subject.task.loss),
            )


def check_data(subject: LintContext) -> Iterator[Finding]:
    """The same sample of the same epoch is the same, whoever reads it."""
    dataset = subject.dataset
    if not hasattr(type(dataset), "__getitem__") or not hasattr(dataset, "__len__") or not len(dataset):
        return
    with watch_calls(_draws) as drawn:
        first = subject.sample(dataset, 0)
    if not same(first, subject.sample(dataset, 0)):
        yield Finding(
            lint="unkeyed-randomness",
            message="a sample of the training data comes out differently each time: it draws from a "
            f"generator of its own, so it depends on who read what before. {_SEEDED}",
            place=drawn[-1] if drawn else definition(type(dataset).__getitem__),
        )


def _states() -> dict[str, Any]:
    numpy_state: Any = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "random": torch.tensor([value % 2**32 for value in random.getstate()[1]]),
        "numpy": torch.from_numpy(numpy_state[1].astype(np.int64)),
    }


def _draws(frame: FrameType, event: str, argument: Any) -> bool:
    """A call to a generator that is not one of the global ones; numpy's calls cannot be watched."""
    if event != "c_call":
        return False
    owner = getattr(argument, "__self__", None)
    if isinstance(owner, random.Random):
        return owner is not getattr(random, "_inst", None)
    return argument is os.urandom


def _seeds(frame: FrameType, event: str, argument: Any) -> bool:
    if event == "c_call":
        return getattr(argument, "__name__", "") in ("seed", "manual_seed")
    return frame.f_code is torch.manual_seed.__code__ or frame.f_code is random.Random.seed.__code__


# --- A task that asks which rank it is: what it then computes depends on the number of processes ---


_VARIABLES = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
_READ = {*_VARIABLES, "SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}
_ASKING = {dist.get_rank.__code__, dist.get_world_size.__code__}
_IN_WORDS = {
    "model": "the model that build_model returns",
    "train": "the training data",
    "val": "the validation data",
    "test": "the test data",
    "rates": "the learning rates",
    "loss": "the loss",
}
_STEPS = 3


def check_ranks(subject: LintContext) -> Iterator[Finding]:
    """What the first of one rank builds and computes, the second of two must build and compute as well."""
    alone = _built(subject)
    with _second_of_two(), watch_calls(_asks) as asked:
        # Anew: what is looked at keeps what it has built.
        second = _built(LintContext(subject.task, subject.config))
    wrong = [name for name, value in alone.items() if not same(value, second[name])]
    if len(wrong) > 1 and "loss" in wrong:
        wrong.remove("loss")  # it follows from the others
    if wrong and asked:
        splits = any(name in ("train", "val", "test") for name in wrong)
        advice = (
            "Return all samples: Paceline shares them, and samples would be lost or seen twice."
            if splits
            else "Leave ranks out of it: the result would depend on the number of processes."
        )
        yield Finding(
            lint="reads-the-rank",
            message=f"{_in_words(wrong)} differ{'s' if len(wrong) == 1 else ''} from rank to rank. {advice}",
            place=asked[0],
        )


def _in_words(names: list[str]) -> str:
    words = [_IN_WORDS[name] for name in names]
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[:-1] else words)


def _built(subject: LintContext) -> dict[str, Any]:
    """What a rank builds, and the loss of one batch."""
    model = subject.build()
    first = {"model": dict(model.state_dict())}
    sizes = {split: _outline(subject, split) for split in ("train", "val", "test")}
    rates = []
    for optimizer in subject.optimizers(model):
        scheduler = subject.task.build_scheduler(optimizer, max(_STEPS, subject.config.max_steps or 1))
        rates.append([group["lr"] for group in optimizer.param_groups])
        for _ in range(_STEPS if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) else 0):
            optimizer.step()  # without gradients: nothing changes
            if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
    loss: Any = ()
    if subject.groups:
        with torch.no_grad():
            loss = tuple(subject.loss(subject.model(training=True), subject.groups[0]))
    return {**first, **sizes, "rates": rates, "loss": loss}


def _outline(subject: LintContext, split: str) -> Any:
    """How many samples a split has, and its first."""
    dataset = subject.split(split)
    if not hasattr(type(dataset), "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    return [len(dataset), subject.sample(dataset, 0) if len(dataset) else None]


@contextmanager
def _second_of_two() -> Iterator[None]:
    """Have this process take itself for rank 1 of 2: torch's own stand-in for a group, without a peer."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with mock.patch.dict(os.environ, _VARIABLES):
        dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


def _asks(frame: FrameType, event: str, argument: Any) -> bool:
    if event != "call":
        return False
    if frame.f_code is os.environ.__class__.__getitem__.__code__:
        return frame.f_locals.get("key") in _READ
    return frame.f_code in _ASKING


# --- All looks at a task, one after another ---


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
    """What is probably not meant in a task's arithmetic.

    Args:
        task: an instance that nothing else uses.
        config: with ``microbatches``, ``global_batch_size`` and ``max_steps``.
    """
    subject = LintContext(task, config)
    findings: list[Finding] = []
    for look in LINTS:
        try:
            with warnings.catch_warnings():
                # Of steps that are not those of a training, such as a scheduler's before the optimizer's.
                warnings.simplefilter("ignore")
                findings += look(subject)
        except Exception as error:
            # What fails here fails in training too, or takes what only a trainer gives: the runs will tell.
            _log.debug("lint", exc_info=error)
            findings.append(
                Finding(
                    lint="not-looked-at",
                    message=f"{look.__name__} could not be done: {type(error).__name__}: {error}",
                )
            )
    return findings
