"""The purity guard: parts of a run are computed twice and compared, since a run must be a function of its inputs.

A run is a function of task, configuration and seed only if the task's code is one too. A counter in the task, a
parameter that ``forward`` changes or a dataset that remembers what it read make the model depend on the number of
processes, or on a restart, without any error. So in the first steps, and sparsely afterwards, each process

- computes one of its micro-batches twice from the same random keys, and compares loss, gradients, buffers and plain
  attributes,
- reads some samples twice in two orders (:mod:`paceline.data.sample_check`),

and the ranks compare the bits of their replicas before they save and evaluate.
"""

from __future__ import annotations

import copy
import hashlib
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from paceline.core.task import Task
from paceline.data.sample_check import SampleCheck
from paceline.data.samples import Loader, MicroBatch
from paceline.parallel.microbatches import ReducerStrategy
from paceline.parallel.sharded_state import local_shard
from paceline.parallel.strategy import Strategy
from paceline.parallel.world import World
from paceline.runs.checkpoint_state import bytes_of
from paceline.training.control import ControlFlags
from paceline.training.purity_record import Impurity
from paceline.training.run_context import RunContext
from paceline.training.state import TrainingState
from paceline.training.step import MicrobatchRunner
from paceline.training.step_hooks import StepHook

_NAMED = 3  # differences that a message names

# --- The bits of tensors ---


_SMALL = 2**16  # bytes; hashed whole


def tensor_bits(tensor: torch.Tensor) -> int:
    """Return a number for the bits of this rank's part of a tensor: a hash, or the sum of a large one's integers."""
    part = local_shard(tensor.detach())
    size = part.numel() * part.element_size()
    if size <= _SMALL or size % 8 or not part.is_contiguous():
        return int.from_bytes(hashlib.blake2b(bytes_of(part), digest_size=8).digest(), "little")
    flat = part.reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:  # only aligned numbers can be viewed as integers
        flat = flat.clone()
    return int(flat.view(torch.int64).sum().item())


def bits_by_name(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Return the bits of tensors by name; those that another rank holds are left out."""
    return {name: tensor_bits(tensor) for name, tensor in named if not tensor.is_meta}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [name for name in after if before.get(name) != after[name]]


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown


# --- Plain attributes of the task and of the model's modules ---


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
_NO_OWNERS = (nn.Module, Optimizer, Dataset, DataLoader, type, types.ModuleType, types.FunctionType, torch.Tensor)
_FOREIGN = ("torch", "numpy", "builtins", "collections", "paceline", "lightning", "pytorch_lightning", "torchmetrics")
_MOST_ITEMS = 64
_MOST_NUMBERS = 2**20  # a larger tensor or array is rather data
_Scalar = bool | int | float | str | bytes | complex | None


class Attributes:
    """The plain values in a task, in its own objects, and in the modules of its model, at one moment."""

    def __init__(self, task: Task, module: nn.Module) -> None:
        self._owners = dict(_owners(task, module))
        self._values: dict[tuple[str, str], Any] = {}
        self._tokens: dict[str, tuple[str, Any]] = {}
        for path, owner in self._owners.items():
            for name, value, token in _plain(owner):
                self._values[path, name] = value
                self._tokens[f"{path}.{name}"] = token
        self._lengths = {key: len(value) for key, value in self._values.items() if isinstance(value, list)}

    def changed_since(self, before: Attributes) -> list[str]:
        """Return the paths of values that differ from those before, such as ``model.encoder.calls``."""
        return _changed(before._tokens, self._tokens)

    def is_counter(self, path: str) -> bool:
        """Return whether the value at ``path`` is a whole number."""
        kind = self._tokens.get(path, ("", None))[0]
        return kind == "int"

    def restore(self) -> None:
        """Bind the values of that moment again, and remove what was added since; a check must not count."""
        for path, owner in self._owners.items():
            for name in [name for name, _, _ in _plain(owner) if (path, name) not in self._values]:
                del vars(owner)[name]
        for (path, name), value in self._values.items():
            own = vars(self._owners[path])
            if isinstance(value, list):
                del value[self._lengths[path, name] :]
            elif isinstance(value, _Scalar | torch.Tensor) and own.get(name) is not value:
                own[name] = value


def _owners(task: Task, module: nn.Module) -> Iterator[tuple[str, Any]]:
    metric = getattr(sys.modules.get("torchmetrics"), "Metric", ())  # it counts its own updates
    yield "task", task
    for name, value in vars(task).items():
        if _is_own(value):
            yield f"task.{name}", value
    for name, owner in module.named_modules():
        if not isinstance(owner, metric):
            yield f"model.{name}" if name else "model", owner


def _is_own(value: Any) -> bool:
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, _NO_OWNERS)
        and type(value).__module__.partition(".")[0] not in _FOREIGN
    )


def _plain(owner: Any) -> Iterator[tuple[str, Any, tuple[str, Any]]]:
    """Yield the owner's plain attributes: name, value and token."""
    for name, value in vars(owner).items():
        if isinstance(owner, nn.Module) and name in _MODULE_ATTRIBUTES:
            continue
        token = _token(value)
        if token[0]:
            yield name, value, token


def _token(value: Any) -> tuple[str, Any]:
    """Return the kind of a value, and something that is equal for equal values; no kind for one that is not plain."""
    if isinstance(value, _Scalar):
        return type(value).__name__, repr(value)
    if isinstance(value, torch.Tensor) and value.numel() <= _MOST_NUMBERS:
        return "tensor", None if value.is_meta or value.layout is not torch.strided else tensor_bits(value)
    if isinstance(value, np.ndarray | np.generic) and value.size <= _MOST_NUMBERS:
        return "array", hashlib.blake2b(value.tobytes()).digest()
    if isinstance(value, list | tuple | set | frozenset | deque):
        items = list(value)[:_MOST_ITEMS]
        return type(value).__name__, (len(value), [_token(item) for item in items if isinstance(item, _Scalar)])
    if isinstance(value, dict):
        items = list(value.items())[:_MOST_ITEMS]
        return "dict", (len(value), [(repr(key), _token(item)) for key, item in items if isinstance(item, _Scalar)])
    return "", None


# --- One micro-batch, computed twice ---


@dataclass(frozen=True)
class _Observation:
    """What the computation of a micro-batch gave."""

    loss: tuple[float, float]  # the sums of losses and weights
    gradients: Mapping[str, int]
    buffers: Mapping[str, int]

    def differs(self, other: _Observation) -> str | None:
        """Describe the first difference; None if there is none. NaNs are equal."""
        if repr(self.loss) != repr(other.loss):
            return f"gave two losses, {self.loss[0]:.9g} and {other.loss[0]:.9g}"
        if names := _changed(self.buffers, other.buffers):
            return f"left two values in {_list(names)}"
        if names := _changed(self.gradients, other.gradients):
            return f"gave two gradients of {_list(names)}"
        return None


class PurityCheck(StepHook):
    """Checks the first steps of this process, and from time to time another one.

    Args:
        run: the run.
        world: the ranks.
        state: this rank's.
        loader: of the training data.
        runner: computes a micro-batch.
    """

    def __init__(
        self, run: RunContext, world: World, state: TrainingState, loader: Loader, runner: MicrobatchRunner
    ) -> None:
        self._run, self._world, self._state, self._loader, self._runner = run, world, state, loader, runner
        self._parameters: dict[str, int] | None = None
        self._last_sample_check: SampleCheck | None = None
        self._samples = 0  # to report in this step

    def before_microbatches(self, strategy: Strategy, microbatches: Sequence[MicroBatch]) -> None:
        """Check, if it is time, before this rank's part of the step."""
        self._take_sample_check()
        if not self._run.purity.steps.is_due():
            return
        with self._run.purity.steps.check():
            if "deepspeed" not in self._run.config.strategies:  # it moves parameters in and out within a step
                self._parameters = bits_by_name(self._state.module.named_parameters())
            if isinstance(strategy, ReducerStrategy) and microbatches and self._is_deterministic:
                self._compute_twice(strategy, microbatches[0])

    def after_microbatches(self, strategy: Strategy, microbatches: Sequence[MicroBatch]) -> None:
        """Compare the parameters with those before."""
        if self._parameters is None:
            return
        self._run.purity.checks["forward"] += 1
        self._compare_parameters()
        self._parameters = None

    def report(self, flags: ControlFlags) -> ControlFlags:
        """Report, once, which samples this rank reads, and whether there is something to settle."""
        samples, self._samples = self._samples, 0
        if not samples and not self._run.purity.has_news:
            return flags  # a step of a small model takes 400 us, and a new object 3 us
        return replace(flags, impure=self._run.purity.has_news, samples_fingerprint=samples)

    def filter_request(self, flags: ControlFlags) -> ControlFlags:
        """Settle what any rank found.

        Raises:
            PurityError: before the first checkpoint, with ``--purity error``.
        """
        if not flags.samples_fingerprint and not flags.impure:
            return flags
        progress, purity = self._state.progress, self._run.purity
        if flags.samples_fingerprint > 0:
            progress.data_fingerprint = progress.data_fingerprint or flags.samples_fingerprint
            purity.checks["data"] = 1
        is_other = not flags.impure and flags.samples_fingerprint not in (0, progress.data_fingerprint)
        if is_other:
            purity.add(self._other_data(between_ranks=flags.samples_fingerprint < 0))
        if is_other or flags.impure:  # the same on all ranks
            purity.settle(self._world, self._run.directory)
        return replace(flags, impure=False, samples_fingerprint=0)

    @property
    def _is_deterministic(self) -> bool:
        return self._run.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()

    def _take_sample_check(self) -> None:
        checked = self._loader.checked
        if checked is None or checked is self._last_sample_check:
            return
        self._last_sample_check, self._samples = checked, checked.reference
        self._run.purity.checks["samples"] += checked.num_samples
        if checked.problem is not None:
            name = type(self._run.data.train).__name__
            self._run.purity.add(Impurity("sample", f"{name}: {checked.problem}"))

    def _other_data(self, *, between_ranks: bool) -> Impurity:
        name = type(self._run.data.train).__name__
        who = "two ranks read" if between_ranks else "this process reads"
        than = "" if between_ranks else " than those with which the run began"
        if self._run.data.stream is not None:
            return Impurity(
                "data",
                f"{name}: {who} other samples at the beginning of the stream{than}. Every rank must read the whole "
                "stream, since Paceline gives each micro-batch to one rank: leave out the split by rank (get_rank, "
                "RANK, split_dataset_by_node, split_by_node), and seed every shuffle.",
            )
        return Impurity(
            "data",
            f"{name}: {who} other values in the same samples{than}. Files differ, or build_dataset draws from a "
            f"generator that nothing seeds.",
        )

    def _compute_twice(self, strategy: ReducerStrategy, microbatch: MicroBatch) -> None:
        run, module = self._run, self._state.module
        try:
            # The task may change its batch.
            copies = [replace(microbatch, batch=copy.deepcopy(microbatch.batch)) for _ in range(2)]
        except Exception:
            return
        before = Attributes(run.task, module)
        options = self._optimizer_options()
        self._world.progress_tracker.move("forward")
        first = self._compute(strategy, copies[0])
        between = Attributes(run.task, module)
        second = self._compute(strategy, copies[1])
        after = Attributes(run.task, module)
        before.restore()
        run.purity.checks["microbatches"] += 1
        changed = after.changed_since(between)
        counters = [path for path in changed if after.is_counter(path)]
        difference = first.differs(second)
        where = f"micro-batch {microbatch.index} of step {self._state.progress.step + 1}, computed twice,"
        if self._compare_parameters():
            return
        if names := _changed(options, self._optimizer_options()):
            run.purity.add(
                Impurity(
                    "optimizer",
                    f"a micro-batch changed {_list(names)}: in a short step a rank may have no micro-batch. Use "
                    "build_scheduler, or a callback's on_step_begin.",
                    about=" ".join(names),
                )
            )
        if difference is not None:
            suspects = changed or after.changed_since(before)
            meanwhile = f", while {_list(suspects)} changed" if suspects else ""
            certain = run.device.type == "cpu"  # on a GPU an operation may have no deterministic version
            run.purity.add(
                Impurity("microbatch", f"{where} {difference}{meanwhile}.", certain, about=" ".join(suspects))
            )
        elif counters:
            run.purity.add(
                Impurity(
                    "attribute",
                    f"{_list(counters)} counted a micro-batch twice that was computed twice. Each rank counts its own "
                    "micro-batches, and begins again after a restart; on_batch_begin gives step, epoch and progress.",
                    about=" ".join(counters),
                )
            )
        elif changed:
            run.purity.add(
                Impurity(
                    "attribute",
                    f"{_list(changed)} changed whenever a micro-batch was computed. Each rank has values of its own "
                    "there, and a restart loses them.",
                    certain=False,
                    about=" ".join(changed),
                )
            )

    def _optimizer_options(self) -> dict[str, float]:
        return {
            f"{option} of group {number} in optimizer {name}": value
            for name, optimizer in self._state.optimizers.items()
            for number, group in enumerate(optimizer.param_groups)
            for option, value in group.items()
            if isinstance(value, int | float)
        }

    def _compare_parameters(self) -> bool:
        """Look for parameters that forward or backward changed; return whether there are any."""
        assert self._parameters is not None
        now = bits_by_name(self._state.module.named_parameters())
        names = _changed(self._parameters, now)
        if names:
            self._parameters = now
            self._run.purity.add(
                Impurity(
                    "forward",
                    f"forward or backward changed the parameters {_list(names)}: each rank changes its replica by its "
                    f"own micro-batches. Change them in a callback's on_step_end.",
                    about=" ".join(names),
                )
            )
        return bool(names)

    def _compute(self, strategy: ReducerStrategy, microbatch: MicroBatch) -> _Observation:
        module = self._state.module
        observed: list[_Observation] = []

        def forward_backward() -> None:
            loss = self._runner.loss(strategy.model, microbatch)
            strategy.backward(self._state.scale_loss(loss.sum))
            gradients = ((n, p.grad) for n, p in module.named_parameters() if p.grad is not None)
            observed.append(
                _Observation(
                    (float(loss.sum.detach()), float(loss.weight)),
                    bits_by_name(gradients),
                    bits_by_name(module.named_buffers()),
                )
            )

        strategy.reducer.rehearse(forward_backward)
        return observed[0]


# --- The replicas of all ranks, before a save or an evaluation ---


def compare_replicas(run: RunContext, world: World, state: TrainingState) -> None:
    """Compare the bits of model, buffers and optimizers on all ranks, if it is time; all ranks call this together."""
    clock = run.purity.replicas
    if world.world_size == 1 or not world.broadcast_object(clock.is_due() if world.rank == 0 else None):
        return
    with clock.check():
        mine = bits_by_name(_tensors(state))
        totals = world.all_gather_object(hashlib.blake2b(repr(sorted(mine.items())).encode()).hexdigest())
    run.purity.checks["replicas"] += 1
    if len(set(totals)) == 1:
        return
    everyone: list[dict[str, int]] = world.all_gather_object(mine)
    names = [name for name in mine if len({bits.get(name) for bits in everyone}) > 1]
    run.purity.add(
        Impurity(
            "replicas",
            f"after step {state.progress.step} the ranks have different bits in {_list(names)}. A callback, an "
            "optimizer or a scheduler does something else on each rank.",
        )
    )


def check_buffers(run: RunContext, module: nn.Module, before: Mapping[str, int]) -> None:
    """Look for buffers that an evaluation changed, each rank's by its own part of the data.

    Args:
        run: the run.
        module: the evaluated model.
        before: the bits of its buffers before the evaluation.
    """
    if names := _changed(before, bits_by_name(module.named_buffers())):
        run.purity.add(
            Impurity(
                "evaluation",
                f"an evaluation changed the buffers {_list(names)}, on each rank by its own part of the data. Leave "
                "the model in evaluation mode there.",
            )
        )


def _tensors(state: TrainingState) -> Iterator[tuple[str, torch.Tensor]]:
    yield from state.module.named_parameters()
    yield from state.module.named_buffers()
    names = {id(parameter): name for name, parameter in state.module.named_parameters()}
    for optimizer_name, optimizer in state.optimizers.items():
        for parameter, values in optimizer.state.items():
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    yield f"{name} of {names.get(id(parameter), '?')} in optimizer {optimizer_name}", value
