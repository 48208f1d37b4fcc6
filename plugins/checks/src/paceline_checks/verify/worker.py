"""The worker of a verification: it trains and records each step."""

from __future__ import annotations

import copy
import json
import logging
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import IO, Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from paceline.core.config import ResolvedConfig
from paceline.core.environment import Environment, detect_environment
from paceline.core.errors import LaunchError, StopRequested
from paceline.core.files import write_atomically
from paceline.core.job import WorkerConfig
from paceline.core.plugins import import_object
from paceline.core.signals import dump_stacks_on_signal
from paceline.core.task import BatchInfo, Callback, LossResult, RunSchedule, Task
from paceline.core.task_loading import TaskReference, parse_assignments
from paceline.data.samples import digest_of
from paceline.parallel.sharded_state import gather_full
from paceline.parallel.strategy_selection import memory_per_process
from paceline.parallel.world import choose_device
from paceline.runs.checkpoint_state import model_sha256
from paceline.runs.checkpoint_store import newest_verified
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import record_failure
from paceline.torch_internals import tree_leaves, tree_map
from paceline.training.control import StopSignals
from paceline.training.loaded_model import read_checkpoint
from paceline.training.reproducibility import configure_numerics, preserve_numerics
from paceline.training.run_context import RunContext, RunRequest, setup_run
from paceline.training.worker import run
from paceline_checks.verify.cases import GroupPlan, Training
from paceline_checks.verify.lint import lint
from paceline_checks.verify.plain import AVERAGE

# --- The task in float64, with which all other runs are compared ---


def to_float64(module: nn.Module) -> nn.Module:
    """Convert a module to float64, such that its submodules accept inputs of lower precision."""
    module.double()
    for child in module.modules():
        child.register_forward_pre_hook(lambda _, *inputs: cast_inputs(inputs), with_kwargs=True)
    return module


def cast_inputs(value: Any) -> Any:
    """Convert the floating-point tensors of a nested value to float64."""

    def convert(leaf: Any) -> Any:
        is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.double() if is_float else leaf

    return tree_map(convert, value)


class Float64Mode(TorchFunctionMode):
    """A mode that creates float64 where float32 is requested: ``x.float()``, ``dtype=torch.float32``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        if any(value is torch.float32 for value in (*args, *kwargs.values())):
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {n: torch.float64 if v is torch.float32 else v for n, v in kwargs.items()}
        return func(*args, **kwargs)


# --- The tensors of a reference run on disk, and the distance of other runs from them ---


class ReferenceWriter:
    """A writer of each step's tensors as one float64 file."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._tensors: dict[str, torch.Tensor] = {}
        self._sums: defaultdict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))  # of squares, and their number

    def add(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor of the step: a "gradient" or a "weight"."""
        value = tensor.detach().cpu().double().clone(memory_format=torch.contiguous_format)
        self._tensors[f"{kind}/{name}"] = value
        total, count = self._sums[kind]
        self._sums[kind] = total + float(value.square().sum()), count + value.numel()

    def end_step(self, step: int) -> None:
        """Write the step's tensors, and the root mean square of each kind."""
        rms = {kind: repr(math.sqrt(total / max(1, count))) for kind, (total, count) in self._sums.items()}
        save_file(self._tensors, self._directory / f"step-{step}.safetensors", metadata=rms)
        self._tensors.clear()
        self._sums.clear()


class ReferenceReader:
    """A reader of the files of :class:`ReferenceWriter`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._step = 0

    def distance(self, step: int, kind: str, name: str, tensor: torch.Tensor) -> float | None:
        """Return the distance of a tensor from the reference's; None if the reference does not have it.

        It is the root mean square of the difference, relative to that of the reference's tensor or, if larger
        (a bias whose gradient is zero except for rounding), of all its tensors of this kind.
        """
        if step != self._step:
            self._step = step
            path = self._directory / f"step-{step}.safetensors"
            # If the reference failed before, the report says so.
            self._file: Any = safe_open(path, framework="pt") if path.exists() else None
            self._names = frozenset() if self._file is None else frozenset(self._file.keys())  # type: ignore[no-untyped-call]
        key = f"{kind}/{name}"
        if key not in self._names:
            return None
        rms = float((self._file.metadata() or {}).get(kind, 0.0))
        return _distance(tensor.detach().cpu().double(), self._file.get_tensor(key), rms)


def _rms(tensor: torch.Tensor) -> float:
    return math.sqrt(float(tensor.square().mean())) if tensor.numel() else 0.0


def farthest_tensor(
    tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> tuple[str | None, float]:
    """Return the tensor with the greatest distance from the expected one, as :class:`ReferenceReader` measures it.

    Tensors that are not in both are left out.
    """
    pairs = {
        name: (value.detach().cpu(), expected[name].detach().cpu())
        for name, value in tensors.items()
        if name in expected
    }
    inexact = [of.reshape(-1).double() for _, of in pairs.values() if of.is_floating_point()]
    scale_of_all = _rms(torch.cat([of[of.isfinite()] for of in inexact])) if inexact else 0.0
    farthest: tuple[str | None, float] = (None, 0.0)
    for name, (value, of) in pairs.items():
        distance = _distance(_as_real_double(value), _as_real_double(of), scale_of_all)
        if farthest[0] is None or distance > farthest[1]:
            farthest = name, distance
    return farthest


def _distance(value: torch.Tensor, of: torch.Tensor, scale_of_all: float) -> float:
    if value.shape != of.shape:
        return math.inf
    difference = torch.where(value == of, 0.0, value - of)  # infinities may be equal
    distance = _rms(difference)
    scale = max(_rms(of[of.isfinite()]), scale_of_all)
    if not math.isfinite(distance):
        return math.inf
    return distance / scale if scale else distance


def _as_real_double(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


# --- Instrumentation of a task that is trained without changes ---


@dataclass
class Instrumentation:
    """Recording of one run on one rank.

    Attributes:
        notes_steps: if not, the task keeps its own callback, and nothing is written.
        double: train in float64.
        forward_step: the step whose module outputs are recorded too.
        forward: one JSON line per module call of that step.
    """

    trace: IO[str]
    notes_steps: bool = True
    double: bool = False
    writer: ReferenceWriter | None = None
    reference: ReferenceReader | None = None
    forward_step: int | None = None
    forward: IO[str] | None = None
    batch_info: BatchInfo | None = None
    optimizers: list[Optimizer] = field(default_factory=list)


def instrument(task: Task, watch: Instrumentation) -> Task:
    """Return the same task as an instance of a subclass that records its computation."""
    task_class = type(task)
    names = {name: getattr(task_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    instrumented = copy.copy(task)
    object.__setattr__(instrumented, "__class__", type(task_class.__name__, (_InstrumentedTask, task_class), names))
    object.__setattr__(instrumented, "_watch", watch)
    return instrumented


class _InstrumentedTask(Task):
    """A mixin between the trainer and a task's methods."""

    _watch: Instrumentation

    def build_model(self) -> nn.Module:
        module = super().build_model()
        return to_float64(module) if self._watch.double else module

    def build_dataset(self, split: str) -> Any:
        # Only training is compared, so there is no evaluation.
        return super().build_dataset(split) if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Optimizer | Mapping[str, Optimizer]:
        built = super().build_optimizer(model)
        self._watch.optimizers = [*built.values()] if isinstance(built, Mapping) else [built]
        return built

    def build_callback(self, model: nn.Module, schedule: RunSchedule) -> Callback:
        own = super().build_callback(model, schedule) or Callback()
        return Recorder(own, model, self._watch) if self._watch.notes_steps else own

    def on_batch_begin(self, info: BatchInfo) -> None:
        self._watch.batch_info = info
        super().on_batch_begin(info)

    def loss(self, model: nn.Module, batch: Any) -> LossResult:
        if not self._watch.double:
            return super().loss(model, batch)
        with Float64Mode():
            return super().loss(model, cast_inputs(batch))


_DELEGATED = (
    *("attach", "on_epoch_begin", "on_gradients_reduced", "on_epoch_end", "on_fit_end", "close"),
    *("state_dict", "load_state_dict"),
)


class Recorder(Callback):
    """A recorder of each step's loss, gradients and weights that also calls the task's own callback."""

    def __init__(self, inner: Callback, module: nn.Module, watch: Instrumentation) -> None:
        self._inner = inner
        self._module = module
        self._watch = watch
        self._step = 0
        self._gradients: dict[str, Any] = {}
        for name in _DELEGATED:
            setattr(self, name, getattr(inner, name))
        if watch.forward is not None:
            for name, child in module.named_modules():
                child.register_forward_hook(lambda _, __, output, name=name: self._forward(name, output))

    def on_step_begin(self, step: int, step_in_epoch: int) -> None:
        self._step = step + 1
        self._inner.on_step_begin(step, step_in_epoch)

    def on_before_optimizer_step(self) -> None:
        gradients = {name: p.grad for name, p in self._module.named_parameters() if p.grad is not None}
        self._gradients = self._digests("gradient", gradients)
        self._inner.on_before_optimizer_step()

    def on_step_end(self, step: int, loss: float) -> None:
        weights = self._digests("weight", self._module.state_dict())
        self._inner.on_step_end(step, loss)
        rates = [group["lr"] for optimizer in self._watch.optimizers for group in optimizer.param_groups]
        line = {"step": step, "loss": loss, "rates": [float(rate) for rate in rates]}
        self._watch.trace.write(json.dumps({**line, "gradient": self._gradients, "weight": weights}) + "\n")
        self._watch.trace.flush()
        if self._watch.writer is not None:
            self._watch.writer.end_step(step)

    def _digests(self, kind: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return each tensor's digest and distance from the reference; all ranks must call this."""
        digests: dict[str, Any] = {}
        for name, tensor in tensors.items():
            # Another stage of a pipeline records the tensors that it holds.
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                continue
            full = gather_full(tensor).detach()
            # A missing gradient and a gradient of zeros are equal.
            if kind == "gradient" and not full.any():
                continue
            distance = None
            if self._watch.reference is not None:
                distance = self._watch.reference.distance(self._step, kind, name, full)
            if self._watch.writer is not None:
                self._watch.writer.add(kind, name, full)
            digests[name] = [digest_of(full).hex(), distance]
        return digests

    def _forward(self, name: str, output: Any) -> None:
        info, watch = self._watch.batch_info, self._watch
        if info is None or info.split != "train" or not info.samples or info.step + 1 != watch.forward_step:
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta and leaf.is_floating_point():
                value = gather_full(leaf.detach())
                line = {
                    "microbatch": info.number,
                    "module": name,
                    "shape": list(value.shape),
                    "digest": digest_of(value).hex(),
                    "norm": float(value.double().norm()),
                    "projection": _projection(value),
                }
                assert watch.forward is not None
                watch.forward.write(json.dumps(line) + "\n")

    @property
    def should_stop(self) -> bool:  # type: ignore[override]
        return self._inner.should_stop


def _projection(tensor: torch.Tensor) -> float:
    """Return the sum of the values, each with a random sign that depends on its position."""
    generator = torch.Generator().manual_seed(tensor.numel())
    signs = torch.randint(0, 2, (tensor.numel(),), generator=generator, dtype=torch.float64) * 2 - 1
    return float(tensor.cpu().double().reshape(-1) @ signs)


# --- A rank of a group that trains one run after another: ``python -m paceline_checks.verify.worker
#     PLAN.json``
#
# A process takes seconds to start, so a group runs all trainings on its number of processes. Each run starts as
# with any launcher (:func:`paceline.training.worker.run`), in a process group of its own.


Simulation = Callable[[RunContext, int], Mapping[str, torch.Tensor]]
"""Trains in this process like so many ranks, one rank's part after the other; returns the model's state after the last
step, as one process would save it."""

_PEERS_TIMEOUT_S = 120.0
_POLL_S = 0.02

_log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Run the plan; return 0 whatever the results of the runs, or 130 or 75 after a stop request."""
    dump_stacks_on_signal()
    plan = msgspec.json.decode(Path(argv[0]).read_bytes(), type=GroupPlan)
    environment = detect_environment()
    reference = TaskReference(plan.task, parse_assignments(plan.set))
    if plan.lint is not None:
        _lint(plan, reference.load(), Path(plan.lint))
    for training in plan.trainings:
        task = reference.load()  # a new instance: a task may keep the objects that it builds
        training.outcome.parent.mkdir(exist_ok=True)
        try:
            if training.simulation is None:
                _train(plan, training, task, environment)
            else:
                _simulate(plan, training, task)
        except StopRequested as stopped:
            return stopped.exit_code
        except Exception as error:
            _log.debug("%s failed", training.name, exc_info=error)
            record_failure(training.run, environment.rank, error)
        training.done(environment.rank).touch()
        if not _can_continue(training):
            break
    return 0


def _train(plan: GroupPlan, training: Training, task: Task, environment: Environment) -> None:
    rank, reference = environment.rank, training.reference
    with ExitStack() as stack:
        instrumentation = Instrumentation(
            trace=stack.enter_context(training.trace(rank).open("w")),
            notes_steps=training.noted,
            double=training.double,
            writer=ReferenceWriter(training.tensors) if training.double else None,
            reference=None if reference is None else ReferenceReader(replace(training, name=reference).tensors),
        )
        if training.forward_step is not None:
            instrumentation.forward_step = training.forward_step
            instrumentation.forward = stack.enter_context(training.forward(rank).open("w"))
        worker_config = WorkerConfig(
            config=_config(plan, training, task),
            explicit_options=frozenset(training.options),
            quiet=True,
            supervised=True,
        )
        result = run(worker_config, environment, instrument(task, instrumentation))
    if rank == 0:
        _write(training.outcome, result)


def _simulate(plan: GroupPlan, training: Training, task: Task) -> None:
    assert training.simulation is not None
    simulate: Simulation = import_object(training.simulation)
    config = _config(plan, training, task)
    world_size = int(training.options["nproc"])
    compared_with = training.reference
    if compared_with is not None:
        if not newest_verified(replace(training, name=compared_with).run.checkpoints).path:
            training, compared_with = replace(training, double=False), training.float32_reference
        task = instrument(task, Instrumentation(trace=StringIO(), notes_steps=False, double=training.double))
    request = RunRequest(
        worker_config=WorkerConfig(config=config, explicit_options=frozenset(training.options), quiet=True),
        task=task,
        default_threads=1,
    )
    device = choose_device(config.processes.device, config.processes.backend).device
    with preserve_numerics():
        run_of_ranks, _ = setup_run(
            request,
            None,
            training.run,
            StopSignals(launched=True),
            device=device,
            world_size=world_size,
            processes=1,
            memory=memory_per_process(device, 1),
        )
        weights = simulate(run_of_ranks, world_size)
    document: dict[str, Any] = {"model_sha256": model_sha256(dict(weights))}
    if compared_with is not None:
        newest = newest_verified(replace(training, name=compared_with).run.checkpoints).path
        if newest is None:
            raise LaunchError(f"the run {compared_with}, with which it is compared, has failed")
        saved = read_checkpoint(RunDirectory(newest.parent.parent), newest)
        document["tensor"], distance = farthest_tensor(weights, _saved_weights(saved.state))
        document |= {"distance": distance if math.isfinite(distance) else None, "double": training.double}
    _write(training.outcome, document)


def _saved_weights(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights in a checkpoint, by the names of :func:`~paceline_checks.verify.plain.train_plainly`."""
    model = {**state["model"], **state["buffers"]}
    average = {name.removeprefix("module."): value for name, value in state.get("ema", {}).items()}
    average |= state.get("ema_buffers", {})
    named = model | {AVERAGE + name: value for name, value in average.items()}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def _config(plan: GroupPlan, training: Training, task: Task) -> ResolvedConfig:
    """Return the run's options; the micro-batches do not depend on the number of processes, since they affect bits."""
    # The task is instrumented, and counts what it computes.
    options = {"purity": "off", **training.options}
    if options.get("microbatches") in (None, "auto"):
        options["microbatches"] = max(task.defaults.microbatches or 1, plan.least_microbatches)
    options["global_batch_size"] = (
        options.get("global_batch_size") or task.defaults.global_batch_size or task.recommended_batch_size()
    )
    return ResolvedConfig(**{**options, "task": plan.task, "run_dir": str(training.run.path)})


def _lint(plan: GroupPlan, task: Task, file: Path) -> None:
    config = _config(plan, plan.trainings[0], task)
    with preserve_numerics():
        configure_numerics(config, config.processes.threads or 1, torch.device("cpu"))
        findings = lint(task, config)
    _write(file, [asdict(finding) for finding in findings])


def _can_continue(training: Training) -> bool:
    """Return whether all ranks can continue: none failed, or all failed with the same user error.

    If a rank failed otherwise, its peers may still wait for it: they end, and a new group runs the rest.
    """
    deadline = time.monotonic() + _PEERS_TIMEOUT_S
    while not training.is_done:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    failures = training.failures
    return not any(failures) or all(f is not None and f.user_error for f in failures)


def _write(path: Path, document: Any) -> None:
    write_atomically(path, json.dumps(document).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
