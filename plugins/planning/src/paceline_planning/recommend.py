"""Which strategies fit, and the command for the one to use."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.built_in import TASK_PREFIXES
from paceline.core.config import to_flags
from paceline.core.errors import ConfigError
from paceline.core.task import Task
from paceline_planning.measurement import PRECISIONS, RECOMPUTED, Device, Measurement, measure
from paceline_planning.model_partition import Precision
from paceline_planning.predict import (
    Memory,
    RankLayout,
    Reduction,
    Timing,
    layouts,
    predict_memory,
    predict_timing,
)

SHARDING_PAYS = 100_000_000
"""Parameters below which gathering blocks costs more than the memory it saves is worth."""

HEADROOM = 0.92
"""The part of a GPU's memory that tensors get: the rest is the context's, the libraries' and gaps."""

_REDUCTIONS: tuple[Reduction, ...] = ("exact", "allreduce")

_AS_FAST = 1.1
"""Steps that take up to so many times the shortest count as equally fast: predictions are not more precise."""


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The hardware for the training.

    Attributes:
        gpus: processes, over all nodes.
        memory: bytes of each GPU.
        bandwidth: bytes a second that one process sends.
        flops_per_s: operations a second that one process really makes.
    """

    gpus: int
    nodes: int
    memory: int
    bandwidth: float
    flops_per_s: float
    device: Device = "cuda"

    def __post_init__(self) -> None:
        for name in ("gpus", "nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, but is {getattr(self, name)}.")
        if self.gpus % self.nodes:
            nearest = max(1, round(self.gpus / self.nodes)) * self.nodes
            raise ConfigError(
                f"--gpus {self.gpus} is the number over all nodes, and --nodes {self.nodes} does not "
                f"divide it. The nearest that does: --gpus {nearest}."
            )


@dataclass(frozen=True)
class PlanRow:
    """One way to train, possibly only predicted, and what it takes of the rank that needs most."""

    layout: RankLayout
    reduction: Reduction
    precision: Precision
    memory: Memory
    timing: Timing
    fits: bool
    in_paceline: bool

    def as_json(self) -> dict[str, Any]:
        return {
            "strategy": self.layout.family,
            "mesh": self.layout.axes,
            "reduction": self.reduction,
            "precision": self.precision,
            "checkpoint_activations": self.layout.recompute,
            "fsdp_mixed_precision": self.layout.mixed_precision,
            "memory": {**dataclasses.asdict(self.memory), "total": self.memory.total},
            "timing": dataclasses.asdict(self.timing),
            "fits": self.fits,
            "in_paceline": self.in_paceline,
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The table, and the recommendation.

    Attributes:
        rows: the ways to train, one for each family of layouts, reduction and precision; within a family, the
            one that is preferred is in front.
        chosen, command: the recommended row, and what to type for it; None if nothing fits.
    """

    task: str
    measurement: Measurement
    machines: ClusterSpec
    global_batch_size: int
    microbatches: int
    rows: tuple[PlanRow, ...]
    chosen: PlanRow | None
    command: str | None
    reasons: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "measurement": self.measurement.as_json(),
            "machines": dataclasses.asdict(self.machines),
            "global_batch_size": self.global_batch_size,
            "microbatches": self.microbatches,
            "rows": [row.as_json() for row in self.rows],
            "command": self.command,
            "reasons": list(self.reasons),
        }


def make_plan(
    task: Task,
    name: str,
    machines: ClusterSpec,
    *,
    assignments: Mapping[str, str],
    global_batch_size: int | None = None,
    microbatches: int | None = None,
) -> Plan:
    """Measure the task, predict every strategy, and choose.

    Args:
        name, assignments: the task and its fields on the command line.
        global_batch_size: samples a step; default: the task's, or one a micro-batch where that is fewer.
        microbatches: S; default: the task's where it suffices, else one a process.

    Raises:
        UserError: the numbers do not fit together, or the task cannot be built.
    """
    world = machines.gpus
    default = task.defaults.microbatches or world
    num_microbatches = microbatches or (default if default >= world else world)
    if num_microbatches < world:
        raise ConfigError(
            f"{world} processes cannot share {num_microbatches} micro-batches: each needs at least one. "
            f"Use --microbatches {world}."
        )
    least = num_microbatches * task.min_microbatch_size
    recommended = task.defaults.global_batch_size or task.recommended_batch_size()
    batch = global_batch_size or max(recommended, least)
    if batch < least:
        raise ConfigError(
            f"--global-batch-size {batch} is too small for {num_microbatches} micro-batches of at least "
            f"{task.min_microbatch_size}: "
            f"use {least} or more."
        )
    m = measure(task, -(-batch // num_microbatches), machines.device)
    rows = tuple(_rows(m, machines, num_microbatches))
    usable = [row for row in rows if row.layout.world_size == world]
    fast = [row for row in usable if row.precision != "fp32" and row.fits and row.in_paceline]
    chosen = choose_plan(fast if fast and m.parameters >= SHARDING_PAYS else usable)
    options = _options(task, machines, chosen, num_microbatches, batch) if chosen is not None else []
    words = _task_words(name, assignments)
    return Plan(
        task=words[0],
        measurement=m,
        machines=machines,
        global_batch_size=batch,
        microbatches=num_microbatches,
        rows=rows,
        chosen=chosen,
        command=None if chosen is None else shlex.join(["paceline", "train", *words, *options]),
        reasons=tuple(_reasons(m, machines, rows, chosen)),
    )


def _task_words(name: str, assignments: Mapping[str, str]) -> list[str]:
    """Return the task as one types it: ``hf:DIR --context 8192`` in place of its class and ``--set``."""
    words, rest = [name], dict(assignments)
    for prefix, task in TASK_PREFIXES.items():
        if name == task.reference and task.field in rest:
            words = [f"{prefix}:{rest.pop(task.field)}"]
            for field in [field for field in rest if field in task.flags]:
                flag, value = f"--{field.replace('_', '-')}", rest.pop(field)
                words += [flag, value] if task.flags[field][0] else [flag]
    return words + [word for field, value in rest.items() for word in ("--set", f"{field}={value}")]


def _rows(m: Measurement, machines: ClusterSpec, num_microbatches: int) -> list[PlanRow]:
    """Return the best layout of each family, for each reduction and precision, with and without checkpointing."""
    world = machines.gpus
    most_stages = min(m.anatomy.most_stages, num_microbatches)
    found = [RankLayout()] if world > 1 else []
    found += layouts(world, most_stages=most_stages, splits=m.degrees)
    best: dict[tuple[Any, ...], PlanRow] = {}
    for layout in found:
        if layout.pp * layout.data_ranks > num_microbatches:
            continue  # a stage would have nothing to do
        for row in _variants(m, machines, layout, num_microbatches):
            key = _key(row)
            if key not in best or _rank(row) < _rank(best[key]):
                best[key] = row
    families = list(dict.fromkeys(row.layout.family for row in best.values()))
    return sorted(best.values(), key=lambda row: (families.index(row.layout.family), _preference(row, m)))


def _key(row: PlanRow) -> tuple[Any, ...]:
    """Return the family of a row and its options: of all its layouts, the plan has the best."""
    layout = row.layout
    return layout.family, row.reduction, row.precision, layout.recompute, layout.mixed_precision


def _rank(row: PlanRow) -> tuple[bool, float, int]:
    """Sort key of the layouts of a family: those that fit, then faster ones; of equally fast ones the smaller."""
    return (not row.fits, float(f"{row.timing.step_s:.2g}") if row.fits else 0.0, row.memory.total)


def _preference(row: PlanRow, m: Measurement) -> tuple[bool | int, ...]:
    """Sort key of a family's rows: those that fit, half precision for a large model, little recomputation.

    Many parameters make the arithmetic the step, half precision is what GPUs are fast at, and copies of all weights
    are much. Then sums in a fixed order.
    """
    is_large = m.parameters >= SHARDING_PAYS
    is_slow = is_large and row.precision == "fp32"
    recompute = RECOMPUTED.index(row.layout.recompute)
    least = (row.reduction == "allreduce", PRECISIONS.index(row.precision), row.layout.mixed_precision != is_large)
    return (not row.fits, is_slow, recompute, *least)


def _variants(m: Measurement, machines: ClusterSpec, layout: RankLayout, num_microbatches: int) -> Iterator[PlanRow]:
    shared_memory = machines.device == "cpu" and machines.nodes == 1
    recomputes = [what for what in RECOMPUTED if ("fp32", what) in m.anatomy.traces]
    for recompute, reduction, precision, mixed in itertools.product(recomputes, _REDUCTIONS, PRECISIONS, (False, True)):
        if layout.zero_stage and (recompute != "none" or reduction == "exact"):
            continue  # DeepSpeed sums by itself
        if mixed and (precision == "fp32" or layout.fsdp == 1):
            continue
        one = dataclasses.replace(layout, recompute=recompute, mixed_precision=mixed)
        memory = predict_memory(
            m, one, reduction, precision, num_microbatches=num_microbatches, shared_memory=shared_memory
        )
        speeds = {"flops_per_s": machines.flops_per_s, "bandwidth": machines.bandwidth}
        timing = predict_timing(m, one, reduction, num_microbatches=num_microbatches, **speeds)
        fits = memory.total <= HEADROOM * machines.memory
        yield PlanRow(one, reduction, precision, memory, timing, fits, one.in_paceline)


def choose_plan(rows: Sequence[PlanRow]) -> PlanRow | None:
    """Choose the row to recommend: ddp if it fits; else of the fastest the one with fewest axes, if any fits."""
    # An optional engine is chosen only on request: fsdp shards as much.
    there = [row for row in rows if row.in_paceline and row.fits and not row.layout.zero_stage]
    plain = next((row for row in there if row.layout.family in ("single", "ddp")), None)
    if plain is not None and plain.layout.recompute == "none":
        return plain
    if not there:
        return None
    # The first of each family is the one that is preferred.
    of_family = {row.layout.family: row for row in reversed(there)}
    shortest = min(row.timing.step_s for row in of_family.values())
    near = [row for row in of_family.values() if row.timing.step_s <= _AS_FAST * shortest]
    return min(near, key=lambda row: (len(row.layout.axes), "tp" in row.layout.axes, row.memory.total))


def _options(task: Task, machines: ClusterSpec, row: PlanRow, num_microbatches: int, batch: int) -> list[str]:
    """Return the options of the command that differ from the defaults."""
    words: list[str] = []
    if machines.nodes > 1:
        words += ["--nodes", str(machines.nodes), "--rdzv-endpoint", "HOST:29400"]
    if machines.gpus > 1:
        words += ["--nproc", str(machines.gpus // machines.nodes)]
    words += to_flags(row.layout.options)
    if row.reduction != "exact":
        words += ["--reduction", row.reduction]
    if row.precision != "fp32" and not row.layout.mixed_precision:
        words += ["--precision", row.precision]
    if num_microbatches != task.defaults.microbatches:
        words += ["--microbatches", str(num_microbatches)]
    if batch != (task.defaults.global_batch_size or task.recommended_batch_size()):
        words += ["--global-batch-size", str(batch)]
    if machines.device == "cpu":
        words += ["--device", "cpu"]
    return words


def _reasons(m: Measurement, machines: ClusterSpec, rows: tuple[PlanRow, ...], chosen: PlanRow | None) -> list[str]:
    said = []
    family = None if chosen is None else chosen.layout.family
    if chosen is None:
        least = min((row for row in rows if row.in_paceline), key=lambda row: row.memory.total)
        said.append(
            f"Nothing fits: {least.layout.name} {least.reduction} in {least.precision} needs least, "
            f"{least.memory.total / 2**20:,.0f} MiB. Use more GPUs, larger ones, or a smaller micro-batch "
            "(more --microbatches)."
        )
    elif family == "single":
        said.append("One process: there is nothing to share.")
    elif family == "ddp" and chosen.layout.recompute == "none":
        said.append("The whole model fits each GPU: ddp sends least, and its survivors continue after a loss.")
        if m.parameters < SHARDING_PAYS:
            said.append(
                f"fsdp is advised against: below {SHARDING_PAYS // 10**6} million parameters (there are "
                f"{m.parameters / 1e6:.3g}), gathering blocks costs more than it saves."
            )
    else:
        said.append("The whole model does not fit a GPU with its gradients and optimizer.")
        said += _why(m, rows, chosen)
    if chosen is not None and chosen.reduction == "allreduce":
        said.append("exact sums would not fit as well: allreduce keeps one gradient buffer, and gives up equal bits.")
    if chosen is not None and chosen.precision == "bf16":
        said.append("bf16 before fp16: the same memory and speed, its range is fp32's, so no scaler is needed.")
    if machines.gpus > 1 and not m.degrees:
        reason = "there is no plan for splitting the model's layers."
        if m.unsplit is not None:
            reason = f"the model does not run with its layers split ({m.unsplit})."
        said.append(f"tp is left out: {reason}")
    if machines.gpus > 1 and m.anatomy.most_stages == 1:
        said.append("pp is left out: the model cannot be cut, or its pieces share parameters.")
    if m.built_for_real is not None:
        said.append(f"The task cannot run on fake tensors ({m.built_for_real}); it was built and run for real.")
    return said


_WHAT_IT_DOES = {
    "dp": "copies of it share the data",
    "fsdp": "parameters, gradients and optimizer state are sharded",
    "tp": "matrices are split",
    "pp": "its blocks are stages of a pipeline",
    "zero1": "the optimizer's state is distributed",
    "ddp": "every rank has all of it",
}


def _why(m: Measurement, rows: tuple[PlanRow, ...], chosen: PlanRow) -> list[str]:
    """Give the reasons for the choice if the whole model does not fit."""
    layout = chosen.layout
    names = list(layout.axes) if len(layout.axes) > 1 else [layout.family]
    does = "; ".join(f"{name}: {_WHAT_IT_DOES[name]}" for name in names)
    others = {row.layout.family: row for row in reversed(rows) if row.in_paceline and row.fits} | {
        layout.family: chosen
    }
    slower = sorted(
        (row for row in others.values() if row.layout.family != layout.family),
        key=lambda row: row.timing.step_s,
    )
    fit = "what else fits: " + ", ".join(f"{row.layout.name} {row.timing.step_s:.3g} s" for row in slower[:4])
    takes = f"{layout.name} ({does}) takes {chosen.timing.step_s:.3g} s a step, as predicted"
    said = [f"{takes}; {fit if slower else 'nothing else fits'}."]
    if "tp" in layout.axes:
        said.append("Under tp results are equal within a tolerance, not in their bits.")
    if m.parameters < SHARDING_PAYS:
        said.append("So small a model is split only for want of memory: a smaller micro-batch may do for ddp.")
    same = [row for row in rows if row.layout == layout and row.reduction == chosen.reduction]
    if chosen.precision == "fp32" and not all(row.fits for row in same):
        said.append("bf16 does not fit: autocast keeps a copy of every weight from forward to backward.")
    if layout.mixed_precision:
        said.append("fsdp gathers layers in bf16 (--fsdp-mixed-precision), so that autocast copies no weights.")
    if layout.recompute != "none":
        less = RECOMPUTED[RECOMPUTED.index(layout.recompute) - 1]
        way = dataclasses.replace(layout, recompute=less)
        kept = next(row for row in rows if _key(row) == _key(dataclasses.replace(chosen, layout=way)))
        more = 100 * max(0.0, m.anatomy.repetition(layout.recompute) - 1)
        said.append(
            f"Backward recomputes activations (--checkpoint-activations {layout.recompute}), {more:.0f} % more "
            f"operations: with {less}, {kept.layout.name} needs {kept.memory.total / 2**30:.3g} GiB, and does not fit."
        )
    return said
