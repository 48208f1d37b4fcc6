"""ASHA and a full grid, a trial and ``paceline train``, searches by Paceline, by Optuna alone and by Ray Tune alone."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import BenchResult, Progress, Quantity, Spread, TargetResult, compare
from benchmarks.rounds import Sample, Variant
from benchmarks.search_peers import SearchJob, command
from paceline.core.errors import LaunchError
from paceline.core.parent_death import kill_with_parent_command
from paceline_tune.plan_search import own_cpus

_TASK = "fashion-mnist-mlp"
_METRIC = "accuracy"
_SPACE = ("lr=choice:0.001,0.003,0.01,0.03,0.1,0.3,1.0,3.0", "momentum=choice:0.0,0.5,0.8,0.9")
_EVERY = 20
_POINTS = 0.5
_SHARE = 40.0
_OVERHEAD_S = 2.0


@dataclass(frozen=True, kw_only=True)
class TuningFigures:
    """What was measured.

    Attributes:
        trials: of each of the two searches.
        asha_best, grid_best: accuracy on the validation split.
        asha_steps, grid_steps: of all trials together.
        train_s: of each bare ``paceline train``.
        search_s: for each, of a whole search of ``alone`` trials, one after another, with its start.
        apart_s: of these searches, but for what passed between Ray's start and the last result.
        alone: their trials.
    """

    trials: int
    asha_best: float
    grid_best: float
    asha_steps: int
    grid_steps: int
    train_s: Sequence[float]
    search_s: Sequence[float]
    apart_s: Sequence[float]
    alone: int

    @property
    def verdicts(self) -> list[TargetResult]:
        """The bars."""
        points = 100 * (self.grid_best - self.asha_best)
        share = 100 * self.asha_steps / self.grid_steps
        trial_s = [search_s / self.alone for search_s in self.search_s]
        compared = f"a trial, of {self.alone}, compared with paceline train"
        apart = "a search but for its trials: the task tried, Ray, plots"
        return [
            _verdict("best below the grid's", [points], " points", _POINTS),
            _verdict("steps, of the grid's", [share], " %", _SHARE),
            _verdict(compared, [a - b for a, b in zip(trial_s, self.train_s, strict=True)], " s", _OVERHEAD_S),
            _verdict(apart, self.apart_s, " s", None),
        ]

    def as_result(self) -> BenchResult:
        """The figures and their bars."""
        return BenchResult(
            benchmark="tune",
            document=asdict(self),
            comparisons=(),
            verdicts=self.verdicts,
            remarks=[
                f"{self.trials} configurations of {_TASK}: best accuracy {self.asha_best:.4f} by ASHA in "
                f"{self.asha_steps} steps, {self.grid_best:.4f} by the grid in {self.grid_steps}.",
                f"paceline train: {statistics.median(self.train_s):.2f} s; the search of {self.alone}: "
                f"{statistics.median(self.search_s):.2f} s, its start included; in turns, medians.",
            ],
        )


def _verdict(what: str, values: Sequence[float], unit: str, bar: float | None) -> TargetResult:
    return TargetResult("tune", what, Spread.of(values), bar, at_most=True, unit=unit)


def bench_tuning(*, trials: int, steps: int, alone: int, rounds: int, progress: Progress) -> BenchResult:
    """Search with ASHA and by a grid of the same configurations; then trials one after another.

    Args:
        trials: of both searches.
        steps: of a whole trial.
        alone: trials of the search that is held against ``paceline train``.
        rounds: how often the two are run, in turns.
        progress: shows what is done.

    Raises:
        LaunchError: a command failed.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        home = Path(name)
        run = ("--max-steps", str(steps), "--eval-every", f"{_EVERY}steps", "--val-fraction", "0.1")
        space = [word for text in _SPACE for word in ("--search", text)]

        def search(label: str, *options: str) -> tuple[dict[str, Any], float]:
            progress(f"tune: {label}")
            began = time.perf_counter()
            words = ("tune", _TASK, *space, *run, "--run-dir", str(home / label), *options)
            return _run(words), time.perf_counter() - began

        asha, _ = search("asha", "--trials", str(trials))
        grid, _ = search("grid", "--trials", str(trials), "--scheduler", "none")
        one_by_one = ("--trials", str(alone), "--scheduler", "none", "--cpus-per-trial", str(own_cpus()))
        train_s, search_s, apart_s = [], [], []
        for number in range(rounds):
            progress(f"train: round {number + 1} of {rounds}")
            began = time.perf_counter()
            _run(("train", _TASK, *run, "--threads", "1", "--run-dir", str(home / f"train-{number}"), "--quiet"))
            train_s.append(time.perf_counter() - began)
            found, seconds = search(f"one-by-one-{number}", *one_by_one, "--threads", "1")
            search_s.append(seconds)
            apart_s.append(seconds - found["seconds"])
    figures = TuningFigures(
        trials=grid["planned"],
        asha_best=asha["best"][_METRIC],
        grid_best=grid["best"][_METRIC],
        asha_steps=asha["steps"],
        grid_steps=grid["steps"],
        train_s=train_s,
        search_s=search_s,
        apart_s=apart_s,
        alone=alone,
    )
    return figures.as_result()


# --- Optuna alone and Ray Tune alone: the same space, sampler, early stops, number of trials and steps ---


_SEARCHERS = (
    Variant(name="paceline", title="paceline tune --sampler tpe", commands=lambda directory: ()),
    Variant(name="optuna", title="Optuna alone: TPE, successive halving", commands=lambda directory: ()),
    Variant(name="ray", title="Ray Tune alone: OptunaSearch, ASHA", commands=lambda directory: ()),
)
_METRICS = {"fashion-mnist": ("accuracy", "max"), "transformer": ("bits_per_byte", "min")}
_SEARCH_S = Quantity("seconds", "s")
_BEST = Quantity("value", "best", 4)
_STEPS = Quantity("steps", "steps of all trials", 0)


def bench_searches(
    *, tasks: Sequence[str], trials: int, steps: int, evaluations: int, rounds: int, progress: Progress
) -> BenchResult:
    """Search tasks with Paceline, with Optuna alone and with Ray Tune alone, in turns; a seed for each round.

    Args:
        tasks: fashion-mnist, transformer or both.
        trials: of each search.
        steps: of a whole trial.
        evaluations: of a whole trial.
        rounds: number of seeds.
        progress: shows what is done.

    Raises:
        LaunchError: a search failed.
    """
    comparisons = []
    for task in tasks:
        metric, mode = _METRICS[task]
        samples: dict[str, list[Sample]] = {variant.name: [] for variant in _SEARCHERS}
        for seed in range(rounds):
            job = SearchJob(
                task=task,
                metric=metric,
                mode=mode,
                trials=trials,
                steps=steps,
                every=-(-steps // evaluations),
                seed=seed,
            )
            for variant in _SEARCHERS:
                began = time.perf_counter()
                found = _search_by(variant.name, job)
                sample = {**found, "seconds": time.perf_counter() - began}
                samples[variant.name].append(sample)
                progress(
                    f"{task}, seed {seed}: {variant.title}: {metric} {found['value']:.4f}, {sample['seconds']:.0f} s"
                )
        comparisons.append(compare(f"{task}, {metric}", (_SEARCH_S, _BEST, _STEPS), _SEARCHERS, samples))
    return BenchResult(
        benchmark="searches",
        document={"trials": trials, "steps": steps, "evaluations": evaluations},
        comparisons=comparisons,
        remarks=[f"{trials} trials of {steps} steps, evaluated {evaluations} times; starts of processes included."],
    )


def _search_by(name: str, job: SearchJob) -> Sample:
    """Search with one of them; return the best value and the steps of all trials."""
    if name != "paceline":
        found = _run_json(command(name, job), name)
        return {"value": float(found["value"]), "steps": float(found["steps"])}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        options = {
            "--metric": f"{job.metric}:{job.mode}",
            "--sampler": "tpe",
            "--trials": job.trials,
            "--max-steps": job.steps,
            "--eval-every": f"{job.every}steps",
            "--checkpoint-every": "never",
            "--seed": job.seed,
            "--run-dir": f"{directory}/search",
        }
        # The transformer has a validation split of its own.
        held_out = ("--val-fraction", "0.1") if job.task == "fashion-mnist" else ()
        found = _run(("tune", job.task, *held_out, *(str(word) for pair in options.items() for word in pair)))
        return {"value": float(found["best"][job.metric]), "steps": float(found["steps"])}


def _run(words: Sequence[str]) -> dict[str, Any]:
    """Run a command of Paceline's; return what it prints as JSON."""
    return _run_json([sys.executable, "-m", "paceline", *words, "--json"], f"paceline {' '.join(words)}")


def _run_json(argv: Sequence[str], name: str) -> dict[str, Any]:
    """Run a command; return the last line of its output, which is JSON."""
    done = subprocess.run(
        kill_with_parent_command(argv),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise LaunchError(f"{name} failed:\n{done.stderr.strip()}")
    return dict(json.loads(done.stdout.splitlines()[-1]))
