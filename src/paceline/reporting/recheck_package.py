"""Whether the numbers that a package records still hold, under what is installed now."""

from __future__ import annotations

from functools import partial

from paceline.checkpoint.state import model_sha256
from paceline.errors import PacelineError, UntrustedError
from paceline.exporting.comparison import compare, problem_of
from paceline.exporting.loading import load_program, load_weights, task_of
from paceline.exporting.source import PACKAGE_METRICS, Source, open_exported
from paceline.packages.package import Package
from paceline.reporting.recheck import OnProgress, Program, Recheck, compared
from paceline.reporting.report import versions_now


def recheck_package(
    package: Package,
    task: str | None = None,
    *,
    tolerance: float = 0.0,
    on_progress: OnProgress = lambda split, done, total: None,
) -> Recheck:
    """Evaluate a package's weights once more as its export did, and hold its programs against them.

    Args:
        package: verified.
        task: whose code is used; None is the task that the package names, where this user trusts it or it is
            a recipe.
        tolerance: the absolute difference of a metric that still holds.
        on_progress: told of what is evaluated, the samples done and all of them, after each block.

    Raises:
        UserError: the task or its data cannot be built.
        PackageError: the package does not say how it was measured, its weights do not fit the task, or it is
            not said which code may run.
    """
    manifest = package.manifest
    origin = manifest.provenance
    spec = task_of(package, task)
    load = partial(load_weights, content=package.read_weights(), quantization=manifest.quantization)
    with open_exported(package.path, origin, spec, load) as source:
        now = source.measure(on_progress=partial(on_progress, source.split))
        recorded = origin.data.get(PACKAGE_METRICS, manifest.metrics)
        whole = manifest.quantization is None
        return Recheck(
            step=origin.step,
            numbers=tuple(
                compared(source.split, name, value, now[name].value if name in now else None, tolerance)
                for name, value in sorted(recorded.items())
            ),
            weights_hold=model_sha256(source.model.state_dict()) == origin.model_sha256 if whole else None,
            then=dict(origin.versions),
            now=versions_now(),
            changed_pins=(),
            programs=tuple(
                _recheck_program(package, source, kind, optional=task is not None, on_progress=on_progress)
                for kind in manifest.programs
            ),
        )


def _recheck_program(
    package: Package, source: Source, kind: str, *, optional: bool, on_progress: OnProgress
) -> Program:
    """Run a program beside the weights; ``optional`` leaves out one that is not trusted."""
    then = package.manifest.differences.get(kind)
    recorded = None if then is None else then.largest
    try:
        program = load_program(package, kind)
        (found,) = compare(source, {kind: program}, partial(on_progress, kind)).values()
    except UntrustedError:
        if not optional:
            raise
        return Program(kind, recorded, None, None)
    except PacelineError as error:
        return Program(kind, recorded, None, str(error).splitlines()[0])
    except Exception as error:
        # What cannot read a file of another version may raise anything.
        return Program(kind, recorded, None, f"it cannot be loaded: {type(error).__name__}: {error}"[:300])
    now, scale = found
    problem = problem_of(now, scale, None, None)
    if (
        then is not None
        and now.largest <= then.largest
        and (now.equal_labels or 0) >= (then.equal_labels or 0)
    ):
        problem = None  # the user said at the export that it may differ so much
    return Program(kind, recorded, now.largest, problem)
