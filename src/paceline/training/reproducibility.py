"""Influences on the bits of a run other than its options: random keys, versions and numerics."""

from __future__ import annotations

import os
import platform
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.core.config import RunConfig
from paceline.core.option_sets import select
from paceline.core.task import Task
from paceline.data.order import derive_key

# --- What the bits of a run depend on besides task, configuration and seed ---


_PINNED = select(lambda its: its.fingerprint)
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def preserve_numerics() -> Iterator[None]:
    """Restore at exit the settings of :func:`configure_numerics`: a script may continue after its training."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    workspace = os.environ.get(_WORKSPACE)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)


def configure_numerics(config: RunConfig, threads: int) -> None:
    """Set what makes equal inputs give equal bits, for the whole process; see :func:`preserve_numerics`."""
    torch.set_num_threads(threads)
    exact = config.reducer == "exact"
    torch.backends.cudnn.benchmark = not exact
    if exact:
        # Read by cuBLAS when its first handle is made.
        os.environ.setdefault(_WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Filling every torch.empty() would cost more than it could ever find.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def numerics_fingerprint(config: RunConfig, device: torch.device) -> dict[str, str | int | bool]:
    """Return the numerics fingerprint of this process; equal fingerprints promise equal bits."""
    options = {name: getattr(config, name) for name in _PINNED}
    options |= {"threads": torch.get_num_threads(), "reduction": config.reducer}
    return {
        "torch": str(torch.__version__),
        "device": _device_model(device),
        **{name: 0 if value is None else value for name, value in options.items()},
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
    }


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
_MODEL, _MICROBATCH, _EVALUATION, _VERIFICATION, _ADAPTERS = 11, 12, 13, 14, 15
_DATASET, _STEP, _UPDATE, _TRANSITION, _BETWEEN = 21, 22, 23, 24, 25


def build_split(task: Task, seed: int, split: str) -> Any:
    """Build a split's dataset after seeding, so that every process builds the same; None if the task has none."""
    _seed(derive_key(seed, _DATASET, zlib.crc32(split.encode())))
    return task.build_dataset(split)


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


def seed_adapters(seed: int) -> None:
    """Seed before adapters are put around a model's layers, independent of earlier imports and draws."""
    _seed(derive_key(seed, _ADAPTERS))


def seed_microbatch(seed: int, step: int, microbatch: int, number: int = 0) -> None:
    """Seed before a micro-batch's forward, so that dropout does not depend on the rank or the time.

    Args:
        seed: of the run.
        step: steps done.
        microbatch: the index.
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
