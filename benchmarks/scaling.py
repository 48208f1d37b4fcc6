"""How throughput grows with processes: ``paceline train`` by each number of them, in turns; no torch is imported."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.results import BenchResult, Progress, Quantity, compare, take_samples
from benchmarks.rounds import BenchCommand, Sample, Variant, read_json
from benchmarks.workloads import read_steps
from paceline.core.errors import ConfigError

SAMPLES_PER_S = Quantity("samples_per_s", "samples/s", 0)
EFFICIENCY = Quantity("efficiency_percent", "efficiency %", 0)


def bench_scaling(
    task: str,
    *,
    nproc: Sequence[int],
    batch_per_process: int | None,
    steps: int,
    warmup: int,
    rounds: int,
    options: Sequence[str],
    progress: Progress,
) -> BenchResult:
    """Train ``task`` with each number of processes; ratios are speed-ups relative to the smallest number.

    Args:
        task: as ``paceline train`` takes it.
        nproc: processes a node.
        batch_per_process: samples a process and step (weak scaling); None: one global batch for all (strong scaling).
        steps: measured, after ``warmup`` others.
        warmup: steps before those.
        rounds: how often each size is measured.
        options: further ones of ``paceline train``.
        progress: shows a line for each sample.

    Raises:
        ConfigError: a number is not positive.
        LaunchError: a size failed.
    """
    if min(steps, warmup, rounds, batch_per_process or 1, *nproc) < 1:
        raise ConfigError("--nproc, --batch-per-process, --steps, --warmup and --rounds must be at least 1.")
    common = [sys.executable, "-m", "paceline", "train", task, "--quiet", *options]
    common += ["--max-steps", str(warmup + steps), "--log-every", str(math.gcd(warmup, steps))]
    common += ["--eval-every", "never", "--checkpoint-every", "never"]

    def commands(count: int, directory: Path) -> list[BenchCommand]:
        batch = [] if batch_per_process is None else ["--global-batch-size", str(batch_per_process * count)]
        return [BenchCommand([*common, *batch, "--nproc", str(count), "--run-dir", str(directory / "run")])]

    def read(directory: Path) -> Sample:
        sample = read_steps(directory, warmup, steps)
        batch = read_json(directory / "run" / "result.json")["global_batch_size"]
        return {**sample, "global_batch_size": batch, SAMPLES_PER_S.key: batch * sample["steps_per_s"]}

    sizes = sorted(set(nproc))
    contenders = [
        Variant(name=str(count), title=f"--nproc {count}", commands=partial(commands, count), read=read)
        for count in sizes
    ]
    kind = "strong" if batch_per_process is None else "weak"
    title = f"{kind} scaling"
    samples = take_samples(title, SAMPLES_PER_S, contenders, rounds, progress)
    for count in sizes:
        for sample, first in zip(samples[str(count)], samples[str(sizes[0])], strict=True):
            speedup = sample[SAMPLES_PER_S.key] / first[SAMPLES_PER_S.key]
            sample[EFFICIENCY.key] = 100 * speedup * sizes[0] / count
    settings = {"task": task, "steps": steps, "warmup": warmup, "rounds": rounds, "options": list(options)}
    return BenchResult(
        benchmark="scaling",
        document={"settings": {**settings, "batch_per_process": batch_per_process}},
        comparisons=[compare(title, [SAMPLES_PER_S, EFFICIENCY], contenders, samples)],
        remarks=[f"{task}: the ratio is the speed-up; efficiency is the speed-up over that of the processes."],
    )
