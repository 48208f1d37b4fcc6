"""Whether the recorded metrics of a run or package hold with the installed libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from paceline.core.errors import PacelineError, PackageError, RunDirectoryError, UntrustedError
from paceline.core.stats import Estimate
from paceline.core.task import Callback
from paceline.core.task_loading import load_task_class
from paceline.export.equivalence import compare, problem_of
from paceline.export.formats import load_program, load_weights, task_of
from paceline.export.trained_source import (
    EVALUATION,
    EVALUATION_OPTIONS,
    PACKAGE_METRICS,
    SPLITS,
    TrainedSource,
    inference_on,
)
from paceline.runs.checkpoint_state import model_sha256
from paceline.runs.checkpoint_store import scan
from paceline.runs.directory import RunDirectory
from paceline.runs.package import Package
from paceline.runs.package_manifest import Provenance
from paceline.training.loaded_model import load_evaluable_model, read_checkpoint
from paceline.training.run_context import RunContext
from paceline_pages.analysis import OnProgress, analyse, read_record
from paceline_pages.report import versions_now

ROUNDING = 2.0**-20
"""Largest relative difference of two float32 computations of one mean that is rounding."""


@dataclass(frozen=True)
class Finding:
    """A recorded value, and the same now.

    Attributes:
        name: "test.accuracy"; "weights"; or "onnx program", whose value is its largest difference from the weights.
        recorded, now: None if it is not finite, or missing.
        verdict: how close, for people.
    """

    name: str
    recorded: float | None
    now: float | None
    holds: bool
    verdict: str


@dataclass(frozen=True)
class RecordCheck:
    """What holds of the record of the model after ``step``.

    ``then`` and ``now`` are versions; bits depend on ``changed_numerics``.
    """

    step: int
    findings: list[Finding]
    then: Mapping[str, Any]
    changed_numerics: tuple[str, ...] = ()
    now: dict[str, str] = field(default_factory=versions_now)

    @property
    def holds(self) -> bool:
        return all(finding.holds for finding in self.findings)


def check_run(directory: RunDirectory, on_progress: OnProgress, *, task: str = "", tolerance: float = 0) -> RecordCheck:
    """Evaluate a run's model again on every split with recorded metrics; nothing is written.

    Args:
        task: where the task's class is now, if not where it was when the run was trained.
        tolerance: largest accepted absolute difference.

    Raises:
        RunDirectoryError: the run has recorded no metrics.
        UserError: its task or data cannot be built any more.
        CheckpointError: the model's checkpoint is gone or damaged.
    """
    record = read_record(directory)
    if not record.recorded_metrics:
        raise RunDirectoryError(
            f"{directory.path} has recorded no metrics to check: it has not finished, or has neither a "
            f"validation nor a test split. Finish it with: paceline resume {directory.path}"
        )
    findings = []
    for split, recorded in record.recorded_metrics.items():
        analysis = analyse(directory, split=split, task=task, on_progress=on_progress)
        findings += _compare(split, recorded, analysis.metrics, tolerance)
    result = record.result or {}
    for path in scan(directory.checkpoints):
        # The recorded hash is that of the last step's model without averaging.
        if path.name.endswith(f"-v{result.get('state_version', -1):08d}") and "model_sha256" in result:
            saved = read_checkpoint(directory, path, task=task).state["model"]
            findings.append(_weights(model_sha256(saved) == result["model_sha256"]))
    return RecordCheck(analysis.step, findings, record.manifest.get("versions", {}), analysis.changed_numerics)


def check_package(package: Package, on_progress: OnProgress, *, task: str = "", tolerance: float = 0) -> RecordCheck:
    """Evaluate a package's weights again as its export did, and compare its programs with them.

    Args:
        package: verified.
        task: provides the code, and programs that are not trusted are not run; "" uses the task that the package
            names, if the user trusts it or it is a built-in task.
        tolerance: largest accepted absolute difference of a metric.

    Raises:
        UserError: the task or its data cannot be built.
        PackageError: the package does not record how it was evaluated, its weights do not fit the task, or
            the code is not trusted.
    """
    manifest, origin = package.manifest, package.manifest.provenance
    fill = partial(load_weights, content=package.read_weights(), quantization=manifest.quantization)
    with _open_exported(package.path, origin, task_of(package, task or None), fill) as source:
        recorded = origin.data.get(PACKAGE_METRICS, manifest.metrics)
        findings = _compare(source.split, recorded, source.measure(on_progress=on_progress), tolerance)
        if manifest.quantization is None:  # the manifest verifies other weights
            findings.append(_weights(model_sha256(source.model.state_dict()) == origin.model_sha256))
        findings += [_check_program(package, source, kind, on_progress, bool(task)) for kind in manifest.programs]
    return RecordCheck(origin.step, findings, origin.versions)


@contextmanager
def _open_exported(
    package: Path, origin: Provenance, spec: str, load: Callable[[nn.Module], None]
) -> Iterator[TrainedSource]:
    """Build the model of a package as its export evaluated it."""
    config, split = origin.data.get(EVALUATION), origin.data.get("compared_split")
    if not isinstance(config, dict) or split not in SPLITS:
        raise PackageError(
            f"package {package} does not record how it was evaluated, so it cannot be checked. Export it again."
        )
    if unknown := config.keys() - set(EVALUATION_OPTIONS):
        raise PackageError(
            f"package {package} was evaluated with {min(unknown)!r:.80}, which is not an option of this version."
        )
    task = {"spec": spec, "name": load_task_class(spec).__qualname__, "fields": dict(origin.fields)}
    manifest = {"task": task, "config": config}

    def fill(run: RunContext, model: nn.Module, callback: Callback) -> tuple[int, int]:
        load(model.requires_grad_(False))  # quantized weights are integers, which have no gradients
        return origin.step, 0

    with load_evaluable_model(RunDirectory(package), manifest, fill, device="cpu") as evaluated:
        yield TrainedSource(
            trained=evaluated,
            manifest=manifest,
            inference=inference_on(evaluated, split),
            split=split,
            step=origin.step,
            state_version=origin.state_version,
        )


def _compare(
    split: str, recorded: Mapping[str, float | None], measured: Mapping[str, Estimate], tolerance: float
) -> list[Finding]:
    findings = []
    for name, then in recorded.items():
        now = measured[name].value if name in measured else None
        now = None if now != now else now  # NaN is recorded as null
        verdict = "differs"
        if then == now:
            verdict = "bitwise equal"
        elif then is not None and now is not None:
            if abs(now - then) <= ROUNDING * max(abs(then), abs(now)):
                verdict = "equal within rounding"
            elif abs(now - then) <= tolerance:
                verdict = "within --tolerance"
        findings.append(Finding(f"{split}.{name}", then, now, verdict != "differs", verdict))
    return findings


def _weights(are_equal: bool) -> Finding:
    return Finding("weights", None, None, are_equal, "bitwise equal" if are_equal else "differ from the recorded hash")


def _check_program(
    package: Package, source: TrainedSource, kind: str, on_progress: OnProgress, skip_untrusted: bool
) -> Finding:
    then = package.manifest.differences.get(kind)
    finding = partial(Finding, f"{kind} program", None if then is None else then.largest)
    try:
        ((now, scale),) = compare(source, {kind: load_program(package, kind)}, on_progress).values()
    except UntrustedError:
        if not skip_untrusted:
            raise
        return finding(None, True, "not run, because it is not trusted")
    except PacelineError as error:
        return finding(None, False, str(error).splitlines()[0])
    except Exception as error:
        # A reader of a file of another version may raise anything.
        return finding(None, False, f"it cannot be loaded: {type(error).__name__}: {error}"[:300])
    problem = problem_of(now, scale, None, None)
    if then is not None and now.largest <= then.largest and (now.equal_labels or 0) >= (then.equal_labels or 0):
        problem = None  # the user accepted such a difference at the export
    return finding(now.largest, problem is None, problem or "as close to the weights")
