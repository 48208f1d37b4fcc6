"""Influences on the bits of a run other than its options: random keys, versions and numerics."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch import nn

from paceline.core.config import RunConfig, select
from paceline.core.errors import ConfigError, TaskError
from paceline.core.task import Task
from paceline.data.order import derive_key
from paceline.data.stream import read_whole
from paceline.parallel.world import World
from paceline.torch_internals import clear_cublas_workspaces

# --- Settings of the process ---


_log = logging.getLogger(__name__)
_PINNED = select(lambda its: its.fingerprint)
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_FIXED = ":4096:8"


@contextmanager
def preserve_numerics() -> Iterator[None]:
    """Restore at exit the settings of :func:`configure_numerics` and the random generators.

    A script may continue after its training, and its random numbers must not be the same after each.
    """
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    workspace = os.environ.get(_WORKSPACE)
    try:
        with _preserve_generators():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
        else:
            os.environ[_WORKSPACE] = workspace


@contextmanager
def _preserve_generators() -> Iterator[None]:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    seed = torch.initial_seed()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        if gpus is not None:
            torch.cuda.set_rng_state_all(gpus)
        elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # The first use of CUDA would have seeded it so.
            torch.cuda.manual_seed_all(seed)


def fix_cublas_workspace() -> None:
    """Choose a workspace with which cuBLAS repeats its sums, unless the user has chosen one.

    Call it before a task is imported: torch and cuBLAS read the choice when they first multiply on a GPU.
    """
    os.environ.setdefault(_WORKSPACE, _FIXED)


def release_cublas_workspace(model: nn.Module) -> None:
    """Let torch choose the size of cuBLAS's workspaces, after :func:`configure_numerics` and before a model trains.

    torch gives cuBLAS a workspace for each handle and stream in any case, so its sums repeat. But it parses the
    variable by a regular expression in each multiplication: on an H100 the steps of a small GPT took up to twice as
    long. A size of the user's stays, and so does ours for cuDNN's recurrent layers, whose own handles read it.
    """
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    if os.environ.get(_WORKSPACE) == _FIXED and not recurrent:
        del os.environ[_WORKSPACE]
        clear_cublas_workspaces()  # they may be smaller than the size that torch chooses


def configure_numerics(config: RunConfig, threads: int, device: torch.device) -> None:
    """Set what makes equal inputs give equal bits, for the whole process; see :func:`preserve_numerics`.

    Raises:
        ConfigError: this process has multiplied on a GPU before, with a workspace with which cuBLAS repeats nothing.
    """
    torch.set_num_threads(threads)
    exact = config.reducer == "exact"
    torch.backends.cudnn.benchmark = not exact
    if exact:
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Filling every torch.empty() would cost more than it could ever find.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":
        fix_cublas_workspace()
        ones = torch.ones(2, 2, device=device)
        # At its first multiplication torch notes for good whether the workspace suits: also for a later training.
        if exact:
            _require_cublas_workspace(ones)
        else:
            torch.mm(ones, ones)


def _require_cublas_workspace(ones: torch.Tensor) -> None:
    """Multiply; torch refuses if the workspace was unsuitable at its first multiplication."""
    torch.use_deterministic_algorithms(True)
    try:
        torch.mm(ones, ones)
    except RuntimeError as error:
        if _WORKSPACE not in str(error):
            raise
        raise ConfigError(
            f"--reduction exact: this process multiplied matrices on a GPU while {_WORKSPACE} was neither :4096:8 nor "
            f":16:8 (it is {os.environ[_WORKSPACE]!r} now), so cuBLAS may give other bits each time. Give the command "
            f"with {_WORKSPACE}=:4096:8, multiply only after training has started, or use --reduction allreduce."
        ) from error
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


_NO_DETERMINISTIC_KERNEL = re.compile(r"(\S+) does not have a deterministic implementation")
_NO_ATTENTION_KERNEL = "No available kernel. Aborting execution."


@contextmanager
def deterministic_kernels(config: RunConfig, device: torch.device) -> Iterator[None]:
    """Compute with kernels that repeat their bits, on a GPU under ``--reduction exact``; anywhere else change nothing.

    :func:`configure_numerics` lets torch warn, under which the backward of attention keeps its atomic additions; in
    this context torch reports an error instead, flash and memory-efficient attention add in one order, and cuDNN's
    attention is not chosen. The setting holds for all threads of the process, and so for autograd's.

    Raises:
        TaskError: an operation has no deterministic kernel.
    """
    if device.type != "cuda" or config.reducer != "exact":
        yield
        return
    # The closure of an optimizer enters this context again.
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if named := _NO_DETERMINISTIC_KERNEL.search(str(error)):
            what, instead = f"the operation {named[1]}", "another operation"
        elif _NO_ATTENTION_KERNEL in str(error):
            what, instead = "the attention that sdpa_kernel() selects", "FLASH_ATTENTION, EFFICIENT_ATTENTION or MATH"
        else:
            raise
        raise TaskError(
            f"{what} has no deterministic kernel for these inputs on a GPU, so --reduction exact cannot give the same "
            f"bits twice. Use {instead}, or --reduction allreduce, which gives equality within rounding."
        ) from error
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)


# --- The numerics fingerprint ---


NumericsFingerprint = dict[str, str | int | bool]


def numerics_fingerprint(config: RunConfig, device: torch.device) -> NumericsFingerprint:
    """Return the numerics fingerprint of this process; equal fingerprints promise equal bits."""
    options = {name: config.values[name] for name in _PINNED}
    options |= {"threads": torch.get_num_threads(), "reduction": config.reducer}
    return {
        "torch": str(torch.__version__),
        "device": _device_model(device),
        **{name: 0 if value is None else value for name, value in options.items()},
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        **(_gpu_numerics(device) if device.type == "cuda" else {"tf32": _cpu_rounds_float32()}),
    }


def compare_numerics(world: World, config: RunConfig, device: torch.device) -> None:
    """Compare the fingerprints of all ranks, if ``--reduction exact`` promises equal bits; a collective.

    CPUs of several models may train together: rank 0 warns that the run depends on which rank computes what.

    Raises:
        ConfigError: on GPUs: names the fields that differ, their values and the ranks.
        PeerLostError: a rank is gone.
    """
    if config.reducer != "exact":
        return
    told = world.all_gather_object([device.type, numerics_fingerprint(config, device)])
    differing = describe_differing_ranks([fingerprint for _, fingerprint in told])
    if not differing:
        return
    if any(kind == "cuda" for kind, _ in told):
        raise ConfigError(
            f"the ranks compute differently: {'; '.join(differing)}. --reduction exact needs equal GPUs, software and "
            "settings on all ranks: give all nodes the same, with --threads N the threads too, or use --reduction "
            "allreduce (equal within rounding)."
        )
    if world.rank == 0:
        _log.warning(
            "the ranks compute differently, so other numbers of processes give a model that is equal within rounding, "
            "not bit for bit: %s. Nodes with equal CPUs and --threads N give equal bits.",
            "; ".join(differing),
        )


def describe_differing_ranks(fingerprints: Sequence[NumericsFingerprint]) -> list[str]:
    """Return a line for each field that differs between the ranks: ``driver: 580 on rank 0, 570 on rank 1``."""
    lines = []
    for field in dict.fromkeys(name for fingerprint in fingerprints for name in fingerprint):
        ranks: dict[str, list[str]] = {}
        for rank, fingerprint in enumerate(fingerprints):
            ranks.setdefault(str(fingerprint.get(field, "not set")), []).append(str(rank))
        if len(ranks) > 1:
            groups = (f"{value} on rank{'s' * (len(of) > 1)} {', '.join(of)}" for value, of in ranks.items())
            lines.append(f"{field}: {', '.join(groups)}")
    return lines


def _cpu_rounds_float32() -> bool:
    """Return whether oneDNN may compute in fewer bits than float32 has."""
    # Not `allow_tf32`, which raises once the user's code has set `fp32_precision`.
    onednn: Any = torch.backends.mkldnn  # not typed, nor is anything there
    return any(_float32_precision(operation) != "ieee" for operation in (onednn.matmul, onednn.conv, onednn.rnn))


def _float32_precision(operation: Any) -> str:
    precision = str(operation.fp32_precision)
    return "ieee" if precision == "none" else precision


def _gpu_numerics(device: torch.device) -> NumericsFingerprint:
    """Return the settings and libraries that select a GPU's kernels; without those that this build of torch lacks."""
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    nccl: Any = torch.cuda.nccl
    attention = {
        "flash": cuda.flash_sdp_enabled(),
        "mem_efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
    }
    fields = {
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count,
        "fp32_matmul": _float32_precision(cuda.matmul),
        "fp32_conv": _float32_precision(cudnn.conv),
        "fp32_rnn": _float32_precision(cudnn.rnn),
        "fp16_reduced_sums": cuda.matmul.allow_fp16_reduced_precision_reduction,
        "bf16_reduced_sums": cuda.matmul.allow_bf16_reduced_precision_reduction,
        "fp16_accumulation": cuda.matmul.allow_fp16_accumulation,
        "attention": ", ".join(name for name, enabled in attention.items() if enabled),
        "attention_reduced_sums": cuda.fp16_bf16_reduction_math_sdp_allowed(),
        "blas": str(cuda.preferred_blas_library()).rpartition(".")[2],
        "cublas_workspace": os.environ.get(_WORKSPACE, _FIXED),  # released: as torch and the GPU decide
        "cuda": torch.version.cuda,
        "cublas": _cublas_version(),
        "cudnn": cudnn.version() if cudnn.enabled else "disabled",
        "nccl": ".".join(map(str, nccl.version())) if dist.is_nccl_available() else None,
        "driver": _driver_version(),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _cublas_version() -> str | None:
    """Return the version of the cuBLAS library that this process has loaded."""
    with suppress(OSError, AttributeError, StopIteration):
        mapped = Path("/proc/self/maps").read_text().splitlines()
        library = ctypes.CDLL(next(line.split()[-1] for line in mapped if "/libcublas.so" in line))
        numbers = [ctypes.c_int() for _ in ("major", "minor", "patch")]
        for which, number in enumerate(numbers):
            library.cublasGetProperty(which, ctypes.byref(number))
        return ".".join(str(number.value) for number in numbers)
    return None


def _driver_version() -> str | None:
    with suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text().strip()
    return None


def _device_model(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


# --- Randomness is keyed, not consumed: every draw depends on (seed, what it is for), never on history ---


# Tags 1 to 9 belong to the order of the data, 16 and 17 to its samples.
_MODEL, _MICROBATCH, _EVALUATION, _VERIFICATION, _PREPARATION = 11, 12, 13, 14, 15
_DATASET, _STEP, _UPDATE, _TRANSITION, _BETWEEN = 21, 22, 23, 24, 25


def build_split(task: Task, seed: int, split: str) -> Any:
    """Build a split's dataset after seeding, so that every process builds the same; None if the task has none.

    A stream to evaluate is read whole: its metrics need the same batches on any number of ranks, at each evaluation.
    """
    _seed(derive_key(seed, _DATASET, zlib.crc32(split.encode())))
    dataset = task.build_dataset(split)
    return dataset if split == "train" else read_whole(dataset, split, seed)


def seed_model(seed: int) -> None:
    """Seed before the model is built, so that every rank builds the same."""
    _seed(derive_key(seed, _MODEL))


def seed_step(seed: int, step: int) -> None:
    """Seed before the callbacks at a step's begin: all ranks draw the same, and so does a resumed run."""
    _seed(derive_key(seed, _STEP, step))


def seed_update(seed: int, step: int, number: int = 0) -> None:
    """Seed before gradients are processed and applied for the ``number``-th time in a step, such as for noise."""
    _seed(derive_key(seed, _UPDATE, step, *_further(number)))


def seed_between_passes(seed: int, step: int, number: int) -> None:
    """Seed after a pass over a step's micro-batches, since each rank has drawn for its own: all draw the same now."""
    _seed(derive_key(seed, _BETWEEN, step, number))


def seed_transition(seed: int, version: int) -> None:
    """Seed before the callbacks and schedulers of a transition: the end of an epoch, or an evaluation."""
    _seed(derive_key(seed, _TRANSITION, version))


def seed_preparation(seed: int) -> None:
    """Seed before options add parameters to the task's model, independent of earlier imports and draws."""
    _seed(derive_key(seed, _PREPARATION))


def seed_microbatch(seed: int, step: int, microbatch: int, number: int = 0) -> None:
    """Seed before a micro-batch's forward, so that dropout does not depend on the rank or the time.

    Args:
        number: of the pass over the micro-batches, within the step.
    """
    _seed(derive_key(seed, _MICROBATCH, step, microbatch, *_further(number)))


def _further(number: int) -> tuple[int, ...]:
    return (number,) if number else ()


def seed_evaluation(seed: int, block: int) -> None:
    """Seed before an evaluation batch."""
    _seed(derive_key(seed, _EVALUATION, block))


def verification_key(seed: int, step: int) -> int:
    """Return the 64-bit number that selects the verified micro-batch of a step and its ranks, without state."""
    return derive_key(seed, _VERIFICATION, step)


def _seed(key: int) -> None:
    # torch.manual_seed() also looks for every other kind of accelerator: 65 us against 1 us.
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
