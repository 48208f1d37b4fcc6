"""``--strategy auto``: ddp where it clearly fits, else what a plan recommends."""

from __future__ import annotations

import copy
import gc
import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import TypeVar, cast

import psutil
import torch

from paceline.core.built_in import PARTS
from paceline.core.config import ResolvedConfig, RunConfig
from paceline.core.errors import ConfigError
from paceline.core.plugins import import_object
from paceline.core.task import Task

T = TypeVar("T")

_FITS_FACTOR = 16
"""Bytes for each byte of a parameter that are enough for training under ddp: its gradient's sums, what an
optimizer holds, and activations as large as all of these."""

_BEGIN_S = (2.0, 4.0, 8.0, 16.0, 32.0)
"""How long each forked process has to begin; on a busy machine it may only be slow."""


def memory_per_process(device: torch.device, processes: int) -> int:
    """Return the bytes that a process may use: its part of a GPU's, or of the machine's.

    Args:
        processes: how many share the GPU, or on the CPU the machine.
    """
    on_gpu = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total
    return int(total) // max(1, processes)


def choose_strategy(
    config: ResolvedConfig, task: Task, *, world_size: int, memory: int, device: str
) -> tuple[ResolvedConfig, str | None]:
    """Options with the strategy that ``auto`` means for so many processes, and what to say about it.

    A model that is small against the memory is not measured. All ranks must give the same arguments.

    Args:
        config: resolved but for the strategy.
        memory: bytes that the process with least of it may take.
        device: "cpu" or "cuda".
    """
    if (
        config.parallel.strategy != "auto"
        or config.parallel.mesh is not None
        or world_size == 1
        or config.parallel.reduction == "ddp"
    ):
        return config, None
    parameters = _call_in_child(lambda: _parameter_bytes(task))
    if parameters is None or _FITS_FACTOR * parameters <= memory:
        return config, None

    def choose(task: Task) -> tuple[ResolvedConfig, str | None]:
        by_plan: Callable[..., tuple[ResolvedConfig, str | None]] = import_object(PARTS["--strategy auto"])
        return by_plan(config, task, world_size=world_size, memory=memory, device=device)

    if device == "cuda":
        # The measurement runs a backward, and autograd's threads call CUDA, which does not survive a fork.
        return choose(copy.copy(task))
    return _call_in_child(lambda: choose(task))


def require_replaceable(config: RunConfig, asked: RunConfig) -> None:
    """Reject a strategy that ``auto`` selected if it excludes the in-place replacement of lost processes.

    Raises:
        ConfigError: names the option to give.
    """
    if config.non_elastic_options and not asked.non_elastic_options and config.recovery.recover != "restart":
        option = (
            f"--mesh {config.values['mesh']}"
            if config.parallel.mesh is not None
            else f"--strategy {config.parallel.strategy}"
        )
        raise ConfigError(
            "the model does not fit a process under ddp, and only ddp can replace a lost process in place. "
            f"Give {option}, which is what --strategy auto recommends; the run then recovers by restart."
        )


def _parameter_bytes(task: Task) -> int | None:
    """Count the bytes of the task's model without memory; None if it cannot be built so."""
    try:
        with torch.device("meta"):
            module = task.build_model()
        return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    except Exception:  # it will be said when the model is built for real
        return None


def _call_in_child(function: Callable[[], T]) -> T:
    """Call a function in a forked process, and return what it returns.

    A task may keep what it builds, in itself or in any cache, and tensors on the meta device have no data to train
    with. In a fork they, the random numbers and the default dtype that it sets are gone with the process.

    Raises:
        ConfigError: the process died, or could not begin.
    """

    def answer(sender: Connection) -> None:
        gc.freeze()  # a process group that is garbage would wait for its threads, which are not in the fork
        sender.send(None)
        torch.set_num_threads(1)  # no thread of this process's pools is in the fork
        try:
            sender.send((function(), None))
        except Exception as error:
            sender.send((None, error))

    process, receiver = _fork(answer)
    with receiver:
        try:
            result, error = receiver.recv()
        except EOFError:
            process.join()
            raise ConfigError(
                f"the process that measures the model for --strategy auto ended with exit code {process.exitcode}. "
                "Give a strategy, such as --strategy ddp."
            ) from None
    process.join()
    if error is not None:
        raise error
    return cast(T, result)


def _fork(target: Callable[[Connection], None]) -> tuple[ForkProcess, Connection]:
    """Start a forked process that first sends that it has begun; return it and the receiving end of its pipe.

    Python 3.11 forks while another thread, such as one of torch's, may hold the interpreter's list of threads; the
    child then waits for a thread that it does not have, before any of its code runs. Such a child is replaced.

    Raises:
        ConfigError: none has begun.
    """
    for wait_s in _BEGIN_S:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=target, args=(sender,))
        process.start()
        sender.close()
        with suppress(EOFError):
            if receiver.poll(wait_s):
                receiver.recv()
                return process, receiver
        receiver.close()
        process.kill()
        process.join()
    raise ConfigError(
        "no forked process begins to measure the model for --strategy auto. Give a strategy, such as --strategy ddp."
    )
