"""``--strategy auto`` for a model that must be measured: ddp where it fits, else what the plan recommends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.core.config import ResolvedConfig
from paceline.core.errors import ConfigError
from paceline.core.task import Task
from paceline.parallel.options import MemoryOptions
from paceline_planning.measurement import state_bytes
from paceline_planning.recommend import ClusterSpec, PlanRow, choose_plan, make_plan

_FLOPS_PER_S = {"cpu": 5e10, "cuda": 1e14}
_BANDWIDTH = {"cpu": 1e9, "cuda": 25e9}


def choose_by_plan(
    config: ResolvedConfig, task: Task, *, world_size: int, memory: int, device: str
) -> tuple[ResolvedConfig, str | None]:
    """Return the options with the recommended strategy, and what to say about it.

    Args:
        config: resolved but for the strategy.
        memory: bytes that the process with least of it may take.
        device: "cpu" or "cuda".
    """
    plan = make_plan(
        task,
        config.processes.task,
        ClusterSpec(
            gpus=world_size,
            nodes=1,
            memory=memory,
            bandwidth=_BANDWIDTH[device],
            flops_per_s=_FLOPS_PER_S[device],
            device="cuda" if device == "cuda" else "cpu",
        ),
        assignments={},
        global_batch_size=config.global_batch_size,
        microbatches=config.microbatches,
    )
    precision = "fp32" if config.training.precision == "fp32" else "bf16"  # fp16 takes what bf16 takes
    again = config[MemoryOptions].checkpoint_activations

    def possible() -> Iterator[PlanRow]:
        for row in plan.rows:
            alike = (row.reduction, row.precision) == (config.parallel.reduction, precision)
            alike = alike and row.layout.recompute == again and not row.layout.mixed_precision
            if alike and row.layout.world_size == world_size:
                yield row

    of_ddp = next(row for row in possible() if row.layout.family == "ddp")
    rows = [row for row in possible() if row is of_ddp or _with(config, row) is not None]
    chosen = choose_plan(rows)
    needs = f"ddp needs {of_ddp.memory.total / 2**30:.3g} GiB a process, and there are {memory / 2**30:.3g}"
    if chosen is None:
        return config, f"strategy: ddp. {needs}; paceline plan finds no other that fits"
    if chosen is of_ddp:
        return config, None
    settled = _with(config, chosen)
    assert settled is not None
    return settled, (
        f"strategy: {chosen.layout.name}. {needs}; {chosen.layout.name} needs "
        f"{chosen.memory.total / 2**30:.3g} (paceline plan shows all)"
    )


def require_memory(config: ResolvedConfig, task: Task, memory: int) -> None:
    """Reject a training whose parameters, gradients and optimizer alone need more than the processes have together.

    Not a task that cannot run on fake tensors, nor adapters and frozen parameters, which need less.

    Args:
        memory: bytes of all processes.

    Raises:
        ConfigError: it needs more.
    """
    if config.values.get("lora") or config.values.get("freeze"):
        return
    try:
        needed = state_bytes(task)
    except Exception:  # whatever the task's code does that fake tensors cannot
        return
    if needed > memory:
        raise ConfigError(
            f"parameters, gradients and optimizer need {needed / 2**30:.1f} GiB, without activations, and the memory "
            f"of all processes together is {memory / 2**30:.1f} GiB. Use more machines, or an optimizer with less "
            "state: SGD has none."
        )


def _with(config: ResolvedConfig, row: PlanRow) -> ResolvedConfig | None:
    """Return the options with the row's layout; None if they do not work with it."""
    layout = row.layout
    changes: dict[str, Any] = {"mesh": layout.name} if len(layout.axes) > 1 else {"strategy": layout.family}
    try:
        return config.replace(**changes)
    except ConfigError:
        return None
