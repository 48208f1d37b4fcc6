"""The purity guard: parts of a run are computed twice and compared, since a run must be a function of its inputs.

A run is a function of task, configuration and seed only if the task's code is one too. A counter in the task, a
parameter that ``forward`` changes or a dataset that remembers what it read make the model depend on the number of
processes, or on a restart, without any error. So in the first steps, and sparsely afterwards, each process

- computes one of its micro-batches twice from the same random keys, and compares loss, gradients, buffers and plain
  attributes,
- reads some samples twice in two orders (:mod:`paceline.data.samples`),

and the ranks compare the bits of their replicas before they save and evaluate.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
import sys
import time
import types
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from paceline.core.built_in import PACKAGES
from paceline.core.errors import PurityError, join_names
from paceline.core.task import Loss, Task
from paceline.data.samples import MicroBatch, SampleCheck, preserve_rng_state, seed_everything
from paceline.parallel.sharded_state import local_shard
from paceline.parallel.strategy import ReducerStrategy, Strategy
from paceline.parallel.world import World
from paceline.runs.checkpoint_state import bytes_of
from paceline.runs.checkpoint_store import scan
from paceline.runs.directory import RunDirectory
from paceline.runs.purity import PuritySummary
from paceline.training.control import ControlFlags
from paceline.training.group_context import GroupContext
from paceline.training.hooks import RunHook, StepHook
from paceline.training.run_context import RunContext
from paceline.training.state import TrainingState
from paceline.training.state_manager import StateManager
from paceline_checks.impurities import Impurity, impurity
from paceline_checks.options import CheckOptions

_log = logging.getLogger(__name__)

_DEPENDS = "depend on the number of processes, or on a restart:"
_REMEDIES = "What a task may do, and the remedies: docs/what-a-task-may-do.md."
_EVERY_S = 60.0  # after the first checks, a process checks at most so often,
_SHARE = 400  # and computes for so many times as long as a check took before the next one

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


# --- Plain attributes of the task and of the model's modules ---


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
_NO_OWNERS = (nn.Module, Optimizer, Dataset, DataLoader, type, types.ModuleType, types.FunctionType, torch.Tensor)
_FOREIGN = ("torch", "numpy", "builtins", "collections", *PACKAGES, "lightning", "pytorch_lightning", "torchmetrics")
_MOST_ITEMS = 64
_MOST_NUMBERS = 2**20  # a larger tensor or array is rather data
_SCALARS = (bool, int, float, str, bytes, complex, type(None))
_ITEMS = (list, tuple, set, frozenset, deque, dict)
_NUMBERS = (torch.Tensor, np.ndarray, np.generic)


class Attributes:
    """The plain values in a task, in its own objects, and in the modules of its model, at one moment."""

    def __init__(self, task: Task, module: nn.Module) -> None:
        self._owners = dict(_owners(task, module))
        self._values = {(path, name): value for path, owner in self._owners.items() for name, value in _plain(owner)}
        self._tokens = {f"{path}.{name}": _token(value) for (path, name), value in self._values.items()}
        self._lengths = {key: len(value) for key, value in self._values.items() if isinstance(value, list)}

    def changed_since(self, before: Attributes) -> list[str]:
        """Return the paths of values that differ from those before, such as ``model.encoder.calls``."""
        return _changed(before._tokens, self._tokens)

    def is_counter(self, path: str) -> bool:
        """Return whether the value at ``path`` is a whole number."""
        return self._tokens[path][0] is int

    def restore(self) -> None:
        """Bind the values of that moment again, and remove what was added since; a check must not count."""
        for path, owner in self._owners.items():
            for name in [name for name, _ in _plain(owner) if (path, name) not in self._values]:
                del vars(owner)[name]
        for (path, name), value in self._values.items():
            own = vars(self._owners[path])
            if isinstance(value, list):
                del value[self._lengths[path, name] :]
            elif isinstance(value, (*_SCALARS, torch.Tensor)) and own.get(name) is not value:
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


def _plain(owner: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(owner).items():
        if isinstance(owner, nn.Module) and name in _MODULE_ATTRIBUTES:
            continue
        if isinstance(value, (*_SCALARS, *_ITEMS)):
            yield name, value
        elif isinstance(value, _NUMBERS):
            size = value.numel() if isinstance(value, torch.Tensor) else value.size
            if size <= _MOST_NUMBERS:
                yield name, value


def _token(value: Any) -> tuple[type, Any]:
    """Return the type of a plain value, and something that is equal for equal values."""
    token: Any = None
    if isinstance(value, _ITEMS):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        shown = [(repr(key), _token(item)) for key, item in islice(items, _MOST_ITEMS) if isinstance(item, _SCALARS)]
        token = len(value), shown
    elif isinstance(value, torch.Tensor):
        token = None if value.is_meta or value.layout is not torch.strided else tensor_bits(value)
    elif isinstance(value, _SCALARS):
        token = repr(value)
    else:
        token = hashlib.blake2b(value.tobytes()).digest()
    return type(value), token


# --- One micro-batch, computed twice ---


Observation = tuple[tuple[float, float], dict[str, int], dict[str, int]]


def observe(loss: Loss, module: nn.Module) -> Observation:
    """Return sum and weight of a micro-batch's loss, and the bits of the buffers and gradients after its backward."""
    gradients = ((name, p.grad) for name, p in module.named_parameters() if p.grad is not None)
    pair = float(loss.sum.detach()), float(loss.weight)
    return pair, bits_by_name(module.named_buffers()), bits_by_name(gradients)


def compute_twice(
    where: str,
    task: Task,
    module: nn.Module,
    optimizers: Mapping[str, Optimizer],
    parameters: Mapping[str, int],
    compute: Callable[[], Observation],
) -> list[Impurity]:
    """Compute a micro-batch twice, and return what differs; the plain attributes keep their values.

    Args:
        parameters: the bits of the model's before.
        compute: computes the micro-batch's loss and gradients, each time from the same random keys and buffers.
    """
    before, options = Attributes(task, module), _options(optimizers)
    first = compute()
    between = Attributes(task, module)
    second = compute()
    after = Attributes(task, module)
    before.restore()
    if found := changed_parameters(module, parameters):
        return found
    if names := _changed(options, _options(optimizers)):
        found = [impurity("optimizer", names)]
    changed = after.changed_since(between)
    if (difference := _difference(first, second)) is not None:
        what = f"{where}, computed twice, {difference}"
        # On a GPU, an operation may have no deterministic version.
        certain = next(module.parameters()).device.type == "cpu"
        if suspects := changed or after.changed_since(before):
            return [*found, impurity("hidden-state", suspects, what=what, certain=certain)]
        return [*found, impurity("unkeyed-randomness", about="loss", what=what, certain=certain)]
    if counters := [path for path in changed if after.is_counter(path)]:
        return [*found, impurity("counter", counters)]
    return [*found, impurity("attribute", changed, certain=False)] if changed else found


def changed_parameters(module: nn.Module, before: Mapping[str, int]) -> list[Impurity]:
    """Return the parameters that forward or backward changed, as one finding, if there are any."""
    names = _changed(before, bits_by_name(module.named_parameters()))
    return [impurity("forward", names)] if names else []


def _difference(first: Observation, second: Observation) -> str | None:
    """Describe the first difference; None if there is none. NaNs are equal."""
    if repr(first[0]) != repr(second[0]):
        return f"gave two losses, {first[0][0]:.9g} and {second[0][0]:.9g}"
    for what, one, other in zip(("left two values in", "gave two gradients of"), first[1:], second[1:], strict=True):
        if names := _changed(one, other):
            return f"{what} {join_names(names, 3)}"
    return None


def _options(optimizers: Mapping[str, Optimizer]) -> dict[str, float]:
    return {
        f"{option} of group {number} in optimizer {name}": value
        for name, optimizer in optimizers.items()
        for number, group in enumerate(optimizer.param_groups)
        for option, value in group.items()
        if isinstance(value, int | float)
    }


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [name for name in after if before.get(name) != after[name]]


# --- What a process has found, and when it checks ---


class PurityClock:
    """When a check is due: the ``first`` times at once, and then so rarely that checks take little of the time."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._next = 0.0

    def is_due(self) -> bool:
        return self._first > 0 or time.monotonic() >= self._next

    @contextmanager
    def check(self) -> Iterator[None]:
        """Measure the check that runs in the context; it determines when the next one is due."""
        began = time.monotonic()
        yield
        now = time.monotonic()
        self._first -= 1
        self._next = now + max(_EVERY_S, _SHARE * (now - began))


class PurityRecord:
    """What a process has checked and found, over all groups.

    Attributes:
        replicas: when the ranks compare their replicas; rank 0 decides.
        checks: how often each check was made.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self.steps = PurityClock(first=2)
        self.replicas = PurityClock(first=1)
        self.checks: Counter[str] = Counter()
        self._known: dict[tuple[str, str], Impurity] = {}
        self._pending: dict[tuple[str, str], Impurity] = {}

    @property
    def has_news(self) -> bool:
        """Whether this rank found something that the others do not know."""
        return bool(self._pending)

    def add(self, *found: Impurity) -> None:
        """Keep what this rank found, until the ranks settle it together."""
        for each in found:
            key = each.kind, each.about
            if key not in self._known:
                self._pending.setdefault(key, each)

    def settle(self, world: World, directory: RunDirectory) -> None:
        """Record what any rank found, and stop or warn; all ranks call this together."""
        pending, self._pending = self._pending, {}
        gathered = world.all_gather_object([dataclasses.astuple(found) for found in pending.values()])
        new: dict[tuple[str, str], Impurity] = {}
        for found in (Impurity(*entry) for entries in gathered for entry in entries):
            if (found.kind, found.about) not in self._known:
                new.setdefault((found.kind, found.about), found)
        self._known |= new
        saved = bool(world.broadcast_object(bool(scan(directory.checkpoints)) if world.rank == 0 else None))
        if world.rank == 0:
            for found in new.values():
                directory.append_event("impure", check=found.kind, message=found.message)
        certain = [found.message for found in new.values() if found.certain]
        if certain and self._mode == "error" and not saved:
            raise PurityError(
                f"the model would {_DEPENDS} {certain[0]} Nothing was saved. {_REMEDIES} To train all the same: "
                "--purity warn."
            )
        if world.rank == 0:
            for found in new.values():
                _log.warning("the model may %s %s %s", _DEPENDS, found.message, _REMEDIES)

    def result(self) -> dict[str, Any]:
        found = tuple(found.message for found in self._known.values())
        return PuritySummary(self._mode, dict(sorted(self.checks.items())), found).to_json()


# --- The guard of a process's steps ---


class PurityCheck(StepHook):
    """Checks the first steps of this process, and from time to time another one."""

    def __init__(self, run: RunContext, record: PurityRecord, group: GroupContext, states: StateManager) -> None:
        self._run = run
        self._record = record
        self._world = group.world
        self._runner = group.runner
        self._state = states.state
        self._loader = states.loader
        self._parameters: dict[str, int] | None = None
        self._last_sample_check: SampleCheck | None = None
        self._samples = 0  # to report in this step

    def before_microbatches(self, strategy: Strategy, microbatches: Sequence[MicroBatch]) -> None:
        """Check, if it is time, before this rank's part of the step."""
        self._take_sample_check()
        if not self._record.steps.is_due():
            return
        with self._record.steps.check():
            if not strategy.moves_parameters:
                self._parameters = bits_by_name(self._state.module.named_parameters())
            deterministic = self._run.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
            if isinstance(strategy, ReducerStrategy) and microbatches and deterministic:
                self._compute_twice(strategy, microbatches[0])

    def after_microbatches(self, strategy: Strategy, microbatches: Sequence[MicroBatch]) -> None:
        if self._parameters is not None:
            self._record.checks["forward"] += 1
            self._record.add(*changed_parameters(self._state.module, self._parameters))
            self._parameters = None

    def report(self, flags: ControlFlags) -> ControlFlags:
        """Report, once, which samples this rank reads, and whether there is something to settle."""
        samples, self._samples = self._samples, 0
        if not samples and not self._record.has_news:
            return flags  # a step of a small model takes 400 us, and a new object 3 us
        return replace(flags, impure=self._record.has_news, samples_fingerprint=samples)

    def filter_request(self, flags: ControlFlags) -> ControlFlags:
        """Settle what any rank found.

        Raises:
            PurityError: before the first checkpoint, with ``--purity error``.
        """
        if not flags.samples_fingerprint and not flags.impure:
            return flags
        progress, purity = self._state.progress, self._record
        if flags.samples_fingerprint > 0:
            progress.data_fingerprint = progress.data_fingerprint or flags.samples_fingerprint
            purity.checks["data"] = 1
        is_other = not flags.impure and flags.samples_fingerprint not in (0, progress.data_fingerprint)
        if is_other:
            purity.add(self._other_data(between_ranks=flags.samples_fingerprint < 0))
        if is_other or flags.impure:  # the same on all ranks
            purity.settle(self._world, self._run.directory)
        return replace(flags, impure=False, samples_fingerprint=0)

    def _take_sample_check(self) -> None:
        checked = self._loader.checked
        if checked is None or checked is self._last_sample_check:
            return
        self._last_sample_check = checked
        self._samples = checked.reference
        self._record.checks["samples"] += checked.num_samples
        if (problem := checked.problem) is not None:
            found = impurity(problem.kind, about="sample", what=problem.what)
            self._record.add(replace(found, message=f"{type(self._run.data.train).__name__}: {found.message}"))

    def _other_data(self, *, between_ranks: bool) -> Impurity:
        data = self._run.data
        who, than = "two ranks read", ""
        if not between_ranks:
            who, than = "this process reads", " than those with which the run began"
        kind = "data" if data.stream is None else "split-stream"
        return impurity(kind, what=f"{type(data.train).__name__}: {who}", than=than)

    def _compute_twice(self, strategy: ReducerStrategy, microbatch: MicroBatch) -> None:
        run, state = self._run, self._state
        try:
            # The task may change its batch.
            copies = [replace(microbatch, batch=copy.deepcopy(microbatch.batch)) for _ in range(2)]
        except Exception:
            return

        def compute() -> Observation:
            copied, observed = copies.pop(), list[Observation]()

            def forward_backward() -> None:
                loss = self._runner.loss(strategy.model, copied)
                strategy.backward(state.scale_loss(loss.sum))
                observed.append(observe(loss, state.module))

            strategy.reducer.rehearse(forward_backward)
            return observed[0]

        assert self._parameters is not None
        self._world.progress_tracker.move("forward")
        where = f"micro-batch {microbatch.index} of step {state.progress.step + 1}"
        found = compute_twice(where, run.task, state.module, state.optimizers, self._parameters, compute)
        self._record.add(*found)
        self._record.checks["microbatches"] += 1


# --- Optimizers of which each rank has a part of the parameters ---


def couples_parameters(optimizer: Optimizer) -> bool:
    """Return whether the update of one parameter depends on that of another, tried with two small ones on the CPU.

    Not tried are torch's own, which do not (LBFGS has a closure), and optimizers that fail on a copy. All ranks call
    this together, whatever parameters each holds: a ``step`` may have collectives.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return False
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {k: v for k, v in vars(optimizer).items() if k not in ("state", "step") and not k.endswith("_hooks")}
    inner = [value for value in own.values() if isinstance(value, Optimizer)]

    def update(*gradients: float | None) -> torch.Tensor:
        parameters = [nn.Parameter(torch.ones(2, 3, dtype=given[0].dtype)) for _ in gradients]
        trial = object.__new__(type(optimizer))
        known = {id(optimizer): trial, **{id(p): parameters[0] for p in given}}
        # A wrapper's inner optimizer may have a state as large as the model.
        trial.__dict__ = copy.deepcopy(own, known | {id(each.state): defaultdict(dict) for each in inner})
        trial.state = defaultdict(dict)
        trial.param_groups = [{**trial.param_groups[0], "params": parameters}]
        Optimizer.__setstate__(trial, {})
        with preserve_rng_state():
            seed_everything(0)
            for _ in range(3):
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = None if gradient is None else torch.full_like(parameter, gradient)
                type(trial).step(trial)
        return parameters[0].detach()

    try:
        return not torch.equal(update(1.0, None), update(1.0, 100.0))
    except Exception:  # code of any kind, on tensors that it was not made for
        return False


# --- The replicas of all ranks, before a save or an evaluation ---


def compare_replicas(record: PurityRecord, world: World, state: TrainingState) -> None:
    """Compare the bits of model, buffers and optimizers on all ranks, if it is time; all ranks call this together."""
    clock = record.replicas
    if world.world_size == 1 or not world.broadcast_object(clock.is_due() if world.rank == 0 else None):
        return
    with clock.check():
        mine = bits_by_name(_tensors(state))
        totals = world.all_gather_object(hashlib.blake2b(repr(sorted(mine.items())).encode()).hexdigest())
    record.checks["replicas"] += 1
    if len(set(totals)) == 1:
        return
    everyone: list[dict[str, int]] = world.all_gather_object(mine)
    names = [name for name in mine if len({bits.get(name) for bits in everyone}) > 1]
    record.add(impurity("replicas", names, what=f"after step {state.progress.step}"))


def _tensors(state: TrainingState) -> Iterator[tuple[str, torch.Tensor]]:
    yield from state.module.named_parameters()
    yield from state.module.named_buffers()
    names = {id(parameter): name for name, parameter in state.module.named_parameters()}
    for optimizer_name, optimizer in state.optimizers.items():
        for parameter, values in optimizer.state.items():
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    yield f"{name} of {names.get(id(parameter), '?')} in optimizer {optimizer_name}", value


# --- The guard of a run ---


class PurityGuard(RunHook):
    """The checks of ``--purity`` in one process, and what they found."""

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        self.record = PurityRecord(run.config[CheckOptions].purity)
        self._is_on = run.config[CheckOptions].purity != "off"
        self.checks_samples = self._is_on

    def step_hook(self, group: GroupContext, states: StateManager) -> PurityCheck | None:
        """Return the check of a group's steps, unless they overlap."""
        if not self._is_on or group.strategy.overlaps_steps:
            return None
        if "zero1" in self.run.config.strategies:
            for name, optimizer in states.state.optimizers.items():
                if couples_parameters(optimizer):
                    self.record.add(impurity("coupled", [f"{name} ({type(optimizer).__name__})"]))
        return PurityCheck(self.run, self.record, group, states)

    def check_state(self, group: GroupContext, state: TrainingState) -> None:
        """Compare the ranks' replicas, if it is time, and settle what was found; all ranks call this together."""
        config = self.run.config
        if not self._is_on or config.asynchronous:
            return
        # Elsewhere each rank holds a part of the parameters, or of the optimizers' state.
        if isinstance(group.strategy, ReducerStrategy) and set(config.strategies) <= {"single", "ddp"}:
            compare_replicas(self.record, group.world, state)
        if any(group.world.all_gather_object(self.record.has_news)):
            self.record.settle(group.world, self.run.directory)

    @contextmanager
    def watch_evaluation(self, module: nn.Module) -> Iterator[None]:
        """Look for buffers that the evaluation in the context changes, each rank's by its own part of the data."""
        before = bits_by_name(module.named_buffers()) if self._is_on else {}
        yield
        if self._is_on and (names := _changed(before, bits_by_name(module.named_buffers()))):
            self.record.add(impurity("evaluation", names))

    def results(self, world: World) -> dict[str, Any]:
        return {"purity": world.broadcast_object(self.record.result() if world.rank == 0 else None)}
