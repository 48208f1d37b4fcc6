"""Export of a trained run as a package."""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from paceline import __version__
from paceline.core.built_in import PARTS
from paceline.core.errors import ConfigError, ExportError
from paceline.core.inference import InferenceSignature, TensorSpec, name_with_unit
from paceline.core.plugins import import_object
from paceline.core.stats import Estimate
from paceline.core.task import Task
from paceline.export.equivalence import OnProgress, batch_inputs, compare, find_faulty_layer, problem_of
from paceline.export.formats import (
    PROGRAM_FILES,
    Compute,
    Quantization,
    capture,
    compute_with,
    load_onnx,
    load_pt2,
    load_weights,
    quantize,
    require_onnx,
    run_layer,
    save_onnx,
    save_pt2,
    weights_bytes,
)
from paceline.export.inferred_signature import InferredModule, restore_signature
from paceline.export.trained_source import (
    EVALUATION,
    INTERVALS,
    PACKAGE_METRICS,
    TrainedSource,
    inference_of,
    open_source,
    source_sha256,
)
from paceline.runs.checkpoint_manifest import FileRecord, write_file
from paceline.runs.checkpoint_state import model_sha256
from paceline.runs.package import Package, trust, verify_package
from paceline.runs.package_manifest import (
    FLOAT_WEIGHTS_BYTES,
    INFERRED,
    INPUTS,
    FormatDifference,
    PackageManifest,
    Provenance,
    plain_name,
)
from paceline.runs.package_registry import LATEST, PackageReference, Registry

# --- What clients send ---


class RowDescription(Protocol):
    """How clients send a row: units, columns and encodings, which the plug-in of ``paceline serve`` describes."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The program's inputs, with the limits that the model sets."""

    def to_bytes(self) -> bytes:
        """Return the content of :data:`INPUTS`."""

    def card(self, manifest: PackageManifest) -> list[str]:
        """Return the paragraphs of the model card."""


def _describe_row(source: TrainedSource) -> RowDescription | None:
    """Observe the data of a trained model; None where that plug-in is not installed."""
    try:
        observe: Callable[[TrainedSource], RowDescription] = import_object(PARTS["export"])
    except ConfigError:
        return None
    return observe(source)


# --- The model card ---


_NOT_IN_TABLE = (INTERVALS, PACKAGE_METRICS, EVALUATION, FLOAT_WEIGHTS_BYTES, INFERRED)


def model_card(manifest: PackageManifest, about: RowDescription | None, task: Task) -> str:
    """Return a page of Markdown from the manifest, the inputs and the task's docstring.

    The sections follow Mitchell et al., "Model Cards for Model Reporting" (https://arxiv.org/abs/1810.03993);
    the metadata at the top, Hugging Face's model cards (https://huggingface.co/docs/hub/model-cards).
    """
    origin = manifest.provenance
    summary = (inspect.getdoc(type(task)) or "").partition("\n")[0].strip()
    if summary.startswith(f"{type(task).__name__}("):  # dataclass's default docstring
        summary = ""
    split = origin.data.get("compared_split", "test")
    parts = [
        _metadata(manifest),
        f"# {manifest.name}",
        *([summary] if summary else []),
        f"Trained with Paceline {origin.versions['paceline']} and torch {origin.versions['torch']} "
        f"for {origin.step:,} "
        f"steps; exported {manifest.created}.",
        "## Inputs and outputs",
        "The first dimension is the batch, of any size.",
        markdown_table(
            ("", "name", "type", "shape"),
            [("input", name, spec.dtype, _shape(spec)) for name, spec in manifest.inputs.items()]
            + [("output", name, spec.dtype, _shape(spec)) for name, spec in manifest.outputs.items()],
        ),
    ]
    parts += _units(manifest)
    parts += [] if about is None else about.card(manifest)
    if manifest.inferred_signature is not None:
        parts.append(f"These were inferred from the data and the model: {manifest.inferred_signature}.")
    if manifest.labels:
        parts.append("Classes: " + ", ".join(f"{number} {label}" for number, label in enumerate(manifest.labels)) + ".")
    parts += [
        "## Evaluation",
        f"The trained model on the {split} split:",
        _metrics(manifest),
        "The formats of this package, compared with the trained model on the same samples:",
        markdown_table(
            ("format", "largest difference of an output", "equal labels", "samples"),
            [
                (
                    kind,
                    f"{difference.largest:.3g}",
                    "" if difference.equal_labels is None else f"{difference.equal_labels:.2%}",
                    f"{difference.samples:,}",
                )
                for kind, difference in manifest.differences.items()
            ],
        ),
    ]
    if manifest.quantization is not None:
        parts.append(
            f"Weights are stored as {manifest.quantization} and converted to float where they are used. The "
            "package's own metrics are those of the quantized weights."
        )
    parts += ["## Use", _use(manifest)]
    parts += [
        "## Provenance",
        markdown_table(
            ("", ""),
            [
                ("task", f"`{origin.task}`"),
                ("run", f"`{origin.run}`"),
                ("checkpoint", f"step {origin.step}, state version {origin.state_version}"),
                ("model SHA-256", f"`{origin.model_sha256}`"),
                ("code SHA-256", "unknown" if origin.code_sha256 is None else f"`{origin.code_sha256}`"),
                *(
                    (f"data: {name}", str(value))
                    for name, value in sorted(origin.data.items())
                    if name not in _NOT_IN_TABLE
                ),
                *((name, version) for name, version in sorted(origin.versions.items())),
            ],
        ),
        *([origin.purity] if origin.purity else []),
        "Hyperparameters: "
        + (", ".join(f"{name} = {value}" for name, value in sorted(origin.fields.items())) or "none")
        + ".",
        "## Limits",
        _limits(manifest),
    ]
    return "\n\n".join(parts) + "\n"


def _units(manifest: PackageManifest) -> list[str]:
    """Describe the outputs' units and the names of their elements."""
    texts = []
    for name, spec in manifest.outputs.items():
        columns = ", ".join(starmap(name_with_unit, spec.columns.items()))
        if described := ", ".join(filter(None, (f"in {spec.unit}" if spec.unit else "", columns))):
            texts.append(f"{name} is {described}.")
    return [" ".join(texts)] if texts else []


def _metadata(manifest: PackageManifest) -> str:
    """Return the YAML front matter; every text is quoted as in JSON, which is valid YAML."""
    origin = manifest.provenance
    dataset = json.dumps(origin.task.rpartition(":")[2] or origin.task)
    lines = ["---", "library_name: paceline", f"tags: {json.dumps(['paceline', *manifest.programs])}"]
    if manifest.metrics:
        lines += [
            "model-index:",
            f"- name: {json.dumps(manifest.name)}",
            "  results:",
            "  - task:",
            "      type: other",
            "    dataset:",
            f"      name: {dataset}",
            f"      type: {dataset}",
            f"      split: {json.dumps(origin.data.get('compared_split', 'test'))}",
            "    metrics:",
        ]
    for name, value in sorted(_own_metrics(manifest).items()):
        lines += [f"    - type: {json.dumps(name)}", f"      value: {value!r}"]
    return "\n".join([*lines, "---"])


def _own_metrics(manifest: PackageManifest) -> Mapping[str, float]:
    """Return the metrics of the package's weights, which may be quantized."""
    own_metrics: Mapping[str, float] = manifest.provenance.data.get(PACKAGE_METRICS, manifest.metrics)
    return own_metrics


def _metrics(manifest: PackageManifest) -> str:
    intervals, own = manifest.provenance.data.get(INTERVALS, {}), _own_metrics(manifest)
    quantized = own is not manifest.metrics
    rows = []
    for name, value in sorted(manifest.metrics.items()):
        interval = intervals.get(name)
        interval_text = f"{interval['low']:.4g} to {interval['high']:.4g} ({interval['method']})" if interval else ""
        rows.append((name, f"{value:.6g}", interval_text, *([f"{own[name]:.6g}"] if quantized else [])))
    return markdown_table(("metric", "value", "95 % interval", *(["this package's"] if quantized else [])), rows)


def _use(manifest: PackageManifest) -> str:
    spec = next(iter(manifest.inputs.values()))
    zeros = ", ".join("1" if size is None else str(size) for size in (1, *spec.shape))
    name = manifest.name
    inputs = ", ".join(f"{key}={value.dtype}" for key, value in manifest.inputs.items())
    lines = [
        f"With the package in a registry, as `{name}` (its inputs: {inputs}):",
        f"```console\n$ paceline serve {name}\n$ paceline predict {name} FILE\n$ paceline report --check {name}\n```",
    ]
    if "onnx" in manifest.programs and len(manifest.inputs) == 1:
        lines.append(
            "```python\n"
            "import numpy, onnxruntime\n"
            "from paceline.runs.package import open_package\n\n"
            f'package = open_package("{name}")\n'
            'session = onnxruntime.InferenceSession(package.read_program("onnx"))\n'
            f'x = numpy.zeros(({zeros}), dtype="{spec.dtype}")\n'
            f"outputs = session.run(None, {{{next(iter(manifest.inputs))!r}: x}})\n"
            "```"
        )
    return "\n\n".join(lines)


def _limits(manifest: PackageManifest) -> str:
    samples = max((difference.samples for difference in manifest.differences.values()), default=0)
    split = manifest.provenance.data.get("compared_split", "test")
    return (
        f"The metrics hold only for data like the {samples:,} samples of the {split} split: not for other sources, "
        "and not for each group among the samples. An interval describes the variation over other samples of the same "
        "kind, and not over other trainings. The users who deploy the model are responsible for its use."
    )


def _shape(spec: TensorSpec) -> str:
    return "(" + ", ".join(["batch", *("any" if size is None else str(size) for size in spec.shape)]) + ")"


def markdown_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )


# --- Export from a run's checkpoint to a package in the registry, refused if a format computes something else


WEIGHTS = "weights.safetensors"
CARD = "README.md"
FORMATS = ("safetensors", "pt2", "onnx")


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """The settings of an export.

    Attributes:
        checkpoint: "best", "last", a step, or None for the best, if any, else the last.
        formats: of "safetensors", "pt2", "onnx"; the weights are always exported.
        quantization: "int8", "bf16" or None.
        name: of the package; by default derived from the task's.
        tag: to point at the package.
        tolerance: largest difference of outputs; the default depends on the quantization.
        task: where the task's class is now, if not where it was when the run was trained.
    """

    run: Path
    checkpoint: str | None = None
    formats: Sequence[str] = ("safetensors", "pt2")
    quantization: Quantization | None = None
    name: str | None = None
    tag: str = LATEST
    tolerance: float | None = None
    task: str = ""


@dataclass(frozen=True, kw_only=True)
class ExportedDirectory:
    """A directory that was written, with the origin and the check of its model.

    Attributes:
        format: a name of :data:`paceline.core.built_in.DIRECTORY_FORMATS`.
        model_sha256: of the trained model's weights.
        split: the samples that were compared, in words.
        difference: from the trained model's outputs.
    """

    directory: str
    format: str
    run: str
    task: str
    step: int
    model_sha256: str
    split: str
    difference: FormatDifference


def export(
    request: ExportRequest,
    registry: Registry,
    on_stage: Callable[[str], None] = lambda stage: None,
    on_progress: OnProgress = lambda done, total: None,
) -> tuple[Package, PackageReference]:
    """Export a run's model into a registry, or change nothing there if the export fails.

    Args:
        on_stage: called with the name of each stage.
        on_progress: called with the number of compared samples and the total.

    Raises:
        UserError: run, checkpoint, task or options cannot work.
        ExportError: a format cannot be written, or does not compute the same as the trained model.
    """
    if unknown := set(request.formats) - set(FORMATS):
        raise ConfigError(f"--format must be of {', '.join(FORMATS)}, but is {min(unknown)!r}.")
    if request.tolerance is not None and not 0 <= request.tolerance < float("inf"):
        raise ConfigError(f"--tolerance must be a number from 0, but is {request.tolerance}.")
    if request.name is not None:
        plain_name(request.name, "--name")
    plain_name(request.tag, "--tag")
    if "onnx" in request.formats:
        require_onnx()
    on_stage("reading the run")
    with open_source(request.run, request.checkpoint, request.task) as source, registry.draft() as draft:
        reference = PackageReference(request.name or default_name(source), request.tag)
        about = _describe_row(source)
        on_stage(f"evaluating {source.split}")
        metrics = source.measure()
        weights = _write_weights(source, request.quantization, draft)
        model, reloaded = _reload(source, weights, request.quantization)
        computes = {
            "safetensors": compute_with(reloaded.module),
            **_write_programs(source, reloaded, request.formats, draft, on_stage),
        }
        on_stage("comparing")
        compared = compare(source, computes, on_progress)
        for kind, (difference, scale) in compared.items():
            problem = problem_of(difference, scale, request.quantization, request.tolerance)
            if problem is not None:
                raise _export_error(source, reloaded, kind, problem, request)
        differences = {kind: difference for kind, (difference, _) in compared.items()}
        data = {**source.data, INTERVALS: _intervals(metrics)}
        if isinstance(source.inference.module, InferredModule):
            data[INFERRED] = True
        if request.quantization is not None:
            on_stage(f"evaluating {source.split}, {request.quantization}")
            data[FLOAT_WEIGHTS_BYTES] = len(weights_bytes(source.model))
            data[PACKAGE_METRICS] = _finite(source.measure(model))
        manifest = _manifest(source, request, reference.name, _finite(metrics), differences, data, about, draft)
        registry.commit(draft, manifest)
    # A package that this user exported is trusted on this machine.
    trust(manifest.digest)
    registry.put_tag(reference, manifest.digest)
    return verify_package(registry.path_of(manifest.digest)), reference


def default_name(source: TrainedSource) -> str:
    """Return a built-in task's own name, or the task's class in lower case."""
    spec = source.spec.rpartition(":")[2] or source.spec
    letters = (c if c.isalnum() and c.isascii() else "-" for c in spec.lower())
    return "".join(letters).strip("-")[:64].strip("-") or "model"


def _write_weights(source: TrainedSource, quantization: Quantization | None, draft: Path) -> bytes:
    model = source.model
    if quantization is not None:
        model = deepcopy(model)
        quantize(model, quantization)
    content = weights_bytes(model)
    write_file(draft / WEIGHTS, [content])
    return content


def _reload(
    source: TrainedSource, weights: bytes, quantization: Quantization | None
) -> tuple[nn.Module, InferenceSignature]:
    """Build the model and its inference signature from the stored weights and the task."""
    model = source.task.build_model().eval().requires_grad_(False)
    load_weights(model, weights, quantization)
    inferred = partial(restore_signature, inputs=source.inference.inputs, outputs=source.inference.outputs)
    return model, inference_of(source.task, model, lambda task, model: inferred(model))


def _write_programs(
    source: TrainedSource,
    reloaded: InferenceSignature,
    formats: Sequence[str],
    draft: Path,
    on_stage: Callable[[str], None],
) -> dict[str, Compute]:
    """Write the requested programs, and return each as read back from its file."""
    kinds = [kind for kind in PROGRAM_FILES if kind in formats]
    if not kinds:
        return {}
    on_stage("tracing")
    program = capture(reloaded, batch_inputs(source, source.first_batch()))
    computes: dict[str, Compute] = {}
    for kind in kinds:
        on_stage(f"writing {kind}")
        path = draft / PROGRAM_FILES[kind]
        if kind == "pt2":
            save_pt2(program, path)
            computes[kind] = load_pt2(path.read_bytes())
        else:
            save_onnx(program, list(reloaded.inputs), list(reloaded.outputs), path)
            computes[kind] = load_onnx(
                path.read_bytes(), list(reloaded.outputs), lambda name: (draft / name).read_bytes()
            )
    return computes


def _export_error(
    source: TrainedSource, reloaded: InferenceSignature, kind: str, problem: str, request: ExportRequest
) -> ExportError:
    quantization = request.quantization
    layer = find_faulty_layer(
        source,
        lambda name, inputs: run_layer(reloaded.module.get_submodule(name), kind, inputs),
        quantization,
        request.tolerance,
    )
    where = layer or (
        "no layer differs on its own, so the cause is between the layers, or the function is not deterministic"
    )
    advice = (
        "Leave --quantize out, or use bf16"
        if quantization == "int8"
        else "Leave --quantize out"
        if quantization
        else "A layer must depend only on its inputs and its state_dict, not on random numbers or counters in Python"
    )
    return ExportError(
        f"the {kind} export does not compute the same as the trained model on the {source.split} split: "
        f"{problem}; {where}. {advice}; or allow the difference with --tolerance. Nothing was exported."
    )


def _manifest(
    source: TrainedSource,
    request: ExportRequest,
    name: str,
    metrics: Mapping[str, float],
    differences: Mapping[str, FormatDifference],
    data: Mapping[str, Any],
    about: RowDescription | None,
    draft: Path,
) -> PackageManifest:
    inference = source.inference
    manifest = PackageManifest(
        name=name,
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        inputs=inference.inputs if about is None else about.specs,
        outputs=inference.outputs,
        provenance=_provenance(source, data),
        files={},
        labels=inference.labels,
        probabilities=inference.probabilities,
        label=inference.label,
        metrics=metrics,
        weights=WEIGHTS,
        programs={kind: PROGRAM_FILES[kind] for kind in differences if kind in PROGRAM_FILES},
        quantization=request.quantization,
        differences=differences,
    )
    if about is not None:
        write_file(draft / INPUTS, [about.to_bytes()])
    write_file(draft / CARD, [model_card(manifest, about, source.task).encode()])
    files = {path.name: _record(path) for path in sorted(draft.iterdir())}
    return replace(manifest, files=files)


def _finite(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    return {name: estimate.value for name, estimate in estimates.items() if abs(estimate.value) < 1e300}


def _intervals(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    return {
        name: {"low": estimate.low, "high": estimate.high, "method": estimate.method}
        for name, estimate in estimates.items()
        if estimate.low is not None and estimate.high is not None and abs(estimate.high) + abs(estimate.low) < 1e300
    }


def _provenance(source: TrainedSource, data: Mapping[str, Any]) -> Provenance:
    return Provenance(
        run=str(source.manifest["id"]),
        task=source.spec,
        fields=source.fields,
        step=source.step,
        state_version=source.state_version,
        model_sha256=model_sha256(source.model.state_dict()),
        data=data,
        versions={
            "paceline": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        code_sha256=source_sha256(source.task),
        purity=source.purity,
    )


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.stat().st_size, digest)
