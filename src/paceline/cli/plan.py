"""``paceline plan TASK``: memory and time of each strategy, before a GPU is there."""

from __future__ import annotations

import json as json_module
import re
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from paceline.core.errors import ConfigError
from paceline.core.task_loading import TaskReference, parse_assignments

if TYPE_CHECKING:
    from paceline.parallel.planning.recommend import Plan, PlanRow

_WIDTH = 110
"""Columns of the table, also where the output is no terminal."""

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

    Nothing is trained and no memory is taken: the model is built on tensors without data. The exit code is 0
    if some strategy fits.

    Parameters
    ----------
    task
        file.py:Name, package.module:Name, or a recipe such as transformer.
    gpus
        GPUs over all machines, with one process each.
    gpu_memory
        Memory of one GPU, such as 80GiB.
    nodes
        Machines.
    bandwidth
        Bandwidth of one process, such as 25GB/s.
    tflops
        TFLOP/s that one GPU really reaches: often a third of its data sheet's.
    set
        A hyperparameter as field=value; may be repeated.
    global_batch_size
        Samples per step, over all processes. Default: the task's.
    micro-batches
        Logical micro-batches of a global batch. Default: the task's, or one per process.
    device
        cuda, or cpu: processes without a GPU, on gloo.
    json
        Print JSON.
    """
    memory = _bytes("--gpu-memory", gpu_memory)
    speed = _bytes("--bandwidth", bandwidth.removesuffix("/s"))
    if not tflops > 0:
        raise ConfigError(f"--tflops must be positive, but is {tflops:g}.")
    for name, value in (("--global-batch-size", global_batch_size), ("--microbatches", microbatches)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, but is {value}.")
    assignments = parse_assignments(set)
    from paceline.parallel.planning.recommend import ClusterSpec, make_plan

    machines = ClusterSpec(
        gpus=gpus,
        nodes=nodes,
        memory=int(memory),
        bandwidth=speed,
        flops_per_s=tflops * 1e12,
        device=device,
    )
    made = make_plan(
        TaskReference(task, assignments).load(),
        task,
        machines,
        assignments=assignments,
        global_batch_size=global_batch_size,
        microbatches=microbatches,
    )
    if json:
        print(json_module.dumps(made.as_json(), indent=2))
    else:
        _show(made)
    return 0 if made.command is not None else 1


def _show(made: Plan) -> None:
    from paceline.parallel.planning.predict import classic_mixed_precision

    m, machines = made.measurement, made.machines
    whole = m.whole
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)
    console.print(
        f"{made.task}: {_number(m.parameters / 1e6)} million parameters, {made.global_batch_size} samples "
        f"a step in {made.microbatches} micro-batches of {m.microbatch}, {whole.flops / 1e12:,.3g} TFLOP a micro-batch",
        markup=False,
    )
    console.print(
        f"{machines.gpus} processes with {_number(machines.memory / 2**30)} GiB, at "
        f"{machines.flops_per_s / 1e12:g} TFLOP/s and {machines.bandwidth / 1e9:g} GB/s\n"
    )
    unit, unit_bytes = ("GiB", 2**30) if whole.parameter_bytes >= 2**30 else ("MiB", 2**20)
    table = Table(box=None, header_style="bold", pad_edge=False, title_justify="left")
    table.add_column("strategy", no_wrap=True)
    table.add_column("")
    titles = ("params", "grads", "optim.", "activ.", "temp.", f"{unit} a rank", "GB sent")
    for title in (*titles, "seconds"):
        table.add_column(title, justify="right")
    table.add_column("limited by", no_wrap=True)
    table.add_column("fits")
    families: dict[str, list[PlanRow]] = {}
    for row in made.rows:
        families.setdefault(row.layout.family, []).append(row)
    shown = [made.chosen if made.chosen in ways else ways[0] for ways in families.values()]
    for row in shown:
        held = row.memory
        sizes = (
            held.parameters,
            held.gradients,
            held.optimizer,
            held.activations,
            held.temporary,
            held.total,
        )
        fits = "yes" if row.fits else "no"
        table.add_row(
            f"{row.layout.name}" + ("" if row.layout.in_paceline else "*"),
            ", ".join(_how(row)),
            *(_number(size / unit_bytes) for size in sizes),
            _number(row.timing.sent_bytes / 1e9),
            f"{row.timing.step_s:.3g}",
            row.timing.limited_by,
            fits,
            style="bold" if row is made.chosen else None,
        )
    console.print(table)
    if not all(row.in_paceline for row in shown):
        console.print("* not in Paceline yet")
    console.print(
        f"\nFor comparison, half-precision weights with Adam (2 + 2 + 4 + 4 + 4 bytes a parameter): "
        f"{_number(classic_mixed_precision(m.parameters) / unit_bytes)} {unit} of states."
    )
    if any(row.layout.checkpointing for row in shown):
        console.print("again: the activations of a block are computed again in backward.")
    saved = _number((whole.parameter_bytes + whole.optimizer_bytes) / unit_bytes)
    console.print(f"While rank 0 saves, its host holds {saved} {unit} more.")
    for reason in made.reasons:
        console.print(reason, markup=False)
    if made.command is not None:
        console.print(f"\n{made.command}", style="bold", markup=False, soft_wrap=True)


def _how(row: PlanRow) -> list[str]:
    """What goes with a layout, where it is not the default."""
    words: list[str] = [row.precision]
    words += [row.reduction] if row.reduction != "exact" else []
    return words + (["again"] if row.layout.checkpointing else [])


def _number(value: float) -> str:
    """Three digits, and no exponent."""
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.995 else f"{value:.3f}"


def _bytes(flag: str, text: str) -> float:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", text)
    if not found or not float(found[1]) > 0:
        raise ConfigError(f"{flag} {text!r}: write a size with its unit, such as 80GiB or 25GB.")
    return float(found[1]) * _UNITS[found[2]]
