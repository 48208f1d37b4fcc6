"""Training compared with a hand-written loop and other libraries, and the cost of features; no torch is imported."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import (
    MEMORY,
    MS_PER_STEP,
    SLOW_SHARE,
    STALL,
    STEPS_PER_S,
    BenchComparison,
    BenchResult,
    Progress,
    Quantity,
    compare,
    measure,
    take_samples,
)
from benchmarks.rounds import REPORT, BenchCommand, Sample, Variant, read_json, read_report
from benchmarks.workloads import (
    BATCH_SIZE,
    CONVNET,
    MLP,
    RANKS,
    WIDE_MLP,
    Workload,
    paceline_commands,
    peer_commands,
    rank_variables,
    read_records,
    read_steps,
    train_command,
)
from paceline.core.errors import ConfigError
from paceline.core.plugins import install_command
from paceline.core.task import Task
from paceline.launch.local_run import free_master_port

INSTALL = install_command("bench")
"""The command that installs every peer."""

_GUARD_BLOCK = 10

UNBALANCED_MICROBATCHES = 12
"""Micro-batches that ranks of unequal speed share."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A library, or a way to use one, that can do the work.

    Attributes:
        name: what ``--peers`` takes.
        title: for people.
        loop: its name in :data:`benchmarks.peers.LOOPS`; None for Paceline, which is started as a user starts it.
        package: the distribution it needs.
        reduction: Paceline's ``--reduction``.
    """

    name: str
    title: str
    loop: str | None = None
    package: str = "torch"
    reduction: str | None = None

    @property
    def version(self) -> str | None:
        """The version of its package that is installed, or None."""
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(self.package)
        return None


PEERS = {
    peer.name: peer
    for peer in (
        Peer(name="ddp", title="hand-written DDP loop", loop="ddp"),
        Peer(name="accelerate", title="Accelerate", loop="accelerate", package="accelerate"),
        Peer(name="lightning", title="Lightning", loop="lightning", package="lightning"),
        Peer(name="paceline-exact", title="Paceline, exact (default)", reduction="exact"),
        Peer(name="paceline-fast", title="Paceline, fast", reduction="allreduce"),
        Peer(name="paceline-torch", title="Paceline, torch", reduction="ddp"),
    )
}


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
        peers: names in :data:`PEERS`.
        rounds: how often each is measured.
        steps: steps to measure; None: the workload's own number.
        warmup: steps before; None: the workload's own number.
        microbatches: Paceline's ``--microbatches``, a multiple of the ranks.
        progress: shows each round.

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
        comparisons.append(measure(workload.title, [STEPS_PER_S], contenders, rounds, progress))
    versions = {peer.package: peer.version for peer in present}
    settings = {"rounds": rounds, "microbatches": microbatches, "versions": versions, **_steps_of(resized)}
    return _result("train", settings, comparisons, missing)


def bench_checkpoint(*, rounds: int, steps: int | None, progress: Progress) -> BenchResult:
    """What a checkpoint every 50 steps costs on the ConvNet, against none but the last.

    In addition to the step time, the share of the training time that Paceline itself counts as stalled.

    Raises:
        ConfigError: a number is out of range.
        LaunchError: a process failed.
    """
    _check(rounds=rounds, steps=steps)
    [workload] = _resized([CONVNET], steps, None)

    contenders = [
        _option_contender(workload, interval, title, _read_with_stall, checkpoint_every=interval)
        for interval, title in (("never", "no checkpoint"), ("50steps", "every 50 steps"))
    ]
    comparison = measure(workload.title, [MS_PER_STEP, STALL], contenders, rounds, progress)
    return _result("checkpoint", {"rounds": rounds, **_steps_of([workload])}, [comparison])


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
    comparison = measure(workload.title, [MS_PER_STEP], contenders, rounds, progress)
    return _result("overhead", {"rounds": rounds, **_steps_of([workload])}, [comparison])


def bench_guard(*, rounds: int, steps: int | None, progress: Progress) -> BenchResult:
    """What the purity guard costs, its first two checks in the warm-up. Ratios are to the steps without it.

    One run a round, in which blocks of ten steps are in turn with and without the guard: it costs less than two
    processes that do the same differ by.

    Raises:
        ConfigError: a number is out of range.
        LaunchError: a process failed.
    """
    _check(rounds=rounds, steps=steps)
    comparisons = []
    for workload, task in ((CONVNET, "GuardedConvNet"), (MLP, "GuardedMLP")):
        blocks = 4 * max(1, (steps or workload.steps) // (4 * _GUARD_BLOCK))
        fields = {"warmup": workload.warmup, "block": _GUARD_BLOCK, "steps": blocks * _GUARD_BLOCK}
        commands = functools.partial(_guard_commands, task, fields)
        run = Variant(name="guard", title="in turns", commands=commands, read=lambda path: read_json(path / REPORT))
        measured = take_samples(workload.title, Quantity("warn", "ms/step with it", 2), [run], rounds, progress)
        contenders = [
            dataclasses.replace(run, name=n, title=t) for n, t in (("off", "no guard"), ("warn", "the guard"))
        ]
        samples = {each.name: [{MS_PER_STEP.key: s[each.name]} for s in measured["guard"]] for each in contenders}
        comparisons.append(compare(workload.title, [MS_PER_STEP], contenders, samples))
    return _result("guard", {"rounds": rounds, "block": _GUARD_BLOCK, **_steps_of([CONVNET, MLP])}, comparisons)


def _guard_commands(task: str, fields: Mapping[str, Any], directory: Path) -> Sequence[BenchCommand]:
    options = {"--nproc": RANKS, "--microbatches": RANKS, "--max-steps": fields["warmup"] + fields["steps"] + 1}
    fields = {**fields, "report": directory / REPORT}
    return [BenchCommand(train_command(f"benchmarks.tasks:{task}", directory, options, fields))]


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
    comparison = measure(WIDE_MLP.title, [MEMORY], contenders, rounds, progress)
    return _result("memory", {"rounds": rounds, **_steps_of([WIDE_MLP])}, [comparison])


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
        comparisons.append(measure(workload.title, [MS_PER_STEP], contenders, rounds, progress))
    return _result(
        "microbatches",
        {"rounds": rounds, "microbatches": list(microbatches), **_steps_of(resized)},
        comparisons,
    )


def bench_shares(*, rounds: int, steps: int, warmup: int, progress: Progress) -> BenchResult:
    """Step rates with a rank at half speed: micro-batches shared by measured speed against equally.

    Ratios are relative to equal sharing. In addition to the rate: the micro-batches that the slow rank had in the end.

    Raises:
        ConfigError: a number is out of range.
        LaunchError: a process failed.
    """
    _check(rounds=rounds, steps=steps, warmup=warmup)

    def contender(balance: str, title: str) -> Variant:
        options = {
            "--load-balance": balance,
            "--microbatches": UNBALANCED_MICROBATCHES,
            "--max-steps": warmup + steps,
            "--log-every": math.gcd(warmup, steps),
        }

        def commands(directory: Path) -> list[BenchCommand]:
            # Each rank has a process of its own to start, so that one of them can be slowed down.
            argv = train_command("benchmarks.tasks:ConvNetAlone", directory, options)
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_master_port("torch", RANKS))}
            return [
                BenchCommand(argv, rank_variables(rank) | meeting, half_speed=rank == RANKS - 1)
                for rank in range(RANKS)
            ]

        return Variant(name=balance, title=title, commands=commands, read=lambda d: _read_shares(d, warmup, steps))

    contenders = [contender("equal", "shared equally"), contender("auto", "shared by speed")]
    title = f"{UNBALANCED_MICROBATCHES} micro-batches, rank {RANKS - 1} half as fast"
    comparison = measure(title, [STEPS_PER_S, SLOW_SHARE], contenders, rounds, progress)
    settings = {"rounds": rounds, "microbatches": UNBALANCED_MICROBATCHES, "warmup": warmup, "steps": steps}
    return _result("shares", settings, [comparison])


def _read_shares(directory: Path, warmup: int, steps: int) -> Sample:
    events = read_records(directory / "run" / "events.jsonl")
    shares = [event["shares"] for event in events if event["event"] == "shares"]
    return {
        **read_steps(directory, warmup, steps),
        SLOW_SHARE.key: shares[-1][-1] if shares else UNBALANCED_MICROBATCHES // RANKS,
        "changes": len(shares),
    }


def _option_contender(
    workload: Workload, name: str, title: str, read: Callable[[Path], Sample] = read_report, **options: Any
) -> Variant:
    """Paceline with the exact reduction, as these options have it."""

    def commands(directory: Path) -> list[BenchCommand]:
        return paceline_commands(workload, directory, reduction="exact", **options)

    return Variant(name=name, title=title, commands=commands, read=read)


def _peer_contender(peer: Peer, workload: Workload, microbatches: int) -> Variant:
    def commands(directory: Path) -> list[BenchCommand]:
        if peer.loop is not None:
            return peer_commands(peer.loop, workload, directory)
        return paceline_commands(workload, directory, microbatches, reduction=peer.reduction)

    return Variant(name=peer.name, title=peer.title, commands=commands)


def _read_with_stall(directory: Path) -> Sample:
    sample = read_report(directory)
    result = read_json(directory / "run" / "result.json")
    sample[STALL.key] = 100 * result["checkpoint_stall_s"] / result["seconds"]
    return sample


def _result(
    benchmark: str,
    settings: Mapping[str, Any],
    comparisons: Sequence[BenchComparison],
    missing: Sequence[Peer] = (),
) -> BenchResult:
    """What a suite of this file found; ``missing`` are peers that were left out, as they are not installed."""
    common = {"ranks": RANKS, "batch_size_per_rank": BATCH_SIZE, "threads_per_rank": 1}
    return BenchResult(
        benchmark=benchmark,
        document={
            "settings": {**common, **settings},
            "missing": [{"name": peer.name, "package": peer.package, "install": INSTALL} for peer in missing],
        },
        comparisons=comparisons,
        remarks=[
            f"{RANKS} ranks, gloo, 1 thread a rank, {BATCH_SIZE} samples a rank; rounds in turns: "
            f"{settings['rounds']}; medians, ratios taken within each round; warm-up excluded."
        ],
        closing=[f"{peer.title} is not installed and was left out: {INSTALL}" for peer in missing],
    )


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
