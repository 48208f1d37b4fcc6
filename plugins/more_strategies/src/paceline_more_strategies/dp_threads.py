"""One process, several devices (``--strategy dp``): ``nn.DataParallel``, micro-batch by micro-batch."""

from __future__ import annotations

import copy
import logging
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.core.task import Loss
from paceline.data.samples import MicroBatch, to_device
from paceline.parallel.strategy import MicrobatchWork, ReducerStrategy, StrategyOptions
from paceline.parallel.world import ParallelDims
from paceline_more_strategies.options import DataParallelOptions

_log = logging.getLogger(__name__)

_ADVICE = (
    "--strategy dp: one process computes %d micro-batches at a time, in threads that share one interpreter lock. "
    "--strategy ddp with --nproc %d is usually faster, with the same bits (see docs/communication.md)."
)


class DataParallel(ReducerStrategy):
    """Scatter, replicate, parallel apply, and gather on the first device.

    A step's micro-batches are scattered over replicas of the model; each replica computes one micro-batch's forward
    and backward in a thread. The gradients are gathered on the first device and added along the tree, so the weights
    are bitwise those of one process. The replicas on the model's own device share its parameters;
    those on other GPUs get a copy in each step.

    All threads share one random number generator. If the model draws from it, its micro-batches are computed one after
    the other from then on, each with its own seed, including those in which the draw was detected.

    Raises:
        ConfigError: there are several processes, or too few devices.
    """

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        processes = mesh.world.world_size
        if processes != 1:
            raise ConfigError(
                f"--strategy dp needs one process for all devices, but there are {processes}. Use --nproc 1 "
                "with --dp-devices, or --strategy ddp."
            )
        super().__init__(module, mesh, options)
        self._devices = _devices(
            mesh.world.device, options.config[DataParallelOptions].dp_devices, len(self.microbatches)
        )
        self._replicas: list[nn.Module] = []
        self._is_random = len(self._devices) == 1
        self._threads = ThreadPoolExecutor(len(self._devices), "paceline-dp")
        if not self._is_random:
            _log.info(_ADVICE, len(self._devices), len(self._devices))

    def run_microbatches(self, microbatches: Sequence[MicroBatch], work: MicrobatchWork) -> None:
        if self._is_random:
            return super().run_microbatches(microbatches, work)
        self._replicate()
        size = len(self._devices)
        for first in range(0, len(microbatches), size):
            chunk = microbatches[first : first + size]
            state_before = _random_state(self._devices)
            losses = self._apply(chunk, work)
            if _random_state(self._devices) != state_before:
                self._is_random = True
                _log.warning(
                    "--strategy dp: the model draws random numbers, and threads share one generator. Its "
                    "micro-batches are computed one after the other. Use --strategy ddp."
                )
                return super().run_microbatches(microbatches[first:], work)
            self._gather(chunk, losses)
            work.backward_done()

    def close(self) -> None:
        self._threads.shutdown()
        self._replicas.clear()
        super().close()

    def _replicate(self) -> None:
        """Create or update a replica of the model on each device."""
        # Not torch.nn.parallel.replicate(): the parameters of its first replica are the model's own, and so would be
        # the gradients that a thread writes there.
        if not self._replicas:
            self._replicas = [copy.deepcopy(self.module).to(device) for device in self._devices]
        own = dict(self.module.named_parameters())
        for replica, device in zip(self._replicas, self._devices, strict=True):
            for name, parameter in replica.named_parameters():
                parameter.requires_grad_(own[name].requires_grad)
                if device == self._devices[0]:
                    parameter.data = own[name].data  # their memory, but not their gradients
                else:
                    parameter.data.copy_(own[name].data, non_blocking=True)
            for replica_module, module in zip(replica.modules(), self.module.modules(), strict=True):
                replica_module.training = module.training

    def _apply(self, microbatches: Sequence[MicroBatch], work: MicrobatchWork) -> list[Loss]:
        """Run forward and backward of one micro-batch per replica, in parallel."""

        def compute(replica: nn.Module, microbatch: MicroBatch, device: torch.device) -> Loss:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            batch = to_device(microbatch.batch, device)
            loss = work.forward_unseeded(replica, MicroBatch(microbatch.index, batch, microbatch.num_samples, 0))
            work.scale_loss(loss.sum).backward()  # type: ignore[no-untyped-call]
            return loss

        for replica in self._replicas:
            _copy_buffers(replica, self.module)
            for parameter in replica.parameters():
                parameter.grad = None
        running = [
            self._threads.submit(compute, *arguments)
            for arguments in zip(self._replicas, microbatches, self._devices, strict=False)
        ]
        return [future.result() for future in running]

    def _gather(self, microbatches: Sequence[MicroBatch], losses: Sequence[Loss]) -> None:
        """Add the gradients on the first device, micro-batch by micro-batch, as one process would."""
        own = dict(self.module.named_parameters())
        for replica, microbatch, loss in zip(self._replicas, microbatches, losses, strict=False):
            self._begin_microbatch()
            with torch.no_grad():
                for name, parameter in replica.named_parameters():
                    total = own[name].grad
                    if parameter.grad is not None and total is not None:
                        total.add_(parameter.grad.to(total.device))
            _copy_buffers(self.module, replica)
            weight = loss.weight
            self.reducer.end_microbatch(
                microbatch.num_samples,
                weight.to(self._devices[0]) if isinstance(weight, torch.Tensor) else weight,
                loss.sum.detach().to(self._devices[0]),
                microbatch.checksum,
            )


def _devices(own: torch.device, wanted: int | Literal["auto"], num_microbatches: int) -> list[torch.device]:
    available = torch.cuda.device_count() if own.type == "cuda" else len(os.sched_getaffinity(0))
    count = min(available, num_microbatches) if wanted == "auto" else wanted
    if own.type == "cuda" and count > available:
        raise ConfigError(f"--dp-devices {count}: there are only {available} GPUs. Use --dp-devices {available}.")
    if count > num_microbatches:
        raise ConfigError(
            f"--dp-devices {count}: a step has {num_microbatches} micro-batches, and each device computes one at a "
            f"time. Use --dp-devices {num_microbatches}, or create the run with --microbatches {count}."
        )
    if own.type != "cuda":
        return [own] * count
    return [own, *(torch.device("cuda", i) for i in range(available) if i != own.index)][:count]


def _copy_buffers(into: nn.Module, source: nn.Module) -> None:
    values = dict(source.named_buffers())
    with torch.no_grad():
        for name, buffer in into.named_buffers():
            buffer.copy_(values[name])


def _random_state(devices: Sequence[torch.device]) -> tuple[Any, ...]:
    """Return the state of all generators that a model may use, for comparison."""
    gpus = [torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"]
    states = (state.numpy().tobytes() for state in (torch.get_rng_state(), *gpus))
    name, keys, *rest = np.random.get_state(legacy=True)
    return (*states, random.getstate(), name, np.asarray(keys).tobytes(), *rest)
