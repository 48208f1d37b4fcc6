"""One process, several devices (``--strategy dp``): what ``nn.DataParallel`` does, micro-batch by micro-batch."""

from __future__ import annotations

import copy
import logging
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.core.task import Loss
from paceline.data.samples import MicroBatch, to_device
from paceline.parallel.microbatches import ReducerStrategy
from paceline.parallel.strategy import MicrobatchWork, StrategyOptions
from paceline.parallel.world import ParallelDims

_log = logging.getLogger(__name__)

_ADVICE = (
    "--strategy dp: one process computes %d micro-batches at a time, in threads that wait for each other's Python. "
    "--strategy ddp with --nproc %d is usually faster, to the same bits (docs/communication.md says why)."
)


@dataclass(frozen=True)
class _MicrobatchResult:
    """One micro-batch's loss; its gradient and buffers are in the replica."""

    replica: nn.Module
    loss: Loss


class DataParallel(ReducerStrategy):
    """Scatter, replicate, parallel apply, gather on the first device.

    A step's micro-batches are scattered over replicas of the model; each computes one micro-batch's forward and
    backward in a thread of its own, and the gradients are gathered on the first device, where they are added along
    the tree. So the weights are those of one process, bit for bit. On a CPU the replicas share the model's
    parameters, on GPUs they are copied in each step by ``torch.nn.parallel.replicate``.

    All threads share one random number generator. Where a model turns out to draw from it, its micro-batches are
    computed one after the other from then on, each with its own seed; the round in which that showed is
    computed again.

    Raises:
        ConfigError: there are several processes, or more devices are asked for than there are.
    """

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        processes = mesh.world.world_size
        if processes != 1:
            raise ConfigError(
                f"--strategy dp is one process for all devices, but there are {processes}. Use --nproc 1 "
                "with --dp-devices, or --strategy ddp."
            )
        super().__init__(module, mesh, options)
        self._devices = _devices(mesh.world.device, options.config.dp_devices, len(self.microbatches))
        self._replicas: list[nn.Module] = []
        self._draws = len(self._devices) == 1
        self._threads = ThreadPoolExecutor(len(self._devices), "paceline-dp")
        if not self._draws:
            _log.info(_ADVICE, len(self._devices), len(self._devices))

    def run_microbatches(self, microbatches: Sequence[MicroBatch], work: MicrobatchWork) -> None:
        if self._draws:
            return super().run_microbatches(microbatches, work)
        self._replicate()
        size = len(self._devices)
        for first in range(0, len(microbatches), size):
            some = microbatches[first : first + size]
            before = _random_state(self._devices)
            computed = self._apply(some, work)
            if _random_state(self._devices) != before:
                self._draws = True
                _log.warning(
                    "--strategy dp: the model draws random numbers, and threads share their generator. Its "
                    "micro-batches are computed one after the other; use --strategy ddp."
                )
                return super().run_microbatches(microbatches[first:], work)
            self._gather(some, computed)
            work.backward_done()

    def close(self) -> None:
        self._threads.shutdown()
        self._replicas.clear()
        super().close()

    def _replicate(self) -> None:
        """Have a replica on each device, with the model's parameters as they are now."""
        if self._devices[0].type == "cuda":
            from torch.nn.parallel import replicate

            self._replicas = list(replicate(self.module, self._devices, detach=True))
            for replica in self._replicas:
                for name, parameter in _parameters(replica).items():
                    parameter.requires_grad_(self._trainable(name))
        elif not self._replicas:
            self._replicas = [_sharing(self.module) for _ in self._devices]
        for replica in self._replicas:
            for mine, module in zip(replica.modules(), self.module.modules(), strict=True):
                mine.training = module.training

    def _trainable(self, name: str) -> bool:
        return self.module.get_parameter(name).requires_grad

    def _apply(self, microbatches: Sequence[MicroBatch], work: MicrobatchWork) -> list[_MicrobatchResult]:
        """Forward and backward of one micro-batch a replica, at once."""

        def one(replica: nn.Module, microbatch: MicroBatch, device: torch.device) -> _MicrobatchResult:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            here = to_device(microbatch.batch, device)
            loss = work.forward_unseeded(replica, MicroBatch(microbatch.index, here, microbatch.num_samples, 0))
            work.scale_loss(loss.sum).backward()  # type: ignore[no-untyped-call]
            return _MicrobatchResult(replica, loss)

        for replica in self._replicas:
            _take_buffers(replica, self.module)
            for parameter in _parameters(replica).values():
                parameter.grad = None
        running = [
            self._threads.submit(one, *arguments)
            for arguments in zip(self._replicas, microbatches, self._devices, strict=False)
        ]
        return [future.result() for future in running]

    def _gather(self, microbatches: Sequence[MicroBatch], computed: Sequence[_MicrobatchResult]) -> None:
        """Add the gradients up on the first device, micro-batch by micro-batch, as one process would."""
        own = dict(self.module.named_parameters())
        for microbatch, one in zip(microbatches, computed, strict=True):
            self._begin_microbatch()
            with torch.no_grad():
                for name, parameter in _parameters(one.replica).items():
                    total = own[name].grad
                    if parameter.grad is not None and total is not None:
                        total.add_(parameter.grad.to(total.device))
            _take_buffers(self.module, one.replica)
            weight = one.loss.weight
            self.reducer.end_microbatch(
                microbatch.num_samples,
                weight.to(self._devices[0]) if isinstance(weight, torch.Tensor) else weight,
                one.loss.sum.detach().to(self._devices[0]),
                microbatch.checksum,
            )


def _devices(own: torch.device, wanted: int | Literal["auto"], num_microbatches: int) -> list[torch.device]:
    there = torch.cuda.device_count() if own.type == "cuda" else len(os.sched_getaffinity(0))
    count = min(there, num_microbatches) if wanted == "auto" else wanted
    if own.type == "cuda" and count > there:
        raise ConfigError(f"--dp-devices {count}: there are {there} GPUs. Use --dp-devices {there}.")
    if count > num_microbatches:
        raise ConfigError(
            f"--dp-devices {count}: a step has {num_microbatches} micro-batches, and each device computes one at a "
            "time. "
            f"Use --dp-devices {num_microbatches}, or create the run with --microbatches {count}."
        )
    if own.type != "cuda":
        return [own] * count
    return [own, *(torch.device("cuda", i) for i in range(there) if i != own.index)][:count]


def _sharing(module: nn.Module) -> nn.Module:
    """A copy of a module on the CPU whose parameters are the module's own memory, with gradients apart."""
    replica = copy.deepcopy(module)
    for name, parameter in replica.named_parameters():
        parameter.data = module.get_parameter(name).data
        parameter.grad = None
    return replica


def _parameters(replica: nn.Module) -> dict[str, torch.Tensor]:
    """A replica's parameters by name; ``replicate`` leaves them as plain tensors."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in replica.named_modules():
        there: dict[str, Any] = {**module._parameters, **getattr(module, "_former_parameters", {})}
        for name, value in there.items():
            if isinstance(value, torch.Tensor) and all(value is not other for other in found.values()):
                found[f"{prefix}.{name}" if prefix else name] = value
    return found


def _take_buffers(into: nn.Module, source: nn.Module) -> None:
    values = dict(source.named_buffers())
    with torch.no_grad():
        for name, buffer in into.named_buffers():
            buffer.copy_(values[name])


def _random_state(devices: Sequence[torch.device]) -> tuple[Any, ...]:
    """The state of all generators that a model may draw from, to be compared."""
    gpus = [torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"]
    states = (state.numpy().tobytes() for state in (torch.get_rng_state(), *gpus))
    name, keys, *rest = np.random.get_state(legacy=True)
    return (*states, random.getstate(), name, np.asarray(keys).tobytes(), *rest)
