"""The engines that carry processes, on one node: Paceline's agent, Ray and Monarch; no process computes anything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.results import BenchResult, Progress, Quantity, measure
from benchmarks.rounds import REPORT, BenchCommand, Variant, read_json
from paceline.core.errors import ConfigError

TITLES = {
    "paceline": "Paceline's agent",
    "mesh": "Paceline's agents of as many nodes",
    "ray": "Ray",
    "monarch": "Monarch",
    "monarch-1s": "Monarch, as --on monarch sets it",
}
"""The engines; ``monarch-1s`` has its supervision poll each second."""

_QUANTITIES = (
    Quantity("start_s", "start, s", 2),
    Quantity("message_ms", "message to all and back, ms", 2),
    Quantity("known_ms", "from a kill to its report, ms", 1),
    Quantity("memory_mib", "MiB a process", 1),
    Quantity("idle_percent", "processor of an idle process, %", 2),
)


def bench_engines(
    *, engines: Sequence[str], processes: Sequence[int], rounds: int, idle_s: float, progress: Progress
) -> BenchResult:
    """Start processes by each engine, send to all of them, kill one, and ask for their memory.

    Args:
        engines: names in :data:`TITLES`; the first is the baseline of the ratios.
        processes: how many processes, a table each.
        rounds: how often; the engines take turns.
        idle_s: how long the processes are left to themselves, for the processor time of that.
        progress: shows each sample.

    Raises:
        ConfigError: a number of processes is out of range.
        LaunchError: an engine failed.
    """
    for number in processes:
        if not 1 <= number <= 1024:
            raise ConfigError(f"--processes must be between 1 and 1024, but is {number}.")
    comparisons = [
        measure(
            f"{number} processes",
            _QUANTITIES,
            [
                Variant(
                    name=engine,
                    title=TITLES[engine],
                    commands=partial(_command, engine, number, idle_s),
                    read=lambda directory: read_json(directory / REPORT),
                )
                for engine in dict.fromkeys(engines)
            ],
            rounds,
            progress,
        )
        for number in dict.fromkeys(processes)
    ]
    return BenchResult(
        benchmark="engines",
        document={"engines": list(engines), "processes": list(processes), "rounds": rounds, "seconds": idle_s},
        comparisons=comparisons,
        remarks=[
            "Start: from a Python process that has imported nothing to an answer of every process, with that of the "
            "engine. Memory: proportional (PSS), without the engine's own processes. Ratios are of the start."
        ],
    )


def _command(engine: str, number: int, idle_s: float, directory: Path) -> list[BenchCommand]:
    arguments = [engine, str(number), str(directory / REPORT), str(idle_s)]
    return [BenchCommand([sys.executable, "-m", "benchmarks.engine_processes", *arguments])]
