"""Workers killed while they train: who comes back, how soon, and with which weights; imports no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from paceline.core.errors import ConfigError
from paceline.core.signals import interrupt_on_sigterm
from paceline.insight.bench.faults import drawn_kills
from paceline.insight.bench.machine import describe_machine
from paceline.insight.bench.trials import RECOVERERS, STEP_S, Recoverer, RecoveryTrial, run_trial
from paceline.insight.bench.workload import GLOBAL_BATCH_SIZE, STEPS_PER_EPOCH

SPACING = 150
"""Steps between two kills at least: the time in which a replacement joins, 3 s and more."""

MEDIAN_BAR_MS, P99_BAR_MS = 100.0, 1000.0


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
                "median": _rounded(statistics.median(recoveries)),
                "p99": _rounded(percentile(recoveries, 99)),
                "all": [_rounded(ms) for ms in recoveries],
            },
            "steps_repeated": sum(trial.repeated for trial in self.trials),
            "rounds": len(self.trials),
            "same_weights": self.same_weights,
            "goodput": _rounded(statistics.mean(self.undisturbed.seconds / trial.seconds for trial in self.trials)),
        }


@dataclass(frozen=True, kw_only=True)
class RecoveryTable:
    """The contenders side by side."""

    rows: Sequence[RecoveryRow]

    _HEADINGS = ("came back", "hung", "p50", "p99", "steps redone", "same weights", "goodput")

    def as_table(self) -> Table:
        """For a terminal."""
        table = Table()
        table.add_column("kill -9", no_wrap=True)
        for heading in self._HEADINGS:
            table.add_column(heading, justify="right")
        for row in self.rows:
            table.add_row(*self._cells(row))
        return table

    def as_markdown(self) -> str:
        """For a README."""
        lines = [["`kill -9`", *self._HEADINGS], [":--", *["--:"] * len(self._HEADINGS)]]
        lines += [self._cells(row) for row in self.rows]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"

    @staticmethod
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


@dataclass(frozen=True, kw_only=True)
class RecoveryResult:
    """What ``paceline bench recovery`` found."""

    settings: dict[str, Any]
    table: RecoveryTable

    @property
    def comparisons(self) -> Sequence[RecoveryTable]:
        """The one table."""
        return [self.table]

    def as_json(self) -> dict[str, Any]:
        """All of it, with the machine."""
        return {
            "benchmark": "recovery",
            "machine": describe_machine(),
            "settings": self.settings,
            "contenders": [row.as_json() for row in self.table.rows],
            "bars": self._bars(),
        }

    def notes(self) -> list[str]:
        """The lines to print below the table."""
        machine, settings = describe_machine(), self.settings
        lines = [
            f"{settings['nproc']} workers, gloo, 1 thread each; steps of {1000 * STEP_S:.0f} ms and more, "
            f"a checkpoint every {STEPS_PER_EPOCH}; rounds in turns: {settings['rounds']}, "
            f"seed {settings['seed']}. Times are from the kill to the end of the step that it interrupted; "
            f"hung: no step in {settings['hang_after_s']:g} s. Goodput is against the same run without "
            "faults.",
            f"{machine['cpu']}, {machine['cores']} cores, {machine['memory']}; {machine['system']}; "
            f"Python {machine['python']}, torch {machine['torch']}; {machine['date']}.",
        ]
        for bar, met in self._bars().items():
            lines.append(f"{bar}: {'met' if met else 'NOT met'}.")
        return lines

    def _bars(self) -> dict[str, bool]:
        bars = {}
        for row in self.table.rows:
            values = row.as_json()
            if row.recoverer.name == "paceline-inplace" and values["recovery_ms"]:
                times = values["recovery_ms"]
                bars[f"in place, median at most {MEDIAN_BAR_MS:.0f} ms"] = times["median"] <= MEDIAN_BAR_MS
                bars[f"in place, p99 at most {P99_BAR_MS:.0f} ms"] = times["p99"] <= P99_BAR_MS
            if row.recoverer.name == "paceline-torchrun":
                all_back = values["came_back"] == values["kills"]
                bars[f"torchrun + Paceline, all {values['kills']} restarts come back"] = all_back
        return bars


def bench_recovery(
    *,
    contenders: Sequence[str],
    nproc: int,
    kills: int,
    rounds: int,
    seed: int,
    hang_after_s: float,
    progress: Callable[[str], None],
) -> RecoveryResult:
    """Kill workers of each contender's job at the same scripted steps, and see what becomes of it.

    Args:
        contenders: names in :data:`RECOVERERS`.
        nproc: workers.
        kills: in a round, of each contender.
        rounds: jobs of each contender; they take turns.
        seed: decides steps and ranks; each round has others.
        hang_after_s: a job without a step for so long hangs, and is started again.
        progress: told about each job.

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
    with interrupt_on_sigterm():
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
    return RecoveryResult(settings=settings, table=RecoveryTable(rows=rows))


def percentile(ascending: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: the smallest value that so many percent do not exceed."""
    return ascending[max(0, math.ceil(percent / 100 * len(ascending)) - 1)]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms"
