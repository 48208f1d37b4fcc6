"""Trains with every strategy, and compares what came out."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from paceline.core.config import config_from_mapping
from paceline.core.errors import ConfigError, LaunchError, UserError
from paceline.insight.verify.cases import (
    FIXED,
    Class,
    GroupPlan,
    StrategyCase,
    Training,
    VerificationRequest,
    directory_of,
    done_path,
    failure,
    is_done,
    lints_path,
    outcome_path,
)
from paceline.insight.verify.compare import (
    FACTOR,
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
from paceline.launch.launcher import LaunchSpec, get_launcher
from paceline.runs.failures import FailureRecord

# --- What became of each method, and of the task's arithmetic. No torch ---


Verdict = Literal["equal", "within", "diverged", "failed", "not applicable"]


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One method on one number of processes.

    Attributes:
        method: its name.
        world_size: processes.
        promises: its class.
        verdict: what became of it.
        detail: in words: why it is not applicable, how it failed.
        distance: from float64, of what took most of its tolerance.
        tolerance: of that.
        divergence: where it first leaves what it is compared with.
    """

    method: str
    world_size: int
    guarantee: Class
    verdict: Verdict
    detail: str = ""
    distance: float | None = None
    tolerance: float | None = None
    divergence: Divergence | None = None

    @property
    def ok(self) -> bool:
        """Whether the method keeps what it promises, or promises nothing for this task."""
        return self.verdict in ("equal", "within", "not applicable")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something in the task's arithmetic that is probably not meant.

    Attributes:
        lint: which look found it.
        message: what is wrong, and what to do.
        place: FILE:LINE, where it is known.
    """

    lint: str
    message: str
    place: str | None = None

    def __str__(self) -> str:
        return f"{self.place + ': ' if self.place else ''}{self.message} [{self.lint}]"


@dataclass(frozen=True, kw_only=True)
class VerificationReport:
    """What ``paceline verify`` found.

    Attributes:
        task: its name.
        steps: of each run.
        microbatches: S.
        global_batch_size: in samples.
        seed: of all runs.
        factor: what a tolerance is, times the float32 run's own distance from float64.
        rows: by number of processes, then in the order of the methods.
        warnings: about the task.
        no_double: why there was no run in float64; "" where there was one.
    """

    task: str
    steps: int
    microbatches: int
    global_batch_size: int
    seed: int
    factor: float
    rows: Sequence[CaseResult]
    warnings: Sequence[Finding]
    no_double: str = ""

    @property
    def ok(self) -> bool:
        """Whether every method keeps what it promises."""
        return all(row.ok for row in self.rows)

    def to_json(self) -> Mapping[str, Any]:
        """JSON types."""
        rows = [
            {**row, "distance": row["distance"] if math.isfinite(row["distance"] or 0.0) else None}
            for row in map(asdict, self.rows)
        ]
        return {**asdict(self), "rows": rows, "ok": self.ok}


# --- Groups of processes that do several trainings, one after the other. No torch ---


_LOOK_S = 0.2
TAIL_LINES = 15
"""How much of what a process printed is told of it when it fails."""

Tell = Callable[[str], None]


class WorkerGroups:
    """Starts the groups of one verification.

    Args:
        request: what is verified.
        root: its directory.
        tell: called with a line of progress from time to time.
    """

    def __init__(self, request: VerificationRequest, root: Path, tell: Tell) -> None:
        self._request, self._root, self._tell = request, root, tell
        self._groups = 0

    def train(self, trainings: Sequence[Training], *, lint: bool = False) -> None:
        """Train on one number of processes; a run that brings them down does not keep back those after it.

        Args:
            trainings: all on as many processes.
            lint: also look at the task's arithmetic.

        Raises:
            LaunchError: the processes could not be started.
            KeyboardInterrupt: somebody asked for a stop; all processes are ended.
        """
        left = list(trainings)
        while left:
            self._run_group(left, lint=lint)
            done = [training for training in left if is_done(self._root, training)]
            left = left[len(done) :]
            if not done and (not lint or lints_path(self._root).exists()):
                left = left[1:]  # it ended the processes, and nobody could say why
            lint = False

    def _run_group(self, trainings: Sequence[Training], *, lint: bool) -> None:
        request = self._request
        plan = GroupPlan(
            task=request.task,
            set=tuple(request.options.get("set", ())),
            root=str(self._root),
            least_microbatches=max(request.worlds),
            trainings=tuple(trainings),
            lint=lint,
        )
        self._groups += 1
        path = self._root / f"plan-{self._groups}.json"
        plan.write(path)
        world_size = trainings[0].world_size
        launcher = get_launcher("spawn")
        rendered = launcher.render(
            LaunchSpec(
                command=(sys.executable, "-m", "paceline.insight.verify.worker", str(path)),
                nproc=(world_size,),
                threads=trainings[0].options["threads"],
            )
        )
        logs = [self._root / f"group-{self._groups}-rank-{r}.log" for r in range(world_size)]
        rendered = replace(
            rendered,
            commands=tuple(replace(command, log=log) for command, log in zip(rendered.commands, logs, strict=True)),
        )
        on = f"{world_size} process{'' if world_size == 1 else 'es'}"
        self._tell(f"{on}: {', '.join(training.name for training in trainings)}")
        job = launcher.submit(rendered)
        with _Progress(self._root, trainings, self._tell):
            code = job.wait()
        if code in (75, 130):
            raise KeyboardInterrupt
        if code:
            self._tell(f"{on} ended with exit code {code}.{_tail(logs)}")


class _Progress:
    """Tells of each training that a group is through with."""

    def __init__(self, root: Path, trainings: Sequence[Training], tell: Tell) -> None:
        self._root, self._left, self._tell = root, list(trainings), tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paceline-verify-progress", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            over = self._over.wait(_LOOK_S)
            while self._left and done_path(self._root, self._left[0], 0).exists():
                self._tell(f"  {self._left.pop(0).name} is through")
            if over:
                return


def _tail(logs: Sequence[Path]) -> str:
    """The end of what the first process printed that printed anything."""
    for log in logs:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        if lines:
            return "".join(f"\n  {line}" for line in lines[-TAIL_LINES:])
    return ""


# --- Trains a task under every method, one group of processes for each number of them, and judges. No torch


_DOUBLE, _ALONE, _AGAIN, _LONG = "float64", "alone", "again", "alone-long"
_CONVERGES_IN = 40
"""Steps, at least, in which a method that promises convergence is to show it."""
_PATIENCE = 4
"""Times as many where the machine decides who comes first: such a run is one throw of dice."""


def verify(request: VerificationRequest, tell: Tell) -> VerificationReport:
    """Train, compare, and say what was found.

    Args:
        request: what to verify.
        tell: called with a line of progress from time to time.

    Raises:
        UserError: the options or the task cannot work, already on one process.
        LaunchError: the run on one process failed, or processes could not be started.
        KeyboardInterrupt: somebody asked for a stop; all processes are ended.
    """
    request.check()
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as name:
        return _Verification(request, Path(name), tell).report()


class _Verification:
    """One verification, in a directory of its own."""

    def __init__(self, request: VerificationRequest, root: Path, tell: Tell) -> None:
        self._request, self._root = request, root
        self._base = {"device": "cpu", "threads": 1, **request.options, **FIXED, "max_steps": request.steps}
        self._rows: dict[tuple[int, str], CaseResult] = {}
        self._groups = WorkerGroups(request, root, tell)

    def report(self) -> VerificationReport:
        trainings = self._planned()
        in_one = [t for t in trainings if t.simulation is not None or t.world_size == 1]
        alone, simulated = self._alone([t for t in in_one if t.name != "single-1"])
        margins = self._margins(alone)
        for world_size in self._request.worlds:
            of_world = [
                training for training in trainings if training.world_size == world_size and training.simulation is None
            ]
            if world_size == 1:
                self._judge_repetition(alone)
            elif of_world:
                self._groups.train(of_world)
            for training in of_world:
                if training.name != "single-1":
                    self._judge(training, alone, margins, simulated)
        self._look_into_forwards(trainings)
        result = json.loads(outcome_path(self._root, self._training(_ALONE)).read_bytes())
        rows = [
            self._rows[world_size, method.name]
            for world_size in self._request.worlds
            for method in self._request.cases
            if (world_size, method.name) in self._rows
        ]
        return VerificationReport(
            task=self._request.task,
            steps=len(alone),
            microbatches=result["microbatches"],
            global_batch_size=result["global_batch_size"],
            seed=result["seed"],
            factor=FACTOR,
            rows=rows,
            warnings=self._warnings(),
            no_double="" if margins is not None else self._why_no_double(),
        )

    # What is to be trained.

    def _planned(self) -> list[Training]:
        """The runs of all methods; those that cannot be get their row at once."""
        planned = []
        for world_size in self._request.worlds:
            for method in self._request.cases:
                options = method.options_on(world_size)
                if options is None:
                    continue
                refusal = self._refusal(method, options, world_size)
                if refusal:
                    self._row(method, world_size, verdict="not applicable", detail=refusal)
                    continue
                name = f"{method.name}-{world_size}"
                training = self._training(name, world_size, options, reference=_DOUBLE)
                if not method.takes_callbacks:
                    training = replace(training, noted=False)
                if method.guarantee == "convergence":
                    training = _lengthened(training, 1 if training.noted else _PATIENCE)
                planned.append(training)
                if method.simulation is not None:
                    simulated = replace(training, name=f"{name}-simulated", simulation=method.simulation)
                    planned.append(replace(simulated, reference=None))
        return planned

    def _refusal(self, method: StrategyCase, options: Mapping[str, Any], world_size: int) -> str:
        """Why a method cannot be used with the options; "" where it can."""
        if method.needs is not None and importlib.util.find_spec(method.needs) is None:
            return f"{method.needs} is not installed"
        try:
            config_from_mapping({**self._base, **options, "nproc": world_size}, "paceline verify")
        except ConfigError as error:
            return str(error)
        return ""

    def _training(
        self, name: str, world_size: int = 1, options: Mapping[str, Any] | None = None, **more: Any
    ) -> Training:
        own = {"strategy": "single"} if options is None else options
        return Training(name=name, world_size=world_size, options={**self._base, **own, "nproc": world_size}, **more)

    # Training.

    def _alone(self, others: Sequence[Training]) -> tuple[list[Step], dict[str, str]]:
        """Train on one process: in float64, as everybody does, twice, and what else needs only one."""
        double = self._training(_DOUBLE, double=True)
        double = replace(double, options={**double.options, "precision": "fp32", "compile": False})
        alone = self._training(_ALONE, reference=_DOUBLE)
        again = [self._training(_AGAIN)] if 1 in self._request.worlds else []
        in_one = [replace(other, world_size=1) for other in others]
        converging = any(method.guarantee == "convergence" for method in self._request.cases)
        long = [_lengthened(self._training(_LONG))] if converging else []
        self._groups.train([double, alone, *again, *long, *in_one], lint=True)
        failed = failure(self._root, alone)
        if failed is not None or not outcome_path(self._root, alone).exists():
            _raise(failed)
        simulated = {}
        for simulation in (other for other in in_one if other.simulation is not None):
            path = outcome_path(self._root, simulation)
            if path.exists():
                simulated[simulation.name] = json.loads(path.read_bytes())["model_sha256"]
        return read_steps(self._root, alone), simulated

    # Judging.

    def _row(self, method: StrategyCase, world_size: int, **row: Any) -> None:
        self._rows[world_size, method.name] = CaseResult(
            method=method.name, world_size=world_size, guarantee=method.guarantee, **row
        )

    def _method(self, training: Training) -> StrategyCase:
        return next(m for m in self._request.cases if f"{m.name}-{training.world_size}" == training.name)

    def _judge_repetition(self, alone: Sequence[Step]) -> None:
        single = next((m for m in self._request.cases if m.name == "single"), None)
        if single is None:
            return
        again = self._training(_AGAIN)
        difference = first_difference(read_steps(self._root, again), alone)
        detail = "" if difference is None else "the same run on one process, made twice, differs"
        verdict = "equal" if difference is None else "diverged"
        self._row(single, 1, verdict=verdict, detail=detail, divergence=difference)

    def _margins(self, alone: Sequence[Step]) -> Margins | None:
        double = self._training(_DOUBLE)
        if not outcome_path(self._root, double).exists():
            return None
        return Margins(alone, [step.loss for step in read_steps(self._root, double)])

    def _why_no_double(self) -> str:
        failed = failure(self._root, self._training(_DOUBLE))
        return "it did not end" if failed is None else f"{failed.type}: {failed.message}"

    def _judge(
        self,
        training: Training,
        alone: Sequence[Step],
        margins: Margins | None,
        simulated: Mapping[str, str],
    ) -> None:
        method, world_size = self._method(training), training.world_size
        failed = failure(self._root, training)
        if failed is not None and failed.user_error:
            self._row(method, world_size, verdict="not applicable", detail=failed.message)
            return
        if failed is not None or not outcome_path(self._root, training).exists():
            detail = "the processes ended" if failed is None else f"{failed.type}: {failed.message}"
            self._row(method, world_size, verdict="failed", detail=detail)
            return
        if training.noted:
            steps = read_steps(self._root, training, together=method.guarantee != "convergence")
        else:
            steps = read_recorded_steps(directory_of(self._root, training).metrics)
        if method.guarantee == "bits" and not training.noted:
            self._judge_weights(method, training)
        elif method.guarantee == "bits":
            difference = first_difference(steps, alone)
            verdict = "equal" if difference is None else "diverged"
            self._row(method, world_size, verdict=verdict, divergence=difference)
        elif method.guarantee == "reference":
            self._judge_simulated(method, training, simulated)
        elif method.guarantee == "convergence":
            progress = converges(steps, read_steps(self._root, self._training(_LONG)))
            verdict = "within" if progress.ok else "diverged"
            self._row(method, world_size, verdict=verdict, detail=str(progress))
        elif margins is None:
            detail = f"there is no run in float64 to compare with: {self._why_no_double()}"
            self._row(method, world_size, verdict="failed", detail=detail)
        else:
            measured = measure(steps, margins)
            self._row(
                method,
                world_size,
                verdict="within" if measured.divergence is None else "diverged",
                divergence=measured.divergence,
                distance=measured.distance,
                tolerance=measured.tolerance,
            )

    def _judge_weights(self, method: StrategyCase, training: Training) -> None:
        """Compare the last weights only."""
        paths = (outcome_path(self._root, t) for t in (training, self._training(_ALONE)))
        mine, alone = (json.loads(path.read_bytes())["model_sha256"] for path in paths)
        detail = "" if mine == alone else f"weights {mine[:12]}, on one process {alone[:12]}"
        verdict = "equal" if mine == alone else "diverged"
        self._row(method, training.world_size, verdict=verdict, detail=detail)

    def _judge_simulated(self, method: StrategyCase, training: Training, simulated: Mapping[str, str]) -> None:
        expected = simulated.get(f"{training.name}-simulated")
        sha256 = json.loads(outcome_path(self._root, training).read_bytes())["model_sha256"]
        if expected is None:
            failed = failure(self._root, replace(self._training(f"{training.name}-simulated")))
            why = "" if failed is None else f": {failed.type}: {failed.message}"
            detail = f"its simulation failed{why}"
            self._row(method, training.world_size, verdict="failed", detail=detail)
            return
        detail = "" if sha256 == expected else f"weights {sha256[:12]}, simulated {expected[:12]}"
        verdict = "equal" if sha256 == expected else "diverged"
        self._row(method, training.world_size, verdict=verdict, detail=detail)

    def _look_into_forwards(self, trainings: Sequence[Training]) -> None:
        """Train again, as far as the first step whose loss differs, and find the module."""
        wrong: list[tuple[Training, CaseResult]] = []
        for training in trainings:
            row = (
                self._rows.get((training.world_size, self._method(training).name))
                if (training.simulation is None)
                else None
            )
            if row is not None and row.divergence is not None and row.divergence.what == "loss":
                wrong.append((training, row))
        if not wrong:
            return
        references: dict[int, Training] = {}
        again: dict[int, list[tuple[Training, CaseResult]]] = {}
        for training, row in wrong:
            assert row.divergence is not None
            step = row.divergence.step
            looked = replace(training, name=f"{training.name}-forward", reference=None, forward_step=step)
            again.setdefault(training.world_size, []).append((looked, row))
            if step not in references:
                alone = self._training(f"{_ALONE}-forward-{step}")
                references[step] = replace(alone, forward_step=step)
        self._groups.train([*references.values()])
        for of_world in again.values():
            self._groups.train([training for training, _ in of_world])
            for training, row in of_world:
                assert row.divergence is not None
                found = first_forward(
                    self._root,
                    training,
                    references[row.divergence.step],
                    row.divergence,
                    tolerance=row.tolerance,
                )
                self._rows[row.world_size, row.method] = dataclasses.replace(row, divergence=found)

    def _warnings(self) -> list[Finding]:
        path = lints_path(self._root)
        if not path.exists():
            return []
        return [Finding(**warning) for warning in json.loads(path.read_bytes())]


def _lengthened(training: Training, times: int = 1) -> Training:
    """The same without what is compared step by step, and long enough for a loss to fall.

    It records as many losses whatever ``times`` is; Hogwild's processes come together at each.
    """
    steps = max(_CONVERGES_IN, training.options["max_steps"]) * times
    options = {**training.options, "max_steps": steps, "log_every": times}
    return replace(training, options=options, reference=None)


def _raise(failed: FailureRecord | None) -> None:
    if failed is None:
        raise LaunchError("the run on one process ended without a result; see what it printed above.")
    if failed.user_error:
        raise UserError(failed.message)
    lines = failed.traceback.rstrip().splitlines()[-TAIL_LINES:]
    told = "".join(f"\n  {line}" for line in lines)
    raise LaunchError(f"the task fails on one process already: {failed.type}: {failed.message}{told}")
