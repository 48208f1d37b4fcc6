"""The tasks that are measured: Paceline's built-in ones, with a clock in ``loss``; the same clock for every peer."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from paceline.core.environment import detect_environment
from paceline.core.files import write_atomically
from paceline.core.task import Callback, Defaults, Task
from paceline.training.group_context import GroupContext
from paceline.training.hooks import StepHook
from paceline_tasks.fashion_mnist import FashionMNIST, FashionMNISTMLP

_MEMORY = Path("/proc/self/status")
_ROLLUP = Path("/proc/self/smaps_rollup")
_RESET_PEAK = Path("/proc/self/clear_refs")


@dataclass
class Probe:
    """Clock and memory of one process, read when a step's forward pass begins.

    The clock runs from the start of step ``warmup`` to the start of step ``warmup + steps``: exactly
    ``steps`` whole steps, with all that a framework does in between. No barrier is needed, as every
    step waits for the other ranks' gradients.

    Attributes:
        warmup: steps before the clock starts.
        steps: steps that are measured.
        ticks_per_step: calls of :meth:`tick` a step.
    """

    warmup: int
    steps: int
    ticks_per_step: int = 1
    _ticks: int = field(default=0, init=False)
    _started_s: float = field(default=0.0, init=False)
    _seconds: float = field(default=0.0, init=False)
    _imports_kib: int | None = field(default=None, init=False)
    _peak_kib: int | None = field(default=None, init=False)

    def note_imports(self) -> None:
        """Take the memory held now, on the first call, as the imports'; forget its peak so far."""
        if self._imports_kib is not None or not _RESET_PEAK.exists():
            return
        # 5 resets the peak resident set size: proc(5). Some containers forbid it.
        try:
            _RESET_PEAK.write_text("5", encoding="ascii")
        except OSError:
            return
        self._imports_kib = _status_kib("VmRSS")

    def tick(self) -> bool:
        """Count a forward pass; True when it is the one that ends the measurement."""
        tick, self._ticks = self._ticks, self._ticks + 1
        if tick == self.warmup * self.ticks_per_step:
            self._started_s = time.perf_counter()
        elif tick == (self.warmup + self.steps) * self.ticks_per_step:
            self._seconds = time.perf_counter() - self._started_s
            if self._imports_kib is not None:
                self._peak_kib = _status_kib("VmHWM") - _shared_with_others_kib()
            return True
        return False

    def write(self, path: Path, loss: float) -> None:
        """Write what was measured, and a loss that shows that the peer did train."""
        report = {"steps": self.steps, "seconds": self._seconds, "loss": loss}
        if self._imports_kib is not None and self._peak_kib is not None:
            report["memory_mib"] = (self._peak_kib - self._imports_kib) / 1024
        write_atomically(path, json.dumps(report).encode())


def _shared_with_others_kib() -> int:
    """The part of shared memory that is others': a page that two processes map is half each one's."""
    values = dict(line.split(":", 1) for line in _ROLLUP.read_text(encoding="ascii").splitlines()[1:])
    shares = int(values["Pss_Shmem"].split()[0])
    return _status_kib("RssShmem") - shares


def _status_kib(name: str) -> int:
    for line in _MEMORY.read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise OSError(f"{_MEMORY} has no {name}")


class WithoutEvaluation(Task):
    """Mixed into a task, leaves it the training split only."""

    def build_dataset(self, split: str) -> Any:
        """The task's training split, and no other."""
        return super().build_dataset(split) if split == "train" else None


@dataclass
class ConvNetAlone(WithoutEvaluation, FashionMNIST):
    """Fashion-MNIST by the two-layer ConvNet, without any evaluation."""

    defaults: ClassVar[Defaults] = Defaults()


@dataclass
class Timed(WithoutEvaluation):
    """Mixed into a task, measures its training: see :class:`Probe`.

    Attributes:
        warmup: steps before the clock starts.
        steps: steps that are measured; the run must be one step longer.
        loss_calls: calls of ``loss`` a step on rank 0 (its micro-batches).
        report: the file that rank 0 writes.
    """

    warmup: int = 0
    steps: int = 1
    loss_calls: int = 1
    report: str = "report.json"

    defaults: ClassVar[Defaults] = Defaults()

    def __post_init__(self) -> None:
        self.probe = Probe(warmup=self.warmup, steps=self.steps, ticks_per_step=self.loss_calls)

    def note_imports(self) -> None:
        """Take the memory held so far for the imports': called first of all, later calls do nothing."""
        # The first optimizer imports torch's compiler, 80 MiB whatever trains.
        parameter = torch.zeros(1, requires_grad=True)
        parameter.grad = torch.zeros(1)
        torch.optim.SGD([parameter], lr=0.0).step()
        self.probe.note_imports()

    def build_model(self) -> nn.Module:
        """The built-in task's model."""
        self.note_imports()
        return super().build_model()

    def build_dataset(self, split: str) -> Any:
        """The built-in task's training split."""
        self.note_imports()
        return super().build_dataset(split)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The built-in task's mean loss; the clock is read before it."""
        done = self.probe.tick()
        loss = super().loss(model, batch)
        assert isinstance(loss, torch.Tensor)
        if done and (not dist.is_initialized() or dist.get_rank() == 0):
            self.probe.write(Path(self.report), float(loss.detach()))
        return loss


@dataclass
class GuardByTurns(WithoutEvaluation):
    """Mixed into a task, the purity guard is in every other block of steps, and rank 0 measures the blocks.

    Both kinds of step meet the same process and the same minutes, which differ by more than the guard costs.

    Attributes:
        warmup: steps before the first block, all with the guard, whose first checks are among them.
        block: steps of a block.
        steps: steps that are measured; the run must be one step longer.
        report: the file that rank 0 writes.
    """

    warmup: int = 0
    block: int = 10
    steps: int = 20
    report: str = "report.json"

    defaults: ClassVar[Defaults] = Defaults()

    def build_callback(self, model: nn.Module, schedule: Any) -> Callback:
        """Let the guard take turns."""
        return _GuardSwitch(self)


class _GuardSwitch(Callback):
    def __init__(self, task: GuardByTurns) -> None:
        from paceline_checks.purity import PurityCheck  # the other tasks need the core only

        self._task = task
        self._hooks: list[list[StepHook]] = []
        self._guards: list[StepHook] = []
        self._stamps: list[float] = []
        build = GroupContext._build_hooks

        def build_hooks(group: GroupContext, stack: ExitStack) -> list[StepHook]:
            hooks = build(group, stack)
            self._hooks = [hooks]
            self._guards = [hook for hook in hooks if isinstance(hook, PurityCheck)]
            return hooks

        GroupContext._build_hooks = build_hooks  # type: ignore[method-assign, assignment]  # only in this process

    def on_step_begin(self, step: int, step_in_epoch: int) -> None:
        """Take the guard out of the steps, or in again, where a block begins."""
        measured = step - self._task.warmup
        if 0 <= measured <= self._task.steps:
            self._stamps.append(time.perf_counter())
            if measured % self._task.block == 0:
                [hooks] = self._hooks
                others = [hook for hook in hooks if hook not in self._guards]
                hooks[:] = others if _is_free(measured // self._task.block) else [*self._guards, *others]
        if measured == self._task.steps and (not dist.is_initialized() or dist.get_rank() == 0):
            write_atomically(Path(self._task.report), json.dumps(self._measure()).encode())

    def _measure(self) -> dict[str, float]:
        sums = {"off": 0.0, "warn": 0.0}
        block = self._task.block
        for number in range(self._task.steps // block):
            began, ended = self._stamps[number * block], self._stamps[(number + 1) * block]
            sums["off" if _is_free(number) else "warn"] += ended - began
        return {name: 1000 * seconds / (self._task.steps / 2) for name, seconds in sums.items()}


def _is_free(block: int) -> bool:
    """Whether a block is without the guard: with, without, without, with, and so on."""
    return block % 4 in (1, 2)


@dataclass
class GuardedConvNet(GuardByTurns, FashionMNIST):
    """Fashion-MNIST by the two-layer ConvNet."""


@dataclass
class GuardedMLP(GuardByTurns, FashionMNISTMLP):
    """Fashion-MNIST by the 784-32-10 MLP."""


@dataclass
class TimedConvNet(Timed, FashionMNIST):
    """Fashion-MNIST by the two-layer ConvNet."""


@dataclass
class TimedMLP(Timed, FashionMNISTMLP):
    """Fashion-MNIST by the 784-32-10 MLP."""


@dataclass
class WideMLP(FashionMNISTMLP):
    """20 million parameters and few samples: for the memory of parameters, gradients and momentum."""

    def build_model(self) -> nn.Module:
        """A 784-4096-4096-10 MLP: images (B, 1, 28, 28) -> logits (B, 10)."""
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 4096),
            nn.ReLU(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, 10),
        )

    def build_dataset(self, split: str) -> TensorDataset:
        """2,048 random images, the same in every process."""
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (2048, 1, 28, 28), dtype=torch.uint8, generator=generator)
        return TensorDataset(images, torch.randint(10, (2048,), generator=generator))


@dataclass
class TimedWideMLP(Timed, WideMLP):
    """The 20-million-parameter MLP."""


@dataclass
class DeepMLP(FashionMNISTMLP):
    """7 million parameters in eight layers of equal work, which every strategy can split."""

    def build_model(self) -> nn.Module:
        """A 784-1024-...-1024-10 MLP: images (B, 1, 28, 28) -> logits (B, 10)."""
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(784, 1024), nn.ReLU()]
        for _ in range(6):
            layers += [nn.Linear(1024, 1024), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(1024, 10))

    def build_dataset(self, split: str) -> TensorDataset | None:
        """The training split only, so that there is no evaluation."""
        return super().build_dataset(split) if split == "train" else None


@dataclass
class TimedDeepMLP(Timed, DeepMLP):
    """The deep MLP."""


@dataclass
class GiantMLP(WideMLP):
    """102 million parameters in 26 layers: 1.2 GiB with gradients and momentum."""

    def build_model(self) -> nn.Module:
        """A 784-2048-...-2048-10 MLP: images (B, 1, 28, 28) -> logits (B, 10)."""
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(784, 2048), nn.ReLU()]
        for _ in range(24):
            layers += [nn.Linear(2048, 2048), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(2048, 10))


@dataclass
class TimedGiantMLP(Timed, GiantMLP):
    """The 102-million-parameter MLP."""


@dataclass
class OneSlowWorker(FashionMNISTMLP):
    """Fashion-MNIST, with a last rank that computes a micro-batch more slowly.

    Without momentum by default: stale gradients act as momentum themselves (Mitliagkas et al.,
    "Asynchrony begets Momentum", 2016), and with 0.9 besides, one update of staleness undoes the training.

    Attributes:
        slow_by_s: seconds more that it needs for a micro-batch.
    """

    slow_by_s: float = 0.02
    momentum: float = 0.0

    def __post_init__(self) -> None:
        environment = detect_environment()
        self._sleep_s = self.slow_by_s if environment.rank == environment.world_size - 1 else 0.0

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        """As the built-in task's."""
        if model.training:
            time.sleep(self._sleep_s)
        return super().loss(model, batch)
