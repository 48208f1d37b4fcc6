"""``paceline bench comm``: by itself it starts the ranks; started by another launcher, it is one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.core.environment import detect_environment, without_rank_variables
from paceline.core.errors import ConfigError
from paceline.launch.launcher import LaunchSpec, get_launcher
from paceline_checks.bench_report import print_report, require_matplotlib
from paceline_checks.collectives import (
    COLLECTIVES,
    Backend,
    CommunicationPlan,
    CommunicationReport,
    Mode,
    Op,
    find_link,
    parse_sizes,
)

Flag = Annotated[bool, Parameter(negative="")]


def comm(
    *,
    backend: Backend = "gloo",
    op: Annotated[tuple[Op, ...], Parameter(consume_multiple=True, negative="", show_default=False)] = ("all_reduce",),
    sizes: str = "8B:64MiB",
    mode: Mode = "process-per-device",
    nproc: int = 2,
    iterations: int = 20,
    warmup: int = 5,
    link_gbps: float | None = None,
    interface: str | None = None,
    plot: Path | None = None,
    json: Flag = False,
    markdown: Flag = False,
) -> int:
    """Time of collectives, their algorithm and bus bandwidth as in nccl-tests; every result is checked.

    Over several nodes, start it with any launcher: paceline launch --on slurm --nodes 2 --nproc 8 -- -m
    paceline bench comm. The exit code is 0 if all results are right.

    Args:
        backend: What carries the data: gloo (CPU), nccl (GPUs), mpi (mpi4py).
        op: What to run; several may be given. Default: all_reduce.
        sizes: Bytes, doubling from the first to the last: 8B:256MiB; or one size.
        mode: A process for each rank; one process and one thread for all GPUs; or a thread for each rank.
        nproc: Ranks of this machine; under another launcher with threads-per-device, of each process.
        iterations: Timed repetitions of each.
        warmup: Repetitions before those.
        link_gbps: The link's limit in Gbit/s. Default: the network interface's, between machines.
        interface: Network interface to the other machines.
        plot: Write a chart into this SVG file. Needs matplotlib.
        json: Print JSON.
        markdown: Print Markdown.
    """
    if plot is not None and plot.suffix != ".svg":
        raise ConfigError(f"--plot writes SVG, so its name must end in .svg, but is {plot}.")
    if plot is not None:
        require_matplotlib()  # before the measurement, not after it
        if not plot.absolute().parent.is_dir():
            raise ConfigError(f"--plot: there is no directory {plot.absolute().parent}.")
    plan = CommunicationPlan(
        backend=backend,
        mode=mode,
        ops=tuple(name for name in COLLECTIVES if name in op),
        sizes=parse_sizes(sizes),
        nproc=nproc,
        iterations=iterations,
        warmup=warmup,
        interface=interface,
    )
    environment = detect_environment()
    link = find_link(link_gbps, one_machine=environment.nodes == 1, interface=interface)
    if environment.world_size == 1 and mode == "process-per-device" and nproc > 1:
        with without_rank_variables():
            return _start_ranks(plan, sys.argv[1:])

    from paceline_checks.run_collectives import run_plan

    carrier, ranks, results = run_plan(plan, environment)
    if environment.rank != 0:
        return 0
    report = CommunicationReport(carrier, mode, ranks, environment.nodes, link, results)
    if plot is not None:
        report.plot(plot)
    print_report(report, json=json, markdown=markdown)
    return 1 if report.wrong else 0


def _start_ranks(plan: CommunicationPlan, words: Sequence[str]) -> int:
    """Give the same command to the ranks of this machine; the first of them prints."""
    if plan.backend == "nccl":
        from paceline_checks.run_collectives import require_gpus

        require_gpus(plan, plan.nproc)
    launcher = get_launcher("mpi" if plan.backend == "mpi" else "spawn")
    spec = LaunchSpec(
        command=(sys.executable, "-m", "paceline", *words),
        name="bench-comm",
        directory=Path.cwd(),
        nproc=(plan.nproc,),
        rank_launcher="mpi" if plan.backend == "mpi" else "spawn",
        env_style="mpi" if plan.backend == "mpi" else "torch",
    )
    return launcher.submit(launcher.render(spec)).wait()
