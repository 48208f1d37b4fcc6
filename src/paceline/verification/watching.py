"""A task that is trained as it is, while a rank notes what it computes."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from paceline.callback import BatchPlace, Callback, Group, Horizon
from paceline.checkpoint.tensors import bytes_of
from paceline.distributed.sharded_state import gathered
from paceline.task import Loss, Task
from paceline.verification.double import DoubleMode, doubled, in_double
from paceline.verification.store import Reference, ReferenceWriter


@dataclass
class Watch:
    """What a rank notes of one run, and where.

    Attributes:
        trace: one JSON line a step.
        notes_steps: else the task keeps its own callback, and nothing is written.
        double: train in float64.
        writer: keeps the tensors, for a run that others are compared with.
        reference: the run that this one is compared with.
        forward_step: of this step, what each module's forward returns is noted too.
        forward: one JSON line a module's call in that step.
    """

    trace: IO[str]
    notes_steps: bool = True
    double: bool = False
    writer: ReferenceWriter | None = None
    reference: Reference | None = None
    forward_step: int | None = None
    forward: IO[str] | None = None
    place: BatchPlace | None = None
    optimizers: list[Optimizer] = field(default_factory=list)


def watched(task: Task, watch: Watch) -> Task:
    """The same task, of a class below its own, that notes what it computes."""
    kind = type(task)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    made = copy.copy(task)
    object.__setattr__(made, "__class__", type(kind.__name__, (_Watched, kind), names))
    object.__setattr__(made, "_watch", watch)
    return made


class _Watched(Task):
    """What comes between the trainer and a task's methods."""

    _watch: Watch

    def build_model(self) -> nn.Module:
        module = super().build_model()
        return in_double(module) if self._watch.double else module

    def build_dataset(self, split: str) -> Any:
        # Nothing is evaluated: what is compared is the training.
        return super().build_dataset(split) if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Optimizer | Mapping[str, Optimizer]:
        built = super().build_optimizer(model)
        self._watch.optimizers = [*built.values()] if isinstance(built, Mapping) else [built]
        return built

    def build_callback(self, model: nn.Module, horizon: Horizon) -> Callback:
        own = super().build_callback(model, horizon)
        return Recorder(own, model, self._watch) if self._watch.notes_steps else own

    def begin_batch(self, place: BatchPlace) -> None:
        self._watch.place = place
        super().begin_batch(place)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor | Loss:
        if not self._watch.double:
            return super().loss(model, batch)
        with DoubleMode():
            return super().loss(model, doubled(batch))


class Recorder(Callback):
    """Notes each step's loss, gradients and weights; what the task's own callback does is done too."""

    def __init__(self, inner: Callback, module: nn.Module, watch: Watch) -> None:
        self._inner, self._module, self._watch = inner, module, watch
        self._step = 0
        self._gradients: dict[str, Any] = {}
        self._calls = 0
        if watch.forward is not None:
            for name, child in module.named_modules():
                child.register_forward_hook(lambda _, __, output, name=name: self._forward(name, output))

    def step_begins(self, step: int, step_in_epoch: int) -> None:
        self._step, self._calls = step + 1, 0
        self._inner.step_begins(step, step_in_epoch)

    def gradients_ready(self) -> None:
        gradients = {name: p.grad for name, p in self._module.named_parameters() if p.grad is not None}
        self._gradients = self._noted("gradient", gradients)
        self._inner.gradients_ready()

    def step_done(self, step: int, loss: float) -> None:
        weights = self._noted("weight", self._module.state_dict())
        self._inner.step_done(step, loss)
        rates = [group["lr"] for optimizer in self._watch.optimizers for group in optimizer.param_groups]
        line = {
            "step": step,
            "loss": loss,
            "rates": [float(rate) for rate in rates],
            "gradient": self._gradients,
            "weight": weights,
        }
        self._watch.trace.write(json.dumps(line) + "\n")
        self._watch.trace.flush()
        if self._watch.writer is not None:
            self._watch.writer.end_step(step)

    def _noted(self, kind: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """A digest of each tensor, and its distance from the reference; every rank calls this alike."""
        noted: dict[str, Any] = {}
        for name, tensor in tensors.items():
            # What another stage of a pipeline holds is for that one to note.
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                continue
            whole = gathered(tensor).detach()
            # No gradient, and one of zeros, are the same.
            if kind == "gradient" and not whole.any():
                continue
            distance = None
            if self._watch.reference is not None:
                distance = self._watch.reference.distance(self._step, kind, name, whole)
            if self._watch.writer is not None:
                self._watch.writer.add(kind, name, whole)
            noted[name] = [digest(whole), distance]
        return noted

    def _forward(self, name: str, output: Any) -> None:
        place, watch = self._watch.place, self._watch
        if (
            place is None
            or place.split != "train"
            or not place.samples
            or place.step + 1 != watch.forward_step
        ):
            return
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta and leaf.is_floating_point():
                self._calls += 1
                value = gathered(leaf.detach())
                line = {
                    "shard": place.number,
                    "call": self._calls,
                    "module": name,
                    "shape": list(value.shape),
                    "digest": digest(value),
                    "norm": float(value.double().norm()),
                    "projection": _projection(value),
                }
                assert watch.forward is not None
                watch.forward.write(json.dumps(line) + "\n")

    # Everything else is the task's own callback's.

    @property
    def should_stop(self) -> bool:  # type: ignore[override]
        return self._inner.should_stop

    def attach(self, group: Group, *, step: int, epoch: int) -> None:
        self._inner.attach(group, step=step, epoch=epoch)

    def epoch_begins(self, epoch: int) -> None:
        self._inner.epoch_begins(epoch)

    def step_reduced(self, *, due: bool) -> Mapping[str, float]:
        return self._inner.step_reduced(due=due)

    def epoch_ends(self, epoch: int) -> None:
        self._inner.epoch_ends(epoch)

    def fit_ends(self) -> None:
        self._inner.fit_ends()

    def close(self) -> None:
        self._inner.close()

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)


def _projection(tensor: torch.Tensor) -> float:
    """The sum of the values, each with a random sign that depends on its place."""
    generator = torch.Generator().manual_seed(tensor.numel())
    signs = torch.randint(0, 2, (tensor.numel(),), generator=generator, dtype=torch.float64) * 2 - 1
    return float(tensor.cpu().double().reshape(-1) @ signs)


def digest(tensor: torch.Tensor) -> str:
    """Of dtype, shape and values."""
    text = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.blake2b(text + bytes_of(tensor), digest_size=12).hexdigest()
