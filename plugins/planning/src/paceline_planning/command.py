"""``paceline plan TASK``: predict each strategy's memory and time without a GPU."""

from __future__ import annotations

import dataclasses
import json as json_module
import re
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from paceline.core.errors import ConfigError
from paceline.core.output import Console, ListTable
from paceline.core.task_loading import TaskReference, parse_assignments

if TYPE_CHECKING:
    from paceline_planning.recommend import Plan, PlanRow

_WIDTH = 110  # of the table, also if the output is not a terminal

Flag = Annotated[bool, Parameter(negative="")]
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def plan(
    task: str,
    *,
    gpus: int,
    gpu_memory: str,
    nodes: int = 1,
    bandwidth: str = "25GB/s",
    tflops: float = 100.0,
    set: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    global_batch_size: int | None = None,
    microbatches: int | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    json: Flag = False,
) -> int:
    """Predict memory and step time of TASK under each strategy, and recommend a command.

    The model is built on the meta device: nothing is trained and no memory is allocated. The exit code is 0
    if at least one strategy fits.

    Args:
        task: file.py:Name, package.module:Name, hf:MODEL, or a built-in task such as transformer.
        gpus: Total number of GPUs, with one process each.
        gpu_memory: Memory of one GPU, such as 80GiB.
        nodes: Number of nodes.
        bandwidth: Bandwidth of one process, such as 25GB/s.
        tflops: TFLOP/s that one GPU reaches in practice: often a third of its data sheet's.
        set: A hyperparameter as field=value; may be repeated.
        global_batch_size: Samples per step, over all processes. Default: the task's.
        microbatches: Micro-batches of a global batch. Default: the task's, or one per process.
        device: cuda, or cpu for processes without a GPU, on gloo.
        json: Print JSON.
    """
    memory = _bytes("--gpu-memory", gpu_memory)
    speed = _bytes("--bandwidth", bandwidth.removesuffix("/s"))
    if not tflops > 0:
        raise ConfigError(f"--tflops must be positive, but is {tflops:g}.")
    for name, value in (("--global-batch-size", global_batch_size), ("--microbatches", microbatches)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, but is {value}.")
    assignments = parse_assignments(set)
    from paceline_planning.recommend import ClusterSpec, make_plan

    cluster = ClusterSpec(
        gpus=gpus, nodes=nodes, memory=int(memory), bandwidth=speed, flops_per_s=tflops * 1e12, device=device
    )
    result = make_plan(
        *(TaskReference(task, assignments).load(), task, cluster),
        assignments=assignments,
        global_batch_size=global_batch_size,
        microbatches=microbatches,
    )
    if json:
        print(json_module.dumps(result.as_json(), indent=2))
    else:
        _show(result)
    return 0 if result.command is not None else 1


def _show(result: Plan) -> None:
    m, cluster = result.measurement, result.machines
    whole = m.whole
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)
    console.print(
        f"{result.task}: {_number(m.parameters / 1e6)} million parameters, {result.global_batch_size} samples "
        f"per step in {result.microbatches} micro-batches of {m.microbatch}, "
        f"{whole.flops / 1e12:,.3g} TFLOP per micro-batch",
        markup=False,
    )
    console.print(
        f"{cluster.gpus} processes with {_number(cluster.memory / 2**30)} GiB, at "
        f"{cluster.flops_per_s / 1e12:g} TFLOP/s and {cluster.bandwidth / 1e9:g} GB/s\n"
    )
    unit, unit_bytes = ("GiB", 2**30) if whole.parameter_bytes >= 2**30 else ("MiB", 2**20)
    texts, sizes = ("strategy", "", "limited by"), (">params", ">grads", ">optim.", ">activ.", ">temp.")
    table = ListTable(*texts[:2], *sizes, f">{unit}/rank", ">GB sent", ">seconds", texts[2], "fits", folds=texts)
    table.box = None  # one space between columns: all of them fit
    families: dict[str, list[PlanRow]] = {}
    for row in result.rows:
        families.setdefault(row.layout.family, []).append(row)
    shown = [result.chosen if result.chosen in rows else rows[0] for rows in families.values()]
    for row in shown:
        held = (*dataclasses.astuple(row.memory), row.memory.total)
        table.add(
            f"{row.layout.name}" + ("" if row.layout.in_paceline else "*"),
            ", ".join(_settings(row)),
            *(_number(size / unit_bytes) for size in held),
            _number(row.timing.sent_bytes / 1e9),
            f"{row.timing.step_s:.3g}",
            row.timing.limited_by,
            "yes" if row.fits else "no",
            style="bold" if row is result.chosen else None,
        )
    console.print(table)
    if not all(row.in_paceline for row in shown):
        console.print("* not implemented in Paceline yet")
    # Rajbhandari et al., ZeRO, 2020, section 3.1. Here mixed precision is autocast: fp32 weights and gradients, and
    # half-precision copies of the weights from forward to backward.
    console.print(
        f"\nFor comparison, half-precision weights with Adam (2 + 2 + 4 + 4 + 4 bytes per parameter): "
        f"{_number(16 * m.parameters / unit_bytes)} {unit} of states."
    )
    if any(row.layout.recompute != "none" for row in shown):
        console.print(
            "block, selective: backward recomputes the inside of a block, or all of it but the results of products and "
            "attention (--checkpoint-activations)."
        )
    if any(row.layout.mixed_precision for row in shown):
        console.print("gathers: fsdp gathers layers in half precision (--fsdp-mixed-precision).")
    if result.chosen is not None and result.chosen.layout.family == "fsdp":
        memory = result.chosen.memory
        saved = _number((memory.parameters + memory.optimizer) / unit_bytes)
        console.print(f"While a checkpoint is saved, each process needs another {saved} {unit} of its host.")
    else:
        saved = _number((whole.parameter_bytes + whole.optimizer_bytes) / unit_bytes)
        console.print(f"While rank 0 saves a checkpoint, its host needs another {saved} {unit}.")
    for reason in result.reasons:
        console.print(reason, markup=False)
    if result.command is not None:
        console.print(f"\n{result.command}", style="bold", markup=False, soft_wrap=True)


def _settings(row: PlanRow) -> list[str]:
    """Return a layout's precision, and its settings that are not the default."""
    words: list[str] = [row.precision]
    words += [row.reduction] if row.reduction != "exact" else []
    words += ["gathers"] if row.layout.mixed_precision else []
    return words + ([row.layout.recompute] if row.layout.recompute != "none" else [])


def _number(value: float) -> str:
    """Format a number with three digits and without an exponent."""
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.995 else f"{value:.3f}"


def _bytes(flag: str, text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", text)
    if not match or not float(match[1]) > 0:
        raise ConfigError(f"{flag} must be a size with its unit, such as 80GiB or 25GB, but is {text!r}.")
    return float(match[1]) * _UNITS[match[2]]
