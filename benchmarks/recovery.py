"""Workers killed while they train: which jobs come back, how soon, and with which weights; no torch is imported."""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults import GLOBAL_BATCH_SIZE, STEPS_PER_EPOCH, FaultScript, Kill, drawn_kills
from benchmarks.results import BenchResult, Progress, significant
from benchmarks.rounds import end_processes, log_tails, read_json
from paceline.core.errors import ConfigError, LaunchError
from paceline.core.signals import handle_signals
from paceline_checks.bench_report import ReportTable

SPACING = 150
"""Steps between two kills at least: the time in which a replacement joins, 3 s and more."""

MEDIAN_BAR_MS, P99_BAR_MS = 100.0, 1000.0

STEP_S = 0.02
"""Added to each step, so that a kill can hit a step before it is over."""

_POLL_S = 0.05
_START_S = 120.0


def bench_recovery(
    *,
    contenders: Sequence[str],
    nproc: int,
    kills: int,
    rounds: int,
    seed: int,
    hang_after_s: float,
    progress: Progress,
) -> BenchResult:
    """Kill workers of each contender's job at the same scripted steps, and see what becomes of it.

    Args:
        contenders: names in :data:`RECOVERERS`.
        nproc: workers.
        kills: in a round, of each contender.
        rounds: jobs of each contender; they take turns.
        seed: decides steps and ranks; each round has others.
        hang_after_s: a job without a step for this long hangs, and is restarted.
        progress: shows each job.

    Raises:
        ConfigError: a number is out of range.
        LaunchError: a job cannot be brought to its end.
    """
    for name, value, low, high in (
        ("nproc", nproc, 2, 4),
        ("kills", kills, 1, 10_000),
        ("rounds", rounds, 1, 10_000),
        ("hang-after", hang_after_s, 5, 3600),
    ):
        if not low <= value <= high:
            raise ConfigError(f"--{name} must be between {low} and {high}, but is {value}.")
    if GLOBAL_BATCH_SIZE % nproc:
        raise ConfigError(f"--nproc must divide the batch of {GLOBAL_BATCH_SIZE} samples, but is {nproc}.")
    chosen = [RECOVERERS[name] for name in dict.fromkeys(contenders)]
    steps = math.ceil((kills + 1) * 1.5 * SPACING / STEPS_PER_EPOCH) * STEPS_PER_EPOCH
    trials: dict[str, list[RecoveryTrial]] = {recoverer.name: [] for recoverer in chosen}
    undisturbed: dict[str, RecoveryTrial] = {}
    with handle_signals((signal.SIGTERM,), signal.default_int_handler):
        for recoverer in chosen:
            if recoverer.undisturbed not in undisturbed:
                trial = run_trial(recoverer, [], nproc, steps, hang_after_s)
                undisturbed[recoverer.undisturbed] = trial
                progress(f"{recoverer.title}: {steps} steps without faults in {trial.seconds:.1f} s")
        for number in range(rounds):
            script = drawn_kills(seed + number, kills, world_size=nproc, spacing=SPACING)
            first = number % len(chosen)
            for recoverer in [*chosen[first:], *chosen[:first]]:
                trial = run_trial(recoverer, script, nproc, steps, hang_after_s)
                trials[recoverer.name].append(trial)
                came_back = f"{len(trial.recoveries_ms)} of {trial.kills} kills survived"
                progress(f"round {number + 1}/{rounds}  {recoverer.title}: {came_back}")
    rows = [RecoveryRow(recoverer=r, trials=trials[r.name], undisturbed=undisturbed[r.undisturbed]) for r in chosen]
    settings = {
        "nproc": nproc,
        "kills_a_round": kills,
        "rounds": rounds,
        "seed": seed,
        "steps": steps,
        "hang_after_s": hang_after_s,
    }
    return recovery_result(settings, rows)


# --- One job, restarted until it ends ---


@dataclass(frozen=True, kw_only=True)
class Recoverer:
    """A way to train that continues after a worker was killed.

    Attributes:
        name: for machines.
        title: for people.
        command: a trial's directory, workers, steps -> the command that trains there, and that continues
            when it is given again.
        undisturbed: the name of the run without faults that its weights and its time are compared with.
        result: the file, in a trial's directory, that holds ``model_sha256``.
    """

    name: str
    title: str
    command: Callable[[Path, int, int], list[str]]
    undisturbed: str
    result: str


def _stock(directory: Path, nproc: int, steps: int) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    module = ["-m", "benchmarks.recovery_jobs", str(directory), str(steps // STEPS_PER_EPOCH)]
    return [sys.executable, *torchrun, "--max-restarts=1000", *module]


def _paceline(*options: str) -> Callable[[Path, int, int], list[str]]:
    def command(directory: Path, nproc: int, steps: int) -> list[str]:
        return [
            *(sys.executable, "-m", "paceline", "train", "benchmarks.recovery_jobs:RecoveryWorkload", "--quiet"),
            *("--set", f"script={directory}", "--run-dir", str(directory / "run"), "--device", "cpu"),
            *("--nproc", str(nproc), "--microbatches", str(nproc), "--threads", "1", "--max-steps", str(steps)),
            *("--checkpoint-every", f"{STEPS_PER_EPOCH}steps", "--eval-every", "never", *options),
        ]

    return command


RECOVERERS = {
    recoverer.name: recoverer
    for recoverer in (
        Recoverer(
            name="torchrun",
            title="stock torchrun",
            command=_stock,
            undisturbed="torchrun",
            result="result.json",
        ),
        Recoverer(
            name="paceline-torchrun",
            title="torchrun + Paceline",
            command=_paceline("--on", "torchrun", "--recover", "restart", "--max-restarts", "1000"),
            undisturbed="paceline",
            result="run/result.json",
        ),
        Recoverer(
            name="paceline-inplace",
            title="Paceline in place",
            command=_paceline("--on", "spawn", "--recover", "inplace"),
            undisturbed="paceline",
            result="run/result.json",
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class RecoveryTrial:
    """One job, from its start to its end, over all kills.

    Attributes:
        kills: workers that were killed.
        recoveries_ms: from each kill that the job survived to the end of the step that it had interrupted.
        hung: kills after which no step came, until the job was ended and restarted.
        failed: kills after which the job ended itself, and was restarted.
        repeated: steps that were done more than once.
        seconds: from the first step to the last.
        model_sha256: of the weights in the end.
    """

    kills: int
    recoveries_ms: Sequence[float]
    hung: int
    failed: int
    repeated: int
    seconds: float
    model_sha256: str


@dataclass
class _Watch:
    """When a job was started, again and again, and why it had to be."""

    starts: list[float] = field(default_factory=list)
    hung: list[bool] = field(default_factory=list)


def run_trial(recoverer: Recoverer, kills: list[Kill], nproc: int, steps: int, hang_after_s: float) -> RecoveryTrial:
    """Train ``steps`` steps on ``nproc`` workers, of which some are killed.

    Raises:
        LaunchError: the job ends, or hangs, without a kill that explains it.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        directory = Path(name)
        script = FaultScript.write(directory, kills, world_size=nproc, step_s=STEP_S)
        watch = _Watch()
        while not _run_once(recoverer, directory, script, watch, nproc, steps, hang_after_s):
            if len(watch.starts) > len(script.killed_at()):
                raise LaunchError(
                    f"bench: {recoverer.title} made no progress though nothing was killed.{log_tails(directory)}"
                )
        result = read_json(directory / recoverer.result)
        return judge(script, watch.starts, watch.hung, str(result["model_sha256"]))


def _run_once(
    recoverer: Recoverer,
    directory: Path,
    script: FaultScript,
    watch: _Watch,
    nproc: int,
    steps: int,
    hang_after_s: float,
) -> bool:
    """Start the job and watch it; return whether it came to its end, or else needs a restart."""
    watch.starts.append(time.time())
    with (directory / f"process-{len(watch.starts)}.log").open("wb") as log:
        process = subprocess.Popen(
            recoverer.command(directory, nproc, steps),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        size, since, limit_s = _recorded_bytes(directory), time.monotonic(), _START_S
        while process.poll() is None:
            time.sleep(_POLL_S)
            now = _recorded_bytes(directory)
            if now != size:
                size, since, limit_s = now, time.monotonic(), hang_after_s
            elif time.monotonic() - since > limit_s:
                watch.hung.append(True)
                return False
        if process.returncode != 0:
            watch.hung.append(False)
        return process.returncode == 0
    finally:
        end_processes([process])


def _recorded_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("steps-*.txt"))


def judge(script: FaultScript, starts: Sequence[float], hung: Sequence[bool], model_sha256: str) -> RecoveryTrial:
    """What the records of a finished job say.

    Args:
        script: with its records.
        starts: when the job was started: first, and again after it had hung or failed.
        hung: of each start but the last, whether it was ended because it hung.
        model_sha256: of its weights.
    """
    done = script.steps()
    recoveries_ms, repeated, lost = [], 0, {True: 0, False: 0}
    kills = script.killed_at()
    for killed, interrupted in kills:
        before = max((step for when, step in done if when < killed), default=0)
        after = [(when, step) for when, step in done if when >= killed]
        # A step that the others ended while the killed rank died does not show a recovery yet.
        again = next((when for when, step in after if step >= interrupted), math.inf)
        restarted = [index for index, start in enumerate(starts) if killed < start < again]
        if restarted:
            lost[hung[restarted[0] - 1]] += 1
        else:
            recoveries_ms.append(1000 * (again - killed))
        first = next((step for _, step in after), before + 1)
        repeated += max(0, before - first + 1)
    return RecoveryTrial(
        kills=len(kills),
        recoveries_ms=recoveries_ms,
        hung=lost[True],
        failed=lost[False],
        repeated=repeated,
        seconds=done[-1][0] - done[0][0],
        model_sha256=model_sha256,
    )


# --- the report ---


@dataclass(frozen=True, kw_only=True)
class RecoveryRow:
    """A contender's trials, all rounds together."""

    recoverer: Recoverer
    trials: Sequence[RecoveryTrial]
    undisturbed: RecoveryTrial

    @property
    def recoveries_ms(self) -> list[float]:
        """Of all kills that a job survived, ascending."""
        return sorted(ms for trial in self.trials for ms in trial.recoveries_ms)

    @property
    def same_weights(self) -> int:
        """Trials that ended with the weights of the undisturbed run, bit for bit."""
        return sum(trial.model_sha256 == self.undisturbed.model_sha256 for trial in self.trials)

    def as_json(self) -> dict[str, Any]:
        """Six significant digits of what was measured."""
        recoveries = self.recoveries_ms
        return {
            "name": self.recoverer.name,
            "title": self.recoverer.title,
            "kills": sum(trial.kills for trial in self.trials),
            "came_back": len(recoveries),
            "hung": sum(trial.hung for trial in self.trials),
            "failed": sum(trial.failed for trial in self.trials),
            "recovery_ms": None
            if not recoveries
            else {
                "median": significant(statistics.median(recoveries)),
                "p99": significant(percentile(recoveries, 99)),
                "all": [significant(ms) for ms in recoveries],
            },
            "steps_repeated": sum(trial.repeated for trial in self.trials),
            "rounds": len(self.trials),
            "same_weights": self.same_weights,
            "goodput": significant(statistics.mean(self.undisturbed.seconds / trial.seconds for trial in self.trials)),
        }


def recovery_result(settings: Mapping[str, Any], rows: Sequence[RecoveryRow]) -> BenchResult:
    """The contenders side by side, and which bars they meet."""
    bars = _judge_bars(rows)
    headings = ("`kill -9`", "came back", "hung", "p50", "p99", "steps redone", "same weights", "goodput")
    return BenchResult(
        benchmark="recovery",
        document={"settings": settings, "contenders": [row.as_json() for row in rows], "bars": bars},
        other_tables=[ReportTable(headings=headings, rows=[_cells(row) for row in rows], left=[0])],
        remarks=[
            f"{settings['nproc']} workers, gloo, 1 thread each; steps of {1000 * STEP_S:.0f} ms and more, "
            f"a checkpoint every {STEPS_PER_EPOCH}; rounds in turns: {settings['rounds']}, "
            f"seed {settings['seed']}. Times are from the kill to the end of the step that it interrupted; "
            f"hung: no step in {settings['hang_after_s']:g} s. Goodput is against the same run without "
            "faults.",
        ],
        closing=[f"{bar}: {'met' if met else 'NOT met'}." for bar, met in bars.items()],
    )


def _cells(row: RecoveryRow) -> list[str]:
    values = row.as_json()
    recovery = values["recovery_ms"]
    times = [_milliseconds(recovery[name]) for name in ("median", "p99")] if recovery else ["-", "-"]
    failed = f", {values['failed']} failed" if values["failed"] else ""
    return [
        row.recoverer.title,
        f"{values['came_back']} of {values['kills']}",
        f"{values['hung']}{failed}",
        *times,
        f"{values['steps_repeated']}",
        f"{row.same_weights} of {len(row.trials)}",
        f"{values['goodput']:.0%}",
    ]


def _judge_bars(rows: Sequence[RecoveryRow]) -> dict[str, bool]:
    bars = {}
    for row in rows:
        values = row.as_json()
        if row.recoverer.name == "paceline-inplace" and values["recovery_ms"]:
            times = values["recovery_ms"]
            bars[f"in place, median at most {MEDIAN_BAR_MS:.0f} ms"] = times["median"] <= MEDIAN_BAR_MS
            bars[f"in place, p99 at most {P99_BAR_MS:.0f} ms"] = times["p99"] <= P99_BAR_MS
        if row.recoverer.name == "paceline-torchrun":
            all_back = values["came_back"] == values["kills"]
            bars[f"torchrun + Paceline, all {values['kills']} restarts come back"] = all_back
    return bars


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: the smallest value that so many percent do not exceed."""
    return float(np.percentile(values, percent, method="inverted_cdf"))


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms"
