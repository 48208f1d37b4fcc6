"""A task whose processes come to harm at scripted places, each harm once; what each process does is the same.

A plan is a directory of empty files, ``PLACE-STEP-RANK-KIND``: whoever removes one has to carry it out.
``PLACE`` is where in the step the process is, or where in the engine: there ``STEP`` counts groups (``form``,
``formed``), tensors (``copy``) or checkpoints (``save``). ``KIND`` is ``kill``, ``stop``, ``term``, ``usr1``,
``hold`` (the thread stays there until its process ends) or another way to hang (``WAYS``). In ``data`` the
step is a sample's number, whoever reads it, and the rank ``any``. A rank with a file
``reform-GENERATION-RANK-join`` goes on only once somebody waits to join, unless nobody is lacking: else a
short run may end first. With ``-hold`` the process continues once the group is to change, or a test removes the file.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.utils.data import Dataset, TensorDataset

import paceline
from paceline.core.task import BatchInfo
from paceline.elastic import group_formation
from paceline.elastic.worker_channel import AgentClient
from paceline.runs import checkpoint_store

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM, "usr1": signal.SIGUSR1}
CLASSES, SIDE = 3, 6


def spin() -> None:
    while True:
        pass


def grip() -> None:
    """C code that holds the interpreter's lock."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def sleep() -> None:
    time.sleep(1000)


def fifo() -> None:
    path = harm.plan.with_name("fifo")
    os.mkfifo(path)
    path.read_text()


def lock() -> None:
    held = threading.Lock()
    with held, held:
        pass


def mismatch() -> None:
    """A collective that no other rank takes part in."""
    distributed.all_reduce(torch.ones(1))


def hold() -> None:
    threading.Event().wait()


WAYS = {way.__name__: way for way in (spin, grip, sleep, fifo, lock, mismatch, hold)}


class Harm:
    """Counts this process's steps, and carries out what the plan says of them."""

    def __init__(self) -> None:
        self.plan = Path()
        # A worker of an agent learns its rank from its group.
        self.rank = int(os.environ.get("RANK", "-1"))
        self.members = 0  # of its first group

    def awaited(self, generation: int) -> Path | None:
        paths = self.plan.glob(f"reform-{generation}-{self.rank}-*")
        return next(paths, None)

    def at(self, place: str, step: int, rank: int | str | None = None) -> None:
        for path in self.plan.glob(f"{place}-{step}-{self.rank if rank is None else rank}-*"):
            try:
                path.unlink()
            except FileNotFoundError:
                continue  # another process of that rank did it
            kind = path.name.rpartition("-")[2]
            if kind in WAYS:
                WAYS[kind]()
            else:
                os.kill(os.getpid(), _SIGNALS[kind])


harm = Harm()


def _hooked() -> None:
    """Know the rank, and reach places inside the engine: forming a group, copying a state, saving."""
    form, send, receive = group_formation.form_group, group_formation.send_tensor, group_formation.receive_tensor
    write, publish = checkpoint_store.write_file, checkpoint_store._publish
    given, copied = itertools.count(), itertools.count(1)
    asked_to_reform = AgentClient.should_reform

    @contextmanager
    def formed(world: Any, *arguments: Any, **options: Any) -> Iterator[None]:
        harm.rank = world.rank
        harm.at("form", world.generation)
        with form(world, *arguments, **options):
            harm.members = harm.members or world.world_size
            if world.generation and world.world_size == harm.members:
                # Who was lost is replaced already: nobody else will wait to join.
                (harm.plan / f"reform-{world.generation}-{world.rank}-join").unlink(missing_ok=True)
            harm.at("formed", world.generation)
            yield

    def sent(*arguments: Any) -> None:
        harm.at("give", next(given))
        send(*arguments)

    def received(*arguments: Any) -> None:
        harm.at("copy", next(copied))
        receive(*arguments)

    def published(*arguments: Any) -> None:
        publish(*arguments)
        harm.at("renamed", 0)

    saves = itertools.count()

    def written(path: Path, *arguments: Any) -> Any:
        if path.name == "model.safetensors":  # the first of each checkpoint
            harm.at("save", next(saves))
        return write(path, *arguments)

    def should_reform(member: AgentClient, generation: int) -> bool:
        awaited = harm.awaited(generation)
        while awaited is not None and awaited.exists() and not asked_to_reform(member, generation):
            time.sleep(0.005)
        if awaited is not None:
            awaited.unlink(missing_ok=True)
        return asked_to_reform(member, generation)

    group_formation.form_group, group_formation.send_tensor, group_formation.receive_tensor = formed, sent, received
    checkpoint_store.write_file, checkpoint_store._publish = written, published
    AgentClient.should_reform = should_reform  # type: ignore[method-assign]


class Samples(Dataset[Any]):
    """The same samples, each read by itself; knows the plan also in a data worker."""

    def __init__(self, tensors: TensorDataset, plan: Path) -> None:
        self.tensors, self.plan = tensors, plan

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, row: int) -> Any:
        harm.plan = self.plan
        harm.at("data", row, "any")
        return self.tensors[row]


class Stream:
    """Micro-batches of 20 steps each. Every opened reader, and every one that went to a position, leaves a line."""

    def __init__(self, tensors: TensorDataset, log: Path) -> None:
        self.tensors, self.log = tensors, log

    def open(self, microbatch: int, num_microbatches: int, epoch: int, seed: int) -> Reader:
        sizes = [20 * (21 // num_microbatches + (k < 21 % num_microbatches)) for k in range(num_microbatches)]
        first = sum(sizes[:microbatch])
        self.wrote("open")
        return Reader(self, first, first + sizes[microbatch])

    def wrote(self, line: str) -> None:
        with self.log.open("a") as file:
            file.write(line + "\n")


class Reader:
    def __init__(self, stream: Stream, first: int, stop: int) -> None:
        self.stream, self.next, self.stop = stream, first, stop

    def __next__(self) -> Any:
        if self.next == self.stop:
            raise StopIteration
        self.next += 1
        return self.stream.tensors[self.next - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.wrote("load")
        self.next = state["next"]


@dataclass
class Faulty(paceline.Task):
    """Batch norm, dropout, AdamW, batches that divide into nothing, and a validation split."""

    plan: str = ""
    num: int = 410
    num_val: int = 50
    sample_by_sample: bool = False
    stream: bool = False

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=21, microbatches=6, epochs=2)

    def __post_init__(self) -> None:
        """Hook before the first group is formed, which tells the rank."""
        if self.plan and harm.plan != Path(self.plan):
            harm.plan = Path(self.plan)
            _hooked()

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(4 * (SIDE - 2) ** 2, CLASSES),
        )

    def build_dataset(self, split: str) -> Any:
        number = {"train": self.num, "val": self.num_val, "test": self.num_val}[split]
        generator = torch.Generator().manual_seed(len(split))
        labels = torch.arange(number) % CLASSES
        images = torch.randn(number, 1, SIDE, SIDE, generator=generator)
        tensors = TensorDataset(images + labels.view(-1, 1, 1, 1) * 0.5, labels)
        if self.stream and split == "train":
            return Stream(tensors, Path(self.plan).with_name("readers"))
        return Samples(tensors, Path(self.plan)) if self.sample_by_sample and split == "train" else tensors

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        self.optimizer = AdamW(model.parameters(), lr=0.01)
        return self.optimizer

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if model.training:
            harm.at("step", self._steps())
        return functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        harm.at("eval", self._steps())
        return {"accuracy": (model(batch[0]).argmax(dim=1) == batch[1]).float()}

    def _steps(self) -> int:
        """Steps done: the optimizer counts them, also where the state came from elsewhere."""
        return next((int(state["step"]) for state in self.optimizer.state.values()), 0)


@dataclass
class Parted(Faulty):
    """Layers that can be cut into stages and split in pairs: a rank may hold nothing of the first one."""

    def build_model(self) -> nn.Module:
        super().build_model()  # which knows the plan then
        width = 12
        return nn.Sequential(
            nn.Flatten(),
            *(nn.Linear(SIDE**2, width), nn.ReLU(), nn.Linear(width, width), nn.LayerNorm(width)),
            *(nn.Dropout(0.3), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)),
        )

    def on_batch_begin(self, place: BatchInfo) -> None:
        self._place = place
        harm.rank = distributed.get_rank()

    def _steps(self) -> int:
        return self._place.step
