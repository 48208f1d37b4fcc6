"""The choice of a strategy, and its construction from the options."""

from __future__ import annotations

import copy
import gc
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
import torch
from torch import nn

from paceline.core.built_in import PARTS
from paceline.core.config import ResolvedConfig, RunConfig
from paceline.core.errors import ConfigError
from paceline.core.plugins import has_part, import_object, load
from paceline.core.task import Task
from paceline.parallel.options import PipelineOptions, TensorOptions
from paceline.parallel.strategy import ComposedLayout, ExampleBatchProvider, ParameterLayout, Strategy, StrategyOptions
from paceline.parallel.world import ParallelDims

T = TypeVar("T")

_AXES_FIRST = ("pp", "fsdp", "tp")
"""Of the strategies of a mesh, the first of these runs the step; dp only copies what another one lays out."""

_TORCH_DDP = "paceline.parallel.torch_ddp:TorchDDP"


def strategy_name(config: RunConfig, world_size: int) -> str:
    """Return the mesh or the strategy that the options mean for ``world_size`` processes."""
    if config.parallel.mesh is not None:
        return str(config.values["mesh"])
    if config.parallel.strategy != "auto":
        return config.parallel.strategy
    return "single" if world_size == 1 else "ddp"


def build_layout(
    config: ResolvedConfig, mesh: ParallelDims, task: Task, example_batch: ExampleBatchProvider
) -> ParameterLayout:
    """Build the parameter layout for the options.

    Raises:
        ConfigError: the options do not fit the number of processes.
    """
    layouts: list[ParameterLayout] = []
    tensor_parallel = None
    if "tp" in config.strategies:
        from paceline.parallel.tensor_parallel import TensorParallel

        tensor_parallel = TensorParallel(mesh, task, along_sequence=config[TensorOptions].sequence_parallel)
    if "pp" in config.strategies:
        from paceline.parallel.pipeline.pipeline import PipelineLayout

        options = config[PipelineOptions]
        micro_batches = config.microbatches // mesh.data.world_size
        layouts.append(
            PipelineLayout(
                *(mesh, options.pp_schedule, options.pp_split, micro_batches, example_batch), splitting=tensor_parallel
            )
        )
    elif tensor_parallel is not None:
        layouts.append(tensor_parallel)
    if "fsdp" in config.strategies:
        from paceline.parallel.fsdp import FullyShard

        layouts.append(FullyShard(mesh, config))
    if not layouts:
        layout: ParameterLayout = strategy_class(config, mesh.world.world_size).build_layout(mesh, config)
        return layout
    return layouts[0] if len(layouts) == 1 else ComposedLayout(layouts)


def build_strategy(module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> Strategy:
    """Build the strategy for the options, with the model.

    Raises:
        ConfigError: the options do not fit the number of processes.
    """
    strategy: Strategy = strategy_class(options.config, mesh.world.world_size)(module, mesh, options)
    return strategy


def strategy_class(config: RunConfig, world_size: int) -> Any:
    """Return the class of the strategy that runs the step."""
    name = next((each for each in _AXES_FIRST if each in config.strategies), config.strategies[0])
    if strategy_name(config, world_size) == "single":
        name = "single"
    if config.changes.strategy is not None:
        return import_object(config.changes.strategy)
    if name in ("single", "ddp") and config.reducer == "ddp":
        return import_object(_TORCH_DDP)
    requirement = "a strategy: a class with `build_layout`, such as a subclass of MicrobatchStrategy"
    return load("paceline.strategies", name, requirement, lambda found: callable(getattr(found, "build_layout", None)))


# --- ``--strategy auto``: ddp where it clearly fits, else what a plan recommends ---


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
    if device.type == "cuda":
        total = int(torch.cuda.get_device_properties(device).total_memory)
    else:
        total = min([psutil.virtual_memory().total, *cgroup_limits()])
    return total // max(1, processes)


def cgroup_limits(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Yield the bytes to which control groups limit a process: those of its group, and of the ones around it."""
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):  # of versions 2 and 1
            group = root / controllers / path.strip("/")
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # "max"
                    yield int((folder / ("memory.limit_in_bytes" if controllers else "memory.max")).read_text())


def choose_strategy(
    config: ResolvedConfig, task: Task, *, world_size: int, memory: int, device: str
) -> tuple[ResolvedConfig, str | None]:
    """Options with the strategy that ``auto`` means for so many processes, and what to say about it.

    A model that is small against the memory is not measured. All ranks must give the same arguments. On CPUs, a model
    that does not fit them under ``fsdp`` either is refused before the kernel kills a process.

    Args:
        config: resolved but for the strategy.
        memory: bytes that the process with least of it may take.
        device: "cpu" or "cuda".

    Raises:
        ConfigError: it does not fit.
    """
    if config.parallel.strategy == "fsdp" and device == "cpu":
        with suppress(_MeasurementError):  # then it is unknown
            _call_in_child(lambda: _require_room(config, task, world_size * memory))
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


class _MeasurementError(ConfigError):
    """The forked process that measures a model cannot tell."""


def _require_room(config: ResolvedConfig, task: Task, memory: int) -> None:
    """Reject a model that does not fit the memory of all processes together, as far as the plug-in is here."""
    reference = PARTS["--strategy fsdp's memory"]
    parameters = _parameter_bytes(task)
    if parameters is not None and _FITS_FACTOR * parameters > memory and has_part(reference):
        import_object(reference)(config, task, memory)


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
            raise _MeasurementError(
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
    raise _MeasurementError(
        "no forked process begins to measure the model for --strategy auto. Give a strategy, such as --strategy ddp."
    )
