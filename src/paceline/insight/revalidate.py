"""Recomputation of the recorded metrics of runs and packages with the installed libraries."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from paceline.core.errors import PacelineError, RunDirectoryError, UntrustedError
from paceline.data.samples import MicroBatch
from paceline.insight.analysis import Record, read_record
from paceline.insight.report import versions_now
from paceline.runs.checkpoint_state import model_sha256
from paceline.runs.checkpoint_store import scan
from paceline.runs.checkpointer import load
from paceline.runs.directory import RunDirectory
from paceline.runs.package import Package
from paceline.serving.equivalence import compare, problem_of
from paceline.serving.formats import load_program, load_weights, task_of
from paceline.serving.trained_source import PACKAGE_METRICS, TrainedSource, open_exported
from paceline.training.loaded_model import load_trained_model, make_evaluator

# --- Runs ---


ROUNDING = 2.0**-20
"""Largest relative difference of two float32 computations of one mean that is rounding."""

OnProgress = Callable[[str, int, int], None]
Finding = Literal["same", "rounding", "tolerated", "differs"]


@dataclass(frozen=True)
class Number:
    """A recorded metric and its recomputed value.

    Attributes:
        split, name: of the metric.
        recorded, now: None if it is not finite, or missing.
        finding: "same" if bitwise equal; "rounding" within ``ROUNDING``; "tolerated" within the user's
            tolerance; else "differs".
    """

    split: str
    name: str
    recorded: float | None
    now: float | None
    finding: Finding

    @property
    def difference(self) -> float | None:
        """Return the recomputed minus the recorded value."""
        return None if self.recorded is None or self.now is None else self.now - self.recorded


@dataclass(frozen=True)
class Program:
    """A comparison of a package's program with its weights under the task's code, on the recorded split.

    Attributes:
        format: "pt2" or "onnx".
        then: largest difference of an output from the trained model's, at the export.
        now: largest difference from the package's weights; None if the program was not run or cannot run.
        problem: why it does not hold; None if it holds, or was not run.
    """

    format: str
    then: float | None
    now: float | None
    problem: str | None


@dataclass(frozen=True)
class Revalidation:
    """The result of a revalidation.

    Attributes:
        step: of the evaluated model.
        numbers: all recorded metrics.
        weights_hold: whether the model's hash is the recorded one; None if the run's last checkpoint is gone,
            or if the package is quantized, whose weights its manifest verifies.
        then, now: versions.
        changed_numerics: differences between this process and the run on which bits depend.
        programs: of a package.
    """

    step: int
    numbers: tuple[Number, ...]
    weights_hold: bool | None
    then: dict[str, str]
    now: dict[str, str]
    changed_numerics: tuple[str, ...]
    programs: tuple[Program, ...] = ()

    @property
    def holds(self) -> bool:
        """Return whether every check that was made holds."""
        return (
            self.weights_hold is not False
            and all(n.finding != "differs" for n in self.numbers)
            and all(program.problem is None for program in self.programs)
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "holds": self.holds,
            "step": self.step,
            "numbers": [{**asdict(n), "difference": n.difference} for n in self.numbers],
            "weights_hold": self.weights_hold,
            "programs": [asdict(program) for program in self.programs],
            "versions": {"then": self.then, "now": self.now},
            "changed_numerics": list(self.changed_numerics),
        }


def revalidate(
    directory: RunDirectory,
    *,
    tolerance: float = 0.0,
    on_progress: OnProgress = lambda split, done, total: None,
) -> Revalidation:
    """Evaluate a finished run's model again on every split with recorded metrics.

    Args:
        directory: of the run; nothing is written there.
        tolerance: largest accepted absolute difference.
        on_progress: called after each block with the split, the finished samples and the total.

    Raises:
        RunDirectoryError: the run has recorded no metrics.
        UserError: its task or data cannot be built any more.
        CheckpointError: the model's checkpoint is gone or damaged.
    """
    record = read_record(directory)
    if not record.recorded_metrics:
        raise RunDirectoryError(
            f"{directory.path} has recorded no metrics to check: it has not finished, or has neither a "
            "validation nor a test split. Finish it with: paceline resume " + str(directory.path)
        )
    numbers = []
    with load_trained_model(directory) as trained:
        for split, recorded in record.recorded_metrics.items():
            with closing(make_evaluator(trained, split)) as evaluator:
                done, total = 0, evaluator.num_samples

                def count(microbatch: MicroBatch, _values: Any, split: str = split, total: int = total) -> None:
                    nonlocal done
                    done += microbatch.num_samples
                    on_progress(split, done, total)

                now = trained.evaluate(evaluator, split, count)
            numbers += [
                compare_number(split, name, value, now.get(name), tolerance) for name, value in recorded.items()
            ]
        step, changed = trained.info.step, tuple(trained.changed_numerics)
    return Revalidation(
        step=step,
        numbers=tuple(numbers),
        weights_hold=_weights_hold(directory, record),
        then={str(name): str(value) for name, value in record.manifest.get("versions", {}).items()},
        now=versions_now(),
        changed_numerics=changed,
    )


def compare_number(split: str, name: str, then: float | None, now: float | None, tolerance: float) -> Number:
    """Compare a recorded metric with its recomputed value."""
    if now is not None and now != now:  # NaN is recorded as null
        now = None
    finding: Finding = "differs"
    if then == now:
        finding = "same"
    elif then is not None and now is not None:
        if abs(now - then) <= ROUNDING * max(abs(then), abs(now)):
            finding = "rounding"
        elif abs(now - then) <= tolerance:
            finding = "tolerated"
    return Number(split, name, then, now, finding)


def _weights_hold(directory: RunDirectory, record: Record) -> bool | None:
    """Check the recorded hash, which is that of the last step's model without averaging."""
    recorded = (record.result or {}).get("model_sha256")
    version = (record.result or {}).get("state_version")
    for path in scan(directory.checkpoints):
        if recorded is not None and path.name.endswith(f"-v{version:08d}"):
            return bool(model_sha256(load(path).state["model"]) == recorded)
    return None


# --- Packages ---


def revalidate_package(
    package: Package,
    task: str | None = None,
    *,
    tolerance: float = 0.0,
    on_progress: OnProgress = lambda split, done, total: None,
) -> Revalidation:
    """Evaluate a package's weights again as its export did, and compare its programs with them.

    Args:
        package: verified.
        task: provides the code; None uses the task that the package names, if the user trusts it or it is a
            built-in task.
        tolerance: largest accepted absolute difference of a metric.
        on_progress: called after each block with the evaluated item, the finished samples and the total.

    Raises:
        UserError: the task or its data cannot be built.
        PackageError: the package does not record how it was evaluated, its weights do not fit the task, or
            the code is not trusted.
    """
    manifest = package.manifest
    origin = manifest.provenance
    spec = task_of(package, task)
    load = partial(load_weights, content=package.read_weights(), quantization=manifest.quantization)
    with open_exported(package.path, origin, spec, load) as source:
        now = source.measure(on_progress=partial(on_progress, source.split))
        recorded = origin.data.get(PACKAGE_METRICS, manifest.metrics)
        whole = manifest.quantization is None
        return Revalidation(
            step=origin.step,
            numbers=tuple(
                compare_number(source.split, name, value, now[name].value if name in now else None, tolerance)
                for name, value in sorted(recorded.items())
            ),
            weights_hold=model_sha256(source.model.state_dict()) == origin.model_sha256 if whole else None,
            then=dict(origin.versions),
            now=versions_now(),
            changed_numerics=(),
            programs=tuple(
                _recheck_program(package, source, kind, optional=task is not None, on_progress=on_progress)
                for kind in manifest.programs
            ),
        )


def _recheck_program(
    package: Package, source: TrainedSource, kind: str, *, optional: bool, on_progress: OnProgress
) -> Program:
    """Compare a program with the weights; ``optional`` skips one that is not trusted."""
    then = package.manifest.differences.get(kind)
    recorded = None if then is None else then.largest
    try:
        program = load_program(package, kind)
        (comparison,) = compare(source, {kind: program}, partial(on_progress, kind)).values()
    except UntrustedError:
        if not optional:
            raise
        return Program(kind, recorded, None, None)
    except PacelineError as error:
        return Program(kind, recorded, None, str(error).splitlines()[0])
    except Exception as error:
        # A reader of a file of another version may raise anything.
        return Program(kind, recorded, None, f"it cannot be loaded: {type(error).__name__}: {error}"[:300])
    now, scale = comparison
    problem = problem_of(now, scale, None, None)
    if then is not None and now.largest <= then.largest and (now.equal_labels or 0) >= (then.equal_labels or 0):
        problem = None  # the user accepted such a difference at the export
    return Program(kind, recorded, now.largest, problem)
