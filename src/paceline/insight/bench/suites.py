"""What is compared with what: one function for each ``paceline bench`` command; imports no torch."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.task import Task
from paceline.insight.bench.comparison import (
    MEMORY,
    MS_PER_STEP,
    SLOW_SHARE,
    STALL,
    STEPS_PER_S,
    BenchComparison,
    Quantity,
    compare,
)
from paceline.insight.bench.machine import describe_machine
from paceline.insight.bench.peers import INSTALL, PEERS, Peer
from paceline.insight.bench.rounds import BenchCommand, Sample, Variant, interleave, read_report
from paceline.insight.bench.workload import (
    BATCH_SIZE,
    CONVNET,
    RANKS,
    UNBALANCED_MICROBATCHES,
    WIDE_MLP,
    Workload,
    paceline_command,
    unbalanced_command,
)
from paceline.launch.local_processes import free_master_port

Progress = Callable[[str], None]
"""Shows one line."""


@dataclass(frozen=True)
class BenchResult:
    """What a benchmark found.

    Attributes:
        benchmark: its command's name.
        settings: what was asked for.
        comparisons: one table for each workload.
        missing: peers that were left out, as they are not installed.
    """

    benchmark: str
    settings: dict[str, Any]
    comparisons: Sequence[BenchComparison]
    missing: Sequence[Peer] = ()

    def as_json(self) -> dict[str, Any]:
        """All of it, with the machine."""
        return {
            "benchmark": self.benchmark,
            "machine": describe_machine(),
            "settings": {
                "ranks": RANKS,
                "batch_size_per_rank": BATCH_SIZE,
                "threads_per_rank": 1,
                **self.settings,
            },
            "comparisons": [comparison.as_json() for comparison in self.comparisons],
            "missing": [{"name": peer.name, "package": peer.package, "install": INSTALL} for peer in self.missing],
        }

    def notes(self) -> list[str]:
        """The lines to print below the tables: the setting, the machine, who is missing."""
        machine = describe_machine()
        rounds = self.settings["rounds"]
        lines = [
            f"{RANKS} ranks, gloo, 1 thread a rank, {BATCH_SIZE} samples a rank; rounds in turns: {rounds}; "
            "medians, ratios taken within each round; warm-up excluded.",
            f"{machine['cpu']}, {machine['cores']} cores, {machine['memory']}; {machine['system']}; "
            f"Python {machine['python']}, torch {machine['torch']}; {machine['date']}.",
        ]
        lines += [f"{peer.title} is not installed and was left out: {INSTALL}" for peer in self.missing]
        return lines


def bench_train(
    *,
    workloads: Sequence[Workload],
    peers: Sequence[str],
    rounds: int,
    steps: int | None,
    warmup: int | None,
    microbatches: int,
    progress: Progress,
) -> BenchResult:
    """Step rates of a hand-written loop, of peers and of Paceline; ratios are to the first peer.

    Args:
        workloads: what to train.
        peers: names in :data:`paceline.insight.bench.peers.PEERS`.
        rounds: how often each is measured.
        steps: steps to measure; None: the workload's own number.
        warmup: steps before; None: the workload's own number.
        microbatches: Paceline's ``--microbatches``, a multiple of the ranks.
        progress: told about each round.

    Raises:
        ConfigError: a number is out of range, or none of the peers is installed.
        LaunchError: a process failed.
    """
    _check(rounds=rounds, steps=steps, warmup=warmup, microbatches=microbatches)
    chosen = [PEERS[name] for name in dict.fromkeys(peers)]
    present = [peer for peer in chosen if peer.version is not None]
    missing = [peer for peer in chosen if peer.version is None]
    if not present:
        raise ConfigError(f"none of these peers is installed: {', '.join(peers)}. Install them: {INSTALL}")
    for peer in missing:
        progress(f"{peer.title} is not installed and is left out: {INSTALL}")

    comparisons = []
    resized = _resized(workloads, steps, warmup)
    for workload in resized:
        contenders = [_peer_contender(peer, workload, microbatches) for peer in present]
        comparisons.append(_compare(workload.title, [STEPS_PER_S], contenders, rounds, progress))
    versions = {peer.package: peer.version for peer in present}
    settings = {"rounds": rounds, "microbatches": microbatches, "versions": versions, **_steps_of(resized)}
    return BenchResult("train", settings, comparisons, missing)


def bench_checkpoint(*, rounds: int, steps: int | None, progress: Progress) -> BenchResult:
    """What a checkpoint every 50 steps costs on the ConvNet, against none but the last.

    Beside the step time, the share of the training time that Paceline itself counts as stalled.

    Raises:
        ConfigError: a number is out of range.
        LaunchError: a process failed.
    """
    _check(rounds=rounds, steps=steps)
    [workload] = _resized([CONVNET], steps, None)

    contenders = [
        _option_contender(workload, interval, title, checkpoint_every=interval, read=_read_with_stall)
        for interval, title in (("never", "no checkpoint"), ("50steps", "every 50 steps"))
    ]
    comparison = _compare(workload.title, [MS_PER_STEP, STALL], contenders, rounds, progress)
    return BenchResult("checkpoint", {"rounds": rounds, **_steps_of([workload])}, [comparison])


def bench_overhead(*, rounds: int, steps: int | None, progress: Progress) -> BenchResult:
    """What recovery costs while nothing fails: the agent, beats, the watch over hangs, joining and leaving.

    Ratios are to ``--recover none``, on the ConvNet.

    Raises:
        ConfigError: a number is out of range.
        LaunchError: a process failed.
    """
    _check(rounds=rounds, steps=steps)
    [workload] = _resized([CONVNET], steps, None)

    contenders = [
        _option_contender(workload, recover, title, recover=recover)
        for recover, title in (("none", "no recovery"), ("inplace", "recovery in place"))
    ]
    comparison = _compare(workload.title, [MS_PER_STEP], contenders, rounds, progress)
    return BenchResult("overhead", {"rounds": rounds, **_steps_of([workload])}, [comparison])


def bench_memory(*, rounds: int, progress: Progress) -> BenchResult:
    """Peak memory of rank 0 beyond its imports', on a 20-million-parameter MLP.

    Raises:
        ConfigError: a number is out of range, or this system does not show the peak.
        LaunchError: a process failed.
    """
    _check(rounds=rounds)
    if not sys.platform.startswith("linux"):
        raise ConfigError("bench memory reads the peak from /proc, which only Linux has.")
    contenders = [_peer_contender(PEERS[name], WIDE_MLP, RANKS) for name in ("ddp", "paceline-fast", "paceline-exact")]
    comparison = _compare(WIDE_MLP.title, [MEMORY], contenders, rounds, progress)
    return BenchResult("memory", {"rounds": rounds, **_steps_of([WIDE_MLP])}, [comparison])


def bench_microbatches(
    *,
    workloads: Sequence[Workload],
    microbatches: Sequence[int],
    rounds: int,
    steps: int | None,
    progress: Progress,
) -> BenchResult:
    """Step times of the exact reduction for several numbers of micro-batches; ratios are to the first.

    Raises:
        ConfigError: a number is out of range.
        LaunchError: a process failed.
    """
    for count in microbatches:
        _check(rounds=rounds, steps=steps, microbatches=count)
    comparisons = []
    resized = _resized(workloads, steps, None)
    for workload in resized:
        contenders = []
        for count in dict.fromkeys(microbatches):
            peer = dataclasses.replace(
                PEERS["paceline-exact"], name=f"{count}-micro-batches", title=f"{count} micro-batches"
            )
            contenders.append(_peer_contender(peer, workload, count))
        comparisons.append(_compare(workload.title, [MS_PER_STEP], contenders, rounds, progress))
    return BenchResult(
        "microbatches",
        {"rounds": rounds, "microbatches": list(microbatches), **_steps_of(resized)},
        comparisons,
    )


def bench_shares(*, rounds: int, steps: int, warmup: int, progress: Progress) -> BenchResult:
    """Step rates with a rank at half speed: micro-batches shared by measured speed against equally.

    Ratios are to equal sharing. Beside the rate, the micro-batches that the slow rank had in the end.

    Raises:
        ConfigError: a number is out of range.
        LaunchError: a process failed.
    """
    _check(rounds=rounds, steps=steps, warmup=warmup)
    record_every = math.gcd(warmup, steps)

    def contender(balance: str, title: str) -> Variant:
        def commands(directory: Path) -> list[BenchCommand]:
            argv = unbalanced_command(directory, balance=balance, max_steps=warmup + steps, record_every=record_every)
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_master_port("torch", RANKS))}
            return [
                BenchCommand(argv, _rank_variables(rank) | meeting, half_speed=rank == RANKS - 1)
                for rank in range(RANKS)
            ]

        return Variant(name=balance, title=title, commands=commands, read=lambda d: _read_shares(d, warmup, steps))

    contenders = [contender("equal", "shared equally"), contender("auto", "shared by speed")]
    title = f"{UNBALANCED_MICROBATCHES} micro-batches, rank {RANKS - 1} half as fast"
    comparison = _compare(title, [STEPS_PER_S, SLOW_SHARE], contenders, rounds, progress)
    settings = {"rounds": rounds, "microbatches": UNBALANCED_MICROBATCHES, "warmup": warmup, "steps": steps}
    return BenchResult("shares", settings, [comparison])


def _read_shares(directory: Path, warmup: int, steps: int) -> Sample:
    run = directory / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    at = {record["step"]: record["seconds"] for record in records if record["kind"] == "train"}
    seconds = at[warmup + steps] - at[warmup]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    shares = [event["shares"] for event in events if event["event"] == "shares"]
    return {
        "steps": steps,
        "seconds": seconds,
        STEPS_PER_S.key: steps / seconds,
        SLOW_SHARE.key: shares[-1][-1] if shares else UNBALANCED_MICROBATCHES // RANKS,
        "changes": len(shares),
    }


def _compare(
    title: str,
    quantities: Sequence[Quantity],
    contenders: Sequence[Variant],
    rounds: int,
    progress: Progress,
) -> BenchComparison:
    first = quantities[0]

    def on_sample(number: int, contender: Variant, sample: Sample) -> None:
        value = f"{first.text(sample[first.key])} {first.title}"
        progress(f"round {number}/{rounds}  {title}  {contender.title}  {value}")

    return compare(title, quantities, contenders, interleave(contenders, rounds, on_sample))


def _option_contender(
    workload: Workload,
    name: str,
    title: str,
    *,
    checkpoint_every: str = "never",
    recover: str = "auto",
    read: Callable[[Path], Sample] = read_report,
) -> Variant:
    """Paceline with the exact reduction, as these options have it."""

    def commands(directory: Path) -> list[BenchCommand]:
        argv = paceline_command(
            workload, directory, reduction="exact", checkpoint_every=checkpoint_every, recover=recover
        )
        return [BenchCommand(argv)]

    return Variant(name=name, title=title, commands=commands, read=read)


def _peer_contender(peer: Peer, workload: Workload, microbatches: int) -> Variant:
    def commands(directory: Path) -> list[BenchCommand]:
        if peer.reduction is not None:
            return [
                BenchCommand(paceline_command(workload, directory, reduction=peer.reduction, microbatches=microbatches))
            ]
        assert peer.module is not None
        job = {
            "task": workload.task,
            "fields": workload.task_fields(directory),
            "batch_size": BATCH_SIZE,
            "total_steps": workload.total_steps,
            "init_method": (directory / "rendezvous").as_uri(),
        }
        argv = [sys.executable, "-m", "paceline.insight.bench.peers", peer.module, json.dumps(job)]
        return [BenchCommand(argv, _rank_variables(rank)) for rank in range(RANKS)]

    return Variant(name=peer.name, title=peer.title, commands=commands)


def _rank_variables(rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        # gloo would listen on the address of the host's name.
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform.startswith("linux") else "lo0",
    }


def _read_with_stall(directory: Path) -> Sample:
    sample = read_report(directory)
    result = json.loads((directory / "run" / "result.json").read_text(encoding="utf-8"))
    sample[STALL.key] = 100 * result["checkpoint_stall_s"] / result["seconds"]
    return sample


def _resized(workloads: Sequence[Workload], steps: int | None, warmup: int | None) -> list[Workload]:
    return [
        dataclasses.replace(
            workload,
            steps=workload.steps if steps is None else steps,
            warmup=workload.warmup if warmup is None else warmup,
        )
        for workload in workloads
    ]


def _steps_of(workloads: Sequence[Workload]) -> dict[str, dict[str, int]]:
    return {
        "warmup": {workload.name: workload.warmup for workload in workloads},
        "steps": {workload.name: workload.steps for workload in workloads},
    }


def _check(*, rounds: int, steps: int | None = None, warmup: int | None = None, microbatches: int = RANKS) -> None:
    if rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, but is {rounds}.")
    if steps is not None and steps < 1:
        raise ConfigError(f"--steps must be at least 1, but is {steps}.")
    if warmup is not None and warmup < 0:
        raise ConfigError(f"--warmup must not be negative, but is {warmup}.")
    most = RANKS * BATCH_SIZE // Task.min_microbatch_size
    if not 0 < microbatches <= most or microbatches % RANKS:
        raise ConfigError(
            f"micro-batches must be a multiple of the {RANKS} ranks, up to {most}, but is {microbatches}."
        )
