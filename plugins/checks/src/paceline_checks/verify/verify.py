"""Training with every strategy, and comparison of the results."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.core.config import config_from_mapping
from paceline.core.environment import visible_gpus
from paceline.core.errors import ConfigError, LaunchError, UserError
from paceline.core.ownership import own_prefix
from paceline.launch.launcher import LaunchSpec, get_launcher
from paceline.runs.failures import FailureRecord
from paceline_checks.impurities import Impurity
from paceline_checks.verify.cases import FIXED, GroupPlan, Guarantee, StrategyCase, Training, VerificationRequest
from paceline_checks.verify.compare import (
    FACTOR,
    PLAIN_TOLERANCES,
    Divergence,
    Margins,
    Step,
    converges,
    first_difference,
    first_forward,
    measure,
    read_recorded_steps,
    read_steps,
)

# --- The report. No torch ---


Verdict = Literal["equal", "within", "diverged", "failed", "not applicable"]


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """The result of one case, ``method``, on one number of processes.

    Attributes:
        detail: why it is not applicable, or how it failed.
        distance: from float64 (of plain PyTorch, where that is the reference), of the value with the largest share of
            its tolerance.
    """

    method: str
    world_size: int
    guarantee: Guarantee
    verdict: Verdict
    detail: str = ""
    distance: float | None = None
    tolerance: float | None = None
    divergence: Divergence | None = None

    @property
    def ok(self) -> bool:
        """Return whether the case meets its guarantee, or is not applicable to this task."""
        return self.verdict in ("equal", "within", "not applicable")


@dataclass(frozen=True, kw_only=True)
class VerificationReport:
    """The report of ``paceline verify``.

    Attributes:
        factor: ratio of a tolerance to the float32 run's own distance from float64.
        rows: by number of processes, then in the order of the cases.
        no_double: why there is no float64 run; "" if there is one.
    """

    task: str
    steps: int
    microbatches: int
    global_batch_size: int
    seed: int
    factor: float
    rows: Sequence[CaseResult]
    warnings: Sequence[Impurity]
    no_double: str = ""

    @property
    def ok(self) -> bool:
        """Return whether every case meets its guarantee."""
        return all(row.ok for row in self.rows)

    def to_json(self) -> Mapping[str, Any]:
        rows = [
            {**row, "distance": row["distance"] if math.isfinite(row["distance"] or 0.0) else None}
            for row in map(asdict, self.rows)
        ]
        warnings = [{"lint": found.kind, "message": found.message, "place": found.place} for found in self.warnings]
        return {**asdict(self), "rows": rows, "warnings": warnings, "ok": self.ok}


# --- Training of every case, one group of processes per number of processes, and comparison. No torch


_POLL_S = 0.2
TAIL_LINES = 15
"""Number of last lines of a failed process's output to show."""
_DOUBLE, _ALONE, _AGAIN, _LONG = "float64", "alone", "again", "alone-long"
_MIN_CONVERGENCE_STEPS = 40
"""Smallest number of steps in which a case must show convergence."""
_ASYNC_STEPS_FACTOR = 4
"""Factor of steps for asynchronous methods, whose single runs vary at random."""

Tell = Callable[[str], None]


def verify(request: VerificationRequest, tell: Tell) -> VerificationReport:
    """Train, compare, and return the report.

    Raises:
        UserError: the options or the task do not work on one process.
        LaunchError: the run on one process failed, or processes could not be started.
        KeyboardInterrupt: a stop was requested; all processes have been ended.
    """
    request.check()
    with tempfile.TemporaryDirectory(prefix=own_prefix("verify")) as name:
        return _Verification(request, Path(name), tell).report()


class _Verification:
    def __init__(self, request: VerificationRequest, root: Path, tell: Tell) -> None:
        self._request = request
        self._root = root
        self._tell = tell
        self._groups = 0
        self._lints = root / "lints.json"
        self._base = {"device": "cpu", "threads": 1, **request.options, **FIXED, "max_steps": request.steps}
        if "device" not in request.options and visible_gpus():
            tell("compares on the CPU; --device cuda compares on GPUs")
        self._rows: dict[tuple[int, str], CaseResult] = {}

    def report(self) -> VerificationReport:
        request, trainings = self._request, self._plan()
        on_one_process = [t for t in trainings if t.simulation is not None or t.world_size == 1]
        alone = self._train_on_one_process([t for t in on_one_process if t.name != "single-1"])
        double = self._training(_DOUBLE)
        margins = None
        if double.outcome.exists():
            margins = Margins(alone, [step.loss for step in read_steps(double)])
        for world_size in request.worlds:
            trainings_of_world = [
                # The simulation of another training is judged with that one.
                t
                for t in trainings
                if t.world_size == world_size and (t.simulation is None or t.reference is not None)
            ]
            if world_size == 1:
                self._judge_repetition(alone)
            elif trainings_of_world:
                self._train(trainings_of_world)
            for training in trainings_of_world:
                if training.name != "single-1":
                    self._add(self._judge(training, alone, margins))
        self._locate_divergent_modules(trainings)
        result = json.loads(self._training(_ALONE).outcome.read_bytes())
        keys = [(world_size, case.name) for world_size in request.worlds for case in request.cases]
        lints = json.loads(self._lints.read_bytes()) if self._lints.exists() else []
        return VerificationReport(
            task=request.task,
            steps=len(alone),
            microbatches=result["microbatches"],
            global_batch_size=result["global_batch_size"],
            seed=result["seed"],
            factor=FACTOR,
            rows=[self._rows[key] for key in keys if key in self._rows],
            warnings=[Impurity(**found) for found in lints],
            no_double="" if margins is not None else _describe(double.failure, "it did not finish"),
        )

    # Planning.

    def _plan(self) -> list[Training]:
        """Return the runs of all cases; give those that are not possible their result at once."""
        trainings = []
        for world_size in self._request.worlds:
            for case in self._request.cases:
                options = case.options_on(world_size)
                if options is None:
                    continue
                reason = self._rejection_reason(case, options, world_size)
                if reason:
                    self._add(_row_of(case, world_size)(verdict="not applicable", detail=reason))
                    continue
                name = f"{case.name}-{world_size}"
                training = self._training(name, world_size, options, reference=_DOUBLE, noted=case.takes_callbacks)
                if case.guarantee == "convergence":
                    training = _lengthen(training, 1 if training.noted else _ASYNC_STEPS_FACTOR)
                if case.guarantee == "rounding":
                    training = replace(_in_double(training), float32_reference=_ALONE)
                    trainings.append(replace(training, simulation=case.simulation))
                    continue
                trainings.append(training)
                if case.simulation is not None:
                    simulated = replace(training, name=f"{name}-simulated", simulation=case.simulation)
                    trainings.append(replace(simulated, reference=None))
        return trainings

    def _rejection_reason(self, case: StrategyCase, options: Mapping[str, Any], world_size: int) -> str:
        """Return why a case cannot be used with the options; "" if it can."""
        if case.needs is not None and importlib.util.find_spec(case.needs) is None:
            return f"{case.needs} is not installed"
        try:
            config_from_mapping({**self._base, **options, "nproc": world_size}, "paceline verify")
        except ConfigError as error:
            return str(error)
        return ""

    def _training(
        self, name: str, world_size: int = 1, options: Mapping[str, Any] | None = None, **more: Any
    ) -> Training:
        own = {"strategy": "single"} if options is None else options
        options = {**self._base, **own, "nproc": world_size}
        return Training(root=str(self._root), name=name, world_size=world_size, options=options, **more)

    # Training.

    def _train_on_one_process(self, more: Sequence[Training]) -> list[Step]:
        """Train on one process: the float64 run, the reference, its repetition, and simulations."""
        alone = self._training(_ALONE, reference=_DOUBLE)
        trainings = [_in_double(self._training(_DOUBLE)), alone]
        if 1 in self._request.worlds:
            trainings.append(self._training(_AGAIN))
        if any(case.guarantee == "convergence" for case in self._request.cases):
            trainings.append(_lengthen(self._training(_LONG)))
        self._train([*trainings, *(replace(simulation, world_size=1) for simulation in more)], lint=True)
        failed = alone.failure
        if failed is None and alone.outcome.exists():
            return read_steps(alone)
        if failed is None:
            raise LaunchError("the run on one process ended without a result; see its output above.")
        if failed.user_error:
            raise UserError(failed.message)
        lines = failed.traceback.rstrip().splitlines()[-TAIL_LINES:]
        text = "".join(f"\n  {line}" for line in lines)
        raise LaunchError(f"the task fails even on one process: {failed.type}: {failed.message}{text}")

    def _train(self, trainings: Sequence[Training], *, lint: bool = False) -> None:
        """Train on one number of processes; continue after a training that ended its processes.

        Args:
            lint: also check the task's arithmetic.
        """
        remaining = list(trainings)
        while remaining:
            self._run_group(remaining, lint=lint)
            done = [training for training in remaining if training.is_done]
            remaining = remaining[len(done) :]
            if not done and (not lint or self._lints.exists()):
                remaining = remaining[1:]  # it ended the processes without a record
            lint = False

    def _run_group(self, trainings: Sequence[Training], *, lint: bool) -> None:
        plan = GroupPlan(
            task=self._request.task,
            set=tuple(self._request.options.get("set", ())),
            least_microbatches=max(self._request.worlds),
            trainings=tuple(trainings),
            lint=str(self._lints) if lint else None,
        )
        self._groups += 1
        path = self._root / f"plan-{self._groups}.json"
        path.write_bytes(msgspec.json.encode(plan))
        world_size = trainings[0].world_size
        launcher = get_launcher("spawn")
        rendered = launcher.render(
            LaunchSpec(
                command=(sys.executable, "-P", "-m", "paceline_checks.verify.worker", str(path)),
                nproc=(world_size,),
                threads=trainings[0].options["threads"],
            )
        )
        logs = [self._root / f"group-{self._groups}-rank-{r}.log" for r in range(world_size)]
        commands = tuple(replace(command, log=log) for command, log in zip(rendered.commands, logs, strict=True))
        processes = f"{world_size} process{'' if world_size == 1 else 'es'}"
        self._tell(f"{processes}: {', '.join(training.name for training in trainings)}")
        job = launcher.submit(replace(rendered, commands=commands))
        with _progress(trainings, self._tell):
            code = job.wait()
        if code in (75, 130):
            raise KeyboardInterrupt
        if code:
            self._tell(f"{processes} ended with exit code {code}.{_tail(logs)}")

    # Comparison.

    def _add(self, row: CaseResult) -> None:
        self._rows[row.world_size, row.method] = row

    def _case_of(self, training: Training) -> StrategyCase:
        return next(m for m in self._request.cases if f"{m.name}-{training.world_size}" == training.name)

    def _judge_repetition(self, alone: Sequence[Step]) -> None:
        single = next((m for m in self._request.cases if m.name == "single"), None)
        if single is None:
            return
        difference = first_difference(read_steps(self._training(_AGAIN)), alone)
        detail = "" if difference is None else "two runs on one process with the same settings differ"
        verdict: Verdict = "equal" if difference is None else "diverged"
        self._add(_row_of(single, 1)(verdict=verdict, detail=detail, divergence=difference))

    def _judge(self, training: Training, alone: Sequence[Step], margins: Margins | None) -> CaseResult:
        case, failed = self._case_of(training), training.failure
        row = _row_of(case, training.world_size)
        if failed is not None and failed.user_error:
            return row(verdict="not applicable", detail=failed.message)
        if failed is not None or not training.outcome.exists():
            return row(verdict="failed", detail=_describe(failed, "the processes ended"))
        if case.guarantee == "rounding":
            return _judge_plain(row, training)
        if case.guarantee == "reference":
            return _judge_weights(row, training, self._training(f"{training.name}-simulated"), "simulated")
        if case.guarantee == "bits" and not training.noted:
            return _judge_weights(row, training, self._training(_ALONE), "on one process")
        if training.noted:
            steps = read_steps(training, synchronous=case.guarantee != "convergence")
        else:
            steps = read_recorded_steps(training.run.metrics)
        if case.guarantee == "bits":
            difference = first_difference(steps, alone)
            return row(verdict="equal" if difference is None else "diverged", divergence=difference)
        if case.guarantee == "convergence":
            is_falling, detail = converges(steps, read_steps(self._training(_LONG)))
            return row(verdict="within" if is_falling else "diverged", detail=detail)
        if margins is None:
            why = _describe(self._training(_DOUBLE).failure, "it did not finish")
            return row(verdict="failed", detail=f"there is no run in float64 to compare with: {why}")
        measured = measure(steps, margins)
        return row(verdict="within" if measured.divergence is None else "diverged", **measured._asdict())

    def _locate_divergent_modules(self, trainings: Sequence[Training]) -> None:
        """Train again up to the first step whose loss differs, and find the module."""
        references: dict[int, Training] = {}
        repetitions: dict[int, list[tuple[Training, CaseResult, Divergence]]] = {}
        for training in (each for each in trainings if each.simulation is None):
            row = self._rows.get((training.world_size, self._case_of(training).name))
            if row is not None and row.divergence is not None and row.divergence.what == "loss":
                step = row.divergence.step
                repeated = replace(training, name=f"{training.name}-forward", reference=None, forward_step=step)
                repetitions.setdefault(training.world_size, []).append((repeated, row, row.divergence))
                references[step] = self._training(f"{_ALONE}-forward-{step}", forward_step=step)
        self._train([*references.values()])
        for trainings_of_world in repetitions.values():
            self._train([training for training, _, _ in trainings_of_world])
            for training, row, divergence in trainings_of_world:
                alone = references[divergence.step]
                self._add(replace(row, divergence=first_forward(training, alone, divergence, tolerance=row.tolerance)))


@contextmanager
def _progress(trainings: Sequence[Training], tell: Tell) -> Iterator[None]:
    """Report each finished training of a group."""
    ended, remaining = threading.Event(), list(trainings)

    def watch() -> None:
        has_ended = False
        while not has_ended:
            has_ended = ended.wait(_POLL_S)
            while remaining and remaining[0].done(0).exists():
                tell(f"  {remaining.pop(0).name} has finished")

    thread = threading.Thread(target=watch, name="paceline-verify-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _tail(logs: Sequence[Path]) -> str:
    """Return the end of the output of the first process that printed anything."""
    for log in logs:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        if lines:
            return "".join(f"\n  {line}" for line in lines[-TAIL_LINES:])
    return ""


def _in_double(training: Training) -> Training:
    return replace(training, double=True, options={**training.options, "precision": "fp32", "compile": False})


def _lengthen(training: Training, times: int = 1) -> Training:
    """Return the training without step-by-step comparison, and long enough for its loss to fall.

    It records the same number of losses for any ``times``; Hogwild's processes synchronise at each.
    """
    steps = max(_MIN_CONVERGENCE_STEPS, training.options["max_steps"]) * times
    options = {**training.options, "max_steps": steps, "log_every": times}
    return replace(training, options=options, reference=None)


def _row_of(case: StrategyCase, world_size: int) -> partial[CaseResult]:
    return partial(CaseResult, method=case.name, world_size=world_size, guarantee=case.guarantee)


def _judge_plain(row: partial[CaseResult], training: Training) -> CaseResult:
    """Judge the distance of the weights that one process saved from those of a loop in plain PyTorch."""
    outcome = json.loads(training.outcome.read_bytes())
    distance = math.inf if outcome["distance"] is None else outcome["distance"]
    tolerance = PLAIN_TOLERANCES["float64" if outcome["double"] else "float32"]
    divergence = None
    if distance > tolerance:
        detail = f"{distance:.2e} from plain PyTorch, the farthest, where {tolerance:.0e} is allowed"
        steps = training.options["max_steps"]
        divergence = Divergence(step=steps, what="weight", tensor=outcome["tensor"], detail=detail)
    return row(
        verdict="within" if divergence is None else "diverged",
        detail="" if outcome["double"] else "compared in float32",
        divergence=divergence,
        distance=distance,
        tolerance=tolerance,
    )


def _judge_weights(row: partial[CaseResult], training: Training, reference: Training, where: str) -> CaseResult:
    """Compare only the final weights with those of a run or a simulation."""
    if not reference.outcome.exists():
        reason = _describe(reference.failure, "")
        return row(verdict="failed", detail="its simulation failed" + (f": {reason}" if reason else ""))
    actual, expected = (json.loads(each.outcome.read_bytes())["model_sha256"] for each in (training, reference))
    if actual == expected:
        return row(verdict="equal")
    return row(verdict="diverged", detail=f"weights {actual[:12]}, {where} {expected[:12]}")


def _describe(failed: FailureRecord | None, otherwise: str) -> str:
    return otherwise if failed is None else f"{failed.type}: {failed.message}"
